package placement_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/config"
	"github.com/berth-gpu/berth/placement"
	"github.com/berth-gpu/berth/placement/agentapi/agentapitest"
	"github.com/berth-gpu/berth/placement/fleet"
	"github.com/berth-gpu/berth/placement/replace/dev"
	"github.com/berth-gpu/berth/placement/store"
)

// damage makes a stored record, which the server finds at its next start, such as it
// cannot read.
func damage(t testing.TB, s *config.Server, kind, key string) {
	t.Helper()
	write(t, s, kind, key, json.RawMessage(`{"id": 5, "name": 5, "revision": "x"}`))
}

// write puts a record in the store of a server that does not run.
func write(t testing.TB, s *config.Server, kind, key string, value any) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	st, err := store.Open(ctx, store.Options{Dir: s.DataDir, Log: logger()})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	term, err := st.Campaign(ctx, "test")
	if err != nil {
		t.Fatal(err)
	}
	if err := term.Commit(ctx, []store.Group{{{Kind: kind, Key: key, Value: value}}}); err != nil {
		t.Fatal(err)
	}
	if err := term.Resign(ctx); err != nil {
		t.Fatal(err)
	}
}

// TestDefinitionAside: what runs of a definition whose record is damaged runs on, and
// its name goes to no other one.
func TestDefinitionAside(t *testing.T) {
	t.Parallel()
	s := settings(t)
	r, w := serve(t, s), newWorld(t)
	m := join(t, w, r, "m1", 1, 80000)
	in := api.RunTask{Definition: shared("job", 10000), ClientToken: "once"}
	id := run(t, r.client, in)[0]
	reaches(t, r.client, id, api.StatusRunning)
	m.setSlow(true)
	m.setUp(false)
	until(t, "the machine is gone", func() bool { return !instance(t, r.client, "m1").Connected })
	waits := run(t, r.client, api.RunTask{Definition: shared("job", 10000)})[0]
	if v := task(t, r.client, waits); v.Instance != "" {
		t.Fatalf("%+v", v)
	}
	r.stop(t)
	damage(t, s, fleet.KindDefinition, "job:1")

	r = serve(t, s)
	m.setUp(true)
	until(t, "the machine is back", func() bool { return instance(t, r.client, "m1").Connected && m.ordered(id) != nil })
	if v := task(t, r.client, id); v.LastStatus != api.StatusRunning || m.has(id) != api.StatusRunning {
		t.Errorf("%+v", v)
	}
	if v := reaches(t, r.client, waits, api.StatusStopped); v.StopCode != api.StopTaskFailedToStart || !strings.HasPrefix(v.StoppedReason, "its definition job:1 is not known any more") {
		t.Errorf("%+v", v)
	}
	if again := run(t, r.client, in); again[0] != id {
		t.Errorf("the token gives %v", again)
	}
	if v := task(t, r.client, run(t, r.client, api.RunTask{Definition: shared("job", 20000)})[0]); v.Definition != "job:2" {
		t.Errorf("another definition is %s", v.Definition)
	}
	sound := false
	for _, e := range events(t, r.client) {
		sound = sound || e.Kind == "server" && e.Subject == "definition job:1"
	}
	if !sound {
		t.Error("nothing says that the record was set aside")
	}
}

// TestDamagedInstance: the tasks on a machine whose record is damaged are there again
// with its agent, and end without it.
func TestDamagedInstance(t *testing.T) {
	t.Parallel()
	s := quick(t)
	r, w := serve(t, s), newWorld(t)
	m1, m2 := join(t, w, r, "m1", 1, 80000), join(t, w, r, "m2", 1, 80000)
	id := run(t, r.client, api.RunTask{Definition: shared("job", 50000)})[0]
	reaches(t, r.client, id, api.StatusRunning)
	moves := run(t, r.client, api.RunTask{Definition: shared("moves", 50000), Reschedule: true})[0]
	reaches(t, r.client, moves, api.StatusRunning)
	if m1.has(id) == "" || m2.has(moves) == "" {
		t.Fatal("one of them on each machine")
	}
	m2.setUp(false)
	r.stop(t)
	damage(t, s, fleet.KindInstance, "m1")
	damage(t, s, fleet.KindInstance, "m2")

	r = serve(t, s)
	until(t, "one machine is back", func() bool { return instance(t, r.client, "m1").Connected })
	if v := reaches(t, r.client, id, api.StatusRunning); m1.has(id) != api.StatusRunning || v.DesiredStatus != api.StatusRunning {
		t.Errorf("%+v", v)
	}
	if free := instance(t, r.client, "m1").GPUs[0].RemainingMemoryInMiB; free != 30000 {
		t.Errorf("m1 has %d MiB left", free)
	}
	if v := reaches(t, r.client, moves, api.StatusStopped); v.StopCode != api.StopInfrastructure {
		t.Errorf("%+v", v)
	}
	until(t, "it is to be started elsewhere", func() bool { return successor(t, r.client, moves).ID != "" })
	sound(t, r)
}

// TestEndedThenLost: a task that had ended by itself when its machine was lost is not
// started again.
func TestEndedThenLost(t *testing.T) {
	t.Parallel()
	r, w := serve(t, quick(t)), newWorld(t)
	m1 := join(t, w, r, "m1", 1, 80000)
	id := run(t, r.client, api.RunTask{Definition: shared("job", 10000), Reschedule: true})[0]
	reaches(t, r.client, id, api.StatusRunning)
	m1.setSlow(true)
	m1.do(id, func(c *copy) { m1.end(c, api.StopEssentialExited, "Essential container in task exited") })
	reaches(t, r.client, id, api.StatusDeactivating)
	m1.setUp(false)
	until(t, "its machine is lost", func() bool { return strings.HasPrefix(task(t, r.client, id).Reason, "m1 is not heard") })
	m1.setSlow(false)
	m1.setUp(true)
	if v := reaches(t, r.client, id, api.StatusStopped); v.StopCode != api.StopEssentialExited || v.Infrastructure {
		t.Errorf("%+v", v)
	}
	if v := successor(t, r.client, id); v.ID != "" {
		t.Errorf("it was started again: %+v", v)
	}
}

// TestForgotten: which ends are forgotten an hour later, and that none is before all that
// follows from it has been done.
func TestForgotten(t *testing.T) {
	t.Parallel()
	s := settings(t)
	r, w := serve(t, s), newWorld(t)
	m := join(t, w, r, "m1", 1, 80000)
	ask[api.Service](t, r.client, "POST", api.PathServices, api.Service{Name: "web", Definition: shared("web", 10000), MaximumPercent: 200})
	id := run(t, r.client, api.RunTask{Definition: shared("job", 10000)})[0]
	reaches(t, r.client, id, api.StatusRunning)
	r.stop(t)

	long := time.Now().UTC().Add(-2 * time.Hour)
	old := fleet.Task{Definition: "web:1", Instance: "m1", Generation: 1, Desired: api.StatusStopped, LastStatus: api.StatusStopped, CreatedAt: long, PlacedAt: long, StoppingAt: long, StoppedAt: long}
	scaled, moved := old, old
	scaled.ID, scaled.Service, scaled.StopCode = strings.Repeat("1", 32), "web", api.StopServiceScheduler
	moved.ID, moved.Reschedule, moved.StopCode, moved.Infrastructure = strings.Repeat("2", 32), true, api.StopInfrastructure, true
	write(t, s, fleet.KindTask, scaled.ID, scaled)
	write(t, s, fleet.KindTask, moved.ID, moved)
	m.do(id, func(c *copy) {
		m.stops(c, 0)
		c.StopCode, c.StoppedReason, c.StoppedAt = api.StopEssentialExited, "Essential container in task exited", &long
	})

	r = serve(t, s)
	until(t, "what a service stopped is forgotten", func() bool { return task(t, r.client, scaled.ID).ID == "" && task(t, r.client, moved.ID).ID == "" })
	if v := successor(t, r.client, moved.ID); v.ID == "" {
		t.Error("what was to be started elsewhere is forgotten, and was not")
	}
	if v := reaches(t, r.client, id, api.StatusStopped); v.StopCode != api.StopEssentialExited {
		t.Errorf("%+v", v)
	}
}

// TestGivenUp: what an agent that was given up still runs when it returns holds its place
// until it has stopped.
func TestGivenUp(t *testing.T) {
	t.Parallel()
	r, w := serve(t, settings(t)), newWorld(t)
	m := join(t, w, r, "m1", 1, 80000)
	id := run(t, r.client, api.RunTask{Definition: shared("job", 50000), Reschedule: true})[0]
	reaches(t, r.client, id, api.StatusRunning)
	m.setUp(false)
	m.setSlow(true)
	until(t, "its stream is gone", func() bool { return !instance(t, r.client, "m1").Connected })
	ask[struct{}](t, r.client, "DELETE", at(api.PathInstance, "m1")+"?force=1", nil)
	m.setUp(true)
	until(t, "it is told to stop it", func() bool { return m.has(id) == api.StatusDeactivating })
	if v := successor(t, r.client, id); v.Instance != "" {
		t.Errorf("placed where the old one is: %+v", v)
	}
	m.setSlow(false)
	reaches(t, r.client, successor(t, r.client, id).ID, api.StatusRunning)
	sound(t, r)
}

// TestNameAfterRestart: whose a machine's name is outlives the server.
func TestNameAfterRestart(t *testing.T) {
	t.Parallel()
	s := settings(t)
	r, w := serve(t, s), newWorld(t)
	m := join(t, w, r, "m1", 1, 80000)
	id := run(t, r.client, api.RunTask{Definition: shared("job", 10000)})[0]
	reaches(t, r.client, id, api.StatusRunning)
	m.setUp(false)
	r.stop(t)
	r = serve(t, s)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := agentapitest.Dial(ctx, s.Agents.Listen, agentapitest.Hello("test", "m1", "a stranger"))
	if err == nil || !strings.HasPrefix(err.Error(), "NAME_IN_USE: another agent spoke for instance m1") {
		t.Errorf("a stranger: %v", err)
	}
	m.setUp(true)
	until(t, "the machine is back", func() bool { return instance(t, r.client, "m1").Connected })
	if v := task(t, r.client, id); v.LastStatus != api.StatusRunning {
		t.Errorf("%+v", v)
	}
}

// TestLongWords: an agent's sentences are stored up to a limit.
func TestLongWords(t *testing.T) {
	t.Parallel()
	r, w := serve(t, settings(t)), newWorld(t)
	m := join(t, w, r, "m1", 1, 80000)
	ids := run(t, r.client, api.RunTask{Definition: shared("job", 1000), Count: 10}) // all in one report are below what a message takes
	long := strings.Repeat("\u00e9", 500_000)
	for _, id := range ids {
		reaches(t, r.client, id, api.StatusRunning)
		m.do(id, func(c *copy) {
			m.stops(c, 1)
			c.StopCode, c.StoppedReason, c.Containers[0].Reason = api.StopEssentialExited, long, long
		})
	}
	for _, id := range ids {
		v := reaches(t, r.client, id, api.StatusStopped)
		if n := len(v.StoppedReason); n > 1100 || !strings.HasSuffix(v.StoppedReason, "\u00e9...") || len(v.Containers[0].Reason) != n {
			t.Errorf("%d bytes", n)
		}
	}
}

// TestForeignMachine: one that is to be replaced, and that the provider did not make,
// does not hold up the others.
func TestForeignMachine(t *testing.T) {
	t.Parallel()
	s, dir := settings(t), folder(t)
	s.Replace.When = config.ReplaceAny
	p, err := dev.Open(dev.Options{Dir: dir, RunDir: "/run/bf", Berth: "/bin/false", Agent: "/bin/false", Server: s.Agents.Listen})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove("/run/bf") }) // where it is empty
	made := filepath.Join(dir, "machines", "dev-made")
	if err := os.MkdirAll(made, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(made, "machine.json"), []byte(`{"id": "dev-made", "token": "made", "mark": "none", "made": true}`), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	server, err := placement.Open(ctx, s, p, "test", logger())
	if err != nil {
		t.Fatal(err)
	}
	r := &running{client: reach(s.Socket), settings: s, server: server, cancel: cancel, ended: make(chan struct{})}
	go func() {
		defer close(r.ended)
		r.err = server.Run(ctx)
	}()
	t.Cleanup(func() { r.stop(t) })
	r.leads(t)
	w := newWorld(t)
	foreign := join(t, w, r, "a-foreign", 2, 80000)
	foreign.standing(0, api.GPUFailed, "a fault")
	foreign.standing(1, api.GPUFailed, "a fault")
	said := func() bool {
		return slices.ContainsFunc(events(t, r.client), func(e api.Event) bool {
			return e.Subject == "a-foreign" && strings.HasPrefix(e.Says, "a-foreign should be replaced (2 of 2 GPUs failed)")
		})
	}
	until(t, "an operator is told of it", said)
	join(t, w, r, "dev-made", 2, 80000).standing(0, api.GPUFailed, "a fault")
	until(t, "the other one is being replaced", func() bool {
		all := ask[[]api.Replacement](t, r.client, "GET", api.PathReplacements, nil)
		return len(all) == 1 && all[0].Instance == "dev-made"
	})
}
