// Package fit decides which GPUs of a machine take a task, and says why the
// others do not.
//
// It is pure: a machine and a demand in, GPUs or reasons out. The caller owns
// the machine's numbers; nothing here is kept between calls.
package fit

import "sort"

// Mode is how a GPU is used, in the words of ECS's GpuDevice.sharingMode.
type Mode string

// The modes of a GPU. It is never in two of them at once.
const (
	Idle      Mode = "IDLE"
	MPS       Mode = "NVIDIA_MPS"
	Dedicated Mode = "DEDICATED"
)

// GPU is one device as placement sees it.
type GPU struct {
	ID           string
	Index        int // NVML's, for people
	Mode         Mode
	TotalMiB     int64  // allocatable
	AllocatedMiB int64  // sum of the caps on it
	Clients      int    // capped containers on it
	MaxClients   int    // of the driver branch: 48, or 60 from R590
	Closed       string // why nothing may start here now; "" when open
	NoSharing    string // why MPS cannot run here; whole-GPU tasks still can
}

// Port is one host port.
type Port struct {
	Number   int
	Protocol string // tcp or udp
}

// Machine is what one machine has left.
type Machine struct {
	GPUs      []GPU
	CPU       int64         // free ECS CPU units (1024 are one vCPU)
	MemoryMiB int64         // free host memory
	Ports     map[Port]bool // taken
}

// Demand is what one task asks for. A task shares one GPU, or has whole ones,
// or has none: GPUMemoryMiB and WholeGPUs are never both set.
type Demand struct {
	CPU          int64
	MemoryMiB    int64
	Ports        []Port
	GPUMemoryMiB int64 // sum of its containers' caps on one shared GPU
	Clients      int   // capped containers
	WholeGPUs    int
	AllGPUs      bool // every GPU of the machine, all idle
}

// Place returns the GPUs for the demand (none for a task without one), or the
// reasons why the machine cannot take it now: those of the machine itself
// first, then one for each GPU in the machine's order.
//
// A shared GPU is chosen by best fit of memory: the one that is left with the
// least, among equals one that is shared already, then the lowest index. Whole
// GPUs are the smallest idle ones.
func Place(m Machine, d Demand) ([]string, []Reason) {
	reasons := m.lacks(d)
	switch {
	case d.GPUMemoryMiB > 0:
		gpu, why := m.share(d)
		if gpu != "" && len(reasons) == 0 {
			return []string{gpu}, nil
		}
		if gpu == "" {
			reasons = append(reasons, why...)
		}
	case d.WholeGPUs > 0 || d.AllGPUs:
		gpus, why := m.whole(d)
		if gpus != nil && len(reasons) == 0 {
			return gpus, nil
		}
		if gpus == nil {
			reasons = append(reasons, why...)
		}
	}
	return nil, reasons
}

func (m Machine) lacks(d Demand) []Reason {
	var out []Reason
	if d.CPU > m.CPU {
		out = append(out, Reason{Code: CPU, Want: d.CPU, Have: m.CPU})
	}
	if d.MemoryMiB > m.MemoryMiB {
		out = append(out, Reason{Code: Memory, Want: d.MemoryMiB, Have: m.MemoryMiB})
	}
	for _, p := range d.Ports {
		if m.Ports[p] {
			out = append(out, Reason{Code: PortTaken, Port: p})
		}
	}
	if (d.GPUMemoryMiB > 0 || d.WholeGPUs > 0 || d.AllGPUs) && len(m.GPUs) == 0 {
		out = append(out, Reason{Code: NoGPU})
	}
	return out
}

func (m Machine) share(d Demand) (string, []Reason) {
	var best *GPU
	var why []Reason
	for i := range m.GPUs {
		g := &m.GPUs[i]
		if r, ok := g.takesShare(d); !ok {
			why = append(why, r)
			continue
		}
		if best == nil || g.before(best) {
			best = g
		}
	}
	if best == nil {
		return "", why
	}
	return best.ID, nil
}

// before orders GPUs that both fit: less memory left first.
func (g *GPU) before(o *GPU) bool {
	if g.free() != o.free() {
		return g.free() < o.free()
	}
	if (g.Mode == MPS) != (o.Mode == MPS) {
		return g.Mode == MPS
	}
	return g.Index < o.Index
}

func (g *GPU) free() int64 { return g.TotalMiB - g.AllocatedMiB }

func (g *GPU) takesShare(d Demand) (Reason, bool) {
	r := Reason{GPU: g.ID, Index: g.Index, Want: d.GPUMemoryMiB, Have: g.free()}
	switch {
	case g.NoSharing != "":
		r.Code, r.Detail = NoSharing, g.NoSharing
	case g.Mode == Dedicated:
		r.Code = InDedicatedUse
	case d.GPUMemoryMiB > g.TotalMiB:
		r.Code, r.Have = LargerThanGPU, g.TotalMiB
	case d.GPUMemoryMiB > g.free():
		r.Code = GPUMemory
	case g.Clients+d.Clients > g.MaxClients:
		r.Code, r.Want, r.Have = ClientLimit, int64(d.Clients), int64(g.MaxClients-g.Clients)
	case g.Closed != "":
		r.Code, r.Detail = Closed, g.Closed
	default:
		return Reason{}, true
	}
	return r, false
}

func (m Machine) whole(d Demand) ([]string, []Reason) {
	want := d.WholeGPUs
	if d.AllGPUs {
		want = len(m.GPUs)
	}
	var free []*GPU
	var why []Reason
	for i := range m.GPUs {
		g := &m.GPUs[i]
		r := Reason{GPU: g.ID, Index: g.Index, Want: int64(want)}
		switch {
		case g.Mode == MPS:
			r.Code, r.Have = InSharedUse, int64(g.Clients)
		case g.Mode == Dedicated:
			r.Code = InDedicatedUse
		case g.Closed != "":
			r.Code, r.Detail = Closed, g.Closed
		default:
			free = append(free, g)
			continue
		}
		why = append(why, r)
	}
	if len(free) < want || want == 0 {
		return nil, append([]Reason{{Code: TooFewGPUs, Want: int64(want), Have: int64(len(free))}}, why...)
	}
	sort.SliceStable(free, func(i, j int) bool {
		if free[i].TotalMiB != free[j].TotalMiB {
			return free[i].TotalMiB < free[j].TotalMiB
		}
		return free[i].Index < free[j].Index
	})
	ids := make([]string, want)
	for i := range ids {
		ids[i] = free[i].ID
	}
	return ids, nil
}
