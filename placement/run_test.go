package placement_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/berth-gpu/berth/api"
)

// TestRunTask is a task's life: accepted, placed, ordered, running, over.
func TestRunTask(t *testing.T) {
	t.Parallel()
	r, w := serve(t, settings(t)), newWorld(t)
	ids := run(t, r.client, api.RunTask{Definition: shared("job", 20000)})
	if len(ids) != 1 {
		t.Fatal(ids)
	}
	got := reaches(t, r.client, ids[0], api.StatusPending)
	if got.Reason != "no machine has joined yet" || got.Generation != 0 || got.Instance != "" || got.Group != "family:job" || got.Definition != "job:1" {
		t.Errorf("before any machine: %+v", got)
	}

	m := startMachine(t, w, r, "m1", 2, 80000, func(m *machine) { m.slow = true })
	until(t, "the order is seen", func() bool { return m.ordered(ids[0]) != nil })
	o := m.ordered(ids[0])
	if o.Generation == 0 || len(o.Gpus) != 1 || !strings.HasPrefix(o.Gpus[0], "GPU-m1-") || !strings.Contains(string(o.Definition), `"job"`) || o.Stop != nil {
		t.Errorf("the order is %+v", o)
	}
	got = task(t, r.client, ids[0])
	if got.Instance != "m1" || got.Generation != o.Generation || got.GPUIDs[0] != o.Gpus[0] || got.LastStatus != api.StatusPending {
		t.Errorf("placed: %+v", got)
	}
	m.do(ids[0], func(c *copy) { c.Reason = "pulls its image" })
	until(t, "what it waits for is shown", func() bool { return task(t, r.client, ids[0]).Reason == "pulls its image" })
	if e := ask[api.Explanation](t, r.client, "GET", at(api.PathExplain, ids[0]), nil); e.Says != "it is placed on m1, GPU "+o.Gpus[0]+"; its agent says: pulls its image" {
		t.Errorf("explained: %q", e.Says)
	}
	m.do(ids[0], func(c *copy) { c.Reason = ""; m.runs(c) })
	if got = reaches(t, r.client, ids[0], api.StatusRunning); got.StartedAt == nil || got.Reason != "" || got.Containers[0].LastStatus != api.StatusRunning {
		t.Errorf("running: %+v", got)
	}
	m.exits(ids[0], 3)
	got = reaches(t, r.client, ids[0], api.StatusStopped)
	if got.StopCode != api.StopEssentialExited || got.StoppedAt == nil || got.Containers[0].ExitCode == nil || *got.Containers[0].ExitCode != 3 || got.DesiredStatus != api.StatusStopped {
		t.Errorf("over: %+v", got)
	}
	until(t, "the agent may forget it", func() bool { return m.has(ids[0]) == "" })
	if in := instance(t, r.client, "m1"); in.Remaining != in.Registered || in.GPUs[0].RemainingMemoryInMiB != 80000 || in.GPUs[1].RemainingMemoryInMiB != 80000 {
		t.Errorf("what it held is not free again: %+v", in)
	}
	sound(t, r)
}

// TestStop: an operator's stop of a task that runs, of one that has no place, and of
// one whose agent never heard of it.
func TestStop(t *testing.T) {
	t.Parallel()
	r, w := serve(t, settings(t)), newWorld(t)
	m := join(t, w, r, "m1", 1, 80000)
	stop := func(id string) { ask[struct{}](t, r.client, "POST", at(api.PathStop, id), nil) }

	runs := run(t, r.client, api.RunTask{Definition: shared("runs", 50000)})[0]
	reaches(t, r.client, runs, api.StatusRunning)
	waits := run(t, r.client, api.RunTask{Definition: shared("waits", 50000)})[0]
	stop(waits[:12])
	if got := task(t, r.client, waits); got.LastStatus != api.StatusStopped || got.StopCode != api.StopUserInitiated || got.StoppedAt == nil {
		t.Errorf("stopped before it had a place: %+v", got)
	}
	m.setSlow(true)
	stop(runs)
	until(t, "the agent is told", func() bool { return m.has(runs) == api.StatusDeactivating })
	if o := m.ordered(runs); o.Stop.Code != api.StopUserInitiated || o.Stop.Reason != "stopped by an operator" || o.Definition != nil {
		t.Errorf("the order is %+v", o)
	}
	stop(runs) // again, as after a lost reply
	more := run(t, r.client, api.RunTask{Definition: shared("more", 50000)})[0]
	if got := task(t, r.client, runs); got.LastStatus != api.StatusDeactivating || task(t, r.client, more).Instance != "" {
		t.Errorf("its place is held until its agent says that it has stopped: %+v", got)
	}
	m.setSlow(false)
	if got := reaches(t, r.client, runs, api.StatusStopped); got.StopCode != api.StopUserInitiated {
		t.Errorf("stopped: %+v", got)
	}
	reaches(t, r.client, more, api.StatusRunning)
	stop(more)
	reaches(t, r.client, more, api.StatusStopped)

	// Ordered while the stream is broken, and stopped before it is back.
	m.setUp(false)
	until(t, "its stream is gone", func() bool { return !instance(t, r.client, "m1").Connected })
	m.setUp(true)
	until(t, "it is back", func() bool { return instance(t, r.client, "m1").Connected })
	sound(t, r)
}

// TestBadRequests: each error names the field, the value and the rule.
func TestBadRequests(t *testing.T) {
	t.Parallel()
	r := serve(t, settings(t))
	def := shared("web", 1000)
	ok := api.Service{Name: "taken", Definition: def, DesiredCount: 1, MinimumHealthyPercent: 50, MaximumPercent: 200}
	ask[api.Service](t, r.client, "POST", api.PathServices, ok)
	run(t, r.client, api.RunTask{Definition: def, ClientToken: "t1"})
	with := func(f func(*api.Service)) api.Service {
		s := ok
		f(&s)
		return s
	}
	number := func(n int) *int { return &n }
	for _, c := range []struct {
		method, path string
		in           any
		status       int
		says         string
	}{
		{"POST", api.PathTasks, `{`, 400, "the request's body cannot be read: unexpected EOF"},
		{"POST", api.PathTasks, `{} {}`, 400, "the request's body cannot be read: something follows the request"},
		{"POST", api.PathTasks, `{"conut": 1}`, 400, `the request's body cannot be read: json: unknown field "conut"`},
		{"POST", api.PathTasks, `{"count": 1}`, 400, "taskDefinition: it is missing; give a task definition as RegisterTaskDefinition takes it"},
		{"POST", api.PathTasks, `{"taskDefinition": {"family": "x"}}`, 400, "containerDefinitions"},
		{"POST", api.PathTasks, api.RunTask{Definition: def, Count: -1}, 400, "count: -1 is not within 1 and 100"},
		{"POST", api.PathTasks, api.RunTask{Definition: def, Count: 101}, 400, "count: 101 is not within 1 and 100"},
		{"POST", api.PathTasks, api.RunTask{Definition: def, ClientToken: strings.Repeat("x", 65)}, 400, "clientToken: it has 65 characters; at most 64"},
		{"POST", api.PathTasks, api.RunTask{Definition: shared("other", 1), ClientToken: "t1"}, 409, `clientToken: "t1" was used for web:1, which is another definition; use another one`},
		{"POST", api.PathTasks, `{"taskDefinition": "` + strings.Repeat("x", 1<<20) + `"}`, 400, "the request's body cannot be read: http: request body too large"},
		{"POST", api.PathServices, with(func(s *api.Service) { s.Name = "a b" }), 400, `serviceName: "a b" is not 1 to 255 letters, digits, hyphens and underscores`},
		{"POST", api.PathServices, with(func(s *api.Service) { s.Name = "" }), 400, `serviceName: "" is not 1 to 255`},
		{"POST", api.PathServices, with(func(s *api.Service) { s.DesiredCount = -1 }), 400, "desiredCount: -1 is not within 0 and 5000"},
		{"POST", api.PathServices, with(func(s *api.Service) { s.DesiredCount = 5001 }), 400, "desiredCount: 5001 is not within 0 and 5000"},
		{"POST", api.PathServices, with(func(s *api.Service) { s.MinimumHealthyPercent = 101 }), 400, "minimumHealthyPercent: 101 is not within 0 and 100"},
		{"POST", api.PathServices, with(func(s *api.Service) { s.MaximumPercent = 99 }), 400, "maximumPercent: 99 is not within 100 and 1000"},
		{"POST", api.PathServices, with(func(s *api.Service) { s.StopAfterSeconds = -1 }), 400, "disconnectStopAfterSeconds: -1 is not within 0 and 86400"},
		{"POST", api.PathServices, with(func(s *api.Service) { s.StopAfterSeconds = 86401 }), 400, "disconnectStopAfterSeconds: 86401 is not within 0 and 86400"},
		{"POST", api.PathServices, with(func(s *api.Service) { s.StopAfterSeconds = 18446744074 }), 400, "disconnectStopAfterSeconds: 18446744074 is not within 0 and 86400"},
		{"POST", api.PathServices, with(func(s *api.Service) { s.Definition = nil }), 400, "taskDefinition: it is missing"},
		{"POST", api.PathServices, with(func(s *api.Service) { s.DesiredCount = 2 }), 409, `serviceName: there is a service "taken" already, and it is another one`},
		{"POST", at(api.PathService, "taken"), api.ServiceUpdate{DesiredCount: number(-5)}, 400, "desiredCount: -5 is not within 0 and 5000"},
		{"POST", at(api.PathService, "taken"), api.ServiceUpdate{StopAfterSeconds: number(18446744074)}, 400, "disconnectStopAfterSeconds: 18446744074 is not"},
		{"POST", at(api.PathService, "none"), api.ServiceUpdate{}, 404, `service "none": there is no such service`},
		{"DELETE", at(api.PathService, "none"), nil, 404, `service "none": there is no such service`},
		{"POST", at(api.PathStop, "feed"), nil, 404, `task "feed": there is no such task`},
		{"GET", at(api.PathExplain, "feed"), nil, 404, `task "feed": there is no such task`},
		{"GET", at(api.PathLogs, "feed"), nil, 404, `task "feed": there is no such task`},
		{"GET", at(api.PathLogs, "feed") + "?tail=0", nil, 400, `tail: "0" is not a number of lines from 1 up`},
		{"GET", api.PathEvents + "?after=x", nil, 400, `after: "x" is not the number of an event`},
		{"POST", at(api.PathDrain, "m9"), nil, 404, `instance "m9": there is none of that name`},
		{"POST", at(api.PathReplace, "m9"), nil, 404, `instance "m9": there is none of that name`},
		{"DELETE", at(api.PathInstance, "m9"), nil, 404, `instance "m9": there is none of that name`},
	} {
		got := refused(t, r.client, c.method, c.path, c.in)
		if got.status != c.status || !strings.Contains(got.says, c.says) {
			t.Errorf("%s %s %.80s:\n got %v\nwant %d: %s", c.method, c.path, fmt.Sprintf("%+v", c.in), got, c.status, c.says)
		}
	}
	if res, err := r.http.Get("http://berth/v1/nothing"); err != nil || res.StatusCode != http.StatusNotFound {
		t.Errorf("a path that is none: %v %v", res, err)
	}
	if n := len(tasks(t, r.client)); n != 2 {
		t.Errorf("%d tasks, want the 2 that were accepted", n)
	}
}

// TestClientToken: a request that is sent again gives the same tasks, also when the
// server was restarted in between.
func TestClientToken(t *testing.T) {
	t.Parallel()
	s := settings(t)
	r := serve(t, s)
	in := api.RunTask{Definition: shared("job", 1000), Count: 5, ClientToken: "once"}
	first := run(t, r.client, in)
	if again := run(t, r.client, in); !same(first, again) || len(first) != 5 {
		t.Errorf("%v, and again %v", first, again)
	}
	r.stop(t)
	r = serve(t, s)
	if again := run(t, r.client, in); !same(first, again) {
		t.Errorf("%v, and after a restart %v", first, again)
	}
	in.ClientToken = ""
	if other := run(t, r.client, in); same(first, other) {
		t.Error("a request without a token is a new one")
	}
	if n := len(tasks(t, r.client)); n != 10 {
		t.Errorf("%d tasks, want 10", n)
	}
}

func same(a, b []string) bool {
	in := map[string]bool{}
	for _, id := range a {
		in[id] = true
	}
	for _, id := range b {
		if !in[id] {
			return false
		}
	}
	return len(a) == len(b)
}
