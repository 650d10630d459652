package main

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/spf13/cobra"

	"github.com/berth-gpu/berth/api"
)

func (a *app) stopCommand() *cobra.Command {
	var w waitFlags
	cmd := &cobra.Command{
		Use:               "stop TASK...",
		Short:             "Stop tasks: TERM, their stop timeout, then KILL",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completing(a.taskIDs),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := w.limit(); err != nil {
				return err
			}
			return a.stop(cmd.Context(), args, w)
		},
	}
	w.add(cmd, "return when they have stopped", 5*time.Minute)
	return cmd
}

func (a *app) stop(ctx context.Context, refs []string, w waitFlags) error {
	c := a.client()
	// All are found before any is stopped: a name that is none stops nothing.
	tasks := make([]kept[api.Task], 0, len(refs))
	for _, ref := range refs {
		t, err := c.task(ctx, ref)
		if err != nil {
			return err
		}
		tasks = append(tasks, t)
	}
	for i, t := range tasks {
		if t.is.LastStatus == api.StatusStopped {
			continue
		}
		if _, err := c.send(ctx, http.MethodPost, pathOf(api.PathStop, t.is.ID), nil, nil, nil); err != nil {
			return err
		}
		now, err := c.task(ctx, t.is.ID)
		if err != nil {
			return err
		}
		tasks[i] = now
	}
	if w.wait {
		if err := a.awaitStopped(ctx, c, tasks, w.timeout); err != nil {
			return err
		}
	}
	if a.json() {
		if len(tasks) == 1 {
			return a.printJSON(tasks[0])
		}
		return a.printJSON(tasks)
	}
	for _, t := range bare(tasks) {
		if t.LastStatus == api.StatusStopped {
			fmt.Fprintf(a.out, "task %s (%s) is STOPPED: %s\n", shortID(t.ID), nameOf(t), dash(t.StoppedReason))
		} else {
			fmt.Fprintf(a.out, "task %s (%s) is being stopped; it is %s now\n", shortID(t.ID), nameOf(t), t.LastStatus)
		}
	}
	return nil
}

// awaitStopped waits until all tasks are STOPPED, and leaves them as they are then.
func (a *app) awaitStopped(ctx context.Context, c *client, tasks []kept[api.Task], limit time.Duration) error {
	return a.await(ctx, limit, func(ctx context.Context) (bool, string, error) {
		var left []string
		for i, t := range tasks {
			if t.is.LastStatus == api.StatusStopped {
				continue
			}
			now, err := c.task(ctx, t.is.ID)
			if err != nil {
				return false, "", err
			}
			if tasks[i] = now; now.is.LastStatus != api.StatusStopped {
				left = append(left, fmt.Sprintf("task %s (%s) is %s", shortID(now.is.ID), nameOf(now.is), now.is.LastStatus))
			}
		}
		if len(left) == 0 {
			return true, "", nil
		}
		return false, some(left, 1), nil
	})
}
