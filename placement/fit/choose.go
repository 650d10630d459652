package fit

import "cmp"

// Candidate is one machine of the fleet.
type Candidate struct {
	ID      string  `json:"id"`
	Machine Machine `json:"machine"`
	Barred  *Reason `json:"barred,omitempty"` // why nothing at all is placed there now
}

// Choose picks a machine and its GPUs for the demand. Best fit, so that what is large
// stays whole: a shared task goes to the GPU that is left with the least memory, among
// equals to one that is shared already; whole GPUs come from the machine that is left
// with the fewest idle ones; a task without GPU goes to the machine with the fewest
// GPUs, among equals to the one with the least memory left. Last, the lowest id. Inside
// a machine it chooses as Place does.
func Choose(candidates []Candidate, d Demand) (id string, gpus []string, ok bool) {
	var best *Candidate
	var bestRank rank
	for i := range candidates {
		c := &candidates[i]
		r, fits := c.rank(d)
		if !fits {
			continue
		}
		if best == nil || cmp.Or(r.compare(bestRank), cmp.Compare(c.ID, best.ID)) < 0 {
			best, bestRank = c, r
		}
	}
	if best == nil {
		return "", nil, false
	}
	gpus, _ = Place(best.Machine, d)
	return best.ID, gpus, true
}

// rank orders machines that fit; the lower one is chosen.
type rank struct {
	gpu           *GPU // of a shared demand
	first, second int64
}

func (r rank) compare(o rank) int {
	if r.gpu != nil && o.gpu != nil {
		return r.gpu.compareShare(o.gpu)
	}
	return cmp.Or(cmp.Compare(r.first, o.first), cmp.Compare(r.second, o.second))
}

// rank makes no reasons: it is asked of every machine for every task that is placed.
func (c *Candidate) rank(d Demand) (rank, bool) {
	m := &c.Machine
	if c.Barred != nil || d.CPU > m.CPU || d.MemoryMiB > m.MemoryMiB {
		return rank{}, false
	}
	for _, p := range d.Ports {
		if m.Ports[p] {
			return rank{}, false
		}
	}
	switch {
	case d.GPUMemoryMiB > 0:
		g := m.bestShare(d)
		return rank{gpu: g}, g != nil
	case d.WholeGPUs > 0 || d.AllGPUs:
		want := m.wholes(d)
		idle := 0
		for i := range m.GPUs {
			if _, ok := m.GPUs[i].takesWhole(want); ok {
				idle++
			}
		}
		return rank{first: int64(idle - want), second: int64(len(m.GPUs))}, want > 0 && idle >= want
	}
	return rank{first: int64(len(m.GPUs)), second: m.MemoryMiB - d.MemoryMiB}, true
}
