package mps_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-gpu/berth/mps"
)

// oracle is the real control daemon, R535 from Debian's non-free archive. It runs
// without a GPU; its servers then never become ready.
func oracle(t testing.TB) mps.Config {
	t.Helper()
	root := os.Getenv("BERTH_MPS_ORACLE")
	if root == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			t.Skip("the real control daemon is not here: no home folder to look in")
		}
		root = filepath.Join(home, ".cache", "berth", "mps-oracle")
	}
	cfg := mps.Config{
		ControlBinary: filepath.Join(root, "usr/bin/nvidia-cuda-mps-control"),
		Path:          filepath.Join(root, "usr/bin") + ":" + filepath.Join(root, "usr/sbin"),
		LibraryPath:   filepath.Join(root, "usr/lib/x86_64-linux-gnu/nvidia/current"),
	}
	if _, err := os.Stat(cfg.ControlBinary); err != nil {
		t.Skipf("the real control daemon is not here: %s; BERTH_MPS_ORACLE names the folder that nvidia-cuda-mps is unpacked into", root)
	}
	return cfg
}

func TestRealDaemonIsStartedAndAnswers(t *testing.T) {
	m := newMachine(t, oracle(t))
	m.start(mps.UseIdle, 0)
	s := m.awaitPhase(mps.PhaseIdle)
	if !s.SingleUID {
		t.Error("R535 refuses -multiuser-server, and the status does not say so")
	}
	o := m.holder.Observe(t.Context())
	if o.Probe != nil || !o.Daemon.Alive || o.LockHolder != s.DaemonPID {
		t.Errorf("observation of a daemon that is well: %+v", o)
	}
}

func TestRealDaemonTakesCommands(t *testing.T) {
	m := newMachine(t, oracle(t))
	m.start(mps.UseIdle, 0)
	m.awaitPhase(mps.PhaseIdle)
	m.stop() // or it would put back what is changed here
	c, ctx := m.control(), t.Context()

	// The defaults, set and read back, and the traps of setting them otherwise.
	for _, tc := range []struct {
		mib   int64
		shown string
	}{{512, "512M"}, {1, "1M"}, {1023, "1023M"}, {1024, "1G"}, {20480, "20G"}, {1025, "1G"}, {0, ""}} {
		if err := c.SetMemoryLimit(ctx, tc.mib); err != nil {
			t.Errorf("limit of %d MiB: %v", tc.mib, err)
		}
		if shown, err := c.MemoryLimit(ctx); err != nil || shown != tc.shown {
			t.Errorf("limit of %d MiB is shown as %q, not %q (%v)", tc.mib, shown, tc.shown, err)
		}
	}
	if err := c.SetMemoryLimit(ctx, -1); err == nil {
		t.Error("a negative limit was taken")
	}
	if err := c.SetThreadPercent(ctx, 33); err != nil {
		t.Error(err)
	}
	if percent, err := c.ThreadPercent(ctx); err != nil || percent != 33 {
		t.Errorf("percentage %v, %v", percent, err)
	}
	for _, percent := range []int{0, -1, 101} {
		if err := c.SetThreadPercent(ctx, percent); err == nil {
			t.Errorf("percentage %d was taken", percent)
		}
	}

	// What the exit status, which is 0 each time, does not tell.
	if _, err := c.ServerStatus(ctx, 4711); !errors.Is(err, mps.ErrUnknownCommand) {
		t.Errorf("get_server_status on R535: %v", err)
	}
	if err := c.ShutdownServer(ctx, 4711, true); !errors.Is(err, mps.ErrNoServer) {
		t.Errorf("shutdown of no server: %v", err)
	}
	if err := c.TerminateClient(ctx, 4711, 1); !errors.Is(err, mps.ErrNoServer) {
		t.Errorf("terminate a client of no server: %v", err)
	}
	if _, err := c.Clients(ctx, 4711); !errors.Is(err, mps.ErrNoServer) {
		t.Errorf("clients of no server: %v", err)
	}
	if list, err := c.Processes(ctx); err != nil || len(list) != 0 {
		t.Errorf("ps without a server: %v, %v", list, err)
	}
	if list, err := c.Servers(ctx); err != nil || len(list) != 0 {
		t.Errorf("servers: %v, %v", list, err)
	}

	// A tenant sees client/ and nothing else: it cannot stop the daemon from there.
	tenant := mps.NewControl(m.cfg.ControlBinary, mps.Dirs{Run: m.tenantView(), Log: m.dir, UUID: testUUID}, nil, time.Second)
	if err := tenant.Quit(ctx, 0); !errors.Is(err, mps.ErrPrivilege) {
		t.Errorf("quit through client/: %v", err)
	}
	if o := m.holder.Observe(ctx); o.Probe != nil || o.ServerStatus != "" {
		t.Errorf("after all this: %+v", o)
	}
}

// tenantView is a run folder whose pipe folder is the machine's client folder.
func (m *machine) tenantView() string {
	root := filepath.Join(m.dir, "tenant")
	if err := os.MkdirAll(filepath.Join(root, "mps", testUUID), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.Symlink(m.dirs().Client(), filepath.Join(root, "mps", testUUID, "pipe")); err != nil {
		m.t.Fatal(err)
	}
	return root
}

func TestRealDaemonKilledAndStartedOverItsFiles(t *testing.T) {
	m := newMachine(t, oracle(t))
	m.start(mps.UseIdle, 0)
	before := m.awaitPhase(mps.PhaseIdle)
	link := m.inode(filepath.Join(m.dirs().Client(), "control"))
	folder := m.inode(m.dirs().Client())
	kill(t, before.DaemonPID, syscall.SIGKILL)
	after := m.await("another daemon", func(s mps.Status) bool {
		return s.State == mps.PhaseIdle && s.DaemonPID != before.DaemonPID
	})
	if after.Restarts != 1 || after.Failures != 1 {
		t.Errorf("counted: %+v", after)
	}
	if m.inode(filepath.Join(m.dirs().Client(), "control")) == link {
		t.Error("client/control is still the dead daemon's socket")
	}
	if m.inode(m.dirs().Client()) != folder {
		t.Error("the client folder is another: containers have the old one mounted")
	}
	entries, err := os.ReadDir(m.dirs().Client())
	if err != nil || len(entries) != 1 {
		t.Errorf("client/ has %v, %v", entries, err)
	}
	if o := m.holder.Observe(t.Context()); o.Probe != nil {
		t.Errorf("through client/: %v", o.Probe)
	}
}

func (m *machine) inode(path string) uint64 {
	m.t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		m.t.Fatal(err)
	}
	return info.Sys().(*syscall.Stat_t).Ino
}

func TestRealDaemonIsAdopted(t *testing.T) {
	m := newMachine(t, oracle(t))
	m.start(mps.UseIdle, 0)
	before := m.awaitPhase(mps.PhaseIdle)
	m.stop()
	for _, forget := range []bool{false, true} {
		if forget { // the agent died before it had stored the pid
			m.record.Daemon = mps.Process{}
		}
		m.start(mps.UseIdle, -1)
		if after := m.awaitPhase(mps.PhaseIdle); after.DaemonPID != before.DaemonPID || after.Restarts != 0 || !after.SingleUID {
			t.Errorf("was %+v and is %+v", before, after)
		}
		m.stop()
	}
	// Another agent's record does not make it ours.
	m.record = mps.Record{}
	m.start(mps.UseIdle, 0)
	s := m.await("a refusal", func(s mps.Status) bool { return s.State == mps.PhaseBackoff })
	if want := fmt.Sprintf("is held by pid %d (nvidia-cuda-mps), which berth has no record of", before.DaemonPID); !strings.Contains(s.Reason, want) {
		t.Errorf("reason %q does not say %q", s.Reason, want)
	}
	if err := m.holder.Purge(t.Context()); err == nil || !strings.Contains(err.Error(), strconv.Itoa(before.DaemonPID)) {
		t.Errorf("purge under a stranger's daemon: %v", err)
	}
	if err := m.control().Probe(t.Context()); err != nil {
		t.Errorf("the stranger's daemon is not as it was: %v", err)
	}
}

func TestRealDaemonOfAStrangerIsRefused(t *testing.T) {
	m := newMachine(t, oracle(t))
	if err := m.dirs().Create(); err != nil {
		t.Fatal(err)
	}
	stranger := m.stranger()
	m.start(mps.UseMPS, 0)
	s := m.awaitPhase(mps.PhaseBackoff)
	if want := fmt.Sprintf("is held by pid %d (nvidia-cuda-mps), which berth has no record of; stop it, berth does not", stranger); !strings.Contains(s.Reason, want) {
		t.Errorf("reason %q does not say %q", s.Reason, want)
	}
	if o := m.holder.Observe(t.Context()); o.Probe == nil || o.LockHolder != stranger {
		t.Errorf("observed: %+v", o)
	}
	// Once it is gone the GPU is taken up.
	kill(t, stranger, syscall.SIGKILL)
	syscall.Wait4(stranger, nil, 0, nil)
	m.holder.Want(mps.UseIdle)
	m.awaitPhase(mps.PhaseIdle)
}

// stranger starts a daemon on the machine's pipe folder, as an operator might.
func (m *machine) stranger() int {
	m.t.Helper()
	cmd := exec.Command(m.cfg.ControlBinary, "-f")
	cmd.Env = []string{"PATH=" + m.cfg.Path, "CUDA_MPS_PIPE_DIRECTORY=" + m.dirs().Pipe(), "CUDA_MPS_LOG_DIRECTORY=" + m.dirs().Logs()}
	if err := cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for range 500 {
		if mps.LockHolder(m.dirs().Pipe()) == cmd.Process.Pid {
			return cmd.Process.Pid
		}
		<-tick.C
	}
	m.t.Fatal("the stranger's daemon does not start")
	return 0
}

func TestRealDaemonHasNoServerWithoutAGPU(t *testing.T) {
	m := newMachine(t, oracle(t))
	m.start(mps.UseMPS, 0)
	s := m.awaitPhase(mps.PhaseQuarantined)
	if !strings.Contains(s.Reason, "Failed to start : no CUDA-capable device is detected") {
		t.Errorf("reason %q", s.Reason)
	}
	m.mustBeFree()
	if o := m.holder.Observe(t.Context()); o.Probe == nil || o.Status.State == mps.PhaseHeld {
		t.Errorf("observed: %+v", o)
	}
}

func TestRealDaemonWithoutItsLibraryOrServer(t *testing.T) {
	for _, tc := range []struct {
		name  string
		spoil func(*mps.Config)
	}{
		{"no libcuda.so.1", func(c *mps.Config) { c.LibraryPath = "" }},
		{"no server binary on PATH", func(c *mps.Config) { c.Path = "/nonexistent" }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			cfg := oracle(t)
			cfg.Budget.Failures = 2
			tc.spoil(&cfg)
			m := newMachine(t, cfg)
			m.start(mps.UseMPS, 0)
			s := m.awaitPhase(mps.PhaseQuarantined)
			if want := "exited without a word: nvidia-cuda-mps-server is not on the daemon's PATH"; !strings.Contains(s.Reason, want) {
				t.Errorf("reason %q does not say %q", s.Reason, want)
			}
			m.mustBeFree()
		})
	}
}

func TestRealDaemonFrozen(t *testing.T) {
	m := newMachine(t, oracle(t))
	m.start(mps.UseIdle, 0)
	before := m.awaitPhase(mps.PhaseIdle)
	m.holder.Clients(-1)
	kill(t, before.DaemonPID, syscall.SIGSTOP)
	s := m.awaitPhase(mps.PhaseDraining)
	if !strings.Contains(s.Reason, "is stopped, by SIGSTOP or a debugger") || s.Cause != mps.LostDaemon {
		t.Errorf("%+v", s)
	}
	began := time.Now()
	if err := m.control().Probe(t.Context()); !errors.Is(err, mps.ErrWedged) {
		t.Errorf("probe of a frozen daemon: %v", err)
	}
	if took := time.Since(began); took > 4*time.Second {
		t.Errorf("the probe took %v", took)
	}
	m.holder.Clients(0)
	m.await("another daemon", func(s mps.Status) bool { return s.State == mps.PhaseIdle && s.DaemonPID != before.DaemonPID })
}

func TestRealDaemonKeepsItsLogWhenItIsCut(t *testing.T) {
	cfg := oracle(t)
	cfg.LogLimitBytes = 4 << 10
	m := newMachine(t, cfg)
	m.start(mps.UseIdle, 0)
	before := m.awaitPhase(mps.PhaseIdle)
	path := m.dirs().ControlLog()
	m.await("cut of the log", func(mps.Status) bool { _, err := os.Stat(path + ".1"); return err == nil })
	m.await("log after the cut", func(mps.Status) bool {
		b, err := os.ReadFile(path)
		return err == nil && len(b) > 0 && b[0] == '['
	})
	if s := m.holder.Status(); s.State != mps.PhaseIdle || s.DaemonPID != before.DaemonPID {
		t.Errorf("%+v", s)
	}
}

func TestRealDaemonPurged(t *testing.T) {
	m := newMachine(t, oracle(t))
	m.start(mps.UseIdle, 0)
	m.awaitPhase(mps.PhaseIdle)
	if err := m.holder.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	m.mustBeFree()
	if _, err := os.Stat(m.dirs().Root()); !errors.Is(err, os.ErrNotExist) {
		t.Error("the folders are left")
	}
	if err := m.control().Probe(t.Context()); !errors.Is(err, mps.ErrNotRunning) {
		t.Errorf("probe after the purge: %v", err)
	}
}
