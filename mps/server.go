package mps

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// startError is why a server did not come up.
type startError struct {
	reason    string
	permanent bool
}

func (e *startError) Error() string { return e.reason }

// askEvery is how often the daemon itself is asked while a server starts or ends;
// in between the log and /proc tell. It reaps a failed server when it is spoken to [B].
const askEvery = 250 * time.Millisecond

// startServer has a server come up and returns it when it is ready.
func (d *daemon) startServer(ctx context.Context, parent Process, id string) (Process, error) {
	ours, cancel := context.WithTimeout(ctx, d.cfg.ServerStartTimeout)
	defer cancel()
	p, err := d.awaitServer(ours, parent, id)
	if err != nil && ours.Err() != nil && ctx.Err() == nil {
		return p, &startError{reason: fmt.Sprintf("no MPS server of the control daemon (%v) is ready after %v", parent, d.cfg.ServerStartTimeout)}
	}
	return p, err
}

func (d *daemon) awaitServer(ctx context.Context, parent Process, id string) (Process, error) {
	// A server takes the defaults of the moment it is made, and any user of the
	// client folder can have set them [B].
	if err := d.reapply(ctx); err != nil {
		return Process{}, err
	}
	list, err := d.control.Servers(ctx)
	if err != nil {
		return Process{}, err
	}
	lines := tail{path: d.dirs.ControlLog()}
	var since []logLine
	if len(list) == 0 {
		lines.skipToEnd()
		if err := d.control.StartServer(ctx, 0); err != nil {
			return Process{}, fmt.Errorf("start_server: %w", err)
		}
	}
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	var asked time.Time
	pid, missing := 0, 0
	for {
		fresh := lines.next()
		since = append(since, fresh...)
		said := false
		for _, line := range fresh {
			switch kind, server := line.kind(); kind {
			case logServerStarting:
				pid = server
			case logServerReady, logServerExited, logServerFatal, logServerFailed:
				said = true
			}
		}
		if said || time.Since(asked) >= askEvery {
			asked = time.Now()
			list, err := d.control.Servers(ctx)
			if err != nil {
				return Process{}, err
			}
			if len(list) > 0 {
				missing = 0
				if pid == 0 || !slices.Contains(list, pid) {
					pid = list[0]
				}
			} else {
				missing++
			}
			// Twice: the first list may be older than the server.
			if missing > 1 {
				since = append(since, lines.next()...)
				reason, permanent := startFailure(pid, since)
				return Process{}, &startError{reason, permanent}
			}
			if missing == 0 {
				ready, err := d.ready(ctx, pid, since)
				if err != nil {
					return Process{}, err
				}
				if ready {
					return d.recognise(pid, parent, id)
				}
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return Process{}, ctx.Err()
		}
	}
}

// ready asks for the server's state, and where the daemon has no word for it, its log.
func (d *daemon) ready(ctx context.Context, pid int, since []logLine) (bool, error) {
	status, err := d.control.ServerStatus(ctx, pid)
	switch {
	case errors.Is(err, ErrUnknownCommand):
		return logSaysReady(since, pid), nil
	case errors.Is(err, ErrNoServer):
		return false, nil
	case err != nil:
		return false, err
	case status == "FAULT":
		return false, &startError{reason: fmt.Sprintf("the MPS server (pid %d) came up in FAULT", pid)}
	}
	return status == "ACTIVE", nil
}

// recognise makes sure that a server is the daemon's and carries our id.
func (d *daemon) recognise(pid int, parent Process, id string) (Process, error) {
	p, err := identify(pid)
	if err != nil {
		return Process{}, fmt.Errorf("the MPS server (pid %d): %w", pid, err)
	}
	env, err := readEnvironment(pid)
	if err != nil {
		return Process{}, fmt.Errorf("the MPS server (pid %d): %w", pid, err)
	}
	if got := env.get(envID); got != id {
		return Process{}, fmt.Errorf("the MPS server (pid %d) carries %s=%q, not the %q of its daemon (%v)", pid, envID, got, id, parent)
	}
	return p, nil
}

// stopServers shuts down every server of the daemon, by force when it does not
// go, and sees to it that none is left.
func (d *daemon) stopServers(ctx context.Context, force bool) error {
	limit := d.cfg.StopTimeout
	if !force {
		limit *= 2 // one to go by themselves, one by force
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	began := time.Now()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	told := map[int]bool{} // by force or not
	var asked time.Time
	for {
		if time.Since(asked) >= askEvery || asked.IsZero() {
			asked = time.Now()
			list, err := d.control.Servers(ctx)
			if err != nil {
				return fmt.Errorf("shut the MPS server down: %w", err)
			}
			if len(list) == 0 {
				return nil
			}
			hard := force || time.Since(began) > d.cfg.StopTimeout
			for _, pid := range list {
				if was, ok := told[pid]; ok && was == hard {
					continue
				}
				told[pid] = hard
				if err := d.control.ShutdownServer(ctx, pid, hard); err != nil && !errors.Is(err, ErrNoServer) {
					return fmt.Errorf("shut the MPS server (pid %d) down: %w", pid, err)
				}
				asked = time.Time{}
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("the MPS servers %v are not gone %v after shutdown_server -f", keys(told), limit)
		}
	}
}

func keys(m map[int]bool) []int {
	var list []int
	for k := range m {
		list = append(list, k)
	}
	slices.Sort(list)
	return list
}

// quit stops the daemon and sees to it that nothing of ours is left.
func (d *daemon) quit(ctx context.Context, p Process, id string) error {
	seconds := max(1, int(d.cfg.StopTimeout/time.Second)/2)
	if err := d.control.Quit(ctx, seconds); err != nil && !errors.Is(err, ErrNotRunning) {
		return fmt.Errorf("quit: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, d.cfg.StopTimeout)
	defer cancel()
	tick := time.NewTicker(5 * pollEvery)
	defer tick.Stop()
	for {
		reap(p.PID)
		kin, err := findFamily(id, d.dirs.Pipe())
		if err != nil {
			return err
		}
		if len(kin.ours) == 0 {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%v runs on after quit", kin.ours)
		}
	}
}

// killAll ends processes of ours, in the order given.
func (d *daemon) killAll(ctx context.Context, list []Process, id string) error {
	ctx, cancel := context.WithTimeout(ctx, d.cfg.StopTimeout)
	defer cancel()
	var errs []error
	for _, p := range list {
		errs = append(errs, kill(ctx, p, id))
	}
	return errors.Join(errs...)
}

// The defaults berth wants: none. A client's caps come with its environment, and a
// lower default would only cap those that ask for more.
const (
	defaultPercent  = 100
	defaultLimitMiB = 0
)

// reapply sets the defaults of servers to come, each read back.
func (d *daemon) reapply(ctx context.Context) error {
	if err := d.control.SetMemoryLimit(ctx, defaultLimitMiB); err != nil {
		return err
	}
	if err := d.control.SetThreadPercent(ctx, defaultPercent); err != nil {
		return err
	}
	return d.control.setNormalPriority(ctx)
}

// inspect is the periodic look at a GPU that is well.
func (d *daemon) inspect(ctx context.Context, p, server Process) Inspected {
	var i Inspected
	if holder, err := lockHolder(d.dirs.lock()); err != nil {
		i.Split = "the lock of the MPS control daemon cannot be looked at: " + err.Error()
	} else if holder != p.PID {
		i.Split = sayLocksElsewhere(p, holder)
	} else if same, err := d.dirs.linked(); err != nil || !same {
		i.Split = sayLinkElsewhere(p)
	}
	if exclusive, err := d.hooks.ComputeMode(ctx); err != nil {
		i.ModeUnknown = err.Error()
	} else {
		i.Exclusive = exclusive
	}
	if i.Split != "" {
		return i
	}
	s, err := d.control.survey(ctx, server.PID, nil)
	switch {
	case errors.Is(err, ErrNotRunning):
		i.Gone = true
	case err != nil:
		i.Unanswered = err.Error()
	default:
		i.Servers, i.ServerStatus = s.servers, s.serverStatus
		i.Tampered = tampered(s)
	}
	return i
}

// tampered says which default of servers to come is not berth's, or "".
func tampered(s survey) string {
	switch {
	case s.memoryLimit != shownLimit(defaultLimitMiB):
		return "the default memory limit of MPS servers was changed by somebody else, to " + s.memoryLimit
	case s.percent != defaultPercent:
		return fmt.Sprintf("the default active thread percentage of MPS servers was changed by somebody else, to %.1f", s.percent)
	case s.priority == "1":
		return "the default priority of MPS clients was changed by somebody else, to below normal"
	}
	return ""
}
