// Package service decides which tasks of a service are started and stopped, so that its
// desired count runs: after ends and crashes, through updates, drains and losses.
//
// It is pure: what there is and the time in, what to do out. Doing it and asking again at
// the same time gives nothing more to do.
package service

import (
	"fmt"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/placement/fleet"
)

// Task is one task as its service sees it.
type Task struct {
	ID             string    `json:"id"`
	Definition     string    `json:"definition"`
	Replaces       string    `json:"replaces,omitempty"`
	Reschedule     bool      `json:"reschedule,omitempty"` // standalone ones alone
	Desired        string    `json:"desired"`
	LastStatus     string    `json:"lastStatus"`
	Placed         bool      `json:"placed,omitempty"`
	Healthy        bool      `json:"healthy,omitempty"`    // RUNNING, and each health check says so too
	Unhealthy      bool      `json:"unhealthy,omitempty"`  // an essential container's health check has failed
	Vacate         string    `json:"vacate,omitempty"`     // why it has to leave its GPU or instance
	VacateCode     string    `json:"vacateCode,omitempty"` // stop code for that
	Gone           bool      `json:"gone,omitempty"`
	Infrastructure bool      `json:"infrastructure,omitempty"`
	StopCode       string    `json:"stopCode,omitempty"`
	Counted        bool      `json:"counted,omitempty"`
	CreatedAt      time.Time `json:"createdAt"`
	StartedAt      time.Time `json:"startedAt,omitzero"`
	EndedAt        time.Time `json:"endedAt,omitzero"` // when it began to stop
}

// live says whether a task counts: it is to run, and may.
func (t *Task) live() bool {
	return t.Desired == api.StatusRunning && t.LastStatus != api.StatusStopped && !t.Gone
}

func (t *Task) leaves() bool { return t.Vacate != "" || t.Unhealthy }

// Input is all that a step is decided from.
type Input struct {
	Service fleet.Service `json:"service"`
	Tasks   []Task        `json:"tasks,omitempty"` // all of the service, oldest first, with those that have stopped and are known still
	Now     time.Time     `json:"now"`
}

// Output is what is to be done, in this order: put the service, mark the tasks in
// Counted, do the actions.
type Output struct {
	Service fleet.Service `json:"service"`
	Counted []string      `json:"counted,omitempty"` // tasks whose end has been taken note of: set their Counted
	Actions []Action      `json:"actions,omitempty"`
	Done    bool          `json:"done,omitempty"` // deleted, and no task is left that could stop
	Wake    time.Time     `json:"wake,omitzero"`  // ask again then, if nothing happens before
}

// Action starts a task (Task is empty) or stops one.
type Action struct {
	Definition string `json:"definition,omitempty"` // to start
	Replaces   string `json:"replaces,omitempty"`   // the task whose place it takes

	Task   string `json:"task,omitempty"` // to stop
	Code   string `json:"code,omitempty"`
	Reason string `json:"reason,omitempty"`
}

// Do is Step, for the flight recorder.
func (in Input) Do() Output { return Step(in) }

// Step decides what to do for a service now.
//
// Limits, as in ECS: at least MinHealthyPercent of the desired count (rounded up) stay
// healthy, as far as the service's own stops go, and at most MaximumPercent (rounded
// down) are there. Two things differ. Where both together leave no room to move at all
// (100 and 100, or one task and 150), one task more is allowed, instead of an update
// that waits for ever. And the replacement of a task that has to leave its GPU or
// machine does not count beside it: that task ends in any case, and a full maximum must
// not hold up the repair of a GPU.
//
// Old tasks of an update are stopped once new ones are healthy in their place, and
// sooner, down to the minimum, only where the new ones wait for their room.
func Step(in Input) Output {
	s := newStep(in)
	// 1. What has ended: is it a crash, and when may the next start be.
	s.countEnds()
	s.stopGone()
	if s.service.Deleted {
		return s.delete()
	}
	// 2. More than wanted, and old ones that nobody will miss.
	s.scaleDown()
	// 3. Tasks whose place has been taken, or need not be any more.
	s.settlePairs()
	// 4. Tasks that have to leave get a replacement first.
	s.replaceLeaving()
	// 5. An update: old tasks make room.
	s.retireOld()
	// 6. Fewer than wanted.
	s.start()
	// 7. In one sentence.
	s.explain()
	return s.out
}

// step is the working state of one Step.
type step struct {
	Input
	service *fleet.Service
	out     Output

	units    []*unit          // kept ones, oldest first
	byID     map[string]*Task // all
	replaced map[string]bool  // tasks that have, or had, a successor
	free     int              // starts that no back-off holds up: the ends were not the tasks' own doing
	min, max int              // tasks
	waiting  bool             // in back-off with a start due
}

func newStep(in Input) *step {
	s := &step{Input: in, byID: map[string]*Task{}, replaced: map[string]bool{}}
	s.out.Service = in.Service
	s.service = &s.out.Service
	for i := range in.Tasks {
		t := &in.Tasks[i]
		s.byID[t.ID] = t
		if t.Replaces != "" {
			s.replaced[t.Replaces] = true
		}
	}
	s.units = gather(in.Tasks)
	d := in.Service.Desired
	s.min = (d*in.Service.MinHealthyPercent + 99) / 100
	s.max = max(d, d*in.Service.MaximumPercent/100)
	if s.min >= d && s.max <= d {
		s.max = d + 1
	}
	return s
}

func (s *step) stop(t *Task, code, reason string) {
	s.out.Actions = append(s.out.Actions, Action{Task: t.ID, Code: code, Reason: reason})
}

func (s *step) startTask(replaces string) {
	s.out.Actions = append(s.out.Actions, Action{Definition: s.service.Definition, Replaces: replaces})
	if replaces != "" {
		s.replaced[replaces] = true
	}
}

// stopGone ends the tasks of a lost machine: their agent stops them when it returns.
func (s *step) stopGone() {
	for i := range s.Tasks {
		if t := &s.Tasks[i]; t.Gone && t.Desired == api.StatusRunning && t.LastStatus != api.StatusStopped {
			s.stop(t, api.StopInfrastructure, "its machine is lost")
		}
	}
}

func (s *step) delete() Output {
	s.out.Done = true
	left := 0
	for i := range s.Tasks {
		t := &s.Tasks[i]
		if t.LastStatus == api.StatusStopped || t.Gone {
			continue
		}
		s.out.Done = false
		left++
		if t.Desired == api.StatusRunning {
			s.stop(t, api.StopServiceScheduler, fmt.Sprintf("service %s was deleted", s.service.Name))
		}
	}
	s.service.Reason = ""
	if left > 0 {
		s.service.Reason = fmt.Sprintf("deleted: %d tasks stop", left)
	}
	s.service.RetryAt = time.Time{}
	return s.out
}

// scaleDown stops what is more than the desired count, the least valuable first, and
// the old ones that nobody will miss: they serve nothing yet.
func (s *step) scaleDown() {
	cur, _ := s.split()
	if more := len(cur) - s.service.Desired; more > 0 {
		healthy := s.healthy()
		for _, u := range leastFirst(cur, s.service.Definition) {
			if more == 0 || u.healthy() && healthy-1 < s.min {
				continue
			}
			if u.healthy() {
				healthy--
			}
			more--
			s.drop(u, fmt.Sprintf("service %s was scaled down to %d", s.service.Name, s.service.Desired))
		}
	}
	_, old := s.split()
	for _, u := range leastFirst(old, s.service.Definition) {
		if !u.healthy() {
			s.drop(u, s.outdated())
		}
	}
}

func (s *step) outdated() string {
	return fmt.Sprintf("service %s was updated to %s", s.service.Name, s.service.Definition)
}

// settlePairs stops a task once its replacement serves, and a replacement that is not
// needed any more.
func (s *step) settlePairs() {
	for _, u := range s.units {
		if len(u.tail) == 0 {
			continue
		}
		last := u.tail[0]
		switch {
		case u.lead.Healthy:
			for _, t := range u.tail {
				s.stop(t, code(t), fmt.Sprintf("task %s runs in its place%s", u.lead.ID, suffix(why(t))))
			}
			u.tail = nil
		case !last.leaves() && last.Healthy && u.lead.LastStatus != api.StatusRunning:
			s.stop(u.lead, api.StopServiceScheduler, fmt.Sprintf("task %s can stay, its replacement is not needed", last.ID))
			u.lead, u.tail = last, u.tail[1:]
		}
	}
}

// replaceLeaving starts a replacement for each task that has to leave. A task that does
// not run yet, or is itself a replacement that does not serve, is stopped at once.
func (s *step) replaceLeaving() {
	cur, _ := s.split()
	count := len(cur)
	for _, u := range s.units {
		old := u.lead.Definition != s.service.Definition
		switch {
		case !u.lead.leaves() && !(old && len(u.tail) > 0):
			continue
		case old && count >= s.service.Desired:
			continue // an update's old task that is stopped soon, and needs no other
		case u.lead.Vacate == "" && u.lead.Unhealthy && s.inBackOff():
			s.waiting = true
			continue
		}
		if old {
			count++
		}
		if u.lead.Vacate == "" && u.lead.Unhealthy {
			s.failed(u.lead)
		}
		if u.lead.LastStatus == api.StatusRunning && (u.lead.Healthy || len(u.tail) == 0) {
			u.tail = append([]*Task{u.lead}, u.tail...)
		} else {
			s.stop(u.lead, code(u.lead), because("it has to leave before it serves", why(u.lead)))
			if len(u.tail) == 0 {
				s.startTask(u.lead.ID)
				u.lead = s.newcomer(u.lead.ID)
				continue
			}
		}
		s.startTask(u.tail[0].ID)
		u.lead = s.newcomer(u.tail[0].ID)
	}
	// A replacement that has waited for a place and found none: where the minimum allows
	// it, the old task makes way, so that its GPU can be mended.
	healthy := s.healthy()
	for _, u := range s.units {
		if len(u.tail) == 0 || !s.noRoom(u.lead) || u.lead.Definition != s.service.Definition {
			continue
		}
		for _, t := range u.tail {
			if t.Healthy && healthy-1 < s.min {
				continue
			}
			if t.Healthy {
				healthy--
			}
			s.stop(t, code(t), because("its replacement finds no room before it has left", why(t)))
		}
		u.tail = kept(u.tail, s.out.Actions)
	}
}

// newcomer stands for a task that this step starts.
func (s *step) newcomer(replaces string) *Task {
	return &Task{Definition: s.service.Definition, Replaces: replaces, Desired: api.StatusRunning, LastStatus: api.StatusPending, CreatedAt: s.Now}
}

// noRoom says whether a task has been through a pass of placing, and found none.
func (s *step) noRoom(t *Task) bool { return !t.Placed && t.CreatedAt.Before(s.Now) }

// releasing is how many tasks are about to leave their place.
func (s *step) releasing() int {
	n := 0
	for i := range s.Tasks {
		if t := &s.Tasks[i]; t.Placed && t.Desired == api.StatusStopped && t.LastStatus != api.StatusStopped && !t.Gone {
			n++
		}
	}
	return n
}

// retireOld stops old tasks of an update: those in whose place new ones are healthy,
// and as many as the new ones need room, down to the minimum.
func (s *step) retireOld() {
	cur, old := s.split()
	if len(old) == 0 {
		return
	}
	want := s.wanted(len(cur))
	blocked := max(0, want-max(0, s.max-len(s.units))) // starts that the maximum holds up
	unplaced := 0
	for _, u := range cur {
		if len(u.tail) == 0 && s.noRoom(u.lead) {
			unplaced++
		}
	}
	need := blocked + max(0, unplaced-s.releasing())
	healthy := s.healthy()
	for _, u := range leastFirst(old, s.service.Definition) {
		switch {
		case healthy-1 >= s.service.Desired:
		case need > 0 && healthy-1 >= s.min:
			need--
		default:
			return
		}
		healthy--
		s.drop(u, s.outdated())
	}
}

// wanted is how many starts are due now, with so many current ones there.
func (s *step) wanted(current int) int {
	want := max(0, s.service.Desired-current)
	if s.inBackOff() && want > s.free {
		s.waiting = true
		return s.free
	}
	return want
}

func (s *step) start() {
	cur, _ := s.split()
	n := min(s.wanted(len(cur)), max(0, s.max-len(s.units)))
	ended := s.unreplaced()
	for range n {
		replaces := ""
		if len(ended) > 0 {
			replaces, ended = ended[0], ended[1:]
		}
		s.startTask(replaces)
		s.units = append(s.units, &unit{lead: s.newcomer(replaces)})
	}
}

// unreplaced are the tasks that ended without the service's wish and have had no
// successor, oldest first.
func (s *step) unreplaced() []string {
	var out []string
	for i := range s.Tasks {
		if t := &s.Tasks[i]; !t.live() && !s.replaced[t.ID] && t.StopCode != api.StopServiceScheduler {
			out = append(out, t.ID)
		}
	}
	return out
}
