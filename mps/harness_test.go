package mps_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"github.com/berth-gpu/berth/mps"
)

var zapNop = zap.NewNop()

const testUUID = "GPU-0b9f2f8e-5a0e-4d0e-9f43-6a1f6b1e7a01"

// machine is a place for one GPU's holder: folders, the compute mode, the store.
type machine struct {
	t      testing.TB
	dir    string
	cfg    mps.Config
	device mps.Device

	mu        sync.Mutex
	exclusive bool
	modeErr   error
	record    mps.Record
	saveErr   error
	saves     []mps.Record
	story     []mps.Status
	changed   chan struct{} // closed and made anew at each change of status
	holder    *mps.Holder
	stop      func()
	ended     func() // ends a client, where there is one
	decided   func(in, out any)
}

// newMachine makes one. The folder is under /tmp itself: a pipe folder's path may
// have 87 bytes.
func newMachine(t testing.TB, cfg mps.Config) *machine {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "b")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	cfg.RunDir, cfg.LogDir = filepath.Join(dir, "run"), filepath.Join(dir, "log")
	if cfg.TickEvery == 0 {
		cfg.TickEvery = 20 * time.Millisecond
	}
	if cfg.ProbeEvery == 0 {
		cfg.ProbeEvery = 100 * time.Millisecond
	}
	m := &machine{t: t, dir: dir, cfg: cfg, changed: make(chan struct{}),
		device: mps.Device{UUID: testUUID, DriverBranch: 580, ComputeMajor: 9}}
	t.Cleanup(func() {
		if m.stop != nil {
			m.stop()
		}
		m.endAll()
		if t.Failed() {
			b, _ := os.ReadFile(m.dirs().ControlLog())
			for _, s := range m.story {
				t.Logf("%s %s: %s", s.Since.Format("05.000"), s.State, s.Reason)
			}
			t.Logf("control.log, without what commands leave there:\n%s", withoutCommands(string(b)))
		}
		os.RemoveAll(dir)
	})
	return m
}

func (m *machine) dirs() mps.Dirs {
	return mps.Dirs{Run: m.cfg.RunDir, Log: m.cfg.LogDir, UUID: testUUID}
}

func (m *machine) hooks() mps.Hooks {
	return mps.Hooks{
		ComputeMode: func(context.Context) (bool, error) {
			m.mu.Lock()
			defer m.mu.Unlock()
			return m.exclusive, m.modeErr
		},
		SetComputeMode: func(_ context.Context, exclusive bool) error {
			m.mu.Lock()
			defer m.mu.Unlock()
			if exclusive && !m.record.Exclusive {
				m.t.Error("EXCLUSIVE_PROCESS set before the intent was stored")
			}
			m.exclusive = exclusive
			return m.modeErr
		},
		Save: func(r mps.Record) error {
			m.mu.Lock()
			defer m.mu.Unlock()
			if m.saveErr != nil {
				return m.saveErr
			}
			m.record = r
			m.saves = append(m.saves, r)
			return nil
		},
		Notify: func(s mps.Status) {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.story = append(m.story, s)
			close(m.changed)
			m.changed = make(chan struct{})
		},
		Decided: m.decided,
	}
}

// start starts an agent's holder with what the store has; stop ends it as a crash
// or a restart of the agent would.
func (m *machine) start(use mps.Use, clients int) {
	m.t.Helper()
	m.mu.Lock()
	rec := m.record
	m.mu.Unlock()
	log := zapNop
	if testing.Verbose() {
		log = zaptest.NewLogger(m.t)
	}
	m.holder = mps.New(m.cfg, m.device, rec, m.hooks(), log)
	m.holder.Want(use)
	m.holder.Clients(clients)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- m.holder.Run(ctx) }()
	m.stop = func() {
		cancel()
		if err := <-done; err != nil {
			m.t.Errorf("Run: %v", err)
		}
		m.stop = nil
	}
}

// await waits until the status is as it should be.
func (m *machine) await(what string, is func(mps.Status) bool) mps.Status {
	m.t.Helper()
	deadline := time.After(20 * time.Second)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		m.mu.Lock()
		changed := m.changed
		m.mu.Unlock()
		s := m.holder.Status()
		if is(s) {
			return s
		}
		select {
		case <-changed:
		case <-tick.C: // what is awaited may lie outside of the status
		case <-deadline:
			m.t.Fatalf("no %s within 20 s; it is %+v\nstory: %s", what, s, m.told())
		}
	}
}

func (m *machine) awaitPhase(p mps.Phase) mps.Status {
	m.t.Helper()
	return m.await(string(p), func(s mps.Status) bool { return s.State == p })
}

// told is the phases met so far.
func (m *machine) told() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var words []string
	for _, s := range m.story {
		if len(words) == 0 || words[len(words)-1] != string(s.State) {
			words = append(words, string(s.State))
		}
	}
	return strings.Join(words, " ")
}

func (m *machine) isExclusive() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.exclusive
}

func (m *machine) control() *mps.Control {
	return mps.NewControl(m.cfg.ControlBinary, m.dirs(), []string{"PATH=" + m.cfg.Path, "LD_LIBRARY_PATH=" + m.cfg.LibraryPath}, 2*time.Second)
}

// daemons are the pids of daemons and servers, which have the pipe folder itself.
func (m *machine) daemons() []int { return processesWith(m.dirs().Pipe() + "\x00") }

// processes are the pids of all that has to do with this machine: clients and the
// control utility too.
func (m *machine) processes() []int { return processesWith(m.dir) }

func processesWith(pipe string) []int {
	entries, _ := os.ReadDir("/proc")
	var list []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		env, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if strings.Contains(string(env), "CUDA_MPS_PIPE_DIRECTORY="+pipe) {
			list = append(list, pid)
		}
	}
	return list
}

// endAll leaves nothing of the test behind.
func (m *machine) endAll() {
	for range 100 {
		list := m.processes()
		if len(list) == 0 {
			return
		}
		for _, pid := range list {
			syscall.Kill(pid, syscall.SIGKILL)
			syscall.Wait4(pid, nil, syscall.WNOHANG, nil)
		}
		<-time.After(10 * time.Millisecond)
	}
	m.t.Errorf("processes %v do not end", m.processes())
}

func kill(t testing.TB, pid int, sig syscall.Signal) {
	t.Helper()
	if pid <= 0 {
		t.Fatalf("no pid to signal: %d", pid)
	}
	if err := syscall.Kill(pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		t.Fatal(err)
	}
}

func withoutCommands(log string) string {
	var b strings.Builder
	for line := range strings.Lines(log) {
		if !commandLine.MatchString(strings.TrimSpace(line)) {
			b.WriteString(line)
		}
	}
	return b.String()
}

var commandLine = regexp.MustCompile(`\] (Accepting connection|NEW UI|UI closed|Cmd:get_|\d+(\.\d)?$|[A-Z]+$|No default pinned)`)
