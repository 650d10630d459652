package mpssim

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// needDocker skips a test where no Docker engine answers.
func needDocker(t *testing.T) {
	t.Helper()
	needRoot(t)
	if err := exec.CommandContext(t.Context(), "docker", "version").Run(); err != nil {
		t.Skip("no Docker engine answers")
	}
}

func docker(t *testing.T, stdin io.Reader, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "docker", args...)
	cmd.Stdin = stdin
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return strings.TrimSpace(out.String()), err
}

func mustDocker(t *testing.T, stdin io.Reader, args ...string) string {
	t.Helper()
	out, err := docker(t, stdin, args...)
	if err != nil {
		t.Fatalf("docker %v: %v\n%s", args, err, out)
	}
	return out
}

// image loads a root file system and returns the image's name.
func loadImage(t *testing.T, tar io.Reader, err error, entrypoint string) string {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	name := "berth-mpssim-test:" + filepath.Base(tempDir(t))
	mustDocker(t, tar, "import", "--change", "ENTRYPOINT "+entrypoint, "-", name)
	t.Cleanup(func() { _ = exec.Command("docker", "rmi", "-f", name).Run() })
	return name
}

// container starts one in the background and returns its id.
func container(t *testing.T, args ...string) string {
	t.Helper()
	id := mustDocker(t, nil, append([]string{"run", "-d"}, args...)...)
	t.Cleanup(func() { _ = exec.Command("docker", "rm", "-f", id).Run() })
	return id
}

// logs waits until a container has printed something.
func logsSay(t *testing.T, id, text string) {
	t.Helper()
	var out string
	eventually(t, fmt.Sprintf("%q in a container's log", text), func() bool {
		out, _ = docker(t, nil, "logs", id)
		return strings.Contains(out, text)
	}, func() string { return out })
}

// link puts a hard link of pipe/control into the folder that containers see, as berth
// does after each start of a daemon.
func link(t *testing.T, pipe, folder string) {
	t.Helper()
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	next := filepath.Join(filepath.Dir(folder), "next-control")
	if err := os.Link(filepath.Join(pipe, "control"), next); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(next, filepath.Join(folder, "control")); err != nil {
		t.Fatal(err)
	}
}

func TestClientInContainer(t *testing.T) {
	needDocker(t)
	tar, err := SampleImage(t.Context(), strippedBinary(t))
	image := loadImage(t, tar, err, `["/bin/cuda-client"]`)
	w := newWorld(t)
	w.daemon("-multiuser-server")
	server := w.server()
	folder := filepath.Join(w.dir, "client")
	link(t, w.pipe(), folder)
	id := container(t, "-v", folder+":/run/berth/mps:ro", "-e", "CUDA_MPS_PIPE_DIRECTORY=/run/berth/mps",
		"-e", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=20480M", "-e", "NVIDIA_VISIBLE_DEVICES="+w.gpuA, image, "run", "--memory", "18GiB", "--over-cap-try", "--print-env")
	logsSay(t, id, "env: CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=20480M")
	logsSay(t, id, "refused beyond 20480 MiB: CUDA_ERROR_OUT_OF_MEMORY (2)")
	if got := used(w.gpuA); got[kindClient] != 20480 {
		t.Errorf("seen from the host: %v", got)
	}
	pid := mustDocker(t, nil, "inspect", "-f", "{{.State.Pid}}", id)
	if out, _ := w.control(fmt.Sprintf("get_client_list %d", server)); out != pid+"\n" {
		t.Errorf("clients %q, the container's pid is %s", out, pid)
	}
	if out, _ := docker(t, nil, "exec", id, "/bin/nvidia-cuda-mps-control"); out != "" {
		t.Errorf("the utility without input: %q", out)
	}
	if out := mustDocker(t, nil, "exec", id, "/bin/cuda-client", "control", "quit"); out != "Not enough privilege to execute quit command" {
		t.Errorf("quit as root in a container: %q", out)
	}

	// The daemon dies and comes back; new processes of the container find the new one.
	if _, err := KillDaemon(w.dir, w.gpuA); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the daemon's end", func() bool { pids, _ := Daemons(w.dir, w.gpuA); return len(pids) == 0 })
	lone := []string{"exec", id, "/bin/cuda-client", "run", "--memory", "1GiB", "--for", "1ms"}
	if out := mustDocker(t, nil, lone...); !strings.Contains(out, "mps: none, running without a cap") {
		t.Errorf("while the daemon is gone: %s", out)
	}
	w.daemon("-multiuser-server")
	link(t, w.pipe(), folder)
	if out := mustDocker(t, nil, lone...); !strings.Contains(out, "mps: attached through /run/berth/mps/control") {
		t.Errorf("after the restart: %s", out)
	}
	mustDocker(t, nil, "stop", "-t", "10", id)
	if code := mustDocker(t, nil, "inspect", "-f", "{{.State.ExitCode}}", id); code != "0" {
		t.Errorf("ended with %s on docker stop", code)
	}
}

// strippedBinary is the static program; one built with the race detector does not run
// in an image made from scratch.
func strippedBinary(t *testing.T) string {
	t.Helper()
	if !raceEnabled {
		return binary
	}
	out := filepath.Join(tempDir(t), "mpssim")
	if err := Build(t.Context(), out); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestDeviceNodesInContainer(t *testing.T) {
	needDocker(t)
	tar, err := SampleImage(t.Context(), strippedBinary(t))
	image := loadImage(t, tar, err, `["/bin/cuda-client"]`)
	node := filepath.Join(tempDir(t), "nvidia9")
	if err := unix.Mknod(node, unix.S_IFCHR|0o666, int(unix.Mkdev(195, 199))); err != nil {
		t.Skipf("cannot make a device node: %v", err)
	}
	for _, tc := range []struct {
		name string
		args []string
		want string
	}{
		{"granted", []string{"--device", node + ":/dev/nvidia0"}, "/dev/nvidia0 ENXIO"},
		{"not granted", []string{"-v", filepath.Dir(node) + ":/nodes"}, "/nodes/nvidia9 EPERM"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path, _, _ := strings.Cut(tc.want, " ")
			out, _ := docker(t, nil, append(append([]string{"run", "--rm"}, tc.args...), image, "open", path)...)
			if out != tc.want {
				t.Errorf("got %q, want %q", out, tc.want)
			}
		})
	}
}

// TestRealClientInContainer has the real libcuda in a running container find the real
// daemon through the client folder, across the daemon's death and restart.
func TestRealClientInContainer(t *testing.T) {
	needDocker(t)
	both := rigs(t, "")
	r := both[0]
	r.start()
	folder := r.dir + "/client"
	link(t, r.dir+"/p", folder)
	tar, err := CudaProbeImage(t.Context(), oracleDir(t))
	image := loadImage(t, tar, err, `["/bin/cudaprobe"]`)
	id := container(t, "-v", folder+":/run/berth/mps:ro", "-e", "CUDA_MPS_PIPE_DIRECTORY=/run/berth/mps", image, "--every", "100")
	logsSay(t, id, "805")
	killUnder(r)
	eventually(t, "the end", func() bool { return strings.Contains(r.command(0, "x"), "Cannot find") })
	if got := mustDocker(t, nil, "exec", id, "/bin/cudaprobe"); got != "100" {
		t.Errorf("without a daemon cuInit gave %s", got)
	}
	r.start()
	link(t, r.dir+"/p", folder)
	if got := mustDocker(t, nil, "exec", id, "/bin/cudaprobe"); got != "805" {
		t.Errorf("after the restart cuInit gave %s", got)
	}
}
