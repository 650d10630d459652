package placement_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/config"
	"github.com/berth-gpu/berth/placement/fleet"
	"github.com/berth-gpu/berth/placement/store"
)

// damage makes stored records, which the server finds at its next start, such as it
// cannot read.
func damage(t testing.TB, s *config.Server, kind string, keys ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	st, err := store.Open(ctx, store.Options{Dir: s.DataDir, Log: logger()})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	term, err := st.Campaign(ctx, "test")
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		if err := term.Commit(ctx, []store.Group{{{Kind: kind, Key: key, Value: json.RawMessage(`{"id": 5, "name": 5, "revision": "x"}`)}}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := term.Resign(ctx); err != nil {
		t.Fatal(err)
	}
}

// TestDamagedDefinition: what runs of a definition whose record is damaged runs on, and
// its name goes to no other one.
func TestDamagedDefinition(t *testing.T) {
	t.Parallel()
	s := settings(t)
	r, w := serve(t, s), newWorld(t)
	m := join(t, w, r, "m1", 1, 80000)
	in := api.RunTask{Definition: shared("job", 10000), ClientToken: "once"}
	id := run(t, r.client, in)[0]
	reaches(t, r.client, id, api.StatusRunning)
	m.setSlow(true)
	m.setUp(false)
	until(t, "the machine is gone", func() bool { return !instance(t, r.client, "m1").Connected })
	waits := run(t, r.client, api.RunTask{Definition: shared("job", 10000)})[0]
	if v := task(t, r.client, waits); v.Instance != "" {
		t.Fatalf("%+v", v)
	}
	r.stop(t)
	damage(t, s, fleet.KindDefinition, "job:1")

	r = serve(t, s)
	m.setUp(true)
	until(t, "the machine is back", func() bool { return instance(t, r.client, "m1").Connected && m.ordered(id) != nil })
	if v := task(t, r.client, id); v.LastStatus != api.StatusRunning || m.has(id) != api.StatusRunning {
		t.Errorf("%+v", v)
	}
	until(t, "the other one says what it lacks", func() bool {
		return strings.HasPrefix(task(t, r.client, waits).Reason, "its definition job:1 was damaged")
	})
	if again := run(t, r.client, in); again[0] != id {
		t.Errorf("the token gives %v", again)
	}
	if v := task(t, r.client, run(t, r.client, api.RunTask{Definition: shared("job", 20000)})[0]); v.Definition != "job:2" {
		t.Errorf("another definition is %s", v.Definition)
	}
	sound := false
	for _, e := range events(t, r.client) {
		sound = sound || e.Kind == "server" && e.Subject == "definition job:1"
	}
	if !sound {
		t.Error("nothing says that the record was set aside")
	}
}
