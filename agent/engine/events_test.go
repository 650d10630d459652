package engine_test

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-gpu/berth/agent/engine"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"
)

// relay is a socket in front of Docker's whose connections can be cut, and
// which can be made deaf: connections are taken and never answered.
type relay struct {
	listener net.Listener
	docker   string
	mu       sync.Mutex
	open     map[net.Conn]bool
	deaf     bool
	wg       sync.WaitGroup
}

func newRelay(t *testing.T, docker string) *relay {
	t.Helper()
	listener, err := net.Listen("unix", filepath.Join(t.TempDir(), "relay.sock"))
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{listener: listener, docker: strings.TrimPrefix(docker, "unix://"), open: map[net.Conn]bool{}}
	r.wg.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			r.wg.Go(func() { r.serve(client) })
		}
	})
	t.Cleanup(func() {
		listener.Close()
		r.cut()
		r.wg.Wait()
	})
	return r
}

func (r *relay) host() string { return "unix://" + r.listener.Addr().String() }

func (r *relay) serve(client net.Conn) {
	server, err := net.Dial("unix", r.docker)
	if err != nil {
		client.Close()
		return
	}
	r.mu.Lock()
	r.open[client], r.open[server] = true, true
	deaf := r.deaf
	r.mu.Unlock()
	var both sync.WaitGroup
	both.Go(func() {
		if deaf {
			io.Copy(io.Discard, client)
		} else {
			io.Copy(server, client)
		}
		server.Close()
	})
	both.Go(func() { io.Copy(client, server); client.Close() })
	both.Wait()
	r.mu.Lock()
	delete(r.open, client)
	delete(r.open, server)
	r.mu.Unlock()
}

func (r *relay) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.open {
		c.Close()
	}
}

// next waits for an event that ok accepts, and fails after a minute.
func next(t *testing.T, events <-chan engine.Event, what string, ok func(engine.Event) bool) engine.Event {
	t.Helper()
	deadline := time.After(time.Minute)
	for {
		select {
		case ev, open := <-events:
			if !open {
				t.Fatalf("the stream ended before %s", what)
			}
			if ok(ev) {
				return ev
			}
		case <-deadline:
			t.Fatalf("no event in a minute: %s", what)
		}
	}
}

func TestEventsAndRelist(t *testing.T) {
	p := docker(t)
	relay := newRelay(t, p.Host())
	through, err := engine.Open(t.Context(), relay.host(), zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	defer through.Close()
	ctx, cancel := context.WithCancel(t.Context())
	events := through.Events(ctx, p.instance)
	lost := func(ev engine.Event) bool { return ev.Lost }
	of := func(id, action string) func(engine.Event) bool {
		return func(ev engine.Event) bool { return ev.ID == id && ev.Action == action }
	}

	if first := <-events; !first.Lost {
		t.Fatalf("the first is %+v; it must say that a list is due", first)
	}
	r := p.request(nil, "wait")
	id := p.start(r)
	if ev := next(t, events, "start", of(id, "start")); ev.Labels != r.Labels || time.Since(ev.Time) > time.Minute {
		t.Errorf("got %+v", ev)
	}

	relay.cut()
	next(t, events, "lost after the connection was cut", lost)
	if list, err := through.List(t.Context(), p.instance); err != nil || len(list) != 1 || list[0].State != engine.Running {
		t.Errorf("list: %+v, %v", list, err)
	}

	if err := p.Kill(p.ctx, id); err != nil {
		t.Fatal(err)
	}
	if ev := next(t, events, "die", of(id, "die")); ev.Exit != 137 {
		t.Errorf("got %+v", ev)
	}
	cancel()
	for range events { // ends once the stream is closed
	}
}

func TestADeafDockerIsATimeout(t *testing.T) {
	p := docker(t)
	relay := newRelay(t, p.Host())
	through, err := engine.Open(t.Context(), relay.host(), zaptest.NewLogger(t))
	if err != nil {
		t.Fatal(err)
	}
	defer through.Close()
	relay.mu.Lock()
	relay.deaf = true
	relay.mu.Unlock()
	relay.cut()
	bounded := func() context.Context {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		t.Cleanup(cancel)
		return ctx
	}
	for name, err := range map[string]error{
		"inspect": second(through.Inspect(bounded(), "any")),
		"list":    second(through.List(bounded(), p.instance)),
		"create":  second(through.Create(bounded(), p.request(nil, "wait"))),
		"start":   through.Start(bounded(), "any"),
		"kill":    through.Kill(bounded(), "any"),
		"remove":  through.Remove(bounded(), "any"),
		"image":   second(through.EnsureImage(bounded(), image, engine.PullPreferCached, nil)),
		"logs":    second(through.Logs(bounded(), "any", engine.LogOptions{})),
	} {
		if !errors.Is(err, engine.ErrTimeout) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := through.Ping(bounded()); err == nil {
		t.Error("ping: no error")
	}
}
