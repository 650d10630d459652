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
		Use:   "top [INSTANCE]",
		Short: "Show each GPU as a bar of its slices, live",
		Long: `top draws each GPU as a bar: a letter per slice, upper case for memory in use, lower
case for what the slice may still take, dots for what no task holds. Of one machine, named
or the only one there is, it says what each slice is. It redraws until q or Ctrl-C; arrows,
space and Page Up and Down scroll; where stdout is no terminal, it prints once.`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completing(a.instanceNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			if every < 100*time.Millisecond {
				return usageError("--every: %s is less than 100ms", every)
			}
			if a.json() {
				insts, err := a.someInstances(cmd, args)
				if err != nil {
					return err
				}
				return a.printJSON(insts)
			}
			name := strings.Join(args, "")
			screen := a.terminal()
			p, err := a.client().picture(cmd.Context(), name)
			switch {
			case err != nil:
				return err
			case once || screen == nil:
				st := style{}
				if screen != nil {
					st.colour = a.colour()
				}
				for _, line := range drawTop(p, a.now(), st) {
					fmt.Fprintln(a.out, line)
				}
				return nil
			}
			return a.live(cmd.Context(), screen, p, name, every)
		},
	}
	cmd.Flags().BoolVar(&once, "once", false, "print once and end")
	cmd.Flags().DurationVar(&every, "every", time.Second, "how often to redraw")
	return cmd
}

// picture fetches all machines, or the one of that name, and what waits for a place.
func (c *client) picture(ctx context.Context, name string) (p picture, err error) {
	var insts []kept[api.Instance]
	if name == "" {
		insts, err = c.instances(ctx)
	} else {
		insts, err = c.instance(ctx, name)
	}
	if err != nil {
		return p, err
	}
	pending, err := c.tasks(ctx, taskFilter{unplaced: true})
	return picture{bare(insts), bare(pending)}, err
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

// live redraws until a key, a signal or the end of the context. An agent or server that
// does not answer for a while (it restarts, say) leaves the last picture and a line that
// says so.
func (a *app) live(ctx context.Context, screen *os.File, p picture, name string, every time.Duration) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	keys := make(chan key)
	if restore := a.readKeys(ctx, cancel, keys); restore != nil {
		defer restore()
	}
	fmt.Fprint(screen, enterScreen)
	defer fmt.Fprint(screen, leaveScreen)

	c := a.client()
	tick := time.NewTicker(every)
	defer tick.Stop()
	var trouble error
	top := 0 // the first line that is shown
	for {
		top = a.frame(screen, p, trouble, top)
		select {
		case <-ctx.Done():
			return nil
		case k := <-keys:
			top = k.scroll(top, screenHeight(screen)-3)
			continue
		case <-tick.C:
		}
		now, err := c.picture(ctx, name)
		if trouble = err; err == nil {
			p = now
		}
		if ctx.Err() != nil {
			return nil
		}
	}
}

// key is what a terminal sends for one press.
type key string

// scroll is the first line to show after the key; frame bounds it from above.
func (k key) scroll(top, page int) int {
	switch k {
	case "\x1b[A", "\x1bOA", "k":
		top--
	case "\x1b[B", "\x1bOB", "j", "\r":
		top++
	case "\x1b[5~", "b":
		top -= page
	case "\x1b[6~", " ":
		top += page
	case "\x1b[H", "\x1b[1~", "g":
		top = 0
	case "\x1b[F", "\x1b[4~", "G":
		top = 1 << 30
	}
	return max(top, 0)
}

// readKeys lets q, Ctrl-C and Ctrl-D end top at once, where stdin is a terminal, and hands
// on the others. It returns what puts the terminal back. The reading goroutine has no other
// end than the process's: a read of a terminal cannot be taken back.
func (a *app) readKeys(ctx context.Context, end func(), keys chan<- key) (restore func()) {
	if a.in == nil || !term.IsTerminal(int(a.in.Fd())) {
		return nil
	}
	before, err := term.MakeRaw(int(a.in.Fd()))
	if err != nil {
		return nil
	}
	go func() {
		pressed := make([]byte, 16)
		for {
			n, err := a.in.Read(pressed)
			if err != nil || bytes.ContainsAny(pressed[:n], "qQ\x03\x04") {
				end()
				return
			}
			select {
			case keys <- key(pressed[:n]):
			case <-ctx.Done():
				return
			}
		}
	}()
	return func() { _ = term.Restore(int(a.in.Fd()), before) }
}

func screenSize(screen *os.File) (width, height int) {
	width, height, err := term.GetSize(int(screen.Fd()))
	if err != nil || width <= 0 || height <= 0 {
		return 80, 24
	}
	return width, height
}

func screenHeight(screen *os.File) int {
	_, height := screenSize(screen)
	return height
}

// frame draws one frame, the headline and the lines from top on, and returns top, no
// further than the last page.
func (a *app) frame(screen *os.File, p picture, trouble error, top int) int {
	width, height := screenSize(screen)
	st := style{width: width, colour: a.colour()}
	lines := drawTop(p, a.now(), st)
	foot := "q or Ctrl-C ends; UPPER used  lower reserved  . free"
	var c *coded
	if errors.As(trouble, &c) {
		foot = st.sgr("31", trouble.Error())
	} else if trouble != nil {
		foot = st.sgr("31", "the answer is: "+trouble.Error())
	}
	head, body := lines[:1], lines[1:]
	room := max(height-3, 1) // beside the headline, an empty line and the foot
	top = min(top, max(len(body)-room, 0))
	if len(body) > room {
		if trouble == nil {
			foot = fmt.Sprintf("lines %d to %d of %d, arrows scroll; %s", top+1, top+room, len(body), foot)
		}
		body = body[top : top+room]
	}
	lines = append(append(head[:1:1], body...), "", clip(foot, width))
	// The terminal may be raw: a line feed alone does not return the carriage.
	fmt.Fprint(screen, homeCursor+strings.Join(lines[:min(len(lines), height)], clearToEnd+"\r\n")+clearToEnd+clearBelow)
	return top
}
