package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// Where berth looks when nothing else is said: the server's socket where there is one,
// else the agent's. They are package config's defaults too; a test of this package
// compares them.
const (
	agentSocket  = "/run/berth/agent.sock"
	serverSocket = "/run/berth/server.sock"
)

// Exit codes, as `berth --help` documents them.
const (
	exitOK          = 0
	exitFailed      = 1   // refused, nothing matched, a check of doctor failed, or what --wait waited for ended badly
	exitUsage       = 2   // wrong command, flag or argument
	exitUnreachable = 3   // nobody answered at the socket
	exitTimeout     = 4   // --timeout is over, and what --wait waits for has not come
	exitInterrupted = 130 // as a shell says it of Ctrl-C
)

const rootHelp = `berth shows and steers what runs on GPUs that many containers share.

It talks to a placement server, which knows all machines, or to the agent of one
machine, through a local socket that only root can open: --socket, else BERTH_SOCKET,
else /run/berth/server.sock where there is one, else /run/berth/agent.sock.

TASK is a task's id, the first characters of one as long as they fit a single task,
or the name of a wanted task (its file's), which means the newest task of that name.

Exit codes:
  0    done; with run --wait: all essential containers ended with exit code 0
  1    refused, nothing matched, a check of doctor failed, or what --wait waited for
       ended badly
  2    a wrong command, flag or argument
  3    nobody answered at the socket
  4    the time of --timeout is over; what was asked for goes on
  130  interrupted (Ctrl-C); what was asked for goes on`

// How often --wait looks.
const lookEvery = 250 * time.Millisecond

// coded is an error that ends berth with a given exit code.
type coded struct {
	code int
	err  error
}

func (c *coded) Error() string { return c.err.Error() }
func (c *coded) Unwrap() error { return c.err }

func usageError(format string, args ...any) error {
	return &coded{exitUsage, fmt.Errorf(format, args...)}
}

// app is what the subcommands share: where they print, the persistent flags and
// what time it is.
type app struct {
	in       *os.File // nil: no terminal to read keys from
	out, err io.Writer
	getenv   func(string) string
	now      func() time.Time
	poll     time.Duration // how often --wait looks

	serverSocket string // looked for when no socket is named
	agentSocket  string // then this one
	socket       string
	output       string // text or json
}

func newApp(in *os.File, out, errw io.Writer, getenv func(string) string) *app {
	return &app{in: in, out: out, err: errw, getenv: getenv, now: time.Now, poll: lookEvery, serverSocket: serverSocket, agentSocket: agentSocket}
}

// run is main without the process: it returns the exit code.
func run(ctx context.Context, a *app, args []string) int {
	root := a.root()
	root.SetArgs(args)
	root.SetOut(a.out)
	root.SetErr(a.err)
	started := false
	for _, c := range allCommands(root) {
		if e := c.RunE; e != nil {
			c.RunE = func(c *cobra.Command, args []string) error { started = true; return e(c, args) }
		}
	}
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	var quiet *silent
	if errors.As(err, &quiet) {
		return quiet.code
	}
	fmt.Fprintln(a.err, "berth:", err)
	var c *coded
	switch {
	case errors.As(err, &c):
		return c.code
	case !started: // cobra's own: an unknown command or flag, too many arguments
		return exitUsage
	}
	return exitFailed
}

// silent ends berth with a code after everything has been said.
type silent struct{ code int }

func (s *silent) Error() string { return fmt.Sprintf("exit code %d", s.code) }

func allCommands(c *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{c}
	for _, sub := range c.Commands() {
		all = append(all, allCommands(sub)...)
	}
	return all
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:           "berth",
		Short:         "Share one GPU among many containers, safely",
		Long:          rootHelp,
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			if a.output != "text" && a.output != "json" {
				return usageError("--output: %q is neither text nor json", a.output)
			}
			return nil
		},
	}
	root.PersistentFlags().StringVar(&a.socket, "socket", a.defaultSocket(), "the server's or the agent's socket (BERTH_SOCKET)")
	root.PersistentFlags().StringVarP(&a.output, "output", "o", "text", "text or json")
	_ = root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"text", "json"}, cobra.ShellCompDirectiveNoFileComp))
	for _, g := range []struct {
		id, title string
		commands  []*cobra.Command
	}{
		{"see", "See what there is and why:", []*cobra.Command{a.psCommand(), a.topCommand(), a.instancesCommand(), a.explainCommand(), a.logsCommand(), a.eventsCommand(), a.replayCommand()}},
		{"run", "Run:", []*cobra.Command{a.runCommand(), a.serviceCommand(), a.stopCommand()}},
		{"machines", "Look after machines:", []*cobra.Command{a.drainCommand(), a.replaceCommand(), a.replacementsCommand(), a.deregisterCommand(), a.doctorCommand()}},
		{"serve", "Serve:", []*cobra.Command{a.serverCommand()}},
		{"simulate", "Without a GPU:", []*cobra.Command{a.devCommand(), a.simCommand(), a.faultCommand()}},
	} {
		root.AddGroup(&cobra.Group{ID: g.id, Title: g.title})
		for _, c := range g.commands {
			c.GroupID = g.id
			root.AddCommand(c)
		}
	}
	root.AddCommand(a.versionCommand())
	return root
}

func (a *app) defaultSocket() string {
	if s := a.getenv("BERTH_SOCKET"); s != "" {
		return s
	}
	if _, err := os.Stat(a.serverSocket); err == nil {
		return a.serverSocket
	}
	return a.agentSocket
}

// json says whether the answer goes out as JSON.
func (a *app) json() bool { return a.output == "json" }

// printJSON writes v indented; an answer of the agent goes out with all its
// members, those that this berth does not know too (json.RawMessage).
func (a *app) printJSON(v any) error {
	enc := json.NewEncoder(a.out)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// table prints aligned columns two spaces apart, with nothing after a line's end.
func (a *app) table(rows [][]string) {
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		for i, cell := range row {
			if i > 0 {
				fmt.Fprint(w, "\t")
			}
			fmt.Fprint(w, cell)
		}
		fmt.Fprintln(w)
	}
	w.Flush()
	for line := range strings.Lines(text.String()) {
		fmt.Fprintln(a.out, strings.TrimRight(line, " \n"))
	}
}

// terminal is the screen that stdout is, or nil when it is a file or a pipe.
func (a *app) terminal() *os.File {
	f, ok := a.out.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return nil
	}
	return f
}
