package fit

import (
	"maps"
	"slices"
)

// Take is the machine with a task placed on it, on the GPUs that Place gave. The
// machine itself stays as it is.
func (m Machine) Take(d Demand, gpus []string) Machine {
	m.CPU -= d.CPU
	m.MemoryMiB -= d.MemoryMiB
	m.Ports = maps.Clone(m.Ports)
	if m.Ports == nil {
		m.Ports = map[Port]bool{}
	}
	for _, p := range d.Ports {
		m.Ports[p] = true
	}
	m.GPUs = slices.Clone(m.GPUs)
	for i := range m.GPUs {
		if slices.Contains(gpus, m.GPUs[i].ID) {
			m.GPUs[i].take(d)
		}
	}
	return m
}

func (g *GPU) take(d Demand) {
	if d.GPUMemoryMiB == 0 {
		g.Mode, g.AllocatedMiB, g.Clients = Dedicated, g.TotalMiB, 1
		return
	}
	if g.Mode == Idle {
		g.Mode, g.Trust = MPS, d.Trust
	}
	g.AllocatedMiB += d.GPUMemoryMiB
	g.Clients += d.Clients
}
