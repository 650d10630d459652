package placement_test

import (
	"encoding/json"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
)

// BenchmarkFleet is a server with 1,000 machines of 8 GPUs and 20,000 tasks, which are
// agents of this process over the real stream, with the real store: where its time goes
// (-cpuprofile). make bench measures it from outside.
func BenchmarkFleet(b *testing.B) {
	s := settings(b)
	r, w := serve(b, s), newWorld(b)
	const machines, services, each = 1000, 4, 4500 // and 2,000 by RunTask; three to a GPU
	ms := make([]*machine, machines)
	for i := range ms {
		ms[i] = startMachine(b, w, r, fmt.Sprintf("m%04d", i), 8, 81920)
	}
	within(b, 2*time.Minute, "all have joined", func() bool {
		for _, m := range ms {
			if m.firstOrders() == nil {
				return false
			}
		}
		return true
	})
	began := time.Now()
	for i := range services {
		name := fmt.Sprintf("s%d", i)
		ask[api.Service](b, r.client, "POST", api.PathServices, api.Service{Name: name, Definition: shared(name, 24576), DesiredCount: each, MinimumHealthyPercent: 100, MaximumPercent: 200})
	}
	for range (20000 - services*each) / 100 {
		run(b, r.client, api.RunTask{Definition: shared("alone", 24576), Count: 100})
	}
	within(b, 5*time.Minute, "all run", func() bool {
		n := 0
		for _, m := range ms {
			n += len(m.running())
		}
		return n == 20000
	})
	fmt.Fprintf(os.Stderr, "20,000 tasks placed and running in %s\n", time.Since(began))
	within(b, 5*time.Minute, "the server knows it", func() bool {
		n := 0
		for _, s := range ask[[]api.Service](b, r.client, "GET", api.PathServices, nil) {
			n += s.RunningCount
		}
		return n == services*each
	})
	fmt.Fprintf(os.Stderr, "and the server knows it after %s\n", time.Since(began))

	one := shared("one", 1024)
	b.Run("RunTask", func(b *testing.B) {
		for b.Loop() {
			run(b, r.client, api.RunTask{Definition: one})
		}
	})
	b.Run("RunTaskWithToken", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			run(b, r.client, api.RunTask{Definition: one, ClientToken: fmt.Sprint(time.Now().UnixNano())})
		}
	})
	b.Run("StopOneOfAService", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			m := ms[i%(machines/2)]
			name := m.running()[0]
			ask[struct{}](b, r.client, "POST", at(api.PathStop, name), nil)
			within(b, time.Minute, "it has stopped", func() bool { return m.has(name) != api.StatusRunning })
		}
	})
	b.Run("ps", func(b *testing.B) {
		for b.Loop() {
			all := ask[json.RawMessage](b, r.client, "GET", api.PathTasks, nil)
			b.SetBytes(int64(len(all)))
		}
	})
	b.Run("instances", func(b *testing.B) {
		for b.Loop() {
			ask[json.RawMessage](b, r.client, "GET", api.PathInstances, nil)
		}
	})
	idle := func(b *testing.B) {
		for b.Loop() {
			time.Sleep(time.Second)
		}
	}
	b.Run("Idle", idle)
	for i := range 300 {
		run(b, r.client, api.RunTask{Definition: shared(fmt.Sprintf("large-%d", i), 90000), Count: 10})
	}
	b.Run("IdleWith3000Pending", idle)
	b.Run("RunTaskWith3000Pending", func(b *testing.B) {
		for b.Loop() {
			run(b, r.client, api.RunTask{Definition: one})
		}
	})
}

// within is until with a limit of its own.
func within(t testing.TB, limit time.Duration, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", limit, what)
		}
	}
}

// firstOrders are those of this stream, or nil.
func (m *machine) firstOrders() any {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.first == nil {
		return nil
	}
	return m.first
}
