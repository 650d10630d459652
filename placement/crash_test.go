package placement_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/config"
)

// seed is a random one, or that of BERTH_TEST_SEED; it is printed when a test fails.
func seed(t testing.TB) *rand.Rand {
	t.Helper()
	n := rand.Uint64() % 1e6
	if text := os.Getenv("BERTH_TEST_SEED"); text != "" {
		var err error
		if n, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("BERTH_TEST_SEED=%d", n)
		}
	})
	return rand.New(rand.NewPCG(n, 1))
}

// fire is a schedule of requests, faults and restarts, and what has to be true of it.
type fire struct {
	t        *testing.T
	rand     *rand.Rand
	world    *world
	client   client
	machines []*machine

	accepted map[string]bool // standalone tasks, by id: ended by an operator
	services map[string]int  // desired counts
	revision int
}

// answered repeats a request until the server has answered it: whoever asks does not
// know what became of one that a crash cut off.
func (f *fire) answered(method, path string, in, out any) error {
	f.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := f.client.try(method, path, in, out)
		var no *failed
		if err == nil || errors.As(err, &no) && no.status != http.StatusServiceUnavailable {
			return err
		}
		if time.Now().After(deadline) {
			f.t.Fatalf("%s %s: not answered within %s: %v", method, path, patience, err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (f *fire) must(method, path string, in, out any) {
	f.t.Helper()
	if err := f.answered(method, path, in, out); err != nil {
		f.t.Errorf("%s %s: %v", method, path, err)
	}
}

func (f *fire) machine() *machine { return f.machines[f.rand.IntN(len(f.machines))] }

// step does one thing.
func (f *fire) step() {
	name := fmt.Sprintf("s%d", f.rand.IntN(2))
	desired, there := f.services[name]
	switch n := f.rand.IntN(12); {
	case n < 3 && len(f.accepted) < 40:
		f.revision++
		var got api.RunTaskAnswer
		in := api.RunTask{Definition: shared("job", 1000+f.rand.IntN(4000)), Count: 1 + f.rand.IntN(3), Reschedule: f.rand.IntN(2) == 0, ClientToken: fmt.Sprint("token ", f.revision)}
		f.must("POST", api.PathTasks, in, &got)
		if len(got.Tasks) != in.Count {
			f.t.Errorf("%d tasks for %d", len(got.Tasks), in.Count)
		}
		for _, v := range got.Tasks {
			f.accepted[v.ID] = false
		}
	case n == 3:
		for id, over := range f.accepted {
			if !over {
				f.must("POST", at(api.PathStop, id), nil, nil)
				f.accepted[id] = true
				break
			}
		}
	case n == 4 && !there:
		in := api.Service{Name: name, Definition: shared(name, 3000), DesiredCount: 1 + f.rand.IntN(5), MinimumHealthyPercent: 50, MaximumPercent: 150}
		err := f.answered("POST", api.PathServices, in, nil)
		var no *failed
		if err == nil {
			f.services[name] = in.DesiredCount
		} else if !errors.As(err, &no) || no.status != http.StatusConflict { // its tasks stop still
			f.t.Error(err)
		}
	case n == 4 && f.rand.IntN(4) == 0:
		if err := f.answered("DELETE", at(api.PathService, name), nil, nil); err != nil {
			var no *failed
			if !errors.As(err, &no) || no.status != http.StatusNotFound { // deleted, and the answer was lost
				f.t.Error(err)
			}
		}
		delete(f.services, name)
	case n < 6 && there:
		desired = f.rand.IntN(6)
		f.must("POST", at(api.PathService, name), api.ServiceUpdate{DesiredCount: &desired}, nil)
		f.services[name] = desired
	case n == 6 && there:
		f.must("POST", at(api.PathService, name), api.ServiceUpdate{Definition: shared(name, 2000+1000*f.rand.IntN(4))}, nil)
	case n == 7:
		m := f.machine()
		m.setUp(f.rand.IntN(2) == 0)
	case n == 8:
		m := f.machine()
		if all := m.running(); len(all) > 0 {
			m.exits(all[f.rand.IntN(len(all))], f.rand.IntN(2))
		}
	case n == 9:
		f.machine().standing(f.rand.IntN(2), []string{api.GPUOpen, api.GPUClosed, api.GPUDraining, api.GPUFailed}[f.rand.IntN(4)], "a fault")
	case n == 10:
		m := f.machine()
		err := f.answered("POST", at(api.PathDrain, m.name)+"?undo="+fmt.Sprint(f.rand.IntN(2)), nil, nil)
		if err != nil {
			f.t.Error(err)
		}
	case n == 11:
		f.machine().setSlow(f.rand.IntN(3) == 0)
	}
}

// look checks what holds at every moment at which the server answers.
func (f *fire) look() {
	var all []api.Task
	f.must("GET", api.PathTasks, nil, &all)
	known := map[string]bool{}
	generations := map[uint64]string{}
	for _, v := range all {
		known[v.ID] = true
		if other, twice := generations[v.Generation]; twice && v.Generation > 0 {
			f.t.Errorf("generation %d is that of %s and of %s", v.Generation, v.ID, other)
		}
		generations[v.Generation] = v.ID
		if v.LastStatus == api.StatusStopped && (v.StopCode == "" || v.StoppedReason == "" || v.StoppedAt == nil) {
			f.t.Errorf("it has stopped for no reason: %+v", v)
		}
		if (v.Instance == "") != (v.Generation == 0) {
			f.t.Errorf("placed, with no generation: %+v", v)
		}
	}
	for id := range f.accepted {
		if !known[id] {
			f.t.Fatalf("task %s was accepted, and is not known", id)
		}
	}
}

// settle takes all faults away, and waits until all is as it was asked for.
func (f *fire) settle() {
	for _, m := range f.machines {
		m.standing(0, api.GPUOpen, "")
		m.standing(1, api.GPUOpen, "")
		m.setSlow(false)
		m.setUp(true)
		f.must("POST", at(api.PathDrain, m.name)+"?undo=1", nil, nil)
	}
	for name, desired := range f.services { // a change is a new try, where there was a pause
		desired++
		f.must("POST", at(api.PathService, name), api.ServiceUpdate{DesiredCount: &desired}, nil)
		f.services[name] = desired
	}
	why := ""
	defer func() {
		if f.t.Failed() {
			f.t.Log(why)
		}
	}()
	until(f.t, "all is as it was asked for", func() bool { why = f.unsettled(); return why == "" })
	f.look()
}

// unsettled says what is not yet as it was asked for.
func (f *fire) unsettled() string {
	var all []api.Task
	var services []api.Service
	f.must("GET", api.PathTasks, nil, &all)
	f.must("GET", api.PathServices, nil, &services)
	if len(services) != len(f.services) {
		return fmt.Sprintf("services: %+v", services)
	}
	for _, s := range services {
		if s.DesiredCount != f.services[s.Name] || s.RunningCount != s.DesiredCount || s.PendingCount != 0 {
			return fmt.Sprintf("service %+v", s)
		}
	}
	runs := map[string][]string{}
	ended := map[string]bool{}
	for _, v := range all {
		switch v.LastStatus {
		case api.StatusRunning:
			runs[v.Instance] = append(runs[v.Instance], v.ID)
		case api.StatusStopped:
			ended[v.ID] = true
		default:
			return fmt.Sprintf("task %+v", v)
		}
	}
	for id, over := range f.accepted {
		if over && !ended[id] {
			return "not ended: " + id
		}
	}
	for _, m := range f.machines {
		slices.Sort(runs[m.name])
		if got := m.running(); !slices.Equal(got, runs[m.name]) {
			return fmt.Sprintf("%s runs %q, the server has %q there", m.name, got, runs[m.name])
		}
	}
	return ""
}

// TestUnderFire: whatever is asked for and breaks, and however the server ends at
// whatever moment, what was answered is so, and in the end all is as it was asked for.
func TestUnderFire(t *testing.T) {
	for name, begin := range map[string]func(testing.TB, *config.Server) *running{"stopped": follow, "killed": spawn} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			random := seed(t)
			s := quick(t)
			r := begin(t, s)
			r.leads(t)
			f := &fire{t: t, rand: random, world: newWorld(t), client: r.client, accepted: map[string]bool{}, services: map[string]int{}}
			for _, name := range []string{"m1", "m2", "m3"} {
				f.machines = append(f.machines, join(t, f.world, r, name, 2, 80000))
			}
			var pauses []time.Duration
			for range 5 {
				pauses = append(pauses, time.Duration(random.IntN(1500))*time.Millisecond)
			}
			done := make(chan struct{})
			var owned sync.WaitGroup
			owned.Go(func() {
				defer close(done)
				for _, pause := range pauses {
					time.Sleep(pause) // any moment
					r.stop(t)
					r = begin(t, s)
					r.leads(t)
				}
			})
			defer owned.Wait()
			for over := false; !over; {
				select {
				case <-done:
					over = true
				default:
					f.step()
					f.look()
				}
			}
			f.settle()
			if r.child != nil {
				r.stop(t)
				r = serve(t, s)
			}
			sound(t, r)
			f.settle()
		})
	}
}
