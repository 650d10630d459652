package main

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/berth-gpu/berth/api"
)

// serviceTimeout is how long --wait gives a service unless told otherwise: image pulls,
// and a stop timeout per wave of tasks.
const serviceTimeout = 10 * time.Minute

// The states of a service, as in ECS.
const (
	serviceDraining = "DRAINING"
	serviceInactive = "INACTIVE"
)

func (a *app) serviceCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "service",
		Aliases: []string{"services"},
		Short:   "Keep a number of tasks running: create, scale, update, delete, ls",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return usageError("give create, scale, update, delete or ls; berth service --help tells them apart")
		},
	}
	cmd.AddCommand(a.serviceCreateCommand(), a.serviceScaleCommand(), a.serviceUpdateCommand(), a.serviceDeleteCommand(), a.serviceLsCommand())
	return cmd
}

// serviceFlags are what create and update set.
type serviceFlags struct {
	file            string
	count           int
	minHealthy, max int
	stopAfter       time.Duration
	waitFlags
}

func (a *app) serviceFlags(cmd *cobra.Command, f *serviceFlags) {
	a.definitionFlag(cmd, &f.file)
	cmd.Flags().IntVar(&f.count, "count", 1, "how many tasks are kept running")
	cmd.Flags().IntVar(&f.minHealthy, "min-healthy", 100, "per cent of the count that stay up during an update")
	cmd.Flags().IntVar(&f.max, "max", 200, "per cent of the count that there may be during an update")
	cmd.Flags().DurationVar(&f.stopAfter, "disconnect-stop-after", 0, "a machine that is cut off stops the tasks itself after this long, so that no two copies run (0: never)")
	f.add(cmd, "return when the count runs", serviceTimeout)
}

func (f *serviceFlags) check() error {
	switch {
	case f.count < 0:
		return usageError("--count: %d is less than 0", f.count)
	case f.minHealthy < 0 || f.minHealthy > 100:
		return usageError("--min-healthy: %d is not within 0 and 100 (per cent)", f.minHealthy)
	case f.max < 100:
		return usageError("--max: %d is less than 100 (per cent)", f.max)
	case f.stopAfter < 0 || f.stopAfter%time.Second != 0:
		return usageError("--disconnect-stop-after: %s is not a number of whole seconds from 0 up", f.stopAfter)
	}
	return f.limit()
}

func (a *app) serviceCreateCommand() *cobra.Command {
	var f serviceFlags
	cmd := &cobra.Command{
		Use:   "create NAME -f FILE --count N",
		Short: "Make a service: N tasks of a task definition, started again wherever one ends",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.check(); err != nil {
				return err
			}
			definition, err := a.definition(f.file)
			if err != nil {
				return err
			}
			s := api.Service{Name: args[0], Definition: definition, DesiredCount: f.count, MinimumHealthyPercent: f.minHealthy,
				MaximumPercent: f.max, StopAfterSeconds: int(f.stopAfter / time.Second)}
			return a.changeService(cmd.Context(), http.MethodPost, api.PathServices, s, f.waitFlags)
		},
	}
	a.serviceFlags(cmd, &f)
	_ = cmd.MarkFlagRequired("file")
	_ = cmd.MarkFlagRequired("count")
	return cmd
}

func (a *app) serviceUpdateCommand() *cobra.Command {
	var f serviceFlags
	cmd := &cobra.Command{
		Use:               "update NAME [-f FILE] [--count N] [--min-healthy P] [--max P]",
		Short:             "Change a service; a new task definition is rolled out",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completing(a.serviceNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.check(); err != nil {
				return err
			}
			var u api.ServiceUpdate
			given := 0
			for name, set := range map[string]func() error{
				"file":                  func() (err error) { u.Definition, err = a.definition(f.file); return err },
				"count":                 func() error { u.DesiredCount = &f.count; return nil },
				"min-healthy":           func() error { u.MinimumHealthyPercent = &f.minHealthy; return nil },
				"max":                   func() error { u.MaximumPercent = &f.max; return nil },
				"disconnect-stop-after": func() error { s := int(f.stopAfter / time.Second); u.StopAfterSeconds = &s; return nil },
			} {
				if !cmd.Flags().Changed(name) {
					continue
				}
				given++
				if err := set(); err != nil {
					return err
				}
			}
			if given == 0 {
				return usageError("nothing to change: give --file, --count, --min-healthy, --max or --disconnect-stop-after")
			}
			return a.changeService(cmd.Context(), http.MethodPost, pathOf(api.PathService, args[0]), u, f.waitFlags)
		},
	}
	a.serviceFlags(cmd, &f)
	return cmd
}

func (a *app) serviceScaleCommand() *cobra.Command {
	var w waitFlags
	cmd := &cobra.Command{
		Use:               "scale NAME N",
		Short:             "Change how many tasks a service keeps running",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completing(a.serviceNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			n, err := strconv.Atoi(args[1])
			if err != nil || n < 0 {
				return usageError("N: %q is not a number of tasks from 0 up", args[1])
			}
			if err := w.limit(); err != nil {
				return err
			}
			return a.changeService(cmd.Context(), http.MethodPost, pathOf(api.PathService, args[0]), api.ServiceUpdate{DesiredCount: &n}, w)
		},
	}
	w.add(cmd, "return when the count runs", serviceTimeout)
	return cmd
}

func (a *app) serviceDeleteCommand() *cobra.Command {
	var w waitFlags
	cmd := &cobra.Command{
		Use:               "delete NAME",
		Short:             "Stop a service's tasks and forget it",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completing(a.serviceNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := w.limit(); err != nil {
				return err
			}
			c := a.client()
			var s kept[api.Service]
			if _, err := c.send(cmd.Context(), http.MethodDelete, pathOf(api.PathService, args[0]), nil, nil, &s); err != nil {
				return err
			}
			if !w.wait {
				if a.json() {
					return a.printJSON(s)
				}
				fmt.Fprintf(a.out, "service %s is being deleted; its tasks are stopped\n", args[0])
				return nil
			}
			if err := a.awaitDeleted(cmd.Context(), c, args[0], w.timeout); err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(s)
			}
			fmt.Fprintf(a.out, "service %s is deleted\n", args[0])
			return nil
		},
	}
	w.add(cmd, "return when its tasks have stopped", serviceTimeout)
	return cmd
}

func (a *app) serviceLsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "ls",
		Short: "List the services",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			services, err := list[api.Service](cmd.Context(), a.client(), api.PathServices, nil, nil)
			if err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(services)
			}
			if len(services) == 0 {
				fmt.Fprintln(a.out, "no services")
				return nil
			}
			rows := [][]string{{"NAME", "STATUS", "DEFINITION", "RUNNING", "PENDING", "MIN", "MAX", "STOP AFTER", "AGE", "REASON"}}
			for _, s := range bare(services) {
				stop := "-"
				if s.StopAfterSeconds > 0 {
					stop = (time.Duration(s.StopAfterSeconds) * time.Second).String()
				}
				rows = append(rows, []string{s.Name, s.Status, s.TaskDefinition, fmt.Sprintf("%d of %d", s.RunningCount, s.DesiredCount), strconv.Itoa(s.PendingCount),
					fmt.Sprintf("%d%%", s.MinimumHealthyPercent), fmt.Sprintf("%d%%", s.MaximumPercent), stop, age(a.now(), s.CreatedAt), s.Reason})
			}
			a.table(rows)
			return nil
		},
	}
}

// changeService asks for a new or changed service, and waits for it where w says so.
func (a *app) changeService(ctx context.Context, method, path string, in any, w waitFlags) error {
	c := a.client()
	var s kept[api.Service]
	if _, err := c.send(ctx, method, path, nil, in, &s); err != nil {
		return err
	}
	if w.wait {
		var err error
		if s, err = a.awaitService(ctx, c, s, w.timeout); err != nil {
			return err
		}
	}
	if a.json() {
		return a.printJSON(s)
	}
	if w.wait {
		fmt.Fprintf(a.out, "service %s runs %d of %s\n", s.is.Name, s.is.DesiredCount, s.is.TaskDefinition)
	} else {
		fmt.Fprintf(a.out, "service %s wants %d of %s\n", s.is.Name, s.is.DesiredCount, s.is.TaskDefinition)
	}
	return nil
}

// awaitService waits until the service's count runs, of its task definition. A list that
// does not show yet what was answered is not believed; once it did, a later change by
// somebody else is followed.
func (a *app) awaitService(ctx context.Context, c *client, asked kept[api.Service], limit time.Duration) (kept[api.Service], error) {
	seen := false
	s := asked
	err := a.await(ctx, limit, func(ctx context.Context) (bool, string, error) {
		found, err := c.service(ctx, asked.is.Name)
		if err != nil {
			return false, "", err
		}
		if len(found) == 0 && seen || len(found) > 0 && found[0].is.Status == serviceDraining {
			return false, "", fmt.Errorf("service %s was deleted meanwhile", asked.is.Name)
		}
		tasks, err := c.tasks(ctx, taskFilter{service: asked.is.Name})
		if err != nil {
			return false, "", err
		}
		if len(found) > 0 && (seen || found[0].is.DesiredCount == asked.is.DesiredCount && found[0].is.TaskDefinition == asked.is.TaskDefinition) {
			seen, s = true, found[0]
		}
		done, says := serviceFares(s.is, bare(tasks))
		return seen && done, says, nil
	})
	return s, err
}

// serviceFares says whether the service's count runs, and how its tasks fare. Tasks that
// are being stopped are not waited for: a lost machine may keep one for long.
func serviceFares(s api.Service, tasks []api.Task) (done bool, says string) {
	var current []api.Task
	running, old, stopping := 0, 0, 0
	for _, t := range tasks {
		switch {
		case t.LastStatus == api.StatusStopped:
		case t.LastStatus == api.StatusDeactivating || t.DesiredStatus == api.StatusStopped:
			stopping++
		case t.Definition != "" && t.Definition != s.TaskDefinition:
			old++
		default:
			current = append(current, t)
			if t.LastStatus == api.StatusRunning {
				running++
			}
		}
	}
	says = fmt.Sprintf("service %s (%d wanted): %s", s.Name, s.DesiredCount, tally(current))
	if old > 0 {
		says += fmt.Sprintf(", %d of an older definition", old)
	}
	if stopping > 0 {
		says += fmt.Sprintf(", %d stopping", stopping)
	}
	if s.Reason != "" && len(current) < s.DesiredCount { // something holds it back
		says += "; " + s.Reason
	}
	return running == s.DesiredCount && len(current) == running && old == 0, says
}

func (a *app) awaitDeleted(ctx context.Context, c *client, name string, limit time.Duration) error {
	return a.await(ctx, limit, func(ctx context.Context) (bool, string, error) {
		found, err := c.service(ctx, name)
		if err != nil {
			return false, "", err
		}
		if len(found) == 0 || found[0].is.Status == serviceInactive {
			return true, "", nil
		}
		tasks, err := c.tasks(ctx, taskFilter{service: name})
		if err != nil {
			return false, "", err
		}
		var left []api.Task
		for _, t := range bare(tasks) {
			if t.LastStatus != api.StatusStopped {
				left = append(left, t)
			}
		}
		return false, fmt.Sprintf("service %s: %s", name, tally(left)), nil
	})
}

// service is the service of that name as a list of one, or none.
func (c *client) service(ctx context.Context, name string) ([]kept[api.Service], error) {
	return list(ctx, c, api.PathServices, nil, func(s api.Service) bool { return s.Name == name })
}
