package mpssim

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// errnoName is EPERM, ENXIO...
func errnoName(errno syscall.Errno) string {
	if name := unix.ErrnoName(errno); name != "" {
		return name
	}
	return errno.Error()
}
