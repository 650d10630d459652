package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/berth-gpu/berth/api"
)

func (a *app) psCommand() *cobra.Command {
	var all bool
	var f taskFilter
	cmd := &cobra.Command{
		Use:   "ps [--service NAME] [--instance NAME]",
		Short: "List the tasks, a line per container",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c := a.client()
			tasks, err := c.tasks(cmd.Context(), f)
			if err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(tasks)
			}
			insts, err := c.instances(cmd.Context())
			if err != nil {
				return err
			}
			a.printTasks(bare(tasks), bare(insts), all)
			return nil
		},
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "show the stopped tasks too")
	cmd.Flags().StringVar(&f.service, "service", "", "only the tasks of this service")
	cmd.Flags().StringVar(&f.instance, "instance", "", "only the tasks on this machine")
	_ = cmd.RegisterFlagCompletionFunc("service", a.completing(a.serviceNames))
	_ = cmd.RegisterFlagCompletionFunc("instance", a.completing(a.instanceNames))
	return cmd
}

func (a *app) printTasks(tasks []api.Task, insts []api.Instance, all bool) {
	rows := [][]string{{"TASK", "NAME", "INSTANCE", "CONTAINER", "STATUS", "HEALTH", "GPU", "MEMORY", "COMPUTE", "RESTARTS", "AGE", "REASON"}}
	gpus := gpuNames(insts)
	hidden := 0
	for _, t := range tasks {
		if t.LastStatus == api.StatusStopped && !all {
			hidden++
			continue
		}
		rows = append(rows, a.taskRows(t, gpus)...)
	}
	if len(insts) < 2 {
		for i, row := range rows {
			rows[i] = append(row[:2:2], row[3:]...)
		}
	}
	if len(rows) > 1 {
		a.table(rows)
	} else {
		fmt.Fprintln(a.out, "no tasks")
	}
	if hidden > 0 {
		fmt.Fprintf(a.out, "%s not shown; berth ps -a shows them\n", plural(hidden, "stopped task"))
	}
	for _, line := range waitingLines(insts...) {
		fmt.Fprintln(a.out, line)
	}
}

// taskRows is one task: its own columns on the first line, a line per container.
func (a *app) taskRows(t api.Task, gpus map[string]string) [][]string {
	containers := t.Containers
	if len(containers) == 0 {
		containers = []api.Container{{LastStatus: t.LastStatus, GPUIDs: t.GPUIDs}}
	}
	var rows [][]string
	for i, c := range containers {
		id, name, where, old := "", "", "", ""
		if i == 0 {
			id, name, where, old = shortID(t.ID), nameOf(t), dash(t.Instance), age(a.now(), t.CreatedAt)
		}
		memory, compute := "-", "-"
		if c.MemoryInMiB > 0 {
			memory = fmt.Sprintf("%d MiB", c.MemoryInMiB)
		}
		if c.MaxComputePct > 0 {
			compute = fmt.Sprintf("%d%%", c.MaxComputePct)
		}
		rows = append(rows, []string{id, name, where, dash(c.Name), dash(c.LastStatus), dash(c.HealthStatus), gpuList(c.GPUIDs, gpus),
			memory, compute, strconv.Itoa(c.RestartCount), old, rowReason(t, c, i == 0)})
	}
	return rows
}

func gpuList(ids []string, names map[string]string) string {
	var out []string
	for _, id := range ids {
		name, ok := names[id]
		if !ok {
			name = id
		}
		out = append(out, name)
	}
	return dash(strings.Join(out, ","))
}

// rowReason is why a container is as it is; the task's own reason stands on the
// task's first line.
func rowReason(t api.Task, c api.Container, first bool) string {
	var parts []string
	if c.ExitCode != nil {
		parts = append(parts, fmt.Sprintf("exit code %d", *c.ExitCode))
	}
	if c.Reason != "" {
		parts = append(parts, c.Reason)
	}
	if first {
		for _, s := range []string{t.StopCode, t.StoppedReason, t.Reason} {
			if s != "" && s != c.Reason {
				parts = append(parts, s)
			}
		}
		if t.Replaces != "" && t.LastStatus == api.StatusPending {
			parts = append(parts, "replaces "+shortID(t.Replaces))
		}
	}
	return strings.Join(parts, "; ")
}
