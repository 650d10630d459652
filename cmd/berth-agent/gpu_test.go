package main_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-gpu/berth/agent/state"
	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/mps/mpssim"
)

const gib = 1024

// Four tasks of 20 GiB and one of 30 GiB on two GPUs of 80 GiB.
func TestFiveTasksOnTwoGPUs(t *testing.T) {
	t.Parallel()
	r := newRig(t, 80*gib, 80*gib)
	port := freePort(t)
	r.set("metricsAddress", port)
	for i := 1; i <= 4; i++ {
		d := shared(20*gib, 0, "run", "--memory", "18GiB", "--print-env")
		d.CPU, d.Memory = "256", "128"
		if i == 1 {
			d = shared(20*gib, 40, "run", "--memory", "18GiB", "--print-env")
			d.CPU, d.Memory = "256", "128"
		}
		r.want(fmt.Sprintf("1-small-%d", i), d)
	}
	r.want("2-large", shared(30*gib, 0, "run", "--memory", "28GiB"))
	r.start()
	r.until("all five run", func() bool {
		for _, name := range []string{"1-small-1", "1-small-2", "1-small-3", "1-small-4", "2-large"} {
			if !r.running(name) || !strings.Contains(r.logs(name), "allocated:") {
				return false
			}
		}
		return true
	})

	t.Run("best fit fills one GPU first", func(t *testing.T) {
		for i := 1; i <= 4; i++ {
			if got := r.task(fmt.Sprintf("1-small-%d", i)).GPUIDs; got[0] != r.gpus[0] {
				t.Errorf("small %d is on %s", i, got)
			}
		}
		if got := r.task("2-large").GPUIDs; got[0] != r.gpus[1] {
			t.Errorf("the large one is on %s", got)
		}
		if g := r.gpu(0); g.SharingMode != api.ModeNvidiaMPS || g.RemainingMemoryInMiB != 0 || g.ContainerCount != 4 || !g.Held || len(g.Slices) != 4 {
			t.Errorf("GPU 0: %+v", g)
		}
	})
	t.Run("environment, mounts and devices inside", func(t *testing.T) {
		env := r.exec("1-small-1", "env")
		for _, want := range []string{
			"NVIDIA_VISIBLE_DEVICES=" + r.gpus[0] + "\n",
			"CUDA_MPS_PIPE_DIRECTORY=/run/berth/mps\n",
			"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=20480M\n",
			"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40\n",
		} {
			if !strings.Contains(env, want) {
				t.Errorf("%q is not in\n%s", want, env)
			}
		}
		if env := r.exec("1-small-2", "env"); strings.Contains(env, "ACTIVE_THREAD_PERCENTAGE") {
			t.Errorf("no percentage was asked for:\n%s", env)
		}
		if ls := strings.Fields(r.exec("1-small-1", "ls", "/run/berth/mps")); len(ls) != 5 || ls[4] != "control" {
			t.Errorf("the client folder holds %q, want control alone", ls)
		}
		if !strings.Contains(mountLine(r.exec("1-small-1", "cat", "/proc/mounts"), "/run/berth/mps"), " ro,") {
			t.Error("the client folder is not mounted read-only")
		}
		spec, err := r.machine.Spec()
		if err != nil {
			t.Fatal(err)
		}
		granted, other := fmt.Sprintf("/dev/nvidia%d", spec.GPUs[0].Minor), fmt.Sprintf("/dev/nvidia%d", spec.GPUs[1].Minor)
		if got := r.exec("1-small-1", "open", granted); !strings.Contains(got, "ENXIO") {
			t.Errorf("the granted GPU: %s, want ENXIO on a machine without hardware", got)
		}
		if got := r.exec("1-small-1", "ls", "/dev"); strings.Contains(got, filepath.Base(other)) {
			t.Errorf("the other GPU's node is in the container:\n%s", got)
		}
	})
	t.Run("the cgroup's numbers", func(t *testing.T) {
		pid := r.container("1-small-1").PID
		for file, want := range map[string]string{
			"cpu/cpu.cfs_quota_us":         "25000",
			"memory/memory.limit_in_bytes": "134217728",
		} {
			if got := taskCgroup(t, pid, file); got != want {
				t.Errorf("%s is %s, want %s", file, got, want)
			}
		}
	})
	t.Run("a client over its cap is refused, its neighbours notice nothing", func(t *testing.T) {
		before := r.logs("1-small-3")
		out := r.exec("1-small-2", "run", "--memory", "21GiB")
		if !strings.Contains(out, "OUT_OF_MEMORY") {
			t.Errorf("over the cap: %s", out)
		}
		if after := r.logs("1-small-3"); after != before {
			t.Errorf("the neighbour said more: %q", strings.TrimPrefix(after, before))
		}
	})
	t.Run("metrics and doctor", func(t *testing.T) {
		metrics, err := r.ask("GET", api.PathMetrics, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{
			fmt.Sprintf(`berth_gpu_held{gpu=%q,index="0"} 1`, r.gpus[0]),
			fmt.Sprintf(`berth_gpu_sharing_mode{gpu=%q,index="0",mode="NVIDIA_MPS"} 1`, r.gpus[0]),
			fmt.Sprintf(`berth_mps_restarts_total{gpu=%q,index="0"} 0`, r.gpus[0]),
			fmt.Sprintf(`berth_gpu_slices{gpu=%q,index="0"} 4`, r.gpus[0]),
			fmt.Sprintf(`berth_gpu_memory_allocated_bytes{gpu=%q,index="1"} 3.221225472e+10`, r.gpus[1]),
		} {
			if !strings.Contains(metrics, want+"\n") {
				t.Errorf("%s is not in the metrics", want)
			}
		}
		resp, err := http.Get("http://" + port + api.PathMetrics)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Errorf("metrics on the loopback port: %s", resp.Status)
		}
		if other, err := http.Get("http://" + port + api.PathTasks); err != nil || other.StatusCode != http.StatusNotFound {
			t.Errorf("the loopback port serves more than metrics: %v %v", other, err)
		}
		var checks []api.Check
		if _, err := r.ask("GET", api.PathDoctor, &checks); err != nil {
			t.Fatal(err)
		}
		found := map[string]bool{}
		for _, c := range checks {
			found[c.Name] = true
			if c.Says == "" || (!c.OK && c.Do == "") || (!c.OK && !c.Warn) {
				t.Errorf("check %+v", c)
			}
		}
		for _, name := range []string{"driver", "mps", "mps GPU 0", "mps GPU 1", "conflicts", "docker", "cgroup", "folders"} {
			if !found[name] {
				t.Errorf("doctor did not look at %s: %v", name, found)
			}
		}
	})
	t.Run("a sixth waits and says what each GPU lacks", func(t *testing.T) {
		r.want("3-sixth", shared(60*gib, 0, "run"))
		r.until("it waits", func() bool { return len(r.inst().Waiting) == 1 })
		got := r.inst().Waiting[0]
		want := []string{
			fmt.Sprintf("GPU 0 (%s): 61440 MiB wanted, 0 MiB free: 61440 MiB short", r.gpus[0]),
			fmt.Sprintf("GPU 1 (%s): 61440 MiB wanted, 51200 MiB free: 10240 MiB short", r.gpus[1]),
		}
		if strings.Join(got.Reasons, "\n") != strings.Join(want, "\n") {
			t.Errorf("got  %q\nwant %q", got.Reasons, want)
		}
		r.drop("3-sixth")
	})
	t.Run("a whole-GPU task never lands on a shared GPU", func(t *testing.T) {
		r.want("4-whole", whole("1", "run", "--memory", "1GiB"))
		r.until("it waits", func() bool { return len(r.inst().Waiting) == 1 && r.inst().Waiting[0].Name == "4-whole" })
		r.drop("2-large")
		r.until("it runs once a GPU is idle", func() bool { return r.running("4-whole") })
		if got := r.gpu(1); got.SharingMode != api.ModeDedicated || got.ComputeMode != "DEFAULT" || got.MPS.ServerPID != 0 {
			t.Errorf("GPU 1: %+v", got)
		}
		if env := r.exec("4-whole", "env"); strings.Contains(env, "CUDA_MPS") || !strings.Contains(env, "NVIDIA_VISIBLE_DEVICES="+r.gpus[1]) {
			t.Errorf("a whole-GPU container gets no pipe folder:\n%s", env)
		}
		r.want("5-share", shared(1*gib, 0, "run"))
		r.until("a share waits beside it", func() bool { return len(r.inst().Waiting) == 1 && r.inst().Waiting[0].Name == "5-share" })
		if why := strings.Join(r.inst().Waiting[0].Reasons, "\n"); !strings.Contains(why, "a whole-GPU task has it") {
			t.Errorf("got %s", why)
		}
	})
}

// freePort is a loopback address that nobody listens on.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// mountLine is the line of /proc/mounts for a mount point.
func mountLine(mounts, at string) string {
	for _, line := range strings.Split(mounts, "\n") {
		if f := strings.Fields(line); len(f) > 3 && f[1] == at {
			return line
		}
	}
	return ""
}

// taskCgroup reads a number of the cgroup that the container of a process lies
// in: the task's. The names are those of cgroup v1.
func taskCgroup(t *testing.T, pid int, file string) string {
	t.Helper()
	controller, name := filepath.Split(file)
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(b), "\n") {
		f := strings.SplitN(line, ":", 3)
		if len(f) == 3 && slices.Contains(strings.Split(f[1], ","), filepath.Clean(controller)) {
			b, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", controller, filepath.Dir(f[2]), name))
			if err != nil {
				t.Error(err)
			}
			return strings.TrimSpace(string(b))
		}
	}
	t.Errorf("process %d is in no cgroup of %s:\n%s", pid, controller, b)
	return ""
}

// A container without a GPU, or with another one, cannot open a GPU's node even
// where it makes the node itself.
func TestDeviceNodes(t *testing.T) {
	t.Parallel()
	r := newRig(t, 80*gib, 80*gib)
	r.want("1-none", plain("sleep", "1h"))
	r.want("2-one", whole("1", "sleep", "1h"))
	r.start()
	r.until("both run", func() bool { return r.running("1-none") && r.running("2-one") })
	spec, err := r.machine.Spec()
	if err != nil {
		t.Fatal(err)
	}
	node := func(i int) string { return fmt.Sprintf("/dev/nvidia%d", spec.GPUs[i].Minor) }
	mknod := func(task string, i int) {
		t.Helper()
		// From outside: the sample image has no mknod. The device cgroup is the container's all the same.
		pid := r.container(task).PID
		out, err := exec.CommandContext(context.Background(), "mknod", fmt.Sprintf("/proc/%d/root%s", pid, node(i)), "c", "195", fmt.Sprint(spec.GPUs[i].Minor)).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	mknod("1-none", 0)
	mknod("2-one", 1)
	for _, tt := range []struct {
		name, task string
		gpu        int
		want       string
	}{
		{"without a GPU", "1-none", 0, "EPERM"},
		{"with another GPU", "2-one", 1, "EPERM"},
		{"the granted one", "2-one", 0, "ENXIO"},
	} {
		if got := r.exec(tt.task, "open", node(tt.gpu)); !strings.Contains(got, tt.want) {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}

// A process that leaves the pipe folder out of its environment goes past MPS. On
// a real GPU it gets error 46, because the server holds the GPU exclusively; the
// simulated client cannot know that in here and runs uncapped: then NVML shows it,
// its task is stopped for it, and its neighbour goes on.
func TestProcessThatSkipsMPS(t *testing.T) {
	t.Parallel()
	r := newRig(t, 80*gib)
	r.want("honest", shared(10*gib, 0, "run", "--memory", "1GiB"))
	r.want("skips", shared(10*gib, 0, "run", "--memory", "1GiB"))
	r.start()
	r.until("both run", func() bool { return r.running("honest") && r.running("skips") })
	id := r.task("skips").Containers[0].RuntimeID
	out, err := exec.Command("docker", "exec", "-d", "-e", "CUDA_MPS_PIPE_DIRECTORY=/nowhere", id, "/bin/cuda-client", "run", "--memory", "30GiB").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	r.until("its task is stopped", func() bool { return r.stopped("skips") })
	if got := r.task("skips"); !strings.Contains(got.StoppedReason, "UncappedProcessError") || got.Generation != 2 {
		t.Errorf("got %s: %s, generation %d: it must not be started again", got.StopCode, got.StoppedReason, got.Generation)
	}
	if !r.running("honest") {
		t.Error("its neighbour was stopped with it")
	}
	r.until("the GPU counts as held again", func() bool { return r.gpu(0).Held })
}

// After a reboot of the host what was stored of processes is void: what was wanted
// is started anew, under new generations.
func TestHostReboot(t *testing.T) {
	t.Parallel()
	r := newRig(t, 80*gib)
	r.want("one", shared(10*gib, 0, "run", "--memory", "1GiB"))
	r.want("ended", plain("exit", "3"))
	r.start()
	r.until("it runs", func() bool { return r.running("one") && r.stopped("ended") })
	old := r.task("one")
	r.signal(syscall.SIGTERM)
	// The machine goes down: containers and daemons end.
	for _, c := range r.containers() {
		r.docker.Kill(context.Background(), c.ID)
	}
	for _, find := range []func(string, string) ([]int, error){mpssim.Daemons, mpssim.Servers} {
		pids, _ := find(r.machine.Dir, r.gpus[0])
		for _, pid := range pids {
			syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	if err := r.machine.SetComputeMode(r.gpus[0], 0); err != nil {
		t.Fatal(err)
	}
	os.RemoveAll(filepath.Join(r.dir, "run"))
	store, err := state.Open(filepath.Join(r.dir, "state"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Begin(r.instance, "another-boot"); err != nil {
		t.Fatal(err)
	}
	store.Close()
	r.start()
	r.until("it runs under a new generation", func() bool { return r.running("one") && r.task("one").Generation > old.Generation })
	if got := r.byID(old.ID); got.StopCode != "InfrastructureHealth" || !strings.Contains(got.StoppedReason, "rebooted") {
		t.Errorf("the old one: %s: %s", got.StopCode, got.StoppedReason)
	}
	if got := r.task("ended"); *got.Containers[0].ExitCode != 3 {
		t.Errorf("the one that had ended by itself: %+v", got)
	}
	if m := r.gpu(0).MPS; m.Restarts != 0 || m.Failures != 0 {
		t.Errorf("the daemon's record of the earlier boot counts: %+v", m)
	}
}

// A client that does not heed TERM is ended in MPS's order: its contexts first, by
// terminate_client, then its process. Its neighbour's contexts stay.
func TestStopInMPSOrder(t *testing.T) {
	t.Parallel()
	r := newRig(t, 80*gib)
	stubborn := shared(10*gib, 0, "run", "--memory", "1GiB", "--ignore-term", "--stay")
	stubborn.ContainerDefinitions[0].StopTimeout = 2
	r.want("neighbour", shared(10*gib, 0, "run", "--memory", "1GiB"))
	r.want("stubborn", stubborn)
	r.start()
	r.until("both run", func() bool { return r.attached("neighbour") && r.attached("stubborn") && r.gpu(0).Held })
	asked := time.Now()
	if _, err := r.ask("POST", strings.Replace(api.PathStop, "{id}", r.task("stubborn").ID, 1), nil); err != nil {
		t.Fatal(err)
	}
	r.until("it has stopped", func() bool { return r.stopped("stubborn") })
	c := r.container("stubborn")
	if c.ExitCode != 137 || c.FinishedAt.Sub(asked) < 2*time.Second {
		t.Errorf("it ended with %d after %s, want KILL after its stop timeout of 2 s", c.ExitCode, c.FinishedAt.Sub(asked))
	}
	if logs := r.logs("stubborn"); !strings.Contains(logs, "810") {
		t.Errorf("its contexts were not terminated before its process was killed:\n%s", logs)
	}
	if logs := r.logs("neighbour"); strings.Contains(logs, "error") || !r.running("neighbour") {
		t.Errorf("the neighbour suffered:\n%s", logs)
	}
}
