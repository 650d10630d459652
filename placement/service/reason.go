package service

import (
	"fmt"
	"time"

	"github.com/berth-gpu/berth/api"
)

// A task that ends by itself within failsWithin of its start, or does not start, has
// failed. Each wave of failures in a row doubles the pause before the next start, from
// firstPause to longestPause; a task that stays up for staysUp ends the row.
const (
	failsWithin  = 10 * time.Second
	staysUp      = time.Minute
	firstPause   = time.Second
	longestPause = 5 * time.Minute
)

// countEnds takes note of the tasks that have ended, each once.
func (s *step) countEnds() {
	for i := range s.Tasks {
		t := &s.Tasks[i]
		switch {
		case t.live():
			if s.service.Failures > 0 && t.Healthy && t.Definition == s.service.Definition && !t.CreatedAt.Before(s.service.FailedAt) && s.Now.Sub(t.StartedAt) >= staysUp {
				s.service.Failures, s.service.FailedAt, s.service.RetryAt = 0, time.Time{}, time.Time{}
			}
			continue
		case t.Counted || t.StopCode == api.StopServiceScheduler:
			continue
		case t.StopCode == api.StopInfrastructure && s.replaced[t.ID]:
			continue // stopped here, for its replacement
		}
		s.out.Counted = append(s.out.Counted, t.ID)
		switch {
		case s.crashed(t):
			s.failed(t)
		case s.refusedAgain(t):
			s.service.RetryAt = later(s.service.RetryAt, s.Now.Add(firstPause))
		default:
			s.free++
		}
	}
}

// crashed says whether a task's early end was its own doing. Of another definition it
// says nothing about the next start.
func (s *step) crashed(t *Task) bool {
	if t.Infrastructure || t.Gone || t.Definition != s.service.Definition {
		return false
	}
	return t.StopCode == api.StopTaskFailedToStart ||
		t.StopCode == api.StopEssentialExited && (t.StartedAt.IsZero() || t.EndedAt.Sub(t.StartedAt) < failsWithin)
}

// refusedAgain says whether a machine has kept a task and the one before it in the line
// from starting: without a pause a machine that refuses everything would be asked as
// fast as it can answer.
func (s *step) refusedAgain(t *Task) bool {
	before := s.byID[t.Replaces]
	return t.neverRan() && before != nil && before.neverRan()
}

func (t *Task) neverRan() bool {
	return t.Infrastructure && !t.Gone && t.StartedAt.IsZero() && t.StopCode == api.StopTaskFailedToStart
}

// failed counts a failure. Tasks that were started before the last one was counted are
// of the same wave, and say nothing new.
func (s *step) failed(t *Task) {
	if s.service.Failures > 0 && t.CreatedAt.Before(s.service.FailedAt) {
		return
	}
	s.service.Failures++
	s.service.FailedAt = s.Now
	s.service.RetryAt = later(s.service.RetryAt, s.Now.Add(pause(s.service.Failures)))
}

func pause(failures int) time.Duration {
	p := firstPause
	for range failures - 1 {
		if p *= 2; p >= longestPause {
			return longestPause
		}
	}
	return p
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func (s *step) inBackOff() bool { return s.Now.Before(s.service.RetryAt) }

// explain says what the service waits for.
func (s *step) explain() {
	name, version := s.service.Name, s.service.Definition
	cur, old := s.split()
	healthy, unplaced, leaving, running := s.healthy(), 0, 0, 0
	releasing := s.releasing()
	for _, u := range s.units {
		if s.noRoom(u.lead) && releasing == 0 {
			unplaced++
		}
		if len(u.tail) > 0 || u.lead.leaves() {
			leaving++
		}
	}
	for _, u := range cur {
		if u.lead.Healthy {
			running++
		}
	}
	switch {
	case s.waiting && s.service.Failures > 0:
		s.service.Reason = fmt.Sprintf("%s of %s did not stay up; the next start is at %s", tries(s.service.Failures), version, s.service.RetryAt.UTC().Format(time.RFC3339))
		s.out.Wake = s.service.RetryAt
	case s.waiting:
		s.service.Reason = fmt.Sprintf("its machine has kept a task from starting twice; the next start is at %s", s.service.RetryAt.UTC().Format(time.RFC3339))
		s.out.Wake = s.service.RetryAt
	case unplaced > 0 && len(old) > 0 && healthy <= s.min:
		s.service.Reason = fmt.Sprintf("the update of %s waits: %s %s no room, and minimumHealthyPercent %d lets no old one stop first; lower it, or add a GPU",
			name, plural(unplaced, "task", "tasks"), verb(unplaced, "finds", "find"), s.service.MinHealthyPercent)
	case unplaced > 0:
		s.service.Reason = fmt.Sprintf("%s %s no room; `berth explain TASK` says why", plural(unplaced, "task", "tasks"), verb(unplaced, "finds", "find"))
	case leaving > 0:
		s.service.Reason = fmt.Sprintf("%s %s to another place", plural(leaving, "task", "tasks"), verb(leaving, "moves", "move"))
	case len(old) > 0:
		s.service.Reason = fmt.Sprintf("updates to %s: %d of %d run it", version, running, s.service.Desired)
	case running < s.service.Desired:
		s.service.Reason = fmt.Sprintf("%d of %d tasks run", running, s.service.Desired)
	default:
		s.service.Reason = ""
	}
}

func tries(n int) string {
	if n == 1 {
		return "the last try"
	}
	return fmt.Sprintf("the last %d tries", n)
}

func plural(n int, one, many string) string { return fmt.Sprintf("%d %s", n, verb(n, one, many)) }

func verb(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

// why a task has to leave, in words.
func why(t *Task) string {
	if t.Vacate == "" && t.Unhealthy {
		return "its health check has failed"
	}
	return t.Vacate
}

func code(t *Task) string {
	if t.Vacate != "" && t.VacateCode != "" {
		return t.VacateCode
	}
	return api.StopServiceScheduler
}

func suffix(why string) string {
	if why == "" {
		return ""
	}
	return ": " + why
}

func because(what, why string) string { return what + suffix(why) }
