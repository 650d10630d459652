package agentapi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-gpu/berth/api/agentpb"
)

const (
	logWindow = 256 << 10 // bytes of a log that an agent may send before they are read
	logMost   = 4 << 20   // bytes that are kept of one that sends more
	logsMost  = 16        // per agent at a time
	logStall  = 30 * time.Second
)

// log is one log on its way from an agent to a reader. The agent sends as much as the
// reader has taken, and a window more, so that a slow reader slows down this log and
// nothing else of the agent.
type log struct {
	se   *session
	ask  *ask // under the session's lock
	name string

	mu      sync.Mutex // taken after the session's, or alone
	data    bytes.Buffer
	taken   uint64 // bytes read and not yet given back to the agent's window
	err     error  // nil: it goes on. After the data, unless broken
	broken  bool   // the data is not worth reading
	ready   chan struct{}
	stall   *time.Timer // runs while there is data that nobody reads
	unwatch func() bool
}

// Logs reads the log of a task on an instance; the request's id and window are set here.
// The reader ends with io.EOF, or with an error that says why the rest is missing. It
// is to be closed. A reader that leaves data waiting for 30 s loses it.
func (s *Server) Logs(ctx context.Context, instance string, request *agentpb.LogRequest) (io.ReadCloser, error) {
	s.mu.Lock()
	se := s.named[instance]
	s.mu.Unlock()
	if se == nil {
		return nil, fmt.Errorf("instance %s: %w", instance, ErrNotConnected)
	}
	request = proto.CloneOf(request)
	l := &log{se: se, name: request.Task, ready: make(chan struct{}, 1)}

	se.mu.Lock()
	defer se.mu.Unlock()
	if se.ended {
		return nil, fmt.Errorf("instance %s: %w", instance, ErrNotConnected)
	}
	if len(se.logs) >= logsMost {
		return nil, fmt.Errorf("instance %s: %d logs of it are being read, which is the most at a time: end one first", instance, logsMost)
	}
	se.logID++
	request.Id, request.Window = se.logID, logWindow
	l.ask = &ask{id: request.Id, request: request}
	l.stall = time.AfterFunc(logStall, func() {
		l.drop(fmt.Errorf("task %s: its log waited for %v to be read, and was given up: read it again, with fewer lines", l.name, logStall))
	})
	l.stall.Stop()
	l.unwatch = context.AfterFunc(ctx, func() { l.drop(ctx.Err()) })
	se.logs[request.Id] = l
	se.out.ask(l.ask)
	se.rouse()
	return l, nil
}

// logged takes a piece of a log from the agent. Pieces of a log that nobody reads any
// more are still on their way when it is cancelled.
func (se *session) logged(chunk *agentpb.LogChunk) {
	se.mu.Lock()
	l := se.logs[chunk.GetId()]
	if l != nil && chunk.End {
		delete(se.logs, chunk.Id)
	}
	se.mu.Unlock()
	if l == nil {
		return
	}
	var err error
	switch {
	case chunk.Error != "":
		err = errors.New(chunk.Error)
	case chunk.End:
		err = io.EOF
	}
	if !l.add(chunk.Data, err) {
		l.drop(fmt.Errorf("task %s: its log comes faster than it is read, and its agent does not wait: ask for fewer lines, or upgrade berth-agent", l.name))
	}
}

// add is false where there is no room.
func (l *log) add(data []byte, err error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return true
	}
	if l.data.Len()+len(data) > logMost {
		return false
	}
	if len(data) > 0 && l.data.Len() == 0 {
		l.stall.Reset(logStall)
	}
	l.data.Write(data)
	l.err = err
	l.tell()
	return true
}

func (l *log) tell() {
	select {
	case l.ready <- struct{}{}:
	default:
	}
}

func (l *log) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		n, more, err := l.take(p)
		if more > 0 {
			l.more(more)
		}
		if n > 0 || err != nil {
			return n, err
		}
		<-l.ready
	}
}

// take is what is there now, and what the agent may send for it.
func (l *log) take(p []byte) (n int, more uint64, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.broken || l.data.Len() == 0 {
		if l.err != nil {
			l.tell() // for the next Read
		}
		return 0, 0, l.err
	}
	n, _ = l.data.Read(p)
	l.stall.Stop()
	if l.data.Len() > 0 {
		l.stall.Reset(logStall)
	}
	if l.taken += uint64(n); l.err == nil && l.taken >= logWindow/2 {
		more, l.taken = l.taken, 0
	}
	return n, more, nil
}

func (l *log) more(bytes uint64) {
	se := l.se
	se.mu.Lock()
	defer se.mu.Unlock()
	if se.logs[l.ask.id] != l {
		return
	}
	l.ask.more += bytes
	se.out.ask(l.ask)
	se.rouse()
}

// Close ends the log, at the agent too.
func (l *log) Close() error {
	l.drop(io.ErrClosedPipe)
	l.unwatch()
	return nil
}

// drop ends the log here and at the agent.
func (l *log) drop(err error) {
	l.fail(err)
	se := l.se
	se.mu.Lock()
	defer se.mu.Unlock()
	if se.logs[l.ask.id] == l {
		delete(se.logs, l.ask.id)
		se.out.cancel(l.ask)
		se.rouse()
	}
}

// finish ends the log here, after what came so far.
func (l *log) finish(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = err
		l.tell()
	}
}

// fail ends the log here. What was not read yet is gone with it.
func (l *log) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.broken {
		return
	}
	l.broken, l.err = true, err
	l.data = bytes.Buffer{}
	l.stall.Stop()
	l.tell()
}
