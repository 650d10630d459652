package mpssim

import (
	"os/signal"
	"syscall"
	"unsafe"
)

// defaultSignals gives the signals that NVIDIA's programs do not handle their default
// action in the kernel, in place of Go's: they end the process at once, and are dropped
// where it is the init of a pid namespace. [B] One that was ignored when the process
// started stays so, as in C.
func defaultSignals(signals ...syscall.Signal) {
	// The kernel's struct sigaction on amd64 and arm64, all zero: SIG_DFL.
	var action [4]uint64
	for _, s := range signals {
		if signal.Ignored(s) {
			continue
		}
		_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(s), uintptr(unsafe.Pointer(&action)), 0, 8, 0, 0)
	}
}
