package agentapi_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"

	"github.com/berth-gpu/berth/api/agentpb"
	"github.com/berth-gpu/berth/placement/agentapi"
	"github.com/berth-gpu/berth/placement/agentapi/agentapitest"
)

const (
	pulse = 2 * time.Second
	lease = 10 * time.Second
)

// rig is a server of cluster c that leads in term 7, and what it was told, in order.
type rig struct {
	t      *testing.T
	server *agentapi.Server
	listen *bufconn.Listener
	stop   context.CancelFunc
	served chan error

	mu       sync.Mutex
	told     []string
	sessions map[string]uint64 // newest of each instance
	reports  map[string]int
	refuse   *agentpb.Refusal              // what Hello answers
	onReport func(context.Context, string) // runs inside Report
	onHello  func(context.Context)
}

// bubble runs a test over a connection in memory, with time that passes only when
// everything waits.
func bubble(t *testing.T, test func(t *testing.T, r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, agentapi.Options{Version: "1.0", Cluster: "c", Pulse: pulse, Lease: lease})
		r.listen = bufconn.Listen(64 << 10)
		r.serve(r.listen)
		r.server.SetTerm(7, true)
		test(t, r)
		r.close()
	})
}

func newRig(t *testing.T, o agentapi.Options) *rig {
	r := &rig{t: t, sessions: map[string]uint64{}, reports: map[string]int{}}
	o.Hello = func(ctx context.Context, hello *agentpb.Hello, session uint64) *agentpb.Refusal {
		r.tell("hello %s %s", hello.Instance, hello.AgentId)
		r.mu.Lock()
		r.sessions[hello.Instance] = session
		refuse, on := r.refuse, r.onHello
		r.mu.Unlock()
		if on != nil {
			on(ctx)
		}
		return refuse
	}
	o.Report = func(ctx context.Context, instance string, session uint64, report *agentpb.Report) {
		r.mu.Lock()
		r.reports[instance]++
		on := r.onReport
		r.mu.Unlock()
		if on != nil {
			on(ctx, instance)
		}
	}
	o.Gone = func(instance string, session uint64, why error) { r.tell("gone %s: %v", instance, why) }
	r.server = agentapi.New(o)
	return r
}

func (r *rig) serve(l net.Listener) {
	ctx, cancel := context.WithCancel(context.Background())
	r.stop, r.served = cancel, make(chan error, 1)
	go func() { r.served <- r.server.Serve(ctx, l) }()
}

// close ends the server. That no goroutine is left is for synctest to say.
func (r *rig) close() {
	r.t.Helper()
	r.stop()
	select {
	case err := <-r.served:
		if err != nil {
			r.t.Errorf("Serve: %v", err)
		}
	case <-time.After(20 * time.Second):
		r.t.Fatal("Serve does not return")
	}
}

func (r *rig) tell(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.told = append(r.told, fmt.Sprintf(format, args...))
}

func (r *rig) heard() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.told)
}

func (r *rig) session(instance string) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sessions[instance]
}

func (r *rig) reported(instance string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.reports[instance]
}

// until waits for the server to have been told this, and nothing else.
func (r *rig) until(want ...string) {
	r.t.Helper()
	r.wait(func() bool { return slices.Equal(r.heard(), want) }, func() string {
		return fmt.Sprintf("the server was told\n%q\nwant\n%q", r.heard(), want)
	})
}

func (r *rig) wait(done func() bool, says func() string) {
	r.t.Helper()
	for deadline := time.Now().Add(15 * time.Second); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			r.t.Fatal(says())
		}
	}
}

func (r *rig) dial(hello *agentpb.Hello) (*agentapitest.Agent, error) {
	return agentapitest.Dial(context.Background(), "passthrough:///server", hello,
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return r.listen.DialContext(ctx) }))
}

// agent is one that the server has taken in and that has made its full report.
func (r *rig) agent(instance, agentID string) *agentapitest.Agent {
	r.t.Helper()
	a, err := r.dial(agentapitest.Hello("c", instance, agentID))
	if err != nil {
		r.t.Fatalf("%s: %v", instance, err)
	}
	if err := a.Report(&agentpb.Report{Full: true}); err != nil {
		r.t.Fatalf("%s: %v", instance, err)
	}
	return a
}

// refused dials and is the refusal.
func (r *rig) refused(hello *agentpb.Hello) *agentpb.Refusal {
	r.t.Helper()
	a, err := r.dial(hello)
	var refused *agentapitest.Refused
	if !errors.As(err, &refused) {
		if a != nil {
			a.Close()
		}
		r.t.Fatalf("hello %v: %v, want a refusal", hello, err)
	}
	return refused.Refusal
}

// pulses makes an agent do what one does that is well, until the stream ends: it sends
// an empty report each pulse, and reads what comes.
func pulses(a *agentapitest.Agent) (ended chan error) {
	ended = make(chan error, 1)
	stop := make(chan struct{})
	go func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(pulse):
				if a.Report(&agentpb.Report{}) != nil {
					return
				}
			}
		}
	}()
	go func() {
		defer close(stop)
		for {
			if _, err := a.Receive(); err != nil {
				ended <- err
				return
			}
		}
	}()
	return ended
}
