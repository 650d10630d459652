package mpssim

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// SteerGPU changes what the steer file of one GPU of the machine in machineDir says.
// Changes from several processes follow one another.
func SteerGPU(machineDir, uuid string, change func(*Steer)) error {
	sim := filepath.Join(machineDir, "sim")
	lock, err := os.OpenFile(filepath.Join(sim, "mps.lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	s, err := ReadSteer(machineDir, uuid)
	if err != nil {
		return err
	}
	change(&s)
	if _, err := ParseSteer(s.Format()); err != nil {
		return fmt.Errorf("steer of %s: %w", uuid, err)
	}
	return replace(steerPath(sim, uuid), 0o644, bytes.NewReader(s.Format()))
}

// ReadSteer reads a GPU's steer file; one that is not there is the zero Steer.
func ReadSteer(machineDir, uuid string) (Steer, error) {
	text, err := os.ReadFile(steerPath(filepath.Join(machineDir, "sim"), uuid))
	if os.IsNotExist(err) {
		return Steer{}, nil
	}
	if err != nil {
		return Steer{}, err
	}
	return ParseSteer(text)
}

// KillDaemon kills (SIGKILL) the control daemons of a GPU and returns their pids.
func KillDaemon(machineDir, uuid string) ([]int, error) {
	return signalAll(machineDir, uuid, ControlName, syscall.SIGKILL)
}

// FreezeDaemon stops (SIGSTOP) the control daemons of a GPU.
func FreezeDaemon(machineDir, uuid string) ([]int, error) {
	return signalAll(machineDir, uuid, ControlName, syscall.SIGSTOP)
}

// ThawDaemon lets frozen control daemons of a GPU go on.
func ThawDaemon(machineDir, uuid string) ([]int, error) {
	return signalAll(machineDir, uuid, ControlName, syscall.SIGCONT)
}

// CrashServer ends the MPS servers of a GPU, orphans too, as a crash does.
func CrashServer(machineDir, uuid string) ([]int, error) {
	return signalAll(machineDir, uuid, ServerName, syscall.SIGKILL)
}

// FatalFault makes a client of the GPU's servers fault: every client of the GPU gets
// the CUDA error with this number (0: 700, illegal address), and new ones are refused
// until all of them have exited. It returns the servers' pids.
func FatalFault(machineDir, uuid string, code int) ([]int, error) {
	err := SteerGPU(machineDir, uuid, func(s *Steer) { s.FaultSeq, s.FaultCode = s.FaultSeq+1, code })
	if err != nil {
		return nil, err
	}
	return signalAll(machineDir, uuid, ServerName, syscall.SIGUSR1)
}

// Daemons returns the pids of the control daemons of a GPU, Servers those of its
// servers.
func Daemons(machineDir, uuid string) ([]int, error) { return find(machineDir, uuid, ControlName) }

// Servers returns the pids of the MPS servers of a GPU, orphans too.
func Servers(machineDir, uuid string) ([]int, error) { return find(machineDir, uuid, ServerName) }

func signalAll(machineDir, uuid, name string, sig syscall.Signal) ([]int, error) {
	pids, err := find(machineDir, uuid, name)
	if err != nil {
		return nil, err
	}
	if len(pids) == 0 {
		return nil, fmt.Errorf("no %s of %s runs on the machine in %s", name, uuid, machineDir)
	}
	for _, pid := range pids {
		// Through a pidfd, checked again, so that a pid used anew is never hit.
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue
		}
		if isOurs(machineDir, uuid, name, pid) {
			err = unix.PidfdSendSignal(fd, sig, nil, 0)
		}
		unix.Close(fd)
		if err != nil && err != unix.ESRCH {
			return nil, fmt.Errorf("signal %s to %d: %w", sig, pid, err)
		}
	}
	return pids, nil
}

func find(machineDir, uuid, name string) ([]int, error) {
	dir, err := filepath.EvalSymlinks(machineDir)
	if err != nil {
		return nil, err
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	var pids []int
	for _, pid := range simulated() {
		if isOurs(dir, uuid, name, pid) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// isOurs: the process runs the machine's executable of that name for that GPU. The
// control utility runs the same executable; only a daemon has -f or -d.
func isOurs(machineDir, uuid, name string, pid int) bool {
	proc := fmt.Sprintf("/proc/%d/", pid)
	exe, err := os.Readlink(proc + "exe")
	if err != nil || strings.TrimSuffix(exe, " (deleted)") != filepath.Join(machineDir, "bin", name) {
		return false
	}
	env, err := os.ReadFile(proc + "environ")
	if err != nil || !slices.Contains(strings.Split(string(env), "\x00"), "CUDA_VISIBLE_DEVICES="+uuid) {
		return false
	}
	if name != ControlName {
		return true
	}
	cmdline, err := os.ReadFile(proc + "cmdline")
	args := strings.Split(string(cmdline), "\x00")
	return err == nil && (slices.Contains(args, "-f") || slices.Contains(args, "-d"))
}
