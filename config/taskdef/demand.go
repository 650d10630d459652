package taskdef

import (
	"strconv"

	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
)

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

// Demand adds up what the containers ask for. The task's own cpu and memory,
// where it has them, count instead of the containers'.
func (d *Definition) Demand() Demand {
	var sum Demand
	for i := range d.ContainerDefinitions {
		c := &d.ContainerDefinitions[i]
		sum.CPU += int64(c.Cpu)
		sum.MemoryMiB += reservedMiB(c)
		if memory, _, shared := Share(c); shared {
			sum.GPUMemoryMiB += memory
			sum.SharedContainers++
		}
		n, all := WholeGPUs(c)
		sum.WholeGPUs += n
		sum.AllGPUs = sum.AllGPUs || all
		for _, p := range c.PortMappings {
			if host := hostPort(d.NetworkMode, p); host > 0 {
				sum.Ports = append(sum.Ports, Port{host, protocol(p)})
			}
		}
	}
	if units, ok := TaskCPU(&d.TaskDefinition); ok {
		sum.CPU = units
	}
	if mib, ok := TaskMemory(&d.TaskDefinition); ok {
		sum.MemoryMiB = mib
	}
	return sum
}

// reservedMiB is what a container takes from the machine: its soft limit, or
// its hard one.
func reservedMiB(c *types.ContainerDefinition) int64 {
	if c.MemoryReservation != nil {
		return int64(*c.MemoryReservation)
	}
	return int64(value(c.Memory))
}

// hostPort is the port of the machine that a mapping asks for by number; 0
// where Docker chooses one.
func hostPort(mode types.NetworkMode, p types.PortMapping) int {
	if mode == types.NetworkModeHost {
		return int(value(p.ContainerPort))
	}
	return int(value(p.HostPort))
}

func protocol(p types.PortMapping) string {
	if p.Protocol == "" {
		return string(types.TransportProtocolTcp)
	}
	return string(p.Protocol)
}

// Share is a container's part of a shared GPU. percent is 0 where none is
// asked for. shared is false for a container that asks for whole GPUs or none.
func Share(c *types.ContainerDefinition) (memoryMiB int64, percent int32, shared bool) {
	for _, r := range c.ResourceRequirements {
		if mps, ok := r.SharingStrategy.(*types.SharingStrategyMemberNvidiaMps); ok {
			return int64(value(mps.Value.Memory)), value(mps.Value.MaxComputePercent), true
		}
	}
	return 0, 0, false
}

// allGPUs is the value of a requirement for every GPU of the machine.
const allGPUs = "ALL"

// WholeGPUs is how many whole GPUs a container asks for, or all of the machine's.
func WholeGPUs(c *types.ContainerDefinition) (n int, all bool) {
	for _, r := range c.ResourceRequirements {
		if r.Type != types.ResourceTypeGpu || r.Value == nil {
			continue
		}
		if *r.Value == allGPUs {
			return 0, true
		}
		n, err := strconv.Atoi(*r.Value)
		if err != nil {
			return 0, false
		}
		return n, false
	}
	return 0, false
}

// value is what a pointer of the SDK's types holds, or the zero of it.
func value[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}
