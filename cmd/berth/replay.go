package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/berth-gpu/berth/api/flight"
	"github.com/berth-gpu/berth/healthcheck"
	"github.com/berth-gpu/berth/mps"
	"github.com/berth-gpu/berth/placement/fit"
	"github.com/berth-gpu/berth/placement/replace"
	"github.com/berth-gpu/berth/placement/service"
)

// machines are the pure machines whose decisions agent and server record.
var machines = map[string]flight.Again{
	"mps.Step":            mps.Replay,
	"healthcheck.Held":    flight.Of(healthcheck.Held),
	"healthcheck.Machine": flight.Of(healthcheck.Examination.Health),
	"fit.Place":           flight.Of(fit.PlaceIn.Do),
	"service.Step":        flight.Of(service.Input.Do),
	"service.Standalone":  flight.Of(service.Alone.Do),
	"replace.Step":        flight.Of(replace.StepIn.Do),
	"replace.Due":         flight.Of(replace.DueIn.Do),
}

// differencesShown is how many places of the first decision that differs are printed.
const differencesShown = 20

func (a *app) replayCommand() *cobra.Command {
	var machine, key string
	cmd := &cobra.Command{
		Use:   "replay [--machine M] [--key K] FILE|FOLDER",
		Short: "Run recorded decisions again and show the first that is another one now; exit code 1 when one is",
		Long: `replay reads what a flight recorder kept: the folder flight under an agent's
stateDir or a server's dataDir, or one file of it, also while it is written to. Each
decision is run again through the code of this berth, and compared with what was
decided then.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			report, err := flight.Replay(args[0], machines, func(e flight.Entry) bool {
				return (machine == "" || e.Machine == machine) && (key == "" || e.Key == key)
			})
			if err != nil {
				return err
			}
			if len(report.Machines) == 0 {
				return fmt.Errorf("%s: no recorded decision%s", args[0], asked(machine, key))
			}
			if a.json() {
				err = a.printJSON(report)
			} else {
				a.printReport(report)
			}
			if err == nil && !report.Agrees() {
				err = &silent{exitFailed}
			}
			return err
		},
	}
	cmd.Flags().StringVar(&machine, "machine", "", "only what this machine decided, such as mps.Step")
	cmd.Flags().StringVar(&key, "key", "", "only what was decided on this: a GPU's uuid, a service, a task, a replacement")
	return cmd
}

func asked(machine, key string) string {
	text := ""
	if machine != "" {
		text += " of machine " + machine
	}
	if key != "" {
		text += " on " + key
	}
	return text
}

func (a *app) printReport(r flight.Report) {
	rows := [][]string{{"MACHINE", "AS RECORDED", "DIFFER", "NOT RUN"}}
	for _, t := range r.Machines {
		rows = append(rows, []string{t.Machine, fmt.Sprint(t.Agree), fmt.Sprint(t.Differ), fmt.Sprint(t.Failed)})
	}
	a.table(rows)
	if r.Missing > 0 {
		fmt.Fprintf(a.out, "\n%s not kept when made\n", plural(r.Missing, "decision"))
	}
	for _, line := range r.Unread {
		fmt.Fprintln(a.out, line)
	}
	if r.First == nil {
		return
	}
	f := r.First
	fmt.Fprintf(a.out, "\nThe first that is not as recorded: entry %d, %s on %s, %s\n", f.Seq, f.Machine, f.Key, f.At.UTC().Format(time.RFC3339Nano))
	if f.Error != "" {
		fmt.Fprintf(a.out, "it could not be run: %s\n", f.Error)
		return
	}
	rows = [][]string{{"WHERE", "RECORDED", "NOW"}}
	for i, d := range f.Differences {
		if i == differencesShown {
			break
		}
		rows = append(rows, []string{dash(d.Path), dash(d.Recorded), dash(d.Now)})
	}
	a.table(rows)
	if more := len(f.Differences) - differencesShown; more > 0 {
		fmt.Fprintf(a.out, "and in %s more\n", plural(more, "place"))
	}
}
