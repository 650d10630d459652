package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-gpu/berth/agent/gpu/nvmlsim"
	"github.com/berth-gpu/berth/mps/mpssim"
)

// A simulated machine made by berth sim, and each fault seen on it.
func TestFaults(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("device nodes are made as root")
	}
	dir := t.TempDir()
	library, err := nvmlsim.BuildCached(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "mpssim")
	if err := mpssim.Build(t.Context(), program); err != nil {
		t.Fatal(err)
	}
	machine := filepath.Join(dir, "machine")
	out, errs, code := berth(t, nil, "sim", "create", machine, "--gpus", "2", "--gpu-memory", "81920", "--library", library, "--program", program, "-o", "json")
	if code != 0 {
		t.Fatalf("sim create: %d, %s", code, errs)
	}
	var made struct{ GPUs []string }
	if err := json.Unmarshal([]byte(out), &made); err != nil || len(made.GPUs) != 2 {
		t.Fatalf("sim create printed %s", out)
	}
	second := made.GPUs[1]

	fault := func(t *testing.T, args ...string) string {
		t.Helper()
		out, errs, code := berth(t, nil, append([]string{"fault", "--machine", machine, "--gpu", "1"}, args...)...)
		if code != 0 {
			t.Fatalf("fault %v: %d, %s", args, code, errs)
		}
		return out
	}
	spec := func(t *testing.T) nvmlsim.Spec {
		t.Helper()
		s, err := nvmlsim.ReadSpec(machine)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}

	t.Run("xid", func(t *testing.T) {
		if out, want := fault(t, "xid", "79"), "xid 79 on "+second+"\n"; out != want {
			t.Errorf("printed %q, want %q", out, want)
		}
		if x := spec(t).Xids; len(x) != 1 || x[0].UUID != second || x[0].Code != 79 {
			t.Errorf("xids %v", x)
		}
	})
	t.Run("lose-gpu, restore-gpu", func(t *testing.T) {
		fault(t, "lose-gpu")
		if s := spec(t); !s.GPUs[1].Lost || s.GPUs[0].Lost {
			t.Error("not lost, or the other one too")
		}
		fault(t, "restore-gpu")
		if s := spec(t); s.GPUs[1].Lost {
			t.Error("still lost")
		}
	})
	t.Run("nvml-hang, nvml-unhang", func(t *testing.T) {
		fault(t, "nvml-hang")
		if f := spec(t).Faults; len(f) != 1 || !f[0].Hang || f[0].UUID != second {
			t.Errorf("faults %v", f)
		}
		fault(t, "nvml-unhang")
		if f := spec(t).Faults; len(f) != 0 {
			t.Errorf("faults %v", f)
		}
	})
	t.Run("kill-daemon", func(t *testing.T) {
		daemon := exec.Command(filepath.Join(machine, "bin", mpssim.ControlName), "-f")
		daemon.Env = []string{"CUDA_VISIBLE_DEVICES=" + second, "CUDA_MPS_PIPE_DIRECTORY=" + t.TempDir(), "CUDA_MPS_LOG_DIRECTORY=" + t.TempDir()}
		if err := daemon.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = daemon.Process.Kill() })
		waitFor(t, "the daemon", func() bool {
			pids, err := mpssim.Daemons(machine, second)
			return err == nil && len(pids) == 1
		})
		if out := fault(t, "kill-daemon"); !strings.HasPrefix(out, "kill-daemon on "+second+" (pid ") {
			t.Errorf("printed %q", out)
		}
		_ = daemon.Wait()
		if ws := daemon.ProcessState.Sys().(syscall.WaitStatus); ws.Signal() != syscall.SIGKILL {
			t.Errorf("ended with %v", daemon.ProcessState)
		}
	})
	for _, tc := range []struct {
		name string
		args []string
		code int
		says string
	}{
		{"no fault", []string{"fault"}, 2, "name a fault"},
		{"no machine", []string{"fault", "xid", "79", "--machine", dir}, 1, "--machine: open " + dir + "/sim/machine: no such file or directory. A simulated machine is made by"},
		{"which GPU", []string{"fault", "xid", "79", "--machine", machine}, 2, "--gpu: give one of 0 (" + made.GPUs[0] + "), 1 (" + second + ")"},
		{"a GPU that is not there", []string{"fault", "xid", "79", "--machine", machine, "--gpu", "7"}, 2, `--gpu: no GPU "7" on the machine; it has 0 (`},
		{"an xid that is no number", []string{"fault", "xid", "x", "--machine", machine, "--gpu", "0"}, 2, `N: "x" is no number`},
		{"no daemon", []string{"fault", "kill-daemon", "--machine", machine, "--gpu", "0"}, 1, "no nvidia-cuda-mps-control of " + made.GPUs[0] + " runs"},
		{"a folder that is not empty", []string{"sim", "create", machine}, 1, machine + ": not empty"},
		{"no GPUs", []string{"sim", "create", dir + "/m", "--gpus", "0"}, 2, "--gpus: 0 is less than 1"},
		{"too little memory", []string{"sim", "create", dir + "/m", "--gpu-memory", "10"}, 2, "--gpu-memory: 10 MiB is not within 1024"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, errs, code := berth(t, nil, tc.args...)
			if code != tc.code || !strings.HasPrefix(errs, "berth: "+tc.says) {
				t.Errorf("exit code %d, want %d; got %q, want %q", code, tc.code, errs, tc.says)
			}
		})
	}
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(10 * time.Second); !ok(); {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("no %s within 10 s", what)
		}
	}
}
