package agentapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/berth-gpu/berth/api/agentpb"
)

type stream = grpc.BidiStreamingServer[agentpb.FromAgent, agentpb.FromServer]

var errBroke = errors.New("the agent's stream broke")

// session is one stream whose agent speaks for an instance.
type session struct {
	door     *door
	id       uint64
	term     uint64
	instance string
	agentID  string
	stream   stream
	ctx      context.Context // ends with the session, or with the stream
	cancel   context.CancelFunc
	done     chan struct{} // closed when Gone has returned

	mu     sync.Mutex
	heard  time.Time
	ended  bool
	why    error
	kept   bool // the agent did not say that it goes: its name waits for it
	last   *agentpb.Refusal
	cutoff *time.Timer // closes the connection if the last word does not get through
	out    outbox
	logs   map[uint64]*log
	logID  uint64
	wake   chan struct{} // something is to be sent
}

// Connect is a stream's whole life. It returns when the stream is over for the writer;
// that lets gRPC end the reader, which calls Gone.
func (d *door) Connect(st stream) error {
	hello, err := d.hello(st)
	if err != nil {
		return err
	}
	refusal := judge(hello, agentpb.Side{Name: "this server", Version: d.o.Version, Protocol: d.protocol}, d.o.Cluster)
	if refusal != nil {
		return d.refuse(st, hello, refusal)
	}
	se, refusal, err := d.name(st, hello)
	if err != nil {
		return err
	}
	if refusal != nil {
		return d.refuse(st, hello, refusal)
	}
	if refusal := d.o.Hello(se.ctx, hello, se.id); refusal != nil {
		se.end(errors.New(refusal.Says), nil)
		se.leave(false)
		return d.refuse(st, hello, refusal)
	}
	d.o.Log.Info("agent connected", zap.String("instance", se.instance), zap.Uint64("session", se.id),
		zap.String("version", hello.Version), zap.Uint32("protocol", hello.Protocol))
	d.readers.Go(func() {
		se.read()
		se.lose(errBroke) // where it was not the reader that found out
		se.leave(true)
	})
	return se.write()
}

// hello is the first message, for which an agent has the lease.
func (d *door) hello(st stream) (*agentpb.Hello, error) {
	late := time.AfterFunc(d.o.Lease, func() { hangUp(st.Context()) })
	defer late.Stop()
	first, err := st.Recv()
	if err != nil {
		return nil, err
	}
	return first.GetHello(), nil
}

func (d *door) refuse(st stream, hello *agentpb.Hello, refusal *agentpb.Refusal) error {
	level := zap.WarnLevel
	if refusal.Code == agentpb.Refusal_NOT_LEADER {
		level = zap.DebugLevel
	}
	d.o.Log.Log(level, "agent refused", zap.String("instance", hello.GetInstance()), zap.Stringer("code", refusal.Code), zap.String("why", refusal.Says))
	return st.Send(&agentpb.FromServer{Is: &agentpb.FromServer_Refusal{Refusal: refusal}})
}

// name makes a session the one of its instance, when the one before is gone.
func (d *door) name(st stream, hello *agentpb.Hello) (*session, *agentpb.Refusal, error) {
	for {
		se, before, refusal := d.tryName(st, hello)
		if before == nil {
			return se, refusal, nil
		}
		select {
		case <-before.done:
		case <-st.Context().Done():
			return nil, nil, status.FromContextError(st.Context().Err()).Err()
		}
	}
}

func (d *door) tryName(st stream, hello *agentpb.Hello) (se, before *session, refusal *agentpb.Refusal) {
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.closed:
		return nil, nil, stopping()
	case !d.leading:
		return nil, nil, notLeader()
	}
	if before = d.named[hello.Instance]; before != nil {
		if before.agentID != hello.AgentId && before.here() {
			return nil, nil, nameInUse(hello.Instance)
		}
		before.end(errors.New("another stream of the same agent took its place"), nil)
		return nil, before, nil
	}
	for instance, v := range d.vanished {
		if !now.Before(v.until) {
			delete(d.vanished, instance)
		}
	}
	if v, ok := d.vanished[hello.Instance]; ok && v.agentID != hello.AgentId {
		return nil, nil, nameInUse(hello.Instance)
	}
	delete(d.vanished, hello.Instance)

	d.last++
	se = &session{door: d, id: d.last, term: d.term, instance: hello.Instance, agentID: hello.AgentId, stream: st, heard: now,
		done: make(chan struct{}), wake: make(chan struct{}, 1), logs: map[uint64]*log{}}
	se.ctx, se.cancel = context.WithCancel(st.Context())
	d.named[hello.Instance] = se
	return se, nil, nil
}

func (se *session) here() bool {
	se.mu.Lock()
	defer se.mu.Unlock()
	return !se.ended
}

// end decides that the session is over, and why; the first reason stays. The writer
// sends the refusal where there is one. It waits for nothing.
func (se *session) end(why error, refusal *agentpb.Refusal) {
	se.mu.Lock()
	defer se.mu.Unlock()
	if se.ended {
		return
	}
	se.ended, se.why, se.last = true, why, refusal
	se.cutoff = time.AfterFunc(farewell, func() { hangUp(se.stream.Context()) })
	for _, l := range se.logs {
		l.finish(fmt.Errorf("instance %s: its agent's stream ended while the log was read: %w", se.instance, why))
	}
	clear(se.logs)
	se.cancel()
}

// lose ends the session as one whose agent may be back under its name.
func (se *session) lose(why error) {
	se.mu.Lock()
	se.kept = se.kept || !se.ended
	se.mu.Unlock()
	se.end(why, nil)
}

// cut ends the session with its connection: there is no last word to one who does not
// read, and does not speak.
func (se *session) cut(why error) {
	se.lose(why)
	hangUp(se.stream.Context())
}

// leave is the session's last act: Gone, then its name is free.
func (se *session) leave(welcomed bool) {
	se.mu.Lock()
	why, kept, until := se.why, se.kept, se.heard.Add(se.door.o.Lease)
	se.mu.Unlock()
	if welcomed {
		se.door.o.Log.Info("agent gone", zap.String("instance", se.instance), zap.Uint64("session", se.id), zap.Error(why))
		se.door.o.Gone(se.instance, se.id, why)
	}
	s := se.door.Server
	s.mu.Lock()
	delete(s.named, se.instance)
	if kept {
		s.vanished[se.instance] = vanished{se.agentID, until}
	}
	s.mu.Unlock()
	se.cutoff.Stop() // set by end, which every way here has passed
	close(se.done)
}

// read hands on what the agent says, until the session has ended.
func (se *session) read() {
	d := se.door
	silence := time.AfterFunc(d.o.Lease, func() { se.cut(fmt.Errorf("nothing was heard from the agent for %v", d.o.Lease)) })
	defer silence.Stop()
	var reports pace
	full := false
	for {
		silence.Reset(d.o.Lease)
		m, err := se.stream.Recv()
		silence.Stop()
		if errors.Is(err, io.EOF) {
			se.end(errors.New("the agent closed its stream"), nil)
			return
		} else if err != nil {
			se.lose(fmt.Errorf("%w: %w", errBroke, err))
			return
		}
		if !se.hear() {
			return
		}
		switch is := m.Is.(type) {
		case *agentpb.FromAgent_Report:
			if full = full || is.Report.GetFull(); !full {
				r := invalid("the first report of a stream has to be full: upgrade berth-agent")
				se.end(errors.New(r.Says), r)
				return
			}
			if !rest(se.ctx, reports.wait(time.Now())) {
				return
			}
			d.o.Report(se.ctx, se.instance, se.id, is.Report)
		case *agentpb.FromAgent_Log:
			se.logged(is.Log)
		case *agentpb.FromAgent_Hello:
			r := invalid("a stream has one Hello: upgrade berth-agent")
			se.end(errors.New(r.Says), r)
			return
		default: // of a newer agent; that it speaks is heard
		}
	}
}

func (se *session) hear() (goOn bool) {
	now := time.Now()
	se.mu.Lock()
	defer se.mu.Unlock()
	se.heard = now
	return !se.ended
}

func rest(ctx context.Context, d time.Duration) (goOn bool) {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// write sends what waits, a pulse when nothing did, and the last word.
func (se *session) write() error {
	d := se.door
	blocked := time.AfterFunc(d.o.Lease, func() { se.cut(fmt.Errorf("the agent read nothing of what was sent for %v", d.o.Lease)) })
	blocked.Stop()
	send := func(m *agentpb.FromServer) error {
		blocked.Reset(d.o.Lease)
		defer blocked.Stop()
		return se.stream.Send(m)
	}

	m := &agentpb.FromServer{Is: &agentpb.FromServer_Welcome{Welcome: &agentpb.Welcome{
		Protocol: d.protocol, Version: d.o.Version, Term: se.term,
		PulseMs: uint32(d.o.Pulse.Milliseconds()), LeaseMs: uint32(d.o.Lease.Milliseconds()),
	}}}
	pulse := time.NewTimer(d.o.Pulse)
	defer pulse.Stop()
	for se.ctx.Err() == nil {
		if m != nil {
			if err := send(m); err != nil {
				se.lose(fmt.Errorf("%w: %w", errBroke, err))
				break
			}
			pulse.Reset(d.o.Pulse)
		}
		if m = se.next(); m != nil {
			continue
		}
		select {
		case <-se.wake:
		case <-pulse.C:
			m = &agentpb.FromServer{Is: &agentpb.FromServer_Pulse{Pulse: &agentpb.Pulse{}}}
		case <-se.ctx.Done():
		}
	}
	se.lose(errBroke) // the context's end can be the first sign of it
	se.mu.Lock()
	why, last := se.why, se.last
	se.mu.Unlock()
	if last != nil {
		return send(&agentpb.FromServer{Is: &agentpb.FromServer_Refusal{Refusal: last}})
	}
	return status.Error(codes.Unavailable, why.Error())
}

func (se *session) order(orders *agentpb.Orders) {
	se.mu.Lock()
	defer se.mu.Unlock()
	se.out.orders = orders
	se.rouse()
}

// rouse makes the writer look. Under the session's lock.
func (se *session) rouse() {
	select {
	case se.wake <- struct{}{}:
	default:
	}
}

func (se *session) next() *agentpb.FromServer {
	se.mu.Lock()
	defer se.mu.Unlock()
	return se.out.next()
}
