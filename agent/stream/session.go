package stream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/berth-gpu/berth/agent"
	"github.com/berth-gpu/berth/api/agentpb"
)

// session is one stream that was welcomed.
//
//	receive ──newest orders──> obey ──what is stored──> send ──reports──> server
//	   └────log requests──> logs ──chunks, when nothing else is to be sent──^
type session struct {
	*client
	stream agentpb.Agents_ConnectClient
	end    func(how ending, err error) // the first call counts
	term   uint64
	pulse  time.Duration
	lease  time.Duration
	orders chan *agentpb.Orders // the newest that are not taken up yet; one
	stored chan struct{}        // there is an answer to tell; one
	logs   logs

	heardAt   atomic.Pointer[time.Time]
	sendSince atomic.Pointer[time.Time] // nil: nothing is being sent

	mu     sync.Mutex
	answer answer
}

// answer is what became of the newest orders that are stored and obeyed.
type answer struct {
	revision uint64
	refused  []*agentpb.Refused
	told     bool
}

// Bounds and defaults of what a Welcome says.
const (
	defaultPulse  = 2 * time.Second
	defaultLease  = 10 * time.Second
	shortestLease = 100 * time.Millisecond
	betweenSends  = 20 * time.Millisecond // of reports
	obeyAgain     = time.Second           // orders that could not be stored
)

// session opens a stream and serves it until it ends.
func (c *client) session(ctx context.Context, address string) (welcomed bool, end *ended) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	conn, err := dial(c.settings, address)
	if err != nil {
		return false, &ended{broken, err}
	}
	defer conn.Close()
	impatient := time.AfterFunc(connectLimit, func() {
		cancel(&ended{broken, fmt.Errorf("%s did not answer within %s", address, connectLimit)})
	})
	defer impatient.Stop()
	stream, welcome, err := c.greet(ctx, conn, address)
	impatient.Stop()
	if err != nil {
		return false, whyEnded(ctx, err)
	}
	s := &session{client: c, stream: stream, term: welcome.Term, orders: make(chan *agentpb.Orders, 1), stored: make(chan struct{}, 1), answer: answer{told: true},
		end: func(how ending, err error) { cancel(&ended{how, err}) }}
	s.pulse, s.lease = times(welcome)
	now := time.Now()
	s.heardAt.Store(&now)
	c.agent.heard()
	says := fmt.Sprintf("connected to %s (berth %s, term %d) since %s", address, welcome.Version, welcome.Term, now.UTC().Format(time.RFC3339))
	c.said = ""
	c.log.Info("the placement server welcomed this agent", zap.String("server", address), zap.String("version", welcome.Version), zap.Uint64("term", welcome.Term))
	c.agent.link(agent.Link{Address: address, Connected: true, Says: says})

	var owned sync.WaitGroup
	s.logs = logs{read: c.agent.logs, chunks: make(chan *agentpb.LogChunk), owned: &owned, open: map[uint64]*allowance{}}
	for _, do := range []func(context.Context){s.receive, s.obey, s.send, s.watch} {
		owned.Go(func() { do(ctx) })
	}
	<-ctx.Done()
	conn.Close() // a receive that waits ends
	owned.Wait()
	return true, whyEnded(ctx, ctx.Err())
}

// greet says Hello and waits for Welcome.
func (c *client) greet(ctx context.Context, conn *grpc.ClientConn, address string) (agentpb.Agents_ConnectClient, *agentpb.Welcome, error) {
	stream, err := agentpb.NewAgentsClient(conn).Connect(ctx)
	if err != nil {
		return nil, nil, err
	}
	in := c.agent.view().Instance
	hello := &agentpb.Hello{Protocol: agentpb.Protocol, Version: c.version, Cluster: c.cluster, Instance: c.instance, AgentId: in.AgentID, BootId: in.BootID, Term: c.agent.term()}
	if err := stream.Send(&agentpb.FromAgent{Is: &agentpb.FromAgent_Hello{Hello: hello}}); err != nil && !errors.Is(err, io.EOF) { // EOF: Recv knows why
		return nil, nil, err
	}
	m, err := stream.Recv()
	if err != nil {
		return nil, nil, err
	}
	switch is := m.Is.(type) {
	case *agentpb.FromServer_Refusal:
		return nil, nil, refusal(is.Refusal)
	case *agentpb.FromServer_Welcome:
		w := is.Welcome
		ours := agentpb.Side{Name: "this agent", Version: c.version, Protocol: agentpb.Protocol}
		if err := agentpb.Understand(ours, agentpb.Side{Name: "the server at " + address, Version: w.Version, Protocol: w.Protocol}); err != nil {
			return nil, nil, &ended{refused, err}
		}
		if have := c.agent.term(); w.Term < have {
			return nil, nil, &ended{notLeader, fmt.Errorf("the server at %s leads term %d and this agent has obeyed %d: it was succeeded, or its store was made anew "+
				"(then drain this machine and run `berth-agent purge`)", address, w.Term, have)}
		}
		return stream, w, nil
	}
	return nil, nil, &ended{refused, fmt.Errorf("the server at %s answered with neither Welcome nor Refusal; upgrade the older side", address)}
}

// refusal is a stream's end by the server's word.
func refusal(r *agentpb.Refusal) *ended {
	says := cmp.Or(r.Says, "the server refused this agent without a reason")
	switch r.Code {
	case agentpb.Refusal_NOT_LEADER:
		return &ended{notLeader, errors.New(says)}
	case agentpb.Refusal_RETIRED:
		return &ended{retired, errors.New(says)}
	}
	return &ended{refused, errors.New(says)}
}

// whyEnded is the cause for which a session was ended, or err.
func whyEnded(ctx context.Context, err error) *ended {
	var e *ended
	if errors.As(context.Cause(ctx), &e) || errors.As(err, &e) {
		return e
	}
	return &ended{broken, plainly(err)}
}

// plainly is gRPC's error without its code.
func plainly(err error) error {
	if s, ok := status.FromError(err); ok {
		return errors.New(s.Message())
	}
	return err
}

// times are the pulse and the lease of this stream.
func times(w *agentpb.Welcome) (pulse, lease time.Duration) {
	pulse, lease = time.Duration(w.PulseMs)*time.Millisecond, time.Duration(w.LeaseMs)*time.Millisecond
	if lease == 0 {
		lease = defaultLease
	}
	if pulse == 0 {
		pulse = defaultPulse
	}
	lease = max(lease, shortestLease)
	return max(betweenSends, min(pulse, lease/3)), lease
}
