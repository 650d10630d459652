package mpssim

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berth-gpu/berth/agent/gpu/nvmlsim"
)

// The tests run the program, as berth does: as processes, in a machine's folder.

var binary string // the program, built once

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("/tmp", "b")
		if err != nil {
			panic(err)
		}
		defer os.RemoveAll(dir)
		if err := os.Chmod(dir, 0o755); err != nil {
			panic(err)
		}
		binary = filepath.Join(dir, "mpssim")
		if err := buildForTest(context.Background(), binary); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}())
}

// buildForTest builds the program with the race detector when the tests have it.
func buildForTest(ctx context.Context, out string) error {
	if !raceEnabled {
		return Build(ctx, out)
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-race", "-o", out, programPackage)
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, output)
	}
	return nil
}

// raceEnv is for programs built with the race detector: a race ends them at once, and
// they do not wait a second for one at their end.
const raceEnv = "GORACE=atexit_sleep_ms=0 halt_on_error=1"

// world is a simulated machine with one daemon's folders.
type world struct {
	t          *testing.T
	dir        string
	bin        string
	env        []string
	gpuA, gpuB string // UUIDs that no other test has: whoever holds a GPU is seen host-wide
}

// newWorld makes a machine of two GPUs of 80 GiB, and an environment for gpuA.
func newWorld(t *testing.T, steer ...func(*Steer)) *world {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "b")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, dir: dir, bin: filepath.Join(dir, "bin"), gpuA: newUUID(t), gpuB: newUUID(t)}
	spec := nvmlsim.Spec{Driver: "580.159.03", NVML: "13.580.159.03", CUDA: 13000}
	for i, uuid := range []string{w.gpuA, w.gpuB} {
		spec.GPUs = append(spec.GPUs, nvmlsim.GPU{
			UUID: uuid, Minor: i, Name: "NVIDIA H100", TotalBytes: 80 << 30, Architecture: 9, ComputeMajor: 9,
			PCIBusID: fmt.Sprintf("00000000:%02d:00.0", 18+i), NUMANode: -1, MIG: -1, ECC: -1,
		})
	}
	for _, err := range []error{
		os.Mkdir(filepath.Join(dir, "sim"), 0o755),
		os.WriteFile(filepath.Join(dir, "sim", "machine"), spec.Format(), 0o644),
		Install(t.Context(), dir, binary),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	w.env = []string{
		"PATH=" + w.bin + ":/usr/bin:/bin", "CUDA_VISIBLE_DEVICES=" + w.gpuA, "BERTH_MPS_ID=test", raceEnv,
		"CUDA_MPS_PIPE_DIRECTORY=" + w.pipe(), "CUDA_MPS_LOG_DIRECTORY=" + filepath.Join(dir, "log"),
	}
	for _, s := range steer {
		w.steer(s)
	}
	return w
}

func newUUID(t *testing.T) string {
	t.Helper()
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

func (w *world) pipe() string { return filepath.Join(w.dir, "pipe") }

func (w *world) steer(change func(*Steer)) {
	w.t.Helper()
	if err := SteerGPU(w.dir, w.gpuA, change); err != nil {
		w.t.Fatal(err)
	}
}

// process is a program that a test started. Its output is kept line by line.
type process struct {
	t   *testing.T
	cmd *exec.Cmd

	mu    sync.Mutex
	lines []string
	done  chan struct{}
	code  int
}

// start runs a program until the test ends. What it writes goes through a file-like
// pipe of this test, so nobody wedges.
func (w *world) start(env []string, argv ...string) *process {
	w.t.Helper()
	return startProcess(w.t, exec.Command(argv[0], argv[1:]...), env, w.bin)
}

func startProcess(t *testing.T, cmd *exec.Cmd, env []string, bin string) *process {
	t.Helper()
	if !strings.Contains(cmd.Path, "/") || cmd.Err != nil {
		cmd.Path, cmd.Err = filepath.Join(bin, cmd.Args[0]), nil
	}
	r, pw, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Env, cmd.Stdout, cmd.Stderr = env, pw, pw
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setsid = true
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pw.Close()
	p := &process{t: t, cmd: cmd, done: make(chan struct{})}
	go func() {
		for s := bufio.NewScanner(r); s.Scan(); {
			p.mu.Lock()
			p.lines = append(p.lines, s.Text())
			p.mu.Unlock()
		}
		r.Close()
	}()
	go func() {
		_ = cmd.Wait()
		p.code = cmd.ProcessState.ExitCode()
		close(p.done)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGCONT)
		_ = cmd.Process.Kill()
		<-p.done
		if out := p.output(); strings.Contains(out, "DATA RACE") || strings.Contains(out, "panic:") {
			t.Errorf("%v:\n%s", cmd.Args, out)
		}
	})
	return p
}

func (p *process) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Join(p.lines, "\n")
}

// says waits until the process has printed something, n times.
func (p *process) says(text string, times ...int) {
	p.t.Helper()
	n := 1
	if len(times) > 0 {
		n = times[0]
	}
	eventually(p.t, fmt.Sprintf("%q", text), func() bool { return strings.Count(p.output(), text) >= n }, p.output)
}

// ends waits for the process's end and returns its status, -1 for a signal.
func (p *process) ends() int {
	p.t.Helper()
	select {
	case <-p.done:
		return p.code
	case <-time.After(deadline):
		p.t.Fatalf("%v still runs; it said:\n%s", p.cmd.Args, p.output())
		return 0
	}
}

const deadline = 20 * time.Second

func eventually(t *testing.T, what string, happened func() bool, show ...func() string) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	late := time.After(deadline)
	for !happened() {
		select {
		case <-tick.C:
		case <-late:
			text := ""
			for _, s := range show {
				text += "\n" + s()
			}
			t.Fatalf("did not happen: %s%s", what, text)
		}
	}
}

// daemon starts a control daemon in the foreground and waits until it answers.
func (w *world) daemon(flags ...string) *process {
	w.t.Helper()
	p := w.start(w.env, append([]string{ControlName, "-f"}, flags...)...)
	w.t.Cleanup(func() { w.killServers() })
	p.says("To connect CUDA applications")
	return p
}

// killServers ends what a daemon leaves behind.
func (w *world) killServers() {
	for _, find := range []func(string, string) ([]int, error){Daemons, Servers} {
		pids, _ := find(w.dir, w.gpuA)
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

// server starts the server and returns its pid.
func (w *world) server() int {
	w.t.Helper()
	w.control("start_server -uid 0")
	var pid int
	eventually(w.t, "a server that is ready", func() bool {
		out, _ := w.control("get_server_list")
		if n, _ := fmt.Sscan(out, &pid); n != 1 {
			return false
		}
		status, _ := w.control(fmt.Sprintf("get_server_status %d", pid))
		return status == "ACTIVE\n"
	})
	return pid
}

// control gives the daemon commands, through its utility, and returns what that
// printed and its status.
func (w *world) control(lines string) (string, int) {
	w.t.Helper()
	out, errs, code := run(w.t, w.env, 0, lines, filepath.Join(w.bin, ControlName))
	return out + errs, code
}

// run runs a program to its end as a user.
func run(t *testing.T, env []string, uid uint32, stdin string, argv ...string) (stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = env, strings.NewReader(stdin), &out, &errs
	cmd.WaitDelay = time.Second
	if uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		cmd.Dir = "/"
	}
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatalf("%v: %v", argv, err)
	}
	if ctx.Err() != nil {
		t.Fatalf("%v with %q: no end", argv, stdin)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// client starts a CUDA program.
func (w *world) client(args ...string) *process {
	w.t.Helper()
	return w.clientWith(nil, args...)
}

func (w *world) clientWith(env []string, args ...string) *process {
	w.t.Helper()
	all := []string{raceEnv, "CUDA_MPS_PIPE_DIRECTORY=" + w.pipe(), "NVIDIA_VISIBLE_DEVICES=" + w.gpuA}
	return w.start(append(all, env...), append([]string{ClientName, "run"}, args...)...)
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: it runs programs as other users")
	}
}
