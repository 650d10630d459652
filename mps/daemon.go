package mps

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"
)

// daemon does to one GPU's control daemon and servers what the supervisor decides.
// It keeps no state but the place in the log.
type daemon struct {
	cfg     Config
	uuid    string
	dirs    Dirs
	control *Control
	hooks   Hooks
}

// pollEvery is how often a start or stop in progress is looked at, through /proc
// and the log; multiUserWindow is how soon a binary that knows no
// -multiuser-server has ended.
const (
	pollEvery       = 10 * time.Millisecond
	multiUserFlag   = "-multiuser-server"
	multiUserWindow = time.Second
)

var (
	errDaemonEnded = errors.New("the daemon ended")
	errDaemonExit1 = errors.New("the daemon exited")
)

// start brings up a daemon that carries the id, which the caller has stored. It
// is ready when the lock and the socket are its own and it answers through
// client/. When ctx ends it is left alone: a new agent finds it by its id.
func (d *daemon) start(ctx context.Context, id string) (p Process, singleUID bool, err error) {
	if err := d.dirs.Create(); err != nil {
		return Process{}, false, err
	}
	if holder, err := lockHolder(d.dirs.lock()); err != nil {
		return Process{}, false, err
	} else if holder != 0 {
		return Process{}, false, errors.New(sayStranger(d.dirs, holder))
	}
	began := time.Now()
	p, err = d.startOnce(ctx, id, "-f", multiUserFlag)
	if !errors.Is(err, errDaemonExit1) || time.Since(began) > multiUserWindow {
		return p, false, err
	}
	// R535 exits with 1 for a flag it does not know, and what it prints then is about
	// something else [B]. Tried anew each time: the driver may have been upgraded.
	p, err = d.startOnce(ctx, id, "-f")
	return p, true, err
}

func (d *daemon) startOnce(ctx context.Context, id string, args ...string) (Process, error) {
	log, err := os.OpenFile(d.dirs.ControlLog(), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return Process{}, fmt.Errorf("log of the MPS control daemon: %w", err)
	}
	defer log.Close()
	lines := tail{path: d.dirs.ControlLog()}
	lines.skipToEnd()

	// No context and no parent-death signal: it outlives the agent. Its own session:
	// a terminal's Ctrl-C does not reach it. A file, not a pipe: nobody may be there
	// to read, and 64 KiB unread wedge it with every client [B].
	cmd := exec.Command(d.cfg.ControlBinary, args...)
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Env = append(d.cfg.environment(),
		envVisible+"="+d.uuid, envOrder+"=PCI_BUS_ID",
		envPipe+"="+d.dirs.Pipe(), envLog+"="+d.dirs.Logs(),
		envID+"="+id)
	if err := cmd.Start(); err != nil {
		return Process{}, fmt.Errorf("start the MPS control daemon: %w", err)
	}
	pid := cmd.Process.Pid
	defer cmd.Process.Release()

	ctx, cancel := context.WithTimeoutCause(ctx, d.cfg.StartTimeout, errors.New("start timeout"))
	defer cancel()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	linked := false
	last := errors.New("it has not taken its lock")
	for {
		// As our child it is a zombie until we wait for it, so the pid is its own.
		stat, err := readStat(pid)
		if err != nil || stat.dead() {
			state, _ := cmd.Process.Wait()
			ended := errDaemonEnded // killed, say: that says nothing about its flags
			if state != nil && state.ExitCode() == 1 {
				ended = errDaemonExit1
			}
			return Process{}, fmt.Errorf("%w: %s %s: %v%s", ended, controlName, strings.Join(args, " "), state, lastWords(lines.next()))
		}
		if !linked {
			if last = d.owned(pid); last == nil {
				last = d.dirs.relink()
				linked = last == nil
			}
		}
		if linked {
			if last = d.control.Probe(ctx); last == nil {
				return Process{PID: pid, Start: stat.start}, nil
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return Process{}, fmt.Errorf("the MPS control daemon (pid %d) does not answer within %v: %w", pid, d.cfg.StartTimeout, last)
		}
	}
}

// owned says whether lock and socket of the pipe folder are this daemon's.
func (d *daemon) owned(pid int) error {
	holder, err := lockHolder(d.dirs.lock())
	if err != nil {
		return err
	}
	if holder != pid {
		return fmt.Errorf("%s is held by pid %d, not by pid %d", d.dirs.lock(), holder, pid)
	}
	owner, err := socketOwner(d.dirs.socket())
	if err != nil {
		return err
	}
	if owner != pid {
		return fmt.Errorf("%s is pid %d's, not pid %d's", d.dirs.socket(), owner, pid)
	}
	return nil
}

// lastWords quotes the end of a log, for a reason.
func lastWords(lines []logLine) string {
	if len(lines) == 0 {
		return ", without a word"
	}
	return ": " + lines[len(lines)-1].text
}

// look finds what runs for this GPU, and says whether the daemon can be adopted. One
// that was started a moment ago, by an agent that then died, is given its time.
func (d *daemon) look(ctx context.Context, id string, server Process) (Found, error) {
	if err := d.dirs.Create(); err != nil {
		return Found{}, err
	}
	tick := time.NewTicker(5 * pollEvery)
	defer tick.Stop()
	began := time.Now()
	for {
		f, err := d.lookOnce(ctx, id, server)
		dying := f.holder > 0 && time.Since(began) < d.cfg.StopTimeout && d.dying(f.holder)
		if err != nil || !dying && (f.Problem == "" || d.owned(f.Daemon.PID) == nil || !f.Daemon.younger(d.cfg.StartTimeout)) {
			return f.Found, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return Found{}, ctx.Err()
		}
	}
}

// glimpse is one look.
type glimpse struct {
	Found
	holder int // of the lock, who is none of ours
}

// dying says whether a process that held the lock holds it no longer, or is dead and
// about to let go of it. One that is killed is none of ours from its death on, and may
// have had the lock a moment before.
func (d *daemon) dying(holder int) bool {
	if now, err := lockHolder(d.dirs.lock()); err != nil || now != holder {
		return true
	}
	stat, err := readStat(holder)
	return err != nil || stat.dead()
}

func (d *daemon) lookOnce(ctx context.Context, id string, server Process) (f glimpse, err error) {
	if f.Exclusive, err = d.hooks.ComputeMode(ctx); err != nil && !errors.Is(err, ErrGPUGone) {
		return glimpse{}, fmt.Errorf("compute mode: %w", err)
	}
	holder, err := lockHolder(d.dirs.lock())
	if err != nil {
		return glimpse{}, err
	}
	kin, err := findFamily(id, d.dirs.Pipe())
	if err != nil {
		return glimpse{}, err
	}
	// The daemon is whoever of ours has the lock; without one, ours that is no server.
	rest := kin.ours
	is := func(test func(Process) bool) {
		if i := slices.IndexFunc(rest, test); i >= 0 && f.Daemon.PID == 0 {
			f.Daemon, rest = rest[i], slices.Delete(slices.Clone(rest), i, i+1)
		}
	}
	is(func(p Process) bool { return p.PID == holder })
	if f.Daemon.PID == 0 {
		is(func(p Process) bool { return !isServer(p.PID) })
		if f.Daemon.PID != 0 {
			if now, _ := lockHolder(d.dirs.lock()); now == f.Daemon.PID {
				return d.lookOnce(ctx, id, server) // it was just starting, and has taken the lock since
			}
			f.Problem = fmt.Sprintf("the MPS control daemon (%v) has lost its lock on %s", f.Daemon, d.dirs.Pipe())
		}
	}
	f.Orphans = rest
	switch {
	case f.Daemon.PID != holder && holder != 0:
		f.Stranger, f.holder = sayStranger(d.dirs, holder), holder
	case len(kin.strangers) > 0:
		f.Stranger = sayStrangeServer(d.dirs, kin.strangers[0])
	}
	if f.Daemon.PID == 0 || f.Problem != "" {
		return f, nil
	}
	if f.Problem = d.cannotAdopt(ctx, f.Daemon); f.Problem != "" {
		return f, nil
	}
	f.SingleUID = !multiUser(f.Daemon.PID)
	f.Found, err = d.lookServers(ctx, f.Found, server)
	return f, err
}

// multiUser says whether a daemon was started to serve all users with one server.
func multiUser(pid int) bool {
	cmdline, _ := os.ReadFile(procPath(pid, "cmdline"))
	return slices.Contains(strings.Split(string(cmdline), "\x00"), multiUserFlag)
}

// cannotAdopt says what is wrong with a daemon of ours, or "".
func (d *daemon) cannotAdopt(ctx context.Context, p Process) string {
	if p.view().Stopped() {
		return sayDaemonStopped(p)
	}
	env, err := readEnvironment(p.PID)
	if err != nil {
		return fmt.Sprintf("the environment of the MPS control daemon (%v) cannot be read: %v", p, err)
	}
	for name, want := range map[string]string{envVisible: d.uuid, envPipe: d.dirs.Pipe()} {
		if got := env.get(name); got != want {
			return fmt.Sprintf("the MPS control daemon (%v) was started with %s=%s, not %s", p, name, got, want)
		}
	}
	if err := d.owned(p.PID); err != nil {
		return fmt.Sprintf("the MPS control daemon (%v): %v", p, err)
	}
	// The agent may have died between start and link.
	if err := d.dirs.relink(); err != nil {
		return fmt.Sprintf("the MPS control daemon (%v): %v", p, err)
	}
	// As when it is watched, one probe without an answer is none.
	for range maxProbes {
		if err = d.control.Probe(ctx); err == nil {
			return ""
		}
	}
	return sayWedged(p, maxProbes, err.Error())
}

// lookServers finds the daemon's server among ours. A server that was recorded
// was ready; of another one the daemon or its log has to say so.
func (d *daemon) lookServers(ctx context.Context, f Found, recorded Process) (Found, error) {
	cannot := func(err error) (Found, error) {
		f.Problem = fmt.Sprintf("the MPS control daemon (%v) does not tell of its servers: %v", f.Daemon, err)
		return f, ctx.Err()
	}
	list, err := d.control.Servers(ctx)
	if err != nil {
		return cannot(err)
	}
	for _, pid := range list {
		p, err := identify(pid)
		if err != nil {
			continue // listed until it is reaped [B]
		}
		f.Orphans = slices.DeleteFunc(f.Orphans, func(o Process) bool { return o == p })
		status, err := d.control.ServerStatus(ctx, pid)
		switch {
		case errors.Is(err, ErrNoServer):
		case errors.Is(err, ErrUnknownCommand):
			lines := tail{path: d.dirs.ControlLog()}
			if p == recorded || logSaysReady(lines.next(), pid) {
				f.Server = p
			} else {
				f.Starting = true
			}
		case err != nil:
			return cannot(err)
		case status == "ACTIVE":
			f.Server = p
		case status == "FAULT":
			f.ServerProblem = sayInFault(p)
		default:
			f.Starting = true
		}
	}
	// A child of the daemon that is not listed yet is no orphan.
	f.Orphans = slices.DeleteFunc(f.Orphans, func(o Process) bool {
		stat, err := readStat(o.PID)
		child := err == nil && stat.ppid == f.Daemon.PID
		f.Starting = f.Starting || child
		return child || err != nil
	})
	if len(f.Orphans) == 0 {
		f.Orphans = nil
	}
	return f, nil
}

func logSaysReady(lines []logLine, server int) bool {
	ready := false
	for _, line := range lines {
		switch kind, pid := line.kind(); {
		case pid != server:
		case kind == logServerReady:
			ready = true
		case kind == logServerStarting:
			ready = false // a pid used again
		}
	}
	return ready
}
