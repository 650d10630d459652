package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version is set by the Makefile (-ldflags -X main.version).
var version string

func berthVersion() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print berth's version",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if a.json() {
				return a.printJSON(map[string]string{"version": berthVersion(), "go": runtime.Version()})
			}
			fmt.Fprintf(a.out, "berth %s, %s\n", berthVersion(), runtime.Version())
			return nil
		},
	}
}
