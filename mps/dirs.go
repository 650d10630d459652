package mps

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// maxPipePath is the longest pipe folder: the daemon binds <folder>/control_privileged
// in a sun_path of 108 bytes. At 88 it exits with 1 and says nothing [B].
const maxPipePath = 87

// Dirs are one GPU's folders and files.
type Dirs struct {
	Run, Log string // /run/berth and /var/log/berth
	UUID     string // of the GPU
}

// Root is the GPU's folder under Run: pipe and client lie in it.
func (d Dirs) Root() string { return filepath.Join(d.Run, "mps", d.UUID) }

// Pipe is the daemon's own folder; no container sees it.
func (d Dirs) Pipe() string { return filepath.Join(d.Root(), "pipe") }

// Client is the folder that containers mount, read-only. Its one entry is a hard
// link of pipe/control, so that a container reaches the daemon and nothing that
// could stop it, also after the daemon has made a new socket.
func (d Dirs) Client() string { return filepath.Join(d.Root(), "client") }

// Logs is the folder of the daemon's log.
func (d Dirs) Logs() string { return filepath.Join(d.Log, "mps", d.UUID) }

// ControlLog is the daemon's and its servers' output, append-only.
func (d Dirs) ControlLog() string { return filepath.Join(d.Logs(), "control.log") }

func (d Dirs) socket() string { return filepath.Join(d.Pipe(), "control") }
func (d Dirs) link() string   { return filepath.Join(d.Client(), "control") }
func (d Dirs) lock() string   { return filepath.Join(d.Pipe(), "control_lock") }

// Create makes the folders and checks them.
func (d Dirs) Create() error {
	if err := d.checkPaths(); err != nil {
		return err
	}
	for _, dir := range []string{d.Pipe(), d.Client(), d.Logs()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make folder: %w", err)
		}
	}
	// A restrictive umask of the agent would shut clients of other users out.
	for _, dir := range []string{filepath.Dir(d.Root()), d.Root(), d.Pipe(), d.Client()} {
		if err := os.Chmod(dir, 0o755); err != nil {
			return fmt.Errorf("make folder: %w", err)
		}
	}
	return d.Check()
}

// Check says which folder above the sockets has the wrong mode, owner or length.
// Without x for others a server or client of another user cannot reach the
// socket, six servers start and die, and the client gets error 805; where group
// or others may write, they may put a daemon of their own in place.
func (d Dirs) Check() error {
	if err := d.checkPaths(); err != nil {
		return err
	}
	for _, leaf := range []string{d.Pipe(), d.Client()} {
		real, err := filepath.EvalSymlinks(leaf)
		if err != nil {
			return fmt.Errorf("run folder: %w", err)
		}
		for _, dir := range parents(real) {
			if err := checkFolder(dir); err != nil {
				return err
			}
		}
	}
	return nil
}

func (d Dirs) checkPaths() error {
	if d.UUID == "" || strings.ContainsRune(d.UUID, filepath.Separator) {
		return fmt.Errorf("GPU UUID: %q cannot name a folder", d.UUID)
	}
	for _, dir := range []string{d.Run, d.Log} {
		if !filepath.IsAbs(dir) {
			return fmt.Errorf("folder: %q is not an absolute path", dir)
		}
	}
	// The client folder's path is the longer one, and the control utility has the
	// same limit there.
	if dir := d.Client(); len(dir) > maxPipePath {
		return fmt.Errorf("run folder: %s is %d bytes long, and MPS takes at most %d; choose a shorter run folder than %s",
			dir, len(dir), maxPipePath, d.Run)
	}
	return nil
}

// parents are the folder and all above it, from the root down.
func parents(dir string) []string {
	if dir == filepath.Dir(dir) {
		return []string{dir}
	}
	return append(parents(filepath.Dir(dir)), dir)
}

func checkFolder(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("run folder: %w", err)
	}
	if !info.IsDir() {
		return fmt.Errorf("run folder: %s is not a folder", dir)
	}
	mode := info.Mode()
	octal := fmt.Sprintf("%04o", unixMode(mode))
	if mode.Perm()&0o001 == 0 {
		return fmt.Errorf("run folder: %s has mode %s; others need x on it, as in 0755, or MPS servers and clients that are not root cannot reach their socket", dir, octal)
	}
	// In a sticky folder, such as /tmp, nobody can rename what is another's.
	if mode.Perm()&0o022 != 0 && mode&fs.ModeSticky == 0 {
		return fmt.Errorf("run folder: %s has mode %s; group and others may not write to it, as in 0755, or they could put another daemon in the place of berth's", dir, octal)
	}
	if stat, ok := info.Sys().(*syscall.Stat_t); ok && stat.Uid != 0 && int(stat.Uid) != os.Geteuid() {
		return fmt.Errorf("run folder: %s belongs to user %d; it must belong to root, or its owner could put another daemon in the place of berth's", dir, stat.Uid)
	}
	return nil
}

func unixMode(m fs.FileMode) uint32 {
	n := uint32(m.Perm())
	if m&fs.ModeSticky != 0 {
		n |= 0o1000
	}
	return n
}

// linked says whether client/control is the socket that pipe/control is.
func (d Dirs) linked() (bool, error) {
	socket, err := os.Lstat(d.socket())
	if err != nil {
		return false, err
	}
	link, err := os.Lstat(d.link())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return os.SameFile(socket, link), nil
}

// relink makes client/control the daemon's socket of now. By rename, so that a
// running container finds the old socket or the new one and never none: a client
// that finds none runs uncapped, silently [B].
func (d Dirs) relink() error {
	temporary := filepath.Join(d.Client(), ".control")
	if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("link the control socket: %w", err)
	}
	// Renaming one link of a file onto another link of it does nothing and leaves both.
	if same, err := d.linked(); err != nil {
		return fmt.Errorf("link the control socket: %w", err)
	} else if same {
		return nil
	}
	if err := os.Link(d.socket(), temporary); err != nil {
		return fmt.Errorf("link the control socket: %w", err)
	}
	if err := os.Rename(temporary, d.link()); err != nil {
		return fmt.Errorf("link the control socket: %w", err)
	}
	return nil
}

// remove takes the GPU's folders away. Only when nothing runs: the inode of a pipe
// folder must live as long as its daemon.
func (d Dirs) remove() error {
	return errors.Join(os.RemoveAll(d.Root()), os.RemoveAll(d.Logs()))
}
