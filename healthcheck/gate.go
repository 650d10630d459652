// Package healthcheck turns what was observed into verdicts: whether a GPU is
// held, how a machine is, and the metrics that say so.
//
// The verdicts are pure: observations and time in, a verdict with its reason
// out. Nothing here looks at the machine.
package healthcheck

import (
	"fmt"
	"time"

	"github.com/berth-gpu/berth/mps"
)

// Code names one reason why a GPU is not held.
type Code string

// Every reason there is, nearest cause first: the order in which Held looks.
const (
	NotHolding     Code = "NOT_HOLDING"     // the supervisor is not in HELD
	DaemonGone     Code = "DAEMON_GONE"     // no daemon, or not the recorded one
	DaemonStopped  Code = "DAEMON_STOPPED"  // SIGSTOP, seen from /proc
	StrangerDaemon Code = "STRANGER_DAEMON" // another process holds the daemon's lock
	ServerGone     Code = "SERVER_GONE"
	ServerStopped  Code = "SERVER_STOPPED"
	NoAnswer       Code = "NO_ANSWER" // nothing came through client/
	SlowAnswer     Code = "SLOW_ANSWER"
	ServerNotReady Code = "SERVER_NOT_READY" // FAULT or INITIALIZING
	ModeUnknown    Code = "MODE_UNKNOWN"
	NotExclusive   Code = "NOT_EXCLUSIVE" // a process that skips MPS would run uncapped
	GPULost        Code = "GPU_LOST"
)

// AnswerWithin is how soon a daemon must have answered through client/ for its
// GPU to count as held (architecture, invariant 3).
const AnswerWithin = 2 * time.Second

// Verdict says whether a capped container may start, and if not, why.
type Verdict struct {
	Held   bool   `json:"held"`
	Code   Code   `json:"code,omitzero"`
	Reason string `json:"reason,omitzero"` // one sentence
}

// Held is the gate: a capped container starts, and restarts, only while its GPU
// is held. That is: daemon and server are the recorded ones and run, the daemon
// answered through client/ within 2 s, and the GPU is EXCLUSIVE_PROCESS.
func Held(o mps.Observation) Verdict {
	no := func(c Code, format string, args ...any) Verdict {
		return Verdict{Code: c, Reason: fmt.Sprintf(format, args...)}
	}
	switch {
	case o.Status.State != mps.PhaseHeld:
		if o.Status.Reason != "" {
			return no(NotHolding, "the GPU is %s: %s", o.Status.State, o.Status.Reason)
		}
		return no(NotHolding, "the GPU is %s", o.Status.State)
	case !o.Daemon.Alive:
		return no(DaemonGone, "the MPS control daemon (pid %d) is gone", o.Daemon.PID)
	case o.Daemon.Stopped():
		return no(DaemonStopped, "the MPS control daemon (pid %d) is stopped (state %s)", o.Daemon.PID, o.Daemon.State)
	case o.LockHolder != o.Daemon.PID:
		return no(StrangerDaemon, "the pipe folder's lock is held by pid %d, not by the recorded daemon %d", o.LockHolder, o.Daemon.PID)
	case !o.Server.Alive:
		return no(ServerGone, "the MPS server (pid %d) is gone", o.Server.PID)
	case o.Server.Stopped():
		return no(ServerStopped, "the MPS server (pid %d) is stopped (state %s)", o.Server.PID, o.Server.State)
	case o.Probe != nil:
		return no(NoAnswer, "the MPS control daemon does not answer through the client folder: %v", o.Probe)
	case o.ProbeTook > AnswerWithin:
		return no(SlowAnswer, "the MPS control daemon took %s to answer, more than %s", o.ProbeTook.Round(time.Millisecond), AnswerWithin)
	case o.ServerStatus != "" && o.ServerStatus != "ACTIVE":
		return no(ServerNotReady, "the MPS server is %s", o.ServerStatus)
	case o.ModeErr != nil:
		return no(ModeUnknown, "the GPU's compute mode cannot be read: %v", o.ModeErr)
	case !o.Exclusive:
		return no(NotExclusive, "the GPU's compute mode is not EXCLUSIVE_PROCESS")
	}
	return Verdict{Held: true}
}
