package mpssim

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// maxPipeDirectory is how long the pipe folder's path may be: sun_path has 108
// bytes, and "/control_privileged" must fit. [B]
const maxPipeDirectory = 87

type daemonOptions struct {
	multiuser  bool
	background bool
}

// daemon is a running control daemon.
type daemon struct {
	machine machine
	steer   Steer // as of the start
	branch  int
	opts    daemonOptions
	pipe    string
	log     *logger
	uid     int

	turn sync.Mutex // held while a newcomer is asked who it is

	mu       sync.Mutex
	ui       *ui // the command utility that is connected, or nil
	defaults defaults
	server   *serverProc // the one server, or nil
	queue    []request   // who waits for a server
	sticky   int         // exit status: of the first server that failed
	last     int         // status of the last server that ended
	ended    int         // servers that ended
	quitting bool
	waiters  []waiter // of quit
	done     chan int
	listen   []*net.UnixListener
}

// defaults are what the next server starts with.
type defaults struct {
	percent  float64
	priority int
	limits   map[int]uint64    // by ordinal, bytes
	byUUID   map[string]uint64 // as told; of use only where readsUUIDKeys
}

// runDaemon starts a daemon and runs it until it is told to quit. There are no signal
// handlers: a signal ends it at once, and its server is an orphan. [B] All it has to say
// goes to stdout, also complaints.
func runDaemon(m machine, opts daemonOptions, stdout io.Writer) int {
	steer := m.steer()
	if steer.DaemonFails {
		return 1
	}
	defaultSignals(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
	d := &daemon{
		machine: m, steer: steer, branch: m.branch(steer), opts: opts, pipe: pipeDirectory(), uid: os.Getuid(),
		log:      &logger{out: stdout, pid: os.Getpid()},
		defaults: defaultsFromEnv(), done: make(chan int, 1),
	}
	// In the order in which the real one leaves files behind when a later step fails. [B]
	logs := openLogs(opts, stdout)
	if err := os.Mkdir(d.pipe, 0o777); err == nil {
		_ = os.Chmod(d.pipe, 0o777)
	}
	lock, err := os.OpenFile(filepath.Join(d.pipe, "control_lock"), os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		fmt.Fprintf(stdout, "Cannot access CUDA_MPS_PIPE_DIRECTORY=%s\n", d.pipe)
		return 1
	}
	_ = lock.Chmod(0o666)
	flock := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	if unix.FcntlFlock(lock.Fd(), unix.F_SETLK, &flock) != nil {
		fmt.Fprintln(stdout, "An instance of this daemon is already running")
		return 1
	}
	d.log.out = logs.control
	if logs.server != nil {
		if err := d.openFifo(logs.server); err != nil {
			return 1
		}
	}
	if len(d.pipe) > maxPipeDirectory || d.bind() != nil {
		return 1 // without a word [B]
	}
	d.log.line(tagControl, "Starting control daemon using socket %s", filepath.Join(d.pipe, "control"))
	d.log.line(tagControl, "To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY=%s", d.pipe)
	if hasVersionLine(d.branch) {
		d.log.line(tagControl, "CUDA MPS Control binary version: %s", binaryVersion)
	}
	if hasPidFile(d.branch) {
		_ = os.WriteFile(d.pidFile(), []byte(strconv.Itoa(os.Getpid())+"\n"), 0o644)
	}
	for i, l := range d.listen {
		go d.accept(l, i == 0)
	}
	if opts.background {
		tellParent()
	}
	status := <-d.done
	for _, l := range d.listen {
		l.Close()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, w := range d.waiters { // before the daemon has cleared up [B]
		_ = w.conn.send(wireExit, strconv.Itoa(quitStatus(w.server != nil, w.ended, d.last)))
	}
	d.log.line(tagControl, "Exit with status %d", status)
	_ = os.Remove(filepath.Join(d.pipe, "log"))
	_ = os.Remove(d.pidFile())
	_ = lock.Close()
	return status
}

// waiter is a utility that said quit.
type waiter struct {
	conn   conn
	server *serverProc // the one that ran when it said so
	ended  int         // how many had ended by then, well or not
}

// quitStatus is what the utility that said quit ends with. It has little to do with the
// daemon's own status: 0 when no server was left to wait for (the real one now and then
// 1, if a server had failed), that server's status when it was the daemon's first, and 1
// after any other had ended, however well. [B]
func quitStatus(waited bool, ended, last int) int {
	switch {
	case !waited:
		return 0
	case ended > 0:
		return 1
	}
	return last
}

func (d *daemon) pidFile() string { return filepath.Join(d.pipe, ControlName+".pid") }

// logs is where the daemon's own lines and its servers' lines go; server is nil when
// they go nowhere.
type logs struct{ control, server io.Writer }

// openLogs opens the log files of a background daemon; a foreground one writes all to
// stdout and leaves the folder empty. A folder that cannot be had is only worth a
// warning. [B]
func openLogs(opts daemonOptions, stdout io.Writer) logs {
	dir := makeLogFolder()
	if warning := logWarning(dir); warning != "" {
		fmt.Fprint(stdout, warning)
	}
	if !opts.background {
		return logs{stdout, stdout}
	}
	control, err := os.OpenFile(filepath.Join(dir, "control.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return logs{control: io.Discard}
	}
	server, err := os.OpenFile(filepath.Join(dir, "server.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return logs{control: control}
	}
	return logs{control, server}
}

func makeLogFolder() string {
	dir := os.Getenv("CUDA_MPS_LOG_DIRECTORY")
	if dir == "" {
		dir = "/var/log/nvidia-mps"
	}
	_ = os.Mkdir(dir, 0o700)
	return dir
}

func logWarning(dir string) string {
	if unix.Access(dir, unix.W_OK) == nil {
		return ""
	}
	return fmt.Sprintf("Warning: Failed writing log files to directory [%s]. No logs will be available.\n", dir)
}

// openFifo makes the fifo that servers write their log to, and copies it.
func (d *daemon) openFifo(to io.Writer) error {
	path := filepath.Join(d.pipe, "log")
	if err := unix.Mkfifo(path, 0o777); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	_ = os.Chmod(path, 0o777)
	f, err := os.OpenFile(path, os.O_RDWR, 0) // also a writer, so that it never reads an end
	if err != nil {
		return err
	}
	go func() {
		buf := make([]byte, 64<<10)
		for {
			n, err := f.Read(buf)
			if err != nil {
				return
			}
			_, _ = to.Write(buf[:n])
		}
	}()
	return nil
}

// bind puts up both sockets, over those that a killed daemon left behind.
func (d *daemon) bind() error {
	for _, name := range []string{"control_privileged", "control"} {
		path := filepath.Join(d.pipe, name)
		_ = os.Remove(path)
		l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
		if err != nil {
			return err
		}
		l.SetUnlinkOnClose(false) // quit leaves them [B]
		if name == "control" {    // the other one keeps what the umask leaves: 0755 [B]
			_ = os.Chmod(path, 0o666)
		}
		d.listen = append(d.listen, l)
	}
	return nil
}

// daemonEnv names the descriptor that a background daemon tells its parent through.
const daemonEnv = "MPSSIM_DAEMON"

// daemonize starts the daemon in a session of its own and returns when it listens, or
// has failed. Its command line is the same as this process's.
func daemonize(m machine, opts daemonOptions, stdout io.Writer) int {
	if os.Getenv(daemonEnv) != "" {
		os.Unsetenv(daemonEnv)
		var said bytes.Buffer
		status := runDaemon(m, opts, &said)
		if status != 0 { // else it has run, detached, and said nothing
			_, _ = stdout.Write(said.Bytes())
		}
		return status
	}
	r, w, err := os.Pipe()
	if err != nil {
		return 1
	}
	cmd := &exec.Cmd{
		Path: "/proc/self/exe", Args: os.Args, Env: append(os.Environ(), daemonEnv+"=3"),
		ExtraFiles: []*os.File{w}, Stdout: os.Stdout, Stderr: os.Stderr, SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	// exec of /proc/self/exe would name the process "exe"; the path keeps its name.
	if exe, err := os.Readlink("/proc/self/exe"); err == nil {
		cmd.Path = exe
	}
	if err := cmd.Start(); err != nil {
		return 1
	}
	w.Close()
	n, _ := r.Read(make([]byte, 1))
	if n == 0 {
		_ = cmd.Wait()
	}
	// The warning was in the output buffer when the real one forked: a daemon that fails
	// says it too. [B]
	fmt.Fprint(stdout, logWarning(makeLogFolder()))
	if n == 0 {
		return 1
	}
	return 0
}

// tellParent says that the daemon listens, and lets go of the terminal.
func tellParent() {
	f := os.NewFile(3, "parent")
	_, _ = f.Write([]byte{1})
	f.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return
	}
	for fd := range 3 {
		_ = unix.Dup2(int(null.Fd()), fd)
	}
	null.Close()
}

// accept serves one of the two sockets.
func (d *daemon) accept(l *net.UnixListener, privileged bool) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return
		}
		d.greet(conn{c}, privileged)
	}
}

// greet learns who has connected. The real daemon does nothing else meanwhile, so a
// connection that says nothing wedges it, for its clients too, until it closes. [B]
func (d *daemon) greet(c conn, privileged bool) {
	d.turn.Lock()
	defer d.turn.Unlock()
	d.letGo()
	d.log.line(tagControl, "Accepting connection...")
	verb, _, _, err := c.receive()
	d.hang()
	switch {
	case err != nil:
		// Also what every CUDA client does first: it only looks whether there is a daemon. [B]
		d.log.line(tagControl, "User did not send valid credentials")
		c.Close()
	case verb == wireUI:
		d.newUI(c, privileged)
	case verb == wireClient:
		d.newClient(c) // its socket stays open until it has its server
	case verb == wireServer:
		go func() {
			defer c.Close()
			d.newServer(c)
		}()
	default:
		d.log.line(tagControl, "Unable to accept connection")
		c.Close()
	}
}

// newUI serves a command utility, unless one is being served: then the newcomer is sent
// away. [B]
func (d *daemon) newUI(c conn, privileged bool) {
	d.letGo()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ui != nil {
		_ = c.send(wireBusy, "")
		c.Close()
		return
	}
	if c.send(wireOK, "") != nil {
		d.log.line(tagControl, "Unable to accept connection")
		c.Close()
		return
	}
	d.log.line(tagControl, "NEW UI")
	_, uid, _ := c.peer()
	u := &ui{conn: c, uid: uid, privileged: privileged, done: make(chan struct{})}
	d.ui = u
	go func() {
		d.serveUI(u)
		d.mu.Lock()
		d.ui = nil
		d.mu.Unlock()
		c.Close()
		close(u.done)
	}()
}

// letGo sees the end of a utility that has gone before anybody new: utilities one after
// the other are all served. [B]
func (d *daemon) letGo() {
	d.mu.Lock()
	u := d.ui
	d.mu.Unlock()
	if u != nil && u.conn.ended() {
		<-u.done
	}
}

// hang waits while the steer file says that the daemon is wedged.
func (d *daemon) hang() {
	for d.machine.steer().DaemonHang {
		time.Sleep(10 * time.Millisecond)
	}
}
