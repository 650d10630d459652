package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/berth-gpu/berth/api"
)

func (a *app) topCommand() *cobra.Command {
	var once bool
	var every time.Duration
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show each GPU as a bar of its slices, live",
		Long: `top draws each GPU as a bar: a letter per slice, upper case for memory in use, lower
case for what the slice may still take, dots for what no task holds. It redraws
until q or Ctrl-C; where stdout is no terminal, it prints once.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if every < 100*time.Millisecond {
				return usageError("--every: %s is less than 100ms", every)
			}
			screen := a.terminal()
			inst, raw, err := a.client().instance(cmd.Context())
			switch {
			case err != nil:
				return err
			case a.json():
				return a.printJSON(raw)
			case once || screen == nil:
				st := style{}
				if screen != nil {
					st.colour = a.colour()
				}
				for _, line := range drawTop(inst, a.now(), st) {
					fmt.Fprintln(a.out, line)
				}
				return nil
			}
			return a.live(cmd.Context(), screen, inst, every)
		},
	}
	cmd.Flags().BoolVar(&once, "once", false, "print once and end")
	cmd.Flags().DurationVar(&every, "every", time.Second, "how often to redraw")
	return cmd
}

// colour follows the convention of https://no-color.org.
func (a *app) colour() bool { return a.getenv("NO_COLOR") == "" && a.getenv("TERM") != "dumb" }

// Plain ANSI: the alternate screen, so that what was there comes back; the cursor
// hidden; each frame drawn over the last one, without a clear that would flicker.
const (
	enterScreen = "\x1b[?1049h\x1b[?25l"
	leaveScreen = "\x1b[?25h\x1b[?1049l"
	homeCursor  = "\x1b[H"
	clearToEnd  = "\x1b[K" // of the line
	clearBelow  = "\x1b[J"
)

// live redraws until a key, a signal or the end of the context. An agent that does
// not answer for a while (it restarts, say) leaves the last picture and a line that
// says so.
func (a *app) live(ctx context.Context, screen *os.File, inst api.Instance, every time.Duration) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if restore := a.readKeys(cancel); restore != nil {
		defer restore()
	}
	fmt.Fprint(screen, enterScreen)
	defer fmt.Fprint(screen, leaveScreen)

	c := a.client()
	tick := time.NewTicker(every)
	defer tick.Stop()
	var trouble error
	for {
		a.frame(screen, inst, trouble)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		now, _, err := c.instance(ctx)
		if trouble = err; err == nil {
			inst = now
		}
		if ctx.Err() != nil {
			return nil
		}
	}
}

// readKeys lets q, Ctrl-C and Ctrl-D end top at once, where stdin is a terminal. It
// returns what puts the terminal back. The reading goroutine has no other end than
// the process's: a read of a terminal cannot be taken back.
func (a *app) readKeys(end func()) (restore func()) {
	if a.in == nil || !term.IsTerminal(int(a.in.Fd())) {
		return nil
	}
	before, err := term.MakeRaw(int(a.in.Fd()))
	if err != nil {
		return nil
	}
	go func() {
		key := make([]byte, 16)
		for {
			n, err := a.in.Read(key)
			if err != nil || bytes.ContainsAny(key[:n], "qQ\x03\x04") {
				end()
				return
			}
		}
	}()
	return func() { _ = term.Restore(int(a.in.Fd()), before) }
}

func (a *app) frame(screen *os.File, inst api.Instance, trouble error) {
	width, height, err := term.GetSize(int(screen.Fd()))
	if err != nil || width <= 0 || height <= 0 {
		width, height = 80, 24
	}
	st := style{width: width, colour: a.colour()}
	lines := drawTop(inst, a.now(), st)
	foot := "q or Ctrl-C ends; UPPER used  lower reserved  . free"
	var c *coded
	if errors.As(trouble, &c) {
		foot = st.sgr("31", trouble.Error())
	} else if trouble != nil {
		foot = st.sgr("31", "the agent says: "+trouble.Error())
	}
	if room := max(height-2, 1); len(lines) > room {
		lines = append(lines[:room-1], fmt.Sprintf("... %d more lines; berth top --once prints them all", len(lines)-room+1))
	}
	lines = append(lines, "", clip(foot, width))
	// The terminal may be raw: a line feed alone does not return the carriage.
	fmt.Fprint(screen, homeCursor+strings.Join(lines[:min(len(lines), height)], clearToEnd+"\r\n")+clearToEnd+clearBelow)
}
