package dev

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// markName is the variable that carries a machine's mark.
const markName = "DEV_MACHINE"

// process is one that lives and is known to be a machine's. Signals go through its
// handle, a pidfd, so that none reaches another process that has got its pid.
type process struct {
	pid    int
	start  uint64
	handle *os.Process
}

func (q *process) release() { _ = q.handle.Release() }

// hold takes hold of a process if it lives and is what ours says; nil when not.
func hold(pid int, ours func(start uint64) bool) *process {
	handle, err := os.FindProcess(pid)
	if err != nil {
		return nil
	}
	start, alive := lives(pid)
	if !alive || !ours(start) {
		_ = handle.Release()
		return nil
	}
	return &process{pid, start, handle}
}

// lives reads a process's start time. One in state Z is dead: it is reaped if it is this
// process's own.
func lives(pid int) (start uint64, alive bool) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false
	}
	// The name before it may hold anything.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 20 {
		return 0, false
	}
	if fields[0] == "Z" || fields[0] == "X" {
		_, _ = syscall.Wait4(pid, nil, syscall.WNOHANG, nil)
		return 0, false
	}
	start, err = strconv.ParseUint(fields[19], 10, 64)
	return start, err == nil
}

// marked says whether a process was started with a mark.
func marked(pid int, mark string) bool {
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	return err == nil && slices.Contains(strings.Split(string(env), "\x00"), markName+"="+mark)
}

// agentOf is a machine's agent, if it runs; also one that was started and not recorded.
func (p *Provider) agentOf(r record) *process {
	if r.PID != 0 {
		if q := hold(r.PID, func(start uint64) bool { return start == r.Start && marked(r.PID, r.Mark) }); q != nil {
			return q
		}
	}
	// One operation at a time starts an agent, and only where none runs: there is one.
	for _, q := range all(func(pid int) bool { return marked(pid, r.Mark) && doing(pid) == "run" }) {
		return q
	}
	return nil
}

// errands are the programs that an operation runs for a machine, of one that was cut
// short: they would meet their successors.
func (p *Provider) errands(r record) []*process {
	return all(func(pid int) bool { return marked(pid, r.Mark) && (doing(pid) == "sim" || doing(pid) == "purge") })
}

// doing is the first argument that a process was started with.
func doing(pid int) string {
	cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if args := strings.Split(string(cmdline), "\x00"); err == nil && len(args) > 1 {
		return args[1]
	}
	return ""
}

// all holds every living process that is ours.
func all(ours func(pid int) bool) (found []*process) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() || !ours(pid) {
			continue
		}
		if q := hold(pid, func(uint64) bool { return ours(pid) }); q != nil {
			found = append(found, q)
		}
	}
	return found
}

// left are the processes of a machine, whatever they are: they carry its mark, or run
// one of the programs in its folder.
func (p *Provider) left(r record) []*process {
	return all(func(pid int) bool {
		exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		return err == nil && strings.HasPrefix(exe, p.folder(r.ID)+"/") || marked(pid, r.Mark)
	})
}

// end sends a signal and waits for the process's end.
func (q *process) end(ctx context.Context, sig syscall.Signal, limit time.Duration) error {
	if err := q.handle.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) && !errors.Is(err, unix.ESRCH) {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return every(ctx, func() bool { start, alive := lives(q.pid); return !alive || start != q.start })
}

// every asks twenty-five times a second until it is so.
func every(ctx context.Context, so func() bool) error {
	tick := time.NewTicker(40 * time.Millisecond)
	defer tick.Stop()
	for !so() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// program runs one of berth's programs to its end, for the machine with a mark or for
// none. A person's Ctrl-C does not reach it.
func (p *Provider) program(ctx context.Context, limit time.Duration, mark, name string, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.WaitDelay = time.Second
	cmd.Env = environment(mark)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Dir = p.Dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("dev: %s %s: %w%s", filepath.Base(name), strings.Join(args, " "), err, lastLine(out))
	}
	return nil
}

// environment is this process's, without the settings of its own berth in it.
func environment(mark string) (env []string) {
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "BERTH_") && !strings.HasPrefix(kv, "ECS_") && !strings.HasPrefix(kv, markName+"=") {
			env = append(env, kv)
		}
	}
	if mark != "" {
		env = append(env, markName+"="+mark)
	}
	return env
}

func lastLine(out []byte) string {
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if last := lines[len(lines)-1]; last != "" {
		return ": " + last
	}
	return ""
}
