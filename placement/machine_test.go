package placement_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/api/agentpb"
	"github.com/berth-gpu/berth/placement/agentapi/agentapitest"
)

// world is what all machines of a test have seen together.
type world struct {
	t        testing.TB
	mu       sync.Mutex
	starts   map[uint64]string // by generation: the task, and where
	problems []string
}

func newWorld(t testing.TB) *world {
	w := &world{t: t, starts: map[uint64]string{}}
	t.Cleanup(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, p := range w.problems {
			t.Error(p)
		}
	})
	return w
}

func (w *world) problem(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.problems = append(w.problems, fmt.Sprintf(format, args...))
}

// copy is one start of a task on a machine.
type copy struct {
	api.Task
	mib    int64
	wanted bool // of the newest orders
}

// machine is an agent with simulated tasks, which speaks the real stream. It starts
// anew whenever its stream ends. What a real agent keeps on disk it keeps too.
type machine struct {
	world  *world
	name   string
	target string
	also   string // "", or where it goes next
	cap    int64  // MiB of each GPU
	wake   chan struct{}

	mu      sync.Mutex
	agentID string
	view    api.Instance
	copies  map[string]*copy
	term    uint64
	up      bool
	slow    bool   // nothing starts or stops by itself
	refuse  string // every start, with these words
	retired bool
	ended   string // why the last stream did
	orders  *agentpb.Orders
	first   *agentpb.Orders // of this stream
	cut     context.CancelFunc

	// For the next report.
	showView  bool
	changed   map[string]bool
	forgotten []string
	refused   []*agentpb.Refused
}

// join adds a machine to the fleet, and waits until the server has it.
func join(t testing.TB, w *world, r *running, name string, gpus int, mib int64) *machine {
	t.Helper()
	m := startMachine(t, w, r, name, gpus, mib)
	until(t, name+" has joined", func() bool { return instance(t, r.client, name).Connected })
	return m
}

// startMachine starts one that first is made what the test wants.
func startMachine(t testing.TB, w *world, r *running, name string, gpus int, mib int64, first ...func(*machine)) *machine {
	m := &machine{world: w, name: name, target: r.settings.Agents.Listen, cap: mib, wake: make(chan struct{}, 1), agentID: "agent of " + name, up: true,
		copies: map[string]*copy{}, changed: map[string]bool{}}
	m.view = api.Instance{Name: name, Cluster: r.settings.Cluster, Version: "test", Status: api.InstanceActive, BootID: "boot-1",
		Registered: api.Resources{CPU: 64 * 1024, MemoryMiB: 256 << 10}, Health: api.Health{OverallStatus: api.HealthOK}}
	for i := range gpus {
		m.view.GPUs = append(m.view.GPUs, api.GPU{ID: fmt.Sprintf("GPU-%s-%d", name, i), Index: i, Name: "NVIDIA H200", SharingMode: api.ModeIdle,
			TotalMemoryInMiB: mib, MaxClients: 48, Standing: api.GPUOpen, Slices: []api.Slice{}})
	}
	for _, f := range first {
		f(m)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var owned sync.WaitGroup
	owned.Go(func() { m.live(ctx) })
	t.Cleanup(func() { cancel(); owned.Wait() })
	return m
}

func (m *machine) live(ctx context.Context) {
	for ctx.Err() == nil {
		m.mu.Lock()
		up := m.up && !m.retired
		m.mu.Unlock()
		if up {
			err := m.session(ctx)
			m.mu.Lock()
			var no *agentapitest.Refused
			if m.ended = fmt.Sprint(err); errors.As(err, &no) && no.Code == agentpb.Refusal_RETIRED {
				m.retired = true
			}
			m.mu.Unlock()
		}
		select {
		case <-ctx.Done():
		case <-m.wake:
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (m *machine) session(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	m.mu.Lock()
	m.cut = cancel
	target := m.target
	if m.also != "" {
		m.target, m.also = m.also, m.target
	}
	hello := agentapitest.Hello(m.view.Cluster, m.name, m.agentID)
	hello.BootId, hello.Term = m.view.BootID, m.term
	m.mu.Unlock()
	late := time.AfterFunc(5*time.Second, cancel)
	a, err := agentapitest.Dial(ctx, target, hello)
	if err != nil {
		return err
	}
	defer a.Close()
	if !late.Stop() {
		return errors.New("welcomed too late")
	}
	if a.Welcome.Term < hello.Term {
		return fmt.Errorf("welcomed in term %d, %d was obeyed", a.Welcome.Term, hello.Term)
	}
	m.mu.Lock()
	m.orders, m.first = nil, nil
	first := m.full()
	m.mu.Unlock()
	if err := a.Report(first); err != nil {
		return err
	}
	read := make(chan error, 1)
	var owned sync.WaitGroup
	defer owned.Wait()
	defer a.Close()
	owned.Go(func() {
		defer cancel()
		for {
			msg, err := a.Receive()
			if err != nil {
				read <- err
				return
			}
			switch is := msg.Is.(type) {
			case *agentpb.FromServer_Orders:
				m.obey(is.Orders, a.Welcome.Term)
			case *agentpb.FromServer_Log:
				m.log(a, is.Log)
			}
		}
	})
	pulse := time.NewTicker(time.Duration(a.Welcome.PulseMs) * time.Millisecond / 2)
	defer pulse.Stop()
	for {
		select {
		case <-ctx.Done():
			select {
			case err := <-read:
				return err
			default:
				return ctx.Err()
			}
		case <-m.wake:
		case <-pulse.C:
		}
		m.mu.Lock()
		r := m.delta()
		m.mu.Unlock()
		if err := a.Report(r); err != nil {
			return err
		}
	}
}

func (m *machine) log(a *agentapitest.Agent, r *agentpb.LogRequest) {
	m.mu.Lock()
	_, there := m.copies[r.Task]
	m.mu.Unlock()
	chunk := &agentpb.LogChunk{Id: r.Id, Data: []byte("hello from " + m.name + "\n"), End: !r.Follow}
	if !there {
		chunk = &agentpb.LogChunk{Id: r.Id, End: true, Error: "no container of it is here"}
	}
	a.Log(chunk)
}

func (m *machine) rouse() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// full is a first report. Under the lock.
func (m *machine) full() *agentpb.Report {
	m.showView, m.forgotten, m.refused = true, nil, nil
	for name := range m.copies {
		m.changed[name] = true
	}
	r := m.delta()
	r.Full = true
	return r
}

func (m *machine) delta() *agentpb.Report {
	for name, c := range m.copies {
		if m.orders != nil && !c.wanted && c.LastStatus == api.StatusStopped && !m.changed[name] { // its end was told
			delete(m.copies, name)
			m.forgotten = append(m.forgotten, name)
		}
	}
	r := &agentpb.Report{Forgotten: m.forgotten, Refused: m.refused}
	if m.showView {
		m.view.AgentID = m.agentID
		r.Instance, _ = json.Marshal(m.view)
	}
	for name := range m.changed {
		if c := m.copies[name]; c != nil {
			data, _ := json.Marshal(c.Task)
			r.Tasks = append(r.Tasks, data)
		}
	}
	if m.orders != nil {
		r.Orders = m.orders.Revision
	}
	clear(m.changed)
	m.showView, m.forgotten = false, nil
	return r
}

// obey takes orders as the real agent does.
func (m *machine) obey(o *agentpb.Orders, term uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	defer m.rouse()
	if term < m.term {
		m.world.problem("%s was given orders of term %d, it has obeyed %d", m.name, term, m.term)
		return
	}
	m.term, m.orders, m.refused = term, o, nil
	if m.first == nil {
		m.first = o
	}
	for _, c := range m.copies {
		c.wanted = false
	}
	for _, w := range o.Tasks {
		c := m.copies[w.Name]
		switch {
		case c == nil && w.Stop != nil:
			m.refused = append(m.refused, &agentpb.Refused{Name: w.Name, Generation: w.Generation, Why: "stop: it was never started here"})
		case c == nil && m.refuse != "":
			m.refused = append(m.refused, &agentpb.Refused{Name: w.Name, Generation: w.Generation, Why: m.refuse})
		case c == nil:
			m.start(w)
		case c.Generation != w.Generation:
			m.world.problem("%s: task %s has generation %d, and is ordered with %d", m.name, w.Name, c.Generation, w.Generation)
		case w.Stop != nil:
			c.wanted = true
			m.end(c, w.Stop.Code, w.Stop.Reason)
		default:
			c.wanted = true
		}
	}
	for _, c := range m.copies {
		if !c.wanted {
			m.end(c, api.StopUserInitiated, "no longer wanted by its source")
		}
	}
}

func (m *machine) start(w *agentpb.Wanted) {
	if len(w.Definition) == 0 {
		m.world.problem("%s: task %s was ordered without its definition, and is not known here", m.name, w.Name)
		return
	}
	me := w.Name + " on " + m.name
	m.world.mu.Lock()
	before, twice := m.world.starts[w.Generation]
	m.world.starts[w.Generation] = me
	m.world.mu.Unlock()
	if twice {
		m.world.problem("generation %d is that of %s, and of %s before", w.Generation, me, before)
	}
	c := &copy{wanted: true, Task: api.Task{ID: "local-" + w.Name, Name: w.Name, Generation: w.Generation, LastStatus: api.StatusPending,
		DesiredStatus: api.StatusRunning, GPUIDs: w.Gpus, CreatedAt: time.Now(), Containers: []api.Container{{Name: "main", Image: "i", LastStatus: api.StatusPending}}}}
	var def struct {
		ContainerDefinitions []struct {
			ResourceRequirements []struct {
				SharingStrategy struct{ NvidiaMps struct{ Memory int64 } }
			}
		}
	}
	if err := json.Unmarshal(w.Definition, &def); err != nil {
		m.world.problem("%s: task %s: %v", m.name, w.Name, err)
		return
	}
	for _, r := range def.ContainerDefinitions[0].ResourceRequirements {
		c.mib += r.SharingStrategy.NvidiaMps.Memory
	}
	for _, g := range w.Gpus {
		sum := c.mib
		for _, other := range m.copies {
			if other.LastStatus != api.StatusStopped && slices.Contains(other.GPUIDs, g) {
				sum += other.mib
			}
		}
		if sum > m.cap {
			m.world.problem("%s: with task %s the caps on %s are %d MiB, it has %d", m.name, w.Name, g, sum, m.cap)
		}
	}
	m.copies[w.Name] = c
	m.changed[w.Name] = true
	if !m.slow {
		m.runs(c)
	}
}

func (m *machine) runs(c *copy) {
	now := time.Now()
	c.LastStatus, c.StartedAt = api.StatusRunning, &now
	c.Containers[0].LastStatus = api.StatusRunning
	m.changed[c.Name] = true
}

func (m *machine) end(c *copy, code, reason string) {
	if c.DesiredStatus == api.StatusStopped {
		return
	}
	c.DesiredStatus, c.LastStatus, c.StopCode, c.StoppedReason = api.StatusStopped, api.StatusDeactivating, code, reason
	m.changed[c.Name] = true
	if !m.slow {
		m.stops(c, 143)
	}
}

func (m *machine) stops(c *copy, exit int) {
	now := time.Now()
	c.DesiredStatus, c.LastStatus, c.StoppedAt = api.StatusStopped, api.StatusStopped, &now
	c.Containers[0].LastStatus, c.Containers[0].ExitCode = api.StatusStopped, &exit
	m.changed[c.Name] = true
}

// --- what a test does to a machine ---

// do changes a copy that is there.
func (m *machine) do(name string, f func(*copy)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c := m.copies[name]; c != nil {
		f(c)
		m.changed[name] = true
		m.rouse()
	}
}

// exits ends a task by itself.
func (m *machine) exits(name string, code int) {
	m.do(name, func(c *copy) {
		c.StopCode, c.StoppedReason = api.StopEssentialExited, "Essential container in task exited"
		m.stops(c, code)
	})
}

// setSlow says that nothing starts or stops by itself; false also ends what waits.
func (m *machine) setSlow(slow bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.slow = slow
	if slow {
		return
	}
	for _, c := range m.copies {
		switch c.LastStatus {
		case api.StatusPending:
			m.runs(c)
		case api.StatusDeactivating:
			m.stops(c, 143)
		}
	}
	m.rouse()
}

// setUp opens the machine's way to the server, or cuts it.
func (m *machine) setUp(up bool) {
	m.mu.Lock()
	m.up = up
	if !up && m.cut != nil {
		m.cut()
	}
	m.mu.Unlock()
	m.rouse()
}

// look changes what the machine shows of itself.
func (m *machine) look(f func(*api.Instance)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.view.GPUs = slices.Clone(m.view.GPUs)
	f(&m.view)
	m.showView = true
	m.rouse()
}

func (m *machine) standing(gpu int, standing, reason string) {
	m.look(func(v *api.Instance) { v.GPUs[gpu].Standing, v.GPUs[gpu].StandingReason = standing, reason })
}

// wipe loses all that the agent knows; its tasks are over.
func (m *machine) wipe(agentID string) {
	m.mu.Lock()
	m.agentID, m.term = agentID, 0
	m.view.BootID += "+"
	clear(m.copies)
	if m.cut != nil {
		m.cut()
	}
	m.mu.Unlock()
	m.rouse()
}

// has is a copy's status; "" where it is not there.
func (m *machine) has(name string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c := m.copies[name]; c != nil {
		return c.LastStatus
	}
	return ""
}

// tasks are the names of all that are here.
func (m *machine) tasks() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Sorted(maps.Keys(m.copies))
}

// running are the names of the tasks that run here.
func (m *machine) running() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for name, c := range m.copies {
		if c.LastStatus == api.StatusRunning {
			out = append(out, name)
		}
	}
	slices.SortFunc(out, strings.Compare)
	return out
}

// ordered is a task of the newest orders, or nil.
func (m *machine) ordered(name string) *agentpb.Wanted {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.orders != nil {
		for _, w := range m.orders.Tasks {
			if w.Name == name {
				return w
			}
		}
	}
	return nil
}
