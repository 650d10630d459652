package replace_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/placement/replace"
)

// fleet is many machines with tasks, a server that replaces them, and a provider.
type fleet struct {
	t      *rapid.T
	p      replace.Policy
	now    time.Time
	since  time.Time
	serial int

	machines map[string]*machine
	tasks    []*task
	all      []replace.Replacement
	flying   map[string]*flight // by replacement
	made     map[string]string  // by token
	bad      bool               // what the provider makes does not join
	down     bool               // the provider
}

type machine struct {
	id       string
	alive    bool
	joined   bool
	standing string // "": not in the fleet
	usable   int
	lost     bool
	told     bool // its tasks end
}

// task is on a machine, or waits where that is "". It is one for ever: where a service
// would start another, it moves.
type task struct {
	on    string
	stays bool // standalone
	ended bool
}

type flight struct {
	a      replace.Action
	result *replace.Result
}

func (f *fleet) machine() *machine {
	f.serial++
	m := &machine{id: fmt.Sprintf("m%02d", f.serial), alive: true, usable: 2}
	f.machines[m.id] = m
	return m
}

func (f *fleet) in() (all []replace.Machine) {
	for _, id := range slices.Sorted(maps.Keys(f.machines)) {
		if m := f.machines[id]; m.standing != "" {
			all = append(all, replace.Machine{ID: id, GPUs: 2, Usable: m.usable, Lost: m.lost})
		}
	}
	return all
}

func (m *machine) well() bool { return m.alive && m.joined && !m.lost && m.usable > 0 }

// room is a machine that takes tasks, for one more of at most four.
func (f *fleet) room() *machine {
	for _, id := range slices.Sorted(maps.Keys(f.machines)) {
		m, n := f.machines[id], 0
		for _, t := range f.tasks {
			if t.on == id && !t.ended {
				n++
			}
		}
		if m.well() && m.standing == api.InstanceActive && n < 4 {
			return m
		}
	}
	return nil
}

func (f *fleet) round() {
	// Who is due.
	begin, _ := replace.Due(f.p, f.in(), f.all, f.now)
	for _, b := range begin {
		f.begin(b.Instance, b.Reason, false)
	}
	// Each one's step.
	for i, r := range f.all {
		if r.Over() {
			continue
		}
		o := f.observe(r)
		if fl := f.flying[r.ID]; fl != nil && fl.result != nil {
			o.InFlight, o.Result = false, fl.result
			delete(f.flying, r.ID)
		}
		next, actions := replace.Step(r, o, f.now, f.p)
		f.all[i] = reread(f.t, next)
		for _, a := range actions {
			f.do(r, a)
		}
	}
	// Tasks: those that have to move and those that wait, where there is room.
	for _, t := range f.tasks {
		m := f.machines[t.on]
		away := m == nil || m.lost || m.standing == api.InstanceDraining || m.usable == 0
		switch {
		case t.ended:
		case m != nil && m.told || t.stays && m != nil && m.lost:
			t.on, t.ended = "", t.stays
		case away && !(t.stays && m != nil):
			if to := f.room(); to != nil {
				t.on = to.id
			} else if m != nil && m.lost {
				t.on = ""
			}
		}
	}
}

func (f *fleet) begin(instance, reason string, operator bool) {
	for _, r := range f.all {
		if !r.Over() && r.Instance == instance {
			if !operator {
				f.t.Fatalf("%s is replaced twice at a time", instance)
			}
			return
		}
	}
	open, recent, newcomers := 0, 0, 0
	for _, r := range f.all {
		if f.now.Sub(r.StartedAt) < time.Hour {
			recent++
		}
		if !r.Over() {
			open++
			if m := f.machines[r.Newcomer()]; m != nil && m.standing != "" && f.machines[r.Instance].standing != "" {
				newcomers++
			}
		}
	}
	size := len(f.in()) - newcomers
	if !operator && (open >= max(1, size*f.p.AtOncePercent/100) || recent >= f.p.PerHour) {
		f.t.Fatalf("one begins beside %d of %d machines, after %d within the hour", open, size, recent)
	}
	f.all = append(f.all, replace.New(fmt.Sprintf("r%02d", len(f.all)), instance, reason, operator, f.now))
}

func (f *fleet) observe(r replace.Replacement) replace.Observation {
	o := replace.Observation{LeaderSince: f.since, InFlight: f.flying[r.ID] != nil}
	m := f.machines[r.Instance]
	o.Standing, o.Lost = m.standing, m.lost
	o.Recovered = m.alive && !m.lost && replace.Wants(f.p, replace.Machine{GPUs: 2, Usable: m.usable}) == ""
	for _, t := range f.tasks {
		if t.on == m.id && !t.ended && o.Standing != "" {
			o.TasksLeft++
			if !m.told {
				o.NotEnding++
			}
			if !t.stays {
				o.Movable++
			}
		}
	}
	if n := f.machines[r.Newcomer()]; n != nil {
		o.NewcomerStanding = n.standing
		o.NewcomerJoined = n.standing != "" && n.well()
		o.NewcomerImpaired = n.usable < 2
	}
	return o
}

func (f *fleet) do(r replace.Replacement, a replace.Action) {
	m := f.machines[a.Instance]
	switch a.Kind {
	case replace.DoCordon:
		m.standing = api.InstanceDraining
	case replace.DoUncordon:
		m.standing = api.InstanceActive
	case replace.DoForget:
		if m.alive {
			f.t.Fatalf("%s is forgotten and alive", m.id)
		}
		m.standing = ""
		for _, t := range f.tasks { // those on it are stopped, and a service starts others
			if t.on == m.id {
				t.on, t.ended = "", t.stays
			}
		}
	case replace.DoEndTasks:
		m.told = true
	case replace.DoRetire:
	default:
		if a.Kind == replace.DoTerminate && a.Instance == r.Instance && !m.lost && !m.told && m.standing != "" {
			for _, t := range f.tasks {
				if t.on == m.id && !t.ended {
					f.t.Fatalf("%s is terminated under a task that was neither moved nor told to end", m.id)
				}
			}
		}
		f.flying[r.ID] = &flight{a: a}
	}
}

// reach is a call's effect and its true reply.
func (f *fleet) reach(a replace.Action) *replace.Result {
	r := &replace.Result{Call: a.Call}
	switch a.Kind {
	case replace.DoLaunch:
		if f.made[a.Token] == "" {
			m := f.machine()
			if f.bad {
				m.usable = 0
			}
			f.made[a.Token] = m.id
		}
		if r.ID = f.made[a.Token]; !f.machines[r.ID].alive {
			return &replace.Result{Call: a.Call, Err: "was terminated"}
		}
	case replace.DoFind:
		id := f.made[a.Token]
		if r.Found = id != "" && f.machines[id].alive; r.Found {
			r.ID = id
		}
	case replace.DoTerminate:
		f.machines[a.Instance].alive = false
	}
	return r
}

// reply answers the calls that fly.
func (f *fleet) reply(how int) {
	for _, id := range slices.Sorted(maps.Keys(f.flying)) {
		fl := f.flying[id]
		if fl.result != nil {
			continue
		}
		switch {
		case how == 1 || f.down:
			fl.result = &replace.Result{Call: fl.a.Call, Err: "no"}
		case how == 2:
			f.reach(fl.a)
			fl.result = &replace.Result{Call: fl.a.Call, Err: "time-out"}
		default:
			fl.result = f.reach(fl.a)
		}
	}
}

func (f *fleet) join() {
	for _, id := range slices.Sorted(maps.Keys(f.machines)) {
		m := f.machines[id]
		retired := slices.ContainsFunc(f.all, func(r replace.Replacement) bool { return r.Retired(id) })
		if m.alive && !m.joined && !retired {
			m.joined, m.standing = true, api.InstanceActive
		}
	}
}

func (f *fleet) check() {
	for _, r := range f.all {
		alive := 0
		for _, n := range r.Newcomers {
			if m := f.machines[f.made[n.Token]]; m != nil && m.alive && m.standing != "" && !r.Over() {
				alive++
			}
		}
		if alive > 1 {
			f.t.Fatalf("%s has two newcomers", r.ID)
		}
		if r.Over() && r.Says == "" || r.State == replace.Failed && r.Why == "" {
			f.t.Fatalf("%s ended without a reason", r.ID)
		}
	}
	for i, t := range f.tasks {
		if m := f.machines[t.on]; m != nil && !t.ended && m.standing == "" {
			f.t.Fatalf("task %d is lost with %s", i, t.on)
		}
	}
}

// TestFleet replaces machines of a fleet under faults of everything.
func TestFleet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := &fleet{t: t, now: epoch, since: epoch, machines: map[string]*machine{}, flying: map[string]*flight{}, made: map[string]string{}}
		f.p = replace.Default()
		f.p.When = rapid.SampledFrom([]string{replace.WhenAny, replace.WhenAll, replace.WhenNever}).Draw(t, "when")
		f.p.AtOncePercent = rapid.IntRange(1, 60).Draw(t, "at once")
		f.p.PerHour = rapid.IntRange(1, 8).Draw(t, "per hour")
		f.p.Attempts = rapid.IntRange(1, 4).Draw(t, "attempts")
		f.p.Newcomers = rapid.IntRange(1, 4).Draw(t, "newcomers")
		for range rapid.IntRange(1, 8).Draw(t, "machines") {
			m := f.machine()
			m.joined, m.standing = true, api.InstanceActive
			for i := range rapid.IntRange(0, 3).Draw(t, "tasks") {
				f.tasks = append(f.tasks, &task{on: m.id, stays: i == 2})
			}
		}
		any := func(name string) *machine {
			var alive []string
			for _, m := range f.machines {
				if m.standing != "" {
					alive = append(alive, m.id)
				}
			}
			if len(alive) == 0 {
				return &machine{}
			}
			slices.Sort(alive)
			return f.machines[rapid.SampledFrom(alive).Draw(t, name)]
		}
		for range rapid.IntRange(20, 120).Draw(t, "events") {
			switch rapid.SampledFrom([]string{"time", "reply", "reply", "join", "join", "error", "time-out", "gpu", "lost", "back", "restart", "bad", "down", "operator", "resume", "ends"}).Draw(t, "event") {
			case "time":
				f.now = f.now.Add(time.Duration(rapid.IntRange(1, 900).Draw(t, "seconds")) * time.Second)
			case "reply":
				f.reply(0)
			case "error":
				f.reply(1)
			case "time-out":
				f.reply(2)
			case "join":
				f.join()
			case "gpu":
				if m := any("gpu of"); m.usable > 0 {
					m.usable--
				}
			case "lost":
				any("lost").lost = true
			case "back":
				if m := any("back"); m.alive {
					m.lost = false
				}
			case "restart":
				for _, fl := range f.flying {
					if rapid.Bool().Draw(t, "arrived") {
						f.reach(fl.a)
					}
				}
				clear(f.flying)
				f.since = f.now
			case "bad":
				f.bad = !f.bad
			case "down":
				f.down = !f.down
			case "operator":
				if m := any("operator's"); m.id != "" {
					f.begin(m.id, "asked for", true)
				}
			case "resume":
				f.resume()
			case "ends":
				for _, task := range f.tasks {
					task.ended = task.ended || task.stays && rapid.Bool().Draw(t, "ended")
				}
			}
			f.round()
			f.check()
		}
		// Everything is well from here on: each replacement ends, and so does the need.
		f.bad, f.down = false, false
		for range 3000 {
			f.reply(0)
			f.join()
			f.now = f.now.Add(time.Minute)
			f.resume()
			f.round()
			f.check()
			if !slices.ContainsFunc(f.all, func(r replace.Replacement) bool { return !r.Over() }) && !slices.ContainsFunc(f.in(), func(m replace.Machine) bool { return replace.Wants(f.p, m) != "" }) {
				return
			}
		}
		t.Fatalf("it does not end: %+v, machines %+v", f.all[len(f.all)-1], f.in())
	})
}

func (f *fleet) resume() {
	for _, changed := range replace.Resume(f.all) {
		i := slices.IndexFunc(f.all, func(r replace.Replacement) bool { return r.ID == changed.ID })
		f.all[i] = changed
	}
	if again := replace.Resume(f.all); len(again) > 0 {
		f.t.Fatalf("resumed twice: %+v", again)
	}
}
