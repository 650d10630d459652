// Package gpu reads a machine's NVIDIA GPUs through NVML: which there are, what they
// can give, who uses them, and their critical events (Xids). It alone imports go-nvml.
//
// NVML may hang (a wedged driver, a GPU that fell off the bus) and a thread inside it cannot
// be taken back. So every call runs in a lane: at most one call is inside NVML per lane, each
// caller waits no longer than its context and the call's deadline, and while a call is past its deadline
// all later calls of that lane fail at once with ErrHung, until it has come back. There is one lane for each GPU,
// one to list each index, one for the machine and one for events: a GPU that hangs takes no other with it.
//
// Methods may be called from any goroutine. Nothing is kept across a crash, and nothing needs to be: compute modes
// live in the driver.
package gpu

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Device is one GPU: what it is and what it can give. Amounts of memory are rounded so that
// TotalMiB - ReservedMiB is never more than the GPU has.
type Device struct {
	UUID     string
	Name     string // "NVIDIA H200"
	PCIBusID string // "00000000:18:00.0"
	Index    int    // NVML's; may change at a reboot
	Minor    int    // of /dev/nvidia<minor>; -1: unknown
	NUMANode int    // -1: unknown, or no one node

	TotalMiB    int64 // rounded down
	ReservedMiB int64 // by driver and firmware, rounded up; 0 where NVML is too old to say

	ComputeMajor, ComputeMinor int
	Architecture               string // "Hopper"; "" unknown
	DriverVersion              string // "580.159.03"
	DriverBranch               int    // 580; 0 unknown
	CUDAVersion                int    // of the driver: 13000 is 13.0; 0 unknown

	MIG  bool // in MIG mode now
	VGPU bool // definitely a vGPU slice; unknown counts as not
	ECC  bool // in ECC mode now

	NVLinks []NVLink
	Peers   []Peer // every other GPU that answers

	// Err is set when the GPU did not answer: ErrLost or ErrHung, say. All else is then what was last known.
	Err error
}

// UsableMiB is what the GPU can give to all its users together.
func (d Device) UsableMiB() int64 { return d.TotalMiB - d.ReservedMiB }

// NVLink is one link of a GPU.
type NVLink struct {
	Link           int
	Up             bool
	RemotePCIBusID string // "" when down or unknown
	RemoteType     string // "GPU", "SWITCH", "CPU", "" unknown
}

// Peer is how near another GPU is.
type Peer struct {
	UUID    string
	Path    Path
	NVLinks int // direct links; those through a switch are not told apart by peer
}

// Path is the nearest thing that two GPUs have in common on PCIe, in nvidia-smi topo's words.
type Path string

// From near to far.
const (
	PathInternal   Path = "INTERNAL" // on one board
	PathSingle     Path = "PIX"      // one PCIe switch
	PathMultiple   Path = "PXB"      // several PCIe switches
	PathHostBridge Path = "PHB"      // one host bridge
	PathNode       Path = "NODE"     // one NUMA node
	PathSystem     Path = "SYS"      // across the machine
)

// ComputeMode is who may open contexts on a GPU.
type ComputeMode int

// NVML's numbers.
const (
	ComputeUnknown          ComputeMode = -1 // a GPU in MIG mode has none of its own
	ComputeDefault          ComputeMode = 0
	ComputeProhibited       ComputeMode = 2
	ComputeExclusiveProcess ComputeMode = 3
)

func (m ComputeMode) String() string {
	switch m {
	case ComputeUnknown:
		return "UNKNOWN"
	case ComputeDefault:
		return "DEFAULT"
	case ComputeProhibited:
		return "PROHIBITED"
	case ComputeExclusiveProcess:
		return "EXCLUSIVE_PROCESS"
	}
	return "COMPUTE_MODE_" + strconv.Itoa(int(m))
}

// Kind is how a process uses a GPU.
type Kind string

const (
	// KindCompute has a context of its own. An MPS server is one of these too: NVML cannot tell, mps can.
	KindCompute Kind = "C"
	// KindMPSClient goes through an MPS server. NVML may list it as compute too; it is given once.
	KindMPSClient Kind = "M"
)

// Process is a process that holds memory of a GPU.
type Process struct {
	PID     int   // in the pid namespace of this process
	UsedMiB int64 // rounded up; -1: NVML does not know
	Kind    Kind
}

// Usage is what a GPU is doing.
type Usage struct {
	UsedMiB, TotalMiB         int64 // used does not count reserved; rounded up and down
	GPUPercent, MemoryPercent int   // of the last sample period; -1: NVML does not know
}

// Sample is all that changes on a GPU, read in one go.
type Sample struct {
	Mode      ComputeMode
	Usage     Usage
	Processes []Process // by PID
}

// Xid is a critical event.
type Xid struct {
	UUID string
	Code int // 31, 79...; 999 is one that NVML does not know
	At   time.Time

	// Err is set, and nothing else but At, when listening itself has trouble: it is told once when it
	// begins, and listening goes on.
	Err error
}

// Errors to ask for with errors.Is.
var (
	ErrNoLibrary    = errors.New("no NVML library")
	ErrNoDriver     = errors.New("NVIDIA driver not loaded")
	ErrHung         = errors.New("NVML does not answer")
	ErrLost         = errors.New("GPU is lost")
	ErrUnknownGPU   = errors.New("no such GPU")
	ErrNotSupported = errors.New("not supported by this GPU or driver")
	ErrNoPermission = errors.New("no permission")
	ErrClosed       = errors.New("NVML is closed")
)

// LostError is a GPU that fell off the bus, or whose driver needs a reset of it.
type LostError struct {
	UUID string // "" while it is not known yet
	Call string
}

func (e *LostError) Error() string {
	return fmt.Sprintf("%s: GPU %s is lost (fell off the bus or needs a reset)", e.Call, e.UUID)
}

// Is makes errors.Is(err, ErrLost) true.
func (e *LostError) Is(target error) bool { return target == ErrLost }

// HungError is a call that NVML has not come back from.
type HungError struct {
	UUID  string // "" for a call of the machine
	Call  string
	Since time.Time
}

func (e *HungError) Error() string {
	on := "the machine"
	if e.UUID != "" {
		on = "GPU " + e.UUID
	}
	return fmt.Sprintf("NVML has not answered %s of %s since %s", e.Call, on, e.Since.Format(time.RFC3339))
}

// Is makes errors.Is(err, ErrHung) true.
func (e *HungError) Is(target error) bool { return target == ErrHung }

// Branch is the number that a driver version begins with: 580 for "580.159.03".
func Branch(version string) (int, error) {
	first, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(first)
	if err != nil || n <= 0 || strings.HasPrefix(first, "+") {
		return 0, fmt.Errorf("driver version %q: does not begin with a branch number", version)
	}
	return n, nil
}
