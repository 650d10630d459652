package main

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/api/flight"
	"github.com/berth-gpu/berth/healthcheck"
	"github.com/berth-gpu/berth/mps"
	"github.com/berth-gpu/berth/placement/fit"
	model "github.com/berth-gpu/berth/placement/fleet"
	"github.com/berth-gpu/berth/placement/replace"
	"github.com/berth-gpu/berth/placement/service"
)

const recordedGPU = "GPU-0b9f2f8e-5a0e-4d0e-9f43-6a1f6b1e7a01"

// recorded is the folder of a recorder that has one decision of each machine, the
// supervisor's as the Holder tells it.
func recorded(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	r, err := flight.Open(dir, 1<<20, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	later := noon.Add(time.Minute)
	step := json.RawMessage(`{"event":{"Want":{"use":"IDLE"}},"now":"2026-12-01T12:00:00Z","state":{"phase":"STARTING","use":"NONE","clients":-1,"random":18446744073709551615}}`)
	out, err := mps.Replay(step)
	if err != nil {
		t.Fatal(err)
	}
	r.Record("mps.Step", recordedGPU, step, out)
	seen := mps.Observation{At: noon, Status: mps.Status{State: mps.PhaseHeld}, Daemon: mps.ProcessView{PID: 10, Alive: true, State: "S"}, LockHolder: 10, Probe: mps.ErrWedged}
	r.Record("healthcheck.Held", recordedGPU, seen, healthcheck.Held(seen))
	checked := healthcheck.Examination{Checks: []healthcheck.Check{{Type: healthcheck.ContainerRuntime, OK: true}}, Now: noon}
	r.Record("healthcheck.Machine", "node-1", checked, checked.Health())
	place := fit.PlaceIn{Machine: fit.Machine{CPU: 4096, MemoryMiB: 4096, Ports: map[fit.Port]bool{{Number: 80, Protocol: "tcp"}: true},
		GPUs: []fit.GPU{{ID: recordedGPU, Mode: fit.Idle, TotalMiB: 81920, MaxClients: 60}}}, Demand: fit.Demand{CPU: 256, MemoryMiB: 512, GPUMemoryMiB: 20480, Clients: 1}}
	r.Record("fit.Place", "task-1", place, place.Do())
	serve := service.Input{Service: model.Service{Name: "web", Desired: 2}, Now: noon,
		Tasks: []service.Task{{ID: "a", Desired: api.StatusRunning, LastStatus: api.StatusRunning, Placed: true, Healthy: true, CreatedAt: noon, StartedAt: noon}}}
	r.Record("service.Step", "web", serve, serve.Do())
	alone := service.Alone{Task: service.Task{ID: "b", Desired: api.StatusRunning, LastStatus: api.StatusRunning, Gone: true, CreatedAt: noon}, Now: later}
	r.Record("service.Standalone", "b", alone, alone.Do())
	swap := replace.StepIn{Replacement: replace.New("r-1", "node-1", "a GPU is FAILED", false, noon), Observation: replace.Observation{Standing: api.InstanceActive}, Now: later, Policy: replace.Default()}
	r.Record("replace.Step", "r-1", swap, swap.Do())
	due := replace.DueIn{Policy: replace.Default(), Machines: []replace.Machine{{ID: "node-1", GPUs: 2}}, Now: noon}
	r.Record("replace.Due", "fleet", due, due.Do())
	r.Close()
	return dir
}

// ringFile is the one file of a young ring.
func ringFile(t *testing.T, dir string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.jsonl"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	return files[0]
}

func berthReplay(t *testing.T, args ...string) (out, errs string, code int) {
	t.Helper()
	var o, e bytes.Buffer
	code = run(t.Context(), newApp(nil, &o, io.MultiWriter(&e), os.Getenv), append([]string{"replay"}, args...))
	return o.String(), e.String(), code
}

// Each machine that is recorded can be replayed, and comes out as it was.
func TestReplayAgrees(t *testing.T) {
	dir := recorded(t)
	for _, path := range []string{dir, ringFile(t, dir)} {
		out, errs, code := berthReplay(t, path)
		if code != exitOK || errs != "" {
			t.Fatalf("exit code %d\n%s%s", code, out, errs)
		}
		golden(t, "replay.txt", out)
		for name := range machines {
			if !strings.Contains(out, name+" ") {
				t.Errorf("%s is not recorded by this test", name)
			}
		}
	}
	out, _, code := berthReplay(t, dir, "--machine", "mps.Step", "--key", recordedGPU)
	if code != exitOK || strings.Contains(out, "fit.Place") || !strings.Contains(out, "mps.Step") {
		t.Errorf("exit code %d\n%s", code, out)
	}
}

// A difference that was planted is found, and where it is.
func TestReplayDiffers(t *testing.T) {
	for _, tc := range []struct {
		file, was, is string // in the ring's file
		args          []string
	}{
		{"replay-differs.txt", `"job":"look"`, `"job":"kill"`, nil},
		{"replay-differs.json", `"job":"look"`, `"job":"kill"`, []string{"-o", "json"}},
		{"replay-unknown.txt", `"random":`, `"chance":`, nil},
		{"replay-machine.txt", `"service.Standalone"`, `"quota.Share"`, nil},
		{"replay-damaged.txt", `{"seq":2,`, `{"seq":two,`, nil},
	} {
		t.Run(tc.file, func(t *testing.T) {
			file := ringFile(t, recorded(t))
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Contains(text, []byte(tc.was)) {
				t.Fatalf("%s is not in\n%s", tc.was, text)
			}
			lines := strings.SplitAfter(strings.Replace(string(text), tc.was, tc.is, 1), "\n")
			for i, line := range lines { // recorded at noon
				if begin, rest, ok := strings.Cut(line, `"at":"`); ok {
					_, rest, _ = strings.Cut(rest, `"`)
					lines[i] = begin + `"at":"2026-12-01T12:00:00Z"` + rest
				}
			}
			gap := `{"seq":9,"at":"2026-12-01T12:00:00Z","machine":"gap","key":"","in":{"dropped":3,"why":"the disk did not keep up"}}` + "\n"
			if err := os.WriteFile(file, []byte(strings.Join(lines, "")+gap), 0o600); err != nil {
				t.Fatal(err)
			}
			out, errs, code := berthReplay(t, append(tc.args, file)...)
			want := exitFailed
			if tc.file == "replay-damaged.txt" {
				want = exitOK // what can be read agrees; that something cannot is said
			}
			if code != want || errs != "" {
				t.Errorf("exit code %d, stderr %q", code, errs)
			}
			golden(t, tc.file, strings.ReplaceAll(out, filepath.Dir(file), "FOLDER"))
		})
	}
}

func TestReplayErrors(t *testing.T) {
	dir := recorded(t)
	for _, tc := range []struct {
		name string
		args []string
		code int
		says string
	}{
		{"nothing to replay", nil, exitUsage, "accepts 1 arg(s), received 0"},
		{"a folder that is not there", []string{"/nonexistent"}, exitFailed, "no such file"},
		{"a folder of something else", []string{t.TempDir()}, exitFailed, "no flight recorder's folder"},
		{"a machine that decided nothing", []string{dir, "--machine", "mps.Stop", "--key", "x"}, exitFailed, "no recorded decision of machine mps.Stop on x"},
	} {
		out, errs, code := berthReplay(t, tc.args...)
		if code != tc.code || out != "" || !strings.Contains(errs, tc.says) {
			t.Errorf("%s: exit code %d\n%s%s", tc.name, code, out, errs)
		}
	}
}
