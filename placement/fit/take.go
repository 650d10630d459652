package fit

import (
	"maps"
	"slices"
)

// Take is the machine with a task placed on it, on the GPUs that Place gave. The
// machine itself stays as it is.
func (m Machine) Take(d Demand, gpus []string) Machine {
	m.Ports = maps.Clone(m.Ports)
	m.GPUs = slices.Clone(m.GPUs)
	m.Hold(d, gpus)
	return m
}

// Hold takes what a task holds on those GPUs off the machine. A demand for no GPU that
// has some all the same holds them whole.
func (m *Machine) Hold(d Demand, gpus []string) {
	m.CPU -= d.CPU
	m.MemoryMiB -= d.MemoryMiB
	if m.Ports == nil && len(d.Ports) > 0 {
		m.Ports = map[Port]bool{}
	}
	for _, p := range d.Ports {
		m.Ports[p] = true
	}
	for i := range m.GPUs {
		if slices.Contains(gpus, m.GPUs[i].ID) {
			m.GPUs[i].take(d)
		}
	}
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
