package main_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-gpu/berth/mps"
	"github.com/berth-gpu/berth/mps/mpssim"
)

// The agent with NVIDIA's real control daemon. Without a GPU no server ever
// becomes ready, so the gate must refuse, and say why; and what a container can
// reach of the daemon is the real thing.
func TestRealControlDaemon(t *testing.T) {
	t.Parallel()
	oracle := mpssim.OracleDir()
	control := filepath.Join(oracle, "usr/bin/nvidia-cuda-mps-control")
	if _, err := os.Stat(control); err != nil {
		t.Skip("NVIDIA's control daemon is not here; scripts/setup oracle fetches it")
	}
	r := newRig(t, 80*gib)
	r.set("mps.controlBinary", control)
	r.set("mps.path", filepath.Join(oracle, "usr/bin")+":"+filepath.Join(oracle, "usr/sbin")+":/usr/bin:/bin")
	r.set("mps.libraryPath", filepath.Join(oracle, "usr/lib/x86_64-linux-gnu/nvidia/current"))
	r.start()
	r.until("the real daemon is up", func() bool { return r.gpu(0).MPS.State == string(mps.PhaseIdle) })
	if g := r.gpu(0); !g.MPS.SingleUID {
		t.Error("R535 knows no -multiuser-server, and the agent did not record it")
	}

	probe := probeContainer(t, r, oracle)
	ask := func() string { return dockerExec(t, "", probe, "/bin/cudaprobe") }
	quit := func() string { return dockerExec(t, "quit\n", probe, "/bin/nvidia-cuda-mps-control") }
	t.Run("libcuda in a container reaches it through the client folder", func(t *testing.T) {
		if got := ask(); got != "805" {
			t.Errorf("cuInit gave %s, want 805: 100 is a client that found no daemon and would run uncapped", got)
		}
	})
	t.Run("root in a container cannot quit it", func(t *testing.T) {
		pid := r.gpu(0).MPS.DaemonPID
		out := quit()
		if !strings.Contains(out, "Not enough privilege") {
			t.Errorf("quit: %q", out)
		}
		if syscall.Kill(pid, 0) != nil {
			t.Error("the daemon is gone")
		}
	})
	t.Run("a kill -9 and a restart, inside the running container", func(t *testing.T) {
		for range 3 {
			old := r.gpu(0).MPS.DaemonPID
			if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			r.until("another daemon is up", func() bool {
				m := r.gpu(0).MPS
				return m.DaemonPID != 0 && m.DaemonPID != old && m.State == string(mps.PhaseIdle)
			})
			if got := ask(); got != "805" {
				t.Errorf("after the restart cuInit gave %s", got)
			}
			if out := quit(); !strings.Contains(out, "Not enough privilege") {
				t.Errorf("quit after the restart: %q", out)
			}
		}
	})
	t.Run("the gate refuses, with the true reason", func(t *testing.T) {
		r.want("capped", shared(10*gib, 0, "run"))
		r.within(time.Minute, "the reason is what the server's log says", func() bool {
			return strings.Contains(fmt.Sprint(r.inst().Waiting, r.task("capped").Reason, r.gpu(0).HeldReason), "no CUDA-capable device")
		})
		for _, c := range r.containers() {
			if c.Started() {
				t.Errorf("a capped container was started: %s", c.Name)
			}
		}
		if g := r.gpu(0); g.Held || g.ComputeMode == "EXCLUSIVE_PROCESS" {
			t.Errorf("GPU 0: %+v", g)
		}
	})
}

// probeContainer runs a container that holds the real libcuda and sees the GPU's
// client folder just as a task's container does.
func probeContainer(t *testing.T, r *rig, oracle string) string {
	t.Helper()
	ctx := context.Background()
	tar, err := mpssim.CudaProbeImage(ctx, oracle)
	if err != nil {
		t.Fatal(err)
	}
	ref := "berth-test-probe:" + r.instance
	if _, err := r.docker.LoadImage(ctx, ref, tar, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.docker.RemoveImage(ctx, ref) })
	client := mps.Dirs{Run: filepath.Join(r.dir, "run"), UUID: r.gpus[0]}.Client()
	out, err := exec.Command("docker", "run", "-d", "--network", "none", "-v", client+":"+mps.ContainerPipeDirectory+":ro",
		"-v", filepath.Join(oracle, "usr/bin/nvidia-cuda-mps-control")+":/bin/nvidia-cuda-mps-control:ro",
		"-e", "CUDA_MPS_PIPE_DIRECTORY="+mps.ContainerPipeDirectory, "--entrypoint", "/bin/cudaprobe", ref, "--every", "100000").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	id := strings.TrimSpace(string(out))
	t.Cleanup(func() { exec.Command("docker", "rm", "-f", id).Run() })
	return id
}

func dockerExec(t *testing.T, stdin, id string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "docker", append([]string{"exec", "-i", id}, args...)...)
	cmd.Stdin = strings.NewReader(stdin)
	out, _ := cmd.CombinedOutput() // what it says is what counts
	return strings.TrimSpace(string(out))
}
