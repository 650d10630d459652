package mps

import (
	"fmt"
	"reflect"
	"slices"
	"time"
)

// Step is the supervisor: what is learnt from the event, then what is to be done.
// It is pure; s is not changed.
func Step(s State, e Event, now time.Time) (State, []Action) {
	now = now.Round(0) // of the wall clock alone, which is what is stored
	s.Orphans, s.Failures = slices.Clone(s.Orphans), slices.Clone(s.Failures)
	s.Fault = s.Fault.clone()
	s.learn(e, now)
	var actions []Action
	switch {
	case s.Job == JobNone && !now.Before(s.SaveAt):
		if do := s.decide(now); do.Job != JobNone {
			s.Job, s.Cancelled = do.Job, false
			switch do.Job {
			case JobStopServers, JobQuitDaemon, JobKill:
				s.Ending = do.Job
			case JobLook: // finds what an earlier agent was about to end
			default:
				s.Ending = JobNone
			}
			actions = append(actions, do)
		}
	default:
		s.closeWhileBusy(now)
		if s.Job == JobStartServer && !s.Cancelled && (s.Fault != nil || s.use() != UseMPS) {
			s.Cancelled = true
			actions = append(actions, Cancel{s.Job})
		}
	}
	if rec := s.Record(); !reflect.DeepEqual(rec, s.Saving) && !now.Before(s.SaveAt) {
		s.Saving = rec
		actions = append([]Action{Save{rec}}, actions...)
	}
	return s, actions
}

// enter moves to a phase, or gives the one it is in another reason.
func (s *State) enter(p Phase, reason string, now time.Time) {
	if s.Phase != p {
		s.Phase, s.Since = p, now
	}
	s.Reason = reason
}

// broke closes the GPU. A second sign of the same trouble only makes it worse: an
// incident is one failure. counts is false for what is not MPS's own failing.
func (s *State) broke(now time.Time, cause Cause, reason string, counts bool) {
	daemon := cause == LostDaemon
	if s.Fault != nil {
		if daemon && !s.Fault.Daemon {
			// The cause stays: for the clients the first was the graver one.
			s.Fault.Daemon, s.Fault.Reason = true, reason
			s.Looked = false
		}
		return
	}
	s.Fault = &Fault{Cause: cause, Reason: reason, Daemon: daemon}
	s.Suspect, s.Probes = "", 0
	if daemon {
		s.Looked = false
	} else {
		s.Strays = true // a dead server may have a successor already: clients make the daemon start one
	}
	if counts {
		s.lost(now, reason)
	}
}

// strike counts one failure, and gives up on the GPU past the budget.
func (s *State) strike(now time.Time, reason string) {
	s.Failures = append(s.Failures, now)
	s.forget(now)
	if len(s.Failures) >= s.Budget.Failures && s.Quarantine == "" {
		s.Quarantine = sayOverBudget(len(s.Failures), s.Budget.Window, reason)
	}
}

// forget drops failures that are older than the budget's window.
func (s *State) forget(now time.Time) {
	s.Failures = slices.DeleteFunc(s.Failures, func(t time.Time) bool { return now.Sub(t) > s.Budget.Window })
	if len(s.Failures) == 0 {
		s.Failures = nil
	}
}

// lost counts a failure of something that was well: the first is put right at
// once, and those of a row with the pauses of starts that failed.
func (s *State) lost(now time.Time, reason string) {
	s.strike(now, reason)
	if s.Attempts == 0 {
		s.Attempts = 1
		return
	}
	s.pause(now)
}

// pause makes the next start wait, longer with each failure.
func (s *State) pause(now time.Time) {
	s.Attempts++
	s.Until = now.Add(s.backoff(s.Attempts))
}

// retry makes the job that failed wait where it stands. It is no failure of MPS,
// and never ends: until it has succeeded nothing is started.
func (s *State) retry(now time.Time, why string) {
	s.Tries++
	s.RetryAt, s.Trouble = now.Add(s.backoff(s.Tries)), why
}

// well ends a row of failures.
func (s *State) well() { s.Attempts, s.Until, s.Probes = 0, time.Time{}, 0 }

// done ends a row of retries.
func (s *State) done() { s.Tries, s.RetryAt, s.Trouble = 0, time.Time{}, "" }

// maxBackoff is the longest pause between two tries.
const maxBackoff = 60 * time.Second

// backoff is 1, 2, 4 .. 60 s, and up to a quarter more, so that the GPUs of a
// machine do not try in step.
func (s *State) backoff(attempt int) time.Duration {
	wait := maxBackoff
	if attempt <= 6 {
		wait = time.Second << (attempt - 1)
	}
	return wait + time.Duration(s.random()%uint64(wait/4))
}

// random is SplitMix64 (Steele, Lea, Flood 2014).
func (s *State) random() uint64 {
	s.Random += 0x9e3779b97f4a7c15
	z := s.Random
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// newID makes a BERTH_MPS_ID. It has to be unique and need not be secret.
func (s *State) newID() string { return fmt.Sprintf("%016x%016x", s.random(), s.random()) }
