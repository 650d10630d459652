// Package agentapitest is an agent that has no machine: it speaks the agents' stream as a
// test or a benchmark tells it to.
package agentapitest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/berth-gpu/berth/api/agentpb"
)

// Agent is one stream. Sending is safe from several goroutines, receiving from one.
type Agent struct {
	Welcome *agentpb.Welcome

	conn   *grpc.ClientConn
	stream grpc.BidiStreamingClient[agentpb.FromAgent, agentpb.FromServer]
	cancel context.CancelFunc
	mu     sync.Mutex // a stream takes one message at a time
}

// Refused is a refusal as an error.
type Refused struct{ *agentpb.Refusal }

func (r *Refused) Error() string { return r.Code.String() + ": " + r.Says }

// Hello is one that a server of the cluster takes.
func Hello(cluster, instance, agentID string) *agentpb.Hello {
	return &agentpb.Hello{Protocol: agentpb.Protocol, Version: "test", Cluster: cluster, Instance: instance, AgentId: agentID, BootId: "boot-1"}
}

// Dial connects to a gRPC target (unix:/path, passthrough:///host:port), says Hello and
// waits for Welcome; a refusal is a *Refused. The stream ends with ctx or Close.
// Without options for it the connection is plaintext.
func Dial(ctx context.Context, target string, hello *agentpb.Hello, opts ...grpc.DialOption) (*Agent, error) {
	opts = append([]grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, opts...)
	opts = append(opts, grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(agentpb.MaxMessage)))
	conn, err := grpc.NewClient(target, opts...)
	if err != nil {
		return nil, err
	}
	a := &Agent{conn: conn}
	if err := a.hello(ctx, hello); err != nil {
		a.Close()
		return nil, err
	}
	return a, nil
}

func (a *Agent) hello(ctx context.Context, hello *agentpb.Hello) error {
	ctx, a.cancel = context.WithCancel(ctx)
	var err error
	if a.stream, err = agentpb.NewAgentsClient(a.conn).Connect(ctx, grpc.WaitForReady(true)); err != nil {
		return err
	}
	// A server that refuses need not have read it.
	if err := a.Send(&agentpb.FromAgent{Is: &agentpb.FromAgent_Hello{Hello: hello}}); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	m, err := a.Receive()
	if err != nil {
		return err
	}
	if a.Welcome = m.GetWelcome(); a.Welcome == nil {
		return fmt.Errorf("the first message is no Welcome: %v", m)
	}
	return agentpb.Understand(
		agentpb.Side{Name: "the placement server", Version: a.Welcome.Version, Protocol: a.Welcome.Protocol},
		agentpb.Side{Name: "this berth-agent", Version: hello.Version, Protocol: hello.Protocol})
}

// Send sends anything.
func (a *Agent) Send(m *agentpb.FromAgent) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.stream.Send(m)
}

// Report sends a report; an empty one is a pulse, the first has to be full.
func (a *Agent) Report(r *agentpb.Report) error {
	return a.Send(&agentpb.FromAgent{Is: &agentpb.FromAgent_Report{Report: r}})
}

// Log sends a piece of the log that the server asked for by this id.
func (a *Agent) Log(chunk *agentpb.LogChunk) error {
	return a.Send(&agentpb.FromAgent{Is: &agentpb.FromAgent_Log{Log: chunk}})
}

// Receive is the next message. A refusal is a *Refused.
func (a *Agent) Receive() (*agentpb.FromServer, error) {
	m, err := a.stream.Recv()
	if err != nil {
		return nil, err
	}
	if r := m.GetRefusal(); r != nil {
		return nil, &Refused{r}
	}
	return m, nil
}

// Orders is the next orders; what comes before them is dropped.
func (a *Agent) Orders() (*agentpb.Orders, error) {
	for {
		m, err := a.Receive()
		if err != nil {
			return nil, err
		}
		if orders := m.GetOrders(); orders != nil {
			return orders, nil
		}
	}
}

// Goodbye closes this side of the stream, as an agent does that is stopped.
func (a *Agent) Goodbye() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.stream.CloseSend()
}

// Close breaks the connection, as the end of an agent does.
func (a *Agent) Close() {
	if a.cancel != nil {
		a.cancel()
	}
	a.conn.Close()
}
