package placement_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/config"
)

// quick are settings with which an agent is lost within a test.
func quick(t testing.TB) *config.Server {
	s := settings(t)
	s.Agents.Lease, s.Agents.Grace = 1500*time.Millisecond, 1500*time.Millisecond
	return s
}

// TestLost: an agent that is not heard: nothing more on its machine, then its tasks
// elsewhere; it is back: the old copies stop with the first orders, and not before they
// have is their place free.
func TestLost(t *testing.T) {
	t.Parallel()
	s := quick(t)
	r, w := serve(t, s), newWorld(t)
	m1 := join(t, w, r, "m1", 1, 80000)
	ask[api.Service](t, r.client, "POST", api.PathServices, api.Service{Name: "web", Definition: shared("web", 20000), DesiredCount: 2, MinimumHealthyPercent: 100, MaximumPercent: 200})
	until(t, "the service runs", func() bool { return service(t, r.client, "web").RunningCount == 2 })
	ends := run(t, r.client, api.RunTask{Definition: shared("ends", 10000)})[0]
	moves := run(t, r.client, api.RunTask{Definition: shared("moves", 10000), Reschedule: true, ClientToken: "moves"})[0]
	reaches(t, r.client, ends, api.StatusRunning)
	reaches(t, r.client, moves, api.StatusRunning)
	old := m1.running()
	m2 := join(t, w, r, "m2", 1, 80000)

	silent := time.Now()
	m1.setUp(false)
	until(t, "AGENT_CONNECTIVITY is impaired", func() bool { return connectivity(instance(t, r.client, "m1")) == api.HealthImpaired })
	if in := instance(t, r.client, "m1"); in.Connected || in.Health.OverallStatus != api.HealthImpaired || connectivity(instance(t, r.client, "m2")) != api.HealthOK {
		t.Errorf("%+v", in.Health)
	}
	until(t, "all is elsewhere, or has ended", func() bool {
		return service(t, r.client, "web").RunningCount == 2 && len(m2.running()) == 3 && task(t, r.client, ends).DesiredStatus == api.StatusStopped
	})
	for _, v := range tasks(t, r.client) {
		switch {
		case v.Instance == "m2":
			if !slices.Contains(old, v.Replaces) || v.CreatedAt.Before(silent.Add(s.Agents.Lease+s.Agents.Grace-time.Second)) {
				t.Errorf("in whose place, and when: %+v", v)
			}
		case v.StopCode != api.StopInfrastructure || !v.Infrastructure || v.LastStatus != api.StatusDeactivating || v.Reason != "m1 is not heard: it is stopped there when it returns":
			t.Errorf("lost: %+v", v)
		}
	}
	if v := successor(t, r.client, moves); v.Instance != "m2" {
		t.Errorf("rescheduled: %+v", v)
	}
	if v := successor(t, r.client, ends); v.ID != "" {
		t.Errorf("it was not to be started again: %+v", v)
	}
	if again := run(t, r.client, api.RunTask{Definition: shared("moves", 10000), ClientToken: "moves"}); again[0] != moves || len(again) != 1 {
		t.Errorf("the token of a task that has moved gives %v", again)
	}

	// It is back, and its tasks take a while to stop.
	m1.setSlow(true)
	m1.setUp(true)
	until(t, "all old ones are told to stop", func() bool {
		for _, id := range old {
			if m1.has(id) != api.StatusDeactivating {
				return false
			}
		}
		return true
	})
	m1.mu.Lock()
	for _, o := range m1.first.Tasks {
		if o.Stop == nil || o.Stop.Code != api.StopInfrastructure {
			t.Errorf("the first orders after the return: %+v", o)
		}
	}
	if len(m1.first.Tasks) != 4 {
		t.Errorf("the first orders after the return: %+v", m1.first)
	}
	m1.mu.Unlock()
	if in := instance(t, r.client, "m1"); connectivity(in) != api.HealthOK || !in.Connected || in.GPUs[0].RemainingMemoryInMiB != 20000 {
		t.Errorf("before they have stopped: %+v", in)
	}
	sound(t, r)
	m1.setSlow(false)
	until(t, "they have stopped", func() bool { return instance(t, r.client, "m1").GPUs[0].RemainingMemoryInMiB == 80000 })
	for _, id := range old {
		if v := task(t, r.client, id); v.LastStatus != api.StatusStopped || v.StopCode != api.StopInfrastructure || v.StoppedReason == "" {
			t.Errorf("%+v", v)
		}
	}
	if got := m2.running(); len(got) != 3 || service(t, r.client, "web").RunningCount != 2 {
		t.Errorf("m2 runs %q", got)
	}
	sound(t, r)
}

// TestStopAfter: such a service has no second copy while the first may run: it is
// started elsewhere once its agent has stopped it for sure.
func TestStopAfter(t *testing.T) {
	t.Parallel()
	s := quick(t)
	r, w := serve(t, s), newWorld(t)
	m1 := join(t, w, r, "m1", 1, 80000)
	ask[api.Service](t, r.client, "POST", api.PathServices, api.Service{Name: "one", Definition: shared("one", 20000), DesiredCount: 1,
		MinimumHealthyPercent: 100, MaximumPercent: 200, StopAfterSeconds: 3})
	until(t, "the service runs", func() bool { return service(t, r.client, "one").RunningCount == 1 })
	old := live(t, r.client, "one")[0]
	if o := m1.ordered(old.ID); o.StopAfterMs != 3000 {
		t.Errorf("the order: %+v", o)
	}
	join(t, w, r, "m2", 1, 80000)
	silent := time.Now()
	m1.setUp(false)
	until(t, "it is lost", func() bool {
		return slices.ContainsFunc(events(t, r.client), func(e api.Event) bool {
			return e.Instance == "m1" && strings.Contains(e.Says, "its tasks are started elsewhere")
		})
	})
	// A drain, too, must not start a second copy.
	ask[api.Drain](t, r.client, "POST", at(api.PathDrain, "m1"), nil)
	until(t, "it is started elsewhere", func() bool { return successor(t, r.client, old.ID).LastStatus == api.StatusRunning })
	v := successor(t, r.client, old.ID)
	if after := v.CreatedAt.Sub(silent); after < 3*time.Second+2*time.Second { // and its stop timeout
		t.Errorf("it was started elsewhere after %s", after)
	}
	if v.Instance != "m2" {
		t.Errorf("%+v", v)
	}
	sound(t, r)
}

// TestNewLeader counts nobody as lost before a full lease and grace of its own, and
// nothing that was lost before as found.
func TestNewLeader(t *testing.T) {
	t.Parallel()
	s := quick(t)
	r, w := serve(t, s), newWorld(t)
	m1 := join(t, w, r, "m1", 1, 80000)
	ask[api.Service](t, r.client, "POST", api.PathServices, api.Service{Name: "web", Definition: shared("web", 20000), DesiredCount: 1, MinimumHealthyPercent: 100, MaximumPercent: 200})
	until(t, "the service runs", func() bool { return service(t, r.client, "web").RunningCount == 1 })
	first := live(t, r.client, "web")[0]
	m1.setUp(false)
	r.stop(t)
	time.Sleep(s.Agents.Lease + s.Agents.Grace + time.Second) // longer than an agent may be away: nobody could hear it

	began := time.Now()
	r = serve(t, s)
	if in := instance(t, r.client, "m1"); in.Connected || len(in.GPUs) != 1 {
		t.Errorf("%+v", in)
	}
	until(t, "it is lost", func() bool { return task(t, r.client, first.ID).DesiredStatus == api.StatusStopped })
	if after := time.Since(began); after < s.Agents.Lease+s.Agents.Grace {
		t.Errorf("lost after %s", after)
	}
	until(t, "there is another one", func() bool { return successor(t, r.client, first.ID).ID != "" })
	r.stop(t)
	r = serve(t, s) // it is lost still
	waits := successor(t, r.client, first.ID)
	if in := instance(t, r.client, "m1"); connectivity(in) != api.HealthImpaired || waits.Instance != "" {
		t.Errorf("%+v\n%+v", in, waits)
	}
	m1.setUp(true)
	reaches(t, r.client, first.ID, api.StatusStopped)
	if v := reaches(t, r.client, waits.ID, api.StatusRunning); v.Instance != "m1" {
		t.Errorf("%+v", v)
	}
	sound(t, r)
}

// TestFlapping: an agent that comes and goes loses nothing.
func TestFlapping(t *testing.T) {
	t.Parallel()
	r, w := serve(t, settings(t)), newWorld(t)
	m1 := join(t, w, r, "m1", 1, 80000)
	ids := run(t, r.client, api.RunTask{Definition: shared("job", 10000), Count: 3})
	for _, id := range ids {
		reaches(t, r.client, id, api.StatusRunning)
	}
	for i := range 15 {
		m1.setUp(false)
		if i%3 == 0 {
			until(t, "the server knows", func() bool { return !instance(t, r.client, "m1").Connected })
			ids = append(ids, run(t, r.client, api.RunTask{Definition: shared("more", 5000)})...)
		}
		m1.setUp(true)
		if i%2 == 0 {
			until(t, "it is back", func() bool { return instance(t, r.client, "m1").Connected })
		}
	}
	for _, id := range ids {
		reaches(t, r.client, id, api.StatusRunning)
	}
	if n := len(tasks(t, r.client)); n != 8 || len(ids) != 8 || len(m1.running()) != 8 {
		t.Errorf("%d tasks of %d, %q run", n, len(ids), m1.running())
	}
	sound(t, r)
}

// TestWiped: another agent under a machine's name knows nothing of what ran there.
func TestWiped(t *testing.T) {
	t.Parallel()
	r, w := serve(t, quick(t)), newWorld(t)
	m1 := join(t, w, r, "m1", 1, 80000)
	ask[api.Service](t, r.client, "POST", api.PathServices, api.Service{Name: "web", Definition: shared("web", 20000), DesiredCount: 1, MinimumHealthyPercent: 100, MaximumPercent: 200})
	until(t, "the service runs", func() bool { return service(t, r.client, "web").RunningCount == 1 })
	ends := run(t, r.client, api.RunTask{Definition: shared("ends", 10000)})[0]
	moves := run(t, r.client, api.RunTask{Definition: shared("moves", 10000), Reschedule: true})[0]
	reaches(t, r.client, ends, api.StatusRunning)
	reaches(t, r.client, moves, api.StatusRunning)
	old := live(t, r.client, "web")[0].ID
	m1.wipe("another agent")
	for _, id := range []string{ends, moves, old} {
		if v := reaches(t, r.client, id, api.StatusStopped); v.StopCode != api.StopInfrastructure || !v.Infrastructure {
			t.Errorf("%+v", v)
		}
	}
	until(t, "they are started again", func() bool {
		return len(m1.running()) == 2 && successor(t, r.client, moves).LastStatus == api.StatusRunning && successor(t, r.client, old).LastStatus == api.StatusRunning
	})
	if in := instance(t, r.client, "m1"); in.AgentID != "another agent" || in.GPUs[0].RemainingMemoryInMiB != 50000 {
		t.Errorf("%+v", in)
	}
	sound(t, r)
}

// TestDeregister: a machine that does not come back leaves; one that does joins anew.
func TestDeregister(t *testing.T) {
	t.Parallel()
	r, w := serve(t, quick(t)), newWorld(t)
	m1 := join(t, w, r, "m1", 1, 80000)
	id := run(t, r.client, api.RunTask{Definition: shared("job", 10000), Reschedule: true})[0]
	reaches(t, r.client, id, api.StatusRunning)
	if no := refused(t, r.client, "DELETE", at(api.PathInstance, "m1"), nil); no.status != 409 || !strings.Contains(no.says, "its agent is connected") {
		t.Error(no)
	}
	m1.setUp(false)
	until(t, "its stream is gone", func() bool { return !instance(t, r.client, "m1").Connected })
	if no := refused(t, r.client, "DELETE", at(api.PathInstance, "m1"), nil); no.status != 409 || !strings.Contains(no.says, "it has 1 task") {
		t.Error(no)
	}
	ask[struct{}](t, r.client, "DELETE", at(api.PathInstance, "m1")+"?force=1", nil)
	if v := reaches(t, r.client, id, api.StatusStopped); v.StopCode != api.StopInfrastructure || instance(t, r.client, "m1").Name != "" {
		t.Errorf("%+v", v)
	}
	until(t, "there is another one, and no place", func() bool { return successor(t, r.client, id).Reason == "no machine has joined yet" })
	m1.setUp(true)
	reaches(t, r.client, successor(t, r.client, id).ID, api.StatusRunning)
	until(t, "the old one is stopped and forgotten", func() bool { return m1.has(id) == "" })
	sound(t, r)
}
