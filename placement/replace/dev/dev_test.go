package dev_test

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berth-gpu/berth/agent/gpu/nvmlsim"
	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/mps/mpssim"
	"github.com/berth-gpu/berth/placement/replace/dev"
)

// built are berth's programs, as make build lays them out, made once.
var built struct {
	once sync.Once
	dir  string
	err  error
}

var sample string // this test run's own image

func TestMain(m *testing.M) {
	code := m.Run()
	if built.dir != "" {
		os.RemoveAll(built.dir)
	}
	if sample != "" {
		docker(http.MethodDelete, "/images/"+sample, nil)
	}
	os.Exit(code)
}

func build(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("simulated machines are made as root")
	}
	if _, err := docker(http.MethodGet, "/_ping", nil); err != nil {
		t.Skip("no Docker engine answers: ", err)
	}
	built.once.Do(func() {
		ctx := context.Background()
		if built.dir, built.err = os.MkdirTemp("", "berth-dev-test"); built.err != nil {
			return
		}
		for _, name := range []string{"berth", "berth-agent"} {
			cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", filepath.Join(built.dir, name), "github.com/berth-gpu/berth/cmd/"+name)
			if out, err := cmd.CombinedOutput(); err != nil {
				built.err = fmt.Errorf("build %s: %w\n%s", name, err, out)
				return
			}
		}
		sim := filepath.Join(built.dir, "sim")
		if built.err = os.Mkdir(sim, 0o755); built.err != nil {
			return
		}
		if built.err = mpssim.Build(ctx, filepath.Join(sim, "mpssim")); built.err != nil {
			return
		}
		library, err := nvmlsim.BuildCached(ctx)
		if err != nil {
			built.err = err
			return
		}
		text, err := os.ReadFile(library)
		if err == nil {
			err = os.WriteFile(filepath.Join(sim, "libnvidia-ml.so.1"), text, 0o755)
		}
		built.err = err
	})
	if built.err != nil {
		t.Fatal(built.err)
	}
	return built.dir
}

// docker asks the engine.
func docker(method, path string, into any) (int, error) {
	client := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", "/var/run/docker.sock")
		}}}
	req, err := http.NewRequest(method, "http://docker"+path, nil)
	if err != nil {
		return 0, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err == nil && into != nil {
		err = json.Unmarshal(b, into)
	}
	return resp.StatusCode, err
}

type rig struct {
	t   *testing.T
	p   *dev.Provider
	opt dev.Options
}

func open(t *testing.T) *rig {
	t.Helper()
	programs := build(t)
	id := make([]byte, 3)
	rand.Read(id)
	run := "/run/bd" + hex.EncodeToString(id)
	r := &rig{t: t, opt: dev.Options{Dir: t.TempDir(), RunDir: run, Berth: filepath.Join(programs, "berth"), Agent: filepath.Join(programs, "berth-agent"),
		GPUs: 2, GPUMemoryMiB: 40960, Cluster: "trial", Settings: map[string]any{"docker.stopTimeout": "1s", "mps.budget.failures": 3}}}
	// Containers of any user go through it.
	for dir := r.opt.Dir; dir != "/tmp" && dir != "/"; dir = filepath.Dir(dir) {
		os.Chmod(dir, 0o755)
	}
	r.again()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		all, err := r.p.List(ctx)
		if err != nil {
			t.Error(err)
		}
		for _, m := range all {
			if t.Failed() {
				said, _ := os.ReadFile(r.p.LogFile(m.ID))
				t.Logf("the log of %s:\n%.4000s", m.ID, said)
			}
			if err := r.p.Terminate(ctx, m.ID); err != nil {
				t.Error(err)
			}
		}
		os.RemoveAll(run)
	})
	return r
}

// again opens the provider as a server does that has restarted.
func (r *rig) again() {
	r.t.Helper()
	p, err := dev.Open(r.opt)
	if err != nil {
		r.t.Fatal(err)
	}
	r.p = p
}

func (r *rig) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	r.t.Cleanup(cancel)
	return ctx
}

func (r *rig) launch(token string) dev.Machine {
	r.t.Helper()
	m, err := r.p.Launch(r.ctx(), token)
	if err != nil {
		r.t.Fatal(err)
	}
	return m
}

func (r *rig) until(what string, so func() bool) {
	r.t.Helper()
	for deadline := time.Now().Add(40 * time.Second); !so(); time.Sleep(40 * time.Millisecond) {
		if time.Now().After(deadline) {
			r.t.Fatalf("not within 40 s: %s", what)
		}
	}
}

// kill is what nobody expects; the process is waited for.
func (r *rig) kill(pid int) {
	r.t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		r.t.Fatal(err)
	}
	r.until("the killed process is gone", func() bool {
		m, err := r.p.List(r.ctx())
		for _, m := range m {
			if m.PID == pid {
				return false
			}
		}
		return err == nil
	})
}

func (r *rig) ask(id, path string, into any) error {
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", r.p.Socket(id))
		}}}
	resp, err := client.Get("http://agent" + path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(into)
}

func (r *rig) instance(id string) api.Instance {
	r.t.Helper()
	var all []api.Instance
	r.until("the agent of "+id+" answers", func() bool { return r.ask(id, api.PathInstances, &all) == nil && len(all) == 1 })
	return all[0]
}

// nothing says whether nothing is left of a machine.
func (r *rig) nothing(id string) {
	r.t.Helper()
	var containers []struct{ Id string }
	filter := url.QueryEscape(`{"label":["berth.instance=` + id + `"]}`)
	if _, err := docker(http.MethodGet, "/containers/json?all=1&filters="+filter, &containers); err != nil || len(containers) > 0 {
		r.t.Errorf("containers are left: %v %v", containers, err)
	}
	for _, path := range []string{filepath.Join(r.opt.Dir, "machines", id), filepath.Join(r.opt.RunDir, id)} {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			r.t.Errorf("%s is left: %v", path, err)
		}
	}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		exe, _ := os.Readlink("/proc/" + e.Name() + "/exe")
		line, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		stat, _ := os.ReadFile("/proc/" + e.Name() + "/stat")
		if dir := filepath.Join(r.opt.Dir, "machines", id) + "/"; (strings.Contains(exe, dir) || strings.Contains(string(line), dir)) && !strings.Contains(string(stat), ") Z ") {
			r.t.Errorf("process %s is left: %s", e.Name(), strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), r.opt.RunDir+"/"+id) {
		r.t.Errorf("a mount is left (%v)", err)
	}
	filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(path, id) {
			r.t.Errorf("cgroup %s is left", path)
		}
		return nil
	})
}

// token is one that no other test run has: instances share the Docker engine.
func token(name string) string { return fmt.Sprintf("%s-%d", name, os.Getpid()%100000) }

// TestLife is a machine's, with tasks on it, from launch to terminate.
func TestLife(t *testing.T) {
	r := open(t)
	sample = fmt.Sprintf("berth-dev-test-%d:latest", os.Getpid())
	for range 2 {
		if err := r.p.LoadSample(r.ctx(), sample); err != nil {
			t.Fatal(err)
		}
	}

	m := r.launch(token("life"))
	if m.ID != "dev-"+token("life") || m.PID == 0 {
		t.Fatalf("launched %+v", m)
	}
	in := r.instance(m.ID)
	if in.Name != m.ID || in.Cluster != "trial" || len(in.GPUs) != 2 || in.GPUs[0].TotalMemoryInMiB < 39000 {
		t.Fatalf("its agent says %+v", in)
	}
	task := fmt.Sprintf(`{"family": "sample", "containerDefinitions": [{"name": "client", "image": %q, "command": ["sleep", "1h"], "entryPoint": ["/bin/cuda-client"],
		"cpu": 16, "memory": 64, "resourceRequirements": [{"type": "GPU", "sharingStrategy": {"nvidiaMps": {"memory": 2048}}}]}]}`, sample)
	if err := os.WriteFile(filepath.Join(r.opt.Dir, "machines", m.ID, "tasks", "sample.json"), []byte(task), 0o644); err != nil {
		t.Fatal(err)
	}
	running := func() (container string) {
		var tasks []api.Task
		if r.ask(m.ID, api.PathTasks, &tasks) != nil || len(tasks) != 1 || tasks[0].LastStatus != api.StatusRunning {
			return ""
		}
		return tasks[0].Containers[0].RuntimeID
	}
	var container string
	r.until("the task runs", func() bool { container = running(); return container != "" })

	// The server restarts, and launches the same machine again.
	r.again()
	if again := r.launch(token("life")); again != m {
		t.Fatalf("the same token is %+v, not %+v", again, m)
	}
	if found, ok, err := r.p.Find(r.ctx(), token("life")); err != nil || !ok || found != m {
		t.Fatalf("found %+v %v %v", found, ok, err)
	}

	// The agent is killed, and started again: its task has not noticed.
	r.kill(m.PID)
	again, err := r.p.Start(r.ctx(), m.ID)
	if err != nil || again.PID == m.PID || again.PID == 0 {
		t.Fatalf("started %+v %v", again, err)
	}
	r.until("the same container runs", func() bool { return running() == container })

	// It ends while the agent is dead, and more than once.
	r.kill(again.PID)
	for range 2 {
		if err := r.p.Terminate(r.ctx(), m.ID); err != nil {
			t.Fatal(err)
		}
	}
	r.nothing(m.ID)
	if _, err := r.p.Launch(r.ctx(), token("life")); !errors.Is(err, dev.ErrEnded) {
		t.Errorf("a launch that comes late: %v", err)
	}
	if _, ok, err := r.p.Find(r.ctx(), token("life")); ok || err != nil {
		t.Errorf("a machine that has ended is found: %v %v", ok, err)
	}
	if err := r.p.Terminate(r.ctx(), "elsewhere"); err == nil || !strings.Contains(err.Error(), "was not made here") {
		t.Errorf("another's machine: %v", err)
	}
}

// TestManyAtOnce launches each machine from several sides at once.
func TestManyAtOnce(t *testing.T) {
	r := open(t)
	r.opt.Server = "unix:" + filepath.Join(r.opt.Dir, "nobody.sock")
	var mu sync.Mutex
	seen := map[dev.Machine]int{}
	var wg sync.WaitGroup
	for i := range 6 {
		p, err := dev.Open(r.opt)
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			m, err := p.Launch(r.ctx(), token(string(rune('a'+i%2))))
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			seen[m]++
			mu.Unlock()
		})
	}
	wg.Wait()
	if all, err := r.p.List(r.ctx()); err != nil || len(all) != 2 || len(seen) != 2 {
		t.Fatalf("machines %v %v, launched as %v", all, err, seen)
	}
	for m := range seen {
		wg.Go(func() {
			if err := r.p.Terminate(r.ctx(), m.ID); err != nil {
				t.Error(err)
			}
			r.nothing(m.ID)
		})
	}
	wg.Wait()
}

// TestCutShort goes on from what each moment of a crash leaves.
func TestCutShort(t *testing.T) {
	r := open(t)
	folder := func(id string) string { return filepath.Join(r.opt.Dir, "machines", id) }
	record := func(id string) (m map[string]any) {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(folder(id), "machine.json"))
		if err == nil {
			err = json.Unmarshal(b, &m)
		}
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	rewrite := func(id string, change func(map[string]any)) {
		t.Helper()
		m := record(id)
		change(m)
		b, _ := json.Marshal(m)
		if err := os.WriteFile(filepath.Join(folder(id), "machine.json"), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}

	// A folder and no record: nothing was made.
	id := dev.Name(token("cut"))
	if err := os.Mkdir(folder(id), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := r.p.Find(r.ctx(), token("cut")); ok || err != nil {
		t.Fatalf("found %v %v", ok, err)
	}
	m := r.launch(token("cut"))

	// An agent that was started and not recorded: it is found by its mark, not started twice.
	rewrite(id, func(m map[string]any) { delete(m, "pid"); delete(m, "startTime") })
	r.again()
	if again := r.launch(token("cut")); again != m {
		t.Fatalf("not recorded, it is %+v and was %+v", again, m)
	}
	if record(id)["pid"] != float64(m.PID) {
		t.Errorf("the record says %v", record(id))
	}

	// The recorded pid is another process's now: that one is left alone.
	r.kill(m.PID)
	other := exec.Command("sleep", "300")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer other.Wait()
	defer other.Process.Kill()
	rewrite(id, func(rec map[string]any) { rec["pid"] = other.Process.Pid })
	if found, _, _ := r.p.Find(r.ctx(), token("cut")); found.PID != 0 {
		t.Fatalf("another's process counts as the agent: %+v", found)
	}

	// A record and a machine that is half made: it is made anew.
	rewrite(id, func(m map[string]any) { delete(m, "made") })
	if err := os.Remove(filepath.Join(folder(id), "machine", "lib", "libnvidia-ml.so.1")); err != nil {
		t.Fatal(err)
	}
	m = r.launch(token("cut"))

	// An agent that hangs is ended all the same.
	if err := syscall.Kill(m.PID, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	if err := r.p.Terminate(short, id); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("terminate past its time: %v", err)
	}
	if err := syscall.Kill(m.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	r.again()
	if _, err := r.p.Launch(r.ctx(), token("cut")); !errors.Is(err, dev.ErrEnded) {
		t.Errorf("a machine whose end has begun is launched: %v", err)
	}
	if err := r.p.Terminate(r.ctx(), id); err != nil {
		t.Fatal(err)
	}
	r.nothing(id)
	if other.Process.Signal(syscall.Signal(0)) != nil {
		t.Error("another's process was ended")
	}
}

func TestOpen(t *testing.T) {
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	good := dev.Options{Dir: t.TempDir(), RunDir: t.TempDir(), Berth: program, Agent: program}
	good.RunDir = "/run/b"
	for name, c := range map[string]struct {
		change func(*dev.Options)
		err    string
	}{
		"long run folder": {func(o *dev.Options) { o.RunDir = "/run/" + strings.Repeat("x", 40) }, "dev: runDir: /run/xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx has 45 bytes; MPS leaves 20 for it: give a shorter one"},
		"no program":      {func(o *dev.Options) { o.Agent = "/nowhere/berth-agent" }, "dev: stat /nowhere/berth-agent: no such file or directory (make build makes it)"},
		"no folder":       {func(o *dev.Options) { o.Dir = "" }, "dev: dir, runDir and the paths of berth and berth-agent are needed"},
	} {
		t.Run(name, func(t *testing.T) {
			o := good
			c.change(&o)
			if _, err := dev.Open(o); err == nil || err.Error() != c.err {
				t.Errorf("says %v, not %s", err, c.err)
			}
		})
	}
}

// A token is in the name where it is short; the name of a long one is its own all the same.
func TestName(t *testing.T) {
	long := strings.Repeat("0123456789abcdef", 2)
	if got := dev.Name("1"); got != "dev-1" {
		t.Errorf("1 is %s", got)
	}
	for _, token := range []string{long, long + "-2", "Upper", "-", ""} {
		if got := dev.Name(token); len(got) != len("dev-0123456789ab") {
			t.Errorf("%q is %s", token, got)
		}
	}
	if dev.Name(long) == dev.Name(long+"-2") {
		t.Error("a second newcomer has the first one's name")
	}
}
