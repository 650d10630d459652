package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/berth-gpu/berth/api"
)

// waitEvery is how often stop --wait looks whether the task has stopped.
const waitEvery = 200 * time.Millisecond

func (a *app) stopCommand() *cobra.Command {
	var wait bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "stop TASK",
		Short: "Stop a task: TERM, its stop timeout, then KILL",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c := a.client()
			t, err := c.task(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if t.LastStatus != api.StatusStopped {
				if err := c.post(cmd.Context(), taskPath(api.PathStop, t.ID)); err != nil {
					return err
				}
				if t, err = c.task(cmd.Context(), t.ID); err != nil {
					return err
				}
			}
			if wait {
				if t, err = c.stopped(cmd.Context(), t, timeout); err != nil {
					return err
				}
			}
			if a.json() {
				return a.printJSON(t)
			}
			if t.LastStatus == api.StatusStopped {
				fmt.Fprintf(a.out, "task %s (%s) is STOPPED: %s\n", shortID(t.ID), t.Name, dash(t.StoppedReason))
			} else {
				fmt.Fprintf(a.out, "task %s (%s) is being stopped; it is %s now\n", shortID(t.ID), t.Name, t.LastStatus)
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&wait, "wait", false, "return when the task has stopped")
	cmd.Flags().DurationVar(&timeout, "timeout", 5*time.Minute, "with --wait: give up after this long")
	return cmd
}

// stopped waits until the task is STOPPED, for limit at most.
func (c *client) stopped(ctx context.Context, t api.Task, limit time.Duration) (api.Task, error) {
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	tick := time.NewTicker(waitEvery)
	defer tick.Stop()
	for t.LastStatus != api.StatusStopped {
		select {
		case <-ctx.Done():
			return t, fmt.Errorf("interrupted while task %s is %s; it goes on stopping", shortID(t.ID), t.LastStatus)
		case <-deadline.C:
			return t, fmt.Errorf("task %s is still %s after %s; berth logs %s says what it does", shortID(t.ID), t.LastStatus, limit, shortID(t.ID))
		case <-tick.C:
		}
		now, err := c.task(ctx, t.ID)
		if err != nil {
			return t, err
		}
		t = now
	}
	return t, nil
}
