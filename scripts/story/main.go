// Command story is make demo: it starts an agent on a simulated machine, lets happen
// to it what happens in life, and checks after each step that everything is as it
// should be. It uses what an operator uses: berth, berth-agent, the task folder and
// the agent's socket. It ends with 1 when anything was not as it should be.
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

// Short, so that the demo shows what becomes of tasks whose daemon was lost.
const drainDeadline = 3 * time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	s := &story{Rig: rig.Rig{Dir: "build/demo", Instance: "makedemo", RunDir: "/run/berth-demo"}, began: time.Now()}
	s.tell(ctx)
	if s.failed > 0 {
		fmt.Printf("\ndemo: %d of %d were not as they should be; %s has the agent's log\n", s.failed, s.checks, s.Log())
		os.Exit(1)
	}
	fmt.Printf("\ndemo: all %d as they should be, in %s\n", s.checks, time.Since(s.began).Round(time.Second))
}

// story is the demo under way.
type story struct {
	rig.Rig
	began          time.Time
	checks, failed int
}

// tell goes through the steps. A step that cannot be gone past ends the story; what
// the agent made is taken away in any case.
func (s *story) tell(ctx context.Context) {
	defer func() {
		if err := s.Abandon(); err != nil {
			s.check(false, "taking everything away: %v", err)
		}
	}()
	for _, step := range []struct {
		says string
		do   func(context.Context) error
	}{
		{"a simulated machine of two GPUs of 80 GiB, and the agent", s.start},
		{"four tasks of 20 GiB and one of 30 GiB run; another of 30 GiB waits", s.tasksRun},
		{"a container that wants more than its cap is refused, its neighbours feel nothing", s.overCap},
		{"a task is taken out of the folder: the one that waited takes its place", s.roomFreed},
		{"the MPS daemon of GPU 0 is killed: the GPU closes, drains and opens again", s.daemonLost},
		{"the agent is killed (kill -9): a new one adopts every container and daemon", s.agentKilled},
		{"the agent ends (SIGTERM): containers and daemons go on without it", s.agentEnds},
		{"berth-agent purge: nothing is left", s.purge},
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
	if err := s.Prepare(ctx, 2, "  drainDeadline: "+drainDeadline.String()); err != nil {
		return err
	}
	if err := s.Start(ctx); err != nil {
		return err
	}
	var checks []api.Check
	if err := s.Get(ctx, api.PathDoctor, &checks); err != nil {
		return err
	}
	ok := true
	for _, c := range checks {
		if !c.OK && !c.Warn {
			ok = s.check(false, "doctor: %s: %s", c.Name, c.Says)
		}
	}
	if ok {
		s.check(len(checks) > 0, "berth doctor: %d checks, none failed", len(checks))
	}
	return nil
}

func (s *story) tasksRun(ctx context.Context) error {
	v, err := s.Until(ctx, 30*time.Second, "five tasks run and one waits", func(v rig.View) bool {
		return len(v.Running()) == 5 && len(v.Waiting) == 1
	})
	if err != nil {
		return err
	}
	for _, t := range v.Running() {
		for _, c := range t.Containers {
			env, err := rig.Environment(ctx, c.RuntimeID)
			if err != nil {
				return err
			}
			want := fmt.Sprintf("0=%dM", c.MemoryInMiB)
			got := env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"]
			s.check(got == want && c.MemoryInMiB > 0, "%s holds %d MiB of GPU %s; its container is told %s", t.Name, c.MemoryInMiB, v.Indexes(t.GPUIDs), got)
		}
	}
	for _, g := range v.GPUs {
		var sum int64
		for _, sl := range g.Slices {
			sum += sl.MemoryInMiB
		}
		s.check(sum <= g.TotalMemoryInMiB && g.SharingMode == api.ModeNvidiaMPS && g.ComputeMode == "EXCLUSIVE_PROCESS" && g.Held,
			"GPU %d is held, %s and %s, with %d of %d MiB promised", g.Index, g.SharingMode, g.ComputeMode, sum, g.TotalMemoryInMiB)
	}
	w := v.Waiting[0]
	s.check(rig.NamesEach(w.Reasons, v.GPUs), "%s waits, and is told of both GPUs what each lacks", w.Name)
	for _, r := range w.Reasons {
		fmt.Printf("        %s\n", r)
	}
	// Clients take a moment to allocate.
	if _, err := s.Until(ctx, 10*time.Second, "every client holds its memory", func(v rig.View) bool { return v.AllUse() }); err != nil {
		return err
	}
	return rig.Command(ctx, "build/berth", "top", "--once", "--socket", s.Socket())
}

func (s *story) overCap(ctx context.Context) error {
	before, err := s.Look(ctx)
	if err != nil {
		return err
	}
	file := s.Task("over-cap")
	if err := os.WriteFile(file, []byte(overCapTask), 0o644); err != nil {
		return err
	}
	v, err := s.Until(ctx, 20*time.Second, "the task over-cap runs", func(v rig.View) bool { return v.Task("over-cap").LastStatus == api.StatusRunning })
	if err != nil {
		return err
	}
	said, err := s.LogUntil(ctx, v.Task("over-cap").ID, "CUDA_ERROR_OUT_OF_MEMORY")
	if err != nil {
		return err
	}
	s.check(true, "a container with a cap of 10240 MiB: %s", said)
	after, err := s.Look(ctx)
	if err != nil {
		return err
	}
	s.check(rig.SameContainers(before, after), "the other containers are the same ones, running, none restarted")
	same := true
	for _, t := range before.Running() {
		if b, a := before.UsedBy(t.Name), after.UsedBy(t.Name); a != b {
			same = s.check(false, "%s held %d MiB and holds %d", t.Name, b, a)
		}
	}
	if same {
		s.check(true, "each of them holds the GPU memory that it held before")
	}
	if err := os.Remove(file); err != nil {
		return err
	}
	_, err = s.Until(ctx, 20*time.Second, "the task over-cap has stopped", func(v rig.View) bool { return v.Gone("over-cap") })
	return err
}

// Its image is the sample; it takes all it can get, and says where it was refused.
const overCapTask = `{"family": "over-cap", "containerDefinitions": [{"name": "greedy", "image": "berth-sample:latest",
  "entryPoint": ["/bin/cuda-client"], "command": ["run", "--memory", "1GiB", "--over-cap-try"], "cpu": 64, "memory": 64,
  "resourceRequirements": [{"type": "GPU", "sharingStrategy": {"nvidiaMps": {"memory": 10240}}}]}]}
`

func (s *story) daemonLost(ctx context.Context) error {
	before, err := s.Look(ctx)
	if err != nil {
		return err
	}
	g := before.GPUs[0]
	killed := time.Now()
	if err := rig.Command(ctx, "build/berth", "fault", "kill-daemon", "--machine", s.Machine(), "--gpu", g.ID); err != nil {
		return err
	}
	closed, err := s.Until(ctx, 5*time.Second, "GPU 0 is closed", func(v rig.View) bool { return !v.GPUs[0].Held })
	if err != nil {
		return err
	}
	s.check(true, "closed after %s: %s", time.Since(killed).Round(time.Millisecond), closed.GPUs[0].HeldReason)
	alive := 0
	for _, sl := range g.Slices {
		t := closed.ByID(sl.TaskID)
		if up, err := rig.Runs(ctx, t.Container(sl.Container).RuntimeID); err == nil && up {
			alive++
		}
	}
	s.check(alive == len(g.Slices) || time.Since(killed) > drainDeadline, "its %d containers live on, to the drain deadline of %s", alive, drainDeadline)
	s.check(closed.GPUs[1].Held, "GPU 1 is held all the while")
	back, err := s.Until(ctx, 30*time.Second, "GPU 0 is held again, with five tasks running", func(v rig.View) bool {
		return v.GPUs[0].Held && v.GPUs[0].MPS.DaemonPID != g.MPS.DaemonPID && len(v.Running()) == 5 && v.AllUse()
	})
	if err != nil {
		return err
	}
	s.check(back.GPUs[0].MPS.Restarts == g.MPS.Restarts+1, "back after %s with another daemon (pid %d), %d restart counted, and its tasks started again",
		time.Since(killed).Round(100*time.Millisecond), back.GPUs[0].MPS.DaemonPID, back.GPUs[0].MPS.Restarts-g.MPS.Restarts)
	s.check(time.Since(killed) > drainDeadline, "not before the deadline")
	return nil
}

func (s *story) agentKilled(ctx context.Context) error {
	before, err := s.Look(ctx)
	if err != nil {
		return err
	}
	if _, err := s.Signal(os.Kill); err != nil {
		return err
	}
	up := 0
	for _, t := range before.Running() {
		if ok, err := rig.Runs(ctx, t.Containers[0].RuntimeID); err == nil && ok {
			up++
		}
	}
	s.check(up == len(before.Running()), "without an agent, %d containers run", up)
	if err := s.Start(ctx); err != nil {
		return err
	}
	after, err := s.Until(ctx, 20*time.Second, "both GPUs are held and every task runs", func(v rig.View) bool {
		return v.GPUs[0].Held && v.GPUs[1].Held && len(v.Running()) == len(before.Running())
	})
	if err != nil {
		return err
	}
	s.check(rig.SameContainers(before, after), "the new agent has the same containers, none restarted")
	for i, g := range after.GPUs {
		was := before.GPUs[i].MPS
		s.check(g.MPS.DaemonPID == was.DaemonPID && g.MPS.ServerPID == was.ServerPID, "GPU %d: the same daemon (pid %d) and server (pid %d)", i, g.MPS.DaemonPID, g.MPS.ServerPID)
	}
	return nil
}

func (s *story) roomFreed(ctx context.Context) error {
	before, err := s.Look(ctx)
	if err != nil {
		return err
	}
	waits := before.Waiting[0].Name
	if err := os.Remove(s.Task("share-30gib-1")); err != nil {
		return err
	}
	after, err := s.Until(ctx, 30*time.Second, waits+" runs", func(v rig.View) bool { return v.Task(waits).LastStatus == api.StatusRunning })
	if err != nil {
		return err
	}
	s.check(len(after.Waiting) == 0, "%s runs on GPU %s, and nothing waits", waits, after.Indexes(after.Task(waits).GPUIDs))
	return nil
}

func (s *story) agentEnds(ctx context.Context) error {
	before, err := s.Look(ctx)
	if err != nil {
		return err
	}
	state, err := s.Signal(syscall.SIGTERM)
	if err != nil {
		return err
	}
	s.check(state.ExitCode() == 0, "the agent ended by itself, %s", state)
	up := 0
	for _, t := range before.Running() {
		if ok, err := rig.Runs(ctx, t.Containers[0].RuntimeID); err == nil && ok {
			up++
		}
	}
	s.check(up == len(before.Running()) && up > 0, "%d containers run on", up)
	s.check(len(s.Programs()) >= 4, "%d MPS processes run on", len(s.Programs()))
	return nil
}

func (s *story) purge(ctx context.Context) error {
	if err := s.Rig.Purge(ctx); err != nil {
		return err
	}
	left, err := s.Leftovers(ctx)
	if err != nil {
		return err
	}
	s.check(len(left) == 0, "no container, MPS process, compute mode, folder, mount or cgroup is left")
	for _, l := range left {
		fmt.Printf("        %s\n", l)
	}
	return nil
}
