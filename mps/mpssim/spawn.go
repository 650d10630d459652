package mpssim

import (
	"encoding/json"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// A server's life, as the daemon drives it (at most one at a time; R535-R590, MPS v2):
//
//	          start_server, or a client comes
//	(none) ──────────────────────────────────> STARTING ── READY ──> SERVING
//	  ^                                           │                     │
//	  │ exits: attempts of waiting clients + 1    │                     │ last client of a server whose
//	  │ (six: 805), others wait for the next one  │                     │ user is not the one that waits
//	  └───────────────────────────────────────────┴─────────────────────┘
//
// A server is the daemon's child, in its session and process group, with its
// environment, found through its PATH. It outlives a killed daemon.

// attempts is how many servers are started for one waiting client: 1 + 5 retries. [B]
const attempts = 6

// request is somebody who waits for a server of a user.
type request struct {
	uid    int
	client *pendingClient // nil: start_server
	failed int            // servers that did not get ready
}

// pendingClient is a CUDA process that waits; also when it has long gone. [B]
type pendingClient struct {
	conn     conn
	pid, uid int
}

// serverProc is the daemon's view of its server.
type serverProc struct {
	cmd      *exec.Cmd
	pid, uid int
	ready    bool
	stopping bool // told to exit after its last client
	defaults defaults

	mu      sync.Mutex // one question at a time
	conn    conn
	answers chan string
	gone    chan struct{}
}

func defaultsFromEnv() defaults {
	d := defaults{percent: 100, limits: map[int]uint64{}, byUUID: map[string]uint64{}}
	if p, ok := percent(os.Getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")); ok {
		d.percent = p
	}
	if os.Getenv("CUDA_MPS_CLIENT_PRIORITY") == "1" {
		d.priority = 1
	}
	return d
}

// serverUser is the user whose server serves a client of user uid.
func (d *daemon) serverUser(uid int) int {
	if d.opts.multiuser {
		return d.uid
	}
	return uid
}

// request takes one in, and starts a server when there is none. Called with mu held.
func (d *daemon) request(r request) {
	if d.server == nil {
		d.queue = append(d.queue, r)
		d.spawn(r.uid)
		return
	}
	if d.server.uid == r.uid && !d.server.stopping && r.client == nil {
		return // it is there, or on its way
	}
	d.queue = append(d.queue, r)
	if d.server.uid != r.uid && d.server.ready && !d.server.stopping {
		d.server.stopping = true
		_ = d.server.conn.send(wireShutdown, "")
	}
}

// newClient gives a CUDA process its server, now or later.
func (d *daemon) newClient(c conn) {
	pid, uid, err := c.peer()
	if err != nil {
		c.Close()
		return
	}
	client := &pendingClient{conn: c, pid: pid, uid: uid}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.quitting {
		c.Close()
		return
	}
	user := d.serverUser(uid)
	if s := d.server; s != nil && s.ready && !s.stopping && s.uid == user {
		d.log.line(tagControl, "NEW CLIENT %d from user %d: Server already exists", pid, uid)
		d.attach(client)
		return
	}
	d.log.line(tagControl, "NEW CLIENT %d from user %d: Server is not ready, push client to pending list", pid, uid)
	d.request(request{uid: user, client: client})
}

// attach makes a socket pair and hands one end to each side, so that server and
// client need the daemon no more. Called with mu held.
func (d *daemon) attach(c *pendingClient) {
	defer c.conn.Close()
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer syscall.Close(pair[0])
	defer syscall.Close(pair[1])
	if d.server.conn.send(wireAttach, strconv.Itoa(c.pid)+" "+strconv.Itoa(c.uid), pair[0]) != nil {
		_ = c.conn.send(wireError, strconv.Itoa(errMPSConnectionFailed))
		return
	}
	_ = c.conn.send(wireOK, "", pair[1])
}

// spawn starts a server process. Called with mu held, without a server.
func (d *daemon) spawn(uid int) {
	cmd := &exec.Cmd{Args: []string{ServerName}, Stdout: os.Stdout, Stderr: os.Stderr}
	path, lookErr := exec.LookPath(ServerName)
	cmd.Path = path
	if d.uid == 0 && uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
	}
	cannot := d.uid != 0 && uid != d.uid // setuid is not allowed
	if lookErr != nil || cannot || cmd.Start() != nil {
		// In life the child is there already when it finds that it cannot become a server.
		cmd = &exec.Cmd{Path: "/proc/self/exe", Args: []string{ControlName}, Env: append(os.Environ(), childFailsEnv+"=1")}
		if cmd.Start() != nil {
			return
		}
	}
	s := &serverProc{
		cmd: cmd, pid: cmd.Process.Pid, uid: uid, defaults: d.defaults.copy(),
		answers: make(chan string), gone: make(chan struct{}),
	}
	d.server = s
	logPid := d.log.pid
	if logsChildPid(d.branch) {
		logPid = s.pid
	}
	d.log.lineFor(logPid, tagControl, "Starting new server %d for user %d", s.pid, uid)
	go d.reap(s)
}

// childFailsEnv makes the program a child that ends with 1 at once.
const childFailsEnv = "MPSSIM_CHILD_FAILS"

// reap waits for a server's end and decides what follows.
func (d *daemon) reap(s *serverProc) {
	_ = s.cmd.Wait()
	status := s.cmd.ProcessState.ExitCode()
	if status < 0 {
		status = 0 // ended by a signal: status 0 all the same [B]
	}
	close(s.gone)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.log.line(tagControl, "Server %d exited with status %d", s.pid, status)
	if d.sticky == 0 {
		d.sticky = status
	}
	d.last, d.ended = status, d.ended+1
	d.server = nil
	d.queue = afterExit(d.queue, s.uid, s.ready, func(c *pendingClient) {
		_ = c.conn.send(wireError, strconv.Itoa(errMPSConnectionFailed))
		c.conn.Close()
	})
	sameUser := false
	for _, r := range d.queue {
		sameUser = sameUser || r.uid == s.uid
	}
	if !sameUser || d.quitting {
		d.log.line(tagControl, "Removed Shm file at ")
	}
	switch {
	case d.quitting:
		d.finish()
	case sameUser:
		d.spawn(s.uid)
	case len(d.queue) > 0:
		d.spawn(d.queue[0].uid)
	}
}

// afterExit is the queue after a server of user uid has gone: start_server had its
// one attempt, a client has six, and one that had them all is given up.
func afterExit(queue []request, uid int, wasReady bool, giveUp func(*pendingClient)) []request {
	var left []request
	for _, r := range queue {
		if r.uid == uid && !wasReady {
			r.failed++
		}
		switch {
		case r.client == nil && r.failed > 0:
		case r.client != nil && r.failed >= attempts:
			giveUp(r.client)
		default:
			left = append(left, r)
		}
	}
	return left
}

// newServer serves the connection of a server that has just started.
func (d *daemon) newServer(c conn) {
	pid, _, err := c.peer()
	d.mu.Lock()
	s := d.server
	d.mu.Unlock()
	if err != nil || s == nil || s.pid != pid {
		return // an orphan of another daemon, or a stranger
	}
	s.mu.Lock()
	s.conn = c
	s.mu.Unlock()
	text, err := json.Marshal(s.defaults.wire())
	if err != nil || c.send(wireDefaults, string(text)) != nil {
		return
	}
	for {
		verb, rest, _, err := c.receive()
		if err != nil {
			return
		}
		switch verb {
		case wireFatal:
			d.log.line(tagControl, "Server encountered a fatal exception. Shutting down")
			_ = c.send(wireOK, "")
		case wireReady:
			d.serverReady(s)
		case wireOutput:
			select {
			case s.answers <- rest:
			case <-s.gone:
			}
		}
	}
}

// serverReady gives the server those who waited for it.
func (d *daemon) serverReady(s *serverProc) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.log.line(tagControl, "NEW SERVER %d: Ready", s.pid)
	s.ready = true
	if d.quitting {
		_ = s.conn.send(wireShutdown, "")
		return
	}
	var left []request
	for _, r := range d.queue {
		switch {
		case r.uid != s.uid:
			left = append(left, r)
		case r.client != nil:
			d.attach(r.client)
		}
	}
	d.queue = left
	if len(left) > 0 {
		s.stopping = true
		_ = s.conn.send(wireShutdown, "")
	}
}

// ask puts a question to a ready server and waits for its answer. It waits as long
// as the server lives; a frozen one keeps the asker waiting.
func (d *daemon) ask(s *serverProc, question string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn.UnixConn == nil || s.conn.send(wireAsk, question) != nil {
		return nil
	}
	select {
	case text := <-s.answers:
		return splitLines(text)
	case <-s.gone:
		return nil
	}
}

func splitLines(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(strings.TrimSuffix(text, "\n"), "\n")
}

func (d defaults) copy() defaults {
	c := d
	c.limits, c.byUUID = map[int]uint64{}, map[string]uint64{}
	for k, v := range d.limits {
		c.limits[k] = v
	}
	for k, v := range d.byUUID {
		c.byUUID[k] = v
	}
	return c
}

// wireForm is how defaults travel to a server.
type wireForm struct {
	Percent  float64
	Priority int
	Limits   map[int]uint64
	ByUUID   map[string]uint64
}

func (d defaults) wire() wireForm { return wireForm{d.percent, d.priority, d.limits, d.byUUID} }
