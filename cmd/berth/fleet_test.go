package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
)

// fleet is a small placement server: the local API over real HTTP on a real unix socket.
// Each list of tasks that is asked for moves its own tasks one step on: from a wait to a
// place, to RUNNING, and those that run asked for to their end.
type fleet struct {
	socket string
	close  func()

	mu           sync.Mutex
	insts        []api.Instance
	tasks        []api.Task
	services     []api.Service
	replacements []api.Replacement
	events       []api.Event
	explanation  api.Explanation
	moves        []api.DrainMove

	asked   []string          // method, path and query of each act, and its body
	tokens  map[string][]int  // of run: the tasks that it made, by index
	made    int               // tasks so far
	lives   map[string]*life  // of the tasks that it made, by id
	exits   []int             // exit codes of the next tasks that run makes
	lose    int               // so many acts are done and their replies lost
	stale   int               // so many lists of services are of before the last act
	before  []api.Service     // what a stale list says
	hold    bool              // nothing finds a place
	keeps   bool              // services start and stop nothing
	noEnd   bool              // what runs goes on
	replace []api.Replacement // what a replacement goes through, a step per list
	future  bool              // each object has a member that this berth does not know
	drop    int               // so many connections end without an answer
	breaks  int               // so many streams of events break off after an event
}

// life is how a made task goes on.
type life struct {
	batch bool // it ends by itself
	exit  int
}

func startFleet(t *testing.T) *fleet {
	t.Helper()
	dir, err := os.MkdirTemp("", "berth")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	f := &fleet{socket: filepath.Join(dir, "server.sock"), insts: threeMachines(), tasks: fleetTasks(), services: twoServices(),
		replacements: twoReplacements(), events: fourEvents(), explanation: whyPending(), moves: threeMoves(),
		tokens: map[string][]int{}, lives: map[string]*life{}}
	l, err := net.Listen("unix", f.socket)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+api.PathInstances, func(w http.ResponseWriter, _ *http.Request) { f.answer(w, f.insts) })
	mux.HandleFunc("GET "+api.PathTasks, f.listTasks)
	mux.HandleFunc("POST "+api.PathTasks, f.act(f.run))
	mux.HandleFunc("POST "+api.PathStop, f.act(f.stop))
	mux.HandleFunc("GET "+api.PathExplain, func(w http.ResponseWriter, r *http.Request) { f.answer(w, f.explanation) })
	mux.HandleFunc("GET "+api.PathServices, f.listServices)
	mux.HandleFunc("POST "+api.PathServices, f.act(f.create))
	mux.HandleFunc("POST "+api.PathService, f.act(f.update))
	mux.HandleFunc("DELETE "+api.PathService, f.act(f.remove))
	mux.HandleFunc("POST "+api.PathDrain, f.act(f.drain))
	mux.HandleFunc("POST "+api.PathReplace, f.act(f.startReplacement))
	mux.HandleFunc("POST "+api.PathResume, f.act(func(*http.Request, []byte) (any, error) { return f.replacements, nil }))
	mux.HandleFunc("DELETE "+api.PathInstance, f.act(f.leave))
	mux.HandleFunc("GET "+api.PathReplacements, f.listReplacements)
	mux.HandleFunc("GET "+api.PathEvents, f.listEvents)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.drop > 0 {
			f.drop--
			panic(http.ErrAbortHandler)
		}
		mux.ServeHTTP(w, r)
	})}
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(l) }()
	f.close = func() { srv.Close(); <-served }
	t.Cleanup(f.close)
	return f
}

// berth runs one command against the server and returns what it printed.
func (f *fleet) berth(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	return berth(t, map[string]string{"BERTH_SOCKET": f.socket}, args...)
}

func (f *fleet) answer(w http.ResponseWriter, v any) {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	if f.future {
		raw = withFuture(raw)
	}
	_, _ = w.Write(raw)
}

// withFuture adds a member to each object of a list, or to the object.
func withFuture(raw []byte) []byte {
	var any any
	if err := json.Unmarshal(raw, &any); err != nil {
		panic(err)
	}
	add := func(v interface{}) {
		if object, ok := v.(map[string]interface{}); ok {
			object["future"] = "<kept>"
		}
	}
	list, ok := any.([]interface{})
	if object, is := any.(map[string]interface{}); is {
		list, ok = object["tasks"].([]interface{})
		add(any)
	}
	if ok {
		for _, v := range list {
			add(v)
		}
	}
	raw, _ = json.Marshal(any)
	return raw
}

func refuse(w http.ResponseWriter, code int, format string, args ...any) {
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(api.Error{Message: fmt.Sprintf(format, args...)})
}

// act notes a request, does it, and answers, unless the reply is to be lost.
func (f *fleet) act(do func(r *http.Request, body []byte) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		f.asked = append(f.asked, strings.TrimSpace(r.Method+" "+r.URL.RequestURI()+" "+string(body)))
		f.before = slices.Clone(f.services)
		v, err := do(r, body)
		if f.lose > 0 {
			f.lose--
			panic(http.ErrAbortHandler)
		}
		switch {
		case err == nil:
			f.answer(w, v)
		case strings.HasPrefix(err.Error(), "no "):
			refuse(w, http.StatusNotFound, "%s", err)
		default:
			refuse(w, http.StatusConflict, "%s", err)
		}
	}
}

// add makes a task and returns its index.
func (f *fleet) add(t api.Task, l life) int {
	f.made++
	t.ID = fmt.Sprintf("%08x%024x", 0xbe000000+f.made, f.made)
	t.Name, t.LastStatus, t.DesiredStatus, t.CreatedAt = t.ID, api.StatusPending, api.StatusRunning, noon
	if f.hold {
		t.Reason = "no GPU has 20480 MiB left; the nearest miss is node-2, GPU 1: 16384 MiB are free"
	}
	f.lives[t.ID] = &l
	f.tasks = append(f.tasks, t)
	return len(f.tasks) - 1
}

func (f *fleet) run(_ *http.Request, body []byte) (any, error) {
	var req api.RunTask
	if err := json.Unmarshal(body, &req); err != nil {
		return nil, err
	}
	at, again := f.tokens[req.ClientToken]
	if !again {
		for range req.Count {
			l := life{batch: true}
			if len(f.exits) > 0 {
				l.exit, f.exits = f.exits[0], f.exits[1:]
			}
			at = append(at, f.add(api.Task{Family: "chat", Group: "family:chat", Definition: "chat:3"}, l))
		}
		f.tokens[req.ClientToken] = at
	}
	a := api.RunTaskAnswer{}
	for _, i := range at {
		a.Tasks = append(a.Tasks, f.tasks[i])
	}
	return a, nil
}

// step moves each made task one step on.
func (f *fleet) step() {
	for i := range f.tasks {
		t := &f.tasks[i]
		l := f.lives[t.ID]
		switch {
		case l == nil || t.LastStatus == api.StatusStopped:
		case t.DesiredStatus == api.StatusStopped:
			t.LastStatus = api.StatusStopped
		case t.Instance == "":
			if !f.hold {
				t.Instance, t.Generation, t.Reason = "node-2", uint64(f.made), ""
			}
		case t.LastStatus == api.StatusPending:
			t.LastStatus = api.StatusRunning
			t.Containers = []api.Container{{Name: "model", LastStatus: api.StatusRunning}, {Name: "metrics", LastStatus: api.StatusRunning}}
		case l.batch && !f.noEnd:
			sidecar := 143
			t.LastStatus, t.StopCode, t.StoppedReason = api.StatusStopped, api.StopEssentialExited, "essential container model exited"
			t.Containers[0].ExitCode, t.Containers[1].ExitCode = &l.exit, &sidecar
		}
	}
}

func (f *fleet) listTasks(w http.ResponseWriter, r *http.Request) {
	out := []api.Task{}
	for _, t := range f.tasks {
		// A server filters by some of what it is asked for; berth filters again.
		if s := r.FormValue("service"); s == "" || t.Group == "service:"+s {
			out = append(out, t)
		}
	}
	slices.Reverse(out) // the newest first
	f.answer(w, out)
	f.step()
}

func (f *fleet) stop(r *http.Request, _ []byte) (any, error) {
	for i := range f.tasks {
		if t := &f.tasks[i]; t.ID == r.PathValue("id") {
			t.LastStatus, t.DesiredStatus, t.StopCode, t.StoppedReason = api.StatusDeactivating, api.StatusStopped, api.StopUserInitiated, "stopped by an operator"
			f.lives[t.ID] = &life{}
			return struct{}{}, nil
		}
	}
	return nil, fmt.Errorf("no task %q", r.PathValue("id"))
}

func (f *fleet) listServices(w http.ResponseWriter, _ *http.Request) {
	if f.stale > 0 {
		f.stale--
		f.answer(w, f.before)
		return
	}
	// One that is deleted goes with its last task.
	f.services = slices.DeleteFunc(f.services, func(s api.Service) bool {
		return s.Status == serviceDraining && !slices.ContainsFunc(f.tasks, func(t api.Task) bool {
			return serviceOf(t) == s.Name && t.LastStatus != api.StatusStopped
		})
	})
	for i := range f.services {
		if s := &f.services[i]; s.Name != "web" {
			s.RunningCount, s.PendingCount = 0, 0
			for _, t := range f.tasks {
				if serviceOf(t) == s.Name && t.LastStatus == api.StatusRunning {
					s.RunningCount++
				} else if serviceOf(t) == s.Name && t.LastStatus == api.StatusPending {
					s.PendingCount++
				}
			}
		}
	}
	f.answer(w, f.services)
}

func (f *fleet) find(name string) (*api.Service, error) {
	for i := range f.services {
		if f.services[i].Name == name {
			return &f.services[i], nil
		}
	}
	return nil, fmt.Errorf("no service %q; berth service ls lists them", name)
}

// keep starts and stops tasks until the service's count is wanted of its definition.
func (f *fleet) keep(s *api.Service) {
	if f.keeps {
		return
	}
	n := 0
	for i := range f.tasks {
		t := &f.tasks[i]
		if serviceOf(*t) != s.Name || t.DesiredStatus == api.StatusStopped {
			continue
		}
		if n++; t.Definition != s.TaskDefinition || n > s.DesiredCount {
			n--
			t.LastStatus, t.DesiredStatus = api.StatusDeactivating, api.StatusStopped
			f.lives[t.ID] = &life{}
		}
	}
	for ; n < s.DesiredCount; n++ {
		f.add(api.Task{Family: "chat", Group: "service:" + s.Name, Definition: s.TaskDefinition}, life{})
	}
}

func (f *fleet) create(_ *http.Request, body []byte) (any, error) {
	var s api.Service
	if err := json.Unmarshal(body, &s); err != nil {
		return nil, err
	}
	if old, err := f.find(s.Name); err == nil {
		if old.DesiredCount != s.DesiredCount {
			return nil, fmt.Errorf("service %s is there already, with a count of %d; berth service update changes it", s.Name, old.DesiredCount)
		}
		return *old, nil
	}
	s.Status, s.TaskDefinition, s.Definition, s.CreatedAt = "ACTIVE", "chat:3", nil, noon
	f.services = append(f.services, s)
	f.keep(&s)
	return s, nil
}

func (f *fleet) update(r *http.Request, body []byte) (any, error) {
	s, err := f.find(r.PathValue("name"))
	if err != nil {
		return nil, err
	}
	var u api.ServiceUpdate
	if err := json.Unmarshal(body, &u); err != nil {
		return nil, err
	}
	if u.DesiredCount != nil {
		s.DesiredCount = *u.DesiredCount
	}
	if u.Definition != nil {
		s.TaskDefinition = "chat:4"
	}
	f.keep(s)
	return *s, nil
}

func (f *fleet) remove(r *http.Request, _ []byte) (any, error) {
	s, err := f.find(r.PathValue("name"))
	if err != nil {
		return nil, err
	}
	s.Status, s.DesiredCount = serviceDraining, 0
	f.keep(s)
	return *s, nil
}

func (f *fleet) drain(r *http.Request, _ []byte) (any, error) {
	if r.FormValue("dryRun") == "" && r.FormValue("undo") == "" {
		for i := range f.tasks {
			if t := &f.tasks[i]; t.Instance == r.PathValue("name") && serviceOf(*t) != "" {
				t.LastStatus, t.DesiredStatus = api.StatusDeactivating, api.StatusStopped
				f.lives[t.ID] = &life{}
			}
		}
	}
	return api.Drain{Instance: r.PathValue("name"), Moves: f.moves}, nil
}

func (f *fleet) leave(r *http.Request, _ []byte) (any, error) {
	for i, inst := range f.insts {
		switch {
		case inst.Name != r.PathValue("name"):
		case inst.Connected:
			return nil, fmt.Errorf("instance %s: its agent is connected and would join again at once", inst.Name)
		case r.FormValue("force") != "1":
			return nil, fmt.Errorf("instance %s: 1 task is on it and may still run there", inst.Name)
		default:
			f.insts = slices.Delete(f.insts, i, i+1)
			return struct{}{}, nil
		}
	}
	return nil, fmt.Errorf("no instance %q", r.PathValue("name"))
}

func (f *fleet) startReplacement(r *http.Request, _ []byte) (any, error) {
	first := api.Replacement{ID: "be11000000000000000000000000abcd", Instance: r.PathValue("name"), State: "CORDON", Reason: "asked for by an operator", StartedAt: noon, ChangedAt: noon}
	if f.replacements[0].ID != first.ID {
		f.replacements = append([]api.Replacement{first}, f.replacements...)
	}
	return f.replacements[0], nil
}

func (f *fleet) listReplacements(w http.ResponseWriter, _ *http.Request) {
	f.answer(w, f.replacements)
	if len(f.replace) > 0 {
		f.replacements[0], f.replace = f.replace[0], f.replace[1:]
	}
}

func (f *fleet) listEvents(w http.ResponseWriter, r *http.Request) {
	f.asked = append(f.asked, r.Method+" "+r.URL.RequestURI())
	after, _ := strconv.ParseUint(r.FormValue("after"), 10, 64)
	for _, e := range f.events {
		if e.Seq <= after {
			continue
		}
		f.answer(w, e)
		_, _ = w.Write([]byte("\n"))
		if f.breaks > 0 {
			f.breaks--
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}
	}
	if r.FormValue("follow") == "1" {
		w.(http.Flusher).Flush()
		f.mu.Unlock()
		<-r.Context().Done()
		f.mu.Lock()
	}
}

// threeMachines: one with trouble, one with room, one that is cut off.
func threeMachines() []api.Instance {
	first := twoGPUs()
	first.Connected, first.Waiting, first.Problems = true, nil, nil
	first.GPUs[0].Standing = api.GPUOpen
	first.GPUs[1].Standing, first.GPUs[1].StandingReason = api.GPUDraining, "its control daemon has ended"
	machine := func(name string, n int) api.Instance {
		inst := api.Instance{Name: name, Cluster: "default", Version: "0.1.0", Status: api.InstanceActive, Connected: true, StartedAt: noon.Add(-4 * time.Hour),
			DriverVersion: "580.159.03", Registered: first.Registered, Remaining: first.Registered, Health: api.Health{OverallStatus: api.HealthOK}}
		for i := range 2 {
			inst.GPUs = append(inst.GPUs, api.GPU{ID: fmt.Sprintf("GPU-5a1f7c52-0d3e-4b7a-9a61-2f0c8d1e6b%d%d", n, i), SharingMode: api.ModeIdle, TotalMemoryInMiB: 80896,
				RemainingMemoryInMiB: 80896, Index: i, Name: "NVIDIA H100 80GB HBM3", Standing: api.GPUOpen, HeldReason: "IDLE", MPS: api.MPS{State: "IDLE", Budget: 5}})
		}
		return inst
	}
	second, third := machine("node-2", 1), machine("node-3", 2)
	second.GPUs[0].SharingMode, second.GPUs[0].Held, second.GPUs[0].RemainingMemoryInMiB, second.GPUs[0].ContainerCount = api.ModeNvidiaMPS, true, 60416, 1
	second.GPUs[0].Slices = []api.Slice{{TaskID: "77aa00112233445566778899aabbccdd", Family: "chat", Container: "model", MemoryInMiB: 20480, UsedMemoryInMiB: 12288, LastStatus: "RUNNING"}}
	third.Connected, third.Status = false, api.InstanceDraining
	third.Health = api.Health{OverallStatus: api.HealthImpaired, Details: []api.HealthDetail{
		{Type: api.AgentConnectivity, Status: api.HealthImpaired, StatusReason: "nothing was heard of its agent for 10 s", LastStatusChange: noon.Add(-20 * time.Second)}}}
	return []api.Instance{first, second, third}
}

func fleetTasks() []api.Task {
	started := noon.Add(-3 * time.Hour)
	chat := func(id, instance, gpu, status string) api.Task {
		t := api.Task{ID: id, Name: id, Family: "chat", Group: "service:web", Definition: "chat:3", Instance: instance, Generation: 7, LastStatus: status,
			DesiredStatus: api.StatusRunning, CreatedAt: started, StartedAt: &started}
		t.Containers = []api.Container{{Name: "model", Image: "registry.example/chat:7", LastStatus: status, GPUIDs: []string{gpu}, MemoryInMiB: 20480, MaxComputePct: 40}}
		return t
	}
	return []api.Task{
		{ID: "f00d00112233445566778899aabbccdd", Name: "f00d00112233445566778899aabbccdd", Family: "trainer", Group: "family:trainer", Definition: "trainer:1", Instance: "node-1", Generation: 2,
			LastStatus: api.StatusRunning, DesiredStatus: api.StatusRunning, CreatedAt: started,
			Containers: []api.Container{{Name: "trainer", LastStatus: api.StatusRunning, GPUIDs: []string{gpu0}, MemoryInMiB: 30720}}},
		chat("3f2a9c1b7d5e4f60a1b2c3d4e5f60718", "node-1", gpu1, api.StatusRunning),
		chat("77aa00112233445566778899aabbccdd", "node-2", "GPU-5a1f7c52-0d3e-4b7a-9a61-2f0c8d1e6b10", api.StatusRunning),
		{ID: "8c0d1e2f3a4b5c6d7e8f90a1b2c3d4e5", Name: "8c0d1e2f3a4b5c6d7e8f90a1b2c3d4e5", Family: "chat", Group: "service:web", Definition: "chat:3", LastStatus: api.StatusPending,
			DesiredStatus: api.StatusRunning, Replaces: "3f2a9c1b7d5e4f60a1b2c3d4e5f60718", CreatedAt: noon.Add(-12 * time.Second),
			Reason: "no GPU has 81920 MiB left; the nearest miss is node-2, GPU 1: 80896 MiB are free"},
	}
}

func twoServices() []api.Service {
	return []api.Service{
		{Name: "web", Status: "ACTIVE", TaskDefinition: "chat:3", DesiredCount: 2, RunningCount: 2, PendingCount: 1, MinimumHealthyPercent: 100, MaximumPercent: 200,
			CreatedAt: noon.Add(-30 * time.Hour), Reason: "1 task waits for a place"},
		{Name: "embed", Status: "ACTIVE", TaskDefinition: "embed:1", MinimumHealthyPercent: 50, MaximumPercent: 100, StopAfterSeconds: 90, CreatedAt: noon.Add(-time.Minute)},
	}
}

func twoReplacements() []api.Replacement {
	return []api.Replacement{
		{ID: "0b5e00112233445566778899aabbccdd", Instance: "node-3", Newcomer: "dev-4c1d", State: "JOIN", Reason: "nothing was heard of its agent for 70 s", Says: "waits for dev-4c1d to join",
			StartedAt: noon.Add(-40 * time.Second), ChangedAt: noon.Add(-12 * time.Second), Held: "1 of at most 1 is under way"},
		{ID: "0a1100112233445566778899aabbccdd", Instance: "node-0", Newcomer: "node-2", State: replacementDone, Reason: "GPU 1 is FAILED", StartedAt: noon.Add(-5 * time.Hour), ChangedAt: noon.Add(-4 * time.Hour)},
	}
}

func fourEvents() []api.Event {
	return []api.Event{
		{Seq: 41, At: noon.Add(-40 * time.Second), Kind: "instance", Subject: "node-3", Says: "AGENT_CONNECTIVITY is IMPAIRED: nothing was heard of its agent for 10 s", Instance: "node-3"},
		{Seq: 42, At: noon.Add(-14 * time.Second), Kind: "gpu", Subject: "node-1/1", Says: "DRAINING: its control daemon has ended", Instance: "node-1"},
		{Seq: 43, At: noon.Add(-12 * time.Second), Kind: "task", Subject: "8c0d1e2f3a4b5c6d7e8f90a1b2c3d4e5", Says: "is wanted in place of 3f2a9c1b", Service: "web"},
		{Seq: 45, At: noon.Add(-11 * time.Second), Kind: "replacement", Subject: "node-3", Says: "launched dev-4c1d"},
	}
}

func whyPending() api.Explanation {
	return api.Explanation{Task: "8c0d1e2f3a4b5c6d7e8f90a1b2c3d4e5", Status: api.StatusPending, Says: "no machine can take it now", Machines: 3, GPUs: 6, RuledOut: []api.RuledOut{
		{Code: "GPU_MEMORY", GPUs: 3, Nearest: "GPU 1: needs 81920 MiB, 80896 MiB are free", Instance: "node-2"},
		{Code: "GPU_CLOSED", GPUs: 1, Nearest: "GPU 1: DRAINING: its control daemon has ended", Instance: "node-1"},
		{Code: "AGENT_CONNECTIVITY", Machines: 1, GPUs: 2, Nearest: "nothing was heard of its agent for 10 s", Instance: "node-3"},
	}}
}

func threeMoves() []api.DrainMove {
	return []api.DrainMove{
		{Task: "3f2a9c1b7d5e4f60a1b2c3d4e5f60718", Service: "web", Family: "chat", Instance: "node-2", Moving: true, Says: "moves to node-2"},
		{Task: "8c0d1e2f3a4b5c6d7e8f90a1b2c3d4e5", Service: "web", Family: "chat", Moving: true, Says: "moves when there is room: no GPU has 20480 MiB left"},
		{Task: "f00d00112233445566778899aabbccdd", Family: "trainer", Says: "stays until it ends: it is a standalone task"},
	}
}

// serve answers one request at a time at socket until the test ends.
func serve(t *testing.T, socket string, handle http.HandlerFunc) {
	t.Helper()
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		handle(w, r)
	})}
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(l) }()
	t.Cleanup(func() { srv.Close(); <-served })
}
