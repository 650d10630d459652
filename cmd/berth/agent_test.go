package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
)

var update = flag.Bool("update", false, "rewrite the stored outputs under testdata")

// noon is when every test of this package happens.
var noon = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

// TestMain lets the test binary be berth itself, for the tests that need a process
// on a terminal.
func TestMain(m *testing.M) {
	if os.Getenv("BERTH_TEST_MAIN") == "1" {
		main()
		return
	}
	os.Exit(m.Run())
}

// agent is a small agent: the local API over real HTTP on a real unix socket, with
// whatever machine a test puts into it.
type agent struct {
	socket string
	close  func()

	mu       sync.Mutex
	instance api.Instance
	tasks    []api.Task
	checks   []api.Check
	log      string   // what every container wrote
	asked    []string // requests, in order
	stopping int      // how many GETs of the tasks a stop takes
	refuse   string   // a message for every POST
}

func startAgent(t *testing.T) *agent {
	t.Helper()
	// Not t.TempDir: with a long test name its path does not fit sun_path.
	dir, err := os.MkdirTemp("", "berth")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	a := &agent{socket: filepath.Join(dir, "agent.sock"), instance: twoGPUs(), tasks: sixTasks()}
	l, err := net.Listen("unix", a.socket)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+api.PathInstances, func(w http.ResponseWriter, _ *http.Request) { a.answer(w, []any{a.instance}) })
	mux.HandleFunc("GET "+api.PathTasks, a.listTasks)
	mux.HandleFunc("GET "+api.PathDoctor, func(w http.ResponseWriter, _ *http.Request) { a.answer(w, a.checks) })
	mux.HandleFunc("POST "+api.PathStop, a.stop)
	mux.HandleFunc("GET "+api.PathLogs, a.logs)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.asked = append(a.asked, r.Method+" "+r.URL.RequestURI())
		mux.ServeHTTP(w, r)
	})}
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(l) }()
	a.close = func() { srv.Close(); <-served }
	t.Cleanup(a.close)
	return a
}

func (a *agent) answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

func (a *agent) fail(w http.ResponseWriter, code int, format string, args ...any) {
	w.WriteHeader(code)
	a.answer(w, api.Error{Message: fmt.Sprintf(format, args...)})
}

func (a *agent) listTasks(w http.ResponseWriter, _ *http.Request) {
	for i := range a.tasks {
		if t := &a.tasks[i]; t.LastStatus == api.StatusDeactivating {
			if a.stopping--; a.stopping <= 0 {
				t.LastStatus = api.StatusStopped
			}
		}
	}
	a.answer(w, a.tasks)
}

func (a *agent) stop(w http.ResponseWriter, r *http.Request) {
	if a.refuse != "" {
		a.fail(w, http.StatusConflict, "%s", a.refuse)
		return
	}
	for i := range a.tasks {
		if t := &a.tasks[i]; t.ID == r.PathValue("id") {
			t.LastStatus, t.DesiredStatus = api.StatusDeactivating, api.StatusStopped
			t.StopCode, t.StoppedReason = "UserInitiated", "stopped by an operator"
			w.WriteHeader(http.StatusAccepted)
			return
		}
	}
	a.fail(w, http.StatusNotFound, "no task %q", r.PathValue("id"))
}

func (a *agent) logs(w http.ResponseWriter, r *http.Request) {
	lines := strings.SplitAfter(a.log, "\n")
	if n := r.FormValue("tail"); n != "" {
		var tail int
		fmt.Sscan(n, &tail)
		lines = lines[max(0, len(lines)-1-tail):]
	}
	fmt.Fprint(w, strings.Join(lines, ""))
	if r.FormValue("follow") == "1" {
		w.(http.Flusher).Flush()
		a.mu.Unlock() // the others go on while this one stays
		<-r.Context().Done()
		a.mu.Lock()
	}
}

// requests is what has been asked since the last call.
func (a *agent) requests() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	asked := a.asked
	a.asked = nil
	return asked
}

// berth runs one command against the agent and returns what it printed.
func (a *agent) berth(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	return berth(t, map[string]string{"BERTH_SOCKET": a.socket}, args...)
}

func berth(t *testing.T, env map[string]string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	app := newApp(nil, &out, &errs, func(name string) string { return env[name] })
	app.now = func() time.Time { return noon }
	app.poll = 5 * time.Millisecond
	app.serverSocket = "/no/such/server.sock"
	code = run(context.Background(), app, args)
	return out.String(), errs.String(), code
}

// golden compares got with testdata/name, which -update rewrites.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v (run go test ./cmd/berth -update)", err)
	}
	if got != string(want) {
		t.Errorf("%s differs; run go test ./cmd/berth -update and read the diff\ngot:\n%s\nwant:\n%s", path, got, want)
	}
}

const (
	gpu0 = "GPU-5a1f7c52-0d3e-4b7a-9a61-2f0c8d1e6b00"
	gpu1 = "GPU-5a1f7c52-0d3e-4b7a-9a61-2f0c8d1e6b01"
)

// twoGPUs is a machine in the middle of its work: GPU 0 shared by three slices, GPU
// 1 closed because its daemon has ended, with one slice still running.
func twoGPUs() api.Instance {
	return api.Instance{
		Name: "node-1", Cluster: "default", Version: "0.1.0", Status: "ACTIVE", BootID: "b",
		StartedAt: noon.Add(-26 * time.Hour), DriverVersion: "580.159.03",
		Registered: api.Resources{CPU: 16384, MemoryMiB: 131072},
		Remaining:  api.Resources{CPU: 14080, MemoryMiB: 122880},
		GPUs: []api.GPU{
			{ID: gpu0, SharingMode: api.ModeNvidiaMPS, TotalMemoryInMiB: 80896, RemainingMemoryInMiB: 9216, ContainerCount: 3,
				Index: 0, Name: "NVIDIA H100 80GB HBM3", UsedMemoryInMiB: 34210, UtilizationPct: 37, ComputeMode: "EXCLUSIVE_PROCESS", Held: true,
				MPS: api.MPS{State: "HELD", DaemonPID: 4121, ServerPID: 4130, Restarts: 1, Failures: 1, Budget: 5, PipeDirectory: "/run/berth/mps/" + gpu0 + "/pipe"},
				Slices: []api.Slice{
					{TaskID: "3f2a9c1b7d5e4f60a1b2c3d4e5f60718", Family: "llm-small", Container: "server", MemoryInMiB: 20480, MaxComputePct: 25, UsedMemoryInMiB: 18102, LastStatus: "RUNNING"},
					{TaskID: "8c0d1e2f3a4b5c6d7e8f90a1b2c3d4e5", Family: "embedder", Container: "model", MemoryInMiB: 20480, UsedMemoryInMiB: 0, LastStatus: "PENDING"},
					{TaskID: "a17b3c5d7e9f10213243546576879809", Family: "ranker", Container: "ranker", MemoryInMiB: 30720, MaxComputePct: 100, UsedMemoryInMiB: 16078, LastStatus: "RUNNING"},
				}, Since: noon.Add(-3 * time.Hour)},
			{ID: gpu1, SharingMode: api.ModeNvidiaMPS, TotalMemoryInMiB: 80896, RemainingMemoryInMiB: 60416, ContainerCount: 1,
				Index: 1, Name: "NVIDIA H100 80GB HBM3", UsedMemoryInMiB: 4096, ComputeMode: "EXCLUSIVE_PROCESS",
				HeldReason: "the control daemon (pid 977) has ended; closed until 1 container has ended",
				MPS:        api.MPS{State: "DRAINING", Reason: "daemon lost", Restarts: 0, Failures: 1, Budget: 5, PipeDirectory: "/run/berth/mps/" + gpu1 + "/pipe"},
				Slices: []api.Slice{
					{TaskID: "a1ff00112233445566778899aabbccdd", Family: "vision", Container: "detector", MemoryInMiB: 20480, MaxComputePct: 50, UsedMemoryInMiB: 4066, LastStatus: "RUNNING"},
				}, Since: noon.Add(-14 * time.Second)},
		},
		Health: api.Health{OverallStatus: api.HealthImpaired, Details: []api.HealthDetail{
			{Type: "CONTAINER_RUNTIME", Status: api.HealthOK},
			{Type: "ACCELERATED_COMPUTE", Status: api.HealthImpaired, StatusReason: "GPU 1: daemon lost", LastStatusChange: noon.Add(-14 * time.Second)},
		}},
		Waiting: []api.Waiting{{Name: "60-big", Family: "big", Reasons: []string{
			"GPU 0: needs 30720 MiB, 9216 MiB are free",
			"GPU 1: is not held: the control daemon (pid 977) has ended",
		}}},
		Problems: []api.BadInput{{Name: "99-bad.json", Problems: []string{
			"containerDefinitions[0].resourceRequirements[0]: GPU has both value and sharingStrategy; give one",
		}}},
	}
}

func sixTasks() []api.Task {
	one, zero := 1, 0
	started := noon.Add(-3 * time.Hour)
	stopped := noon.Add(-time.Minute)
	return []api.Task{
		{ID: "8c0d1e2f3a4b5c6d7e8f90a1b2c3d4e5", Name: "20-embedder", Family: "embedder", Generation: 2, LastStatus: api.StatusPending, DesiredStatus: api.StatusRunning,
			Reason: "its image is being pulled", GPUIDs: []string{gpu0}, CreatedAt: noon.Add(-9 * time.Second),
			Containers: []api.Container{{Name: "model", Image: "embedder:3", LastStatus: api.StatusPending, GPUIDs: []string{gpu0}, MemoryInMiB: 20480}}},
		{ID: "3f2a9c1b7d5e4f60a1b2c3d4e5f60718", Name: "10-llm-small", Family: "llm-small", Generation: 1, LastStatus: api.StatusRunning, DesiredStatus: api.StatusRunning,
			GPUIDs: []string{gpu0}, CreatedAt: started, StartedAt: &started,
			Containers: []api.Container{
				{Name: "server", RuntimeID: "e1", Image: "llm:1", LastStatus: api.StatusRunning, HealthStatus: "HEALTHY", RestartCount: 1, GPUIDs: []string{gpu0}, MemoryInMiB: 20480, MaxComputePct: 25},
				{Name: "metrics", RuntimeID: "e2", Image: "metrics:1", LastStatus: api.StatusRunning},
			}},
		{ID: "a17b3c5d7e9f10213243546576879809", Name: "30-ranker", Family: "ranker", Generation: 1, LastStatus: api.StatusRunning, DesiredStatus: api.StatusRunning,
			GPUIDs: []string{gpu0}, CreatedAt: noon.Add(-50 * time.Hour), StartedAt: &started,
			Containers: []api.Container{{Name: "ranker", RuntimeID: "e3", Image: "ranker:9", LastStatus: api.StatusRunning, GPUIDs: []string{gpu0}, MemoryInMiB: 30720, MaxComputePct: 100}}},
		{ID: "a1ff00112233445566778899aabbccdd", Name: "40-vision", Family: "vision", Generation: 4, LastStatus: api.StatusRunning, DesiredStatus: api.StatusRunning,
			GPUIDs: []string{gpu1}, CreatedAt: noon.Add(-7 * time.Minute), StartedAt: &started,
			Containers: []api.Container{{Name: "detector", RuntimeID: "e4", Image: "vision:2", LastStatus: api.StatusRunning, HealthStatus: "UNKNOWN", GPUIDs: []string{gpu1}, MemoryInMiB: 20480, MaxComputePct: 50}}},
		{ID: "00aa00112233445566778899aabbccdd", Name: "50-whole", Family: "whole", Generation: 1, LastStatus: api.StatusPending, DesiredStatus: api.StatusRunning,
			Reason: "waits for GPU 1", CreatedAt: noon.Add(-2 * time.Second)},
		{ID: "f00d00112233445566778899aabbccdd", Name: "20-embedder", Family: "embedder", Generation: 1, LastStatus: api.StatusStopped, DesiredStatus: api.StatusStopped,
			StopCode: "EssentialContainerExited", StoppedReason: "essential container model exited", GPUIDs: []string{gpu0}, CreatedAt: started, StoppedAt: &stopped,
			Containers: []api.Container{
				{Name: "model", RuntimeID: "e5", Image: "embedder:3", LastStatus: api.StatusStopped, ExitCode: &one, Reason: "OutOfMemoryError: container killed due to memory usage", GPUIDs: []string{gpu0}, MemoryInMiB: 20480},
				{Name: "init", RuntimeID: "e6", Image: "init:1", LastStatus: api.StatusStopped, ExitCode: &zero},
			}},
	}
}
