package placement_test

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/berth-gpu/berth/api"
)

// TestStopWhileMoved: a rescheduled task that is stopped while it is being moved is not
// started elsewhere.
func TestStopWhileMoved(t *testing.T) {
	t.Parallel()
	r, w := serve(t, settings(t)), newWorld(t)
	m1 := join(t, w, r, "m1", 1, 80000)
	ids := run(t, r.client, api.RunTask{Definition: shared("job", 20000), Count: 2, Reschedule: true})
	stopped, moves := reaches(t, r.client, ids[0], api.StatusRunning), reaches(t, r.client, ids[1], api.StatusRunning)
	join(t, w, r, "m2", 1, 80000)
	m1.setSlow(true)
	ask[api.Drain](t, r.client, "POST", at(api.PathDrain, "m1"), nil)
	until(t, "m1 is told to stop both", func() bool {
		return m1.has(stopped.ID) == api.StatusDeactivating && m1.has(moves.ID) == api.StatusDeactivating
	})
	ask[struct{}](t, r.client, "POST", at(api.PathStop, stopped.ID), nil)
	m1.setSlow(false)
	reaches(t, r.client, stopped.ID, api.StatusStopped)
	until(t, "the other one is started on m2", func() bool {
		v := successor(t, r.client, moves.ID)
		return v.LastStatus == api.StatusRunning && v.Instance == "m2"
	})
	if v := successor(t, r.client, stopped.ID); v.ID != "" {
		t.Errorf("an operator has stopped it, and it was started again: %+v", v)
	}
	sound(t, r)
}

// TestDrain: what dry-run says is what a drain then does; a replacement runs before the
// old task is stopped; a standalone one stays; and undo.
func TestDrain(t *testing.T) {
	t.Parallel()
	r, w := serve(t, settings(t)), newWorld(t)
	join(t, w, r, "m1", 2, 80000)
	ask[api.Service](t, r.client, "POST", api.PathServices, api.Service{Name: "web", Definition: shared("web", 30000), DesiredCount: 3, MinimumHealthyPercent: 100, MaximumPercent: 100})
	until(t, "the service runs", func() bool { return service(t, r.client, "web").RunningCount == 3 })
	alone := run(t, r.client, api.RunTask{Definition: shared("job", 20000)})[0]
	reaches(t, r.client, alone, api.StatusRunning)
	m2 := startMachine(t, w, r, "m2", 1, 80000, func(m *machine) { m.slow = true })
	until(t, "m2 has joined", func() bool { return instance(t, r.client, "m2").Connected })

	before, told := tasks(t, r.client), events(t, r.client)
	dry := ask[api.Drain](t, r.client, "POST", at(api.PathDrain, "m1")+"?dryRun=1", nil)
	goes := map[string]string{}
	for _, m := range dry.Moves {
		goes[m.Task] = m.Instance
		want := "moves to m2"
		switch {
		case m.Task == alone:
			want = "stays until it ends: it is a standalone task"
		case m.Instance == "":
			want = "finds no room elsewhere now; nearest is m2: "
		}
		if !strings.HasPrefix(m.Says, want) || m.Moving != (m.Task != alone) {
			t.Errorf("%+v, want %q", m, want)
		}
	}
	if len(dry.Moves) != 4 || len(goes) != 4 || dry.Instance != "m1" {
		t.Errorf("%+v", dry)
	}
	if after := tasks(t, r.client); !reflect.DeepEqual(before, after) || len(events(t, r.client)) != len(told) || instance(t, r.client, "m1").Status != api.InstanceActive {
		t.Errorf("a dry run has changed something: %+v\n%+v", before, after)
	}

	if wet := ask[api.Drain](t, r.client, "POST", at(api.PathDrain, "m1"), nil); !reflect.DeepEqual(wet, dry) {
		t.Errorf("drain says %+v, dry-run %+v", wet, dry)
	}
	until(t, "each has a successor", func() bool {
		for id := range goes {
			if id != alone && successor(t, r.client, id).ID == "" {
				return false
			}
		}
		return true
	})
	until(t, "two are at m2", func() bool { return len(m2.tasks()) == 2 })
	for _, v := range tasks(t, r.client) {
		switch {
		case v.Instance == "m1" && (v.LastStatus != api.StatusRunning || v.DesiredStatus != api.StatusRunning):
			t.Errorf("stopped before its replacement runs: %+v", v)
		case v.Replaces != "" && v.Instance == "" && !strings.Contains(v.Reason, "no machine can take it now; nearest is m2"):
			t.Errorf("why it waits: %+v", v)
		}
	}
	if got := service(t, r.client, "web"); got.RunningCount != 3 {
		t.Errorf("%+v", got)
	}
	m2.setSlow(false)
	until(t, "those that have found room have moved", func() bool {
		n := 0
		for id, to := range goes {
			v := successor(t, r.client, id)
			if to == "m2" && v.Instance == "m2" && v.LastStatus == api.StatusRunning && task(t, r.client, id).LastStatus == api.StatusStopped {
				n++
			}
		}
		return n == 2
	})
	if v := task(t, r.client, alone); v.LastStatus != api.StatusRunning {
		t.Errorf("standalone: %+v", v)
	}
	ask[api.Drain](t, r.client, "POST", at(api.PathDrain, "m1")+"?undo=1", nil)
	until(t, "it is three again, and nothing else", func() bool {
		s := service(t, r.client, "web")
		return s.RunningCount == 3 && s.PendingCount == 0 && len(live(t, r.client, "web")) == 3
	})
	if v := instance(t, r.client, "m1"); v.Status != api.InstanceActive {
		t.Errorf("%+v", v)
	}
	sound(t, r)
}

// TestFailedGPU: the tasks of a GPU that fails move; those of one that is closed stay.
func TestFailedGPU(t *testing.T) {
	t.Parallel()
	r, w := serve(t, settings(t)), newWorld(t)
	m1 := join(t, w, r, "m1", 1, 80000)
	ask[api.Service](t, r.client, "POST", api.PathServices, api.Service{Name: "web", Definition: shared("web", 30000), DesiredCount: 2, MinimumHealthyPercent: 100, MaximumPercent: 200})
	until(t, "the service runs", func() bool { return service(t, r.client, "web").RunningCount == 2 })
	alone := run(t, r.client, api.RunTask{Definition: shared("job", 10000)})[0]
	moves := run(t, r.client, api.RunTask{Definition: shared("job", 10000), Reschedule: true})[0]
	reaches(t, r.client, alone, api.StatusRunning)
	reaches(t, r.client, moves, api.StatusRunning)
	join(t, w, r, "m2", 1, 80000)
	before := m1.running()
	m1.standing(0, api.GPUClosed, "its daemon is being restarted")
	until(t, "it is shown", func() bool { return instance(t, r.client, "m1").GPUs[0].Standing == api.GPUClosed })
	next := run(t, r.client, api.RunTask{Definition: shared("next", 1000)})[0]
	if v := reaches(t, r.client, next, api.StatusRunning); v.Instance != "m2" || !slices.Equal(m1.running(), before) {
		t.Errorf("closed: %+v, %q run", v, m1.running())
	}
	m1.standing(0, api.GPUFailed, "the restart budget is used up")
	until(t, "all but one have moved", func() bool {
		s := service(t, r.client, "web")
		return s.RunningCount == 2 && slices.Equal(m1.running(), []string{alone}) && successor(t, r.client, moves).LastStatus == api.StatusRunning
	})
	for _, v := range tasks(t, r.client) {
		if v.Instance == "m1" && v.ID != alone && (v.StopCode != api.StopInfrastructure || !strings.Contains(v.StoppedReason, "the restart budget is used up")) {
			t.Errorf("%+v", v)
		}
	}
	// One that is failed by its agent for the same reason ends as that says.
	m1.do(alone, func(c *copy) {
		c.StopCode, c.StoppedReason, c.Infrastructure = api.StopInfrastructure, "its GPU failed", true
		m1.stops(c, 137)
	})
	if v := reaches(t, r.client, alone, api.StatusStopped); v.StopCode != api.StopInfrastructure || !v.Infrastructure || successor(t, r.client, alone).ID != "" {
		t.Errorf("%+v", v)
	}
	sound(t, r)
}

// TestRefusedOrder: a start that an agent refuses has failed, with its words.
func TestRefusedOrder(t *testing.T) {
	t.Parallel()
	r, w := serve(t, settings(t)), newWorld(t)
	m := startMachine(t, w, r, "m1", 1, 80000, func(m *machine) { m.refuse = "privileged: this machine does not allow it" })
	id := run(t, r.client, api.RunTask{Definition: shared("job", 1000)})[0]
	if v := reaches(t, r.client, id, api.StatusStopped); v.StopCode != api.StopTaskFailedToStart || v.StoppedReason != "refused by the agent of m1: privileged: this machine does not allow it" {
		t.Errorf("%+v", v)
	}
	until(t, "it is ordered no more", func() bool { return m.ordered(id) == nil })
	ask[api.Service](t, r.client, "POST", api.PathServices, api.Service{Name: "web", Definition: shared("web", 1000), DesiredCount: 1, MinimumHealthyPercent: 100, MaximumPercent: 200})
	until(t, "the service says that its tasks fail", func() bool {
		return strings.Contains(service(t, r.client, "web").Reason, "of web:1 did not stay up; the next start is at ")
	})
	if n := len(tasks(t, r.client)); n > 6 {
		t.Errorf("%d tasks: it does not wait between its tries", n)
	}
	sound(t, r)
}
