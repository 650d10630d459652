package main

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/spf13/cobra"

	"github.com/berth-gpu/berth/api"
)

// drainTimeout is how long --wait gives a machine unless told otherwise.
const drainTimeout = 30 * time.Minute

func (a *app) drainCommand() *cobra.Command {
	var w waitFlags
	var dryRun, undo bool
	cmd := &cobra.Command{
		Use:   "drain INSTANCE [--dry-run | --undo]",
		Short: "Move a machine's service tasks away, and start nothing on it",
		Long: `drain starts nothing more on a machine and moves its service tasks: each one's replacement
runs elsewhere first where there is room. Standalone tasks stay until they end.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completing(a.instanceNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := w.limit(); err != nil {
				return err
			}
			return a.drain(cmd.Context(), args[0], dryRun, undo, w)
		},
	}
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "only say what would become of its tasks")
	cmd.Flags().BoolVar(&undo, "undo", false, "let tasks start on it again")
	w.add(cmd, "return when the tasks that move have left", drainTimeout)
	cmd.MarkFlagsMutuallyExclusive("dry-run", "undo", "wait")
	return cmd
}

func (a *app) deregisterCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "deregister INSTANCE [--force]",
		Short: "Forget a machine that does not come back",
		Long: `deregister takes a machine out of the fleet whose agent is not heard and will not be.
With --force it does so although tasks may still run there: they count as stopped, and an
agent that comes back after all joins anew and stops them.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completing(a.instanceNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			query := url.Values{}
			if force {
				query.Set("force", "1")
			}
			raw, err := a.client().send(cmd.Context(), http.MethodDelete, pathOf(api.PathInstance, args[0]), query, nil, nil)
			if err != nil {
				return err
			}
			if a.json() && len(raw) > 0 {
				return a.printJSON(raw)
			}
			fmt.Fprintf(a.out, "%s has left the fleet\n", args[0])
			return nil
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "although tasks may still run on it")
	return cmd
}

func (a *app) drain(ctx context.Context, name string, dryRun, undo bool, w waitFlags) error {
	query := url.Values{}
	if dryRun {
		query.Set("dryRun", "1")
	}
	if undo {
		query.Set("undo", "1")
	}
	c := a.client()
	var d api.Drain
	raw, err := c.send(ctx, http.MethodPost, pathOf(api.PathDrain, name), query, nil, &d)
	if err != nil {
		return err
	}
	if w.wait {
		if err := a.awaitDrained(ctx, c, d, w.timeout); err != nil {
			return err
		}
	}
	switch {
	case a.json():
		return a.printJSON(raw)
	case undo:
		fmt.Fprintf(a.out, "%s is ACTIVE again\n", name)
		return nil
	case w.wait:
		fmt.Fprintf(a.out, "%s is drained\n", name)
		return nil
	case dryRun:
		fmt.Fprintf(a.out, "nothing was done. To drain %s would mean:\n", name)
	default:
		fmt.Fprintf(a.out, "%s is DRAINING: nothing more starts on it\n", name)
	}
	if len(d.Moves) == 0 {
		fmt.Fprintln(a.out, "no task is on it")
		return nil
	}
	rows := [][]string{{"TASK", "SERVICE", "FAMILY", "TO", "WHAT BECOMES OF IT"}}
	for _, m := range d.Moves {
		rows = append(rows, []string{shortID(m.Task), dash(m.Service), m.Family, dash(m.Instance), m.Says})
	}
	a.table(rows)
	return nil
}

// awaitDrained waits until the tasks that move have left the machine.
func (a *app) awaitDrained(ctx context.Context, c *client, d api.Drain, limit time.Duration) error {
	moving := map[string]bool{}
	for _, m := range d.Moves {
		moving[m.Task] = m.Moving
	}
	return a.await(ctx, limit, func(ctx context.Context) (bool, string, error) {
		tasks, err := c.tasks(ctx, taskFilter{instance: d.Instance})
		if err != nil {
			return false, "", err
		}
		left, stay := 0, 0
		for _, t := range bare(tasks) {
			switch {
			case t.LastStatus == api.StatusStopped:
			case moving[t.ID] || serviceOf(t) != "":
				left++
			default:
				stay++
			}
		}
		says := fmt.Sprintf("%s: %s to leave", d.Instance, plural(left, "task"))
		if stay > 0 {
			says += "; " + stays(stay)
		}
		return left == 0, says, nil
	})
}

func stays(n int) string {
	if n == 1 {
		return "1 standalone task stays until it ends, or berth stop ends it"
	}
	return fmt.Sprintf("%d standalone tasks stay until they end, or berth stop ends them", n)
}
