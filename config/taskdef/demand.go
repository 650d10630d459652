package taskdef

import "github.com/aws/aws-sdk-go-v2/service/ecs/types"

// Demand is what a task asks of a machine. The GPU memory of its MPS
// containers is one sum, because they share one GPU.
type Demand struct {
	CPU              int64 // ECS units: 1024 are one vCPU
	MemoryMiB        int64 // host memory
	GPUMemoryMiB     int64 // of one shared GPU
	SharedContainers int   // containers with a sharingStrategy
	WholeGPUs        int
	AllGPUs          bool // every GPU of the machine; WholeGPUs is 0 then
	Ports            []Port
}

// Port is a host port that is asked for by number.
type Port struct {
	Host     int
	Protocol string // tcp, udp
}

// Demand adds up what the containers ask for.
func (d *Definition) Demand() Demand { return Demand{} }

// Share is a container's part of a shared GPU. percent is 0 where none is
// asked for. shared is false for a container that asks for whole GPUs or none.
func Share(c *types.ContainerDefinition) (memoryMiB int64, percent int32, shared bool) {
	return 0, 0, false
}

// WholeGPUs is how many whole GPUs a container asks for, or all of the machine's.
func WholeGPUs(c *types.ContainerDefinition) (n int, all bool) { return 0, false }

// TaskCPU is the task's own CPU in ECS units; false where it names none.
func TaskCPU(t *types.TaskDefinition) (units int64, ok bool) { return 0, false }

// TaskMemory is the task's own memory limit; false where it names none.
func TaskMemory(t *types.TaskDefinition) (mib int64, ok bool) { return 0, false }
