package mpssim

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// used is what nvmlsim would show of a GPU, per kind, in MiB.
func used(uuid string) map[string]int64 {
	mib := map[string]int64{}
	for _, h := range holders(uuid) {
		mib[h.kind] += h.bytes >> 20
	}
	return mib
}

func TestClientIsCapped(t *testing.T) {
	for _, tc := range []struct {
		name, server, env, want string
	}{
		{"by its environment", "", "0=5120M", "refused beyond 5120 MiB: CUDA_ERROR_OUT_OF_MEMORY (2)"},
		{"by the server's default", "3G", "", "refused beyond 3072 MiB: CUDA_ERROR_OUT_OF_MEMORY (2)"},
		{"the lower one: server", "2G", "0=5G", "refused beyond 2048 MiB"},
		{"the lower one: client", "7G", "0=5G", "refused beyond 5120 MiB"},
		{"by UUID", "", "UUID=1G", "refused beyond 1024 MiB"},
		{"another device's key is no cap", "", "1=5G", fmt.Sprintf("refused beyond %d MiB", 80<<10-30)},
		{"a wrong form is no cap", "", "5G", fmt.Sprintf("refused beyond %d MiB", 80<<10-30)},
		{"by the GPU's memory", "", "", fmt.Sprintf("refused beyond %d MiB", 80<<10-30)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			w.daemon("-multiuser-server")
			if tc.server != "" {
				w.control("set_default_device_pinned_mem_limit 0 " + tc.server)
			}
			w.server()
			c := w.clientWith([]string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + strings.ReplaceAll(tc.env, "UUID", w.gpuA)}, "--memory", "1GiB", "--step", "512MiB", "--over-cap-try")
			c.says(tc.want)
		})
	}
}

func TestNeighboursKeepTheirMemory(t *testing.T) {
	w := newWorld(t)
	w.daemon("-multiuser-server")
	w.server()
	a := w.clientWith([]string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=20480M"}, "--memory", "18GiB")
	a.says("allocated: 18432 MiB")
	b := w.clientWith([]string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=20480M"}, "--memory", "21GiB")
	b.says("error: CUDA_ERROR_OUT_OF_MEMORY (2)")
	if code := b.ends(); code != 1 {
		t.Errorf("a client over its cap ended with %d", code)
	}
	if got := used(w.gpuA); got[kindServer] != 30 || got[kindClient] != 18<<10 {
		t.Errorf("held: %v", got)
	}
	_ = a.cmd.Process.Signal(syscall.SIGTERM)
	if code := a.ends(); code != 0 {
		t.Errorf("ended with %d on SIGTERM", code)
	}
	if got := used(w.gpuA); got[kindClient] != 0 {
		t.Errorf("held after the end: %v", got)
	}
}

func TestPercentageIsTheLowerOne(t *testing.T) {
	w := newWorld(t)
	w.daemon("-multiuser-server")
	w.control("set_default_active_thread_percentage 50")
	pid := w.server()
	w.clientWith([]string{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30"}).says("active threads 30.0 %")
	w.clientWith([]string{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=70"}).says("active threads 50.0 %")
	if out, _ := w.control(fmt.Sprintf("set_active_thread_percentage %d 20", pid)); out != "20.0\n" {
		t.Errorf("set_active_thread_percentage: %q", out)
	}
	w.client().says("active threads 20.0 %")
}

func TestNoDaemonMeansNoCap(t *testing.T) {
	w := newWorld(t)
	w.daemon("-multiuser-server")
	if _, err := KillDaemon(w.dir, w.gpuA); err != nil { // leaves stale sockets
		t.Fatal(err)
	}
	eventually(t, "the daemon's end", func() bool { pids, _ := Daemons(w.dir, w.gpuA); return len(pids) == 0 })
	c := w.clientWith([]string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1G"}, "--memory", "9GiB")
	c.says("mps: none, running without a cap")
	c.says("allocated: 9216 MiB")
	if got := used(w.gpuA); got[kindCompute] != 9<<10 {
		t.Errorf("held: %v", got)
	}
}

func TestNoDevice(t *testing.T) {
	w := newWorld(t)
	for _, visible := range []string{"void", "none", "", "GPU-cccccccc"} {
		c := w.clientWith([]string{"NVIDIA_VISIBLE_DEVICES=" + visible}, "--memory", "1GiB")
		c.says("error: CUDA_ERROR_NO_DEVICE (100)")
	}
}

func TestFatalFaultReachesEveryClient(t *testing.T) {
	w := newWorld(t)
	d := w.daemon("-multiuser-server")
	server := w.server()
	a := w.client("--memory", "1GiB")
	b := w.client("--memory", "2GiB", "--stay")
	a.says("allocated")
	b.says("allocated")
	if _, err := FatalFault(w.dir, w.gpuA, 719); err != nil {
		t.Fatal(err)
	}
	a.says("error: CUDA_ERROR_LAUNCH_FAILED (719)")
	b.says("error: CUDA_ERROR_LAUNCH_FAILED (719)")
	a.ends()
	status := func() string {
		out, _ := w.control(fmt.Sprintf("get_server_status %d", server))
		return strings.TrimSpace(out)
	}
	if got := status(); got != "FAULT" {
		t.Errorf("status %s while a client that swallowed the error lives", got)
	}
	w.client().says("error: CUDA_ERROR_MPS_SERVER_NOT_READY (807)")
	_ = b.cmd.Process.Kill()
	eventually(t, "ACTIVE", func() bool { return status() == "ACTIVE" })
	d.says("FAULT")
	d.says("INACTIVE", 2)
	w.client("--memory", "1GiB").says("allocated")
	if _, err := FatalFault(w.dir, w.gpuA, 0); err != nil { // each fault is one of its own
		t.Fatal(err)
	}
	eventually(t, "FAULT", func() bool { return status() == "FAULT" || strings.Count(d.output(), "INACTIVE") > 2 })
}

func TestTerminateClient(t *testing.T) {
	w := newWorld(t)
	w.daemon("-multiuser-server")
	server := w.server()
	a, b := w.client("--memory", "1GiB", "--stay"), w.client("--memory", "1GiB")
	a.says("allocated")
	b.says("allocated")
	out, _ := w.control(fmt.Sprintf("terminate_client %d %d", server, a.cmd.Process.Pid))
	if out != "0\n" {
		t.Errorf("terminate_client: %q", out)
	}
	a.says("error: CUDA_ERROR_MPS_CLIENT_TERMINATED (810)")
	if got := used(w.gpuA); got[kindClient] != 1<<10 {
		t.Errorf("held: %v", got)
	}
	if strings.Contains(b.output(), "error") {
		t.Errorf("the neighbour: %s", b.output())
	}
	if out, _ := w.control(fmt.Sprintf("terminate_client %d 1", server)); out != "1\n" {
		t.Errorf("terminate_client of a stranger: %q", out)
	}
}

func TestServerCrash(t *testing.T) {
	w := newWorld(t)
	d := w.daemon("-multiuser-server")
	server := w.server()
	c := w.client("--memory", "1GiB")
	c.says("allocated")
	if _, err := CrashServer(w.dir, w.gpuA); err != nil {
		t.Fatal(err)
	}
	c.says("error: CUDA_ERROR_MPS_RPC_FAILURE (806)")
	d.says(fmt.Sprintf("Server %d exited with status 0", server))
	c = w.client("--memory", "1GiB") // the next client brings a new one
	c.says("allocated")
	d.says("NEW SERVER", 2)
}

func TestClientsOutliveTheDaemon(t *testing.T) {
	for _, variant := range []string{"", "clients-die-with-daemon"} {
		t.Run("variant "+variant, func(t *testing.T) {
			w := newWorld(t, withVariant(variant))
			w.daemon("-multiuser-server")
			server := w.server()
			c := w.client("--memory", "1GiB")
			c.says("allocated")
			if _, err := KillDaemon(w.dir, w.gpuA); err != nil {
				t.Fatal(err)
			}
			if variant != "" {
				c.says("error: CUDA_ERROR_MPS_RPC_FAILURE (806)")
			} else {
				eventually(t, "the daemon's end", func() bool { pids, _ := Daemons(w.dir, w.gpuA); return len(pids) == 0 })
				_ = c.cmd.Process.Signal(syscall.SIGTERM)
				if code := c.ends(); code != 0 || strings.Contains(c.output(), "error") {
					t.Errorf("ended with %d: %s", code, c.output())
				}
			}
			if pids, _ := Servers(w.dir, w.gpuA); len(pids) != 1 || pids[0] != server {
				t.Errorf("orphans: %v, want %d", pids, server)
			}
			if got := used(w.gpuA); got[kindServer] != 30 {
				t.Errorf("the orphan holds %v", got)
			}
		})
	}
}

func withVariant(name string) func(*Steer) {
	return func(s *Steer) {
		if name != "" {
			s.Variants = []string{name}
		}
	}
}

func (w *world) computeMode(digit string) {
	w.t.Helper()
	if err := os.WriteFile(filepath.Join(w.dir, "sim", "mode."+w.gpuA), []byte(digit), 0o644); err != nil {
		w.t.Fatal(err)
	}
}

func TestExclusiveProcess(t *testing.T) {
	t.Run("a stray gets 46 while the server holds the GPU", func(t *testing.T) {
		w := newWorld(t)
		w.computeMode("3")
		w.daemon("-multiuser-server")
		w.server()
		stray := w.clientWith([]string{"CUDA_MPS_PIPE_DIRECTORY=/nonexistent"}, "--memory", "1GiB")
		stray.says("error: CUDA_ERROR_DEVICE_UNAVAILABLE (46)")
		w.client("--memory", "1GiB").says("allocated")
	})
	t.Run("the server fails while a stray holds the GPU", func(t *testing.T) {
		w := newWorld(t)
		w.computeMode("3")
		stray := w.clientWith([]string{"CUDA_MPS_PIPE_DIRECTORY=/nonexistent"}, "--memory", "1GiB")
		stray.says("allocated")
		d := w.daemon("-multiuser-server")
		w.control("start_server -uid 0")
		d.says("Failed to start : all CUDA-capable devices are busy or unavailable")
		d.says("exited with status 1")
		_ = stray.cmd.Process.Kill()
		stray.ends()
		w.server()
	})
	for _, variant := range []string{"", "server-beside-orphan"} {
		t.Run("an orphan, variant "+variant, func(t *testing.T) {
			w := newWorld(t, withVariant(variant))
			w.computeMode("3")
			w.daemon("-multiuser-server")
			orphan := w.server()
			if _, err := KillDaemon(w.dir, w.gpuA); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the daemon's end", func() bool { pids, _ := Daemons(w.dir, w.gpuA); return len(pids) == 0 })
			d := w.daemon("-multiuser-server")
			if variant != "" {
				w.server()
				return
			}
			w.control("start_server -uid 0")
			d.says("exited with status 1")
			_ = syscall.Kill(orphan, syscall.SIGKILL)
			eventually(t, "the orphan's end", func() bool { pids, _ := Servers(w.dir, w.gpuA); return len(pids) == 0 })
			w.server()
		})
	}
}

func TestSixAttempts(t *testing.T) {
	w := newWorld(t, func(s *Steer) { s.ServerStart, s.Reason = StartFails, "unknown error" })
	d := w.daemon("-multiuser-server")
	c := w.client("--memory", "1GiB")
	c.says("error: CUDA_ERROR_MPS_CONNECTION_FAILED (805)")
	d.says("Removed Shm file at")
	if n := strings.Count(d.output(), "Starting new server"); n != 6 {
		t.Errorf("%d servers for one client", n)
	}
	w.control("start_server -uid 0")
	d.says("Removed Shm file at", 2)
	if n := strings.Count(d.output(), "Starting new server"); n != 7 {
		t.Errorf("%d servers after start_server", n)
	}
	d.says("Failed to start : unknown error", 7)
	w.steer(func(s *Steer) { s.ServerStart = StartWorks })
	w.server()
	w.client("--memory", "1GiB").says("allocated")
	if _, code := w.control("quit -t 0"); code != 1 { // sticky
		t.Errorf("quit ended with %d", code)
	}
	if code := d.ends(); code != 1 {
		t.Errorf("the daemon ended with %d", code)
	}
}

func TestHangingStart(t *testing.T) {
	w := newWorld(t, func(s *Steer) { s.ServerStart = StartHangs })
	d := w.daemon("-multiuser-server")
	c := w.client("--memory", "1GiB")
	d.says("Server is not ready, push client to pending list")
	d.says("Initializing server process")
	server, err := Servers(w.dir, w.gpuA)
	if err != nil || len(server) != 1 {
		t.Fatal(server, err)
	}
	if out, _ := w.control(fmt.Sprintf("get_server_status %d\nget_client_list %d", server[0], server[0])); out != "INITIALIZING\n" {
		t.Errorf("status and clients: %q", out)
	}
	w.steer(func(s *Steer) { s.ServerStart = StartWorks })
	w.control(fmt.Sprintf("shutdown_server %d -f", server[0]))
	c.says("allocated") // from the second server
	d.says(fmt.Sprintf("Server %d exited with status 0", server[0]))
}

func TestClientLimit(t *testing.T) {
	w := newWorld(t)
	w.daemon("-multiuser-server")
	w.server()
	var all []*process
	for range 48 {
		all = append(all, w.client())
	}
	for _, c := range all {
		c.says("device 0")
	}
	w.client().says("error: CUDA_ERROR_MPS_MAX_CLIENTS_REACHED (808)")
	_ = all[0].cmd.Process.Kill()
	all[0].ends()
	var c *process
	eventually(t, "room again", func() bool {
		c = w.client("--for", "1ms")
		return c.ends() == 0
	})
}

func TestQuitNeedsThePrivilegedSocket(t *testing.T) {
	w := newWorld(t)
	w.daemon("-multiuser-server")
	folder := filepath.Join(w.dir, "client")
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(filepath.Join(w.pipe(), "control"), filepath.Join(folder, "control")); err != nil {
		t.Fatal(err)
	}
	c := w.start([]string{"CUDA_MPS_PIPE_DIRECTORY=" + folder}, ClientName, "control", "get_default_active_thread_percentage", "quit")
	c.says("100.0\nNot enough privilege to execute quit command")
	w.server()
	w.clientWith([]string{"CUDA_MPS_PIPE_DIRECTORY=" + folder}, "--memory", "1GiB").says("allocated")
}

func TestQuitWaitsForClients(t *testing.T) {
	w := newWorld(t)
	d := w.daemon("-multiuser-server")
	w.server()
	c := w.client("--memory", "1GiB")
	c.says("allocated")
	quit := w.start(w.env, ControlName)
	quit.ends() // without stdin: nothing
	waiting := w.start(w.env, ClientName, "control", "quit")
	d.says("Cmd:quit")
	if out, code := w.control("get_server_list"); code != 1 || out != "Cannot send command to MPS control daemon process\n" {
		t.Errorf("a command while quit waits: %d %q", code, out)
	}
	w.client().says("error: CUDA_ERROR_MPS_CONNECTION_FAILED (805)")
	_ = c.cmd.Process.Signal(syscall.SIGTERM)
	if code := waiting.ends(); code != 0 {
		t.Errorf("quit ended with %d", code)
	}
	d.says("Exit with status 0")
	d.ends()
	if _, err := os.Stat(filepath.Join(w.pipe(), "log")); !os.IsNotExist(err) {
		t.Errorf("the log fifo: %v", err)
	}
}

func TestQuitByForce(t *testing.T) {
	w := newWorld(t)
	d := w.daemon("-multiuser-server")
	w.server()
	c := w.client("--memory", "1GiB", "--ignore-term")
	c.says("allocated")
	if _, code := w.control("quit -t 0"); code != 0 {
		t.Errorf("quit ended with %d", code)
	}
	c.says("error: CUDA_ERROR_MPS_RPC_FAILURE (806)")
	if code := d.ends(); code != 0 {
		t.Errorf("the daemon ended with %d", code)
	}
}

func TestFrozenDaemon(t *testing.T) {
	w := newWorld(t)
	w.daemon("-multiuser-server")
	pids, err := FreezeDaemon(w.dir, w.gpuA)
	if err != nil || len(pids) != 1 {
		t.Fatal(pids, err)
	}
	eventually(t, "state T", func() bool {
		stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pids[0]))
		return strings.Contains(string(stat), ") T ")
	})
	asked := w.start(w.env, ClientName, "control", "get_default_active_thread_percentage")
	if _, err := ThawDaemon(w.dir, w.gpuA); err != nil {
		t.Fatal(err)
	}
	asked.says("100.0")
}

func TestHangingDaemon(t *testing.T) {
	w := newWorld(t)
	d := w.daemon("-multiuser-server")
	w.steer(func(s *Steer) { s.DaemonHang = true })
	asked := w.start(w.env, ClientName, "control", "get_default_active_thread_percentage")
	d.says("Accepting connection...")
	w.steer(func(s *Steer) { s.DaemonHang = false })
	asked.says("100.0")
}

func TestFilesOfNewBranches(t *testing.T) {
	w := newWorld(t)
	d := w.daemon("-multiuser-server")
	d.says("CUDA MPS Control binary version: 13000")
	pid, err := os.ReadFile(filepath.Join(w.pipe(), "nvidia-cuda-mps-control.pid"))
	if err != nil || strings.TrimSpace(string(pid)) != fmt.Sprint(d.cmd.Process.Pid) {
		t.Errorf("pid file: %q %v", pid, err)
	}
	if _, code := w.control("quit"); code != 0 {
		t.Errorf("quit ended with %d", code)
	}
	d.ends()
	if _, err := os.Stat(filepath.Join(w.pipe(), "nvidia-cuda-mps-control.pid")); !os.IsNotExist(err) {
		t.Errorf("pid file after quit: %v", err)
	}
}

func TestOldBranchKnowsNoMultiuserServer(t *testing.T) {
	w := newWorld(t, func(s *Steer) { s.Branch = 535 })
	p := w.start(w.env, ControlName, "-f", "-multiuser-server")
	if code := p.ends(); code != 1 {
		t.Errorf("ended with %d", code)
	}
	w.daemon()
	if out, _ := w.control("get_server_status 1"); out != "Unknown command \"get_server_status\"\n" {
		t.Errorf("get_server_status: %q", out)
	}
}

func TestServerCarriesTheDaemonsEnvironment(t *testing.T) {
	w := newWorld(t)
	d := w.daemon("-multiuser-server")
	server := w.server()
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", server))
	if err != nil || !strings.Contains(string(env), "BERTH_MPS_ID=test\x00") {
		t.Errorf("environment: %q %v", env, err)
	}
	sid, err := syscall.Getpgid(server)
	if err != nil || sid != d.cmd.Process.Pid {
		t.Errorf("process group %d of a daemon %d: %v", sid, d.cmd.Process.Pid, err)
	}
}

func TestOneUtilityAtATime(t *testing.T) {
	w := newWorld(t)
	d := w.daemon("-multiuser-server")
	r, stdin, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	cmd := exec.Command(filepath.Join(w.bin, ControlName))
	cmd.Stdin = r
	idle := startProcess(t, cmd, w.env, w.bin)
	r.Close()
	d.says("NEW UI")
	if out, code := w.control("get_default_active_thread_percentage"); code != 1 || out != "Cannot send command to MPS control daemon process\n" {
		t.Errorf("beside an idle utility: %d %q", code, out)
	}
	w.client("--memory", "1GiB").says("allocated") // clients are no utilities
	if _, err := stdin.WriteString("get_default_active_thread_percentage\n"); err != nil {
		t.Fatal(err)
	}
	d.says("Cmd:get_default_active_thread_percentage")
	stdin.Close()
	idle.says("100.0")
	if code := idle.ends(); code != 0 {
		t.Errorf("the idle one ended with %d", code)
	}
	eventually(t, "the next one is served", func() bool {
		out, code := w.control("get_default_active_thread_percentage")
		return code == 0 && out == "100.0\n"
	})
}

func TestSilentConnectionWedgesTheDaemon(t *testing.T) {
	w := newWorld(t)
	d := w.daemon("-multiuser-server")
	silent, err := dial(filepath.Join(w.pipe(), "control"))
	if err != nil {
		t.Fatal(err)
	}
	d.says("Accepting connection...")
	asked := w.start(w.env, ClientName, "control", "get_default_active_thread_percentage")
	client := w.client("--memory", "1GiB")
	if strings.Contains(d.output(), "NEW UI") || strings.Contains(client.output(), "allocated") {
		t.Errorf("served beside it: %s", d.output())
	}
	silent.Close()
	d.says("User did not send valid credentials")
	asked.says("100.0")
	client.says("allocated")
}

func TestUtilityNoticesTheDaemonsDeath(t *testing.T) {
	w := newWorld(t)
	d := w.daemon("-multiuser-server")
	r, stdin, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	cmd := exec.Command(filepath.Join(w.bin, ControlName))
	cmd.Stdin = r
	idle := startProcess(t, cmd, w.env, w.bin)
	r.Close()
	d.says("NEW UI")
	if _, err := KillDaemon(w.dir, w.gpuA); err != nil {
		t.Fatal(err)
	}
	if code := idle.ends(); code != 1 || idle.output() != "" {
		t.Errorf("ended with %d %q", code, idle.output())
	}
}
