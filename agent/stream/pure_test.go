package stream

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/berth-gpu/berth/agent"
	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/api/agentpb"
)

func TestRetry(t *testing.T) {
	type step struct {
		how      ending
		welcomed bool
	}
	times := func(n int, how ending) (out []step) {
		for range n {
			out = append(out, step{how, false})
		}
		return out
	}
	for _, tt := range []struct {
		name      string
		addresses int
		steps     []step
		want      string
	}{
		{"nobody there: up to three seconds", 1, times(6, broken), "0:250ms 0:500ms 0:1s 0:2s 0:3s 0:3s"},
		{"a stream that broke begins anew", 1, append(times(4, broken), step{broken, true}), "0:250ms 0:500ms 0:1s 0:2s 0:250ms"},
		{"several in turn, each once before the wait grows", 3, times(7, broken), "1:250ms 2:250ms 0:250ms 1:500ms 2:500ms 0:500ms 1:1s"},
		{"an election is short", 2, times(8, notLeader), "1:250ms 0:250ms 1:500ms 0:500ms 1:1s 0:1s 1:1s 0:1s"},
		{"people are slow", 1, times(2, refused), "0:30s 0:30s"},
		{"retired", 1, []step{{retired, true}}, "0:2m0s"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := retry{addresses: tt.addresses}
			var got []string
			for _, s := range tt.steps {
				at := r
				longest := r.next(s.how, s.welcomed, 1)
				if shortest := at.next(s.how, s.welcomed, 0); shortest != longest/2 {
					t.Errorf("from %s to %s, want half", shortest, longest)
				}
				got = append(got, fmt.Sprintf("%d:%s", r.at, longest))
			}
			if s := strings.Join(got, " "); s != tt.want {
				t.Errorf("got  %s\nwant %s", s, tt.want)
			}
		})
	}
}

func TestTold(t *testing.T) {
	now := time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
	view := func(used int64, status string, tasks ...string) *agent.View {
		v := &agent.View{Instance: api.Instance{Name: "m", GPUs: []api.GPU{{ID: "g", UsedMemoryInMiB: used, UtilizationPct: int(used), Slices: []api.Slice{{TaskID: "t", UsedMemoryInMiB: used}}}}}}
		for _, name := range tasks {
			v.Tasks = append(v.Tasks, api.Task{ID: "id-" + name, Name: name, LastStatus: status})
		}
		return v
	}
	newer := view(3, api.StatusRunning, "b", "c")
	newer.Tasks = append(newer.Tasks, api.Task{ID: "id-a-2", Name: "a"})
	var said told
	for _, step := range []struct {
		name  string
		after time.Duration
		view  *agent.View
		want  string
	}{
		{"all", 0, view(1, api.StatusPending, "a", "b"), "full instance [a b]"},
		{"nothing", time.Second, view(1, api.StatusPending, "a", "b"), "-"},
		{"use alone waits", time.Second, view(2, api.StatusPending, "a", "b"), "-"},
		{"and is told in time", useEvery, view(3, api.StatusPending, "a", "b"), "instance []"},
		{"tasks at once", 0, view(3, api.StatusRunning, "a", "b"), "[a b]"},
		{"a further one", 0, view(3, api.StatusRunning, "a", "b", "c"), "[c]"},
		{"a name that comes again is not forgotten", 0, newer, "[a]"},
		{"gone", 0, view(3, api.StatusRunning, "c"), "[] forgotten [a b]"},
	} {
		now = now.Add(step.after)
		r, err := said.report(step.view, now)
		if err != nil {
			t.Fatal(err)
		}
		got := "-"
		if r != nil {
			got = names(r)
			if r.Instance != nil {
				got = "instance " + got
			}
			if r.Full {
				got = "full " + got
			}
			if r.Forgotten != nil {
				got += fmt.Sprint(" forgotten ", r.Forgotten)
			}
		}
		if got != step.want {
			t.Errorf("%s: got %q, want %q", step.name, got, step.want)
		}
	}
}

// taken is a stream whose other end takes what is sent, and says nothing.
type taken struct {
	grpc.ClientStream
	at      []time.Time
	reports []*agentpb.Report
	block   <-chan struct{}
}

func (s *taken) Send(m *agentpb.FromAgent) error {
	if s.block != nil {
		<-s.block
		return errors.New("broken")
	}
	s.at, s.reports = append(s.at, time.Now()), append(s.reports, m.GetReport())
	return nil
}

func (s *taken) Recv() (*agentpb.FromServer, error) { panic("not read") }

func (s *taken) begin(ctx context.Context, m *machine) (*session, context.CancelCauseFunc, context.Context) {
	ctx, cancel := context.WithCancelCause(ctx)
	now := time.Now()
	out := &session{client: &client{log: zap.NewNop(), agent: m.port()}, stream: s, pulse: time.Second, lease: 3 * time.Second,
		stored: make(chan struct{}, 1), answer: answer{told: true}, end: func(how ending, err error) { cancel(&ended{how, err}) }}
	out.logs.chunks = make(chan *agentpb.LogChunk)
	out.heardAt.Store(&now)
	return out, cancel, ctx
}

// A report follows a change within 50 ms, and a storm of changes becomes few reports.
func TestReportsAreGathered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, to := newMachine(), &taken{}
		s, cancel, ctx := to.begin(t.Context(), m)
		done := make(chan struct{})
		go func() { defer close(done); s.send(ctx) }()
		began := time.Now()
		synctest.Wait()
		for i := range 1000 { // one second of it
			m.task(fmt.Sprint(i%10), fmt.Sprint("status-", i))
			time.Sleep(time.Millisecond)
		}
		time.Sleep(2500 * time.Millisecond)
		cancel(nil)
		<-done
		storm, pulses := 0, 0
		for i, at := range to.at {
			if at.Sub(began) > 1050*time.Millisecond {
				pulses++
				if r := to.reports[i]; r.Tasks != nil || r.Instance != nil {
					t.Errorf("a report without a change: %v", r)
				}
				continue
			}
			storm++
			if i > 0 && at.Sub(to.at[i-1]) < betweenSends {
				t.Errorf("two reports within %s", at.Sub(to.at[i-1]))
			}
			if i > 0 && at.Sub(to.at[i-1]) > 50*time.Millisecond {
				t.Errorf("a change waited for %s", at.Sub(to.at[i-1]))
			}
		}
		if storm < 20 || storm > 51 || pulses != 2 {
			t.Errorf("%d reports in the storm, %d pulses after it", storm, pulses)
		}
	})
}

func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		for _, tt := range []struct {
			name string
			hear bool // all the time
			want string
		}{
			{"silent", false, "the server was silent for"},
			{"takes nothing", true, "the server took nothing for"},
		} {
			block := make(chan struct{})
			to := &taken{block: block}
			s, cancel, ctx := to.begin(t.Context(), m)
			began := time.Now()
			done := make(chan struct{}, 2)
			go func() { s.send(ctx); done <- struct{}{} }()
			go func() { s.watch(ctx); done <- struct{}{} }()
			for tt.hear && ctx.Err() == nil {
				now := time.Now()
				s.heardAt.Store(&now)
				time.Sleep(100 * time.Millisecond)
			}
			<-ctx.Done()
			close(block)
			<-done
			<-done
			cancel(nil)
			if took := time.Since(began); took < s.lease || took > s.lease*5/4+100*time.Millisecond || !strings.Contains(context.Cause(ctx).Error(), tt.want) {
				t.Errorf("%s: after %s: %v", tt.name, took, context.Cause(ctx))
			}
		}
	})
}

func TestTimes(t *testing.T) {
	for _, tt := range []struct{ pulse, lease, wantPulse, wantLease time.Duration }{
		{0, 0, 2 * time.Second, 10 * time.Second},
		{time.Second, 10 * time.Second, time.Second, 10 * time.Second},
		{time.Second, 1500 * time.Millisecond, 500 * time.Millisecond, 1500 * time.Millisecond},
		{time.Millisecond, time.Millisecond, betweenSends, shortestLease},
	} {
		pulse, lease := times(&agentpb.Welcome{PulseMs: uint32(tt.pulse.Milliseconds()), LeaseMs: uint32(tt.lease.Milliseconds())})
		if pulse != tt.wantPulse || lease != tt.wantLease {
			t.Errorf("pulse %s, lease %s: got %s and %s", tt.pulse, tt.lease, pulse, lease)
		}
	}
}

// What a change of one task of a full machine costs: 8 GPUs with 48 tasks each.
func BenchmarkReport(b *testing.B) {
	v := &agent.View{Instance: api.Instance{GPUs: make([]api.GPU, 8)}}
	for i := range 8 * 48 {
		id := fmt.Sprint("task-", i)
		v.Tasks = append(v.Tasks, api.Task{ID: id, Name: id, LastStatus: api.StatusRunning, Containers: []api.Container{{Name: "main"}}})
		g := &v.Instance.GPUs[i/48]
		g.Slices = append(g.Slices, api.Slice{TaskID: id, Container: "main"})
	}
	var said told
	now := time.Now()
	if _, err := said.report(v, now); err != nil {
		b.Fatal(err)
	}
	for i := range b.N {
		next := *v
		next.Tasks = append([]api.Task(nil), v.Tasks...)
		next.Tasks[i%len(next.Tasks)].Reason = fmt.Sprint(i)
		if r, err := said.report(&next, now); err != nil || len(r.Tasks) == 0 {
			b.Fatal(r, err)
		}
	}
}
