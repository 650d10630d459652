package mps

import "fmt"

// Device is what package mps has to know of a GPU.
type Device struct {
	UUID                       string
	DriverBranch               int // 580 for driver 580.159.03
	ComputeMajor, ComputeMinor int
	VGPU, MIG                  bool
}

// MinimumDriverBranch is the first that shares a GPU between containers without a
// shared /dev/shm: its servers log an anonymous memory region where R550's log a
// named one.
const MinimumDriverBranch = 580

// Unsupported says in one sentence why MPS cannot hold the GPU, or "" when it can.
// control is the path of nvidia-cuda-mps-control, "" when it was not found.
func Unsupported(d Device, control string) string {
	switch {
	case d.VGPU:
		return "this GPU is a vGPU, which does not support MPS; its containers need the whole GPU"
	case d.MIG:
		return "MIG mode is enabled on this GPU; disable it with nvidia-smi -i " + d.UUID + " -mig 0 to share the GPU through MPS"
	case d.ComputeMajor < 7:
		return fmt.Sprintf("compute capability %d.%d is below 7.0 (Volta): older GPUs do not isolate the address spaces of MPS clients, and take no memory limit",
			d.ComputeMajor, d.ComputeMinor)
	case d.DriverBranch < MinimumDriverBranch:
		return fmt.Sprintf("driver branch R%d: MPS tasks need driver branch R%d or newer (older ones need a /dev/shm shared by all containers)",
			d.DriverBranch, MinimumDriverBranch)
	case control == "":
		return "nvidia-cuda-mps-control was not found; it comes with the NVIDIA driver, on Debian in the package nvidia-cuda-mps"
	}
	return ""
}
