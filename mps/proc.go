package mps

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// errGone is met when a process is no more, or is not the one that was recorded.
var errGone = errors.New("the process is gone")

// procStat is what berth needs of /proc/PID/stat.
type procStat struct {
	comm  string
	state byte
	ppid  int
	start uint64 // field 22: clock ticks since boot
}

func readStat(pid int) (procStat, error) {
	var buffer [1024]byte
	b, err := readOnce(procPath(pid, "stat"), buffer[:])
	if err != nil {
		return procStat{}, errGone
	}
	// comm may hold spaces and parentheses; it ends at the last one.
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return procStat{}, fmt.Errorf("%s: no comm field", procPath(pid, "stat"))
	}
	fields := strings.Fields(string(b[end+1:])) // field 3, state, is the first
	if len(fields) < 20 {
		return procStat{}, fmt.Errorf("%s: %d fields", procPath(pid, "stat"), len(fields)+2)
	}
	s := procStat{comm: string(b[open+1 : end]), state: fields[0][0]}
	s.ppid, _ = strconv.Atoi(fields[1])
	s.start, err = strconv.ParseUint(fields[19], 10, 64)
	return s, err
}

// readOnce reads a small file of /proc with three system calls: it is done for each
// process each second.
func readOnce(path string, buffer []byte) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	n, err := unix.Read(fd, buffer)
	if err != nil {
		return nil, err
	}
	return buffer[:n], nil
}

// dead is a process that only waits to be reaped: an init that reaps late leaves
// a killed daemon in state Z for about a second [B].
func (s procStat) dead() bool { return s.state == 'Z' || s.state == 'X' || s.state == 'x' }

func procPath(pid int, name string) string {
	return filepath.Join("/proc", strconv.Itoa(pid), name)
}

// identify names the process that has the pid now.
func identify(pid int) (Process, error) {
	s, err := readStat(pid)
	if err != nil {
		return Process{}, err
	}
	if s.dead() {
		return Process{}, errGone
	}
	return Process{PID: pid, Start: s.start}, nil
}

// view looks at exactly this process.
func (p Process) view() ProcessView {
	v := ProcessView{PID: p.PID}
	if p.PID == 0 {
		return v
	}
	s, err := readStat(p.PID)
	if err != nil || s.start != p.Start {
		return v
	}
	v.State = string(s.state)
	v.Alive = !s.dead()
	return v
}

// younger says whether a process that runs was started less than this long ago.
func (p Process) younger(than time.Duration) bool {
	const ticksPerSecond = 100 // of start times, on every architecture Linux shows to users
	var now unix.Timespec
	if v := p.view(); !v.Alive || v.Stopped() || unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) != nil {
		return false
	}
	started := time.Duration(p.Start) * (time.Second / ticksPerSecond)
	return time.Duration(now.Nano())-started < than
}

func (p Process) String() string { return fmt.Sprintf("pid %d", p.PID) }

// environment is the environment a process was started with.
type environment []string

func readEnvironment(pid int) (environment, error) {
	b, err := os.ReadFile(procPath(pid, "environ"))
	if err != nil {
		return nil, err
	}
	return strings.Split(string(b), "\x00"), nil
}

func (e environment) get(name string) string {
	for _, kv := range e {
		if value, ok := strings.CutPrefix(kv, name+"="); ok {
			return value
		}
	}
	return ""
}

// openProcess opens a pidfd of exactly this process. The start time is compared
// after the opening: a pid that was used again in between shows another.
func openProcess(p Process) (*os.File, error) {
	fd, err := unix.PidfdOpen(p.PID, 0)
	if err != nil {
		if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
			return nil, errGone
		}
		return nil, fmt.Errorf("pidfd of pid %d: %w", p.PID, err)
	}
	// Not blocking, so that Go's poller waits on it and no thread does.
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("pidfd of pid %d: %w", p.PID, err)
	}
	f := os.NewFile(uintptr(fd), "pidfd:"+strconv.Itoa(p.PID))
	s, err := readStat(p.PID)
	if err != nil || s.start != p.Start {
		f.Close()
		return nil, errGone
	}
	return f, nil
}

// waitExit returns nil once the process of the pidfd has ended, zombie or not.
func waitExit(ctx context.Context, pidfd *os.File) error {
	conn, err := pidfd.SyscallConn()
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { pidfd.SetReadDeadline(time.Unix(1, 0)) })()
	err = conn.Read(func(fd uintptr) bool {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(poll, 0)
		return err == nil && n > 0
	})
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// reap takes the exit status of a child of ours that ended, so that it does not
// stay a zombie. Harmless for a process that is not our child.
func reap(pid int) {
	var status unix.WaitStatus
	unix.Wait4(pid, &status, unix.WNOHANG, nil)
}

// kill ends one process of ours with SIGKILL and waits until it is gone. It is
// ours only if pid, start time and BERTH_MPS_ID are those recorded; the signal
// goes through a pidfd, so a pid that is used again is never hit.
func kill(ctx context.Context, p Process, id string) error {
	f, err := openProcess(p)
	if errors.Is(err, errGone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	env, err := readEnvironment(p.PID)
	if !p.view().Alive {
		reap(p.PID)
		return nil
	}
	if err != nil {
		return fmt.Errorf("pid %d is not killed: its environment cannot be read: %w", p.PID, err)
	}
	if got := env.get(envID); id == "" || got != id {
		return fmt.Errorf("pid %d is not killed: its %s is %q, and berth recorded %q", p.PID, envID, got, id)
	}
	if err := sendKill(f); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill pid %d: %w", p.PID, err)
	}
	if err := waitExit(ctx, f); err != nil {
		return fmt.Errorf("pid %d does not end after SIGKILL (state %s)", p.PID, p.view().State)
	}
	reap(p.PID)
	return nil
}

func sendKill(pidfd *os.File) error {
	conn, err := pidfd.SyscallConn()
	if err != nil {
		return err
	}
	// Not File.Fd, which may put the descriptor back into blocking mode.
	var sent error
	err = conn.Control(func(fd uintptr) { sent = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) })
	return errors.Join(err, sent)
}

// family is what runs for one pipe folder.
type family struct {
	ours      []Process // carry our BERTH_MPS_ID, oldest first
	strangers []int     // MPS servers on our pipe folder that do not
}

// findFamily looks through /proc. The name in comm is cut at 15 bytes, so daemon,
// server and control utility all show nvidia-cuda-mps.
func findFamily(id, pipe string) (family, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return family{}, err
	}
	var found family
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		comm, err := os.ReadFile(procPath(pid, "comm"))
		if err != nil || !bytes.HasPrefix(comm, []byte("nvidia-cuda-mps")) {
			continue
		}
		p, err := identify(pid)
		if err != nil {
			continue
		}
		env, err := readEnvironment(pid)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.ESRCH) {
			continue // gone, or another user's: an agent that is not root starts none of those
		}
		if err != nil {
			return family{}, fmt.Errorf("environment of pid %d: %w", pid, err)
		}
		switch {
		case id != "" && env.get(envID) == id:
			found.ours = append(found.ours, p)
		case env.get(envPipe) == pipe && isServer(pid):
			found.strangers = append(found.strangers, pid)
		}
	}
	return found, nil
}

// isServer tells a server from the daemon and from the control utility.
func isServer(pid int) bool {
	if exe, err := os.Readlink(procPath(pid, "exe")); err == nil {
		return strings.HasPrefix(filepath.Base(exe), "nvidia-cuda-mps-server")
	}
	cmdline, _ := os.ReadFile(procPath(pid, "cmdline"))
	argv0, _, _ := strings.Cut(string(cmdline), "\x00")
	return filepath.Base(argv0) == "nvidia-cuda-mps-server"
}

// lockHolder is the pid that holds the write lock on a daemon's lock file, 0 for
// nobody, -1 for one that this pid namespace does not show. It asks the kernel; the daemon notices nothing.
func lockHolder(path string) (int, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer f.Close()
	lock := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &lock); err != nil {
		return 0, fmt.Errorf("lock of %s: %w", path, err)
	}
	if lock.Type == unix.F_UNLCK {
		return 0, nil
	}
	if lock.Pid == 0 {
		return -1, nil
	}
	return int(lock.Pid), nil
}

// socketOwner is the pid that listens on a daemon's socket.
func socketOwner(path string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return 0, fmt.Errorf("connect %s: %w", path, err)
	}
	cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return 0, err
	}
	return int(cred.Pid), nil
}
