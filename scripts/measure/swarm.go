package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/api/agentpb"
	"github.com/berth-gpu/berth/placement/agentapi/agentapitest"
)

// usedEvery is how often an agent on a busy machine has another picture of it to show:
// what its GPUs use, by gpu.sampleEvery's default.
const usedEvery = 10 * time.Second

// swarm are agents without machines that speak the real stream: each starts what it is
// ordered to in no time, and says so.
type swarm struct {
	target, cluster string
	agents          []*fake
	owned           sync.WaitGroup
	cancel          context.CancelFunc

	synced  atomic.Int64 // agents whose stream is open, and that have had their first orders on it
	running atomic.Int64 // tasks
	stopped atomic.Int64 // tasks that were stopped because of an order, or for want of one

	mu      sync.Mutex
	ordered map[string]time.Time // by task: when its start was ordered first
	bad     []string             // what must not be
}

type fake struct {
	*swarm
	name string

	mu    sync.Mutex
	term  uint64
	view  api.Instance
	tasks map[string]api.Task
	agent *agentapitest.Agent // of the open stream
}

// newSwarm starts so many agents of so many GPUs each. They dial again until end.
func newSwarm(target, cluster string, machines, gpus int, gpuMiB int64) *swarm {
	ctx, cancel := context.WithCancel(context.Background())
	s := &swarm{target: target, cluster: cluster, cancel: cancel, ordered: map[string]time.Time{}}
	for i := range machines {
		f := &fake{swarm: s, name: fmt.Sprintf("m%04d", i), tasks: map[string]api.Task{}}
		f.view = api.Instance{Name: f.name, Cluster: cluster, Version: "test", AgentID: "agent-" + f.name, Status: api.InstanceActive, BootID: "boot-1", StartedAt: time.Now(),
			Registered: api.Resources{CPU: 128 * 1024, MemoryMiB: 2 << 20}, Health: api.Health{OverallStatus: api.HealthOK, Details: []api.HealthDetail{
				{Type: "CONTAINER_RUNTIME", Status: api.HealthOK}, {Type: "ACCELERATED_COMPUTE", Status: api.HealthOK}}}}
		for g := range gpus {
			f.view.GPUs = append(f.view.GPUs, api.GPU{ID: fmt.Sprintf("GPU-%s-%024d", f.name, g), Index: g, Name: "NVIDIA H200", SharingMode: api.ModeIdle,
				TotalMemoryInMiB: gpuMiB, RemainingMemoryInMiB: gpuMiB, MaxClients: 48, Standing: api.GPUOpen, ComputeMode: "DEFAULT", Held: true, MPS: api.MPS{State: "HELD", DaemonPID: 4711, Budget: 5}, Slices: []api.Slice{}})
		}
		s.agents = append(s.agents, f)
		s.owned.Go(func() { f.live(ctx) })
	}
	return s
}

func (s *swarm) end() {
	s.cancel()
	s.owned.Wait()
}

// orderedAt is when a task's start reached an agent; the zero time: it has not.
func (s *swarm) orderedAt(task string) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ordered[task]
}

// wrong is the first thing seen that must not be.
func (s *swarm) wrong() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.bad) > 0 {
		return fmt.Errorf("%d times what must not be; the first: %s", len(s.bad), s.bad[0])
	}
	return nil
}

// live opens one stream after the other, with the waits of berth-agent's.
func (f *fake) live(ctx context.Context) {
	failures := 0
	for ctx.Err() == nil {
		if f.session(ctx) {
			failures = 0
		}
		wait := min(250*time.Millisecond<<min(failures, 10), 3*time.Second)
		failures++
		_ = pause(ctx, wait/2+rand.N(wait/2))
	}
}

// session is one stream, until it ends; welcomed says whether it was opened.
func (f *fake) session(ctx context.Context) (welcomed bool) {
	ctx, cancel := context.WithCancel(ctx)
	var owned sync.WaitGroup
	defer owned.Wait()
	defer cancel()
	hello := agentapitest.Hello(f.cluster, f.name, "agent-"+f.name)
	f.mu.Lock()
	hello.Term = f.term
	f.mu.Unlock()
	opening, opened := context.WithCancel(ctx)
	late := time.AfterFunc(10*time.Second, opened)
	a, err := agentapitest.Dial(opening, f.target, hello)
	late.Stop()
	defer opened()
	if err != nil {
		return false
	}
	defer a.Close()
	f.mu.Lock()
	f.term, f.agent = a.Welcome.Term, a
	first := &agentpb.Report{Full: true, Instance: f.show()}
	for _, t := range f.tasks {
		first.Tasks = append(first.Tasks, mustJSON(t))
	}
	f.mu.Unlock()
	if a.Report(first) != nil {
		return true
	}
	owned.Go(func() { f.pulse(ctx, a) })
	synced := false
	defer func() {
		if synced {
			f.synced.Add(-1)
		}
	}()
	for {
		orders, err := a.Orders()
		if err != nil {
			return true
		}
		if !synced {
			synced = true
			f.synced.Add(1)
		}
		if a.Report(f.obey(orders)) != nil {
			return true
		}
	}
}

// pulse says something as often as the server asks for, and shows the machine as often
// as what its GPUs use is measured.
func (f *fake) pulse(ctx context.Context, a *agentapitest.Agent) {
	every := time.Duration(a.Welcome.PulseMs) * time.Millisecond
	due := time.Now().Add(rand.N(usedEvery))
	for pause(ctx, every) == nil {
		r := &agentpb.Report{}
		if time.Now().After(due) {
			due = due.Add(usedEvery)
			f.mu.Lock()
			for i := range f.view.GPUs {
				f.view.GPUs[i].UtilizationPct = rand.IntN(101)
			}
			r.Instance = f.show()
			f.mu.Unlock()
		}
		if a.Report(r) != nil {
			return
		}
	}
}

// show is the machine as its agent shows it. Under the lock.
func (f *fake) show() []byte { return mustJSON(f.view) }

// failNow makes a GPU FAILED, and says so.
func (f *fake) failNow(gpu int) error {
	f.mu.Lock()
	f.view.GPUs[gpu].Standing, f.view.GPUs[gpu].StandingReason = api.GPUFailed, "the daemon failed 5 times within 10m"
	a, r := f.agent, &agentpb.Report{Instance: f.show()}
	f.mu.Unlock()
	return a.Report(r)
}

// free says whether no task is on a GPU.
func (f *fake) free(gpu int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.view.GPUs[gpu].Slices) == 0
}

// obey does what the orders say, and is what there is to report of it.
func (f *fake) obey(o *agentpb.Orders) *agentpb.Report {
	now := time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	r := &agentpb.Report{Orders: o.Revision}
	wanted := make(map[string]bool, len(o.Tasks))
	for _, w := range o.Tasks {
		wanted[w.Name] = true
		t, there := f.tasks[w.Name]
		switch {
		case there && t.Generation != w.Generation:
			f.never("%s: task %s of generation %d was ordered with %d", f.name, w.Name, t.Generation, w.Generation)
		case there && w.Stop != nil && t.LastStatus != api.StatusStopped:
			r.Tasks = append(r.Tasks, f.stop(t))
		case !there && w.Stop == nil:
			f.swarm.mu.Lock()
			if _, twice := f.ordered[w.Name]; twice {
				f.bad = append(f.bad, fmt.Sprintf("%s: task %s was started before", f.name, w.Name))
			}
			f.ordered[w.Name] = now
			f.swarm.mu.Unlock()
			t := api.Task{ID: w.Name, Name: w.Name, Generation: w.Generation, LastStatus: api.StatusRunning, DesiredStatus: api.StatusRunning, GPUIDs: w.Gpus, CreatedAt: now, StartedAt: &now,
				Containers: []api.Container{{Name: "main", Image: "registry.example/model:1", LastStatus: api.StatusRunning, RuntimeID: w.Name + w.Name, GPUIDs: w.Gpus, MemoryInMiB: 1024}}}
			f.tasks[w.Name] = t
			f.running.Add(1)
			f.hold(t, 1)
			r.Tasks = append(r.Tasks, mustJSON(t))
		}
	}
	for name, t := range f.tasks {
		switch {
		case wanted[name]:
		case t.LastStatus == api.StatusStopped:
			delete(f.tasks, name)
			r.Forgotten = append(r.Forgotten, name)
		default:
			r.Tasks = append(r.Tasks, f.stop(t))
		}
	}
	return r
}

func (f *fake) stop(t api.Task) []byte {
	now := time.Now()
	t.LastStatus, t.DesiredStatus, t.StoppedAt = api.StatusStopped, api.StatusStopped, &now
	f.tasks[t.Name] = t
	f.running.Add(-1)
	f.stopped.Add(1)
	f.hold(t, -1)
	return mustJSON(t)
}

// hold shows a task as a slice of its GPUs, or not any more. Under the lock.
func (f *fake) hold(t api.Task, n int) {
	for i := range f.view.GPUs {
		g := &f.view.GPUs[i]
		for _, id := range t.GPUIDs {
			if id != g.ID {
				continue
			}
			g.ContainerCount += n
			if n > 0 {
				g.Slices = append(g.Slices, api.Slice{TaskID: t.ID, Family: "bench", Container: "main", MemoryInMiB: 1024, UsedMemoryInMiB: 900, LastStatus: t.LastStatus})
				continue
			}
			var rest []api.Slice
			for _, s := range g.Slices {
				if s.TaskID != t.ID {
					rest = append(rest, s)
				}
			}
			g.Slices = append([]api.Slice{}, rest...)
		}
	}
}

func (s *swarm) never(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bad = append(s.bad, fmt.Sprintf(format, args...))
}

func mustJSON(v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err) // of our own plain structs
	}
	return data
}
