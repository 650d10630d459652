package mps

import (
	"context"
	"errors"
	"time"
)

// flight is one probe, shared by all who asked before it began: a hundred gates
// at a wedged daemon wait for two time-outs, not for a hundred.
type flight struct {
	done chan struct{}
	seen survey
	err  error
	took time.Duration
}

// Observe looks afresh, for the gate: at /proc, the lock, the compute mode, and
// with one control command through client/. It is bounded by ctx and by the probe
// timeout, which it waits for at most twice. What it finds wrong, the supervisor
// looks at too.
func (h *Holder) Observe(ctx context.Context) Observation {
	h.mu.Lock()
	s := h.state
	h.mu.Unlock()
	o := Observation{At: time.Now(), Daemon: s.Daemon.view(), Server: s.Server.view()}
	var err error
	if o.LockHolder, err = lockHolder(h.dirs.lock()); err != nil {
		o.Probe = err
	}
	o.Exclusive, o.ModeErr = h.hooks.ComputeMode(ctx)
	switch {
	case o.Probe != nil:
	case !o.Daemon.Alive || o.LockHolder != s.Daemon.PID:
		o.Probe = ErrNotRunning
	case o.Daemon.Stopped():
		o.Probe = ErrWedged // known without waiting for it
	default:
		h.probe(ctx, &o, s.Server.PID)
	}
	// Of now, not of before the probe: what was seen meanwhile counts.
	o.Status = h.Status()
	odd := o.Probe != nil && ctx.Err() == nil || o.Server.Stopped() || o.Server.PID != 0 && !o.Server.Alive ||
		o.ServerStatus == "FAULT" || o.ModeErr == nil && o.Exclusive != s.Exclusive
	if odd {
		h.post(Doubt{})
	}
	return o
}

// probe joins the probe that is about to begin, or has one begin.
func (h *Holder) probe(ctx context.Context, o *Observation, server int) {
	h.mu.Lock()
	f := h.flight
	if f == nil {
		f = &flight{done: make(chan struct{})}
		h.flight = f
		go h.fly(f, server) // ends by itself: at most two probe timeouts
	}
	h.mu.Unlock()
	select {
	case <-f.done:
		o.Probe, o.ProbeTook, o.ServerStatus = f.err, f.took, f.seen.serverStatus
	case <-ctx.Done():
		o.Probe = ctx.Err()
	}
}

func (h *Holder) fly(f *flight, server int) {
	defer close(f.done)
	// Before it: another command, which ends within its own limit.
	ctx, cancel := context.WithTimeout(context.Background(), 2*h.cfg.ProbeTimeout)
	defer cancel()
	var began time.Time
	leave := func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.flight == f {
			h.flight = nil
		}
		began = time.Now()
	}
	f.seen, f.err = h.daemon.control.survey(ctx, server, leave)
	if began.IsZero() { // its turn never came
		leave()
	}
	if errors.Is(f.err, context.DeadlineExceeded) {
		f.err = ErrWedged
	}
	f.took = time.Since(began)
}
