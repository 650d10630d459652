// Command story is make demo: it starts a placement server with three simulated
// machines, lets happen to them what happens in life, and checks after each step that
// everything is as it should be, while a watcher samples the service from the server and
// from Docker. It uses what an operator uses: berth's commands, the server's socket. It
// ends with 1 when anything was not as it should be.
//
// Run from the repository's root, as root, after make build.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/scripts/rig"
)

// What is shown.
const (
	machines = 3
	gpusEach = 2
	service  = "web"
	desired  = 10
	sliceMiB = 20480
)

// How long the moved tasks of a GPU may take from its verdict until all of them run.
const (
	moveGoal  = 5 * time.Second
	moveLimit = 20 * time.Second
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	s := &story{System: rig.System{Dir: "build/demo", RunDir: "/run/berth-demo", Machines: machines, GPUs: gpusEach}, began: time.Now(), seen: map[string]bool{}}
	s.tell(ctx)
	if s.failed > 0 {
		fmt.Printf("\ndemo: %d of %d were not as they should be; %s has what was logged\n", s.failed, s.checks, s.Dir)
		os.Exit(1)
	}
	fmt.Printf("\ndemo: all %d as they should be, in %s\n", s.checks, time.Since(s.began).Round(time.Second))
}

// story is the demo under way.
type story struct {
	rig.System
	began          time.Time
	checks, failed int

	seen   map[string]bool // every machine there has been
	watch  *watcher        // from when the service runs to the end
	victim victim
	moved  time.Duration // from the last verdict
}

// tell goes through the steps. A step that cannot be gone past ends the story; what was
// started is taken away in any case.
func (s *story) tell(ctx context.Context) {
	defer func() {
		s.watch.stop()
		if there, err := s.Abandon(); err != nil {
			s.check(false, "taking everything away: %v", err)
		} else if there {
			_, _ = rig.RemoveImage(context.Background())
		}
	}()
	for _, step := range []struct {
		says string
		do   func(context.Context) error
	}{
		{"a placement server and three machines of two GPUs of 80 GiB, simulated", s.start},
		{"a service of ten tasks of 20 GiB", s.serviceRuns},
		{"a container that wants more than its cap is refused", s.overCap},
		{"a task that fits nowhere says why", s.fitsNowhere},
		{"the server is killed (kill -9) and started again: no container notices", s.serverKilled},
		{"a GPU's MPS daemon is killed: its tasks run elsewhere before they are stopped", s.daemonLost},
		{"it is killed each time it comes back, until one failure is left in its budget", s.budgetSpent},
		{"another machine is drained: first without doing it, then so that tasks are on that GPU again", s.drained},
		{"the last failure, with tasks on the GPU: they move, it is given up, the machine is replaced", s.givenUp},
		{"Ctrl-C: nothing is left", s.end},
	} {
		fmt.Printf("\n--- %s\n", step.says)
		if err := step.do(ctx); err != nil {
			s.check(false, "%v", err)
			return
		}
	}
}

// check prints one thing that was looked at, and counts it.
func (s *story) check(ok bool, format string, args ...any) bool {
	s.checks++
	word := "ok  "
	if !ok {
		s.failed++
		word = "NOT "
	}
	fmt.Printf("%s  %s\n", word, fmt.Sprintf(format, args...))
	return ok
}

// --- the steps ---

func (s *story) start(ctx context.Context) error {
	if err := s.Sweep(ctx); err != nil {
		return err
	}
	_, _ = rig.RemoveImage(ctx) // an older one, which would lose its name and stay
	began := time.Now()
	f, err := s.Start(ctx)
	if err != nil {
		return err
	}
	s.meet(f)
	s.check(len(f.Well()) == machines, "%d machines have joined and are well, %s after the start", len(f.Well()), time.Since(began).Round(100*time.Millisecond))
	return nil
}

// meet remembers the machines of a picture: none of them may leave anything.
func (s *story) meet(f rig.Fleet) {
	for _, in := range f.Instances {
		s.seen[in.Name] = true
	}
}

func (s *story) serviceRuns(ctx context.Context) error {
	if err := s.Berth(ctx, "service", "create", service, "-f", "testdata/taskdefs/share-20gib-1.json", "--count", fmt.Sprint(desired), "--wait"); err != nil {
		return err
	}
	f, err := s.Until(ctx, 20*time.Second, "every client holds its memory", func(f rig.Fleet) bool {
		return len(f.Running(service)) == desired && used(f) == desired
	})
	if err != nil {
		return err
	}
	s.watch = watch(&s.System)
	capped := 0
	for _, t := range f.Running(service) {
		env, err := rig.Environment(ctx, t.Containers[0].RuntimeID)
		if err != nil {
			return err
		}
		if env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == fmt.Sprintf("0=%dM", sliceMiB) {
			capped++
		}
	}
	s.check(capped == desired, "%d tasks run, each container with a cap of %d MiB", capped, sliceMiB)
	ok := true
	for _, in := range f.Instances {
		for _, g := range in.GPUs {
			var sum int64
			for _, sl := range g.Slices {
				sum += sl.MemoryInMiB
			}
			if sum > g.TotalMemoryInMiB || len(g.Slices) > 0 && (g.SharingMode != api.ModeNvidiaMPS || g.ComputeMode != "EXCLUSIVE_PROCESS" || !g.Held) {
				ok = s.check(false, "GPU %d of %s: %d of %d MiB promised, %s, %s, held: %v", g.Index, in.Name, sum, g.TotalMemoryInMiB, g.SharingMode, g.ComputeMode, g.Held)
			}
		}
	}
	if ok {
		s.check(true, "no GPU has promised more than it has; each with a task is held, NVIDIA_MPS and EXCLUSIVE_PROCESS")
	}
	return s.Berth(ctx, "top", "--once")
}

// used counts the service's slices whose client holds memory, by NVML.
func used(f rig.Fleet) (n int) {
	for _, in := range f.Instances {
		for _, g := range in.GPUs {
			for _, sl := range g.Slices {
				if sl.MemoryInMiB == sliceMiB && sl.UsedMemoryInMiB > 0 {
					n++
				}
			}
		}
	}
	return n
}

// task writes a definition of one container of the sample image, and returns the file.
func (s *story) task(family string, memoryMiB int, more string) (string, error) {
	file := s.Dir + "/" + family + ".json"
	return file, os.WriteFile(file, fmt.Appendf(nil, `{"family": %q, "containerDefinitions": [{"name": "c", "image": "berth-sample:latest",
  "entryPoint": ["/bin/cuda-client"], "command": ["run", "--memory", "1GiB"%s], "cpu": 64, "memory": 64,
  "resourceRequirements": [{"type": "GPU", "sharingStrategy": {"nvidiaMps": {"memory": %d}}}]}]}
`, family, more, memoryMiB), 0o644)
}

func (s *story) overCap(ctx context.Context) error {
	file, err := s.task("over-cap", 10240, `, "--over-cap-try"`) // takes all it can get, and says where it was refused
	if err != nil {
		return err
	}
	if err := s.Berth(ctx, "run", "-f", file); err != nil {
		return err
	}
	if _, err := s.Until(ctx, 30*time.Second, "the task over-cap runs", func(f rig.Fleet) bool { return len(f.Running("over-cap")) == 1 }); err != nil {
		return err
	}
	said, err := s.LogUntil(ctx, "over-cap", "CUDA_ERROR_OUT_OF_MEMORY")
	if err != nil {
		return err
	}
	s.check(true, "with a cap of 10240 MiB: %s", said)
	f, err := s.Look(ctx)
	if err != nil {
		return err
	}
	s.check(used(f) == desired, "%d neighbours hold their memory as before", used(f))
	return s.Berth(ctx, "stop", "over-cap", "--wait")
}

func (s *story) fitsNowhere(ctx context.Context) error {
	file, err := s.task("huge", 102400, "")
	if err != nil {
		return err
	}
	if err := s.Berth(ctx, "run", "-f", file); err != nil {
		return err
	}
	f, err := s.Until(ctx, 10*time.Second, "the task huge is pending", func(f rig.Fleet) bool { return f.Task("huge").Reason != "" })
	if err != nil {
		return err
	}
	if err := s.Berth(ctx, "explain", "huge"); err != nil {
		return err
	}
	var e api.Explanation
	if err := s.Get(ctx, "/v1/tasks/"+f.Task("huge").ID+"/explain", &e); err != nil {
		return err
	}
	gpus := 0
	for _, r := range e.RuledOut {
		gpus += r.GPUs
	}
	s.check(e.Machines == machines && e.GPUs == machines*gpusEach && gpus == e.GPUs, "each of the %d GPUs of %d machines is ruled out for a reason", gpus, e.Machines)
	return s.Berth(ctx, "stop", "huge", "--wait")
}

func (s *story) serverKilled(ctx context.Context) error {
	before, err := s.Look(ctx)
	if err != nil {
		return err
	}
	s.watch.away(true)
	killed := time.Now()
	if _, err := s.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	for len(s.watch.alone()) < 5 && time.Since(killed) < 10*time.Second && ctx.Err() == nil {
		time.Sleep(interval)
	}
	alone := s.watch.alone()
	s.check(len(alone) >= 5 && least(alone) == desired, "without a server Docker runs %d of them", least(alone))
	if _, err := s.Start(ctx); err != nil {
		return err
	}
	after, err := s.Until(ctx, 30*time.Second, "the service runs", func(f rig.Fleet) bool { return len(f.Running(service)) == desired })
	if err != nil {
		return err
	}
	s.watch.away(false)
	s.check(same(before, after), "the new server knows the same %d tasks in the same containers, none restarted, %s after the kill", desired, time.Since(killed).Round(100*time.Millisecond))
	return nil
}

// same says whether each of the service's running tasks is the very same in both
// pictures, with its container.
func same(before, after rig.Fleet) bool {
	now := map[string]rig.Task{}
	for _, t := range after.Running(service) {
		now[t.ID] = t
	}
	for _, t := range before.Running(service) {
		n, ok := now[t.ID]
		if !ok || n.Containers[0].RuntimeID != t.Containers[0].RuntimeID || n.Containers[0].RestartCount != t.Containers[0].RestartCount {
			return false
		}
	}
	return len(now) == len(before.Running(service))
}

func (s *story) end(ctx context.Context) error {
	f, err := s.Look(ctx)
	if err != nil {
		return err
	}
	s.meet(f)
	s.watch.stop()
	s.watched()
	state, err := s.Signal(os.Interrupt)
	if err != nil {
		return err
	}
	s.check(state.ExitCode() == 0, "berth dev ended by itself, %s", state)
	used, err := rig.RemoveImage(ctx)
	if err != nil {
		return err
	}
	if used {
		fmt.Println("      the image berth-sample:latest stays: a container that is none of the demo's has it")
	}
	var names []string
	for name := range s.seen {
		names = append(names, name)
	}
	left, err := s.AllLeftovers(ctx, names...)
	if err != nil {
		return err
	}
	s.check(len(left) == 0, "no process, container, mount, cgroup, folder or socket of the %d machines and the server is left", len(names))
	for _, l := range left {
		fmt.Printf("        %s\n", l)
	}
	return nil
}
