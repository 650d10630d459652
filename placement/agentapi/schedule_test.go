package agentapi_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"
	"pgregory.net/rapid"

	"github.com/berth-gpu/berth/api/agentpb"
	"github.com/berth-gpu/berth/placement/agentapi"
	"github.com/berth-gpu/berth/placement/agentapi/agentapitest"
)

// witness checks what Options promise, whoever calls when.
type witness struct {
	mu       sync.Mutex
	open     map[string]uint64 // the session of each instance between Hello and Gone
	last     uint64
	taken    int
	gone     int
	reported int
	broken   []string
}

func (w *witness) check(ok bool, format string, args ...any) {
	if !ok {
		w.broken = append(w.broken, fmt.Sprintf(format, args...))
	}
}

func (w *witness) options() agentapi.Options {
	return agentapi.Options{
		Version: "1.0", Cluster: "c", Pulse: pulse, Lease: lease,
		Hello: func(ctx context.Context, hello *agentpb.Hello, session uint64) *agentpb.Refusal {
			w.mu.Lock()
			defer w.mu.Unlock()
			_, twice := w.open[hello.Instance]
			w.check(!twice, "hello of session %d on %s before the one before is gone", session, hello.Instance)
			w.check(session > w.last, "session %d after %d", session, w.last)
			w.last = max(w.last, session)
			if hello.AgentId == "refused" {
				return &agentpb.Refusal{Code: agentpb.Refusal_RETIRED, Says: "no"}
			}
			w.open[hello.Instance] = session
			w.taken++
			return nil
		},
		Report: func(ctx context.Context, instance string, session uint64, _ *agentpb.Report) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.check(w.open[instance] == session, "a report of session %d on %s, whose session is %d", session, instance, w.open[instance])
			w.reported++
		},
		Gone: func(instance string, session uint64, why error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.check(w.open[instance] == session, "session %d on %s is gone, whose session is %d", session, instance, w.open[instance])
			w.check(why != nil, "session %d is gone without a reason", session)
			delete(w.open, instance)
			w.gone++
		},
	}
}

// Agents come, go and vanish, two of a name, while the leadership changes and sessions
// are closed.
func TestSchedules(t *testing.T) {
	seen := 0
	rapid.Check(t, func(rt *rapid.T) {
		steps := rapid.SliceOfN(rapid.Custom(drawStep), 1, 40).Draw(rt, "steps")
		w := &witness{open: map[string]uint64{}}
		synctest.Test(t, func(t *testing.T) { play(t, w, steps) })
		if w.check(w.taken == w.gone, "%d sessions were taken in, and %d are gone", w.taken, w.gone); len(w.broken) > 0 {
			rt.Fatal(w.broken)
		}
		seen += w.reported
	})
	if seen == 0 {
		t.Error("no agent was ever heard")
	}
}

type step struct {
	Do       string
	Instance string
	Agent    string
	Number   uint64
	After    time.Duration
}

func drawStep(rt *rapid.T) step {
	return step{
		Do:       rapid.SampledFrom([]string{"dial", "dial", "dial", "break", "goodbye", "mute", "close", "refuse", "orders", "log", "term", "resign"}).Draw(rt, "do"),
		Instance: rapid.SampledFrom([]string{"i", "j"}).Draw(rt, "instance"),
		Agent:    rapid.SampledFrom([]string{"a", "a", "b", "refused"}).Draw(rt, "agent"),
		Number:   rapid.Uint64Range(1, 9).Draw(rt, "number"),
		After:    rapid.SampledFrom([]time.Duration{0, 0, 0, time.Millisecond, 3 * time.Second, 11 * time.Second}).Draw(rt, "after"),
	}
}

func play(t *testing.T, w *witness, steps []step) {
	server := agentapi.New(w.options())
	listener := bufconn.Listen(64 << 10)
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- server.Serve(ctx, listener) }()
	server.SetTerm(1, true)

	session := func(instance string) uint64 {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.open[instance]
	}
	var (
		agents sync.WaitGroup
		mu     sync.Mutex
		live   = map[string][]*agentapitest.Agent{}
	)
	one := func(instance string, n uint64) *agentapitest.Agent {
		mu.Lock()
		defer mu.Unlock()
		if len(live[instance]) == 0 {
			return nil
		}
		return live[instance][n%uint64(len(live[instance]))]
	}
	term := uint64(1)
	for _, s := range steps {
		a := one(s.Instance, s.Number)
		switch s.Do {
		case "dial":
			agents.Go(func() {
				a, err := agentapitest.Dial(ctx, "passthrough:///server", agentapitest.Hello("c", s.Instance, s.Agent),
					grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
				if err != nil {
					return
				}
				defer a.Close()
				mu.Lock()
				live[s.Instance] = append(live[s.Instance], a)
				mu.Unlock()
				a.Report(&agentpb.Report{Full: true})
				<-pulses(a)
			})
		case "break":
			if a != nil {
				a.Close()
			}
		case "goodbye":
			if a != nil {
				a.Goodbye()
			}
		case "mute":
			if conn, err := listener.DialContext(ctx); err == nil {
				defer conn.Close()
			}
		case "close":
			server.Close(s.Instance, s.Number, nil)
			server.Close(s.Instance, session(s.Instance), nil)
		case "refuse":
			server.Close(s.Instance, session(s.Instance), &agentpb.Refusal{Code: agentpb.Refusal_RETIRED, Says: "no"})
		case "orders":
			server.Send(s.Instance, session(s.Instance), &agentpb.Orders{Revision: s.Number})
		case "log":
			if l, err := server.Logs(ctx, s.Instance, &agentpb.LogRequest{Task: "t"}); err == nil {
				agents.Go(func() { io.Copy(io.Discard, l); l.Close() })
			}
		case "term":
			term += s.Number
			server.SetTerm(term, true)
		case "resign":
			server.SetTerm(term, false)
			if s.Number < 5 {
				server.SetTerm(term+1, true)
			}
		}
		time.Sleep(s.After)
	}
	stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
	agents.Wait()
}
