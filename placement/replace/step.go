package replace

import (
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/berth-gpu/berth/api"
)

// StepIn and StepOut are Step's arguments and results, for the flight recorder.
type (
	StepIn struct {
		Replacement Replacement `json:"replacement"`
		Observation Observation `json:"observation"`
		Now         time.Time   `json:"now"`
		Policy      Policy      `json:"policy"`
	}
	StepOut struct {
		Replacement Replacement `json:"replacement"`
		Actions     []Action    `json:"actions,omitempty"`
	}
)

// Do is Step.
func (in StepIn) Do() (out StepOut) {
	out.Replacement, out.Actions = Step(in.Replacement, in.Observation, in.Now, in.Policy)
	return out
}

// Step takes a replacement as far as it can go now. The replacement that it returns is
// stored before any of the actions is done. It is pure; r is not changed. While nothing
// is observed that it waits for, it returns what it was given and no action.
func Step(r Replacement, o Observation, now time.Time, p Policy) (Replacement, []Action) {
	if r.Over() {
		return r, nil
	}
	r.Newcomers = slices.Clone(r.Newcomers)
	if len(r.Newcomers) == 0 {
		r.Newcomers = []Newcomer{{Token: r.ID}}
	}
	s := &step{Replacement: r, o: o, now: stored(now), p: p}

	s.learn()
	s.hold()
	for before := State(""); before != s.State; {
		before = s.State
		s.advance()
	}
	s.Says = s.says()
	return s.Replacement, s.actions
}

// step is one Step at work.
type step struct {
	Replacement
	o       Observation
	now     time.Time
	p       Policy
	actions []Action
}

func (s *step) act(kind ActionKind, instance string) {
	if a := (Action{Kind: kind, Instance: instance}); !slices.ContainsFunc(s.actions, func(b Action) bool { return reflect.DeepEqual(a, b) }) {
		s.actions = append(s.actions, a)
	}
}

func (s *step) enter(state State) {
	s.State, s.ChangedAt = state, s.now
	s.Attempts, s.RetryAt, s.Trouble = 0, time.Time{}, ""
	s.Terminated = false
}

func (s *step) fail(why string) {
	s.enter(Failed)
	s.Why = why
}

func (s *step) newcomer() *Newcomer { return &s.Newcomers[len(s.Newcomers)-1] }

// token is the provider's for the nth newcomer. Each has its own: a launch with the token
// of a machine that was terminated makes none.
func (s *step) token(n int) string { return fmt.Sprintf("%s-%d", s.ID, n) }

// usable says whether tasks can go to the newcomer.
func (s *step) usable() bool { return s.o.NewcomerJoined && !s.o.NewcomerImpaired }

// past says whether a limit is over that began at a moment, or when this server began to
// lead if that was later.
func (s *step) past(began time.Time, limit time.Duration) bool {
	return !s.now.Before(s.until(began, limit))
}

func (s *step) until(began time.Time, limit time.Duration) time.Time {
	if s.o.LeaderSince.After(began) {
		began = stored(s.o.LeaderSince)
	}
	return began.Add(limit)
}

// --- the provider's calls ---

// call makes a call, if none is on its way and no pause is on.
func (s *step) call(kind ActionKind, instance, token string) {
	if s.Calling != "" || s.o.InFlight || s.now.Before(s.RetryAt) {
		return
	}
	s.Call++
	s.Calling = kind
	if kind == DoTerminate {
		s.act(DoRetire, instance)
	}
	s.actions = append(s.actions, Action{Kind: kind, Instance: instance, Token: token, Call: s.Call})
}

// learn takes in what came of the last call. Any other result is a late one of a call
// that counts as lost already, and says nothing that Find or the same call, repeated,
// will not say again.
func (s *step) learn() {
	kind, result := s.Calling, s.o.Result
	switch {
	case kind == "":
		return
	case result == nil || result.Call != s.Call:
		if !s.o.InFlight {
			s.Calling = "" // no reply will come: the server that made the call is gone
		}
		return
	}
	s.Calling = ""
	if result.Err == "" && result.ID == "" && (kind == DoLaunch || kind == DoFind && result.Found) {
		result = &Result{Err: "it gave no id of a machine"}
	}
	if result.Err != "" {
		s.Attempts++
		s.RetryAt, s.Trouble = s.now.Add(backoff(s.p, s.Attempts)), sayTrouble(kind, result.Err)
		return
	}
	s.Trouble = ""
	switch {
	case kind == DoTerminate:
		s.Terminated = true
	case kind == DoLaunch || result.Found:
		n := s.newcomer()
		n.ID, n.LaunchedAt, s.Unsure = result.ID, s.now, false
	default:
		s.Unsure = false
	}
}

func backoff(p Policy, attempts int) time.Duration {
	d := p.Backoff
	for range attempts - 1 {
		if d *= 2; d >= p.BackoffMax {
			return p.BackoffMax
		}
	}
	return d
}

// --- the states ---

// hold keeps the machine cordoned, whoever says otherwise meanwhile.
func (s *step) hold() {
	if s.o.Standing == api.InstanceActive && !(s.State == Cordon && s.mayCallOff()) && !(s.State == Discard && s.Next == Done) {
		s.Cordoned = true
		s.act(DoCordon, s.Instance)
	}
}

// mayCallOff says whether the machine needs no replacement any more, and no newcomer has
// come that tasks may run on already.
func (s *step) mayCallOff() bool {
	return !s.Operator && s.o.Recovered && s.o.NewcomerStanding == "" && (s.State == Cordon || s.State == Launch || s.State == Join)
}

func (s *step) advance() {
	if s.mayCallOff() && s.Calling == "" {
		s.discard(Done, sayRecovered)
		return
	}
	switch s.State {
	case Cordon:
		if s.o.Standing != api.InstanceActive {
			s.enter(Launch)
		}
	case Launch:
		s.launch()
	case Join:
		s.join()
	case Discard:
		s.discarding()
	case Move:
		s.move()
	case Drain:
		s.drain()
	case Terminate:
		s.terminate()
	}
}

func (s *step) launch() {
	n := s.newcomer()
	switch {
	case n.ID != "":
		s.enter(Join)
	case s.Attempts >= s.p.Attempts:
		s.discard(Failed, sayNoLaunch(s.Attempts, s.Trouble))
	case s.Unsure:
		s.call(DoFind, "", n.Token)
	default:
		s.call(DoLaunch, "", n.Token)
		s.Unsure = s.Calling == DoLaunch
	}
}

func (s *step) join() {
	n := s.newcomer()
	switch {
	case s.usable():
		n.JoinedAt, s.MoveAt = s.now, s.now
		s.enter(Move)
	case s.past(n.LaunchedAt, s.p.JoinTimeout):
		n.FailedAt, n.Failed = s.now, sayNotJoined(s.o, s.p.JoinTimeout)
		if len(s.Newcomers) < s.p.Newcomers {
			s.discard(Launch, sayGivenUp(*n))
		} else {
			s.discard(Failed, sayUsedUp(len(s.Newcomers), *n))
		}
	}
}

// discard ends the newcomer, if there is or may be one, and goes on with next.
func (s *step) discard(next State, why string) {
	s.enter(Discard)
	s.Next, s.Why = next, why
	s.newcomer().DiscardedAt = s.now
}

func (s *step) discarding() {
	n := s.newcomer()
	if s.o.NewcomerStanding == api.InstanceActive {
		s.act(DoCordon, n.ID)
	}
	switch {
	case n.ID == "" && s.Unsure:
		if s.Attempts >= s.p.Attempts {
			s.fail(sayUnknown(s.Why, n.Token, s.Trouble))
			return
		}
		s.call(DoFind, "", n.Token)
	case n.ID != "" && !s.Terminated:
		if s.Attempts >= s.p.Attempts {
			s.fail(sayNotDiscarded(s.Why, n.ID, s.Trouble))
			return
		}
		s.call(DoTerminate, n.ID, "")
	case n.ID != "" && s.o.NewcomerStanding != "":
		s.act(DoForget, n.ID)
	case s.Next == Launch:
		s.enter(Launch)
		s.Newcomers = append(s.Newcomers, Newcomer{Token: s.token(len(s.Newcomers) + 1)})
		s.Next, s.Why = "", ""
	case s.Next == Failed:
		s.fail(s.Why)
	default:
		if s.Cordoned && s.o.Standing == api.InstanceDraining {
			s.act(DoUncordon, s.Instance)
		}
		s.enter(Done)
	}
}

func (s *step) move() {
	switch {
	case s.o.Standing == api.InstanceActive: // not before it is cordoned again
	case s.o.Lost, s.o.Standing == "", s.o.Movable == 0:
		s.enter(Drain)
	case !s.past(s.MoveAt, s.p.DrainDeadline):
	case !s.usable(): // to end tasks that have nowhere to go helps nobody
		s.fail(sayBroke(s.newcomer().ID, s.Instance, s.o.Movable))
	default:
		s.enter(Drain)
	}
}

func (s *step) drain() {
	switch {
	case s.o.Standing == api.InstanceActive:
		return
	case s.o.Lost, s.o.Standing == "", s.o.TasksLeft == 0:
		s.enter(Terminate)
		return
	case !s.past(s.MoveAt, s.p.DrainDeadline):
		return
	}
	if s.EndAt.IsZero() {
		s.EndAt = s.now
	}
	if s.past(s.EndAt, s.p.StopTimeout) {
		s.enter(Terminate)
	} else if s.o.NotEnding > 0 {
		s.act(DoEndTasks, s.Instance)
	}
}

func (s *step) terminate() {
	switch {
	case s.Terminated && s.o.Standing != "":
		s.act(DoForget, s.Instance)
	case s.Terminated:
		s.enter(Done)
	case s.Attempts >= s.p.Attempts:
		s.fail(sayNotTerminated(s.Instance, s.Attempts, s.Trouble))
	default:
		s.call(DoTerminate, s.Instance, "")
	}
}
