package mps

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// ContainerPipeDirectory is where a container finds the client folder.
const ContainerPipeDirectory = "/run/berth/mps"

// The environment that MPS reads. Only this package spells these names.
const (
	envPipe        = "CUDA_MPS_PIPE_DIRECTORY"
	envLog         = "CUDA_MPS_LOG_DIRECTORY"
	envMemoryLimit = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
	envPercent     = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
	envVisible     = "CUDA_VISIBLE_DEVICES"
	envOrder       = "CUDA_DEVICE_ORDER"

	// envID marks every daemon that berth starts, and by inheritance its servers.
	envID = "BERTH_MPS_ID"
)

// ReservedVariables are the variables berth sets itself, so that a task
// definition may not: one of them set by a tenant would lift its own cap or make
// it miss the daemon. Every other CUDA_MPS_* name is reserved too, see [Reserved].
var ReservedVariables = []string{
	envPipe, envLog, envMemoryLimit, envPercent,
	"CUDA_MPS_CLIENT_PRIORITY",
	"CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING",
	"CUDA_MPS_SM_PARTITION",
	envVisible, // an index there would name another device than ordinal 0 of the cap [D]
	envOrder,
	envID,
	"NVIDIA_VISIBLE_DEVICES",
}

// Reserved says whether a task definition may not set the variable.
func Reserved(name string) bool {
	return strings.HasPrefix(name, "CUDA_MPS_") || slices.Contains(ReservedVariables, name)
}

// Limits cap one container on a GPU that is held.
type Limits struct {
	MemoryMiB           int64 // of GPU memory, at least 1, per process of the container [D]
	ActiveThreadPercent int32 // 1-100; 0: not asked for, and then not set
}

// Env is the environment that makes the CUDA processes of a container clients of
// the GPU's daemon, with these caps. The cap is on ordinal 0: a daemon and its
// clients see one GPU only. MPS ignores a limit that it cannot parse and runs the
// client uncapped [B], so nothing but whole MiB and whole percents is written.
func (l Limits) Env() ([]string, error) {
	if l.MemoryMiB < 1 {
		return nil, fmt.Errorf("memory: %d MiB is below the least cap, 1 MiB", l.MemoryMiB)
	}
	if l.ActiveThreadPercent < 0 || l.ActiveThreadPercent > 100 {
		return nil, fmt.Errorf("maxComputePercent: %d is not between 1 and 100", l.ActiveThreadPercent)
	}
	env := []string{
		envPipe + "=" + ContainerPipeDirectory,
		envMemoryLimit + "=0=" + mebibytes(l.MemoryMiB),
	}
	if l.ActiveThreadPercent > 0 {
		env = append(env, envPercent+"="+strconv.Itoa(int(l.ActiveThreadPercent)))
	}
	return env, nil
}

// mebibytes is the only form in which berth writes an amount of memory to MPS.
// The daemon takes "1.5G" for 1M, "1000K" for 1000M and "5T" for 5M, silently [B].
func mebibytes(n int64) string { return strconv.FormatInt(n, 10) + "M" }
