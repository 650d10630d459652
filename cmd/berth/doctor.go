package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/berth-gpu/berth/api"
)

func (a *app) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Check everything that the agent, or the server, needs; exit code 1 when a check fails",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var checks []api.Check
			socket := a.socket
			if socket == a.serverSocket && !cmd.Flags().Changed("socket") && a.getenv("BERTH_SOCKET") == "" {
				if _, err := os.Stat(a.agentSocket); err == nil {
					socket = a.agentSocket // where both are, it is the agent's needs that are asked for
				}
			}
			raw, err := a.clientAt(socket).get(cmd.Context(), doctorTimeout, api.PathDoctor, nil, &checks)
			if err != nil {
				return err
			}
			failed, warned := 0, 0
			for _, c := range checks {
				switch {
				case c.OK:
				case c.Warn:
					warned++
				default:
					failed++
				}
			}
			if a.json() {
				if err := a.printJSON(raw); err != nil {
					return err
				}
			} else {
				a.printChecks(checks)
				fmt.Fprintf(a.out, "\n%s, %d failed, %d to look at\n", plural(len(checks), "check"), failed, warned)
			}
			if failed > 0 {
				return &silent{exitFailed}
			}
			return nil
		},
	}
}

func (a *app) printChecks(checks []api.Check) {
	var rows [][]string
	for _, c := range checks {
		rows = append(rows, []string{checkWord(c), c.Name, c.Says})
		if !c.OK && c.Do != "" {
			rows = append(rows, []string{"", "", "-> " + c.Do})
		}
	}
	a.table(rows)
}

func checkWord(c api.Check) string {
	switch {
	case c.OK:
		return "ok"
	case c.Warn:
		return "look"
	}
	return "FAIL"
}
