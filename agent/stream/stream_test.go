package stream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/berth-gpu/berth/agent"
	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/api/agentpb"
)

func TestEverythingFirstThenWhatChanged(t *testing.T) {
	s, m := newServer(t), newMachine()
	m.term.Store(7)
	m.task("one", api.StatusRunning)
	m.task("two", api.StatusPending)
	connect(t, m, s.address)
	p := s.next()
	if h := p.hello; h.Protocol != agentpb.Protocol || h.Version != "test" || h.Cluster != "c" || h.Instance != "m-1" || h.AgentId != "a-1" || h.BootId != "b-1" || h.Term != 7 {
		t.Errorf("hello: %v", h)
	}
	p.welcome(&agentpb.Welcome{Protocol: agentpb.Protocol, Version: "v9", Term: 7, PulseMs: 50, LeaseMs: 60_000})
	first := p.report("a first report", func(*agentpb.Report) bool { return true })
	if !first.Full || names(first) != "[one two]" || first.Instance == nil {
		t.Errorf("first report: %v", first)
	}
	p.report("a pulse", func(r *agentpb.Report) bool { return !r.Full && r.Instance == nil && r.Tasks == nil })
	if l := m.says(); !l.Connected || !strings.Contains(l.Says, "connected to "+s.address+" (berth v9, term 7) since ") {
		t.Errorf("link: %+v", l)
	}

	m.task("two", api.StatusRunning)
	if r := p.report("the change", func(r *agentpb.Report) bool { return !r.Full && r.Tasks != nil }); names(r) != "[two]" || r.Instance != nil {
		t.Errorf("the change of one task was reported as %v", r)
	}
	m.set(func(v *agent.View) { v.Instance.GPUs[0].Standing = api.GPUFailed })
	r := p.report("the GPU", func(r *agentpb.Report) bool { return !r.Full && r.Instance != nil })
	var in api.Instance
	if err := json.Unmarshal(r.Instance, &in); err != nil || in.GPUs[0].Standing != api.GPUFailed || r.Tasks != nil {
		t.Errorf("the change of a GPU was reported as %v (%v)", r, err)
	}
	m.set(func(v *agent.View) { v.Tasks = v.Tasks[:1] })
	p.report("what was forgotten", func(r *agentpb.Report) bool { return fmt.Sprint(r.Forgotten) == "[two]" })
}

func TestOrders(t *testing.T) {
	s, m := newServer(t), newMachine()
	var fail atomic.Int32
	m.onWant = func(_ context.Context, o agent.Order) (map[string]string, error) {
		m.task("a", api.StatusPending)
		if fail.Add(-1) >= 0 {
			return nil, errors.New("the disk is full")
		}
		return map[string]string{"b": "cpu: 4 units wanted, 2 free"}, nil
	}
	connect(t, m, s.address)
	p := s.next().welcome(&agentpb.Welcome{Protocol: 1, Term: 5, PulseMs: 60_000, LeaseMs: 60_000})
	p.order(3, &agentpb.Wanted{Name: "a", Generation: 8, Hash: "h", Definition: []byte("{}"), Gpus: []string{"GPU-0"}, StopAfterMs: 1500},
		&agentpb.Wanted{Name: "b", Generation: 9, Stop: &agentpb.Stop{Code: "UserInitiated", Reason: "enough"}})
	r := p.report("the answer", func(r *agentpb.Report) bool { return r.Orders == 3 })
	if len(r.Refused) != 1 || r.Refused[0].Name != "b" || r.Refused[0].Generation != 9 || r.Refused[0].Why != "cpu: 4 units wanted, 2 free" {
		t.Errorf("refused: %v", r.Refused)
	}
	if !r.Full && names(r) != "[a]" {
		t.Errorf("the answer came before what was stored for it: %v", r)
	}
	got, _ := json.Marshal(m.wanted())
	want := `[{"Tasks":[{"Name":"a","Generation":8,"Hash":"h","Definition":{},"GPUs":["GPU-0"],"StopAfter":1500000000,"Stop":null},` +
		`{"Name":"b","Generation":9,"Hash":"","Definition":null,"GPUs":null,"StopAfter":0,"Stop":{"Code":"UserInitiated","Reason":"enough"}}],` +
		`"Waiting":null,"Problems":null,"Fleet":true,"Term":5}]`
	if string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}

	fail.Store(1)
	p.order(4)
	p.report("orders that could not be stored are tried again, and answered once they are", func(r *agentpb.Report) bool { return r.Orders == 4 })
	if n := len(m.wanted()); n != 3 {
		t.Errorf("orders were taken to the agent %d times, want 3", n)
	}
}

func TestNewestOrdersWin(t *testing.T) {
	s, m := newServer(t), newMachine()
	busy, release := make(chan struct{}, 16), make(chan struct{})
	m.onWant = func(ctx context.Context, _ agent.Order) (map[string]string, error) {
		busy <- struct{}{}
		select {
		case <-release:
		case <-ctx.Done():
		}
		return nil, nil
	}
	connect(t, m, s.address)
	p := s.next().welcome(nil)
	p.order(1, &agentpb.Wanted{Name: "first"})
	<-busy
	for i := range 20 {
		p.order(uint64(i+2), &agentpb.Wanted{Name: fmt.Sprint("later-", i)})
	}
	heard := m.heard.Load()
	p.send(&agentpb.FromServer{Is: &agentpb.FromServer_Pulse{Pulse: &agentpb.Pulse{}}})
	until(t, "an agent that is busy with orders still hears", func() bool { return m.heard.Load() > heard })
	until(t, "all have been heard", func() bool { return m.heard.Load() >= 22 })
	close(release)
	p.report("the newest are answered", func(r *agentpb.Report) bool { return r.Orders == 21 })
	if all := m.wanted(); len(all) != 2 || all[1].Tasks[0].Name != "later-19" {
		t.Errorf("obeyed: %v", all)
	}
}

func TestOlderLeader(t *testing.T) {
	s, m := newServer(t), newMachine()
	m.term.Store(9)
	connect(t, m, s.address)
	p := s.next()
	p.only(&agentpb.Welcome{Protocol: 1, Term: 8, PulseMs: 100, LeaseMs: 60_000})
	p.stream.Send(&agentpb.FromServer{Is: &agentpb.FromServer_Orders{Orders: &agentpb.Orders{Revision: 1}}}) // the agent may be gone
	until(t, "the agent says why it hung up", func() bool { return strings.Contains(m.says().Says, "leads term 8 and this agent has obeyed 9") })
	p = s.next()
	if len(m.wanted()) != 0 || m.heard.Load() != 0 {
		t.Errorf("an older leader was obeyed: %v, heard %d", m.wanted(), m.heard.Load())
	}
	p.only(&agentpb.Welcome{Protocol: 1, Term: 10, PulseMs: 100, LeaseMs: 60_000})
	m.onWant = func(context.Context, agent.Order) (map[string]string, error) {
		return nil, fmt.Errorf("%w: 10, and 11 was obeyed already", agent.ErrOldTerm)
	}
	p.order(1)
	s.next() // it hung up
}

// A peer one protocol apart is understood, with words and fields that are not known here.
func TestNewerServer(t *testing.T) {
	s, m := newServer(t), newMachine()
	connect(t, m, s.address)
	p := s.next()
	unknown := protowire.AppendString(protowire.AppendTag(nil, 999, protowire.BytesType), "of the future")
	novel := func(msg interface{ ProtoReflect() protoreflect.Message }) { msg.ProtoReflect().SetUnknown(unknown) }
	w := &agentpb.Welcome{Protocol: agentpb.Protocol + 1, Term: 1, PulseMs: 50, LeaseMs: 60_000}
	novel(w)
	p.welcome(w)
	word := &agentpb.FromServer{} // a message of a kind that is not known
	novel(word)
	p.send(word)
	o := &agentpb.Orders{Revision: 1, Tasks: []*agentpb.Wanted{{Name: "a", Generation: 1}}}
	novel(o)
	novel(o.Tasks[0])
	p.send(&agentpb.FromServer{Is: &agentpb.FromServer_Orders{Orders: o}})
	p.report("its orders are obeyed", func(r *agentpb.Report) bool { return r.Orders == 1 })
}

func TestRefusals(t *testing.T) {
	welcome := func(protocol uint32) *agentpb.FromServer {
		return &agentpb.FromServer{Is: &agentpb.FromServer_Welcome{Welcome: &agentpb.Welcome{Protocol: protocol, Version: "v3", Term: 1}}}
	}
	refuse := func(code agentpb.Refusal_Code) *agentpb.FromServer {
		return &agentpb.FromServer{Is: &agentpb.FromServer_Refusal{Refusal: &agentpb.Refusal{Code: code, Says: "this is why"}}}
	}
	for _, tt := range []struct {
		name    string
		answer  *agentpb.FromServer
		says    string
		refused bool
		stops   bool
	}{
		{"a protocol two ahead", welcome(agentpb.Protocol + 2), "upgrade this agent", true, false},
		{"PROTOCOL", refuse(agentpb.Refusal_PROTOCOL), "this is why", true, false},
		{"CLUSTER", refuse(agentpb.Refusal_CLUSTER), "this is why", true, false},
		{"NAME_IN_USE", refuse(agentpb.Refusal_NAME_IN_USE), "this is why", true, false},
		{"INVALID", refuse(agentpb.Refusal_INVALID), "this is why", true, false},
		{"one of the future", refuse(77), "this is why", true, false},
		{"NOT_LEADER", refuse(agentpb.Refusal_NOT_LEADER), "this is why", false, false},
		{"RETIRED", refuse(agentpb.Refusal_RETIRED), "this is why", true, true},
		{"neither", &agentpb.FromServer{Is: &agentpb.FromServer_Pulse{}}, "neither Welcome nor Refusal", true, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, m := newServer(t), newMachine()
			m.term.Store(1)
			connect(t, m, s.address)
			p := s.next()
			p.send(tt.answer)
			until(t, "the agent says why", func() bool { return m.says().Says != "" })
			if l := m.says(); !strings.Contains(l.Says, tt.says) || l.Refused != tt.refused || l.Connected || l.Do == "" {
				t.Errorf("link: %+v", l)
			}
			p.hangUp()
			if tt.stops {
				until(t, "its tasks are stopped", func() bool { return len(m.wanted()) > 0 })
				if o := m.wanted()[0]; len(o.Tasks) != 0 || !o.Fleet || o.Term != 1 {
					t.Errorf("wanted: %+v", o)
				}
			} else if len(m.wanted()) != 0 {
				t.Errorf("wanted: %v", m.wanted())
			}
		})
	}
}

// An agent that is sent away while it is connected stops too.
func TestRetiredLater(t *testing.T) {
	s, m := newServer(t), newMachine()
	connect(t, m, s.address)
	p := s.next().welcome(nil)
	p.report("a report", func(*agentpb.Report) bool { return true })
	p.refuse(agentpb.Refusal_RETIRED, "i-9 has taken its place")
	until(t, "its tasks are stopped", func() bool { return len(m.wanted()) == 1 && m.says().Says == "i-9 has taken its place" })
}

func TestReconnects(t *testing.T) {
	s, other, m := newServer(t), newServer(t), newMachine()
	m.task("a", api.StatusRunning)
	connect(t, m, "unix:"+filepath.Join(t.TempDir(), "nobody"), s.address, other.address)
	s.next().refuse(agentpb.Refusal_NOT_LEADER, "ask the other")
	p := other.next().welcome(nil)
	p.report("a full report", func(r *agentpb.Report) bool { return r.Full && names(r) == "[a]" })
	other.grpc.Stop()
	until(t, "the agent knows", func() bool { return !m.says().Connected })
	m.task("b", api.StatusRunning)
	s.next().welcome(nil).report("all of it again", func(r *agentpb.Report) bool { return r.Full && names(r) == "[a b]" })
}

// A server that is away from the start is found when it comes.
func TestServerComesLate(t *testing.T) {
	s, m := newServer(t), newMachine()
	s.grpc.Stop()
	connect(t, m, s.address)
	until(t, "the agent says so", func() bool { return strings.Contains(m.says().Says, "connect: no such file or directory") })
	s.start()
	s.next().welcome(nil).report("a full report", func(r *agentpb.Report) bool { return r.Full })
}

func TestSilentServer(t *testing.T) {
	s, m := newServer(t), newMachine()
	connect(t, m, s.address)
	s.next().welcome(&agentpb.Welcome{Protocol: 1, Term: 1, PulseMs: 50, LeaseMs: 300})
	until(t, "the agent hangs up", func() bool { return strings.Contains(m.says().Says, "the server was silent for") })
	s.next() // and comes again
}

// A server that reads nothing is cut off after the lease, and until then delays
// neither the agent nor its orders.
func TestSlowServer(t *testing.T) {
	s, m := newServer(t), newMachine()
	connect(t, m, s.address)
	p := s.next()
	p.only(&agentpb.Welcome{Protocol: 1, Term: 1, PulseMs: 50, LeaseMs: 1500})
	gone := make(chan struct{})
	t.Cleanup(func() { <-gone })
	go func() { // it reads nothing, and pulses
		defer close(gone)
		for i := uint64(1); ; i++ {
			m.set(func(v *agent.View) {
				v.Instance.Attributes = map[string]string{"big": strings.Repeat("x", 1<<20), "i": fmt.Sprint(i)}
			})
			if p.stream.Send(&agentpb.FromServer{Is: &agentpb.FromServer_Orders{Orders: &agentpb.Orders{Revision: i}}}) != nil {
				return
			}
			wait(p.stream.Context(), retryFirst/5)
		}
	}()
	until(t, "its orders are obeyed", func() bool { return len(m.wanted()) > 3 })
	until(t, "it is cut off", func() bool { return strings.Contains(m.says().Says, "the server took nothing for") })
	p.hangUp()
	s.next()
}
