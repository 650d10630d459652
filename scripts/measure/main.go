// Command measure is make bench: it measures berth from outside and writes
// docs/performance.md. Its parts, of which arguments name some (none: all):
//
//	system  a server and three machines: how long a task takes to run, beside plain
//	        docker run, and to run elsewhere once its GPU is lost
//	fleet   a server with 1,000 machines and 20,000 tasks
//	agent   one agent: how long a dead daemon goes unnoticed, what a probe costs, and
//	        what an idle agent with 8 GPUs and 48 tasks needs
//
// Run from the repository's root, as root, after make build.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/berth-gpu/berth/scripts/rig"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	out := flag.String("out", "docs/performance.md", "where the page goes")
	idle := flag.Duration("idle", 30*time.Second, "how long the idle agent is watched")
	flag.Parse()

	os.Setenv("SAMPLE_EVERY", "10s") // the default: what is measured looks as often as a real machine's agent
	m := &measure{Rig: rig.Rig{Dir: "build/bench", Instance: "makebench", RunDir: "/run/berth-bench"}, idle: *idle}
	err := m.all(ctx, flag.Args())
	if left := m.Abandon(); err == nil {
		err = left
	}
	if err == nil {
		err = os.WriteFile(*out, []byte(m.page.String()), 0o644)
	}
	fmt.Print(m.page.String()) // what there is of it, also after an error
	if err != nil {
		fmt.Fprintln(os.Stderr, "measure:", err)
		os.Exit(1)
	}
	if m.missed > 0 {
		fmt.Fprintf(os.Stderr, "measure: %d of the goals were missed\n", m.missed)
		os.Exit(1)
	}
}

type measure struct {
	rig.Rig
	idle   time.Duration
	page   strings.Builder
	missed int // goals
}

func (m *measure) all(ctx context.Context, only []string) error {
	m.head()
	for _, part := range []struct {
		name string
		do   func(context.Context) error
	}{{"system", m.system}, {"fleet", m.wholeFleet}, {"agent", m.agent}} {
		if len(only) > 0 && !slices.Contains(only, part.name) {
			continue
		}
		began := time.Now()
		if err := part.do(ctx); err != nil {
			return err
		}
		fmt.Printf("measured: %s, in %s\n", part.name, time.Since(began).Round(time.Second))
	}
	return nil
}

func (m *measure) printf(format string, args ...any) { fmt.Fprintf(&m.page, format, args...) }

// goal writes down whether a goal was met.
func (m *measure) goal(ok bool, format string, args ...any) {
	word := "met"
	if !ok {
		word = "MISSED"
		m.missed++
	}
	m.printf("Goal: %s: %s.\n\n", fmt.Sprintf(format, args...), word)
}

func (m *measure) head() {
	m.printf("# What has been measured\n\nWritten by `make bench` (scripts/measure); run it again to measure your machine. On simulated GPUs: what a GPU and its\ndriver would take is not in these numbers.\n\n")
	m.printf("%s, %s, %d cores, Linux %s, Docker %s, %s, berth %s\n\n", time.Now().UTC().Format("2006-01-02"), cpuModel(), runtime.NumCPU(),
		first("uname", "-r"), dockerVersion(), runtime.Version(), first("git", "describe", "--always", "--dirty"))
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		load, _, _ := strings.Cut(string(text), " ")
		m.printf("The load of the machine before it began was %s (the mean of the last minute): above 1 others worked on it too, and the times are theirs as well.\n\n", load)
	}
}

// prepare makes a machine of so many GPUs, with no task on it, and starts the agent.
func (m *measure) prepare(ctx context.Context, gpus int, settings ...string) error {
	if err := m.Prepare(ctx, gpus, settings...); err != nil {
		return err
	}
	if err := m.RemoveTasks(); err != nil {
		return err
	}
	return m.Start(ctx)
}

func (m *measure) end(ctx context.Context) error {
	if _, err := m.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	return m.Purge(ctx)
}

// task is a definition whose container holds a slice and sleeps; it ends at once when
// it is told to.
func task(family string, memoryMiB int) string {
	return fmt.Sprintf(`{"family": %q, "containerDefinitions": [{"name": "c", "image": "berth-sample:latest", "stopTimeout": 2,
 "entryPoint": ["/bin/cuda-client"], "command": ["run", "--memory", "64MiB"], "cpu": 16, "memory": 32,
 "resourceRequirements": [{"type": "GPU", "sharingStrategy": {"nvidiaMps": {"memory": %d}}}]}]}`, family, memoryMiB)
}

// spread is a sample's minimum, median, 95th percentile and maximum.
func spread(all []time.Duration) string {
	sorted := slices.Sorted(slices.Values(all))
	at := func(p int) time.Duration { return sorted[min(len(sorted)*p/100, len(sorted)-1)] }
	return fmt.Sprintf("min %s, median %s, p95 %s, max %s", ms(sorted[0]), ms(at(50)), ms(at(95)), ms(sorted[len(sorted)-1]))
}

// spread99 is a sample's median, 99th percentile and maximum.
func spread99(all []time.Duration) string {
	sorted := slices.Sorted(slices.Values(all))
	return fmt.Sprintf("median %s, p99 %s, max %s", ms(median(all)), ms(sorted[min(len(sorted)*99/100, len(sorted)-1)]), ms(sorted[len(sorted)-1]))
}

func median(all []time.Duration) time.Duration {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[len(sorted)/2]
}

func ms(d time.Duration) string { return fmt.Sprintf("%.2f ms", float64(d.Microseconds())/1000) }

// list writes every value of a sample, ten a line.
func (m *measure) list(all []time.Duration) {
	m.printf("All %d, in order, in ms:\n\n```\n", len(all))
	for i, d := range all {
		m.printf("%9.2f", float64(d.Microseconds())/1000)
		if i%10 == 9 || i == len(all)-1 {
			m.printf("\n")
		}
	}
	m.printf("```\n\n")
}

func first(name string, args ...string) string {
	out, err := exec.Command(name, args...).Output()
	if err != nil {
		return "?"
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return line
}

func cpuModel() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}

func dockerVersion() string {
	v, err := rig.DockerVersion(context.Background())
	if err != nil {
		return "?"
	}
	return v
}
