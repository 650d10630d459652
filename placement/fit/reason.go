package fit

import "fmt"

// Code names one reason why a machine or a GPU cannot take a task.
type Code string

// Every reason there is; String has its sentence. Those of a machine come first, in
// the order in which one is chosen for a machine that has several.
const (
	Lost         Code = "LOST"
	Disconnected Code = "AGENT_CONNECTIVITY"
	Draining     Code = "DRAINING"
	CPU          Code = "CPU"
	Memory       Code = "MEMORY"
	PortTaken    Code = "PORT_TAKEN"
	NoGPU        Code = "NO_GPU"

	TooFewGPUs     Code = "TOO_FEW_IDLE_GPUS"
	GPUMemory      Code = "GPU_MEMORY"
	LargerThanGPU  Code = "LARGER_THAN_GPU"
	ClientLimit    Code = "MPS_CLIENT_LIMIT"
	InSharedUse    Code = "GPU_SHARED"
	InDedicatedUse Code = "GPU_DEDICATED"
	TrustDomain    Code = "TRUST_DOMAIN"
	Closed         Code = "GPU_CLOSED"
	NoSharing      Code = "MPS_UNSUPPORTED"
)

// Reason is why not. GPU is empty when the machine itself lacks something.
// Want and Have are in the unit of the code: MiB, CPU units, clients, GPUs.
type Reason struct {
	Code   Code   `json:"code"`
	GPU    string `json:"gpu,omitempty"`
	Index  int    `json:"index,omitempty"`
	Want   int64  `json:"want,omitempty"`
	Have   int64  `json:"have,omitempty"`
	Port   Port   `json:"port,omitzero"`
	Detail string `json:"detail,omitempty"`
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
	case Lost:
		return "its agent has not been heard for so long that its tasks are started elsewhere"
	case Disconnected:
		return "its agent is not connected"
	case Draining:
		return because("it is draining", r.Detail)
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
	case TrustDomain:
		return fmt.Sprintf("shared by tasks of another trust domain (%s)", r.Detail)
	case Closed:
		return "closed to starts: " + r.Detail
	case NoSharing:
		return "cannot be shared: " + r.Detail
	case TooFewGPUs:
		return fmt.Sprintf("%d idle GPUs wanted, %d there", r.Want, r.Have)
	}
	return string(r.Code)
}

func because(what, why string) string {
	if why == "" {
		return what
	}
	return what + ": " + why
}

// distance is how far a reason is from fitting, in ppm of what is wanted: 0 for a GPU
// that only has to be opened, 1e6 where all of it is missing, more where waiting alone
// never helps.
func (r Reason) distance() int64 {
	const all = 1_000_000
	switch r.Code {
	case Closed:
		return 0
	case CPU, Memory, GPUMemory, ClientLimit, TooFewGPUs:
		if r.Want <= 0 {
			return all
		}
		return min(all, (r.Want-r.Have)*all/r.Want)
	case PortTaken, InSharedUse, InDedicatedUse, TrustDomain:
		return all
	case Disconnected, Draining:
		return 2 * all
	case Lost:
		return 3 * all
	}
	return 4 * all // LargerThanGPU, NoGPU, NoSharing: never on this machine
}
