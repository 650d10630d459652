package service_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/placement/fleet"
	"github.com/berth-gpu/berth/placement/service"
)

// world is a simulated fleet: the server's rounds over the real fleet, fit and service,
// and agents that do at once what they are told.
type world struct {
	f     *fleet.Fleet
	now   time.Time
	ids   int
	said  []string // since it was last asked
	check func(in service.Input, out service.Output)
	store func([]fleet.Change)
}

func newWorld() *world {
	return &world{f: fleet.New(""), now: time.Date(2026, 1, 2, 3, 0, 0, 0, time.UTC), check: func(service.Input, service.Output) {}, store: func([]fleet.Change) {}}
}

func (w *world) say(format string, args ...any) {
	w.said = append(w.said, fmt.Sprintf(format, args...))
}

// define registers a revision: text makes it another one. mib below 0 is that many
// whole GPUs.
func (w *world) define(family string, mib int, text string) string {
	requires := fmt.Sprintf(`{"type": "GPU", "sharingStrategy": {"nvidiaMps": {"memory": %d}}}`, mib)
	if mib < 0 {
		requires = fmt.Sprintf(`{"type": "GPU", "value": "%d"}`, -mib)
	}
	d, err := w.f.Register(fmt.Appendf(nil, `{"family": %q, "containerDefinitions": [{"name": "main", "image": "i%s", "memory": 64, "resourceRequirements": [%s]}]}`, family, text, requires), w.now)
	if err != nil {
		panic(err)
	}
	return d.Key()
}

func (w *world) join(id string, gpus int, mib int64) {
	i := &fleet.Instance{ID: id, Status: api.InstanceActive, CPU: 1 << 20, MemoryMiB: 1 << 20}
	for n := range gpus {
		i.GPUs = append(i.GPUs, fleet.GPU{ID: fmt.Sprintf("%s/%d", id, n), Index: n, TotalMiB: mib, MaxClients: 48, Standing: api.GPUOpen})
	}
	w.f.PutInstance(i)
	w.f.SetPresence(id, true)
}

func (w *world) start(name, definition, replaces string, reschedule bool) *fleet.Task {
	w.ids++
	t := &fleet.Task{ID: fmt.Sprintf("t%d", w.ids), Service: name, Definition: definition, Replaces: replaces, Reschedule: reschedule,
		Desired: api.StatusRunning, LastStatus: api.StatusPending, CreatedAt: w.now}
	w.f.PutTask(t)
	return t
}

// round is the server's: decide, place, store.
func (w *world) round() {
	for _, s := range w.f.Services() {
		in := service.Look(w.f, s.Name, w.now)
		out := service.Step(in)
		w.check(in, out)
		w.f.PutService(&out.Service)
		for _, id := range out.Counted {
			t := *w.f.Task(id)
			t.Counted = true
			w.f.PutTask(&t)
		}
		w.do(s.Name, out.Actions)
		if again := service.Step(service.Look(w.f, s.Name, w.now)); len(again.Actions)+len(again.Counted) > 0 {
			panic(fmt.Sprintf("asked again at the same time, %s gives %+v after %+v\n%s", s.Name, again, out, w.draw()))
		}
		if out.Service.Reason != s.Reason {
			w.say("%s: %s", s.Name, orSteady(out.Service.Reason))
		}
		if out.Done {
			w.say("%s is gone", s.Name)
			w.f.DeleteService(s.Name)
		}
	}
	for _, t := range w.f.TasksOf("") {
		w.do("", service.Standalone(service.LookAlone(w.f, t, w.now)))
	}
	for _, p := range w.f.PlacePending(w.now) {
		w.say("place %s on %s", p.Task.ID, strings.Join(p.Task.GPUs, " "))
	}
	w.store(w.f.Changes())
}

func orSteady(reason string) string {
	if reason == "" {
		return "steady"
	}
	return reason
}

func (w *world) do(name string, actions []service.Action) {
	for _, a := range actions {
		if a.Task == "" {
			t := w.start(name, a.Definition, a.Replaces, name == "")
			w.say("start %s %s%s", t.ID, t.Definition, ifAny(" for ", t.Replaces))
			continue
		}
		w.say("stop %s %s: %s", a.Task, a.Code, a.Reason)
		w.end(a.Task, a.Code, a.Reason, a.Code == api.StopInfrastructure)
	}
}

func ifAny(before, s string) string {
	if s == "" {
		return ""
	}
	return before + s
}

// end asks for a task's end; one without a place has ended.
func (w *world) end(id, code, reason string, infrastructure bool) {
	t := *w.f.Task(id)
	if t.Desired == api.StatusRunning {
		t.Desired, t.LastStatus, t.StopCode, t.StoppedReason, t.StoppingAt = api.StatusStopped, api.StatusDeactivating, code, reason, w.now
		t.Infrastructure = infrastructure
	}
	if t.Instance == "" {
		t.LastStatus, t.StoppedAt = api.StatusStopped, w.now
	}
	w.f.PutTask(&t)
}

// agents do what they are told: start what is placed, stop what is to stop.
func (w *world) agents() {
	for _, t := range w.f.Tasks() {
		if t.Instance == "" || !w.f.Connected(t.Instance) {
			continue
		}
		w.agent(t)
	}
}

func (w *world) agent(t *fleet.Task) {
	next := *t
	switch {
	case t.LastStatus == api.StatusStopped:
	case t.Desired == api.StatusStopped:
		next.LastStatus, next.StoppedAt = api.StatusStopped, w.now
	case t.LastStatus == api.StatusPending:
		next.LastStatus, next.StartedAt = api.StatusRunning, w.now
	}
	w.f.PutTask(&next)
}

// crash ends a task by its own doing, or its machine's.
func (w *world) crash(id, code string, infrastructure bool) {
	w.end(id, code, "", infrastructure)
	t := *w.f.Task(id)
	t.LastStatus, t.StoppedAt = api.StatusStopped, w.now
	w.f.PutTask(&t)
}

func (w *world) health(id, word string) {
	t := *w.f.Task(id)
	t.Containers = []api.Container{{Name: "main", HealthStatus: word}}
	w.f.PutTask(&t)
}

func (w *world) instance(id string, change func(*fleet.Instance)) {
	i := *w.f.Instance(id)
	i.GPUs = slices.Clone(i.GPUs)
	change(&i)
	w.f.PutInstance(&i)
}

func (w *world) gpu(id, standing, reason string) {
	machine, index, _ := strings.Cut(id, "/")
	w.instance(machine, func(i *fleet.Instance) {
		for n := range i.GPUs {
			if fmt.Sprint(n) == index {
				i.GPUs[n].Standing, i.GPUs[n].StandingReason = standing, reason
			}
		}
	})
}

// lost cuts an agent off for longer than the grace; back hears it again.
func (w *world) lost(id string) {
	w.f.SetPresence(id, false)
	w.instance(id, func(i *fleet.Instance) { i.Cutoff, i.Lost = w.now, true })
	for _, t := range w.f.TasksOn(id) {
		gone := *t
		gone.Gone = true
		w.f.PutTask(&gone)
	}
}

func (w *world) back(id string) {
	w.f.SetPresence(id, true)
	w.instance(id, func(i *fleet.Instance) { i.Cutoff, i.Lost = time.Time{}, false })
}

func (w *world) service(name string, change func(*fleet.Service)) {
	s := *w.f.Service(name)
	change(&s)
	w.f.PutService(&s)
}

// draw is every task that has not stopped, by service.
func (w *world) draw() string {
	var b strings.Builder
	for _, t := range w.f.Tasks() {
		if t.LastStatus == api.StatusStopped {
			continue
		}
		at := "-"
		if t.Instance != "" {
			at = strings.Join(t.GPUs, " ")
		}
		fmt.Fprintf(&b, "%-4s %-7s %-5s %s", t.ID, t.Definition, at, t.LastStatus)
		if t.Gone {
			b.WriteString(" gone")
		}
		if t.Replaces != "" && w.f.Task(t.Replaces).LastStatus != api.StatusStopped {
			fmt.Fprintf(&b, " for %s", t.Replaces)
		}
		if len(t.Containers) > 0 && t.Containers[0].HealthStatus != "" {
			b.WriteString(" " + t.Containers[0].HealthStatus)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// mirror is the fleet as a store would give it back.
type mirror struct{ records map[string]fleet.Change }

func (m *mirror) store(changes []fleet.Change) {
	for _, c := range changes {
		if c.Value == nil {
			delete(m.records, c.Kind+" "+c.Key)
			continue
		}
		m.records[c.Kind+" "+c.Key] = c
	}
}

func (m *mirror) load() (*fleet.Fleet, error) {
	f := fleet.New("")
	for _, c := range m.records { // in any order
		data, err := json.Marshal(c.Value)
		if err != nil {
			return nil, err
		}
		if err := f.Load(c.Kind, c.Key, data); err != nil {
			return nil, err
		}
	}
	return f, nil
}
