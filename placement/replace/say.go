package replace

import (
	"fmt"
	"strconv"
	"time"

	"github.com/berth-gpu/berth/api"
)

// Every sentence of a replacement that a person can meet is made here.

const (
	sayLost      = "nothing is heard of its agent"
	sayRecovered = "the machine is well again"
)

func sayGPUs(bad, of int) string { return fmt.Sprintf("%d of %s failed", bad, count(of, "GPU")) }

func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.Itoa(n) + " " + noun + "s"
}

func sayTrouble(kind ActionKind, err string) string {
	return fmt.Sprintf("the provider cannot %s: %s", map[ActionKind]string{DoLaunch: "launch a machine", DoFind: "look for the machine", DoTerminate: "terminate the machine"}[kind], err)
}

func sayNoLaunch(attempts int, trouble string) string {
	return fmt.Sprintf("%s (tried %s)", trouble, count(attempts, "time"))
}

func sayNotJoined(o Observation, limit time.Duration) string {
	switch {
	case o.NewcomerJoined:
		return fmt.Sprintf("joined IMPAIRED and stayed so for %s", limit)
	case o.NewcomerStanding != "":
		return fmt.Sprintf("registered, but was not connected and healthy within %s", limit)
	}
	return fmt.Sprintf("did not join within %s", limit)
}

func sayGivenUp(n Newcomer) string { return fmt.Sprintf("%s %s", n.ID, n.Failed) }

func sayUsedUp(newcomers int, last Newcomer) string {
	if newcomers == 1 {
		return sayGivenUp(last)
	}
	return fmt.Sprintf("none of %s was of use; the last, %s, %s", count(newcomers, "newcomer"), last.ID, last.Failed)
}

func sayUnknown(why, token, trouble string) string {
	return fmt.Sprintf("%s; and whether a machine was made for the token %s is not known (%s): look for it at the provider", why, token, trouble)
}

func sayNotDiscarded(why, id, trouble string) string {
	return fmt.Sprintf("%s; and the newcomer %s is left (%s): end it at the provider", why, id, trouble)
}

func sayBroke(newcomer, instance string, movable int) string {
	return fmt.Sprintf("%s broke before %s found room elsewhere: no task on %s was stopped", newcomer, count(movable, "task"), instance)
}

func sayNotTerminated(instance string, attempts int, trouble string) string {
	return fmt.Sprintf("%s (tried %s): end %s at the provider", trouble, count(attempts, "time"), instance)
}

// says is what it waits for, or how it ended.
func (s *step) says() string {
	n := s.newcomer()
	switch s.State {
	case Done:
		if s.Next == Done {
			return "called off: " + s.Why
		}
		return fmt.Sprintf("%s took its place", n.ID)
	case Failed:
		return fmt.Sprintf("failed: %s. %s stays cordoned", s.Why, s.Instance)
	}
	if s.Trouble != "" && s.now.Before(s.RetryAt) {
		return fmt.Sprintf("%s; attempt %d of %d is at %s", s.Trouble, s.Attempts+1, s.p.Attempts, clock(s.RetryAt))
	}
	deadline := clock(s.until(s.MoveAt, s.p.DrainDeadline))
	switch s.State {
	case Cordon:
		return fmt.Sprintf("%s takes no more tasks", s.Instance)
	case Launch:
		return "a newcomer is being launched"
	case Join:
		if s.o.NewcomerJoined && s.o.NewcomerImpaired {
			return fmt.Sprintf("%s has joined and is IMPAIRED; it has until %s", n.ID, clock(s.until(n.LaunchedAt, s.p.JoinTimeout)))
		}
		return fmt.Sprintf("waits until %s for %s to join", clock(s.until(n.LaunchedAt, s.p.JoinTimeout)), n.ID)
	case Discard:
		why := s.Why
		if s.Next == Done {
			why = "being called off: " + why
		}
		if n.ID == "" {
			return why + "; what may have been launched is looked for"
		}
		return fmt.Sprintf("%s; %s is being terminated", why, n.ID)
	case Move:
		return fmt.Sprintf("%s to start elsewhere, until %s", count(s.o.Movable, "task"), deadline)
	case Drain:
		if !s.EndAt.IsZero() {
			return fmt.Sprintf("%s being stopped, until %s", count(s.o.TasksLeft, "task"), clock(s.until(s.EndAt, s.p.StopTimeout)))
		}
		return fmt.Sprintf("%s left, until %s, when what is left is stopped (%s)", count(s.o.TasksLeft, "task"), deadline, api.StopInfrastructure)
	}
	return fmt.Sprintf("%s is being terminated", s.Instance)
}

func clock(t time.Time) string { return t.UTC().Format("15:04:05Z") }
