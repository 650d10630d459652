package fit

import "fmt"

// Code names one reason why a machine or a GPU cannot take a task.
type Code string

// Every reason there is; String has its sentence.
const (
	CPU            Code = "CPU"
	Memory         Code = "MEMORY"
	PortTaken      Code = "PORT_TAKEN"
	NoGPU          Code = "NO_GPU"
	GPUMemory      Code = "GPU_MEMORY"
	LargerThanGPU  Code = "LARGER_THAN_GPU"
	ClientLimit    Code = "MPS_CLIENT_LIMIT"
	InSharedUse    Code = "GPU_SHARED"
	InDedicatedUse Code = "GPU_DEDICATED"
	Closed         Code = "GPU_CLOSED"
	NoSharing      Code = "MPS_UNSUPPORTED"
	TooFewGPUs     Code = "TOO_FEW_IDLE_GPUS"
)

// Reason is why not. GPU is empty when the machine itself lacks something.
// Want and Have are in the unit of the code: MiB, CPU units, clients, GPUs.
type Reason struct {
	Code       Code
	GPU        string
	Index      int
	Want, Have int64
	Port       Port
	Detail     string
}

// String is the sentence for people. It names the GPU and what it lacks.
func (r Reason) String() string {
	s := r.sentence()
	if r.GPU != "" {
		return fmt.Sprintf("GPU %d (%s): %s", r.Index, r.GPU, s)
	}
	return s
}

func (r Reason) sentence() string {
	switch r.Code {
	case CPU:
		return fmt.Sprintf("%d CPU units wanted, %d free: %d short", r.Want, r.Have, r.Want-r.Have)
	case Memory:
		return fmt.Sprintf("%d MiB of host memory wanted, %d MiB free: %d MiB short", r.Want, r.Have, r.Want-r.Have)
	case PortTaken:
		return fmt.Sprintf("host port %d/%s is taken", r.Port.Number, r.Port.Protocol)
	case NoGPU:
		return "this machine has no GPU"
	case GPUMemory:
		return fmt.Sprintf("%d MiB wanted, %d MiB free: %d MiB short", r.Want, r.Have, r.Want-r.Have)
	case LargerThanGPU:
		return fmt.Sprintf("%d MiB wanted, the whole GPU has %d MiB: it can never fit", r.Want, r.Have)
	case ClientLimit:
		return fmt.Sprintf("%d MPS clients wanted, room for %d", r.Want, r.Have)
	case InSharedUse:
		return fmt.Sprintf("shared by %d containers, a whole GPU is wanted", r.Have)
	case InDedicatedUse:
		return "a whole-GPU task has it"
	case Closed:
		return "closed to starts: " + r.Detail
	case NoSharing:
		return "cannot be shared: " + r.Detail
	case TooFewGPUs:
		return fmt.Sprintf("%d idle GPUs wanted, %d there", r.Want, r.Have)
	}
	return string(r.Code)
}
