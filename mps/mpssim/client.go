package mpssim

import (
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const clientUsage = `cuda-client: a CUDA program that computes nothing.

  cuda-client [run] [flags]     allocate GPU memory and hold it
  cuda-client open PATH...      open each device node, print OK or the error's name
  cuda-client control LINE...   give command lines to the MPS control daemon
  cuda-client cat PATH...       print files
  cuda-client ls PATH...        list folders
  cuda-client env               print the environment
  cuda-client sleep DURATION    wait (30s, 5m)
  cuda-client exit N            end with status N

flags of run:
`

// clientMain is cuda-client, whose one static binary serves as every program of a
// container image in tests.
func clientMain(args []string, stdout, stderr io.Writer) int {
	verb := "run"
	if len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		verb, args = args[0], args[1:]
	}
	switch verb {
	case "run":
		return clientRun(args, stdout, stderr)
	case "open":
		return openNodes(args, stdout)
	case "control":
		return utility(strings.NewReader(strings.Join(args, "\n")), stdout, stderr)
	case "cat":
		return each(args, stderr, func(path string) error {
			text, err := os.ReadFile(path)
			_, _ = stdout.Write(text)
			return err
		})
	case "ls":
		return each(args, stderr, func(path string) error { return list(path, stdout) })
	case "env":
		env := os.Environ()
		slices.Sort(env)
		fmt.Fprintln(stdout, strings.Join(env, "\n"))
		return 0
	case "sleep":
		return sleepFor(args, stderr)
	case "exit":
		n, err := strconv.Atoi(arg(args, 0))
		if err != nil {
			fmt.Fprintln(stderr, "exit: want a number")
			return 2
		}
		return n
	}
	fmt.Fprintf(stderr, "cuda-client: unknown verb %q\n", verb)
	return 2
}

func each(paths []string, stderr io.Writer, do func(string) error) (status int) {
	for _, path := range paths {
		if err := do(path); err != nil {
			fmt.Fprintln(stderr, err)
			status = 1
		}
	}
	return status
}

// list prints a folder's entries: mode, owner, size, name.
func list(path string, stdout io.Writer) error {
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		fi, err := e.Info()
		if err != nil {
			continue
		}
		st := fi.Sys().(*syscall.Stat_t)
		fmt.Fprintf(stdout, "%s %d %d %d %s\n", fi.Mode(), st.Uid, st.Gid, fi.Size(), e.Name())
	}
	return nil
}

// openNodes tries to open each path for reading and writing, as a driver's library
// does with a device node.
func openNodes(paths []string, stdout io.Writer) int {
	status := 0
	for _, path := range paths {
		fd, err := syscall.Open(path, syscall.O_RDWR|syscall.O_CLOEXEC, 0)
		switch errno, _ := err.(syscall.Errno); {
		case err == nil:
			syscall.Close(fd)
			fmt.Fprintf(stdout, "%s OK\n", path)
		default:
			fmt.Fprintf(stdout, "%s %s\n", path, errnoName(errno))
			status = 1
		}
	}
	return status
}

func sleepFor(args []string, stderr io.Writer) int {
	d, err := time.ParseDuration(arg(args, 0))
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 2
	}
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM, syscall.SIGINT)
	select {
	case <-time.After(d):
		return 0
	case s := <-term:
		return 128 + int(s.(syscall.Signal))
	}
}

// memoryFlag is an amount with a unit: 18GiB, 512MiB.
type memoryFlag int64

func (m *memoryFlag) String() string { return fmt.Sprintf("%dMiB", int64(*m)>>20) }

func (m *memoryFlag) Set(s string) error {
	for _, unit := range []struct {
		name  string
		shift uint
	}{{"GiB", 30}, {"MiB", 20}} {
		if number, ok := strings.CutSuffix(s, unit.name); ok {
			n, err := strconv.ParseInt(number, 10, 32)
			if err != nil || n < 0 {
				return fmt.Errorf("%q: want a whole number of %s", s, unit.name)
			}
			*m = memoryFlag(n << unit.shift)
			return nil
		}
	}
	return fmt.Errorf("%q: want a unit, GiB or MiB", s)
}

type runOptions struct {
	memory, step memoryFlag
	device       int
	overCap      bool
	duration     time.Duration
	exitCode     int
	printEnv     bool
	ignoreTerm   bool
	stay         bool
	tick         time.Duration
}

func parseRun(args []string, stderr io.Writer) (runOptions, error) {
	var o runOptions
	f := flag.NewFlagSet(ClientName, flag.ContinueOnError)
	f.SetOutput(stderr)
	f.Usage = func() { fmt.Fprint(stderr, clientUsage); f.PrintDefaults() }
	f.Var(&o.memory, "memory", "GPU memory to allocate (`18GiB`, 512MiB)")
	f.Var(&o.step, "step", "allocate in steps of this size (default: all at once)")
	f.IntVar(&o.device, "device", 0, "CUDA `ordinal`")
	f.BoolVar(&o.overCap, "over-cap-try", false, "then allocate more until it is refused, say so and go on")
	f.DurationVar(&o.duration, "for", 0, "hold for this time, then end (default: until SIGTERM)")
	f.IntVar(&o.exitCode, "exit-code", 0, "end with this `status`")
	f.BoolVar(&o.printEnv, "print-env", false, "print the CUDA_* and NVIDIA_* variables")
	f.BoolVar(&o.ignoreTerm, "ignore-term", false, "do not end on SIGTERM")
	f.BoolVar(&o.stay, "stay", false, "swallow CUDA errors: go on living, as some programs do (default: end with 1)")
	f.DurationVar(&o.tick, "tick", time.Minute, "how often to print a line while holding")
	err := f.Parse(args)
	if err == nil && f.NArg() > 0 {
		err = fmt.Errorf("unexpected %q", f.Arg(0))
		fmt.Fprintln(stderr, err)
	}
	return o, err
}

// clientRun is a CUDA program's life. It prints one line per thing that happens.
func clientRun(args []string, stdout, stderr io.Writer) int {
	o, err := parseRun(args, stderr)
	if err != nil {
		return 2
	}
	term := make(chan os.Signal, 1)
	if o.ignoreTerm {
		signal.Ignore(syscall.SIGTERM)
	} else {
		signal.Notify(term, syscall.SIGTERM, syscall.SIGINT)
	}
	if o.printEnv {
		printEnv(stdout)
	}
	started := make(chan *cudaContext, 1)
	failed := make(chan error, 1)
	go func() { // cuInit can wait for ever, and a signal has to end it
		ctx, err := cuInit()
		if err == nil {
			describe(ctx, stdout)
			err = allocate(ctx, o, stdout)
		}
		if err != nil {
			failed <- err
		}
		started <- ctx
	}()
	ticks := time.NewTicker(max(o.tick, time.Millisecond))
	defer ticks.Stop()
	var ctx *cudaContext
	var sticky <-chan error
	var end <-chan time.Time
	for {
		select {
		case ctx = <-started:
			if ctx != nil {
				sticky = ctx.sticky
			}
			if o.duration > 0 {
				end = time.After(o.duration)
			}
		case err = <-failed:
		case err = <-sticky:
			ctx.lose()
		case <-ticks.C:
			if ctx != nil {
				fmt.Fprintf(stdout, "tick: holding %d MiB\n", ctx.held(o.device)>>20)
			}
			continue
		case <-end:
			fmt.Fprintln(stdout, "done")
			if ctx != nil {
				ctx.free()
			}
			return o.exitCode
		case <-term:
			fmt.Fprintln(stdout, "SIGTERM: freeing everything")
			if ctx != nil {
				ctx.free()
			}
			return o.exitCode
		}
		if err == nil {
			continue
		}
		fmt.Fprintf(stdout, "error: %v\n", err)
		if !o.stay {
			return 1
		}
		err = nil
	}
}

func printEnv(stdout io.Writer) {
	env := os.Environ()
	slices.Sort(env)
	for _, v := range env {
		if strings.HasPrefix(v, "CUDA_") || strings.HasPrefix(v, "NVIDIA_") {
			fmt.Fprintf(stdout, "env: %s\n", v)
		}
	}
}

func describe(ctx *cudaContext, stdout io.Writer) {
	if ctx.mps {
		fmt.Fprintf(stdout, "mps: attached through %s, active threads %s %%\n", filepath.Join(pipeDirectory(), "control"), ctx.percent)
	} else {
		fmt.Fprintln(stdout, "mps: none, running without a cap")
	}
	for i, d := range ctx.devices {
		limit := "no limit"
		if d.limit > 0 {
			limit = fmt.Sprintf("limit %d MiB", d.limit>>20)
		}
		fmt.Fprintf(stdout, "device %d: %s %s, %s\n", i, d.name, d.uuid, limit)
	}
}

// allocate takes the memory asked for, in steps, and then tries for more if told to.
func allocate(ctx *cudaContext, o runOptions, stdout io.Writer) error {
	step := int64(o.step)
	if step == 0 {
		step = int64(o.memory)
	}
	for left := int64(o.memory); left > 0; {
		n := min(step, left)
		if err := ctx.malloc(o.device, n); err != nil {
			return err
		}
		left -= n
		fmt.Fprintf(stdout, "allocated: %d MiB\n", ctx.held(o.device)>>20)
	}
	if o.overCap {
		tryBeyond(ctx, o.device, stdout)
	}
	if o.memory == 0 {
		return ctx.malloc(o.device, 0)
	}
	return nil
}

// tryBeyond takes all that it can get, in ever smaller pieces down to 1 MiB, and says
// where it was refused.
func tryBeyond(ctx *cudaContext, device int, stdout io.Writer) {
	var refused error
	for piece := int64(64 << 30); piece >= 1<<20; {
		err := ctx.malloc(device, piece)
		if err == nil && ctx.held(device) > 1<<44 { // 16 TiB: a device whose size it cannot know
			break
		}
		if err != nil {
			refused = err
			piece /= 2
		}
	}
	if refused == nil {
		fmt.Fprintf(stdout, "not refused at %d MiB\n", ctx.held(device)>>20)
		return
	}
	fmt.Fprintf(stdout, "refused beyond %d MiB: %v\n", ctx.held(device)>>20, refused)
}
