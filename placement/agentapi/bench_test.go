package agentapi_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api/agentpb"
	"github.com/berth-gpu/berth/placement/agentapi"
	"github.com/berth-gpu/berth/placement/agentapi/agentapitest"
)

const (
	many       = 1000
	manySocket = "AGENTAPI_TEST_MANY" // set for the process that is the agents
)

// TestManyAgents is the agents of BenchmarkStreams, in a process of their own so that the
// server's memory is the server's. Without its socket it has nothing to do.
func TestManyAgents(t *testing.T) {
	socket := os.Getenv(manySocket)
	if socket == "" {
		return
	}
	ended := make(chan error)
	for i := range many {
		go func() {
			a, err := agentapitest.Dial(t.Context(), "unix:"+socket, agentapitest.Hello("c", fmt.Sprintf("i-%d", i), "a"))
			if err != nil {
				ended <- err
				return
			}
			defer a.Close()
			a.Report(&agentpb.Report{Full: true})
			go func() {
				for a.Report(&agentpb.Report{}) == nil {
					time.Sleep(pulse)
				}
			}()
			for {
				orders, err := a.Orders()
				if err != nil {
					ended <- err
					return
				}
				a.Report(&agentpb.Report{Orders: orders.Revision})
			}
		}()
	}
	for range many {
		<-ended
	}
}

// BenchmarkStreams is orders to 1,000 agents, each with a pulse of 2 s, until all have
// answered; one operation is one round for all. KiB/stream is heap and stacks of the server.
func BenchmarkStreams(b *testing.B) {
	var full, answers atomic.Int64
	var revision atomic.Uint64
	sessions := make([]atomic.Uint64, many)
	index := func(instance string) (i int) { fmt.Sscanf(instance, "i-%d", &i); return i }
	server := agentapi.New(agentapi.Options{
		Version: "1.0", Cluster: "c", Pulse: pulse, Lease: lease,
		Hello: func(_ context.Context, hello *agentpb.Hello, session uint64) *agentpb.Refusal {
			sessions[index(hello.Instance)].Store(session)
			return nil
		},
		Report: func(_ context.Context, _ string, _ uint64, r *agentpb.Report) {
			if r.Full {
				full.Add(1)
			}
			if r.Orders > 0 && r.Orders == revision.Load() {
				answers.Add(1)
			}
		},
		Gone: func(instance string, _ uint64, why error) {},
	})
	server.SetTerm(1, true)
	l, err := net.Listen("unix", filepath.Join(b.TempDir(), "agents.sock"))
	if err != nil {
		b.Fatal(err)
	}
	until := func(n *atomic.Int64) {
		b.Helper()
		for deadline := time.Now().Add(time.Minute); n.Load() < many; time.Sleep(100 * time.Microsecond) {
			if time.Now().After(deadline) {
				b.Fatalf("%d of %d", n.Load(), many)
			}
		}
	}
	before, goroutines := memory(), runtime.NumGoroutine()
	ctx, stop := context.WithCancel(b.Context())
	served := make(chan error, 1)
	go func() { served <- server.Serve(ctx, l) }()
	agents := exec.Command(os.Args[0], "-test.run=^TestManyAgents$")
	agents.Env = append(os.Environ(), manySocket+"="+l.Addr().String())
	agents.Stderr = os.Stderr
	start := time.Now()
	if err := agents.Start(); err != nil {
		b.Fatal(err)
	}
	until(&full)
	connected := time.Since(start)

	task := &agentpb.Wanted{Name: "t", Generation: 1, Hash: "h", Definition: make([]byte, 2<<10), Gpus: []string{"GPU-0"}}
	b.ReportAllocs()
	for b.Loop() {
		answers.Store(0)
		r := revision.Add(1)
		for i := range many {
			server.Send(fmt.Sprintf("i-%d", i), sessions[i].Load(), &agentpb.Orders{Revision: r, Tasks: []*agentpb.Wanted{task}})
		}
		until(&answers)
	}
	b.ReportMetric(float64(memory()-before)/many/1024, "KiB/stream")
	b.ReportMetric(float64(runtime.NumGoroutine()-goroutines)/many, "goroutines/stream")
	b.ReportMetric(connected.Seconds(), "s-to-connect-all")

	stop()
	start = time.Now()
	if err := <-served; err != nil {
		b.Error(err)
	}
	b.ReportMetric(time.Since(start).Seconds(), "s-to-end-all")
	if err := agents.Wait(); err != nil {
		b.Error(err)
	}
}

func memory() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}
