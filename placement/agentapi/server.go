package agentapi

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	"github.com/berth-gpu/berth/api/agentpb"
)

const (
	farewell  = 2 * time.Second // for the last word to an agent, before its connection is closed
	handshake = 5 * time.Second // for a new connection; as long as one can hold up the end of Serve
	idle      = time.Minute     // for a connection without a stream
	window    = 256 << 10       // bytes that wait unread per stream; fixed, so that 1,000 agents cannot take gigabytes
)

// ErrNotConnected is what there is to say of an instance without a stream.
var ErrNotConnected = errors.New("no agent of this instance is connected; berth instances says since when")

// Options are all to be set, but for Log and TLS, and Lease to several times Pulse. The three functions are called from the
// streams' own goroutines, those of one stream one at a time. They may wait, but for no
// longer than until their ctx ends.
type Options struct {
	Version string // of berth
	Cluster string
	Pulse   time.Duration // each side sends something at least this often
	Lease   time.Duration // a side that was not heard for this long is cut off
	Log     *zap.Logger
	TLS     *tls.Config // of every listener; nil: plaintext, for unix sockets and loopback alone

	// Hello takes an agent in (nil) or refuses it. Session is a fresh number for each
	// stream.
	Hello func(ctx context.Context, hello *agentpb.Hello, session uint64) *agentpb.Refusal
	// Report is called with each report, and the agent's pulses, which are empty ones.
	// The first of a session is full.
	Report func(ctx context.Context, instance string, session uint64, report *agentpb.Report)
	// Gone is called once for each session that Hello took in, after its last Report
	// and before the next Hello of its instance.
	Gone func(instance string, session uint64, why error)
}

// Server is the agents' door. Until SetTerm says that it leads, it refuses all. Its
// methods may be called from anywhere, the functions of Options too, and none but Serve
// waits for anything.
type Server struct {
	o        Options
	protocol uint32

	mu       sync.Mutex // taken before a session's
	term     uint64
	leading  bool
	last     uint64              // session
	named    map[string]*session // by instance, until Gone has returned
	vanished map[string]vanished // by instance
}

// vanished is an agent whose stream broke: for the lease its name is kept for it.
type vanished struct {
	agentID string
	until   time.Time
}

// New makes a server that is not yet leading.
func New(o Options) *Server {
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	return &Server{o: o, protocol: agentpb.Protocol, named: map[string]*session{}, vanished: map[string]vanished{}}
}

// SetTerm says whether this server leads, and in which term. Streams of another term,
// and all where it does not lead, are ended with NOT_LEADER.
func (s *Server) SetTerm(term uint64, leading bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.term, s.leading = term, leading
	for _, se := range s.named {
		if !leading || se.term != term {
			r := notLeader()
			se.end(errors.New(r.Says), r)
		}
	}
}

// Send makes orders the newest for a session. Older ones that wait are dropped. A
// session that is not, or no longer, is ignored.
func (s *Server) Send(instance string, session uint64, orders *agentpb.Orders) {
	if se := s.session(instance, session); se != nil {
		se.order(orders)
	}
}

// Close ends a session, with a refusal where it is not nil. Gone follows.
func (s *Server) Close(instance string, session uint64, refusal *agentpb.Refusal) {
	se := s.session(instance, session)
	if se == nil {
		return
	}
	why := errors.New("the placement server closed the stream")
	if refusal != nil {
		why = errors.New(refusal.Says)
	}
	se.end(why, refusal)
}

func (s *Server) session(instance string, id uint64) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	if se := s.named[instance]; se != nil && se.id == id {
		return se
	}
	return nil
}

// Serve takes agents in from a listener, which it closes, until ctx ends, and returns
// when their streams have: nil, or what the listener broke on. There may be several at
// a time.
func (s *Server) Serve(ctx context.Context, listener net.Listener) error {
	creds := insecure.NewCredentials()
	if s.o.TLS != nil {
		creds = credentials.NewTLS(s.o.TLS)
	}
	g := grpc.NewServer(
		grpc.Creds(rawCreds{creds}),
		// The pulse says whether the agent is well. These pings see to connections
		// that have no stream, and to what lies between.
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: idle, Time: s.o.Lease, Timeout: s.o.Lease}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.ConnectionTimeout(handshake),
		grpc.MaxConcurrentStreams(4), // one, and one that takes its place
		grpc.MaxRecvMsgSize(agentpb.MaxMessage),
		grpc.MaxSendMsgSize(agentpb.MaxMessage), // the error is the server's then, in its log
		grpc.StaticStreamWindowSize(window),
		grpc.StaticConnWindowSize(2*window),
		grpc.ReadBufferSize(4<<10),
		grpc.WaitForHandlers(true),
	)
	d := &door{Server: s}
	agentpb.RegisterAgentsServer(g, d)

	served := make(chan error, 1)
	go func() { served <- g.Serve(listener) }()
	var broke error
	select {
	case <-ctx.Done():
	case broke = <-served:
		served <- nil
	}

	d.close()
	graceful := make(chan struct{})
	go func() { defer close(graceful); g.GracefulStop() }()
	late := time.NewTimer(farewell)
	defer late.Stop()
	select {
	case <-graceful:
	case <-late.C:
		g.Stop()
		<-graceful
	}
	d.readers.Wait()
	<-served
	if broke != nil {
		return fmt.Errorf("agents' listener %s: %w", listener.Addr(), broke)
	}
	return nil
}

// door is one listener's.
type door struct {
	agentpb.UnimplementedAgentsServer
	*Server
	closed  bool           // under the server's lock
	readers sync.WaitGroup // goroutines that outlive their handlers by a moment
}

// close refuses who comes now, and ends whom it took in.
func (d *door) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	for _, se := range d.named {
		if se.door == d {
			r := stopping()
			se.end(errors.New(r.Says), r)
		}
	}
}
