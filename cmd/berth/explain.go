package main

import (
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/berth-gpu/berth/api"
)

func (a *app) explainCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "explain TASK",
		Short: "Say why a task is where it is, or what each machine lacks for it",
		Long: `explain says why a task is where it is. For one without a place it counts what rules
machines and GPUs out, the nearest miss first. A machine that lacks something itself is
counted once, with all of its GPUs; of any other, each GPU under its own reason.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completing(a.taskIDs),
		RunE: func(cmd *cobra.Command, args []string) error {
			c := a.client()
			t, err := c.task(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			var e api.Explanation
			raw, err := c.get(cmd.Context(), answerTimeout, pathOf(api.PathExplain, t.is.ID), nil, &e)
			if err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(raw)
			}
			fmt.Fprintf(a.out, "task %s (%s) is %s: %s\n", shortID(t.is.ID), nameOf(t.is), e.Status, e.Says)
			if len(e.RuledOut) == 0 {
				return nil
			}
			rows := [][]string{{"REASON", "MACHINES", "GPUS", "NEAREST AT", "NEAREST MISS"}}
			machines, gpus := 0, 0
			for _, r := range e.RuledOut {
				machines, gpus = machines+r.Machines, gpus+r.GPUs
				rows = append(rows, []string{r.Code, strconv.Itoa(r.Machines), strconv.Itoa(r.GPUs), dash(r.Instance), r.Nearest})
			}
			rows = append(rows, []string{"ruled out", fmt.Sprintf("%d of %d", machines, e.Machines), fmt.Sprintf("%d of %d", gpus, e.GPUs)})
			fmt.Fprintln(a.out)
			a.table(rows)
			return nil
		},
	}
}
