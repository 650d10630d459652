// Command berth is what an operator types. It shows what the machines hold and run, and
// asks the placement server, or the agent of one machine, for tasks, services, drains
// and replacements. It is pure Go; the operator's commands know nothing but the local
// API (package api) and, for machines without a GPU, the doors of the two simulators.
//
// They keep no state and decide nothing. Each subcommand is a file: flags, one or two
// requests, and printing; the ones that wait look again until what they asked for has
// come about.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, newApp(os.Stdin, os.Stdout, os.Stderr, os.Getenv), os.Args[1:])
	stop()
	os.Exit(code)
}
