package mps

import (
	"os"
	"path/filepath"
	"strings"
)

// FindControl is the path of the control binary: name itself when it is a path,
// else where path (a PATH) has it. "" when it is nowhere, or not executable.
func FindControl(name, path string) string {
	if strings.Contains(name, "/") {
		if executable(name) {
			return name
		}
		return ""
	}
	for _, dir := range filepath.SplitList(path) {
		if full := filepath.Join(dir, name); executable(full) {
			return full
		}
	}
	return ""
}

func executable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

// MaxClients is how many client contexts one GPU takes: 48, or 60 from R590 [D].
func MaxClients(driverBranch int) int {
	if driverBranch >= 590 {
		return 60
	}
	return 48
}

// LockHolder is the pid of the control daemon that has the pipe folder, 0 for
// none. It asks the kernel and leaves no trace with the daemon.
func LockHolder(pipeDir string) int {
	pid, err := lockHolder(filepath.Join(pipeDir, "control_lock"))
	if err != nil {
		return 0
	}
	return pid
}
