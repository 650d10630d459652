package agentapi_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-gpu/berth/api/agentpb"
	"github.com/berth-gpu/berth/placement/agentapi"
	"github.com/berth-gpu/berth/placement/agentapi/agentapitest"
)

// asked is the next request for a log that reaches the agent.
func asked(t *testing.T, a *agentapitest.Agent) *agentpb.LogRequest {
	t.Helper()
	for {
		m, err := a.Receive()
		if err != nil {
			t.Fatal(err)
		}
		if request := m.GetLog(); request != nil {
			return request
		}
	}
}

// cancelled waits for the agent to be told that nobody reads a log any more.
func cancelled(t *testing.T, a *agentapitest.Agent, id uint64) {
	t.Helper()
	for {
		m, err := a.Receive()
		if err != nil {
			t.Fatal(err)
		}
		if c := m.GetLogCancel(); c != nil {
			if c.Id != id {
				t.Errorf("log %d is cancelled, want %d", c.Id, id)
			}
			return
		}
	}
}

func (r *rig) log(ctx context.Context, instance string, request *agentpb.LogRequest) io.ReadCloser {
	r.t.Helper()
	l, err := r.server.Logs(ctx, instance, request)
	if err != nil {
		r.t.Fatal(err)
	}
	return l
}

// reads reads this much, and no more.
func reads(t *testing.T, l io.Reader, want string) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(l, got); err != nil || string(got) != want {
		t.Fatalf("%q, %v, want %q", got, err, want)
	}
}

func TestLogs(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		a := r.agent("i-1", "a")
		request := &agentpb.LogRequest{Task: "t", Container: "c", Follow: true, Tail: 3}
		l := r.log(t.Context(), "i-1", request)
		other := r.log(t.Context(), "i-1", &agentpb.LogRequest{Task: "u"})
		got := asked(t, a)
		want := proto.CloneOf(request)
		want.Id, want.Window = got.Id, 256<<10
		if !proto.Equal(got, want) || request.Id != 0 {
			t.Errorf("the agent is asked for %v, want %v", got, want)
		}
		second := asked(t, a)

		a.Log(&agentpb.LogChunk{Id: got.Id, Data: []byte("one\ntw")})
		reads(t, l, "one\n")
		a.Log(&agentpb.LogChunk{Id: got.Id, Data: []byte("o\n")})
		reads(t, l, "two\n")
		// It is followed for as long as nothing comes.
		line := make(chan string)
		go func() {
			b := make([]byte, 100)
			n, _ := l.Read(b)
			line <- string(b[:n])
		}()
		for range 20 {
			time.Sleep(lease / 2)
			a.Report(&agentpb.Report{})
		}
		a.Log(&agentpb.LogChunk{Id: got.Id, Data: []byte("three\n")})
		if s := <-line; s != "three\n" {
			t.Errorf("followed: %q", s)
		}
		a.Log(&agentpb.LogChunk{Id: got.Id, Data: []byte("end"), End: true})
		a.Log(&agentpb.LogChunk{Id: got.Id, Data: []byte("of a log that has ended")})
		a.Log(&agentpb.LogChunk{Id: 99, Data: []byte("of a log that never was")})
		if rest, err := io.ReadAll(l); err != nil || string(rest) != "end" {
			t.Errorf("the end: %q, %v", rest, err)
		}
		if n, err := l.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Errorf("after the end: %d, %v", n, err)
		}

		a.Log(&agentpb.LogChunk{Id: second.Id, Data: []byte("of u")})
		a.Log(&agentpb.LogChunk{Id: second.Id, End: true, Error: "task u: no container of it was made yet"})
		if rest, err := io.ReadAll(other); string(rest) != "of u" || err == nil || err.Error() != "task u: no container of it was made yet" {
			t.Errorf("the other: %q, %v", rest, err)
		}
		l.Close()
		other.Close()
		// There is nothing to cancel of what has ended.
		time.Sleep(time.Millisecond)
		r.server.Send("i-1", r.session("i-1"), &agentpb.Orders{Revision: 1})
		for {
			m, err := a.Receive()
			if err != nil || m.GetLogCancel() != nil {
				t.Fatalf("after the logs: %v, %v", m, err)
			}
			if m.GetOrders() != nil {
				break
			}
		}
		a.Close()
	})
}

func TestLogOfNobody(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		for _, name := range []string{"i-1", "i-2"} {
			if _, err := r.server.Logs(t.Context(), name, &agentpb.LogRequest{}); !errors.Is(err, agentapi.ErrNotConnected) || !strings.HasPrefix(err.Error(), "instance "+name+": ") {
				t.Error(err)
			}
			r.agent("i-1", "a").Close()
			r.wait(func() bool { return len(r.heard()) >= 2 }, func() string { return "not gone" })
		}
	})
}

func TestLogsReaderGoes(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		a := r.agent("i-1", "a")

		closed := r.log(t.Context(), "i-1", &agentpb.LogRequest{Task: "t"})
		id := asked(t, a).Id
		reading := make(chan error)
		go func() {
			_, err := closed.Read(make([]byte, 1))
			reading <- err
		}()
		time.Sleep(time.Millisecond)
		closed.Close()
		closed.Close()
		if err := <-reading; !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("read while closed: %v", err)
		}
		cancelled(t, a, id)

		ctx, cancel := context.WithCancel(t.Context())
		ended := r.log(ctx, "i-1", &agentpb.LogRequest{Task: "t", Follow: true})
		id = asked(t, a).Id
		a.Log(&agentpb.LogChunk{Id: id, Data: []byte("one")})
		reads(t, ended, "one")
		cancel()
		if _, err := ended.Read(make([]byte, 1)); !errors.Is(err, context.Canceled) {
			t.Errorf("read when ctx has ended: %v", err)
		}
		cancelled(t, a, id)
		ended.Close()
		a.Close()
	})
}

func TestAgentVanishesWhileItsLogIsRead(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		a := r.agent("i-1", "a")
		l := r.log(t.Context(), "i-1", &agentpb.LogRequest{Task: "t"})
		id := asked(t, a).Id
		a.Log(&agentpb.LogChunk{Id: id, Data: []byte("what came")})
		time.Sleep(time.Millisecond)
		r.server.Close("i-1", r.session("i-1"), nil)
		got, err := io.ReadAll(l)
		if want := "instance i-1: its agent's stream ended while the log was read: the placement server closed the stream"; string(got) != "what came" || err == nil || err.Error() != want {
			t.Errorf("%q, %v, want %s", got, err, want)
		}
		l.Close()
		a.Close()
	})
}

// sendLog is an agent's part: all of data, as far as it is allowed, while everything that
// it receives goes to other.
func sendLog(a *agentapitest.Agent, request *agentpb.LogRequest, data []byte, other func(*agentpb.FromServer)) error {
	allowed := request.Window
	for {
		for allowed > 0 && len(data) > 0 {
			n := min(uint64(len(data)), allowed, 32<<10)
			if err := a.Log(&agentpb.LogChunk{Id: request.Id, Data: data[:n]}); err != nil {
				return err
			}
			data, allowed = data[n:], allowed-n
		}
		if len(data) == 0 {
			return a.Log(&agentpb.LogChunk{Id: request.Id, End: true})
		}
		m, err := a.Receive()
		if err != nil {
			return err
		}
		if more := m.GetLogMore(); more != nil && more.Id == request.Id {
			allowed += more.Bytes
		} else if m.GetLogCancel().GetId() == request.Id {
			return errors.New("cancelled")
		} else {
			other(m)
		}
	}
}

func TestSlowLogReaderDelaysNothingElse(t *testing.T) {
	data := bytes.Repeat([]byte("0123456789abcde\n"), 2<<20/16)
	bubble(t, func(t *testing.T, r *rig) {
		a := r.agent("i-1", "a")
		l := r.log(t.Context(), "i-1", &agentpb.LogRequest{Task: "t"})
		request := asked(t, a)
		revisions := make(chan uint64, 1)
		sent := make(chan error, 1)
		go func() {
			sent <- sendLog(a, request, data, func(m *agentpb.FromServer) {
				if orders := m.GetOrders(); orders != nil {
					revisions <- orders.Revision
				}
			})
		}()
		// For a minute there is always data that nobody reads.
		one := make([]byte, 1)
		for i := range 6 {
			if _, err := l.Read(one); err != nil {
				t.Fatal(err)
			}
			time.Sleep(lease - time.Second)
			start := time.Now()
			r.server.Send("i-1", r.session("i-1"), &agentpb.Orders{Revision: uint64(i)})
			if got := <-revisions; got != uint64(i) {
				t.Errorf("orders %d, want %d", got, i)
			}
			before := r.reported("i-1")
			if err := a.Report(&agentpb.Report{}); err != nil {
				t.Fatal(err)
			}
			r.wait(func() bool { return r.reported("i-1") > before }, func() string { return "no report" })
			if took := time.Since(start); took > 10*time.Millisecond {
				t.Errorf("orders and report took %v", took)
			}
		}
		if rest, err := io.ReadAll(l); err != nil || !bytes.Equal(rest, data[6:]) {
			t.Errorf("%d bytes, %v, want the other %d", len(rest), err, len(data)-6)
		}
		if err := <-sent; err != nil {
			t.Error(err)
		}
		l.Close()
		a.Close()
	})
}

func TestLogThatNobodyReadsIsGivenUp(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		a := r.agent("i-1", "a")
		l := r.log(t.Context(), "i-1", &agentpb.LogRequest{Task: "t", Follow: true})
		request := asked(t, a)
		sent := make(chan error, 1)
		go func() { sent <- sendLog(a, request, make([]byte, 1<<20), func(*agentpb.FromServer) {}) }()
		for range 31 {
			time.Sleep(time.Second)
			a.Report(&agentpb.Report{})
		}
		if err := <-sent; err == nil || err.Error() != "cancelled" {
			t.Errorf("the agent ends with %v", err)
		}
		if _, err := l.Read(make([]byte, 1)); err == nil || err.Error() != "task t: its log waited for 30s to be read, and was given up: read it again, with fewer lines" {
			t.Errorf("the reader ends with %v", err)
		}
		r.until("hello i-1 a")
		l.Close()
		a.Close()
	})
}

func TestLogOfAnAgentThatDoesNotWait(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		a := r.agent("i-1", "a")
		l := r.log(t.Context(), "i-1", &agentpb.LogRequest{Task: "t"})
		id := asked(t, a).Id
		for range 5 {
			if err := a.Log(&agentpb.LogChunk{Id: id, Data: make([]byte, 1<<20)}); err != nil {
				t.Fatal(err)
			}
		}
		cancelled(t, a, id)
		if _, err := l.Read(make([]byte, 1)); err == nil || err.Error() != "task t: its log comes faster than it is read, and its agent does not wait: ask for fewer lines, or upgrade berth-agent" {
			t.Errorf("the reader ends with %v", err)
		}
		r.until("hello i-1 a")
		l.Close()
		a.Close()
	})
}

func TestMostLogsAtATime(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		a := r.agent("i-1", "a")
		session := r.session("i-1")
		// The agent is not asked for what was closed before its turn came.
		for revision := range uint64(3) {
			r.server.Send("i-1", session, large(revision))
			time.Sleep(time.Millisecond)
		}
		for i := range 100 {
			r.log(t.Context(), "i-1", &agentpb.LogRequest{Task: fmt.Sprint("closed ", i)}).Close()
		}
		var open []io.Closer
		for i := range 16 {
			open = append(open, r.log(t.Context(), "i-1", &agentpb.LogRequest{Task: fmt.Sprint("open ", i)}))
		}
		if _, err := r.server.Logs(t.Context(), "i-1", &agentpb.LogRequest{}); err == nil || err.Error() != "instance i-1: 16 logs of it are being read, which is the most at a time: end one first" {
			t.Error(err)
		}
		for i := range 16 {
			if request := asked(t, a); request.Task != fmt.Sprint("open ", i) {
				t.Errorf("asked for %q", request.Task)
			}
		}
		for _, l := range open {
			l.Close()
		}
		r.log(t.Context(), "i-1", &agentpb.LogRequest{}).Close()
		a.Close()
	})
}
