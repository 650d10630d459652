package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// unansweredFor bounds how long a wait goes on without an answer: a server restarts, or
// another one is elected, within it.
const unansweredFor = time.Minute

// waitFlags are --wait and --timeout, the same for every command that has them.
type waitFlags struct {
	wait    bool
	timeout time.Duration
}

func (w *waitFlags) add(cmd *cobra.Command, wait string, timeout time.Duration) {
	cmd.Flags().BoolVar(&w.wait, "wait", false, wait)
	cmd.Flags().DurationVar(&w.timeout, "timeout", timeout, "with --wait: end with exit code 4 after this long (0: never)")
}

// limit is --timeout, checked.
func (w *waitFlags) limit() error {
	if w.timeout < 0 {
		return usageError("--timeout: %s is less than 0; 0 means no limit", w.timeout)
	}
	return nil
}

// await looks, every a.poll, until look says that what is waited for has come, and shows
// what it says meanwhile. An answer that does not come is waited for too, for
// unansweredFor.
func (a *app) await(ctx context.Context, limit time.Duration, look func(context.Context) (done bool, says string, err error)) error {
	var over <-chan time.Time
	if limit > 0 {
		t := time.NewTimer(limit)
		defer t.Stop()
		over = t.C
	}
	p := a.progress()
	defer p.end()
	tick := time.NewTicker(a.poll)
	defer tick.Stop()
	var last string
	var silentSince time.Time
	for {
		done, says, err := look(ctx)
		var u *unanswered
		switch {
		case ctx.Err() != nil:
			err = nil // said below
		case errors.As(err, &u):
			if silentSince.IsZero() {
				silentSince = time.Now()
			}
			if time.Since(silentSince) > unansweredFor {
				return fmt.Errorf("%w (for %s; last seen: %s)", err, unansweredFor, dash(last))
			}
			p.say("trying again: " + u.says)
		case err != nil:
			return err
		default:
			if done {
				return nil // what has come is the caller's to say
			}
			silentSince, last = time.Time{}, says
			p.say(says)
		}
		select {
		case <-ctx.Done():
			return &coded{exitInterrupted, fmt.Errorf("interrupted; what was asked for goes on: %s", dash(last))}
		case <-over:
			return &coded{exitTimeout, fmt.Errorf("still waiting after %s; what was asked for goes on: %s", limit, dash(last))}
		case <-tick.C:
		}
	}
}

// progress tells what a wait waits for: on a terminal one line, rewritten; elsewhere a
// line per change.
type progress struct {
	w      io.Writer
	screen *os.File // nil: no terminal
	last   string
}

// Progress goes to stderr, so that stdout has nothing but the result.
func (a *app) progress() *progress {
	p := &progress{w: a.err}
	if f, ok := a.err.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		p.screen = f
	}
	return p
}

func (p *progress) say(text string) {
	if text == p.last {
		return
	}
	p.last = text
	if p.screen == nil {
		fmt.Fprintln(p.w, text)
		return
	}
	width, _, err := term.GetSize(int(p.screen.Fd()))
	if err != nil || width <= 0 {
		width = 80
	}
	fmt.Fprint(p.w, "\r"+clip(text, width-1)+clearToEnd) // a full line would wrap
}

// end takes the rewritten line away.
func (p *progress) end() {
	if p.screen != nil && p.last != "" {
		fmt.Fprint(p.w, "\r"+clearToEnd)
	}
}
