package mps

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"
)

// loop is one Run of a Holder. Its goroutine alone changes the state; what may
// block is done by others that it started, whose results are events, and for which
// it waits when it ends.
type loop struct {
	h       *Holder
	lines   tail
	watched map[Process]context.CancelFunc
	queue   [][]Action              // lists of actions, in order
	current []Action                // the list being done, nil for none
	cancel  context.CancelCauseFunc // of that list's job
	doomed  Job                     // to be cancelled when its list's turn comes
	results chan Event
	others  sync.WaitGroup
}

var errCancelled = errors.New("not wanted any more")

func newLoop(h *Holder) *loop {
	l := &loop{h: h, watched: map[Process]context.CancelFunc{}, results: make(chan Event),
		lines: tail{path: h.dirs.ControlLog()}}
	l.lines.skipToEnd()
	return l
}

func (l *loop) run(ctx context.Context) error {
	h := l.h
	ctx, stop := context.WithCancel(ctx)
	defer l.others.Wait()
	defer stop()
	tick := time.NewTicker(h.cfg.TickEvery)
	defer tick.Stop()
	// A Run that ended may have left a job half done: what runs has to be looked for.
	h.mu.Lock()
	h.state.Job, h.state.Looked, h.state.Saving = JobNone, false, h.state.Saved
	h.mu.Unlock()
	l.step(Tick{})
	for {
		// 1. Watch what is recorded.
		l.watch(ctx)
		// 2. One list of actions at a time.
		if len(l.queue) > 0 && l.current == nil {
			list := l.queue[0]
			l.queue, l.current = l.queue[1:], list
			work, cancel := context.WithCancelCause(ctx)
			l.cancel = cancel
			if l.doomed != JobNone && jobOf(list) == l.doomed {
				cancel(errCancelled)
				l.doomed = JobNone
			}
			l.others.Go(func() { l.perform(ctx, work, list) })
		}
		// 3. What happened?
		select {
		case <-ctx.Done():
			return nil
		case <-h.wake:
			for _, e := range h.takeMail() {
				l.step(e)
			}
		case e := <-l.results:
			if e == nil {
				l.cancel(nil)
				l.current = nil
				continue
			}
			l.step(e)
		case <-tick.C:
			for _, e := range l.glance() {
				l.step(e)
			}
			l.step(Tick{})
		}
	}
}

// step lets the supervisor decide, and tells whoever asked.
func (l *loop) step(e Event) {
	h := l.h
	before := h.state // the loop alone writes it
	after, actions := h.hooks.step(before, e, time.Now())
	h.mu.Lock()
	h.state = after
	h.mu.Unlock()
	var list []Action
	for _, a := range actions {
		c, ok := a.(Cancel)
		switch {
		case !ok:
			list = append(list, a)
		case jobOf(l.current) == c.Job:
			l.cancel(errCancelled)
		default:
			l.doomed = c.Job
		}
	}
	if len(list) > 0 {
		l.queue = append(l.queue, list)
	}
	was, is := before.Status(), after.Status()
	if was == is {
		return
	}
	l.report(was, is)
	h.hooks.Notify(is)
}

// jobOf is the job that a list of actions ends with, if any.
func jobOf(list []Action) Job {
	if len(list) == 0 {
		return JobNone
	}
	do, _ := list[len(list)-1].(Do)
	return do.Job
}

func (l *loop) report(was, is Status) {
	if is.Notice != "" && is.Notice != was.Notice {
		l.h.log.Warn(is.Notice)
	}
	if was.State == is.State && was.Reason == is.Reason {
		return
	}
	write := l.h.log.Info
	switch is.State {
	case PhaseDraining, PhaseStopping, PhaseBackoff, PhaseQuarantined:
		write = l.h.log.Warn
	}
	write("mps: "+string(is.State), zap.String("was", string(was.State)), zap.String("reason", is.Reason),
		zap.Int("daemon", is.DaemonPID), zap.Int("server", is.ServerPID))
}

// send gives the loop an event, or gives up when the loop has ended.
func (l *loop) send(ctx context.Context, e Event) {
	select {
	case l.results <- e:
	case <-ctx.Done():
	}
}

// watch has each recorded process watched, and no other.
func (l *loop) watch(ctx context.Context) {
	want := map[Process]bool{}
	for _, p := range l.h.state.remains() {
		want[p] = true
		if _, ok := l.watched[p]; ok {
			continue
		}
		watch, cancel := context.WithCancel(ctx)
		l.watched[p] = cancel
		l.others.Go(func() {
			if waitGone(watch, p) {
				l.send(watch, Exited{p})
			}
		})
	}
	for p, cancel := range l.watched {
		if !want[p] {
			cancel()
			delete(l.watched, p)
		}
	}
}

// waitGone waits until the process has ended; false when ctx ended first.
func waitGone(ctx context.Context, p Process) bool {
	f, err := openProcess(p)
	if err == nil {
		err = waitExit(ctx, f)
		f.Close()
	}
	if ctx.Err() != nil {
		return false
	}
	if err != nil && !errors.Is(err, errGone) {
		// No pidfd to be had: the state in /proc, each second, has to do.
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for p.view().Alive {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return false
			}
		}
	}
	reap(p.PID)
	return true
}

// glance is what each tick sees without a process being made.
func (l *loop) glance() []Event {
	var events []Event
	s := l.h.state
	for _, p := range []Process{s.Daemon, s.Server} {
		if p.PID != 0 && p.view().Stopped() {
			events = append(events, Stopped{p})
		}
	}
	for _, line := range l.lines.next() {
		if kind, _ := line.kind(); kind == logFault {
			events = append(events, Faulted{line.text})
		}
	}
	if l.lines.offset > l.h.cfg.LogLimitBytes {
		if err := l.lines.cut(); err != nil {
			l.h.log.Warn("cannot cut the daemon's log", zap.Error(err))
		}
	}
	return events
}

// perform does a list of actions in order, up to the first that fails. ctx is the
// loop's; work may be cancelled for the job alone.
func (l *loop) perform(ctx, work context.Context, list []Action) {
	defer l.send(ctx, nil)
	for i, a := range list {
		switch a := a.(type) {
		case Save:
			if err := l.h.hooks.Save(a.Record); err != nil {
				failed := SaveFailed{Reason: err.Error()}
				if i+1 < len(list) {
					failed.Job = list[i+1].(Do).Job
				}
				l.send(ctx, failed)
				return
			}
			l.send(ctx, Saved(a))
		case Do:
			l.send(ctx, l.h.daemon.perform(work, a))
		}
	}
}

// perform does one job and says how it ended.
func (d *daemon) perform(ctx context.Context, do Do) Event {
	var ended Event
	var err error
	switch do.Job {
	case JobLook:
		ended, err = d.look(ctx, do.ID, do.Server)
	case JobStartDaemon:
		var up DaemonUp
		up.Daemon, up.SingleUID, err = d.start(ctx, do.ID)
		ended = up
	case JobStartServer:
		var up ServerUp
		up.Server, err = d.startServer(ctx, do.Daemon, do.ID)
		ended = up
	case JobSetExclusive, JobSetDefault:
		ended, err = d.setMode(ctx, do.Job == JobSetExclusive)
	case JobStopServers:
		ended, err = ServersDown{}, d.stopServers(ctx, do.Force)
	case JobQuitDaemon:
		ended, err = DaemonDown{}, d.quit(ctx, do.Daemon, do.ID)
	case JobKill:
		ended, err = Killed{}, d.killAll(ctx, do.Kill, do.ID)
	case JobInspect:
		ended = d.inspect(ctx, do.Daemon, do.Server)
	case JobReapply:
		ended, err = Reapplied{}, d.reapply(ctx)
	default:
		err = fmt.Errorf("%q is no job", do.Job)
	}
	if err == nil {
		return ended
	}
	failed := Failed{Job: do.Job, Reason: err.Error(), Cancelled: errors.Is(context.Cause(ctx), errCancelled)}
	var start *startError
	if errors.As(err, &start) {
		failed.Permanent = start.permanent
	}
	return failed
}

// ErrGPUGone is what Hooks.SetComputeMode returns, wrapped, for a GPU that is not
// there any more: it fell off the bus.
var ErrGPUGone = errors.New("the GPU is gone")

// setMode sets the compute mode and reads it back.
func (d *daemon) setMode(ctx context.Context, exclusive bool) (Event, error) {
	err := d.hooks.SetComputeMode(ctx, exclusive)
	if errors.Is(err, ErrGPUGone) && !exclusive {
		return ModeSet{false}, nil // a GPU that comes back has been reset, and is DEFAULT
	}
	if err != nil {
		return nil, fmt.Errorf("set compute mode %s: %w", modeName(exclusive), err)
	}
	got, err := d.hooks.ComputeMode(ctx)
	if err != nil {
		return nil, fmt.Errorf("compute mode: %w", err)
	}
	if got != exclusive {
		return nil, fmt.Errorf("set compute mode %s: it is %s all the same", modeName(exclusive), modeName(got))
	}
	return ModeSet{exclusive}, nil
}
