package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/berth-gpu/berth/api"
)

// maxDefinition bounds what is read of a file; the server takes less.
const maxDefinition = 1 << 20

func (a *app) runCommand() *cobra.Command {
	var w waitFlags
	var file string
	req := api.RunTask{}
	cmd := &cobra.Command{
		Use:   "run -f FILE [--count N] [--wait]",
		Short: "Run tasks of a task definition on whichever GPUs have room",
		Long: `run asks the server for tasks and prints their ids once they are stored: from then on
none is lost. With --wait it shows how they fare, follows a task to the one that takes
its place, and ends when all have ended: with exit code 0 if all essential containers
ended with 0, else 1.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if req.Count < 1 || req.Count > 100 {
				return usageError("--count: %d is not within 1 and 100", req.Count)
			}
			if err := w.limit(); err != nil {
				return err
			}
			var err error
			if req.Definition, err = a.definition(file); err != nil {
				return err
			}
			req.ClientToken = rand.Text()
			return a.runTasks(cmd.Context(), req, w)
		},
	}
	a.definitionFlag(cmd, &file)
	_ = cmd.MarkFlagRequired("file")
	cmd.Flags().IntVar(&req.Count, "count", 1, "how many tasks, 1 to 100")
	cmd.Flags().BoolVar(&req.Reschedule, "reschedule", false, "start a task elsewhere when its machine or GPU is lost")
	w.add(cmd, "return when the tasks have ended", 0)
	return cmd
}

func (a *app) definitionFlag(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVarP(file, "file", "f", "", "the task definition, as JSON; - reads it from stdin")
	_ = cmd.MarkFlagFilename("file", "json")
}

// definition reads a task definition. The server judges it; here it has to be JSON, to
// be sent at all.
func (a *app) definition(file string) (json.RawMessage, error) {
	name, from := file, io.Reader(nil)
	switch {
	case file == "-" && a.in == nil:
		return nil, usageError("--file: stdin is closed")
	case file == "-":
		name, from = "stdin", a.in
	default:
		f, err := os.Open(file)
		if err != nil {
			return nil, usageError("--file: %v", err)
		}
		defer f.Close()
		from = f
	}
	raw, err := io.ReadAll(io.LimitReader(from, maxDefinition+1))
	if err != nil {
		return nil, usageError("--file: %v", err)
	}
	if len(raw) > maxDefinition {
		return nil, usageError("--file: %s has more than %d bytes; a task definition has at most 64 KiB", name, maxDefinition)
	}
	var any json.RawMessage
	if err := json.Unmarshal(raw, &any); err != nil {
		line := 1 + bytes.Count(raw[:min(offset(err), len(raw))], []byte("\n"))
		return nil, usageError("--file: %s, line %d: %v. A task definition is JSON; docs/task-definition.md shows one", name, line, err)
	}
	return any, nil
}

func offset(err error) int {
	if s, ok := err.(*json.SyntaxError); ok {
		return int(s.Offset)
	}
	return 0
}

func (a *app) runTasks(ctx context.Context, req api.RunTask, w waitFlags) error {
	c := a.client()
	var answer struct {
		Tasks []kept[api.Task] `json:"tasks"`
	}
	raw, err := c.send(ctx, http.MethodPost, api.PathTasks, nil, req, &answer)
	if err != nil {
		return err
	}
	if a.json() && !w.wait {
		return a.printJSON(raw)
	}
	var ids []string
	for _, t := range answer.Tasks {
		ids = append(ids, t.is.ID)
		if !a.json() {
			fmt.Fprintln(a.out, t.is.ID)
		}
	}
	if !w.wait {
		return nil
	}
	l := &line{ids: ids, now: map[string]kept[api.Task]{}, reschedule: req.Reschedule}
	for _, t := range answer.Tasks {
		l.now[t.is.ID] = t
	}
	err = a.await(ctx, w.timeout, func(ctx context.Context) (bool, string, error) {
		tasks, err := c.tasks(ctx, taskFilter{lines: ids})
		if err != nil {
			return false, "", err
		}
		done := l.look(tasks)
		return done, l.says(), nil
	})
	if err != nil {
		return err
	}
	return a.verdicts(l, essentials(req.Definition))
}

// line follows each task that was asked for to the one that has its place now.
type line struct {
	ids        []string                  // as asked for
	now        map[string]kept[api.Task] // by the id that was asked for
	reschedule bool
	ended      map[string]bool // ended by no doing of its own, without a successor, when last looked at
}

// look takes the newest list and says whether all have ended for good. What the list does
// not have yet (the answer to run may overtake it) stays as it was.
func (l *line) look(tasks []kept[api.Task]) (done bool) {
	byID, successor := map[string]kept[api.Task]{}, map[string]kept[api.Task]{}
	for _, t := range tasks {
		byID[t.is.ID] = t
		if t.is.Replaces != "" {
			successor[t.is.Replaces] = t
		}
	}
	done = true
	ended := map[string]bool{}
	for _, id := range l.ids {
		t := l.now[id]
		if newer, ok := byID[t.is.ID]; ok {
			t = newer
		}
		for range tasks { // a bound: no line is longer
			next, ok := successor[t.is.ID]
			if !ok {
				break
			}
			t = next
		}
		l.now[id] = t
		if t.is.LastStatus != api.StatusStopped {
			done = false
		} else if l.reschedule && t.is.Infrastructure && !l.ended[t.is.ID] {
			ended[t.is.ID], done = true, false // its successor may be on the way: look once more
		}
	}
	maps.Copy(ended, l.ended)
	l.ended = ended
	return done
}

// says is how they fare, in one line.
func (l *line) says() string {
	tasks := make([]api.Task, len(l.ids))
	for i, id := range l.ids {
		tasks[i] = l.now[id].is
	}
	if len(tasks) == 1 {
		return fmt.Sprintf("task %s (%s) %s", shortID(tasks[0].ID), nameOf(tasks[0]), fares(tasks[0]))
	}
	return tally(tasks)
}

// fares is how one task fares, in a few words.
func fares(t api.Task) string {
	reason := ""
	if t.Reason != "" {
		reason = ": " + t.Reason
	}
	switch {
	case unplaced(t):
		return "waits for a place" + reason
	case t.LastStatus == api.StatusPending:
		return "starts on " + t.Instance + reason
	case t.LastStatus == api.StatusRunning:
		return "runs on " + t.Instance
	case t.LastStatus == api.StatusStopped:
		return "has ended"
	}
	return "is " + t.LastStatus + reason
}

// tally counts tasks by how they fare, and says what the first without a place lacks.
func tally(tasks []api.Task) string {
	var running, starting, waiting, stopping, ended int
	why := ""
	for _, t := range tasks {
		switch {
		case unplaced(t):
			if waiting++; why == "" && t.Reason != "" {
				why = " (" + t.Reason + ")"
			}
		case t.LastStatus == api.StatusStopped:
			ended++
		case t.LastStatus == api.StatusDeactivating || t.DesiredStatus == api.StatusStopped:
			stopping++
		case t.LastStatus == api.StatusPending:
			starting++
		default:
			running++
		}
	}
	var parts []string
	for _, p := range []struct {
		n    int
		says string
	}{{running, "running"}, {starting, "starting"}, {waiting, "without a place" + why}, {stopping, "stopping"}, {ended, "ended"}} {
		if p.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", p.n, p.says))
		}
	}
	if len(parts) == 0 {
		return "no task"
	}
	return strings.Join(parts, ", ")
}

// essentials are the names of the containers whose end is the task's: all but those
// that say "essential": false.
func essentials(definition json.RawMessage) []string {
	var d struct {
		Containers []struct {
			Name      string `json:"name"`
			Essential *bool  `json:"essential"`
		} `json:"containerDefinitions"`
	}
	_ = json.Unmarshal(definition, &d) // the server has taken it
	var names []string
	for _, c := range d.Containers {
		if c.Essential == nil || *c.Essential {
			names = append(names, c.Name)
		}
	}
	return names
}

// verdicts prints how each task ended; a bad end of any is berth's too.
func (a *app) verdicts(l *line, essential []string) error {
	failed := false
	all := make([]kept[api.Task], 0, len(l.ids))
	for _, id := range l.ids {
		t := l.now[id]
		all = append(all, t)
		well := true
		var codes []string
		for _, c := range t.is.Containers {
			if !slices.Contains(essential, c.Name) {
				continue
			}
			if c.ExitCode == nil {
				well = false
				codes = append(codes, c.Name+" without an exit code")
				continue
			}
			well = well && *c.ExitCode == 0
			codes = append(codes, fmt.Sprintf("%s with exit code %d", c.Name, *c.ExitCode))
		}
		well = well && len(codes) == len(essential)
		failed = failed || !well
		if a.json() {
			continue
		}
		says := "ended: " + strings.Join(codes, ", ")
		if len(codes) == 0 {
			says = "ended before a container was made"
		}
		if !well {
			for _, s := range []string{t.is.StopCode, t.is.StoppedReason} {
				if s != "" {
					says += "; " + s
				}
			}
		}
		fmt.Fprintf(a.out, "task %s (%s) %s\n", shortID(t.is.ID), nameOf(t.is), says)
	}
	if a.json() {
		if err := a.printJSON(all); err != nil {
			return err
		}
	}
	if failed {
		return &silent{exitFailed}
	}
	return nil
}
