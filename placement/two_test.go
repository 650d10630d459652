package placement_test

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/config"
	"github.com/berth-gpu/berth/placement/agentapi/agentapitest"
	"github.com/berth-gpu/berth/placement/store"
)

// outside is an etcd for several servers.
func outside(t testing.TB) (endpoint string) {
	t.Helper()
	dir := folder(t)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s, err := store.Open(ctx, store.Options{Dir: dir, Log: logger()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return "unix://" + dir + "/etcd/client.sock"
}

// two are the settings of two servers with one store.
func two(t testing.TB) (a, b *config.Server) {
	t.Helper()
	endpoint := outside(t)
	a, b = settings(t), settings(t)
	a.Etcd.Endpoints, b.Etcd.Endpoints = []string{endpoint}, []string{endpoint}
	return a, b
}

func leading(r *running) bool {
	var about api.Server
	return r.try("GET", api.PathServer, nil, &about) == nil && about.Leader
}

// TestTwoServers: one leads; the other one refuses agents and operators until it does.
func TestTwoServers(t *testing.T) {
	t.Parallel()
	first, second := two(t)
	a, w := serve(t, first), newWorld(t)
	b := follow(t, second)
	m := join(t, w, a, "m1", 1, 80000)
	id := run(t, a.client, api.RunTask{Definition: shared("job", 10000), ClientToken: "once"})[0]
	before := reaches(t, a.client, id, api.StatusRunning)
	told := events(t, a.client)

	if no := refused(t, b.client, "GET", api.PathTasks, nil); no.status != 503 || !strings.Contains(no.says, "does not lead now") {
		t.Error(no)
	}
	if no := refused(t, b.client, "POST", api.PathTasks, api.RunTask{Definition: shared("job", 10000)}); no.status != 503 {
		t.Error(no)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if _, err := agentapitest.Dial(ctx, second.Agents.Listen, agentapitest.Hello("test", "m2", "x")); err == nil || !strings.HasPrefix(err.Error(), "NOT_LEADER: ") {
		t.Errorf("an agent at the one that does not lead: %v", err)
	}

	a.stop(t)
	b.leads(t)
	m.mu.Lock()
	m.target = second.Agents.Listen
	m.mu.Unlock()
	until(t, "the agent is at the other one", func() bool { return instance(t, b.client, "m1").Connected })
	if after := task(t, b.client, id); after.Generation != before.Generation || after.LastStatus != api.StatusRunning || m.has(id) != api.StatusRunning {
		t.Errorf("%+v", after)
	}
	if again := run(t, b.client, api.RunTask{Definition: shared("job", 10000), ClientToken: "once"}); again[0] != id {
		t.Errorf("the token gives %v at the other one", again)
	}
	if again := events(t, b.client); len(again) < len(told) || !slices.Equal(again[:len(told)], told) {
		t.Errorf("%+v\n%+v", again, told)
	}
	sound(t, b)
}

// TestKilledLeader: a leader that is killed, or stands still, is followed within
// seconds; one that wakes finds that it leads no more, and changes nothing.
func TestKilledLeader(t *testing.T) {
	t.Parallel()
	first, second := two(t)
	a := spawn(t, first)
	a.leads(t)
	b, w := follow(t, second), newWorld(t)
	m := join(t, w, a, "m1", 1, 80000)
	m.mu.Lock()
	m.also = second.Agents.Listen
	m.mu.Unlock()
	id := run(t, a.client, api.RunTask{Definition: shared("job", 10000)})[0]
	before := reaches(t, a.client, id, api.StatusRunning)

	a.child.Process.Signal(syscall.SIGSTOP)
	b.leads(t)
	ask[struct{}](t, b.client, "POST", at(api.PathStop, id), nil)
	other := run(t, b.client, api.RunTask{Definition: shared("other", 10000)})[0]

	// What it is asked while it sleeps, it must not do when it wakes.
	var asked sync.WaitGroup
	for range 5 {
		asked.Go(func() {
			var out api.RunTaskAnswer
			if err := a.try("POST", api.PathTasks, api.RunTask{Definition: shared("lost", 1000)}, &out); err == nil {
				t.Errorf("one that leads no more has accepted %+v", out)
			}
		})
	}
	time.Sleep(50 * time.Millisecond) // so that they wait when it wakes
	a.child.Process.Signal(syscall.SIGCONT)
	asked.Wait()
	until(t, "it knows", func() bool { return !leading(a) })
	until(t, "the agent is at the other one", func() bool { return instance(t, b.client, "m1").Connected })
	reaches(t, b.client, id, api.StatusStopped)
	now := reaches(t, b.client, other, api.StatusRunning)
	if now.Generation <= before.Generation || len(tasks(t, b.client)) != 2 {
		t.Errorf("%+v", tasks(t, b.client))
	}
	sound(t, b)

	// And back, by a kill.
	b.stop(t)
	a.leads(t)
	until(t, "the agent is at the first one again", func() bool { return instance(t, a.client, "m1").Connected })
	if v := task(t, a.client, other); v.LastStatus != api.StatusRunning || v.Generation != now.Generation {
		t.Errorf("%+v", v)
	}
	a.kill()
	c := serve(t, second)
	until(t, "the agent is at the next one", func() bool { return instance(t, c.client, "m1").Connected })
	if v := task(t, c.client, other); v.LastStatus != api.StatusRunning || v.Generation != now.Generation {
		data, _ := json.Marshal(v)
		t.Errorf("%s", data)
	}
	sound(t, c)
}
