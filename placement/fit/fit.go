// Package fit decides which GPUs of a machine take a task, and says why the
// others do not.
//
// It is pure: a machine and a demand in, GPUs or reasons out. The caller owns
// the machine's numbers; nothing here is kept between calls.
package fit

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

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
	ID           string `json:"id"`
	Index        int    `json:"index"` // NVML's, for people
	Mode         Mode   `json:"mode"`
	TotalMiB     int64  `json:"totalMiB"`            // allocatable
	AllocatedMiB int64  `json:"allocatedMiB"`        // sum of the caps on it
	Clients      int    `json:"clients"`             // capped containers on it
	MaxClients   int    `json:"maxClients"`          // of the driver branch: 48, or 60 from R590
	Closed       string `json:"closed,omitempty"`    // why nothing may start here now; "" when open
	NoSharing    string `json:"noSharing,omitempty"` // why MPS cannot run here; whole-GPU tasks still can
	Trust        string `json:"trust,omitempty"`     // domain of the tasks that share it, while any do
}

// Port is one host port. Its text is 80/tcp.
type Port struct {
	Number   int
	Protocol string // tcp or udp
}

// MarshalText implements encoding.TextMarshaler.
func (p Port) MarshalText() ([]byte, error) {
	return fmt.Appendf(nil, "%d/%s", p.Number, p.Protocol), nil
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *Port) UnmarshalText(text []byte) error {
	number, protocol, ok := strings.Cut(string(text), "/")
	n, err := strconv.Atoi(number)
	if !ok || err != nil {
		return fmt.Errorf("port %q: want number/protocol, such as 80/tcp", text)
	}
	*p = Port{Number: n, Protocol: protocol}
	return nil
}

// Machine is what one machine has left.
type Machine struct {
	GPUs      []GPU         `json:"gpus,omitempty"`
	CPU       int64         `json:"cpu"`             // free ECS CPU units (1024 are one vCPU)
	MemoryMiB int64         `json:"memoryMiB"`       // free host memory
	Ports     map[Port]bool `json:"ports,omitempty"` // taken
}

// Demand is what one task asks for. A task shares one GPU, or has whole ones,
// or has none: GPUMemoryMiB and WholeGPUs are never both set.
type Demand struct {
	CPU          int64  `json:"cpu"`
	MemoryMiB    int64  `json:"memoryMiB"`
	Ports        []Port `json:"ports,omitempty"`
	GPUMemoryMiB int64  `json:"gpuMemoryMiB,omitempty"` // sum of its containers' caps on one shared GPU
	Clients      int    `json:"clients,omitempty"`      // capped containers
	WholeGPUs    int    `json:"wholeGPUs,omitempty"`
	AllGPUs      bool   `json:"allGPUs,omitempty"` // every GPU of the machine, all idle
	Trust        string `json:"trust,omitempty"`   // its trust domain: it shares a GPU only with tasks of the same one
}

func (d Demand) gpu() bool { return d.GPUMemoryMiB > 0 || d.WholeGPUs > 0 || d.AllGPUs }

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

// lacks is what the machine itself has too little of, in the order of the codes.
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
	if d.gpu() && len(m.GPUs) == 0 {
		out = append(out, Reason{Code: NoGPU})
	}
	return out
}

func (m Machine) share(d Demand) (string, []Reason) {
	if best := m.bestShare(d); best != nil {
		return best.ID, nil
	}
	var why []Reason
	for i := range m.GPUs {
		r, _ := m.GPUs[i].takesShare(d)
		why = append(why, r)
	}
	return "", why
}

// bestShare is the GPU that a shared demand goes to, or nil.
func (m Machine) bestShare(d Demand) *GPU {
	var best *GPU
	for i := range m.GPUs {
		g := &m.GPUs[i]
		if _, ok := g.takesShare(d); ok && (best == nil || g.compare(best) < 0) {
			best = g
		}
	}
	return best
}

// compare orders GPUs that both fit: less memory left first, then one that is
// shared already, then the lower index.
func (g *GPU) compare(o *GPU) int {
	if c := g.compareShare(o); c != 0 {
		return c
	}
	return cmp.Compare(g.Index, o.Index)
}

func (g *GPU) compareShare(o *GPU) int {
	if c := cmp.Compare(g.free(), o.free()); c != 0 || (g.Mode == MPS) == (o.Mode == MPS) {
		return c
	}
	if g.Mode == MPS {
		return -1
	}
	return 1
}

func (g *GPU) free() int64 { return g.TotalMiB - g.AllocatedMiB }

// takesShare asks for being open last: a GPU that is said to be closed would take
// the task if it were open.
func (g *GPU) takesShare(d Demand) (Reason, bool) {
	switch {
	case g.NoSharing != "":
		return g.why(NoSharing, g.NoSharing, 0, 0), false
	case g.Mode == Dedicated:
		return g.why(InDedicatedUse, "", d.GPUMemoryMiB, 0), false
	case d.GPUMemoryMiB > g.TotalMiB:
		return g.why(LargerThanGPU, "", d.GPUMemoryMiB, g.TotalMiB), false
	case g.Mode == MPS && g.Trust != d.Trust:
		return g.why(TrustDomain, g.Trust, 0, 0), false
	case d.GPUMemoryMiB > g.free():
		return g.why(GPUMemory, "", d.GPUMemoryMiB, g.free()), false
	case g.Clients+d.Clients > g.MaxClients:
		return g.why(ClientLimit, "", int64(d.Clients), int64(g.MaxClients-g.Clients)), false
	case g.Closed != "":
		return g.why(Closed, g.Closed, 0, 0), false
	}
	return Reason{}, true
}

func (g *GPU) why(code Code, detail string, want, have int64) Reason {
	return Reason{Code: code, GPU: g.ID, Index: g.Index, Want: want, Have: have, Detail: detail}
}

// takesWhole says whether the GPU is idle and open.
func (g *GPU) takesWhole(want int) (Reason, bool) {
	switch {
	case g.Mode == MPS:
		return g.why(InSharedUse, "", int64(want), int64(g.Clients)), false
	case g.Mode == Dedicated:
		return g.why(InDedicatedUse, "", int64(want), 0), false
	case g.Closed != "":
		return g.why(Closed, g.Closed, 0, 0), false
	}
	return Reason{}, true
}

// wholes is how many GPUs are wanted here.
func (m Machine) wholes(d Demand) int {
	if d.AllGPUs {
		return len(m.GPUs)
	}
	return d.WholeGPUs
}

func (m Machine) whole(d Demand) ([]string, []Reason) {
	want := m.wholes(d)
	var free []*GPU
	var why []Reason
	for i := range m.GPUs {
		g := &m.GPUs[i]
		if r, ok := g.takesWhole(want); !ok {
			why = append(why, r)
			continue
		}
		free = append(free, g)
	}
	if len(free) < want || want == 0 {
		return nil, append([]Reason{{Code: TooFewGPUs, Want: int64(want), Have: int64(len(free))}}, why...)
	}
	slices.SortFunc(free, func(a, b *GPU) int {
		return cmp.Or(cmp.Compare(a.TotalMiB, b.TotalMiB), cmp.Compare(a.Index, b.Index))
	})
	ids := make([]string, want)
	for i := range ids {
		ids[i] = free[i].ID
	}
	return ids, nil
}
