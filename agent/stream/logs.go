package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/berth-gpu/berth/api/agentpb"
)

const (
	mostLogs  = 8        // that are read for the server at once
	chunkSize = 32 << 10 // bytes of a log in one message
)

// logs are the containers' outputs that the server asked for. Each is read by a
// goroutine of its own and no faster than it is sent; what has no turn waits in
// Docker.
type logs struct {
	read   func(ctx context.Context, name, container string, follow bool, tail int) (io.ReadCloser, error)
	chunks chan *agentpb.LogChunk
	owned  *sync.WaitGroup

	mu   sync.Mutex
	open map[uint64]*allowance
}

// begin starts to read one. It never blocks.
func (l *logs) begin(ctx context.Context, r *agentpb.LogRequest) {
	ctx, cancel := context.WithCancel(ctx)
	al := &allowance{cancel: cancel, unlimited: r.Window == 0, bytes: r.Window, more: make(chan struct{}, 1)}
	l.mu.Lock()
	full := len(l.open) >= mostLogs
	_, twice := l.open[r.Id]
	if !full && !twice {
		l.open[r.Id] = al
	}
	l.mu.Unlock()
	l.owned.Go(func() {
		defer cancel()
		var err error
		switch {
		case twice:
			return // of a server that forgot; the first one goes on
		case full:
			err = fmt.Errorf("%d logs of this machine are being read already; close one", mostLogs)
		default:
			defer l.forget(r.Id)
			err = l.copy(ctx, r, al)
		}
		end := &agentpb.LogChunk{Id: r.Id, End: true}
		if err != nil {
			end.Error = err.Error()
		}
		l.send(ctx, end)
	})
}

func (l *logs) copy(ctx context.Context, r *agentpb.LogRequest, al *allowance) error {
	out, err := l.read(ctx, r.Task, r.Container, r.Follow, int(r.Tail))
	if err != nil {
		return err
	}
	defer out.Close()
	buf := make([]byte, chunkSize)
	for {
		n, err := al.take(ctx, chunkSize)
		if err != nil {
			return err
		}
		got, err := out.Read(buf[:n])
		al.add(uint64(n - got))
		if got > 0 && !l.send(ctx, &agentpb.LogChunk{Id: r.Id, Data: append([]byte(nil), buf[:got]...)}) {
			return ctx.Err()
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// send hands a chunk to the sender, which takes it when it has nothing to report.
func (l *logs) send(ctx context.Context, c *agentpb.LogChunk) bool {
	select {
	case l.chunks <- c:
		return true
	case <-ctx.Done():
		return false
	}
}

func (l *logs) forget(id uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.open, id)
}

func (l *logs) find(id uint64) *allowance {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.open[id]
}

func (l *logs) cancel(id uint64) {
	if al := l.find(id); al != nil {
		al.cancel()
	}
}

func (l *logs) allow(id, bytes uint64) {
	if al := l.find(id); al != nil {
		al.add(bytes)
	}
}

// allowance is how many bytes of one log may still be sent.
type allowance struct {
	cancel    context.CancelFunc
	unlimited bool
	more      chan struct{}

	mu    sync.Mutex
	bytes uint64
}

// take waits until at least one byte may be sent, and takes up to most.
func (al *allowance) take(ctx context.Context, most int) (int, error) {
	if al.unlimited {
		return most, ctx.Err()
	}
	for {
		al.mu.Lock()
		n := min(uint64(most), al.bytes)
		al.bytes -= n
		al.mu.Unlock()
		if n > 0 {
			return int(n), nil
		}
		select {
		case <-al.more:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

func (al *allowance) add(bytes uint64) {
	al.mu.Lock()
	al.bytes += bytes
	al.mu.Unlock()
	select {
	case al.more <- struct{}{}:
	default:
	}
}
