package mps_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berth-gpu/berth/agent/gpu/nvmlsim"
	"github.com/berth-gpu/berth/mps"
	"github.com/berth-gpu/berth/mps/mpssim"
)

// built is a folder for the simulator's program.
var built string

var simulator = sync.OnceValues(func() (string, error) {
	var err error
	if built, err = os.MkdirTemp("", "mpssim"); err != nil {
		return "", err
	}
	path := filepath.Join(built, "mpssim")
	return path, mpssim.Build(context.Background(), path)
})

func TestMain(m *testing.M) {
	code := m.Run()
	if built != "" {
		os.RemoveAll(built)
	}
	os.Exit(code)
}

// newSimulated is a machine with one simulated GPU.
func newSimulated(t testing.TB, cfg mps.Config) *machine {
	t.Helper()
	binary, err := simulator()
	if err != nil {
		t.Fatal(err)
	}
	m := newMachine(t, cfg)
	spec := nvmlsim.Spec{Driver: "580.159.03", NVML: "13.580.159.03", CUDA: 13000, GPUs: []nvmlsim.GPU{{
		UUID: testUUID, Name: "NVIDIA H100", TotalBytes: 80 << 30, Architecture: 9, ComputeMajor: 9,
		PCIBusID: "00000000:18:00.0", NUMANode: -1, MIG: -1, ECC: -1,
	}}}
	for _, err := range []error{
		os.Mkdir(filepath.Join(m.dir, "sim"), 0o755),
		os.WriteFile(filepath.Join(m.dir, "sim", "machine"), spec.Format(), 0o644),
		mpssim.Install(t.Context(), m.dir, binary),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	m.cfg.ControlBinary = filepath.Join(m.dir, "bin", mpssim.ControlName)
	m.cfg.Path = filepath.Join(m.dir, "bin")
	return m
}

func (m *machine) steer(change func(*mpssim.Steer)) {
	m.t.Helper()
	if err := mpssim.SteerGPU(m.dir, testUUID, change); err != nil {
		m.t.Fatal(err)
	}
}

// client starts a CUDA program with a cap, which holds 1 GiB once client returns,
// and gives its pid and a function that ends it.
func (m *machine) client() (pid int, end func()) {
	m.t.Helper()
	env, err := mps.Limits{MemoryMiB: 2048}.Env()
	if err != nil {
		m.t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(m.dir, "bin", mpssim.ClientName), "run", "--memory", "1GiB", "--stay")
	// On this machine the client folder is where it is, not mounted at its place.
	cmd.Env = append(env, "CUDA_MPS_PIPE_DIRECTORY="+m.dirs().Client(), "NVIDIA_VISIBLE_DEVICES="+testUUID)
	out, err := cmd.StdoutPipe()
	if err != nil {
		m.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	var once sync.Once
	end = func() { once.Do(func() { cmd.Process.Kill(); cmd.Wait() }) }
	m.t.Cleanup(end)
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "allocated") {
			go io.Copy(io.Discard, out)
			return cmd.Process.Pid, end
		}
	}
	m.t.Fatalf("the client has ended before it held memory; last line: %q", lines.Text())
	return 0, nil
}

// mustBeHeld checks a GPU that is held the way the gate does.
func (m *machine) mustBeHeld() mps.Observation {
	m.t.Helper()
	o := m.holder.Observe(m.t.Context())
	switch {
	case o.Probe != nil, o.ModeErr != nil, !o.Exclusive, !o.Daemon.Alive, !o.Server.Alive,
		o.LockHolder != o.Daemon.PID, o.ServerStatus != "ACTIVE", o.Status.State != mps.PhaseHeld:
		m.t.Fatalf("not held: %+v", o)
	}
	return o
}

// mustBeFree checks that no process of MPS is left and the mode is DEFAULT.
func (m *machine) mustBeFree() {
	m.t.Helper()
	if list := m.daemons(); len(list) > 0 {
		m.t.Errorf("still there: %v", list)
	}
	if m.isExclusive() {
		m.t.Error("the mode is EXCLUSIVE_PROCESS")
	}
}

func TestHeldAndReleased(t *testing.T) {
	m := newSimulated(t, mps.Config{})
	m.start(mps.UseIdle, 0)
	idle := m.awaitPhase(mps.PhaseIdle)
	if idle.SingleUID || idle.ServerPID != 0 || m.isExclusive() {
		t.Errorf("IDLE is %+v", idle)
	}
	m.holder.Want(mps.UseMPS)
	held := m.awaitPhase(mps.PhaseHeld)
	if held.DaemonPID != idle.DaemonPID || held.ServerPID == 0 || !m.isExclusive() {
		t.Errorf("HELD is %+v", held)
	}
	m.mustBeHeld()

	// The agent says idle; a container is still alive.
	m.holder.Clients(1)
	m.holder.Want(mps.UseIdle)
	m.holder.Clients(0)
	m.awaitPhase(mps.PhaseIdle)
	if m.isExclusive() {
		t.Error("IDLE with mode EXCLUSIVE_PROCESS")
	}
	m.holder.Want(mps.UseDedicated)
	m.awaitPhase(mps.PhaseDedicated)
	m.holder.Want(mps.UseMPS)
	m.awaitPhase(mps.PhaseHeld)
	m.holder.Want(mps.UseNone)
	m.awaitPhase(mps.PhaseAbsent)
	m.mustBeFree()
	if s := m.holder.Status(); s.Restarts != 0 || s.Failures != 0 {
		t.Errorf("a life without trouble counts: %+v", s)
	}
}

func TestLostParts(t *testing.T) {
	for _, tc := range []struct {
		name     string
		variants []string
		lose     func(m *machine, s mps.Status)
		reason   string
		failures int
		sameD    bool // the daemon lives on
	}{
		{"daemon killed", nil, func(m *machine, s mps.Status) { kill(m.t, s.DaemonPID, syscall.SIGKILL) },
			"control daemon (pid %d) has ended", 1, false},
		{"daemon killed, its clients die with it", []string{"clients-die-with-daemon"}, func(m *machine, s mps.Status) { kill(m.t, s.DaemonPID, syscall.SIGKILL) },
			"control daemon (pid %d) has ended", 1, false},
		{"daemon killed, a server starts beside an orphan", []string{"server-beside-orphan"}, func(m *machine, s mps.Status) { kill(m.t, s.DaemonPID, syscall.SIGKILL) },
			"control daemon (pid %d) has ended", 1, false},
		{"daemon frozen", nil, func(m *machine, s mps.Status) { kill(m.t, s.DaemonPID, syscall.SIGSTOP) },
			"control daemon (pid %d) is stopped", 1, false},
		{"daemon wedged", nil, func(m *machine, s mps.Status) { m.steer(func(s *mpssim.Steer) { s.DaemonHang = true }) },
			"control daemon (pid %d) left 3 probes unanswered", 1, false},
		{"server killed", nil, func(m *machine, s mps.Status) { kill(m.t, s.ServerPID, syscall.SIGKILL) },
			"MPS server", 1, true},
		// It does not go by shutdown_server -f, and then the daemon goes too.
		{"server frozen", nil, func(m *machine, s mps.Status) { kill(m.t, s.ServerPID, syscall.SIGSTOP) },
			"is stopped", 1, false},
		{"socket taken away", nil, func(m *machine, s mps.Status) { os.Remove(filepath.Join(m.dirs().Pipe(), "control")) },
			"its files were replaced", 1, false},
		{"lock file taken away", nil, func(m *machine, s mps.Status) { os.Remove(filepath.Join(m.dirs().Pipe(), "control_lock")) },
			"its files were replaced", 1, false},
		{"server shut down by a tenant", nil, func(m *machine, s mps.Status) {
			if err := m.control().ShutdownServer(m.t.Context(), s.ServerPID, true); err != nil {
				m.t.Fatal(err)
			}
		}, "MPS server", 1, true},
		{"fatal fault", nil, func(m *machine, s mps.Status) {
			_, end := m.client() // which swallows it, and keeps the server in FAULT
			m.ended = end
			if _, err := mpssim.FatalFault(m.dir, testUUID, 0); err != nil {
				m.t.Fatal(err)
			}
		}, "FAULT", 0, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			cfg := mps.Config{}
			if tc.name == "daemon wedged" { // the others must not be taken for it on a busy machine
				cfg.ProbeTimeout = 300 * time.Millisecond
			}
			m := newSimulated(t, cfg)
			m.steer(func(s *mpssim.Steer) { s.Variants = tc.variants })
			m.start(mps.UseMPS, 0)
			held := m.awaitPhase(mps.PhaseHeld)
			m.holder.Clients(2)
			tc.lose(m, held)
			s := m.awaitPhase(mps.PhaseDraining)
			want := tc.reason
			if strings.Contains(want, "%d") {
				want = fmt.Sprintf(want, held.DaemonPID)
			}
			if !strings.Contains(s.Reason, want) {
				t.Errorf("reason %q does not say %q", s.Reason, want)
			}
			if !m.isExclusive() {
				t.Error("while clients live the mode must stay EXCLUSIVE_PROCESS")
			}
			m.holder.Clients(1)
			m.steer(func(s *mpssim.Steer) { s.DaemonHang = false })
			if m.ended != nil {
				m.ended()
			}
			m.holder.Clients(0)
			again := m.awaitPhase(mps.PhaseHeld)
			if tc.sameD != (again.DaemonPID == held.DaemonPID) {
				t.Errorf("daemon was %d and is %d", held.DaemonPID, again.DaemonPID)
			}
			if again.Failures != tc.failures {
				t.Errorf("%d failures counted, not %d", again.Failures, tc.failures)
			}
			if again.ServerPID == held.ServerPID {
				t.Error("the same server")
			}
			o := m.mustBeHeld()
			if list := m.daemons(); len(list) != 2 {
				t.Errorf("processes %v; only %d and %d may be left", list, o.Daemon.PID, o.Server.PID)
			}
		})
	}
}

func TestClientIsTerminated(t *testing.T) {
	m := newSimulated(t, mps.Config{})
	m.start(mps.UseMPS, 0)
	held := m.awaitPhase(mps.PhaseHeld)
	pid, _ := m.client()
	m.holder.Clients(1)
	list, err := m.control().Processes(t.Context())
	if err != nil || len(list) != 1 || list[0].PID != pid || list[0].Server != held.ServerPID {
		t.Fatalf("ps: %+v, %v", list, err)
	}
	if err := m.holder.TerminateClient(t.Context(), pid); err != nil {
		t.Fatal(err)
	}
	if err := m.holder.TerminateClient(t.Context(), 1); err == nil {
		t.Error("no error for a process that is no client")
	}
	m.mustBeHeld()
}

func TestServerThatDoesNotStart(t *testing.T) {
	for _, tc := range []struct {
		name   string
		steer  func(*mpssim.Steer)
		reason string
	}{
		{"no device: no retry can help", func(s *mpssim.Steer) {
			s.ServerStart, s.Reason = mpssim.StartFails, "no CUDA-capable device is detected"
		}, "no CUDA-capable device is detected"},
		{"out of memory, each time", func(s *mpssim.Steer) {
			s.ServerStart, s.Reason = mpssim.StartFails, "out of memory"
		}, "2 failures within 10m0s; the last: "},
		{"hangs, each time", func(s *mpssim.Steer) { s.ServerStart = mpssim.StartHangs }, "is ready after 300ms"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			cfg := mps.Config{Budget: mps.Budget{Failures: 2}}
			if strings.HasPrefix(tc.name, "hangs") {
				cfg.ServerStartTimeout = 300 * time.Millisecond
			}
			m := newSimulated(t, cfg)
			m.steer(tc.steer)
			m.start(mps.UseMPS, 0)
			s := m.awaitPhase(mps.PhaseQuarantined)
			if !strings.Contains(s.Reason, tc.reason) {
				t.Errorf("reason %q does not say %q", s.Reason, tc.reason)
			}
			m.mustBeFree()

			// It stays so over a restart of the agent, until an operator says otherwise.
			m.stop()
			m.start(mps.UseMPS, 0)
			m.awaitPhase(mps.PhaseQuarantined)
			m.stop()
			m.cfg.ServerStartTimeout = 0
			m.steer(func(s *mpssim.Steer) { *s = mpssim.Steer{} })
			m.start(mps.UseMPS, 0)
			m.holder.Forgive()
			m.awaitPhase(mps.PhaseHeld)
			m.mustBeHeld()
		})
	}
}

func TestBudgetIsUsedUpWhileClientsLive(t *testing.T) {
	m := newSimulated(t, mps.Config{Budget: mps.Budget{Failures: 3}})
	m.start(mps.UseMPS, 0)
	for n := range 3 {
		held := m.awaitPhase(mps.PhaseHeld)
		m.holder.Clients(1)
		kill(t, held.DaemonPID, syscall.SIGKILL)
		s := m.awaitPhase(mps.PhaseDraining)
		if s.Failures != n+1 {
			t.Fatalf("%d failures after %d kills", s.Failures, n+1)
		}
		if kind := (mps.ProcessView{PID: held.ServerPID}); kind.PID != 0 && syscall.Kill(held.ServerPID, 0) != nil {
			t.Fatal("the orphaned server was ended under its clients")
		}
		m.holder.Clients(0)
	}
	s := m.awaitPhase(mps.PhaseQuarantined)
	if !strings.HasPrefix(s.Reason, "3 failures within 10m0s; the last: the MPS control daemon (pid ") {
		t.Errorf("reason %q", s.Reason)
	}
	m.mustBeFree()
}

func TestAgentRestartAdopts(t *testing.T) {
	for _, tc := range []struct {
		name    string
		clients int
		between func(m *machine)
	}{
		{"everything as it was", 3, func(*machine) {}},
		{"nothing was told of clients yet", -1, func(*machine) {}},
		{"the daemon's pid was not stored yet", 0, func(m *machine) { m.record.Daemon, m.record.Server = mps.Process{}, mps.Process{} }},
		{"the server was not stored yet", 0, func(m *machine) { m.record.Server = mps.Process{} }},
		{"the link was not made yet", 0, func(m *machine) { os.Remove(filepath.Join(m.dirs().Client(), "control")) }},
		{"the mode was not set yet", 2, func(m *machine) { m.exclusive = false }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			m := newSimulated(t, mps.Config{})
			m.start(mps.UseMPS, 0)
			held := m.awaitPhase(mps.PhaseHeld)
			m.stop()
			tc.between(m)
			m.start(mps.UseMPS, tc.clients)
			again := m.awaitPhase(mps.PhaseHeld)
			if again.DaemonPID != held.DaemonPID || again.ServerPID != held.ServerPID {
				t.Errorf("adopted %d and %d, not %d and %d", again.DaemonPID, again.ServerPID, held.DaemonPID, held.ServerPID)
			}
			if again.Restarts != 0 || again.Failures != 0 {
				t.Errorf("adoption counts as trouble: %+v", again)
			}
			m.mustBeHeld()
		})
	}
}

func TestAgentRestartFindsThingsLost(t *testing.T) {
	for _, tc := range []struct {
		name   string
		lose   func(m *machine, s mps.Status)
		reason string
	}{
		{"the daemon", func(m *machine, s mps.Status) { kill(m.t, s.DaemonPID, syscall.SIGKILL) }, "has ended"},
		{"the server", func(m *machine, s mps.Status) { kill(m.t, s.ServerPID, syscall.SIGKILL) }, "has ended"},
		{"the daemon's wits", func(m *machine, s mps.Status) { kill(m.t, s.DaemonPID, syscall.SIGSTOP) }, "is stopped"},
		{"the record", func(m *machine, s mps.Status) {
			kill(m.t, s.DaemonPID, syscall.SIGKILL)
			kill(m.t, s.ServerPID, syscall.SIGKILL)
			m.record = mps.Record{}
		}, "2 capped containers run, and no MPS control daemon"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			m := newSimulated(t, mps.Config{})
			m.start(mps.UseMPS, 0)
			held := m.awaitPhase(mps.PhaseHeld)
			m.stop()
			tc.lose(m, held)
			m.start(mps.UseMPS, 2)
			s := m.await("DRAINING for this reason", func(s mps.Status) bool {
				return s.State == mps.PhaseDraining && strings.Contains(s.Reason, tc.reason)
			})
			if s.Failures > 1 {
				t.Errorf("%d failures counted", s.Failures)
			}
			m.holder.Clients(0)
			m.awaitPhase(mps.PhaseHeld)
			m.mustBeHeld()
			if list := m.daemons(); len(list) != 2 {
				t.Errorf("processes %v", list)
			}
		})
	}
}

func TestWhatOthersChangeIsPutBack(t *testing.T) {
	for _, tc := range []struct {
		name   string
		use    mps.Use
		change func(m *machine) error
		notice string
		back   func(m *machine) bool
	}{
		{"the default memory limit", mps.UseMPS, func(m *machine) error { return m.control().SetMemoryLimit(m.t.Context(), 1) },
			"memory limit of MPS servers was changed by somebody else, to 1M; put back",
			func(m *machine) bool {
				limit, err := m.control().MemoryLimit(m.t.Context())
				return err == nil && limit == ""
			}},
		{"the default percentage", mps.UseIdle, func(m *machine) error { return m.control().SetThreadPercent(m.t.Context(), 5) },
			"percentage of MPS servers was changed by somebody else, to 5.0; put back",
			func(m *machine) bool {
				pct, err := m.control().ThreadPercent(m.t.Context())
				return err == nil && pct == 100
			}},
		{"the mode of a GPU that is held", mps.UseMPS, func(m *machine) error { m.mu.Lock(); m.exclusive = false; m.mu.Unlock(); return nil },
			"the compute mode was changed by somebody else, to DEFAULT, and put back", (*machine).isExclusive},
		{"the mode of a GPU that is idle", mps.UseIdle, func(m *machine) error { m.mu.Lock(); m.exclusive = true; m.mu.Unlock(); return nil },
			"the compute mode was changed by somebody else, to EXCLUSIVE_PROCESS, and put back", func(m *machine) bool { return !m.isExclusive() }},
		{"a server that nobody asked for", mps.UseIdle, func(m *machine) error { return m.control().StartServer(m.t.Context(), 0) },
			"an MPS server that berth did not start was found",
			func(m *machine) bool {
				list, err := m.control().Servers(m.t.Context())
				return err == nil && len(list) == 0
			}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			m := newSimulated(t, mps.Config{})
			m.start(tc.use, 0)
			phase := mps.PhaseIdle
			if tc.use == mps.UseMPS {
				phase = mps.PhaseHeld
			}
			before := m.awaitPhase(phase)
			if err := tc.change(m); err != nil {
				t.Fatal(err)
			}
			m.await("notice", func(s mps.Status) bool { return strings.Contains(s.Notice, tc.notice) })
			m.await("return", func(s mps.Status) bool { return s.State == phase && tc.back(m) })
			if s := m.holder.Status(); s.DaemonPID != before.DaemonPID || s.ServerPID != before.ServerPID || s.Failures != 0 {
				t.Errorf("was %+v and is %+v", before, s)
			}
		})
	}
}

func TestPurge(t *testing.T) {
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprintf("holder running %v", running), func(t *testing.T) {
			t.Parallel()
			m := newSimulated(t, mps.Config{})
			m.start(mps.UseMPS, 0)
			m.awaitPhase(mps.PhaseHeld)
			if !running {
				m.stop()
				m.holder = mps.New(m.cfg, m.device, m.record, m.hooks(), zapNop)
			}
			if err := m.holder.Purge(t.Context()); err != nil {
				t.Fatal(err)
			}
			m.mustBeFree()
			for _, dir := range []string{m.dirs().Root(), m.dirs().Logs()} {
				if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("%s is left", dir)
				}
			}
		})
	}
}

// An agent that is ended at any moment of whatever it does leaves what the next one
// adopts: nothing is restarted, nothing counted, nothing left over.
func TestAgentEndsAtRandomMoments(t *testing.T) {
	m := newSimulated(t, mps.Config{})
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	uses := []mps.Use{mps.UseMPS, mps.UseMPS, mps.UseIdle, mps.UseDedicated, mps.UseNone}
	for range 25 {
		m.start(uses[random.IntN(len(uses))], random.IntN(2)-1)
		end := time.After(time.Duration(random.IntN(400)) * time.Millisecond)
		turn := time.NewTicker(50 * time.Millisecond)
		for over := false; !over; {
			select {
			case <-turn.C:
				m.holder.Want(uses[random.IntN(len(uses))])
				m.holder.Clients(random.IntN(2) - 1)
			case <-end:
				over = true
			}
		}
		turn.Stop()
		m.stop()
		if s := m.holder.Status(); s.Failures != 0 || s.Cause != "" {
			t.Fatalf("trouble, where there was none: %+v", s)
		}
	}
	m.start(mps.UseMPS, 0)
	m.awaitPhase(mps.PhaseHeld)
	o := m.mustBeHeld()
	if list := m.daemons(); len(list) != 2 {
		t.Errorf("%v run; the daemon is %d, the server %d", list, o.Daemon.PID, o.Server.PID)
	}
	m.holder.Want(mps.UseNone)
	m.awaitPhase(mps.PhaseAbsent)
	m.mustBeFree()
}
