package agent

import (
	"fmt"
	"slices"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/config/taskdef"
)

// capacity is what the machine has for tasks, all of it.
type capacity struct {
	cpu       int64 // ECS units
	memoryMiB int64
	gpus      []gpuCapacity // in NVML's order
	ports     []taskdef.Port
}

type gpuCapacity struct {
	uuid           string
	allocatableMiB int64 // total - reserved - the MPS server's reserve
	maxClients     int   // MPS client limit of the driver branch
}

// holding is what one task that has not stopped yet holds.
type holding struct {
	id     string
	demand taskdef.Demand
	gpus   []string
}

// account is one GPU's sum. It is never stored: it is added up anew from the
// tasks, so that it cannot drift from them.
type account struct {
	gpuCapacity
	mode         string // api.ModeIdle, ModeNvidiaMPS, ModeDedicated
	allocatedMiB int64
	clients      int
}

// ledger is the agent's own books (invariants 1 and 2): whoever chose the GPU,
// nothing is started that they cannot bear.
type ledger struct {
	gpus           []account
	freeCPU        int64
	freeMemoryMiB  int64
	ports          map[taskdef.Port]string // taken, by whom
	contradictions []string                // tasks that cannot both be true; never silently ignored
}

// books adds up what the tasks hold.
func books(c capacity, tasks []holding) ledger {
	l := ledger{freeCPU: c.cpu, freeMemoryMiB: c.memoryMiB, ports: map[taskdef.Port]string{}}
	for _, p := range c.ports {
		l.ports[p] = "the machine (reserved)"
	}
	for _, g := range c.gpus {
		l.gpus = append(l.gpus, account{gpuCapacity: g, mode: api.ModeIdle})
	}
	for _, t := range tasks {
		l.add(t)
	}
	return l
}

// add enters a task whether or not it fits: what runs, runs. It notes what
// contradicts the invariants; a GPU that shrank may be over without being one.
func (l *ledger) add(t holding) {
	l.freeCPU -= t.demand.CPU
	l.freeMemoryMiB -= t.demand.MemoryMiB
	for _, p := range t.demand.Ports {
		l.ports[p] = "task " + t.id
	}
	mode := api.ModeDedicated
	if t.demand.GPUMemoryMiB > 0 {
		mode = api.ModeNvidiaMPS
	}
	for _, id := range t.gpus {
		g := l.gpu(id)
		if g == nil {
			l.contradictions = append(l.contradictions, fmt.Sprintf("task %s holds GPU %s, which this machine no longer has", t.id, id))
			continue
		}
		if g.mode != api.ModeIdle && (g.mode != mode || mode == api.ModeDedicated) {
			l.contradictions = append(l.contradictions, fmt.Sprintf("task %s uses GPU %s as %s, another task as %s", t.id, id, mode, g.mode))
		}
		g.mode = mode
		g.clients += max(t.demand.SharedContainers, 1)
		if mode == api.ModeDedicated {
			g.allocatedMiB, g.clients = g.allocatableMiB, 1
		} else {
			g.allocatedMiB += t.demand.GPUMemoryMiB
		}
	}
}

// refuse says why a further task cannot be taken, or "".
func (l *ledger) refuse(t holding) string {
	d := t.demand
	wants := d.WholeGPUs
	switch {
	case d.AllGPUs:
		wants = len(l.gpus)
	case d.GPUMemoryMiB > 0:
		wants = 1
	}
	if len(t.gpus) != wants {
		return fmt.Sprintf("gpus: %d given, the task definition asks for %d", len(t.gpus), wants)
	}
	if d.CPU > l.freeCPU {
		return fmt.Sprintf("cpu: %d units wanted, %d free", d.CPU, l.freeCPU)
	}
	if d.MemoryMiB > l.freeMemoryMiB {
		return fmt.Sprintf("memory: %d MiB wanted, %d MiB free", d.MemoryMiB, l.freeMemoryMiB)
	}
	for _, p := range d.Ports {
		if by := l.ports[p]; by != "" {
			return fmt.Sprintf("hostPort: %d/%s is held by %s", p.Host, p.Protocol, by)
		}
	}
	for i, id := range t.gpus {
		g := l.gpu(id)
		switch {
		case g == nil:
			return fmt.Sprintf("gpus[%d]: %s is not a GPU of this machine", i, id)
		case slices.Index(t.gpus, id) != i:
			return fmt.Sprintf("gpus[%d]: %s is given twice", i, id)
		case d.GPUMemoryMiB == 0 && g.mode != api.ModeIdle:
			return fmt.Sprintf("gpus[%d]: a whole GPU is wanted, %s is in use as %s", i, id, g.mode)
		case d.GPUMemoryMiB > 0 && g.mode == api.ModeDedicated:
			return fmt.Sprintf("gpus[%d]: a share is wanted, %s is %s", i, id, g.mode)
		case d.GPUMemoryMiB > g.allocatableMiB-g.allocatedMiB:
			return fmt.Sprintf("gpus[%d]: %d MiB wanted, %s has %d MiB free of %d", i, d.GPUMemoryMiB, id, g.allocatableMiB-g.allocatedMiB, g.allocatableMiB)
		case d.GPUMemoryMiB > 0 && g.clients+d.SharedContainers > g.maxClients:
			return fmt.Sprintf("gpus[%d]: %d MPS clients wanted, %s has room for %d", i, d.SharedContainers, id, g.maxClients-g.clients)
		}
	}
	return ""
}

func (l *ledger) gpu(id string) *account {
	for i := range l.gpus {
		if l.gpus[i].uuid == id {
			return &l.gpus[i]
		}
	}
	return nil
}
