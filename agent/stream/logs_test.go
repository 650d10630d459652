package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/api/agentpb"
)

// endless is a container's output that goes on until its reader is closed.
type endless struct {
	ctx  context.Context
	open *atomic.Int32
}

func (e *endless) Read(p []byte) (int, error) {
	if e.ctx.Err() != nil {
		return 0, e.ctx.Err()
	}
	return copy(p, "again and again\n"), nil
}

func (e *endless) Close() error { e.open.Add(-1); return nil }

func (p *peer) ask(r *agentpb.LogRequest) {
	p.t.Helper()
	p.send(&agentpb.FromServer{Is: &agentpb.FromServer_Log{Log: r}})
}

func (p *peer) log(id uint64) (text, end string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.logs[id], p.logEnds[id]
}

func TestLogs(t *testing.T) {
	s, m := newServer(t), newMachine()
	var open atomic.Int32
	long := strings.Repeat("0123456789abcdef", 20_000)
	m.onLogs = func(ctx context.Context, name, container string, follow bool, tail int) (io.ReadCloser, error) {
		switch name {
		case "short":
			return io.NopCloser(strings.NewReader(fmt.Sprintf("%s/%s follow=%v tail=%d\n", name, container, follow, tail))), nil
		case "long":
			return io.NopCloser(strings.NewReader(long)), nil
		case "endless":
			open.Add(1)
			return &endless{ctx, &open}, nil
		}
		return nil, errors.New("there is no such task")
	}
	connect(t, m, s.address)
	p := s.next().welcome(nil)

	p.ask(&agentpb.LogRequest{Id: 1, Task: "short", Container: "main", Follow: true, Tail: 5})
	p.ask(&agentpb.LogRequest{Id: 2, Task: "none"})
	p.ask(&agentpb.LogRequest{Id: 3, Task: "long"})
	for id, want := range map[uint64][2]string{1: {"short/main follow=true tail=5\n", "ended: "}, 2: {"", "ended: there is no such task"}, 3: {long, "ended: "}} {
		until(t, fmt.Sprint("log ", id, " ends"), func() bool { _, end := p.log(id); return end != "" })
		if text, end := p.log(id); text != want[0] || end != want[1] {
			t.Errorf("log %d: %d bytes, %q", id, len(text), end)
		}
	}

	t.Run("no more than may be on its way", func(t *testing.T) {
		p.ask(&agentpb.LogRequest{Id: 4, Task: "long", Window: 100})
		until(t, "the first bytes", func() bool { text, _ := p.log(4); return len(text) == 100 })
		for range 3 {
			p.send(&agentpb.FromServer{Is: &agentpb.FromServer_LogMore{LogMore: &agentpb.LogMore{Id: 4, Bytes: 50_000}}})
		}
		until(t, "as much as was allowed", func() bool { text, _ := p.log(4); return len(text) == 150_100 })
		p.send(&agentpb.FromServer{Is: &agentpb.FromServer_LogMore{LogMore: &agentpb.LogMore{Id: 4, Bytes: 1 << 40}}})
		until(t, "the rest", func() bool { text, end := p.log(4); return text == long && end == "ended: " })
	})

	t.Run("many at once delay no report, and one too many is told", func(t *testing.T) {
		for id := range uint64(mostLogs) {
			p.ask(&agentpb.LogRequest{Id: 10 + id, Task: "endless", Follow: true})
		}
		until(t, "all are open", func() bool { return open.Load() == mostLogs })
		m.task("a", api.StatusRunning)
		p.report("the change", func(r *agentpb.Report) bool { return names(r) == "[a]" })
		p.ask(&agentpb.LogRequest{Id: 30, Task: "short"})
		until(t, "one too many", func() bool {
			_, end := p.log(30)
			return strings.Contains(end, "8 logs of this machine are being read already")
		})
		p.send(&agentpb.FromServer{Is: &agentpb.FromServer_LogCancel{LogCancel: &agentpb.LogCancel{Id: 10}}})
		until(t, "a cancelled one is closed", func() bool { return open.Load() == mostLogs-1 })
		until(t, "there is room again", func() bool {
			p.ask(&agentpb.LogRequest{Id: 31, Task: "short"})
			text, _ := p.log(31)
			return strings.HasPrefix(text, "short/")
		})
	})

	p.hangUp()
	until(t, "all are closed with the stream", func() bool { return open.Load() == 0 })
}
