package service

import (
	"cmp"
	"slices"

	"github.com/berth-gpu/berth/api"
)

// unit is one of the desired count: the task that counts, and those whose place it
// takes while they still run. With a tail, lead is a replacement on its way.
type unit struct {
	lead *Task
	tail []*Task // newest first
}

// gather makes units of the live tasks, oldest lead first.
func gather(tasks []Task) []*unit {
	live, taken := map[string]*Task{}, map[string]bool{}
	var order []*Task
	for i := range tasks {
		if t := &tasks[i]; t.live() {
			live[t.ID] = t
			order = append(order, t)
		}
	}
	slices.SortFunc(order, older)
	for _, t := range order {
		if live[t.Replaces] != nil {
			taken[t.Replaces] = true
		}
	}
	var out []*unit
	for _, t := range order {
		if taken[t.ID] {
			continue
		}
		u := &unit{lead: t}
		for at := live[t.Replaces]; at != nil && at != t; at = live[at.Replaces] {
			u.tail = append(u.tail, at)
		}
		out = append(out, u)
	}
	return out
}

func older(a, b *Task) int {
	return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
}

// healthy says whether one of the unit's tasks serves.
func (u *unit) healthy() bool {
	return u.lead.Healthy || slices.ContainsFunc(u.tail, func(t *Task) bool { return t.Healthy })
}

func (s *step) healthy() int {
	n := 0
	for _, u := range s.units {
		if u.healthy() {
			n++
		}
	}
	return n
}

// split parts the units of the current definition from the old ones.
func (s *step) split() (cur, old []*unit) {
	for _, u := range s.units {
		if u.lead.Definition == s.service.Definition {
			cur = append(cur, u)
		} else {
			old = append(old, u)
		}
	}
	return cur, old
}

// drop stops all of a unit and keeps it no longer.
func (s *step) drop(u *unit, reason string) {
	s.stop(u.lead, api.StopServiceScheduler, reason)
	for _, t := range u.tail {
		s.stop(t, api.StopServiceScheduler, reason)
	}
	s.units = slices.DeleteFunc(s.units, func(o *unit) bool { return o == u })
}

// leastFirst orders units by what their loss costs: those without a place, those that
// have to leave, those of another definition, those that do not serve yet, the newest.
func leastFirst(units []*unit, definition string) []*unit {
	rank := func(u *unit) int {
		switch {
		case !u.lead.Placed && len(u.tail) == 0:
			return 0
		case len(u.tail) > 0 || u.lead.leaves():
			return 1
		case u.lead.Definition != definition:
			return 2
		case !u.healthy():
			return 3
		}
		return 4
	}
	out := slices.Clone(units)
	slices.SortStableFunc(out, func(a, b *unit) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), older(b.lead, a.lead))
	})
	return out
}

// kept are the tasks that no action stops.
func kept(tasks []*Task, actions []Action) []*Task {
	var out []*Task
	for _, t := range tasks {
		if !slices.ContainsFunc(actions, func(a Action) bool { return a.Task == t.ID }) {
			out = append(out, t)
		}
	}
	return out
}
