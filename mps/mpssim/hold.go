package mpssim

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Kinds of a process that holds memory of a GPU.
const (
	kindServer  = "S" // an MPS server
	kindClient  = "M" // a client of one
	kindCompute = "C" // a CUDA process without MPS
)

// hold is a memfd whose size is what this process holds of one GPU.
type hold struct {
	file  *os.File
	inode uint64
	bytes int64
}

func newHold(uuid, kind string, bytes int64) (*hold, error) {
	fd, err := unix.MemfdCreate("cuda:"+uuid+":"+kind, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	h := &hold{file: os.NewFile(uintptr(fd), "cuda:"+uuid+":"+kind)}
	var st unix.Stat_t
	if err := errors.Join(unix.Fstat(fd, &st), h.resize(bytes)); err != nil {
		h.file.Close()
		return nil, err
	}
	h.inode = st.Ino
	return h, nil
}

func (h *hold) resize(bytes int64) error {
	if err := h.file.Truncate(bytes); err != nil {
		return err
	}
	h.bytes = bytes
	return nil
}

// held is one process's hold as /proc shows it.
type held struct {
	pid   int
	kind  string
	bytes int64
	inode uint64
	link  string // /proc/<pid>/fd/<n>
}

// holders finds all holds of a GPU in this process's pid namespace, except this
// process's own. What may not be looked at is passed over, as NVML shows nothing of it.
func holders(uuid string) []held {
	var found []held
	prefix := "/memfd:cuda:" + uuid + ":"
	for _, pid := range simulated() {
		if pid == os.Getpid() {
			continue
		}
		dir := fmt.Sprintf("/proc/%d/fd", pid)
		fds, err := os.ReadDir(dir)
		if err != nil {
			continue
		}
		for _, fd := range fds {
			link := filepath.Join(dir, fd.Name())
			target, err := os.Readlink(link)
			if err != nil || !strings.HasPrefix(target, prefix) {
				continue
			}
			var st unix.Stat_t
			if unix.Stat(link, &st) != nil {
				continue
			}
			kind, _, _ := strings.Cut(strings.TrimPrefix(target, prefix), " ")
			found = append(found, held{pid: pid, kind: kind, bytes: st.Size, inode: st.Ino, link: link})
		}
	}
	return found
}

// simulated lists the processes whose name says that they are this simulator's.
func simulated() []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		comm, err := os.ReadFile("/proc/" + e.Name() + "/comm")
		if err != nil {
			continue
		}
		name := string(comm)
		if strings.HasPrefix(name, "nvidia-cuda-mps") || strings.HasPrefix(name, "cuda-client") {
			pids = append(pids, pid)
		}
	}
	return pids
}

// claim is a process's word that it holds a GPU, for those that cannot see it in
// their /proc: a shared flock on <sim>/held.<uuid>, which the kernel drops when the
// process is gone.
type claim struct{ file *os.File }

// claimGPU takes the claim. Under EXCLUSIVE_PROCESS it is refused when any other
// process has one or shows a hold.
func (m machine) claimGPU(uuid string) (*claim, bool) {
	exclusive := m.exclusive(uuid)
	if exclusive {
		for _, h := range holders(uuid) {
			if h.kind != kindClient {
				return nil, false
			}
		}
	}
	if m.sim == "" {
		return &claim{}, true
	}
	path := filepath.Join(m.sim, "held."+uuid)
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE, 0o644)
	if err != nil {
		f, err = os.Open(path) // a container sees the folder read-only
	}
	if err != nil {
		return &claim{}, true // nobody that can claim ever did
	}
	if exclusive && unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		f.Close()
		return nil, false
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH); err != nil {
		f.Close()
		return nil, false
	}
	return &claim{f}, true
}
