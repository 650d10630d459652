package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/berth-gpu/berth/agent"
	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/api/agentpb"
	"github.com/berth-gpu/berth/config"
)

// patience bounds every wait for something to happen.
const patience = 20 * time.Second

// machine is an agent as far as the stream sees it.
type machine struct {
	view  atomic.Pointer[agent.View]
	term  atomic.Uint64
	heard atomic.Int64

	mu      sync.Mutex
	changed chan struct{}
	link    agent.Link
	orders  []agent.Order // as they were wanted
	onWant  func(context.Context, agent.Order) (map[string]string, error)
	onLogs  func(ctx context.Context, name, container string, follow bool, tail int) (io.ReadCloser, error)
}

func newMachine() *machine {
	m := &machine{changed: make(chan struct{})}
	m.set(func(*agent.View) {})
	return m
}

// set changes a copy of the view and publishes it.
func (m *machine) set(edit func(*agent.View)) {
	v := agent.View{Instance: api.Instance{Name: "m-1", AgentID: "a-1", BootID: "b-1", GPUs: []api.GPU{{ID: "GPU-0", Standing: api.GPUOpen}}}}
	if old := m.view.Load(); old != nil {
		v = *old
		v.Tasks = slices.Clone(v.Tasks)
		v.Instance.GPUs = slices.Clone(v.Instance.GPUs)
	}
	edit(&v)
	m.view.Store(&v)
	m.mu.Lock()
	close(m.changed)
	m.changed = make(chan struct{})
	m.mu.Unlock()
}

// task puts one task into the view.
func (m *machine) task(name, status string) {
	m.set(func(v *agent.View) {
		v.Tasks = slices.DeleteFunc(v.Tasks, func(t api.Task) bool { return t.Name == name })
		v.Tasks = append(v.Tasks, api.Task{ID: "id-" + name, Name: name, LastStatus: status})
	})
}

func (m *machine) port() port {
	return port{
		view: m.view.Load, term: m.term.Load, heard: func() { m.heard.Add(1) },
		changed: func() <-chan struct{} {
			m.mu.Lock()
			defer m.mu.Unlock()
			return m.changed
		},
		link: func(l agent.Link) {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.link = l
		},
		want: func(ctx context.Context, o agent.Order) (map[string]string, error) {
			m.mu.Lock()
			m.orders = append(m.orders, o)
			do := m.onWant
			m.mu.Unlock()
			if do == nil {
				return nil, nil
			}
			return do(ctx, o)
		},
		logs: func(ctx context.Context, name, container string, follow bool, tail int) (io.ReadCloser, error) {
			m.mu.Lock()
			do := m.onLogs
			m.mu.Unlock()
			return do(ctx, name, container, follow, tail)
		},
	}
}

func (m *machine) wanted() []agent.Order {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.orders)
}

func (m *machine) says() agent.Link {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.link
}

// server is a placement server whose every word is the test's.
type server struct {
	agentpb.UnimplementedAgentsServer
	t       *testing.T
	address string
	grpc    *grpc.Server
	peers   chan *peer
}

// peer is one agent's stream, after its Hello.
type peer struct {
	t      *testing.T
	stream agentpb.Agents_ConnectServer
	hello  *agentpb.Hello
	ended  chan struct{} // closed by hangUp
	once   sync.Once

	mu      sync.Mutex
	reports []*agentpb.Report
	logs    map[uint64]string
	logEnds map[uint64]string
}

func newServer(t *testing.T) *server {
	t.Helper()
	s := &server{t: t, address: "unix:" + filepath.Join(t.TempDir(), "s"), peers: make(chan *peer, 16)}
	s.start()
	t.Cleanup(func() { s.grpc.Stop() })
	return s
}

func (s *server) start() {
	s.t.Helper()
	l, err := net.Listen("unix", strings.TrimPrefix(s.address, "unix:"))
	if err != nil {
		s.t.Fatal(err)
	}
	s.grpc = grpc.NewServer(grpc.MaxRecvMsgSize(agentpb.MaxMessage))
	agentpb.RegisterAgentsServer(s.grpc, s)
	go s.grpc.Serve(l) // Stop waits for it
}

func (s *server) Connect(stream agentpb.Agents_ConnectServer) error {
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	p := &peer{t: s.t, stream: stream, hello: m.GetHello(), ended: make(chan struct{}), logs: map[uint64]string{}, logEnds: map[uint64]string{}}
	s.peers <- p
	select {
	case <-p.ended:
	case <-stream.Context().Done():
	}
	return nil
}

// next is the next stream that an agent opens.
func (s *server) next() *peer {
	s.t.Helper()
	select {
	case p := <-s.peers:
		return p
	case <-time.After(patience):
		s.t.Fatal("no agent came")
		return nil
	}
}

func (p *peer) hangUp() { p.once.Do(func() { close(p.ended) }) }

func (p *peer) send(m *agentpb.FromServer) {
	p.t.Helper()
	if err := p.stream.Send(m); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) refuse(code agentpb.Refusal_Code, says string) {
	p.send(&agentpb.FromServer{Is: &agentpb.FromServer_Refusal{Refusal: &agentpb.Refusal{Code: code, Says: says}}})
	p.hangUp()
}

// welcome accepts the agent and keeps what it says. Without a word of the test's it
// has a lease that no test outlasts.
func (p *peer) welcome(w *agentpb.Welcome) *peer {
	p.t.Helper()
	p.only(w)
	go func() {
		for {
			m, err := p.stream.Recv()
			p.mu.Lock()
			switch {
			case err != nil:
			case m.GetReport() != nil:
				p.reports = append(p.reports, m.GetReport())
			case m.GetLog() != nil:
				c := m.GetLog()
				p.logs[c.Id] += string(c.Data)
				if c.End {
					p.logEnds[c.Id] = "ended: " + c.Error
				}
			}
			p.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return p
}

// only says Welcome and nothing else, and reads nothing.
func (p *peer) only(w *agentpb.Welcome) {
	p.t.Helper()
	if w == nil {
		w = &agentpb.Welcome{Protocol: agentpb.Protocol, Version: "v", Term: 1, PulseMs: 100, LeaseMs: 60_000}
	}
	p.send(&agentpb.FromServer{Is: &agentpb.FromServer_Welcome{Welcome: w}})
}

func (p *peer) order(revision uint64, tasks ...*agentpb.Wanted) {
	p.t.Helper()
	p.send(&agentpb.FromServer{Is: &agentpb.FromServer_Orders{Orders: &agentpb.Orders{Revision: revision, Tasks: tasks}}})
}

// report waits for a report that is as ok wants it, and returns it.
func (p *peer) report(what string, ok func(*agentpb.Report) bool) *agentpb.Report {
	p.t.Helper()
	var found *agentpb.Report
	until(p.t, what, func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, r := range p.reports {
			if ok(r) {
				found = r
				return true
			}
		}
		return false
	})
	return found
}

// connect runs a stream of m to the addresses until the test ends, and then sees that
// it ends with all that it began.
func connect(t *testing.T, m *machine, addresses ...string) {
	t.Helper()
	c := &client{settings: config.Upstream{Address: addresses}, cluster: "c", instance: "m-1", version: "test", log: zap.NewNop(), agent: m.port()}
	start(t, c)
}

func start(t *testing.T, c *client) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if !errors.Is(err, context.Canceled) {
				t.Errorf("run ended with %v", err)
			}
		case <-time.After(patience):
			t.Fatal("run did not end")
		}
		stack := make([]byte, 1<<20)
		stack = stack[:runtime.Stack(stack, true)]
		for _, g := range strings.Split(string(stack), "\n\n") {
			if strings.Contains(g, "stream.(*session)") || strings.Contains(g, "stream.(*logs)") {
				t.Errorf("a goroutine is left:\n%s", g)
			}
		}
	})
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	end := time.Now().Add(patience)
	for !ok() {
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", patience, what)
		}
		<-time.After(2 * time.Millisecond)
	}
}

func names(r *agentpb.Report) string {
	var out []string
	for _, b := range r.Tasks {
		_, rest, _ := strings.Cut(string(b), `"name":"`)
		name, _, _ := strings.Cut(rest, `"`)
		out = append(out, name)
	}
	slices.Sort(out)
	return fmt.Sprint(out)
}
