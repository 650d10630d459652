package main_test

import (
	"context"
	"encoding/json"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/api/agentpb"
)

// server is a placement server that wants what the test says, and keeps what the
// agent reports.
type server struct {
	agentpb.UnimplementedAgentsServer
	grpc *grpc.Server

	mu       sync.Mutex
	streams  int
	term     uint64
	hello    *agentpb.Hello
	stream   agentpb.Agents_ConnectServer // the newest
	orders   *agentpb.Orders
	revision uint64
	obeyed   uint64 // on the newest stream
	refused  map[string]string
	instance api.Instance
	tasks    map[string]api.Task
	log      string
}

func (s *server) listen(t testing.TB, path string) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s.grpc = grpc.NewServer()
	agentpb.RegisterAgentsServer(s.grpc, s)
	go s.grpc.Serve(l) // Stop waits for it
}

func (s *server) Connect(stream agentpb.Agents_ConnectServer) error {
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.streams++
	s.hello, s.stream, s.obeyed, s.tasks, s.refused = m.GetHello(), stream, 0, map[string]api.Task{}, map[string]string{}
	err = stream.Send(&agentpb.FromServer{Is: &agentpb.FromServer_Welcome{Welcome: &agentpb.Welcome{Protocol: agentpb.Protocol, Version: "test", Term: s.term, PulseMs: 500, LeaseMs: 60_000}}})
	if err == nil && s.orders != nil {
		err = stream.Send(&agentpb.FromServer{Is: &agentpb.FromServer_Orders{Orders: s.orders}})
	}
	s.mu.Unlock()
	for err == nil {
		if m, err = stream.Recv(); err == nil {
			s.take(m)
		}
	}
	return err
}

func (s *server) take(m *agentpb.FromAgent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := m.GetLog(); c != nil {
		s.log += string(c.Data)
	}
	r := m.GetReport()
	if r == nil {
		return
	}
	if r.Full {
		s.tasks = map[string]api.Task{}
	}
	if r.Instance != nil {
		json.Unmarshal(r.Instance, &s.instance)
	}
	for _, b := range r.Tasks {
		var task api.Task
		json.Unmarshal(b, &task)
		s.tasks[task.Name] = task
	}
	for _, name := range r.Forgotten {
		delete(s.tasks, name)
	}
	for _, x := range r.Refused {
		s.refused[x.Name] = x.Why
	}
	s.obeyed = r.Orders
}

// want orders these tasks, and nothing else, now and on every later stream.
func (s *server) want(t testing.TB, tasks ...*agentpb.Wanted) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revision++
	s.orders = &agentpb.Orders{Revision: s.revision, Tasks: tasks}
	if s.stream != nil {
		s.stream.Send(&agentpb.FromServer{Is: &agentpb.FromServer_Orders{Orders: s.orders}})
	}
}

// see reads what the agent has said.
func (s *server) see(ok func(*server) bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return ok(s)
}

func (s *server) task(name string) (task api.Task) {
	s.see(func(s *server) bool { task = s.tasks[name]; return true })
	return task
}

func wanted(t testing.TB, name string, generation uint64, d definition, gpus ...string) *agentpb.Wanted {
	t.Helper()
	b, err := json.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	return &agentpb.Wanted{Name: name, Generation: generation, Definition: b, Gpus: gpus}
}

// The agent streams to a placement server, loses it and finds it again, and is killed
// meanwhile: what runs is what the server wants, and no container is touched for it.
func TestStream(t *testing.T) {
	t.Parallel()
	r := newRig(t, 40*gib)
	socket := filepath.Join(r.dir, "s")
	r.set("server", map[string]any{"address": []string{"unix:" + socket}})
	r.want("from-the-folder", plain("sleep", "1h"))
	r.start()
	if in := r.inst(); in.Connected || len(in.AgentID) != 32 {
		t.Errorf("without a server: connected %v, agent %q", in.Connected, in.AgentID)
	}
	s := &server{term: 3}
	s.listen(t, socket)
	t.Cleanup(func() { s.grpc.Stop() })
	r.until("the agent finds the server", func() bool {
		return r.inst().Connected && s.see(func(s *server) bool { return s.instance.Name == r.instance })
	})
	s.see(func(s *server) bool {
		in := s.instance
		if s.hello.Instance != r.instance || s.hello.Cluster != "test" || s.hello.AgentId != in.AgentID || s.hello.BootId == "" || s.hello.Term != 0 {
			t.Errorf("hello: %v", s.hello)
		}
		if len(in.GPUs) != 1 || in.GPUs[0].MaxClients < 16 || in.GPUs[0].NoSharing != "" || len(in.ReservedPorts) == 0 {
			t.Errorf("instance: %+v", in)
		}
		return true
	})
	r.until("its GPU is open", func() bool { return s.see(func(s *server) bool { return s.instance.GPUs[0].Standing == api.GPUOpen }) })

	steady, other := wanted(t, "task-1", 10, shared(10*gib, 0, "run", "--memory", "1GiB"), r.gpus[0]), wanted(t, "task-2", 11, plain("sleep", "1h"))
	too := wanted(t, "task-3", 12, shared(50*gib, 0, "run"), r.gpus[0])
	s.want(t, steady, other, too)
	r.until("the tasks run, and the server knows", func() bool {
		return s.task("task-1").LastStatus == api.StatusRunning && s.task("task-2").LastStatus == api.StatusRunning
	})
	r.until("the third is refused with its reason", func() bool {
		return s.see(func(s *server) bool { return strings.Contains(s.refused["task-3"], "MiB free of") && s.obeyed == 1 })
	})
	before := r.container("task-1")
	same := func(when string) {
		t.Helper()
		if after := r.container("task-1"); after.ID != before.ID || !after.StartedAt.Equal(before.StartedAt) || !after.Alive() {
			t.Errorf("%s: was %+v\nis  %+v", when, before, after)
		}
	}
	if r.task("from-the-folder").ID != "" {
		t.Error("the task folder was read beside the server")
	}

	t.Run("logs come through the stream", func(t *testing.T) {
		s.see(func(s *server) bool {
			s.stream.Send(&agentpb.FromServer{Is: &agentpb.FromServer_Log{Log: &agentpb.LogRequest{Id: 1, Task: "task-1", Follow: true}}})
			return true
		})
		r.until("the output", func() bool { return s.see(func(s *server) bool { return strings.Contains(s.log, "mps: attached") }) })
	})
	t.Run("a cut touches nothing", func(t *testing.T) {
		s.grpc.Stop()
		r.until("the agent knows", func() bool { return !r.inst().Connected })
		if out, err := r.ask("GET", api.PathDoctor, nil); err != nil || !strings.Contains(out, `"name":"server","ok":false`) {
			t.Errorf("doctor: %v %s", err, out)
		}
		same("cut off")
		s.listen(t, socket)
		r.until("it comes back, with everything", func() bool {
			return s.see(func(s *server) bool {
				return s.streams == 2 && s.obeyed == 1 && s.tasks["task-1"].LastStatus == api.StatusRunning
			})
		})
		same("connected again")
	})
	t.Run("kill -9 touches nothing, and what is not wanted any more is stopped", func(t *testing.T) {
		id := r.inst().AgentID
		r.signal(syscall.SIGKILL)
		s.see(func(s *server) bool { s.stream = nil; return true })
		steady.Definition = nil // it was reported: the server need not send it again
		s.want(t, steady)
		r.start()
		r.until("it obeys again", func() bool {
			return s.see(func(s *server) bool { return s.obeyed == 2 && s.hello.Term == 3 && s.hello.AgentId == id })
		})
		r.until("the other one ends", func() bool { return s.task("task-2").LastStatus == api.StatusStopped })
		same("after kill -9")
		if got := s.task("task-2"); got.StopCode != api.StopUserInitiated || got.Infrastructure {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("a stop for a reason", func(t *testing.T) {
		stop := wanted(t, "task-1", 10, definition{})
		stop.Definition, stop.Stop = nil, &agentpb.Stop{Code: api.StopServiceScheduler, Reason: "scaled down"}
		s.want(t, stop)
		r.until("it ends", func() bool { return s.task("task-1").LastStatus == api.StatusStopped })
		if got := s.task("task-1"); got.StopCode != api.StopServiceScheduler || got.StoppedReason != "scaled down" {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("a task that may not outlive the server's silence", func(t *testing.T) {
		bound := wanted(t, "task-4", 20, plain("sleep", "1h"))
		bound.StopAfterMs = 4000
		free := wanted(t, "task-5", 21, plain("sleep", "1h"))
		s.want(t, bound, free)
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		go s.pulse(ctx)
		r.until("both run", func() bool { return r.running("task-4") && r.running("task-5") })
		s.grpc.Stop()
		r.until("the agent ends it by itself", func() bool { return r.stopped("task-4") })
		if got := r.task("task-4"); got.StopCode != api.StopInfrastructure || !got.Infrastructure || got.StoppedReason != "cut off from the placement server for 4s" {
			t.Errorf("got %+v", got)
		}
		if !r.running("task-5") {
			t.Errorf("one without the wish: %+v", r.task("task-5"))
		}
	})
	t.Run("a stopped agent is not taken in by what was said meanwhile", func(t *testing.T) {
		s.see(func(s *server) bool { s.orders, s.stream = nil, nil; return true })
		s.listen(t, socket)
		r.until("it is back", func() bool { return s.see(func(s *server) bool { return s.stream != nil }) })
		bound := wanted(t, "task-6", 30, plain("sleep", "1h"))
		bound.StopAfterMs = 4000
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		go s.pulse(ctx)
		s.want(t, bound)
		r.until("it runs", func() bool { return r.running("task-6") })
		r.agent.Process.Signal(syscall.SIGSTOP)
		<-time.After(4500 * time.Millisecond) // the server speaks on
		r.agent.Process.Signal(syscall.SIGCONT)
		r.until("it ends all the same", func() bool { return s.task("task-6").LastStatus == api.StatusStopped })
		if got := s.task("task-6"); !got.Infrastructure {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("a failed GPU is told at once", func(t *testing.T) {
		if err := r.machine.Xid(r.gpus[0], 79); err != nil {
			t.Fatal(err)
		}
		r.until("the server knows", func() bool {
			return s.see(func(s *server) bool {
				g := s.instance.GPUs[0]
				return g.Standing == api.GPUFailed && strings.Contains(g.StandingReason, "Xid 79")
			})
		})
	})
}

// pulse lets the agent hear something until ctx ends.
func (s *server) pulse(ctx context.Context) {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
		s.see(func(s *server) bool {
			if s.stream != nil {
				s.stream.Send(&agentpb.FromServer{Is: &agentpb.FromServer_Pulse{Pulse: &agentpb.Pulse{}}})
			}
			return true
		})
	}
}
