package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
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

// fireSystem is berth dev as an operator runs it, the observer beside it, and the
// witness that judges what the observer saw.
type fireSystem struct {
	t        *testing.T
	dir, run string
	programs string
	image    string
	machines *dev.Provider
	client   *http.Client
	server   *exec.Cmd
	ended    chan error // of server
	docker   *http.Client

	mu      sync.Mutex // of what follows
	witness *witness
	bad     []string
	seen    *os.File // all samples, where they are kept
	journal *os.File
}

const (
	fireLease     = 3 * time.Second
	fireGrace     = 9 * time.Second
	fireGPUs      = 2
	fireMachines  = 3
	fireGPUMemory = 49152
)

// fireAgents are settings of the agents; berth dev is given them as flags.
var fireAgents = map[string]any{"mps.budget.failures": int64(4), "mps.budget.window": "25s", "mps.drainDeadline": "15s", "docker.stopTimeout": "3s",
	"task.cleanupAfter": "30s", "mps.probeEvery": "2s", "reserved.cpu": int64(0)}

// buildFire makes berth's programs as make build lays them out.
func buildFire(t *testing.T, dir string) {
	t.Helper()
	for _, name := range []string{"berth", "berth-agent"} {
		args := []string{"build", "-o", filepath.Join(dir, name)}
		if os.Getenv("BERTH_FIRE_RACE") == "1" {
			args = append(args, "-race")
		}
		cmd := exec.Command("go", append(args, "github.com/berth-gpu/berth/cmd/"+name)...)
		cmd.Env = append(os.Environ(), "GOFLAGS=", "CGO_ENABLED=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v\n%s", name, err, out)
		}
	}
	sim := filepath.Join(dir, "sim")
	if err := os.Mkdir(sim, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := mpssim.Build(t.Context(), filepath.Join(sim, "mpssim")); err != nil {
		t.Fatal(err)
	}
	library, err := nvmlsim.BuildCached(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(library)
	if err == nil {
		err = os.WriteFile(filepath.Join(sim, "libnvidia-ml.so.1"), text, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func newFireSystem(t *testing.T) *fireSystem {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("simulated machines are made as root")
	}
	f := &fireSystem{t: t, docker: unixClient("/var/run/docker.sock", time.Minute), witness: newWitness(fireLease + fireGrace - time.Second)}
	if _, err := f.docker.Get("http://docker/_ping"); err != nil {
		t.Skip("no Docker engine answers: ", err)
	}
	id := make([]byte, 3)
	rand.Read(id)
	// MPS takes short paths, and t.TempDir's is none.
	base, err := os.MkdirTemp("/tmp", "fire")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(base, 0o755); err != nil {
		t.Fatal(err)
	}
	f.programs, f.dir, f.run, f.image = filepath.Join(base, "bin"), filepath.Join(base, "d"), "/run/bf"+hex.EncodeToString(id), "berth-fire-"+hex.EncodeToString(id)+":latest"
	os.Mkdir(f.programs, 0o755)
	t.Cleanup(func() {
		if !t.Failed() || os.Getenv("BERTH_FIRE_KEEP") == "" {
			os.RemoveAll(base)
		}
	})
	buildFire(t, f.programs)
	f.client = unixClient(filepath.Join(f.run, "server.sock"), 5*time.Second)
	if f.machines, err = dev.Open(dev.Options{Dir: filepath.Join(f.dir, "machines"), RunDir: f.run, Berth: filepath.Join(f.programs, "berth"), Agent: filepath.Join(f.programs, "berth-agent"),
		GPUs: fireGPUs, GPUMemoryMiB: fireGPUMemory, Server: "unix:" + filepath.Join(f.run, "agents.sock"), Cluster: "default", Settings: fireAgents}); err != nil {
		t.Fatal(err)
	}
	if os.Getenv("BERTH_FIRE_KEEP") != "" {
		if f.seen, err = os.Create(filepath.Join(base, "samples")); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.seen.Close() })
	}
	if f.journal, err = os.Create(filepath.Join(base, "journal")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.journal.Close() })
	f.loadImage()
	return f
}

// loadImage makes the sample image under a name that nobody else removes.
func (f *fireSystem) loadImage() {
	f.t.Helper()
	tar, err := mpssim.SampleImage(f.t.Context(), filepath.Join(f.programs, "sim", "mpssim"))
	if err != nil {
		f.t.Fatal(err)
	}
	name, tag, _ := strings.Cut(f.image, ":")
	resp, err := f.docker.Post("http://docker/images/create?fromSrc=-&repo="+name+"&tag="+tag, "application/x-tar", tar)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		f.t.Fatalf("load the image: %s %s %v", resp.Status, body, err)
	}
	f.t.Cleanup(func() {
		req, _ := http.NewRequest(http.MethodDelete, "http://docker/images/"+f.image, nil)
		if resp, err := f.docker.Do(req); err == nil {
			resp.Body.Close()
		}
	})
}

// startServer starts berth dev, or starts it again.
func (f *fireSystem) startServer() {
	f.t.Helper()
	log, err := os.OpenFile(filepath.Join(filepath.Dir(f.dir), "dev.out"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		f.t.Fatal(err)
	}
	defer log.Close()
	args := []string{"dev", "--dir", f.dir, "--run-dir", f.run, "--instances", fmt.Sprint(fireMachines), "--gpus", fmt.Sprint(fireGPUs), "--gpu-memory", fmt.Sprint(fireGPUMemory)}
	for key, v := range fireAgents {
		args = append(args, "--agent-setting", fmt.Sprintf("%s=%v", key, v))
	}
	cmd := exec.Command(filepath.Join(f.programs, "berth"), args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Env = append(os.Environ(), "BERTH_PLACEMENT_AGENTS_LEASE="+fireLease.String(), "BERTH_PLACEMENT_AGENTS_GRACE="+fireGrace.String(),
		"BERTH_PLACEMENT_REPLACE_PER_HOUR=1000", "BERTH_PLACEMENT_REPLACE_DRAIN_DEADLINE=20s")
	if err := cmd.Start(); err != nil {
		f.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	f.server, f.ended = cmd, ended
}

// alive fails the test when berth dev has ended by itself.
func (f *fireSystem) serverLives() error {
	select {
	case err := <-f.ended:
		f.ended <- err
		out, _ := os.ReadFile(filepath.Join(filepath.Dir(f.dir), "dev.out"))
		return fmt.Errorf("berth dev ended by itself: %v\n%s", err, tail(out, 3000))
	default:
		return nil
	}
}

func tail(b []byte, n int) string {
	if len(b) > n {
		b = b[len(b)-n:]
	}
	return string(b)
}

// signalServer sends berth dev a signal; after SIGKILL it waits for the end.
func (f *fireSystem) signalServer(sig syscall.Signal) {
	f.server.Process.Signal(sig)
	if sig == syscall.SIGKILL {
		<-f.ended
	}
}

// signalAgent sends a machine's agent a signal, if it runs.
func (f *fireSystem) signalAgent(id string, sig syscall.Signal) {
	var r struct {
		PID   int    `json:"pid"`
		Start uint64 `json:"startTime"`
	}
	b, err := os.ReadFile(filepath.Join(f.dir, "machines", "machines", id, "machine.json"))
	if err != nil || json.Unmarshal(b, &r) != nil || r.PID == 0 {
		return
	}
	p, err := os.FindProcess(r.PID) // a pidfd: no other process is hit
	if err != nil {
		return
	}
	defer p.Release()
	if start, _, alive := procStart(r.PID); alive && start == r.Start {
		p.Signal(sig)
	}
}

// startAgent starts a machine's agent where it does not run, unless the machine ends.
func (f *fireSystem) startAgent(id string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, err := f.machines.Start(ctx, id)
	if errors.Is(err, dev.ErrEnded) || errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// ids are the machines that are there.
func (f *fireSystem) ids() (all []string) {
	have, err := f.machines.List(context.Background())
	if err != nil {
		return nil
	}
	for _, m := range have {
		all = append(all, m.ID)
	}
	return all
}

// keepLogs makes the agents' logs outlive their machines.
func (f *fireSystem) keepLogs(ids []string) {
	dir := filepath.Join(filepath.Dir(f.dir), "logs")
	os.MkdirAll(dir, 0o755)
	for _, id := range ids {
		os.Link(f.machines.LogFile(id), filepath.Join(dir, id+".log"))
	}
}

// note writes down what the test is about to do, or what the server has promised.
func (f *fireSystem) note(what, who string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := note{time.Now(), what, who}
	f.witness.note(n)
	fmt.Fprintf(f.journal, "%s %s %s\n", n.at.Format(time.RFC3339Nano), what, who)
}

// observe starts the observer; the returned function ends it.
func (f *fireSystem) observe() (stop func()) {
	f.t.Helper()
	exe, err := os.Executable()
	if err != nil {
		f.t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), observeDir+"="+f.dir, observeRun+"="+f.run)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	if err != nil {
		f.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		f.t.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		for r := bufio.NewReaderSize(out, 1<<20); ; {
			line, err := r.ReadBytes('\n')
			if err != nil {
				return
			}
			var s sample
			if err := json.Unmarshal(line, &s); err != nil {
				f.fail("a sample cannot be read: %v", err)
				return
			}
			f.mu.Lock()
			bad := f.witness.see(s)
			if f.seen != nil {
				f.seen.Write(line)
			}
			f.mu.Unlock()
			for _, b := range bad {
				f.fail("sample %d at %s: %s", s.Seq, s.At.Format(time.StampMilli), b)
			}
		}
	}()
	return func() {
		cmd.Process.Kill()
		<-read
		cmd.Wait()
		if errs.Len() > 0 {
			f.t.Errorf("the observer: %s", tail(errs.Bytes(), 3000))
		}
	}
}

// fail notes a violation. The first few are told, all are counted.
func (f *fireSystem) fail(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.bad = append(f.bad, fmt.Sprintf(format, args...))
	fmt.Fprintf(f.journal, "%s VIOLATED %s\n", time.Now().Format(time.RFC3339Nano), f.bad[len(f.bad)-1])
}

func (f *fireSystem) failures() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.bad
}

// ask is one request to the server; in is nil for GET.
func (f *fireSystem) ask(method, path string, in, into any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequest(method, "http://server"+path, body)
	if err != nil {
		return err
	}
	resp, err := f.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		var e api.Error
		json.Unmarshal(b, &e)
		return &refusal{resp.StatusCode, e.Message}
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(b, into)
}

// until looks again and again until it is so, or the limit is over.
func (f *fireSystem) until(limit time.Duration, so func() bool) bool {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	end := time.After(limit)
	for !so() {
		select {
		case <-tick.C:
		case <-end:
			return false
		}
	}
	return true
}
