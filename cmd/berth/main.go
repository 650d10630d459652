// Command berth is what an operator types: it shows what a machine's agent holds
// and runs, and asks it to stop a task. It is pure Go and knows nothing but the
// agent's local API (package api) and, for machines without a GPU, the doors of
// the two simulators.
//
// It keeps no state. Each subcommand is a file: flags, one or two requests, and
// printing.
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
