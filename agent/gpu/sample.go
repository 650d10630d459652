package gpu

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

const mib = 1 << 20

// Sample reads all that changes on one GPU.
func (n *NVML) Sample(ctx context.Context, uuid string) (Sample, error) {
	return onDevice(ctx, n, uuid, "Sample", func(d nvml.Device) (Sample, error) {
		var s Sample
		var err error
		if s.Mode, err = computeMode(d, uuid); err != nil {
			return s, err
		}
		if s.Usage, err = n.usage(d, uuid); err != nil {
			return s, err
		}
		s.Processes, err = n.processes(d, uuid)
		return s, err
	})
}

// ComputeMode reads one GPU's compute mode.
func (n *NVML) ComputeMode(ctx context.Context, uuid string) (ComputeMode, error) {
	return onDevice(ctx, n, uuid, "DeviceGetComputeMode", func(d nvml.Device) (ComputeMode, error) {
		return computeMode(d, uuid)
	})
}

// SetComputeMode sets one GPU's compute mode and reads it back. It needs root.
func (n *NVML) SetComputeMode(ctx context.Context, uuid string, mode ComputeMode) error {
	_, err := onDevice(ctx, n, uuid, "DeviceSetComputeMode", func(d nvml.Device) (struct{}, error) {
		ret := d.SetComputeMode(nvml.ComputeMode(mode))
		if err := callError("DeviceSetComputeMode", uuid, ret); err != nil {
			return struct{}{}, err
		}
		got, err := computeMode(d, uuid)
		if err == nil && got != mode {
			err = fmt.Errorf("compute mode of GPU %s: set to %s, reads %s", uuid, mode, got)
		}
		return struct{}{}, err
	})
	return err
}

// Processes lists who holds memory of one GPU.
func (n *NVML) Processes(ctx context.Context, uuid string) ([]Process, error) {
	return onDevice(ctx, n, uuid, "DeviceGetComputeRunningProcesses", func(d nvml.Device) ([]Process, error) {
		return n.processes(d, uuid)
	})
}

// Usage reads one GPU's memory and utilisation.
func (n *NVML) Usage(ctx context.Context, uuid string) (Usage, error) {
	return onDevice(ctx, n, uuid, "DeviceGetMemoryInfo", func(d nvml.Device) (Usage, error) {
		return n.usage(d, uuid)
	})
}

// What follows is called inside a lane.

func computeMode(d nvml.Device, uuid string) (ComputeMode, error) {
	mode, ret := d.GetComputeMode()
	if ret == nvml.ERROR_NOT_SUPPORTED { // a GPU in MIG mode: the mode belongs to its instances
		return ComputeUnknown, nil
	}
	return ComputeMode(mode), callError("DeviceGetComputeMode", uuid, ret)
}

// memory is in bytes. used leaves out reserved, where NVML tells them apart.
func (n *NVML) memory(d nvml.Device, uuid string) (total, reserved, used uint64, err error) {
	if n.has["nvmlDeviceGetMemoryInfo_v2"] {
		m, ret := d.GetMemoryInfo_v2()
		switch ret {
		case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND, nvml.ERROR_ARGUMENT_VERSION_MISMATCH:
		default:
			return m.Total, m.Reserved, m.Used, callError("DeviceGetMemoryInfo_v2", uuid, ret)
		}
	}
	m, ret := d.GetMemoryInfo()
	return m.Total, 0, m.Used, callError("DeviceGetMemoryInfo", uuid, ret)
}

func (n *NVML) usage(d nvml.Device, uuid string) (Usage, error) {
	total, _, used, err := n.memory(d, uuid)
	if err != nil {
		return Usage{}, err
	}
	u := Usage{UsedMiB: mibUp(used), TotalMiB: int64(total / mib), GPUPercent: -1, MemoryPercent: -1}
	rates, ret := d.GetUtilizationRates()
	switch ret {
	case nvml.SUCCESS:
		u.GPUPercent, u.MemoryPercent = int(rates.Gpu), int(rates.Memory)
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_NOT_FOUND:
	default:
		err = callError("DeviceGetUtilizationRates", uuid, ret)
	}
	return u, err
}

func (n *NVML) processes(d nvml.Device, uuid string) ([]Process, error) {
	compute, ret := d.GetComputeRunningProcesses()
	if err := callError("DeviceGetComputeRunningProcesses", uuid, ret); err != nil {
		return nil, err
	}
	var mps []nvml.ProcessInfo
	if n.has["nvmlDeviceGetMPSComputeRunningProcesses"] {
		mps, ret = d.GetMPSComputeRunningProcesses()
		if ret != nvml.ERROR_NOT_SUPPORTED { // before Volta
			if err := callError("DeviceGetMPSComputeRunningProcesses", uuid, ret); err != nil {
				return nil, err
			}
		}
	}
	return merge(compute, mps), nil
}

// merge makes one list of NVML's two. A process in both is an MPS client, since nvidia-smi shows those as M+C.
func merge(compute, mps []nvml.ProcessInfo) []Process {
	all := make([]Process, 0, len(compute)+len(mps))
	for _, p := range mps {
		all = append(all, processOf(p, KindMPSClient))
	}
	for _, p := range compute {
		if !slices.ContainsFunc(mps, func(m nvml.ProcessInfo) bool { return m.Pid == p.Pid }) {
			all = append(all, processOf(p, KindCompute))
		}
	}
	slices.SortFunc(all, func(a, b Process) int { return a.PID - b.PID })
	return all
}

func processOf(p nvml.ProcessInfo, kind Kind) Process {
	used := int64(-1)
	if p.UsedGpuMemory != math.MaxUint64 { // NVML_VALUE_NOT_AVAILABLE
		used = mibUp(p.UsedGpuMemory)
	}
	return Process{PID: int(p.Pid), UsedMiB: used, Kind: kind}
}

func mibUp(bytes uint64) int64 { return int64(bytes/mib) + int64((bytes%mib+mib-1)/mib) }
