package placement_test

import (
	"slices"
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
	successor := func(id string) *api.Task {
		all := tasks(t, r.client)
		if i := slices.IndexFunc(all, func(v api.Task) bool { return v.Replaces == id }); i >= 0 {
			return &all[i]
		}
		return nil
	}
	until(t, "the other one is started on m2", func() bool {
		v := successor(moves.ID)
		return v != nil && v.LastStatus == api.StatusRunning && v.Instance == "m2"
	})
	if v := successor(stopped.ID); v != nil {
		t.Errorf("an operator has stopped it, and it was started again: %+v", v)
	}
	sound(t, r)
}
