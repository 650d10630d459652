package mpssim

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// clientAs starts a CUDA program of another user.
func (w *world) clientAs(uid uint32, args ...string) *process {
	w.t.Helper()
	cmd := exec.Command(w.bin+"/"+ClientName, append([]string{"run"}, args...)...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	return startProcess(w.t, cmd, []string{"CUDA_MPS_PIPE_DIRECTORY=" + w.pipe()}, w.bin)
}

func TestUsersTakeTurns(t *testing.T) {
	needRoot(t)
	w := newWorld(t)
	d := w.daemon() // without -multiuser-server
	first := w.client("--memory", "1GiB")
	first.says("allocated")
	second := w.clientAs(65534, "--memory", "1GiB")
	d.says("from user 65534: Server is not ready, push client to pending list")
	if strings.Contains(second.output(), "mps:") {
		t.Errorf("served beside another user: %s", second.output())
	}
	_ = first.cmd.Process.Signal(syscall.SIGTERM)
	second.says("allocated")
	d.says("for user 65534")
	d.says("NEW SERVER", 2)
	pids, err := Servers(w.dir, w.gpuA)
	if err != nil || len(pids) != 1 {
		t.Fatalf("servers %v: %v", pids, err)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(fmt.Sprintf("/proc/%d", pids[0]), &st); err != nil || st.Uid != 65534 {
		t.Errorf("the server is of user %d: %v", st.Uid, err)
	}
}

func TestMultiuserServer(t *testing.T) {
	needRoot(t)
	w := newWorld(t)
	d := w.daemon("-multiuser-server")
	w.client("--memory", "1GiB").says("allocated")
	w.clientAs(65534, "--memory", "1GiB").says("allocated")
	if n := strings.Count(d.output(), "Starting new server"); n != 1 {
		t.Errorf("%d servers", n)
	}
}

func TestDaemonOfAnotherUserServesOnlyItself(t *testing.T) {
	needRoot(t)
	w := newWorld(t)
	if err := os.Chmod(w.dir, 0o777); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(w.bin+"/"+ControlName, "-f")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	d := startProcess(t, cmd, w.env, w.bin)
	t.Cleanup(w.killServers)
	d.says("To connect CUDA applications")
	w.client("--memory", "1GiB").says("error: CUDA_ERROR_MPS_CONNECTION_FAILED (805)")
	if n := strings.Count(d.output(), "exited with status 1"); n != 6 {
		t.Errorf("%d servers failed:\n%s", n, d.output())
	}
	w.clientAs(65534, "--memory", "1GiB").says("allocated")
}

func TestAsInitOfAPidNamespace(t *testing.T) {
	needRoot(t)
	w := newWorld(t)
	cmd := exec.Command(w.bin+"/"+ControlName, "-f", "-multiuser-server")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	d := startProcess(t, cmd, w.env, w.bin)
	d.says("To connect CUDA applications")
	_ = syscall.Kill(d.cmd.Process.Pid, syscall.SIGCONT)
	// From inside, a signal without a handler is dropped; from outside only for init too,
	// unless it is KILL or STOP.
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if out, _ := w.control("get_default_active_thread_percentage"); out != "100.0\n" {
		t.Errorf("after TERM: %q", out)
	}
	// A client of another pid namespace has no pid there.
	w.client("--memory", "1GiB").says("allocated")
	d.says("NEW CLIENT 0 from user 0")
}
