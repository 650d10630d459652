package service_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/placement/fit"
	"github.com/berth-gpu/berth/placement/fleet"
	"github.com/berth-gpu/berth/placement/service"
	"pgregory.net/rapid"
)

// TestSchedules: random arrivals, departures, failures and restarts of the server over
// the real fleet, fit and service. What is always true is looked at after each turn; in
// the end everything is mended, and every service runs what it should.
func TestSchedules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld()
		m := mirror{map[string]fleet.Change{}}
		w.store = m.store
		w.check = func(in service.Input, out service.Output) { checkStep(t, in, out) }
		for i := range rapid.IntRange(1, 3).Draw(t, "machines") {
			w.join(fmt.Sprintf("m%d", i), rapid.IntRange(0, 3).Draw(t, "gpus"), 50000)
		}
		for range rapid.IntRange(1, 60).Draw(t, "turns") {
			turn(t, w, &m)
			checkWorld(t, w)
		}
		mend(w)
		w.check = func(service.Input, service.Output) {}
		for range 40 {
			w.now = w.now.Add(20 * time.Second)
			w.round()
			w.agents()
			for _, task := range w.f.Tasks() {
				if len(task.Containers) > 0 && task.LastStatus == api.StatusRunning {
					w.health(task.ID, "HEALTHY")
				}
			}
		}
		checkWorld(t, w)
		checkMended(t, w)
		checkMirror(t, w, &m)
	})
}

var sizes = []int{10000, 20000, 45000, -1, -2}

func turn(t *rapid.T, w *world, m *mirror) {
	pick := func(of []*fleet.Task) *fleet.Task {
		if len(of) == 0 {
			return nil
		}
		return rapid.SampledFrom(of).Draw(t, "task")
	}
	where := func(is func(*fleet.Task) bool) []*fleet.Task {
		var out []*fleet.Task
		for _, task := range w.f.Tasks() {
			if is(task) {
				out = append(out, task)
			}
		}
		return out
	}
	heard := func(task *fleet.Task) bool {
		return task.Instance != "" && w.f.Connected(task.Instance) && task.LastStatus != api.StatusStopped
	}
	instance := func() string { return rapid.SampledFrom(w.f.Instances()).Draw(t, "instance").ID }
	name := rapid.SampledFrom([]string{"a", "b"}).Draw(t, "service")
	s := w.f.Service(name)
	size := rapid.SampledFrom(sizes).Draw(t, "size")
	percent := func() (int, int) {
		return rapid.SampledFrom([]int{0, 50, 75, 100}).Draw(t, "min"), rapid.SampledFrom([]int{100, 125, 150, 200}).Draw(t, "max")
	}

	switch kind := rapid.IntRange(0, 24).Draw(t, "kind"); kind {
	case 0:
		if s == nil {
			least, most := percent()
			w.f.PutService(&fleet.Service{Name: name, Definition: w.define(name, size, ""), Desired: rapid.IntRange(0, 5).Draw(t, "desired"),
				MinHealthyPercent: least, MaximumPercent: most, CreatedAt: w.now})
		}
	case 1:
		if s != nil && !s.Deleted {
			w.service(name, func(s *fleet.Service) { s.Desired = rapid.IntRange(0, 5).Draw(t, "desired") })
		}
	case 2:
		if s != nil && !s.Deleted {
			key := w.define(name, size, rapid.SampledFrom([]string{"", "x", "y"}).Draw(t, "text"))
			w.service(name, func(s *fleet.Service) { s.Definition, s.Failures, s.RetryAt = key, 0, time.Time{} })
		}
	case 3:
		if s != nil && !s.Deleted {
			least, most := percent()
			w.service(name, func(s *fleet.Service) { s.MinHealthyPercent, s.MaximumPercent = least, most })
		}
	case 4:
		if s != nil && rapid.IntRange(0, 3).Draw(t, "really") == 0 {
			w.service(name, func(s *fleet.Service) { s.Deleted, s.Desired = true, 0 })
		}
	case 5:
		w.start("", w.define("alone", size, ""), "", rapid.Bool().Draw(t, "reschedule"))
	case 6:
		id := instance()
		if gpus := w.f.Instance(id).GPUs; len(gpus) > 0 {
			w.gpu(rapid.SampledFrom(gpus).Draw(t, "gpu").ID, rapid.SampledFrom([]string{api.GPUOpen, api.GPUOpen, api.GPUClosed, api.GPUDraining, api.GPUFailed}).Draw(t, "standing"), "")
		}
	case 7:
		w.instance(instance(), func(i *fleet.Instance) {
			i.Status = rapid.SampledFrom([]string{api.InstanceActive, api.InstanceDraining}).Draw(t, "status")
		})
	case 8:
		w.instance(instance(), func(i *fleet.Instance) {
			for n := range i.GPUs {
				i.GPUs[n].TotalMiB = rapid.SampledFrom([]int64{50000, 25000, 5000}).Draw(t, "total")
			}
		})
	case 9:
		if id := instance(); w.f.Connected(id) {
			w.lost(id)
		} else {
			w.back(id)
		}
	case 10:
		if task := pick(where(heard)); task != nil {
			w.crash(task.ID, rapid.SampledFrom([]string{api.StopEssentialExited, api.StopTaskFailedToStart}).Draw(t, "code"), rapid.Bool().Draw(t, "infrastructure"))
		}
	case 11:
		if task := pick(where(func(task *fleet.Task) bool { return task.Desired == api.StatusRunning })); task != nil {
			w.end(task.ID, api.StopUserInitiated, "", false)
		}
	case 12:
		if task := pick(where(func(task *fleet.Task) bool { return heard(task) && task.LastStatus == api.StatusRunning })); task != nil {
			w.health(task.ID, rapid.SampledFrom([]string{"HEALTHY", "UNKNOWN", "UNHEALTHY"}).Draw(t, "health"))
		}
	case 13:
		w.now = w.now.Add(time.Duration(rapid.IntRange(1, 100).Draw(t, "seconds")) * time.Second)
	case 14:
		checkMirror(t, w, m)
		connected := map[string]bool{}
		for _, i := range w.f.Instances() {
			connected[i.ID] = w.f.Connected(i.ID)
		}
		f, err := m.load()
		if err != nil {
			t.Fatal(err)
		}
		w.f = f
		for id, is := range connected {
			f.SetPresence(id, is)
		}
	case 15, 16, 17:
		if task := pick(where(heard)); task != nil {
			w.agent(task)
		}
	case 18, 19, 20:
		w.agents()
	default:
		w.now = w.now.Add(100 * time.Millisecond)
		w.round()
		for _, task := range w.f.Pending() {
			d, _ := w.f.Demand(task.Definition)
			if id, gpus, ok := fit.Choose(w.f.Candidates(), d); ok {
				t.Fatalf("%s waits, and fits on %s %v\n%s", task.ID, id, gpus, w.draw())
			}
			e, _ := w.f.Explain(task)
			machines, all := e.FreeMachines, e.FreeGPUs
			for _, o := range e.RuledOut {
				machines, all = machines+o.Machines, all+o.GPUs
			}
			if machines != len(w.f.Instances()) || all != e.GPUs {
				t.Fatalf("%s: %+v does not add up", task.ID, e)
			}
		}
	}
}

// checkStep: a step is what its JSON says; the service's own stops never go below the
// minimum, and its starts never above the maximum.
func checkStep(t *rapid.T, in service.Input, out service.Output) {
	data, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	var back service.Input
	if err := json.Unmarshal(data, &back); err != nil {
		t.Fatal(err)
	}
	was, _ := json.Marshal(out)
	if is, _ := json.Marshal(back.Do()); string(is) != string(was) {
		t.Fatalf("through JSON: %s, not %s", is, was)
	}

	live := func(task service.Task) bool {
		return task.Desired == api.StatusRunning && task.LastStatus != api.StatusStopped && !task.Gone
	}
	alive := map[string]bool{}
	for _, task := range in.Tasks {
		alive[task.ID] = live(task)
	}
	stopped, replaced := map[string]bool{}, map[string]int{}
	starts, more := 0, 0
	for _, a := range out.Actions {
		switch {
		case a.Task == "":
			starts++
			if !alive[a.Replaces] {
				more++
			}
			if a.Replaces != "" {
				replaced[a.Replaces]++
			}
		case stopped[a.Task]:
			t.Fatalf("%s is stopped twice: %+v", a.Task, out.Actions)
		default:
			stopped[a.Task] = true
		}
	}
	relieved := map[string]bool{} // the replacement serves already
	for _, task := range in.Tasks {
		if live(task) && task.Healthy {
			relieved[task.Replaces] = true
		}
	}
	before, after, kept, leaving := 0, 0, starts, 0
	for _, task := range in.Tasks {
		if !live(task) {
			continue
		}
		if task.Healthy && !relieved[task.ID] {
			before++
		}
		if stopped[task.ID] {
			continue
		}
		kept++
		if task.Healthy && !relieved[task.ID] {
			after++
		}
		for _, other := range in.Tasks {
			if other.Replaces == task.ID && live(other) && !stopped[other.ID] {
				replaced[task.ID]++
			}
		}
		if replaced[task.ID] > 0 {
			leaving++ // does not count beside its replacement
		}
	}
	for id, n := range replaced {
		if n > 1 {
			t.Fatalf("%s has %d replacements: %+v", id, n, out.Actions)
		}
	}
	s := in.Service
	least := (s.Desired*s.MinHealthyPercent + 99) / 100
	most := max(s.Desired+1, s.Desired*s.MaximumPercent/100)
	if !s.Deleted && after < min(before, least) {
		t.Fatalf("%d healthy of at least %d, before %d: %+v\n%+v", after, least, before, in, out)
	}
	if more > 0 && kept-leaving > most {
		t.Fatalf("%d tasks of at most %d: %+v\n%+v", kept-leaving, most, in, out)
	}
}

// checkWorld: invariants 1, 2 and 4.
func checkWorld(t *rapid.T, w *world) {
	if c := w.f.Contradictions(); len(c) > 0 {
		t.Fatal(strings.Join(c, "\n"))
	}
	generations := map[uint64]string{}
	for _, task := range w.f.Tasks() {
		if (task.Generation == 0) != (task.Instance == "") || generations[task.Generation] != "" && task.Generation > 0 {
			t.Fatalf("generation %d of %s and %s", task.Generation, task.ID, generations[task.Generation])
		}
		generations[task.Generation] = task.ID
		if task.LastStatus == api.StatusStopped && task.StopCode == "" {
			t.Fatalf("%s stopped without a reason", task.ID)
		}
		if task.Service == "" && task.Replaces != "" {
			if first := w.f.Task(task.Replaces); first.LastStatus != api.StatusStopped && !first.Gone {
				t.Fatalf("two copies of one run: %s and %s\n%s", first.ID, task.ID, w.draw())
			}
			if len(w.f.Successors(task.Replaces)) > 1 {
				t.Fatalf("%s has been started again twice", task.Replaces)
			}
		}
	}
}

// mend makes everything whole, and room enough.
func mend(w *world) {
	for _, i := range w.f.Instances() {
		w.back(i.ID)
		w.instance(i.ID, func(i *fleet.Instance) {
			i.Status = api.InstanceActive
			for n := range i.GPUs {
				i.GPUs[n].TotalMiB, i.GPUs[n].Standing = 50000, api.GPUOpen
			}
		})
	}
	for i := range 6 {
		w.join(fmt.Sprintf("z%d", i), 8, 50000)
	}
}

func checkMended(t *rapid.T, w *world) {
	for _, s := range w.f.Services() {
		var running []string
		for _, task := range w.f.TasksOf(s.Name) {
			if task.LastStatus == api.StatusRunning && task.Definition == s.Definition && task.Desired == api.StatusRunning {
				running = append(running, task.ID)
			} else if task.LastStatus != api.StatusStopped {
				t.Fatalf("left behind: %s\n%s", task.ID, w.draw())
			}
		}
		if s.Deleted || len(running) != s.Desired || s.Reason != "" {
			t.Fatalf("%+v does not converge: %v run\n%s", s, running, w.draw())
		}
	}
	for _, task := range w.f.Tasks() {
		switch {
		case task.LastStatus == api.StatusRunning && task.Desired == api.StatusRunning:
		case task.LastStatus != api.StatusStopped:
			t.Fatalf("%s is %s in the end", task.ID, task.LastStatus)
		case task.Service == "" && task.Reschedule && task.StopCode == api.StopInfrastructure && len(w.f.Successors(task.ID)) == 0:
			t.Fatalf("%s was lost with its machine or GPU", task.ID)
		case task.Service != "" && w.f.Service(task.Service) == nil:
		}
	}
}

// checkMirror: what a store was told gives the same fleet again.
func checkMirror(t *rapid.T, w *world, m *mirror) {
	m.store(w.f.Changes())
	f, err := m.load()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range w.f.Instances() {
		f.SetPresence(i.ID, w.f.Connected(i.ID))
	}
	all := func(f *fleet.Fleet) []string {
		var out []string
		for _, records := range []any{f.Definitions(), f.Services(), f.Instances(), f.Tasks(), f.Pending(), f.Candidates(), f.TasksOf("a"), f.Count("b")} {
			data, err := json.Marshal(records)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, string(data))
		}
		return out
	}
	if was, is := all(w.f), all(f); !slices.Equal(was, is) {
		t.Fatalf("read again:\n%s\nwant:\n%s", strings.Join(is, "\n"), strings.Join(was, "\n"))
	}
}
