package agent

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/berth-gpu/berth/agent/gpu"
	"github.com/berth-gpu/berth/agent/state"
	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/config"
	"github.com/berth-gpu/berth/mps"
)

// open opens an agent as bare does, until the test ends.
func open(t *testing.T, dir string) *Agent {
	t.Helper()
	a := bare(t, dir)
	t.Cleanup(func() { a.store.Close() })
	return a
}

// bare is an agent that has its store and its books, and no Docker, on a folder that
// an earlier one may have left.
func bare(t fataler, dir string) *Agent {
	t.Helper()
	s := &config.Agent{Instance: "m-1", StateDir: dir, RunDir: "/run/berth", Server: config.Upstream{Address: []string{"unix:/x"}}}
	a := &Agent{settings: s, log: zap.NewNop(), rules: rules(s), bootID: "boot", loop: loop{tasks: map[string]*task{}}}
	var err error
	if a.store, err = state.Open(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := a.store.Begin(s.Instance, a.bootID); err != nil {
		t.Fatal(err)
	}
	if err := a.loadServer(); err != nil {
		t.Fatal(err)
	}
	records, _, err := a.store.Tasks()
	if err != nil {
		t.Fatal(err)
	}
	for _, rec := range records {
		def, err := a.rules.Parse(rec.Definition)
		if err != nil {
			t.Fatal(err)
		}
		a.tasks[rec.ID] = newTask(*rec, def)
	}
	a.capacity = capacity{cpu: 1024, memoryMiB: 1000}
	return a
}

const sleeper = `{"family":"f","cpu":"512","containerDefinitions":[{"name":"c","image":"i","memory":64}]}`

func fleetOrder(term uint64, tasks ...Wanted) Order {
	return Order{Fleet: true, Term: term, Tasks: tasks}
}

func wanted(name string, generation uint64) Wanted {
	return Wanted{Name: name, Generation: generation, Definition: json.RawMessage(sleeper)}
}

// wantNow is Want without the loop: what it changed is stored.
func (a *Agent) wantNow(t *testing.T, o Order) (map[string]string, error) {
	t.Helper()
	refused, err := a.want(o)
	store(t, a)
	return refused, err
}

func (a *Agent) named(name string) *task {
	for _, t := range a.tasks {
		if t.rec.Name == name {
			return t
		}
	}
	return nil
}

func TestOrdersOfAServer(t *testing.T) {
	a := open(t, t.TempDir())
	if refused, err := a.wantNow(t, fleetOrder(1, wanted("one", 10), wanted("two", 11))); err != nil || len(refused) != 0 {
		t.Fatal(refused, err)
	}
	full := wanted("three", 12)
	refused, _ := a.wantNow(t, fleetOrder(1, wanted("one", 10), wanted("two", 11), full))
	if !strings.Contains(refused["three"], "cpu: 512 units wanted, 0 free") {
		t.Fatalf("refused: %v", refused)
	}

	t.Run("a known start needs no definition", func(t *testing.T) {
		if refused, _ := a.wantNow(t, fleetOrder(1, Wanted{Name: "one", Generation: 10}, wanted("two", 11))); len(refused) != 0 {
			t.Errorf("refused: %v", refused)
		}
		if refused, _ := a.wantNow(t, fleetOrder(1, Wanted{Name: "one", Generation: 10}, wanted("two", 11), Wanted{Name: "x", Generation: 13})); !strings.Contains(refused["x"], "definition: none was given") {
			t.Errorf("refused: %v", refused)
		}
	})
	t.Run("a task is stopped for the first reason, and stays wanted", func(t *testing.T) {
		stop := wanted("one", 10)
		stop.Stop = &Stop{api.StopServiceScheduler, "scaled down"}
		a.wantNow(t, fleetOrder(1, stop, wanted("two", 11)))
		stop.Stop = &Stop{api.StopUserInitiated, "another"}
		a.wantNow(t, fleetOrder(1, stop, wanted("two", 11)))
		rec := a.named("one").rec
		if rec.Desired != api.StatusStopped || rec.StopCode != api.StopServiceScheduler || rec.StoppedReason != "scaled down" || rec.StoppedByAgent || rec.Released {
			t.Errorf("got %+v", rec)
		}
	})
	t.Run("one to be stopped is not started for it", func(t *testing.T) {
		w := wanted("never", 14)
		w.Stop = &Stop{api.StopUserInitiated, "x"}
		if refused, _ := a.wantNow(t, fleetOrder(1, w, wanted("two", 11))); !strings.Contains(refused["never"], "never started here") || a.named("never") != nil {
			t.Errorf("refused: %v", refused)
		}
	})
	t.Run("what is not wanted any more is stopped and stays to be read", func(t *testing.T) {
		a.wantNow(t, fleetOrder(1))
		if rec := a.named("two").rec; rec.Desired != api.StatusStopped || rec.StopCode != api.StopUserInitiated || rec.Released {
			t.Errorf("got %+v", rec)
		}
	})
	t.Run("a refused start stays refused while it is wanted", func(t *testing.T) {
		b := open(t, t.TempDir())
		b.capacity.cpu = 0
		b.wantNow(t, fleetOrder(1, wanted("late", 1)))
		b.capacity.cpu = 1024
		if refused, _ := b.wantNow(t, fleetOrder(1, wanted("late", 1))); !strings.Contains(refused["late"], "cpu:") {
			t.Errorf("the server had placed it elsewhere by now: %v", refused)
		}
		if refused, _ := b.wantNow(t, fleetOrder(1, wanted("late", 2))); len(refused) != 0 {
			t.Errorf("a new start: %v", refused)
		}
	})
}

func TestTerms(t *testing.T) {
	dir := t.TempDir()
	a := open(t, dir)
	for _, step := range []struct {
		term uint64
		old  bool
	}{{3, false}, {3, false}, {2, true}, {7, false}, {6, true}} {
		if _, err := a.wantNow(t, fleetOrder(step.term)); errors.Is(err, ErrOldTerm) != step.old {
			t.Errorf("term %d: %v", step.term, err)
		}
	}
	if _, err := a.wantNow(t, fleetOrder(1, wanted("x", 1))); err == nil || a.named("x") != nil {
		t.Errorf("an old leader's order was taken: %v", err)
	}
	a.store.Close()
	a = open(t, dir)
	if a.Term() != 7 {
		t.Errorf("after a restart the term is %d, want 7", a.Term())
	}
}

// Names of a server never come again: one floor stands for all that were forgotten,
// and nothing of them is kept.
func TestForgottenStarts(t *testing.T) {
	dir := t.TempDir()
	a := open(t, dir)
	a.wantNow(t, fleetOrder(1, wanted("low", 5), wanted("high", 9)))
	for _, name := range []string{"high", "low"} {
		rec := a.named(name).rec
		if err := a.store.Forget(&rec); err != nil {
			t.Fatal(err)
		}
		delete(a.tasks, rec.ID)
		if g, _ := a.store.LastGeneration(name); g != 0 {
			t.Errorf("generation %d of %s is kept", g, name)
		}
	}
	for range 2 { // and after a restart
		for _, tt := range []struct {
			w    Wanted
			want string
		}{
			{wanted("low", 5), "generation: 5 was given, 9 has been started already"},
			{wanted("high", 9), "generation: 9 was given, 9 has been started already"},
			{wanted("between", 7), "generation: 7 was given, 9 has been started already"},
		} {
			if refused, _ := a.wantNow(t, fleetOrder(1, tt.w)); !strings.Contains(refused[tt.w.Name], tt.want) {
				t.Errorf("%s: %v", tt.w.Name, refused)
			}
		}
		a.store.Close()
		a = open(t, dir)
	}
	if refused, _ := a.wantNow(t, fleetOrder(1, wanted("next", 10))); len(refused) != 0 {
		t.Errorf("refused: %v", refused)
	}
	if refused, _ := a.wantNow(t, Order{Tasks: []Wanted{wanted("file", 1)}}); len(refused) != 0 {
		t.Errorf("the folder counts for itself: %v", refused)
	}
}

// A task that may not outlive the server's silence: from before it is taken it is
// stored when the server was heard, and that counts after a restart.
func TestStopAfter(t *testing.T) {
	dir := t.TempDir()
	a := open(t, dir)
	w := wanted("bound", 1)
	w.StopAfter = 30 * time.Second
	a.Heard()
	a.wantNow(t, fleetOrder(1, w, wanted("free", 2)))
	if a.cutOff(); a.named("bound").rec.Desired != api.StatusRunning {
		t.Fatal("ended while the server is heard: the silence before it was taken is not its own")
	}
	if stored, _ := a.store.Heard(); sinceBoot()-stored > time.Minute {
		t.Errorf("stored: heard at %s", stored)
	}
	a.store.Close()

	a = open(t, dir) // at once: nothing ends
	if a.cutOff(); a.named("bound").rec.Desired != api.StatusRunning {
		t.Error("a quick restart ended it")
	}
	if err := a.store.PutHeard(sinceBoot() - 31*time.Second); err != nil {
		t.Fatal(err)
	}
	a.store.Close()

	a = open(t, dir)
	a.cutOff()
	rec := a.named("bound").rec
	if rec.Desired != api.StatusStopped || rec.StopCode != api.StopInfrastructure || !rec.StoppedByAgent || rec.StoppedReason != "cut off from the placement server for 30s" {
		t.Errorf("got %+v", rec)
	}
	if a.named("free").rec.Desired != api.StatusRunning {
		t.Error("one without the wish was ended")
	}
	w = wanted("free", 2) // a service's update reaches what runs
	w.StopAfter = time.Minute
	a.wantNow(t, fleetOrder(1, w))
	if rec := a.named("free").rec; rec.StopAfter != time.Minute {
		t.Errorf("got %+v", rec)
	}
}

// The record of a task stays until the server, which may have been away, has taken its
// end in and wants it no more.
func TestAwaited(t *testing.T) {
	dir := t.TempDir()
	a := open(t, dir)
	a.wantNow(t, fleetOrder(1, wanted("one", 1)))
	rec := a.named("one").rec
	if !a.awaited(&rec) {
		t.Error("it is in the order")
	}
	a.store.Close()
	a = open(t, dir)
	if !a.awaited(&rec) {
		t.Error("no order has come since the agent began")
	}
	a.wantNow(t, fleetOrder(1, wanted("one", 2)))
	if a.awaited(&rec) {
		t.Error("another start of the name is in the order")
	}
	a.wantNow(t, fleetOrder(1))
	if a.awaited(&rec) {
		t.Error("it is not in the order any more")
	}
	a.wantNow(t, fleetOrder(1, wanted("one", 1)))
	a.settings.Server.Address = nil
	if a.awaited(&rec) {
		t.Error("there is no server any more")
	}
}

func TestAgentID(t *testing.T) {
	dir := t.TempDir()
	a := open(t, dir)
	first := a.agentID
	a.store.Close()
	if a = open(t, dir); len(first) != 32 || a.agentID != first {
		t.Errorf("%q, after a restart %q", first, a.agentID)
	}
	if other := open(t, t.TempDir()); other.agentID == first {
		t.Error("two machines are one agent")
	}
}

func TestStanding(t *testing.T) {
	held := mps.Status{State: mps.PhaseHeld}
	for _, tt := range []struct {
		name string
		u    *unit
		want string
	}{
		{"held", &unit{status: held}, api.GPUOpen},
		{"on its way", &unit{status: mps.Status{State: mps.PhaseServerStarting}}, api.GPUOpen},
		{"without MPS", &unit{}, api.GPUOpen},
		{"backing off", &unit{status: mps.Status{State: mps.PhaseBackoff}}, api.GPUClosed},
		{"stopping", &unit{status: mps.Status{State: mps.PhaseStopping}}, api.GPUClosed},
		{"hung", &unit{status: held, sampleErr: gpu.ErrHung}, api.GPUClosed},
		{"its daemon lost", &unit{status: mps.Status{State: mps.PhaseDraining, Reason: "the daemon has ended"}}, api.GPUDraining},
		{"past its budget", &unit{status: mps.Status{State: mps.PhaseQuarantined}}, api.GPUFailed},
		{"off the bus", &unit{status: held, lost: true}, api.GPUFailed},
		{"an Xid", &unit{status: held, broken: "Xid 79"}, api.GPUFailed},
	} {
		if tt.name != "without MPS" {
			tt.u.holder = new(mps.Holder)
		}
		if got, why := tt.u.standing(); got != tt.want || (why == "") != (got == api.GPUOpen) {
			t.Errorf("%s: %s (%s), want %s", tt.name, got, why, tt.want)
		}
	}
}
