package agentapi_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/berth-gpu/berth/api/agentpb"
	"github.com/berth-gpu/berth/placement/agentapi/agentapitest"
)

func TestWelcome(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		a := r.agent("i-1", "a")
		defer a.Close()
		want := &agentpb.Welcome{Protocol: agentpb.Protocol, Version: "1.0", Term: 7, PulseMs: 2000, LeaseMs: 10000}
		if !proto.Equal(a.Welcome, want) {
			t.Errorf("welcome %v, want %v", a.Welcome, want)
		}
		r.wait(func() bool { return r.reported("i-1") == 1 }, func() string { return "no report came" })
	})
}

func TestRefused(t *testing.T) {
	type change func(*agentpb.Hello)
	tests := []struct {
		name   string
		change change
		code   agentpb.Refusal_Code
		says   string
	}{
		{"no protocol", func(h *agentpb.Hello) { h.Protocol = 0 }, agentpb.Refusal_INVALID,
			"the first message has to be a Hello with its protocol, of a berth-agent: is it one that connects here?"},
		{"too new", func(h *agentpb.Hello) { h.Protocol, h.Version, h.Instance = agentpb.Protocol+2, "3.0", "" }, agentpb.Refusal_PROTOCOL,
			"this server (berth 1.0) speaks protocol 1 and berth-agent (berth 3.0) protocol 3, and no more than one apart is understood: upgrade this server"},
		{"no instance", func(h *agentpb.Hello) { h.Instance = "" }, agentpb.Refusal_INVALID,
			`instance is "", and has to be 1 to 63 letters, digits and any of "-_.": set instance in the agent's settings`},
		{"instance with a slash", func(h *agentpb.Hello) { h.Instance = "../i" }, agentpb.Refusal_INVALID,
			`instance is "../i", and has to be 1 to 63 letters, digits and any of "-_.": set instance in the agent's settings`},
		{"instance with a line's end", func(h *agentpb.Hello) { h.Instance = "i\n" }, agentpb.Refusal_INVALID,
			`instance is "i\n", and has to be 1 to 63 letters, digits and any of "-_.": set instance in the agent's settings`},
		{"long instance", func(h *agentpb.Hello) { h.Instance = strings.Repeat("i", 64) }, agentpb.Refusal_INVALID,
			`instance is "` + strings.Repeat("i", 64) + `", and has to be 1 to 63 letters, digits and any of "-_.": set instance in the agent's settings`},
		{"no agent id", func(h *agentpb.Hello) { h.AgentId = "" }, agentpb.Refusal_INVALID,
			"agent_id is empty: is it a berth-agent that connects here?"},
		{"long boot id", func(h *agentpb.Hello) { h.BootId = strings.Repeat("b", 257) }, agentpb.Refusal_INVALID,
			"boot_id has 257 bytes, and may have 256: is it a berth-agent that connects here?"},
		{"another cluster", func(h *agentpb.Hello) { h.Cluster = "d" }, agentpb.Refusal_CLUSTER,
			`the agent of i-1 is of cluster "d" and this server of "c": set cluster to the same in both, or the agent's server.address to its own cluster's`},
	}
	bubble(t, func(t *testing.T, r *rig) {
		for _, test := range tests {
			hello := agentapitest.Hello("c", "i-1", "a")
			test.change(hello)
			if got := r.refused(hello); got.Code != test.code || got.Says != test.says {
				t.Errorf("%s: %v %q\nwant %v %q", test.name, got.Code, got.Says, test.code, test.says)
			}
		}
		r.until() // Hello was asked about none of them

		r.refuse = &agentpb.Refusal{Code: agentpb.Refusal_RETIRED, Says: "i-1 was replaced"}
		if got := r.refused(agentapitest.Hello("c", "i-1", "a")); !proto.Equal(got, r.refuse) {
			t.Errorf("refused by Hello: %v", got)
		}
		r.until("hello i-1 a") // and was refused, so it is not gone

		r.server.SetTerm(7, false)
		if got := r.refused(agentapitest.Hello("c", "i-1", "a")); got.Code != agentpb.Refusal_NOT_LEADER {
			t.Errorf("by a follower: %v", got)
		}
	})
}

// unknown puts a field that this release does not have into a message.
func unknown[M proto.Message](m M) M {
	var b []byte
	b = protowire.AppendTag(b, 900, protowire.BytesType)
	b = protowire.AppendString(b, "of another release")
	b = protowire.AppendTag(b, 901, protowire.VarintType)
	b = protowire.AppendVarint(b, 1<<40)
	m.ProtoReflect().SetUnknown(b)
	return m
}

func TestOneReleaseApartIsUnderstood(t *testing.T) {
	for name, test := range map[string]struct {
		server, agent uint32
		refused       string
	}{
		"older agent":    {server: 2, agent: 1},
		"newer agent":    {server: 2, agent: 3},
		"same":           {server: 2, agent: 2},
		"much newer one": {server: 2, agent: 4, refused: "this server (berth 1.0) speaks protocol 2 and berth-agent (berth test) protocol 4, and no more than one apart is understood: upgrade this server"},
		"much older one": {server: 3, agent: 1, refused: "berth-agent (berth test) speaks protocol 1 and this server (berth 1.0) protocol 3, and no more than one apart is understood: upgrade berth-agent"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				r.server.SetProtocol(test.server)
				hello := unknown(agentapitest.Hello("c", "i-1", "a"))
				hello.Protocol = test.agent
				if test.refused != "" {
					if got := r.refused(hello); got.Code != agentpb.Refusal_PROTOCOL || got.Says != test.refused {
						t.Errorf("%v %q\nwant %q", got.Code, got.Says, test.refused)
					}
					return
				}
				a, err := r.dial(hello)
				if err != nil {
					t.Fatal(err)
				}
				defer a.Close()
				if err := a.Report(unknown(&agentpb.Report{Full: true})); err != nil {
					t.Fatal(err)
				}
				// A kind of message that this release does not have.
				if err := a.Send(unknown(&agentpb.FromAgent{})); err != nil {
					t.Fatal(err)
				}
				a.Report(unknown(&agentpb.Report{Orders: 1}))
				r.wait(func() bool { return r.reported("i-1") == 2 }, func() string { return "not both reports came" })
				r.server.Send("i-1", r.session("i-1"), unknown(&agentpb.Orders{Revision: 3}))
				if orders, err := a.Orders(); err != nil || orders.Revision != 3 {
					t.Errorf("orders %v, %v", orders, err)
				}
			})
		})
	}
}

func TestSecondStreamOfAnAgentDisplacesTheFirst(t *testing.T) {
	const displaced = "gone i-1: another stream of the same agent took its place"
	bubble(t, func(t *testing.T, r *rig) {
		first := r.agent("i-1", "a")
		old := r.session("i-1")
		second := r.agent("i-1", "a")
		r.until("hello i-1 a", displaced, "hello i-1 a")
		if _, err := first.Orders(); err == nil {
			t.Error("the first stream goes on")
		}

		// What is meant for the first does not reach the second.
		r.server.Send("i-1", old, &agentpb.Orders{Revision: 1})
		r.server.Close("i-1", old, nil)
		r.server.Send("i-1", r.session("i-1"), &agentpb.Orders{Revision: 2})
		if orders, err := second.Orders(); err != nil || orders.Revision != 2 {
			t.Errorf("orders %v, %v", orders, err)
		}
		first.Close()
		second.Close()
	})

	// A first stream whose report is being handled, or that has not even been taken in, is
	// no longer waited for.
	bubble(t, func(t *testing.T, r *rig) {
		busy := func(ctx context.Context) { <-ctx.Done() }
		r.onReport = func(ctx context.Context, _ string) { busy(ctx) }
		first := r.agent("i-1", "a")
		r.wait(func() bool { return r.reported("i-1") == 1 }, func() string { return "no report" })
		r.mu.Lock()
		r.onReport, r.onHello = nil, busy
		r.mu.Unlock()
		late := make(chan error)
		go func() {
			a, err := r.dial(agentapitest.Hello("c", "i-1", "a"))
			if err == nil {
				a.Close()
			}
			late <- err
		}()
		r.until("hello i-1 a", displaced, "hello i-1 a")
		r.mu.Lock()
		r.onHello = nil
		r.mu.Unlock()
		third := r.agent("i-1", "a")
		<-late
		r.until("hello i-1 a", displaced, "hello i-1 a", displaced, "hello i-1 a")
		first.Close()
		third.Close()
	})
}

func TestNameIsKeptForTheLease(t *testing.T) {
	const inUse = "another agent speaks for instance i-1: give each machine a name of its own (instance in the agent's settings); if that one is gone for good, this one is taken once its lease has run out"
	refused := func(t *testing.T, r *rig) {
		t.Helper()
		if got := r.refused(agentapitest.Hello("c", "i-1", "b")); got.Code != agentpb.Refusal_NAME_IN_USE || got.Says != inUse {
			t.Errorf("%v %q, want NAME_IN_USE", got.Code, got.Says)
		}
	}
	bubble(t, func(t *testing.T, r *rig) {
		a := r.agent("i-1", "a")
		refused(t, r)
		a.Close()
		r.wait(func() bool { return len(r.heard()) == 2 }, func() string { return "not gone" })
		refused(t, r)
		time.Sleep(lease - time.Second)
		refused(t, r)

		// The one it is kept for is back in time.
		r.agent("i-1", "a").Close()
		time.Sleep(2 * time.Second)
		refused(t, r)
		time.Sleep(lease)
		b := r.agent("i-1", "b")

		// An agent that says goodbye needs its name no longer.
		if err := b.Goodbye(); err != nil {
			t.Fatal(err)
		}
		r.wait(func() bool { return len(r.heard()) == 6 }, func() string { return "not gone" })
		c := r.agent("i-1", "c")
		// Nor does one that the server sends away.
		r.server.Close("i-1", r.session("i-1"), &agentpb.Refusal{Code: agentpb.Refusal_RETIRED, Says: "i-1 was replaced"})
		r.wait(func() bool { return len(r.heard()) == 8 }, func() string { return "not gone" })
		d := r.agent("i-1", "d")
		for _, a := range []*agentapitest.Agent{b, c, d} {
			a.Close()
		}
	})
}
