package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/berth-gpu/berth/api"
)

func (a *app) logsCommand() *cobra.Command {
	var follow bool
	var tail int
	cmd := &cobra.Command{
		Use:   "logs [-f] [--tail N] TASK[/CONTAINER]",
		Short: "Print what a container wrote to stdout and stderr",
		Args:  cobra.ExactArgs(1),

		ValidArgsFunction: a.completing(a.logTargets),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("tail") && tail < 1 {
				return usageError("--tail: %d is less than 1; leave it out for all lines", tail)
			}
			ref, container, named := strings.Cut(args[0], "/")
			if named && container == "" {
				return usageError("%q: the container's name is empty", args[0])
			}
			c := a.client()
			t, err := c.task(cmd.Context(), ref)
			if err != nil {
				return err
			}
			if container, err = oneContainer(t.is, container); err != nil {
				return err
			}
			return a.printLogs(cmd.Context(), c, t.is, container, follow, tail)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until the container has ended")
	cmd.Flags().IntVar(&tail, "tail", 0, "only the last N lines (default all)")
	return cmd
}

// oneContainer is the container that is meant; a task of one needs no name.
func oneContainer(t api.Task, name string) (string, error) {
	var names []string
	for _, c := range t.Containers {
		if c.Name == name {
			return name, nil
		}
		names = append(names, c.Name)
	}
	switch {
	case len(names) == 0:
		return "", fmt.Errorf("task %s (%s) has no container yet: it is %s", shortID(t.ID), nameOf(t), t.LastStatus)
	case name != "":
		return "", fmt.Errorf("task %s (%s) has no container %q; it has %s", shortID(t.ID), nameOf(t), name, strings.Join(names, ", "))
	case len(names) > 1:
		return "", fmt.Errorf("task %s (%s) has %d containers; name one of them: %s/%s", shortID(t.ID), nameOf(t), len(names),
			shortID(t.ID), strings.Join(names, ", "+shortID(t.ID)+"/"))
	}
	return names[0], nil
}

func (a *app) printLogs(ctx context.Context, c *client, t api.Task, container string, follow bool, tail int) error {
	query := url.Values{"container": {container}}
	if follow {
		query.Set("follow", "1")
	}
	if tail > 0 {
		query.Set("tail", strconv.Itoa(tail))
	}
	body, err := c.open(ctx, http.MethodGet, pathOf(api.PathLogs, t.ID), query, nil)
	if err != nil {
		return err
	}
	defer body.Close()
	if a.json() {
		err = jsonLines(a.out, body, t.ID, container)
	} else {
		_, err = io.Copy(a.out, body)
	}
	if follow && errors.Is(ctx.Err(), context.Canceled) {
		return nil // Ctrl-C is how following ends
	}
	if err != nil {
		return c.explain(err)
	}
	return nil
}

// jsonLines writes each line of a log as one JSON object.
func jsonLines(w io.Writer, r io.Reader, task, container string) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			if e := enc.Encode(logLine{task, container, strings.TrimSuffix(line, "\n")}); e != nil {
				return e
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

type logLine struct {
	TaskID    string `json:"taskId"`
	Container string `json:"container"`
	Message   string `json:"message"`
}
