package mpssim

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
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

	mu       sync.Mutex
	defaults defaults
	server   *serverProc // the one server, or nil
	queue    []request   // who waits for a server
	sticky   int         // exit status: of the last server that failed
	quitting bool
	waiters  []waiter // of quit
	done     chan int
	listen   []*net.UnixListener
}

// defaults are what the next server starts with.
type defaults struct {
	percent  float32
	priority int
	limits   map[int]uint64    // by ordinal, bytes
	byUUID   map[string]uint64 // as told; of use only where readsUUIDKeys
}

// runDaemon starts a daemon and runs it until it is told to quit. There are no signal
// handlers: a signal ends it at once, and its server is an orphan. [B]
func runDaemon(m machine, opts daemonOptions, stdout, stderr io.Writer) int {
	steer := m.steer()
	if steer.DaemonFails {
		return 1
	}
	if os.Getpid() == 1 {
		// The kernel drops default-disposition signals to a pid namespace's init; Go's
		// own handler would end it. [B]
		signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	}
	d := &daemon{
		machine: m, steer: steer, branch: m.branch(steer), opts: opts, pipe: pipeDirectory(), uid: os.Getuid(),
		log:      &logger{out: stdout, pid: os.Getpid()},
		defaults: defaultsFromEnv(), done: make(chan int, 1),
	}
	// In the order in which the real one leaves files behind when a later step fails. [B]
	logs := openLogs(opts, stdout, stderr)
	if err := os.Mkdir(d.pipe, 0o777); err == nil {
		_ = os.Chmod(d.pipe, 0o777)
	}
	lock, err := os.OpenFile(filepath.Join(d.pipe, "control_lock"), os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		fmt.Fprintf(stderr, "Cannot access CUDA_MPS_PIPE_DIRECTORY=%s\n", d.pipe)
		return 1
	}
	_ = lock.Chmod(0o666)
	flock := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	if unix.FcntlFlock(lock.Fd(), unix.F_SETLK, &flock) != nil {
		fmt.Fprintln(stderr, "An instance of this daemon is already running")
		return 1
	}
	d.log.out = logs.control
	if err := d.openFifo(logs.server); err != nil {
		return 1
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
	d.log.line(tagControl, "Exit with status %d", status)
	_ = os.Remove(filepath.Join(d.pipe, "log"))
	_ = os.Remove(d.pidFile())
	_ = lock.Close()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, w := range d.waiters {
		told := status
		if w.clean {
			told = 0
		}
		_ = w.conn.send(wireExit, strconv.Itoa(told))
	}
	return status
}

// waiter is a utility that said quit. It is told the daemon's status, except when
// there was no server to wait for: then 0. [B]
type waiter struct {
	conn  conn
	clean bool
}

func (d *daemon) pidFile() string { return filepath.Join(d.pipe, ControlName+".pid") }

// logs is where the daemon's own lines and its servers' lines go.
type logs struct{ control, server io.Writer }

// openLogs opens the log files of a background daemon; a foreground one writes all to
// stdout and leaves the folder empty. A folder that cannot be had is only worth a
// warning. [B]
func openLogs(opts daemonOptions, stdout, stderr io.Writer) logs {
	dir := os.Getenv("CUDA_MPS_LOG_DIRECTORY")
	if dir == "" {
		dir = "/var/log/nvidia-mps"
	}
	err := os.Mkdir(dir, 0o700)
	if err != nil && !errors.Is(err, os.ErrExist) || unix.Access(dir, unix.W_OK) != nil {
		fmt.Fprintf(stderr, "Warning: Failed writing log files to directory [%s]. No logs will be available.\n", dir)
	}
	if !opts.background {
		return logs{stdout, stdout}
	}
	open := func(name string) io.Writer {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
		if err != nil {
			return io.Discard
		}
		return f
	}
	return logs{open("control.log"), open("server.log")}
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
	for _, s := range []struct {
		name string
		mode os.FileMode
	}{{"control_privileged", 0o755}, {"control", 0o666}} {
		path := filepath.Join(d.pipe, s.name)
		_ = os.Remove(path)
		l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
		if err != nil {
			return err
		}
		l.SetUnlinkOnClose(false) // quit leaves them [B]
		_ = os.Chmod(path, s.mode)
		d.listen = append(d.listen, l)
	}
	return nil
}

// daemonEnv names the descriptor that a background daemon tells its parent through.
const daemonEnv = "MPSSIM_DAEMON"

// daemonize starts the daemon in a session of its own and returns when it listens, or
// has failed. Its command line is the same as this process's.
func daemonize(m machine, opts daemonOptions, stderr io.Writer) int {
	if os.Getenv(daemonEnv) != "" {
		os.Unsetenv(daemonEnv)
		return runDaemon(m, opts, io.Discard, stderr)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return 1
	}
	cmd := &exec.Cmd{
		Path: "/proc/self/exe", Args: os.Args, Env: append(os.Environ(), daemonEnv+"=3"),
		ExtraFiles: []*os.File{w}, Stderr: stderr, SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	// exec of /proc/self/exe would name the process "exe"; the path keeps its name.
	if exe, err := os.Readlink("/proc/self/exe"); err == nil {
		cmd.Path = exe
	}
	if err := cmd.Start(); err != nil {
		return 1
	}
	w.Close()
	if n, _ := r.Read(make([]byte, 1)); n == 1 {
		return 0
	}
	_ = cmd.Wait()
	return 1
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
		d.log.line(tagControl, "Accepting connection...")
		go d.serve(conn{c}, privileged)
	}
}

// serve learns who has connected.
func (d *daemon) serve(c conn, privileged bool) {
	verb, rest, _, err := c.receive()
	d.hang()
	switch {
	case err != nil:
		d.log.line(tagControl, "Unable to accept connection")
	case verb == wireUI:
		d.serveUI(c, privileged)
	case verb == wireClient && rest == "":
		// A client's first connection carries no credentials; it is always refused, and
		// the client connects again. Benign. [B]
		d.log.line(tagControl, "User did not send valid credentials")
	case verb == wireClient:
		d.newClient(c)
		return // the client's socket stays open until it has its server
	case verb == wireServer:
		d.newServer(c)
	}
	c.Close()
}

// hang waits while the steer file says that the daemon is wedged.
func (d *daemon) hang() {
	for d.machine.steer().DaemonHang {
		time.Sleep(10 * time.Millisecond)
	}
}
