package main_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/berth-gpu/berth/agent/engine"
	"github.com/berth-gpu/berth/agent/gpu/nvmlsim"
	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/mps/mpssim"
)

// rig is one simulated machine with the real berth-agent on it, as a child
// process, and real Docker. Everything that it makes is its own: folders under
// /tmp (MPS takes at most 87 bytes of path), an instance name, device minors.
type rig struct {
	t        testing.TB
	dir      string
	instance string
	machine  *nvmlsim.Machine
	gpus     []string // uuids by index
	settings map[string]any
	docker   *engine.Engine
	api      *http.Client
	agent    *exec.Cmd
	ended    chan error // of agent
	log      *os.File
}

// built are the programs that every rig uses, made once for the test run.
var built struct {
	once            sync.Once
	dir, agent, sim string
	library         string
	err             error
}

func build(t testing.TB) {
	t.Helper()
	built.once.Do(func() {
		built.dir, built.err = os.MkdirTemp("", "berth-test")
		if built.err != nil {
			return
		}
		ctx := context.Background()
		built.sim, built.agent = filepath.Join(built.dir, "mpssim"), filepath.Join(built.dir, "berth-agent")
		args := []string{"build"}
		if raceEnabled {
			args = append(args, "-race")
		}
		cmd := exec.Command("go", append(args, "-o", built.agent, "github.com/berth-gpu/berth/cmd/berth-agent")...)
		if out, err := cmd.CombinedOutput(); err != nil {
			built.err = fmt.Errorf("build berth-agent: %w\n%s", err, out)
			return
		}
		if built.err = mpssim.Build(ctx, built.sim); built.err != nil {
			return
		}
		if built.library, built.err = nvmlsim.BuildCached(ctx); built.err != nil {
			return
		}
		built.err = loadSample(ctx)
	})
	if built.err != nil {
		t.Fatal(built.err)
	}
}

// sampleImage is this test run's own: nobody else removes it.
var sampleImage = "berth-test-" + strconv.Itoa(os.Getpid()) + ":latest"

func loadSample(ctx context.Context) error {
	docker, err := engine.Open(ctx, "", zap.NewNop())
	if err != nil {
		return err
	}
	defer docker.Close()
	tar, err := mpssim.SampleImage(ctx, built.sim)
	if err != nil {
		return err
	}
	_, err = docker.LoadImage(ctx, sampleImage, tar, nil)
	return err
}

func TestMain(m *testing.M) {
	code := m.Run()
	if built.dir != "" {
		os.RemoveAll(built.dir)
		if docker, err := engine.Open(context.Background(), "", zap.NewNop()); err == nil {
			docker.RemoveImage(context.Background(), sampleImage)
			docker.Close()
		}
	}
	os.Exit(code)
}

// newRig makes the machine; start starts its agent.
func newRig(t testing.TB, memoryMiB ...int64) *rig {
	t.Helper()
	build(t)
	dir, err := os.MkdirTemp("/tmp", "b")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	id := make([]byte, 4)
	rand.Read(id)
	r := &rig{t: t, dir: dir, instance: "test-" + hex.EncodeToString(id)}
	spec := nvmlsim.Spec{}
	for i, mib := range memoryMiB {
		g := nvmlsim.H100()
		g.TotalBytes = mib<<20 + g.ReservedBytes
		g.UUID = fmt.Sprintf("GPU-%08d-%s-4000-8000-000000000000", i, hex.EncodeToString(id[:2]))
		r.gpus = append(r.gpus, g.UUID)
		spec.GPUs = append(spec.GPUs, g)
	}
	if r.machine, err = nvmlsim.Create(filepath.Join(dir, "machine"), built.library, spec); err != nil {
		t.Fatal(err)
	}
	if err := mpssim.Install(context.Background(), r.machine.Dir, built.sim); err != nil {
		t.Fatal(err)
	}
	if r.docker, err = engine.Open(context.Background(), "", zap.NewNop()); err != nil {
		t.Fatal(err)
	}
	r.settings = map[string]any{
		"instance": r.instance, "cluster": "test", "runDir": filepath.Join(dir, "run"), "stateDir": filepath.Join(dir, "state"), "logDir": filepath.Join(dir, "log"),
		"taskDir": filepath.Join(dir, "tasks"), "metricsAddress": "", "logLevel": "debug",
		"docker": map[string]any{"runtime": "plain", "stopTimeout": "5s", "pullBehavior": "prefer-cached"},
		"gpu":    map[string]any{"devRoot": r.machine.Dev(), "nvmlLibrary": r.machine.Library(), "reserve": 0, "sampleEvery": "250ms"},
		"mps": map[string]any{"controlBinary": filepath.Join(r.machine.Bin(), mpssim.ControlName), "path": r.machine.Bin(),
			"probeEvery": "2s", "drainDeadline": "3s", "budget": map[string]any{"failures": 100, "window": "10m"}},
		"reserved": map[string]any{"memory": 0, "cpu": 0},
	}
	os.Mkdir(filepath.Join(dir, "tasks"), 0o755)
	socket := filepath.Join(dir, "run", "agent.sock")
	r.api = &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}}}
	t.Cleanup(r.clear)
	return r
}

// set changes one setting, as "mps.onDaemonLoss".
func (r *rig) set(key string, v any) {
	m := r.settings
	parts := strings.Split(key, ".")
	for _, p := range parts[:len(parts)-1] {
		m = m[p].(map[string]any)
	}
	m[parts[len(parts)-1]] = v
}

func (r *rig) config() string { return filepath.Join(r.dir, "agent.yaml") } // JSON is YAML

// start starts the agent and waits until it answers.
func (r *rig) start() {
	r.t.Helper()
	b, err := json.Marshal(r.settings)
	if err != nil {
		r.t.Fatal(err)
	}
	if err := os.WriteFile(r.config(), b, 0o644); err != nil {
		r.t.Fatal(err)
	}
	if r.log == nil {
		if r.log, err = os.OpenFile(filepath.Join(r.dir, "agent.log"), os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o644); err != nil {
			r.t.Fatal(err)
		}
	}
	r.agent = exec.Command(built.agent, "run", "--config", r.config())
	r.agent.Stdout, r.agent.Stderr = r.log, r.log
	r.agent.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	r.agent.Env = append(os.Environ(), "GORACE=halt_on_error=1")
	if err := r.agent.Start(); err != nil {
		r.t.Fatal(err)
	}
	ended := make(chan error, 1)
	r.ended = ended
	go func(c *exec.Cmd) { ended <- c.Wait() }(r.agent)
	r.until("the agent answers", func() bool {
		select {
		case err := <-ended:
			ended <- err
			r.t.Fatalf("the agent ended: %v", err)
		default:
		}
		_, err := r.ask("GET", api.PathInstances, nil)
		return err == nil
	})
}

// signal sends the agent a signal and waits for its end.
func (r *rig) signal(sig syscall.Signal) error {
	r.t.Helper()
	r.agent.Process.Signal(sig)
	select {
	case err := <-r.ended:
		r.agent = nil
		return err
	case <-time.After(30 * time.Second):
		r.t.Fatalf("the agent did not end within 30 s of %s", sig)
		return nil
	}
}

// clear purges and removes all that is left of the rig.
func (r *rig) clear() {
	if r.agent != nil {
		if err := r.signal(syscall.SIGTERM); err != nil {
			r.t.Errorf("the agent ended with %v after SIGTERM", err)
		}
	}
	if _, err := os.Stat(r.config()); err == nil {
		if out, err := r.run("purge"); err != nil {
			r.t.Errorf("purge: %v\n%s", err, out)
		}
		for _, uuid := range r.gpus {
			for _, find := range []func(string, string) ([]int, error){mpssim.Daemons, mpssim.Servers} {
				if pids, _ := find(r.machine.Dir, uuid); len(pids) > 0 {
					r.t.Errorf("purge left processes of %s: %v", uuid, pids)
					for _, pid := range pids {
						syscall.Kill(pid, syscall.SIGKILL)
					}
				}
			}
			if mode, err := r.machine.ComputeMode(uuid); err != nil || mode != 0 {
				spec, _ := r.machine.Spec()
				if g := spec.GPU(uuid); g == nil || !g.Lost {
					r.t.Errorf("purge left %s in compute mode %d (%v)", uuid, mode, err)
				}
			}
		}
		if left := r.containers(); len(left) > 0 {
			r.t.Errorf("purge left containers: %v", left)
		}
	}
	r.docker.Close()
	if r.t.Failed() && r.log != nil {
		b, _ := os.ReadFile(r.log.Name())
		if len(b) > 20000 {
			b = b[len(b)-20000:]
		}
		r.t.Logf("the agent's log:\n%s", b)
	}
	if r.log != nil {
		r.log.Close()
	}
	if err := r.machine.Remove(); err != nil {
		r.t.Error(err)
	}
	os.RemoveAll(r.dir)
}

// run runs a berth-agent command with this rig's settings.
func (r *rig) run(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, built.agent, append(args, "--config", r.config())...).CombinedOutput()
	return string(out), err
}

func (r *rig) ask(method, path string, into any) (string, error) {
	req, err := http.NewRequest(method, "http://agent"+path, nil)
	if err != nil {
		return "", err
	}
	resp, err := r.api.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", err
	}
	if resp.StatusCode != http.StatusOK {
		return "", errors.New(string(b))
	}
	if into != nil {
		err = json.Unmarshal(b, into)
	}
	return string(b), err
}

func (r *rig) inst() api.Instance {
	r.t.Helper()
	var all []api.Instance
	if _, err := r.ask("GET", api.PathInstances, &all); err != nil {
		r.t.Fatal(err)
	}
	return all[0]
}

func (r *rig) gpu(i int) api.GPU { r.t.Helper(); return r.inst().GPUs[i] }

// gpuOf is the GPU that a wanted task has now; zero when it has none.
func (r *rig) gpuOf(name string) api.GPU {
	r.t.Helper()
	task := r.task(name)
	for _, g := range r.inst().GPUs {
		if len(task.GPUIDs) == 1 && g.ID == task.GPUIDs[0] {
			return g
		}
	}
	return api.GPU{}
}

func (r *rig) tasks() (all []api.Task) {
	r.t.Helper()
	if _, err := r.ask("GET", api.PathTasks, &all); err != nil {
		r.t.Fatal(err)
	}
	return all
}

// task is the newest generation of a wanted task; zero when there is none.
func (r *rig) task(name string) api.Task {
	r.t.Helper()
	for _, t := range r.tasks() {
		if t.Name == name {
			return t
		}
	}
	return api.Task{}
}

// until waits for something to happen, looking again and again, and fails after 30 s.
func (r *rig) until(what string, ok func() bool) { r.t.Helper(); r.within(30*time.Second, what, ok) }

func (r *rig) within(d time.Duration, what string, ok func() bool) {
	r.t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	end := time.After(d)
	for !ok() {
		select {
		case <-tick.C:
		case <-end:
			r.t.Fatalf("not within %s: %s\n%s", d, what, r.describe())
		}
	}
}

func (r *rig) describe() string {
	var b bytes.Buffer
	for _, path := range []string{api.PathInstances, api.PathTasks} {
		s, err := r.ask("GET", path, nil)
		fmt.Fprintln(&b, path, s, err)
	}
	return b.String()
}

func (r *rig) running(name string) bool {
	r.t.Helper()
	return r.task(name).LastStatus == api.StatusRunning
}

// attached says that a task runs and its client has its memory, through MPS.
func (r *rig) attached(name string) bool {
	r.t.Helper()
	logs := r.logs(name)
	return r.running(name) && strings.Contains(logs, "mps: attached") && strings.Contains(logs, "allocated")
}

func (r *rig) stopped(name string) bool {
	r.t.Helper()
	return r.task(name).LastStatus == api.StatusStopped
}

// want writes a task definition file.
func (r *rig) want(name string, d definition) {
	r.t.Helper()
	b, err := json.MarshalIndent(d, "", "  ")
	if err != nil {
		r.t.Fatal(err)
	}
	r.wantText(name, string(b))
}

func (r *rig) wantText(name, text string) {
	r.t.Helper()
	path := filepath.Join(r.dir, "tasks", name+".json")
	if err := os.WriteFile(path+".new", []byte(text), 0o644); err != nil {
		r.t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) drop(name string) {
	r.t.Helper()
	if err := os.Remove(filepath.Join(r.dir, "tasks", name+".json")); err != nil {
		r.t.Fatal(err)
	}
}

// container is what Docker has of a task's first container.
func (r *rig) container(name string) engine.Container {
	r.t.Helper()
	c, err := r.docker.Inspect(context.Background(), r.task(name).Containers[0].RuntimeID)
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

func (r *rig) inspect(id string) engine.Container {
	c, _ := r.docker.Inspect(context.Background(), id) // zero when it is gone
	return c
}

func (r *rig) byID(id string) api.Task {
	r.t.Helper()
	for _, t := range r.tasks() {
		if t.ID == id {
			return t
		}
	}
	return api.Task{}
}

// on is the same rig for a goroutine of a test.
func (r *rig) on(t testing.TB) *rig { c := *r; c.t = t; return &c }

// exec runs the sample image's client in a task's first container.
func (r *rig) exec(name string, args ...string) string {
	r.t.Helper()
	id := r.task(name).Containers[0].RuntimeID
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	out, _ := exec.CommandContext(ctx, "docker", append([]string{"exec", id, "/bin/cuda-client"}, args...)...).CombinedOutput()
	return string(out)
}

// logs are a task's output so far.
func (r *rig) logs(name string) string {
	r.t.Helper()
	s, err := r.ask("GET", strings.Replace(api.PathLogs, "{id}", r.task(name).ID, 1), nil)
	if err != nil {
		return "" // not made yet
	}
	return s
}

// containers are all that Docker has with this rig's instance.
func (r *rig) containers() []engine.Container {
	r.t.Helper()
	list, err := r.docker.List(context.Background(), r.instance)
	if err != nil {
		r.t.Fatal(err)
	}
	return list
}

// definition is a task definition as tests write it.
type definition struct {
	Family               string      `json:"family"`
	CPU                  string      `json:"cpu,omitempty"`
	Memory               string      `json:"memory,omitempty"`
	ContainerDefinitions []container `json:"containerDefinitions"`
}

type container struct {
	Name                 string        `json:"name"`
	Image                string        `json:"image"`
	EntryPoint           []string      `json:"entryPoint,omitempty"`
	Command              []string      `json:"command,omitempty"`
	Essential            *bool         `json:"essential,omitempty"`
	StopTimeout          int           `json:"stopTimeout,omitempty"`
	ResourceRequirements []requirement `json:"resourceRequirements,omitempty"`
	RestartPolicy        any           `json:"restartPolicy,omitempty"`
	PortMappings         any           `json:"portMappings,omitempty"`
	DependsOn            any           `json:"dependsOn,omitempty"`
	MemoryReservation    int           `json:"memoryReservation,omitempty"`
	CPU                  int           `json:"cpu,omitempty"`
	Memory               int           `json:"memory,omitempty"`
}

type requirement struct {
	Type            string `json:"type"`
	Value           string `json:"value,omitempty"`
	SharingStrategy any    `json:"sharingStrategy,omitempty"`
}

// plain is a task of one container without a GPU.
func plain(command ...string) definition {
	return definition{Family: "sample", ContainerDefinitions: []container{
		{Name: "main", Image: sampleImage, EntryPoint: []string{"/bin/cuda-client"}, Command: command, Memory: 64}}}
}

// shared is a task of one container on a slice of a GPU; percent 0 asks for none.
func shared(memoryMiB, percent int, command ...string) definition {
	d := plain(command...)
	m := map[string]any{"memory": memoryMiB}
	if percent > 0 {
		m["maxComputePercent"] = percent
	}
	d.ContainerDefinitions[0].ResourceRequirements = []requirement{{Type: "GPU", SharingStrategy: map[string]any{"nvidiaMps": m}}}
	return d
}

// whole is a task of one container on n whole GPUs.
func whole(n string, command ...string) definition {
	d := plain(command...)
	d.ContainerDefinitions[0].ResourceRequirements = []requirement{{Type: "GPU", Value: n}}
	return d
}
