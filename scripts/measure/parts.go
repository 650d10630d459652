package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/scripts/rig"
)

// How often each thing is done. The issue of each number is its spread, so there are
// enough for a median on a busy machine.
const (
	starts  = 15
	deaths  = 30
	probes  = 100
	gpus    = 8
	perGPU  = 6
	warmUps = 2
)

// agent measures one agent by itself.
func (m *measure) agent(ctx context.Context) error {
	for _, part := range []func(context.Context) error{m.starts, m.deadDaemons, m.probes, m.idleAgent} {
		if err := part(ctx); err != nil {
			return err
		}
	}
	return nil
}

// starts compares a container of the agent with one of plain Docker: the same image
// and program, by turns, each from the request to create it to the moment that Docker gives as
// its start. The agent's turn has the gate, the task's cgroup and the environment in it.
func (m *measure) starts(ctx context.Context) error {
	if err := m.prepare(ctx, 1); err != nil {
		return err
	}
	if err := m.hold(ctx); err != nil {
		return err
	}
	var plain, ours, whole []time.Duration
	for i := range starts + warmUps {
		p, _, err := rig.PlainStart(ctx, "berth-sample:latest", []string{"/bin/cuda-client", "sleep", "1h"})
		if err != nil {
			return err
		}
		name := fmt.Sprintf("start-%02d", i)
		asked := time.Now()
		if err := os.WriteFile(m.Task(name), []byte(task(name, 1024)), 0o644); err != nil {
			return err
		}
		v, err := m.Until(ctx, 30*time.Second, name+" runs", func(v rig.View) bool { return v.Task(name).LastStatus == api.StatusRunning })
		if err != nil {
			return err
		}
		created, started, err := rig.Times(ctx, v.Task(name).Containers[0].RuntimeID)
		if err != nil {
			return err
		}
		if i >= warmUps {
			plain, ours, whole = append(plain, p), append(ours, started.Sub(created)), append(whole, started.Sub(asked))
		}
		if err := os.Remove(m.Task(name)); err != nil {
			return err
		}
		if _, err := m.Until(ctx, 30*time.Second, name+" has stopped", func(v rig.View) bool { return v.Gone(name) }); err != nil {
			return err
		}
	}
	m.printf("## Starting a container\n\n%d times by turns, the same image, from the container's creation to its start, by Docker's clock:\n\n", starts)
	m.printf("| | |\n|---|---|\n| plain Docker | %s |\n| the agent, capped, through the gate | %s |\n| the agent, from the file's appearance in the folder | %s |\n\n", spread(plain), spread(ours), spread(whole))
	ratio := float64(median(ours)) / float64(median(plain))
	m.goal(ratio <= 1.1, "at most 1.1 times plain Docker (here %.2f, by the medians)", ratio)
	return m.end(ctx)
}

// hold starts a task, so that the GPU is held: its server up, in exclusive mode.
func (m *measure) hold(ctx context.Context) error {
	if err := os.WriteFile(m.Task("held"), []byte(task("held", 1024)), 0o644); err != nil {
		return err
	}
	_, err := m.Until(ctx, time.Minute, "the GPU is held", func(v rig.View) bool { return v.GPUs[0].Held && v.AllUse() && len(v.Running()) == 1 })
	return err
}

// deadDaemons kills the daemon of a GPU with a running task again and again. The
// moment it is noticed is the supervisor's own, in the agent's log.
func (m *measure) deadDaemons(ctx context.Context) error {
	if err := m.prepare(ctx, 1, "  onDaemonLoss: restart", "  budget:", "    failures: 1000"); err != nil {
		return err
	}
	if err := m.hold(ctx); err != nil {
		return err
	}
	var noticed, back []time.Duration
	for range deaths {
		v, err := m.Until(ctx, time.Minute, "the GPU is held and the task runs", func(v rig.View) bool {
			return v.GPUs[0].Held && v.Task("held").LastStatus == api.StatusRunning && v.AllUse()
		})
		if err != nil {
			return err
		}
		pid := v.GPUs[0].MPS.DaemonPID
		killed := time.Now()
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			return fmt.Errorf("kill %d: %w", pid, err)
		}
		if _, err := m.Until(ctx, time.Minute, "another daemon", func(v rig.View) bool {
			return v.GPUs[0].MPS.DaemonPID != pid && v.GPUs[0].Held
		}); err != nil {
			return err
		}
		back = append(back, time.Since(killed))
		at, err := m.logged(killed, "mps: DRAINING")
		if err != nil {
			return err
		}
		noticed = append(noticed, at.Sub(killed))
	}
	m.printf("## Noticing a dead daemon\n\n`kill -9` of the control daemon, %d times, under a running task; from the signal to the supervisor's word that the GPU is closed:\n%s.\n\n", deaths, spread(noticed))
	m.list(noticed)
	m.printf("With `onDaemonLoss: restart`, until the GPU is held again (its container stopped, a new daemon, server and mode): %s.\n\n", spread(back))
	return m.end(ctx)
}

// logged is when the agent logged a message, after a moment.
func (m *measure) logged(after time.Time, message string) (time.Time, error) {
	f, err := os.Open(m.Log())
	if err != nil {
		return time.Time{}, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var l struct {
			TS  time.Time
			Msg string
		}
		if json.Unmarshal(lines.Bytes(), &l) == nil && l.Msg == message && l.TS.After(after) {
			return l.TS, nil
		}
	}
	return time.Time{}, errors.Join(lines.Err(), fmt.Errorf("%s has no %q after %s", m.Log(), message, after.Format(time.RFC3339Nano)))
}

// probes runs the control program as the agent does, one question each, against a
// held GPU's daemon.
func (m *measure) probes(ctx context.Context) error {
	if err := m.prepare(ctx, 1); err != nil {
		return err
	}
	v, err := m.Until(ctx, 30*time.Second, "a daemon runs", func(v rig.View) bool { return v.GPUs[0].MPS.DaemonPID != 0 })
	if err != nil {
		return err
	}
	pipe := v.GPUs[0].MPS.PipeDirectory
	var wall, cpu []time.Duration
	for range probes {
		cmd := exec.CommandContext(ctx, filepath.Join(m.Machine(), "bin", "nvidia-cuda-mps-control"))
		cmd.Env = []string{"CUDA_MPS_PIPE_DIRECTORY=" + filepath.Join(filepath.Dir(pipe), "client")}
		cmd.Stdin = strings.NewReader("get_default_active_thread_percentage\n")
		began := time.Now()
		out, err := cmd.Output()
		if err != nil || strings.TrimSpace(string(out)) != "100.0" {
			return fmt.Errorf("the daemon answered %q, %v", out, err)
		}
		wall = append(wall, time.Since(began))
		cpu = append(cpu, cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime())
	}
	m.printf("## A probe's cost\n\n%d runs of the control program with one question, through the client folder. The program is the simulator's; NVIDIA's own\n(R535) took 2.6 ms and 3 ms of CPU on an idle machine.\n\n", probes)
	m.printf("| | |\n|---|---|\n| wall clock | %s |\n| CPU | %s |\n\n", spread(wall), spread(cpu))
	return m.end(ctx)
}

// idleAgent watches an agent with every GPU shared and nothing to do.
func (m *measure) idleAgent(ctx context.Context) error {
	if err := m.prepare(ctx, gpus); err != nil {
		return err
	}
	for i := range gpus * perGPU {
		name := fmt.Sprintf("idle-%02d", i)
		if err := os.WriteFile(m.Task(name), []byte(task(name, 12288)), 0o644); err != nil {
			return err
		}
	}
	if _, err := m.Until(ctx, 4*time.Minute, "48 tasks run", func(v rig.View) bool { return len(v.Running()) == gpus*perGPU }); err != nil {
		return err
	}
	pid := m.PID()
	// The start's garbage is collected within two minutes even when nothing is
	// allocated; some of that is waited for.
	if err := pause(ctx, m.idle); err != nil {
		return err
	}
	own, children, err := cpuTime(pid)
	if err != nil {
		return err
	}
	began := time.Now()
	if err := pause(ctx, m.idle); err != nil {
		return err
	}
	own2, children2, err := cpuTime(pid)
	if err != nil {
		return err
	}
	took := time.Since(began)
	percent := func(d time.Duration) float64 { return 100 * float64(d) / float64(took) }
	rss, err := residentKiB(pid)
	if err != nil {
		return err
	}
	m.printf("## An idle agent\n\n%d GPUs, %d tasks, watched for %s:\n\n| | |\n|---|---|\n", gpus, gpus*perGPU, took.Round(time.Second))
	m.printf("| resident memory | %.1f MiB |\n| CPU of the agent | %.2f %% of a core |\n| CPU of its probes (the control programs it ran) | %.2f %% of a core |\n\n",
		float64(rss)/1024, percent(own2-own), percent(children2-children))
	m.goal(rss < 48<<10, "under 48 MiB resident")
	m.goal(percent(own2-own) < 1, "under 1 %% of a core")
	return m.end(ctx)
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return errors.New("interrupted")
	}
}

// cpuTime is what a process has used itself, and what its waited-for children have.
func cpuTime(pid int) (own, children time.Duration, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	ticks := func(i int) time.Duration {
		n, _ := strconv.ParseInt(fields[i], 10, 64)
		return time.Duration(n) * time.Second / 100 // USER_HZ is 100 on every architecture of ours
	}
	// proc(5): utime is field 14, and the first one after the name is field 3.
	return ticks(11) + ticks(12), ticks(13) + ticks(14), nil
}

func residentKiB(pid int) (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			return strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
		}
	}
	return 0, errors.New("no VmRSS in /proc/PID/status")
}
