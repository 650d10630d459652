package mpssim

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/berth-gpu/berth/agent/gpu/nvmlsim"
)

// ServerBytes is what a server holds of each of its GPUs. 27-35 MiB seen.
const ServerBytes = 30 << 20

// server is a running MPS server: the judge of its clients' allocations.
type server struct {
	machine machine
	branch  int
	key     string // of the steer file
	devices []nvmlsim.GPU
	log     *logger
	daemon  conn

	holds  []*hold // kept, so that they stay open
	claims []*claim

	mu       sync.Mutex
	percent  float64
	limits   map[int]uint64 // by ordinal, bytes
	clients  []*client
	nextID   int
	faultSeq int              // the last fault of the steer file that was raised
	affected map[*client]bool // by the fault that has not passed yet
	stopping bool
}

// client is the server's view of one attached CUDA process.
type client struct {
	pid, uid, id int
	conn         conn
	bytes        map[int]int64  // granted, by device
	inodes       map[uint64]int // its memfds, to their devices
	limits       map[int]uint64 // 0 or absent: none
	failed       bool           // it has a sticky error
}

// serverMain is nvidia-cuda-mps-server: it has no arguments, and learns everything
// from its environment and its daemon.
func serverMain() int {
	defaultSignals(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT)
	m := ownMachine()
	steer := m.steer()
	s := &server{
		machine: m, branch: m.branch(steer), key: m.steerKey(), faultSeq: steer.FaultSeq,
		log: &logger{out: openServerLog(), pid: os.Getpid()}, affected: map[*client]bool{},
	}
	faults := make(chan os.Signal, 8)
	signal.Notify(faults, syscall.SIGUSR1)

	control := filepath.Join(pipeDirectory(), "control")
	s.log.line(tagOther, "Startup")
	s.log.line(tagOther, "Connecting to control daemon on socket: %s", control)
	var err error
	if s.daemon, err = dial(control); err != nil {
		return 1
	}
	if s.daemon.send(wireServer, "") != nil {
		return 1
	}
	verb, rest, _, err := s.daemon.receive()
	if err != nil || verb != wireDefaults {
		return 1
	}
	s.log.line(tagOther, "Initializing server process")
	if steer.ServerStart == StartHangs {
		// Not select{}: with nothing else to run, Go would call that a deadlock.
		for {
			time.Sleep(time.Hour)
		}
	}
	delay := steer.StartDelay
	if delay == 0 {
		delay = DefaultStartDelay
	}
	time.Sleep(delay)
	if steer.ServerStart == StartFails {
		return s.fail(steer.Reason)
	}
	value, set := os.LookupEnv("CUDA_VISIBLE_DEVICES")
	s.devices = m.visible(value, set)
	if len(s.devices) == 0 {
		return s.fail("no CUDA-capable device is detected")
	}
	if reason := s.takeDevices(steer); reason != "" {
		return s.fail(reason)
	}
	s.apply(rest)
	s.log.line(tagServer, "Server has started")
	if s.daemon.send(wireReady, "") != nil {
		return 1
	}
	go s.watchFaults(faults)
	s.serveDaemon()
	// The daemon is gone. The server lives on for its clients, and without any: an
	// orphan, which keeps its GPU until somebody ends it. [B]
	if steer.Variant("clients-die-with-daemon") {
		s.failAll(errMPSRPCFailure)
	}
	if s.stop() {
		return 0
	}
	for {
		time.Sleep(time.Hour)
	}
}

// openServerLog opens the daemon's fifo; without a reader lines are lost.
func openServerLog() io.Writer {
	f, err := os.OpenFile(filepath.Join(pipeDirectory(), "log"), os.O_WRONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return io.Discard
	}
	return f
}

func (s *server) fail(reason string) int {
	if len(s.devices) == 0 {
		s.log.line(tagOther, "Driver initialization failed with: %s", reason)
	}
	s.log.line(tagOther, "Failed to start : %s", reason)
	// The daemon hears of it before it can see the server's end [B].
	if s.daemon.send(wireFatal, "") == nil && s.daemon.SetReadDeadline(time.Now().Add(time.Second)) == nil {
		for {
			if verb, _, _, err := s.daemon.receive(); err != nil || verb == wireOK {
				break
			}
		}
	}
	return 1
}

// takeDevices makes the server's hold of each GPU; "" or why that cannot be.
func (s *server) takeDevices(steer Steer) (reason string) {
	for i, g := range s.devices {
		s.log.line(tagServer, "Creating server context on device %d (%s)", i, g.Name)
		if !steer.Variant("server-beside-orphan") {
			c, ok := s.machine.claimGPU(g.UUID)
			if !ok {
				return "all CUDA-capable devices are busy or unavailable"
			}
			s.claims = append(s.claims, c)
		}
		if s.used(i, nil)+ServerBytes > g.TotalBytes-g.ReservedBytes {
			return "out of memory"
		}
		h, err := newHold(g.UUID, kindServer, ServerBytes)
		if err != nil {
			return err.Error()
		}
		s.holds = append(s.holds, h)
	}
	s.log.line(tagServer, "Created anonymous shared memory region mps.shm.%d.%d", os.Getuid(), os.Getpid())
	s.log.line(tagServer, "CUDA MPS Server for Linux/Unix. Binary version: %s", binaryVersion)
	return ""
}

// apply takes the defaults that were in force when the server was spawned; without
// one, what CUDA_MPS_PINNED_DEVICE_MEM_LIMIT in the daemon's environment says.
func (s *server) apply(text string) {
	var d wireForm
	_ = json.Unmarshal([]byte(text), &d)
	uuids := make([]string, len(s.devices))
	for i, g := range s.devices {
		uuids[i] = g.UUID
	}
	s.percent = d.Percent
	s.limits = memLimits(os.Getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), uuids, true)
	for n, bytes := range d.Limits {
		s.limits[n] = bytes
	}
	if readsUUIDKeys(s.branch) {
		for uuid, bytes := range d.ByUUID {
			for i := range uuids {
				if bytes > 0 && strings.HasPrefix(uuids[i], uuid) {
					s.limits[i] = bytes
				}
			}
		}
	}
	s.log.line(tagServer, "Active Threads Percentage set to %.1f", s.percent)
	for i := range s.devices {
		if bytes := s.limits[i]; bytes > 0 {
			s.log.line(tagServer, "Device pinned memory limit for device %d set to 0x%x bytes", i, bytes)
		}
	}
	s.log.line(tagServer, "Server Priority set to %d", d.Priority)
}

// serveDaemon does what the daemon asks until it is gone.
func (s *server) serveDaemon() {
	for {
		verb, rest, fds, err := s.daemon.receive()
		if err != nil {
			return
		}
		switch verb {
		case wireAttach:
			if len(fds) == 1 {
				s.attach(rest, fds[0])
			}
		case wireShutdown:
			s.log.line(tagServer, "Server has been notified to shutdown")
			s.mu.Lock()
			s.stopping = true
			s.mu.Unlock()
			if s.stop() {
				os.Exit(0)
			}
		case wireAsk:
			words := strings.Fields(rest)
			text := ""
			for _, l := range s.answer(words) {
				text += l + "\n"
			}
			if s.daemon.send(wireOutput, text) != nil {
				return
			}
		}
	}
}

// stop says whether the server, told to, may end now: its last client has left.
func (s *server) stop() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.stopping || len(s.clients) > 0 {
		return false
	}
	s.log.line(tagServer, "Exiting")
	return true
}

// answer is what the daemon prints for a command about this server.
func (s *server) answer(words []string) []string {
	if len(words) == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch args := words[1:]; words[0] {
	case "status":
		if len(s.affected) > 0 {
			return []string{"FAULT"}
		}
		return []string{"ACTIVE"}
	case "clients":
		return s.pids()
	case "device_clients":
		var lines []string
		for _, g := range s.devices {
			lines = append(append(lines, g.UUID), s.pids()...)
		}
		if readSteer(s.machine.sim, s.key).Variant("device-clients-in-one-line") {
			return []string{strings.Join(lines, " ")}
		}
		return lines
	case "ps":
		return s.ps()
	case "terminate":
		return s.terminate(atoi(arg(args, 0)))
	case "set_percent":
		if p, ok := percent(arg(args, 0)); ok {
			s.percent = p
		}
		return []string{showPercent(s.percent)}
	case "get_percent":
		return []string{showPercent(s.percent)}
	case "set_limit":
		if n, ok := ordinal(arg(args, 0)); ok && n >= 0 && n <= maxOrdinal {
			s.limits[int(n)] = limitBytes(arg(args, 1))
		}
	case "get_limit":
		if n, ok := ordinal(arg(args, 0)); ok && s.limits[int(n)] > 0 {
			return []string{showLimit(s.limits[int(n)])}
		}
	}
	return nil
}

func (s *server) pids() []string {
	var lines []string
	for _, c := range s.clients {
		lines = append(lines, strconv.Itoa(c.pid))
	}
	return lines
}

func (s *server) ps() []string {
	var lines []string
	for _, c := range s.clients {
		ns, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", c.pid))
		ns = strings.Trim(strings.TrimPrefix(ns, "pid:"), "[]")
		cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", c.pid))
		command := strings.TrimSpace(strings.ReplaceAll(string(cmdline), "\x00", " "))
		for _, g := range s.devices {
			lines = append(lines, fmt.Sprintf("%-9d %-5d %-9d %-18s %-12s %s", c.pid, c.id, os.Getpid(), partialUUID(g.UUID), ns, command))
		}
	}
	return lines
}

// partialUUID is a UUID without its last two groups, as ps shows it.
func partialUUID(uuid string) string {
	parts := strings.Split(uuid, "-")
	if len(parts) != 6 {
		return uuid
	}
	return strings.Join(parts[:4], "-")
}
