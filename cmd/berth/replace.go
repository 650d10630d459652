package main

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/spf13/cobra"

	"github.com/berth-gpu/berth/api"
)

// The last states of a replacement, as package replace spells them.
const (
	replacementDone   = "DONE"
	replacementFailed = "FAILED"
)

// replaceTimeout is how long --wait gives a replacement unless told otherwise: a machine
// has to be launched, and the old one's tasks moved.
const replaceTimeout = time.Hour

func (a *app) replaceCommand() *cobra.Command {
	var w waitFlags
	var resume bool
	cmd := &cobra.Command{
		Use:   "replace INSTANCE [--wait]",
		Short: "Have a machine replaced by a fresh one",
		Long: `replace drains a machine, launches another in its place, moves the tasks and terminates
the old one. One that is being replaced already is not replaced twice.

Where fresh machines fail alike the server begins no more replacements by itself;
replace --resume lets it go on once the cause is mended.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if resume {
				return cobra.NoArgs(cmd, args)
			}
			return cobra.ExactArgs(1)(cmd, args)
		},
		ValidArgsFunction: a.completing(a.instanceNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := w.limit(); err != nil {
				return err
			}
			if resume {
				return a.resume(cmd.Context())
			}
			return a.replace(cmd.Context(), args[0], w)
		},
	}
	cmd.Flags().BoolVar(&resume, "resume", false, "let the server begin replacements again, after fresh machines failed alike")
	w.add(cmd, "return when the old machine is gone; exit code 1 when it failed", replaceTimeout)
	cmd.MarkFlagsMutuallyExclusive("resume", "wait")
	ls := a.replacementsCommand()
	ls.Use, ls.Aliases = "ls", nil
	cmd.AddCommand(ls)
	return cmd
}

func (a *app) replace(ctx context.Context, name string, w waitFlags) error {
	c := a.client()
	var r kept[api.Replacement]
	if _, err := c.send(ctx, http.MethodPost, pathOf(api.PathReplace, name), nil, nil, &r); err != nil {
		return err
	}
	if w.wait {
		id := r.is.ID
		err := a.await(ctx, w.timeout, func(ctx context.Context) (bool, string, error) {
			found, err := list(ctx, c, api.PathReplacements, nil, func(r api.Replacement) bool { return r.ID == id })
			if err != nil {
				return false, "", err
			}
			if len(found) > 0 {
				r = found[0]
			}
			return r.is.State == replacementDone || r.is.State == replacementFailed, replacementFares(r.is), nil
		})
		if err != nil {
			return err
		}
	}
	if a.json() {
		if err := a.printJSON(r); err != nil {
			return err
		}
	} else {
		fmt.Fprintln(a.out, replacementFares(r.is))
	}
	if r.is.State == replacementFailed {
		return &silent{exitFailed}
	}
	return nil
}

func (a *app) resume(ctx context.Context) error {
	raw, err := a.client().send(ctx, http.MethodPost, api.PathResume, nil, nil, nil)
	if err != nil {
		return err
	}
	if a.json() {
		return a.printJSON(raw)
	}
	fmt.Fprintln(a.out, "the server may begin replacements again; berth replacements lists them")
	return nil
}

func replacementFares(r api.Replacement) string {
	says := fmt.Sprintf("replacement %s of %s: %s", shortID(r.ID), r.Instance, r.State)
	if r.Newcomer != "" {
		says += " by " + r.Newcomer
	}
	for _, why := range []string{r.Says, r.Held} {
		if why != "" {
			says += "; " + why
		}
	}
	return says
}

func (a *app) replacementsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "replacements",
		Short: "List the replacements of machines, the newest first",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			all, err := list[api.Replacement](cmd.Context(), a.client(), api.PathReplacements, nil, nil)
			if err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(all)
			}
			if len(all) == 0 {
				fmt.Fprintln(a.out, "no replacements")
				return nil
			}
			rows := [][]string{{"ID", "INSTANCE", "NEWCOMER", "STATE", "FOR", "STARTED", "WHY", "SAYS"}}
			held := ""
			for _, r := range bare(all) {
				rows = append(rows, []string{shortID(r.ID), r.Instance, dash(r.Newcomer), r.State, age(a.now(), r.ChangedAt), age(a.now(), r.StartedAt) + " ago", r.Reason, r.Says})
				if held == "" {
					held = r.Held
				}
			}
			a.table(rows)
			if held != "" {
				fmt.Fprintf(a.out, "none begins now: %s\n", held)
			}
			return nil
		},
	}
}
