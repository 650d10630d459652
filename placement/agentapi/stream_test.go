package agentapi_test

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/berth-gpu/berth/api/agentpb"
	"github.com/berth-gpu/berth/placement/agentapi/agentapitest"
)

func TestSilentAgentIsCutOffAtTheLease(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		well := r.agent("well", "a")
		ended := pulses(well)
		start := time.Now()
		silent := r.agent("silent", "b")
		err := last(silent)
		if took := time.Since(start); took != lease || status.Code(err) != codes.Unavailable {
			t.Errorf("cut off after %v with %v, want %v", took, err, lease)
		}
		r.until("hello well a", "hello silent b", "gone silent: nothing was heard from the agent for 10s")
		select {
		case err := <-ended:
			t.Errorf("the other one: %v", err)
		case <-time.After(10 * lease):
		}
		silent.Close()
		well.Close()
		<-ended
	})
}

// last reads until the stream ends, and is why.
func last(a *agentapitest.Agent) error {
	for {
		if _, err := a.Receive(); err != nil {
			return err
		}
	}
}

func TestAgentIsNotSilentWhileItsReportIsHandled(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.onReport = func(ctx context.Context, _ string) {
			select {
			case <-time.After(5 * lease):
			case <-ctx.Done():
				t.Error("cut off")
			}
		}
		a := r.agent("i-1", "a")
		ended := pulses(a)
		r.wait(func() bool { return r.reported("i-1") == 1 }, func() string { return "no report" })
		r.mu.Lock()
		r.onReport = nil
		r.mu.Unlock()
		time.Sleep(6 * lease)
		r.until("hello i-1 a")
		if n := r.reported("i-1"); n < 25 {
			t.Errorf("%d reports came, want those that had waited too", n)
		}
		a.Close()
		<-ended
	})
}

// large is orders that fill any window.
func large(revision uint64) *agentpb.Orders {
	return &agentpb.Orders{Revision: revision, Tasks: []*agentpb.Wanted{{Name: "t", Definition: []byte(strings.Repeat("x", 1<<20))}}}
}

func TestAgentThatDoesNotReadIsCutOff(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		a := r.agent("i-1", "a")
		session := r.session("i-1")
		for revision := range uint64(10) {
			r.server.Send("i-1", session, large(revision))
			time.Sleep(time.Millisecond)
		}
		for start := time.Now(); time.Since(start) < lease-time.Second; time.Sleep(pulse / 2) {
			if err := a.Report(&agentpb.Report{}); err != nil {
				t.Fatalf("after %v: %v", time.Since(start), err)
			}
		}
		r.until("hello i-1 a")
		time.Sleep(time.Second)
		r.until("hello i-1 a", "gone i-1: the agent read nothing of what was sent for 10s")
		a.Close()
	})
}

// An end that the server decides does not wait for the lease, though its last word cannot
// get through.
func TestEndOfAnAgentThatDoesNotRead(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		a := r.agent("i-1", "a")
		for revision := range uint64(3) {
			r.server.Send("i-1", r.session("i-1"), large(revision))
			time.Sleep(time.Millisecond)
		}
		start := time.Now()
		r.server.Close("i-1", r.session("i-1"), &agentpb.Refusal{Code: agentpb.Refusal_RETIRED, Says: "i-1 was replaced"})
		r.until("hello i-1 a", "gone i-1: i-1 was replaced")
		if took := time.Since(start); took > lease/2 {
			t.Errorf("it took %v", took)
		}
		a.Close()
	})
}

func TestNewestOrdersWin(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		a := r.agent("i-1", "a")
		session := r.session("i-1")
		for revision := range uint64(1000) {
			orders := &agentpb.Orders{Revision: revision + 1}
			if revision < 3 {
				orders = large(revision + 1)
			}
			r.server.Send("i-1", session, orders)
			if revision%100 == 0 {
				time.Sleep(time.Millisecond)
			}
		}
		var got []uint64
		for len(got) == 0 || got[len(got)-1] != 1000 {
			orders, err := a.Orders()
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, orders.Revision)
		}
		if !slices.IsSorted(got) || len(got) > 5 {
			t.Errorf("revisions %v came; want few, in order", got)
		}
		a.Close()
	})
}

func TestPulseWhenNothingElseIsSent(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		a := r.agent("i-1", "a")
		start := time.Now()
		for range 3 {
			if m, err := a.Receive(); err != nil || m.GetPulse() == nil {
				t.Fatalf("%v, %v, want a pulse", m, err)
			}
		}
		if took := time.Since(start); took != 3*pulse {
			t.Errorf("3 pulses took %v", took)
		}
		a.Close()
	})
}

func TestEnds(t *testing.T) {
	for name, test := range map[string]struct {
		do   func(r *rig, a *agentapitest.Agent)
		gone string
		code agentpb.Refusal_Code // what the agent is told, if anything
	}{
		"the agent breaks off":   {do: func(r *rig, a *agentapitest.Agent) { a.Close() }, gone: "the agent's stream broke"},
		"the agent says goodbye": {do: func(r *rig, a *agentapitest.Agent) { a.Goodbye() }, gone: "the agent closed its stream"},
		"the server closes": {do: func(r *rig, a *agentapitest.Agent) { r.server.Close("i-1", r.session("i-1"), nil) },
			gone: "the placement server closed the stream"},
		"the server refuses": {do: func(r *rig, a *agentapitest.Agent) {
			r.server.Close("i-1", r.session("i-1"), &agentpb.Refusal{Code: agentpb.Refusal_RETIRED, Says: "i-1 was replaced"})
			r.server.Close("i-1", r.session("i-1"), nil) // the first word stays
		}, gone: "i-1 was replaced", code: agentpb.Refusal_RETIRED},
		"the server no longer leads": {do: func(r *rig, a *agentapitest.Agent) { r.server.SetTerm(7, false) },
			gone: "this server does not lead, or its term has ended", code: agentpb.Refusal_NOT_LEADER},
		"the server leads again": {do: func(r *rig, a *agentapitest.Agent) { r.server.SetTerm(9, true) },
			gone: "this server does not lead, or its term has ended", code: agentpb.Refusal_NOT_LEADER},
		"the server stops": {do: func(r *rig, a *agentapitest.Agent) { r.stop() },
			gone: "this server is stopping", code: agentpb.Refusal_NOT_LEADER},
		"a second hello": {do: func(r *rig, a *agentapitest.Agent) {
			a.Send(&agentpb.FromAgent{Is: &agentpb.FromAgent_Hello{Hello: agentapitest.Hello("c", "i-1", "a")}})
		}, gone: "a stream has one Hello", code: agentpb.Refusal_INVALID},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				a := r.agent("i-1", "a")
				test.do(r, a)
				err := last(a)
				var refused *agentapitest.Refused
				if errors.As(err, &refused) != (test.code != 0) || refused != nil && refused.Code != test.code {
					t.Errorf("the agent is told %v, want %v", err, test.code)
				}
				if refused != nil {
					if _, err := a.Receive(); !errors.Is(err, io.EOF) {
						t.Errorf("after its refusal: %v", err)
					}
				}
				time.Sleep(5 * lease)
				told := r.heard()
				if len(told) != 2 || !strings.HasPrefix(told[1], "gone i-1: "+test.gone) {
					t.Errorf("the server was told %q, want one %q", told, test.gone)
				}
				a.Close()
			})
		})
	}
}

func TestFirstReportIsFull(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		a, err := r.dial(agentapitest.Hello("c", "i-1", "a"))
		if err != nil {
			t.Fatal(err)
		}
		a.Report(&agentpb.Report{})
		if err := last(a); err == nil || err.Error() != "INVALID: the first report of a stream has to be full: upgrade berth-agent" {
			t.Error(err)
		}
		if n := r.reported("i-1"); n != 0 {
			t.Errorf("%d reports were handed on", n)
		}
		a.Close()
	})
}

func TestManyReportsAreReadSlowlyAndNotLost(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		a := r.agent("i-1", "a")
		start := time.Now()
		sent := make(chan error)
		go func() {
			for range 1499 {
				if err := a.Report(&agentpb.Report{Forgotten: []string{strings.Repeat("f", 1000)}}); err != nil {
					sent <- err
					return
				}
			}
			sent <- nil
		}()
		// Orders go the other way meanwhile.
		r.server.Send("i-1", r.session("i-1"), &agentpb.Orders{Revision: 1})
		if _, err := a.Orders(); err != nil || time.Since(start) > 0 {
			t.Errorf("orders after %v: %v", time.Since(start), err)
		}
		go last(a)
		if err := <-sent; err != nil {
			t.Fatal(err)
		}
		r.wait(func() bool { return r.reported("i-1") == 1500 }, func() string { return "reports are missing" })
		if took := time.Since(start); took < 12*time.Second || took > 14*time.Second {
			t.Errorf("1,500 reports were read in %v, want 100 a second after a burst of 200", took)
		}
		a.Close()
	})
}

// A peer that connects and says nothing holds no name, no stream for longer than the
// lease, and does not hold up the server's end.
func TestMutePeers(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		raw, err := r.listen.Dial()
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		if _, err := io.Copy(io.Discard, raw); err != nil && !errors.Is(err, io.EOF) {
			t.Logf("the connection ended: %v", err)
		}
		if took := time.Since(start); took > lease {
			t.Errorf("a connection without a word lasted %v", took)
		}

		// One that opens a stream, and leaves it at that.
		conn, err := grpc.NewClient("passthrough:///server", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return r.listen.DialContext(ctx) }))
		if err != nil {
			t.Fatal(err)
		}
		st, err := agentpb.NewAgentsClient(conn).Connect(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		start = time.Now()
		if _, err := st.Recv(); err == nil {
			t.Error("a stream without a Hello is answered")
		}
		if took := time.Since(start); took != lease {
			t.Errorf("a stream without a Hello lasted %v, want %v", took, lease)
		}
		conn.Close()

		held, err := r.listen.Dial()
		if err != nil {
			t.Fatal(err)
		}
		a := r.agent("i-1", "a") // which does not read
		for revision := range uint64(3) {
			r.server.Send("i-1", r.session("i-1"), large(revision))
			time.Sleep(time.Millisecond)
		}
		start = time.Now()
		r.stop()
		if err := <-r.served; err != nil {
			t.Error(err)
		}
		r.served <- nil
		if took := time.Since(start); took > 6*time.Second {
			t.Errorf("the server's end took %v", took)
		}
		r.until("hello i-1 a", "gone i-1: this server is stopping: try another one, or this one again in a moment")
		raw.Close()
		held.Close()
		a.Close()
	})
}
