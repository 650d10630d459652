package placement

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/placement/fit"
	"github.com/berth-gpu/berth/placement/fleet"
	"github.com/berth-gpu/berth/placement/service"
)

// A stopped task is kept so long, as ECS does.
const (
	keptStopped = time.Hour
	pruneEvery  = 10 * time.Second
)

// putTask puts a task and notes what has to be looked at because of it.
func (l *leader) putTask(t *fleet.Task) {
	l.fleet.PutTask(t)
	l.touch(t)
	if t.Instance != "" {
		l.touched.orders[t.Instance] = true
	} else {
		l.touched.place = true
	}
}

// stopTask asks for a task's end once; the first reason stays.
func (l *leader) stopTask(t *fleet.Task, code, reason string) {
	if t.Desired == api.StatusStopped {
		return
	}
	t.Desired, t.LastStatus, t.StopCode, t.StoppedReason, t.StoppingAt = api.StatusStopped, api.StatusDeactivating, code, reason, l.now
}

// takeAway asks for the end of a task whose machine is gone from under it. One that was
// ending anyway, by itself or by somebody's word, is not started elsewhere for that.
func (l *leader) takeAway(t *fleet.Task, reason string) {
	if t.Desired == api.StatusStopped && !t.Infrastructure && t.StopCode != api.StopInfrastructure {
		t.Reschedule = false
		return
	}
	l.stopTask(t, api.StopInfrastructure, reason)
	t.Infrastructure = true
}

// settle puts a task whose end was asked for: one that was never placed has ended.
func (l *leader) settle(t *fleet.Task) {
	if t.Instance == "" {
		l.stopped(t)
		return
	}
	l.say("task", t.ID, t.Instance, t.Service, "is stopped on %s: %s: %s", t.Instance, t.StopCode, t.StoppedReason)
	l.putTask(t)
}

// stopped puts a task that has ended.
func (l *leader) stopped(t *fleet.Task) {
	t.LastStatus = api.StatusStopped
	if t.StoppedAt.IsZero() {
		t.StoppedAt = l.now
	}
	l.say("task", t.ID, t.Instance, t.Service, "STOPPED: %s: %s", t.StopCode, t.StoppedReason)
	l.putTask(t)
	l.touched.place = true
}

// touchServicesOn notes that the tasks of an instance may have to move.
func (l *leader) touchServicesOn(instance string) {
	for _, t := range l.fleet.TasksOn(instance) {
		l.touch(t)
	}
}

// touch notes that a task's service, or the task itself where it has none, is to be
// looked at in this round.
func (l *leader) touch(t *fleet.Task) {
	if t.Service != "" {
		l.touched.services[t.Service] = true
	} else {
		l.touched.alone[t.ID] = true
	}
}

// serve decides what services and standalone tasks need. Most of them need nothing, so
// that only those are asked to which something has happened, whose time has come, or
// whose tasks have found no room.
func (l *leader) serve(ticked bool) {
	if ticked {
		for _, t := range l.fleet.Pending() {
			l.touch(t)
		}
		for _, s := range l.fleet.Services() {
			if wake := l.wakes[s.Name]; s.Failures > 0 || !wake.IsZero() && !wake.After(l.now) {
				l.touched.services[s.Name] = true
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(l.touched.services)) {
		delete(l.touched.services, name)
		l.stepService(name)
	}
	for _, id := range slices.Sorted(maps.Keys(l.touched.alone)) {
		delete(l.touched.alone, id)
		if t := l.fleet.Task(id); t != nil {
			in := service.LookAlone(l.fleet, t, l.now)
			out := in.Do()
			if len(out) > 0 {
				l.flight.Record("service.Standalone", id, in, out)
			}
			l.do(out, t.Service, 0, t)
		}
	}
}

func (l *leader) stepService(name string) {
	old := l.fleet.Service(name)
	if old == nil {
		return
	}
	in := service.Look(l.fleet, name, l.now)
	out := service.Step(in)
	if len(out.Actions) > 0 || len(out.Counted) > 0 || out.Done { // a change of its sentence alone decides nothing
		l.flight.Record("service.Step", name, in, out)
	}
	l.wakes[name] = out.Wake
	if out.Service.Reason != old.Reason && out.Service.Reason != "" {
		l.say("service", name, "", name, "%s", out.Service.Reason)
	}
	next := out.Service
	l.fleet.PutService(&next)
	for _, id := range out.Counted {
		t := *l.fleet.Task(id)
		t.Counted = true
		l.fleet.PutTask(&t)
	}
	l.do(out.Actions, name, next.StopAfter, nil)
	if out.Done {
		l.fleet.DeleteService(name)
		delete(l.wakes, name)
		l.say("service", name, "", name, "gone: none of its tasks is left")
	}
}

// do starts and stops tasks as it was decided. A task that is started in the place of
// another standalone one is like that one.
func (l *leader) do(actions []service.Action, name string, stopAfter time.Duration, like *fleet.Task) {
	for _, a := range actions {
		if a.Task != "" {
			next := *l.fleet.Task(a.Task)
			l.stopTask(&next, a.Code, a.Reason)
			next.Infrastructure = next.Infrastructure || a.Code == api.StopInfrastructure
			l.settle(&next)
			continue
		}
		t := &fleet.Task{ID: newID(), Service: name, Definition: a.Definition, Replaces: a.Replaces, StopAfter: stopAfter,
			Desired: api.StatusRunning, LastStatus: api.StatusPending, CreatedAt: l.creation()}
		if like != nil {
			t.Reschedule, t.ClientToken = like.Reschedule, like.ClientToken
		}
		says := "accepted: " + a.Definition
		if a.Replaces != "" {
			says += fmt.Sprintf(", in the place of %.12s", a.Replaces)
		}
		l.say("task", t.ID, "", name, "%s", says)
		l.putTask(t)
	}
}

// creation is when the next task of this round is made. Each is a little later than the
// one before, so that they are placed in the order in which they were decided.
func (l *leader) creation() time.Time {
	if ahead := l.created.Sub(l.now); ahead >= 0 && ahead < time.Second { // otherwise the clock was set
		l.created = l.created.Add(time.Microsecond)
	} else {
		l.created = l.now
	}
	return l.created
}

// prune forgets tasks of which it is known for long that they have stopped. It comes
// after all decisions of its round: none of them misses an end that is known since then.
func (l *leader) prune() {
	if l.now.Sub(l.pruned) < pruneEvery {
		return
	}
	l.pruned = l.now
	for _, t := range l.fleet.Tasks() {
		known := t.StoppedAt // by the agent's clock, and maybe told much later
		if t.StoppingAt.After(known) {
			known = t.StoppingAt
		}
		if t.LastStatus == api.StatusStopped && l.now.Sub(known) >= keptStopped {
			l.fleet.DeleteTask(t.ID)
		}
	}
	for _, s := range l.fleet.Services() {
		l.touched.services[s.Name] = true
	}
}

// place gives pending tasks their GPUs.
func (l *leader) place() {
	if !l.touched.place {
		return
	}
	l.touched.place = false
	for _, t := range l.fleet.Pending() {
		if l.fleet.Definition(t.Definition) == nil { // its record was set aside
			next := *t
			l.stopTask(&next, api.StopTaskFailedToStart, fmt.Sprintf("its definition %s is not known any more: start it anew with the definition (a service: update it)", t.Definition))
			l.stopped(&next)
		}
	}
	for _, p := range l.fleet.PlacePending(l.now) {
		l.flight.Record("fit.Place", p.Task.ID, fit.PlaceIn{Machine: p.Machine, Demand: p.Demand}, fit.PlaceOut{GPUs: p.Task.GPUs})
		l.touched.orders[p.Instance] = true
		at := p.Instance
		if len(p.Task.GPUs) > 0 {
			at += ", GPU " + strings.Join(p.Task.GPUs, ", ")
		}
		l.say("task", p.Task.ID, p.Instance, p.Task.Service, "placed on %s (generation %d)", at, p.Task.Generation)
	}
	clear(l.reasons)
}

// whyPending is one sentence about a task that has no place. It is made where somebody
// asks: it looks at every GPU, and rounds are many.
func (l *leader) whyPending(t *fleet.Task) string {
	why, known := l.reasons[t.Definition]
	if known {
		return why
	}
	e, _ := l.fleet.Explain(t)
	switch {
	case e.Machines == 0:
		why = "no machine has joined yet"
	case len(e.RuledOut) == 0:
		why = "waits to be placed"
	default:
		near := e.RuledOut[0]
		why = fmt.Sprintf("no machine can take it now; nearest is %s: %s", near.Instance, near.Nearest)
	}
	l.reasons[t.Definition] = why
	return why
}
