package placement_test

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-gpu/berth/agent/gpu/nvmlsim"
	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/mps/mpssim"
	"github.com/berth-gpu/berth/placement/replace/dev"
)

// wire is a way between an agent and its server that can be made to drop what it
// carries, without a word to either side.
type wire struct {
	dropUp, dropDown atomic.Bool // towards the server, and back
	mu               sync.Mutex
	open             []net.Conn
}

// lay lays one from a socket to another one.
func lay(t testing.TB, from, to string) *wire {
	t.Helper()
	l, err := net.Listen("unix", from)
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{}
	var owned sync.WaitGroup
	owned.Go(func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("unix", to)
			if err != nil {
				near.Close()
				continue
			}
			w.mu.Lock()
			w.open = append(w.open, near, far)
			w.mu.Unlock()
			owned.Go(func() { carry(near, far, &w.dropUp) })
			owned.Go(func() { carry(far, near, &w.dropDown) })
		}
	})
	t.Cleanup(func() { l.Close(); w.mend(); owned.Wait() })
	return w
}

// carry ends as soon as either end does, unless it drops: then nobody hears of that.
func carry(from, to net.Conn, drop *atomic.Bool) {
	buf := make([]byte, 64<<10)
	dropped := false
	for {
		n, err := from.Read(buf)
		dropped = dropped || drop.Load()
		if dropped {
			if err != nil {
				return
			}
			continue
		}
		if _, broken := to.Write(buf[:n]); err != nil || broken != nil {
			from.Close()
			to.Close()
			return
		}
	}
}

func (w *wire) cut(up, down bool) { w.dropUp.Store(up); w.dropDown.Store(down) }

// mend lets through what comes from now on; what was cut cannot go on.
func (w *wire) mend() {
	w.cut(false, false)
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.open {
		c.Close()
	}
	w.open = nil
}

// programs are berth's, as make build lays them out, made once, and the name of an image
// of the test's own.
func programs(t *testing.T) (dir, image string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("simulated machines are made as root")
	}
	if _, err := engine.Get("http://docker/_ping"); err != nil {
		t.Skip("no Docker engine answers: ", err)
	}
	used.Store(true)
	dir, err := built()
	if err != nil {
		t.Fatal(err)
	}
	return dir, "berth-cut-" + short() + ":latest"
}

var used atomic.Bool // built

// built is the folder of the programs; TestMain removes it.
var built = sync.OnceValues(func() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "bp-"); err != nil {
		return "", err
	}
	sim := filepath.Join(dir, "sim")
	if err := os.Mkdir(sim, 0o755); err != nil {
		return dir, err
	}
	for _, name := range []string{"berth", "berth-agent"} {
		if out, err := exec.Command("go", "build", "-ldflags=-s -w", "-o", filepath.Join(dir, name), "github.com/berth-gpu/berth/cmd/"+name).CombinedOutput(); err != nil {
			return dir, fmt.Errorf("build %s: %w\n%s", name, err, out)
		}
	}
	ctx := context.Background()
	if err := mpssim.Build(ctx, filepath.Join(sim, "mpssim")); err != nil {
		return dir, err
	}
	library, err := nvmlsim.BuildCached(ctx)
	if err != nil {
		return dir, err
	}
	text, err := os.ReadFile(library)
	if err != nil {
		return dir, err
	}
	return dir, os.WriteFile(filepath.Join(sim, "libnvidia-ml.so.1"), text, 0o755)
})

func short() string {
	id := make([]byte, 3)
	rand.Read(id)
	return hex.EncodeToString(id)
}

// engine speaks to Docker.
var engine = &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
	DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", "/var/run/docker.sock")
	}}}

// simulated makes a machine with a real agent, which reaches its server by a socket.
func simulated(t *testing.T, programs, image, name, socket string) dev.Machine {
	t.Helper()
	dir, runs := folder(t), "/run/bc"+short()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	p, err := dev.Open(dev.Options{Dir: dir, RunDir: runs, Berth: filepath.Join(programs, "berth"), Agent: filepath.Join(programs, "berth-agent"),
		GPUs: 1, GPUMemoryMiB: 81920, Server: "unix:" + socket, Cluster: "test", Settings: map[string]any{"docker.stopTimeout": "1s"}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	if err := p.LoadSample(ctx, image); err != nil {
		t.Fatal(err)
	}
	token := name + "-" + short()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
		defer cancel()
		if t.Failed() {
			said, _ := os.ReadFile(p.LogFile(dev.Name(token)))
			t.Logf("the log of %s: %s", name, said[max(0, len(said)-4000):])
		}
		if err := p.Terminate(ctx, dev.Name(token)); err != nil {
			t.Error(err)
		}
		os.RemoveAll(runs)
	})
	m, err := p.Launch(ctx, token)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func forget(image string) {
	q, _ := http.NewRequest("DELETE", "http://docker/images/"+image, nil)
	if res, err := engine.Do(q); err == nil {
		res.Body.Close()
	}
}

// sampleTask is a definition of one container with a cap on a GPU.
func sampleTask(family, image string) json.RawMessage {
	return fmt.Appendf(nil, `{"family": %q, "containerDefinitions": [{"name": "main", "image": %q, "entryPoint": ["/bin/cuda-client"], "command": ["sleep", "1h"],
		"cpu": 16, "memory": 64, "stopTimeout": 2, "resourceRequirements": [{"type": "GPU", "sharingStrategy": {"nvidiaMps": {"memory": 4096}}}]}]}`, family, image)
}

// containers are those that run on an instance: their names by Docker's id.
func containers(t testing.TB, instance string) map[string]string {
	t.Helper()
	res, err := engine.Get("http://docker/containers/json?filters=" + url.QueryEscape(`{"label":["berth.instance=`+instance+`"],"status":["running"]}`))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var all []struct {
		ID     string `json:"Id"`
		Labels map[string]string
	}
	data, err := io.ReadAll(res.Body)
	if err == nil {
		err = json.Unmarshal(data, &all)
	}
	if err != nil {
		t.Fatalf("%v: %s", err, data)
	}
	out := map[string]string{}
	for _, c := range all {
		out[c.ID] = c.Labels["com.amazonaws.ecs.task-definition-family"]
	}
	return out
}

func of(containers map[string]string, family string) (ids []string) {
	for id, f := range containers {
		if f == family {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// TestCut drops all that real agents and the server say to each other, in both
// directions and in either: tasks go on; those with stop-after end by themselves before
// there is another copy; after the return the older copies stop and nothing else does.
func TestCut(t *testing.T) {
	t.Parallel()
	dir, image := programs(t)
	s := settings(t)
	s.Agents.Lease, s.Agents.Grace = 3*time.Second, 12*time.Second
	r := serve(t, s)
	socket := strings.TrimPrefix(s.Agents.Listen, "unix:")
	w := lay(t, socket+".wire", socket)
	t.Cleanup(func() { forget(image) })
	a := simulated(t, dir, image, "a", socket+".wire").ID
	until(t, "the first machine has joined", func() bool { return instance(t, r.client, a).Connected })
	web := api.Service{Name: "web", Definition: sampleTask("web", image), DesiredCount: 2, MinimumHealthyPercent: 100, MaximumPercent: 200}
	one := api.Service{Name: "one", Definition: sampleTask("one", image), DesiredCount: 1, MinimumHealthyPercent: 100, MaximumPercent: 200, StopAfterSeconds: 4}
	ask[api.Service](t, r.client, "POST", api.PathServices, web)
	alone := run(t, r.client, api.RunTask{Definition: sampleTask("alone", image)})[0]
	until(t, "all of it runs", func() bool {
		return service(t, r.client, "web").RunningCount == 2 && task(t, r.client, alone).LastStatus == api.StatusRunning
	})
	before := containers(t, a)
	if len(before) != 3 {
		t.Fatalf("on %s run %v", a, before)
	}

	// 1. Short cuts: the stream breaks, and nothing else has happened.
	for _, way := range [][2]bool{{true, true}, {true, false}, {false, true}} {
		w.cut(way[0], way[1])
		until(t, "one side has noticed", func() bool { return !instance(t, r.client, a).Connected })
		w.mend()
		until(t, "it is connected again", func() bool { return instance(t, r.client, a).Connected })
		if now := containers(t, a); !equal(now, before) {
			t.Fatalf("after a short cut %v run, before it %v", now, before)
		}
	}

	// 2. A long one, with a service that may not be there twice.
	ask[api.Service](t, r.client, "POST", api.PathServices, one)
	until(t, "it runs, too", func() bool {
		return service(t, r.client, "one").RunningCount == 1 && len(of(containers(t, a), "one")) == 1
	})
	b := simulated(t, dir, image, "b", socket).ID
	until(t, "the second machine has joined", func() bool { return instance(t, r.client, b).Connected })
	w.cut(true, true)
	until(t, "its tasks are elsewhere", func() bool {
		onA, onB := containers(t, a), containers(t, b)
		if n := len(of(onA, "one")) + len(of(onB, "one")); n > 1 {
			t.Fatalf("%d copies of a task with stop-after run", n)
		}
		if len(of(onA, "web")) != 2 || len(of(onA, "alone")) != 1 {
			t.Fatalf("cut off, %v run: want what ran before", onA)
		}
		return len(of(onB, "web")) == 2 && len(of(onB, "one")) == 1
	})
	moved := containers(t, b)
	if v := task(t, r.client, alone); v.DesiredStatus != api.StatusStopped || v.StopCode != api.StopInfrastructure {
		t.Errorf("the standalone task: %+v", v)
	}
	if connectivity(instance(t, r.client, a)) != api.HealthImpaired {
		t.Error("AGENT_CONNECTIVITY is not impaired")
	}

	// 3. And back.
	w.mend()
	until(t, "the older copies have stopped", func() bool { return len(containers(t, a)) == 0 })
	until(t, "the server has them as stopped", func() bool {
		return task(t, r.client, alone).LastStatus == api.StatusStopped && connectivity(instance(t, r.client, a)) == api.HealthOK &&
			instance(t, r.client, a).GPUs[0].ContainerCount == 0
	})
	if now := containers(t, b); !equal(now, moved) {
		t.Errorf("after the return %v run, before it %v", now, moved)
	}
	if service(t, r.client, "web").RunningCount != 2 || service(t, r.client, "one").RunningCount != 1 {
		t.Error("the services do not run")
	}
	sound(t, r)
}

func equal(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if b[k] != v {
			return false
		}
	}
	return true
}
