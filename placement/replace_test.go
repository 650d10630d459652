package placement_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/config"
	"github.com/berth-gpu/berth/placement/replace/dev"
)

// TestReplaceFakes: what no provider can do is refused, with what to do instead.
func TestReplaceFakes(t *testing.T) {
	t.Parallel()
	r, w := serve(t, settings(t)), newWorld(t)
	join(t, w, r, "m1", 1, 80000)
	if no := refused(t, r.client, "POST", at(api.PathReplace, "m1"), nil); no.status != 409 || no.says != "provider: none is configured that could launch the newcomer; `berth drain m1` moves the tasks off this machine" {
		t.Error(no)
	}
	if all := ask[[]api.Replacement](t, r.client, "GET", api.PathReplacements, nil); len(all) != 0 {
		t.Errorf("%+v", all)
	}
}

// TestReplace replaces a machine with a real agent, through restarts of the server: the
// newcomer joins, the tasks move before they are stopped, and the old one is gone.
func TestReplace(t *testing.T) {
	t.Parallel()
	programs, image := programs(t)
	s := settings(t)
	s.Replace.When, s.Provider = config.ReplaceAny, config.ProviderDev
	dir, runs := folder(t), "/run/bc"+short()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	p, err := dev.Open(dev.Options{Dir: dir, RunDir: runs, Berth: filepath.Join(programs, "berth"), Agent: filepath.Join(programs, "berth-agent"),
		GPUs: 1, GPUMemoryMiB: 81920, Server: s.Agents.Listen, Cluster: "test", Settings: map[string]any{"docker.stopTimeout": "1s"}, Log: logger()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	machines := func() (ids []string) {
		all, err := p.List(ctx)
		if err != nil {
			t.Error(err)
		}
		for _, m := range all {
			ids = append(ids, m.ID)
		}
		return ids
	}
	t.Cleanup(func() { forget(image) })
	t.Cleanup(func() {
		ctx, cancel = context.WithTimeout(context.Background(), 90*time.Second)
		defer cancel()
		for _, id := range machines() {
			if err := p.Terminate(ctx, id); err != nil {
				t.Error(err)
			}
		}
		os.RemoveAll(runs)
	})
	if err := p.LoadSample(ctx, image); err != nil {
		t.Fatal(err)
	}
	old, err := p.Launch(ctx, "old-"+short())
	if err != nil {
		t.Fatal(err)
	}
	r := serveOn(t, s, p)
	until(t, "the machine has joined", func() bool { return instance(t, r.client, old.ID).Connected })
	ask[api.Service](t, r.client, "POST", api.PathServices, api.Service{Name: "web", Definition: sampleTask("web", image), DesiredCount: 2, MinimumHealthyPercent: 100, MaximumPercent: 100})
	until(t, "the service runs", func() bool { return service(t, r.client, "web").RunningCount == 2 })

	first := ask[api.Replacement](t, r.client, "POST", at(api.PathReplace, old.ID), nil)
	if again := ask[api.Replacement](t, r.client, "POST", at(api.PathReplace, old.ID), nil); again.ID != first.ID {
		t.Errorf("asked for twice: %+v and %+v", first, again)
	}
	if no := refused(t, r.client, "POST", at(api.PathDrain, old.ID)+"?undo=1", nil); no.status != 409 || !strings.Contains(no.says, "is being replaced") {
		t.Error(no)
	}
	var states []string
	state := func() api.Replacement {
		all := ask[[]api.Replacement](t, r.client, "GET", api.PathReplacements, nil)
		if len(all) != 1 || all[0].ID != first.ID {
			t.Fatalf("%+v", all)
		}
		if !slices.Contains(states, all[0].State) {
			states = append(states, all[0].State)
		}
		return all[0]
	}
	lowest, restarts := 2, 0
	for deadline := time.Now().Add(2 * time.Minute); state().State != "DONE"; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			said, _ := os.ReadFile(p.LogFile(state().Newcomer))
			t.Fatalf("it does not end: %+v after %q\n%+v\nits log: %s", state(), states, instance(t, r.client, state().Newcomer), said[max(0, len(said)-4000):])
		}
		if running := len(containers(t, old.ID)) + len(containers(t, state().Newcomer)); state().Newcomer != "" {
			lowest = min(lowest, running)
		}
		if len(states) > restarts+1 { // amid each state
			restarts++
			r.stop(t)
			r = serveOn(t, s, p)
		}
	}
	done := state()
	if lowest < 2 || restarts < 2 {
		t.Errorf("at worst %d tasks ran; %d restarts, %q", lowest, restarts, states)
	}
	if ids := machines(); len(ids) != 1 || ids[0] != done.Newcomer || instance(t, r.client, old.ID).Name != "" {
		t.Errorf("%q are left, %+v", ids, done)
	}
	until(t, "the service runs", func() bool { return service(t, r.client, "web").RunningCount == 2 })
	if n := len(containers(t, done.Newcomer)); n != 2 {
		t.Errorf("%d containers at the newcomer", n)
	}
	sound(t, r)
}
