package fit

import (
	"cmp"
	"slices"
)

// Explanation counts what rules out each machine and GPU of a fleet.
type Explanation struct {
	Machines int        `json:"machines"` // in the fleet
	GPUs     int        `json:"gpus"`     // in the fleet
	RuledOut []RuledOut `json:"ruledOut,omitempty"`

	// What is left when all of RuledOut is taken off: machines that lack nothing
	// themselves, and GPUs that nothing rules out.
	FreeMachines int `json:"freeMachines"`
	FreeGPUs     int `json:"freeGPUs"`
}

// RuledOut is what one reason rules out.
type RuledOut struct {
	Code     Code   `json:"code"`
	Machines int    `json:"machines"` // that lack something themselves
	GPUs     int    `json:"gpus"`     // theirs, and single ones of other machines
	Nearest  Reason `json:"nearest"`  // the one that is the least short of fitting
	Instance string `json:"instance"` // where that is
}

// Explain says why the demand is not placed: the nearest miss first, which is the
// reason that is short of the smallest part of what is wanted. A machine that lacks
// something itself counts once, with all of its GPUs, under the first of its reasons;
// of any other machine each GPU counts under its own. So Machines is FreeMachines and
// the sum over RuledOut, and so is GPUs.
func Explain(candidates []Candidate, d Demand) Explanation {
	var e Explanation
	at := map[Code]int{}
	count := func(c *Candidate, r Reason, machines, gpus int) {
		i, ok := at[r.Code]
		if !ok {
			i = len(e.RuledOut)
			at[r.Code] = i
			e.RuledOut = append(e.RuledOut, RuledOut{Code: r.Code, Nearest: r, Instance: c.ID})
		}
		o := &e.RuledOut[i]
		o.Machines += machines
		o.GPUs += gpus
		if r.distance() < o.Nearest.distance() {
			o.Nearest, o.Instance = r, c.ID
		}
	}
	for i := range candidates {
		c := &candidates[i]
		e.Machines++
		e.GPUs += len(c.Machine.GPUs)
		if c.Barred != nil {
			count(c, *c.Barred, 1, len(c.Machine.GPUs))
			continue
		}
		if lacks := c.Machine.lacks(d); len(lacks) > 0 {
			count(c, lacks[0], 1, len(c.Machine.GPUs))
			continue
		}
		e.FreeMachines++
		e.FreeGPUs += c.Machine.explainGPUs(d, func(r Reason) { count(c, r, 0, 1) })
	}
	slices.SortStableFunc(e.RuledOut, func(a, b RuledOut) int {
		return cmp.Or(cmp.Compare(a.Nearest.distance(), b.Nearest.distance()), cmp.Compare(a.Code, b.Code))
	})
	return e
}

// explainGPUs gives the reason of each GPU that does not take the demand, and returns
// how many do. A task without GPU is ruled out by no GPU.
func (m Machine) explainGPUs(d Demand, why func(Reason)) (free int) {
	want := m.wholes(d)
	for i := range m.GPUs {
		g := &m.GPUs[i]
		r, ok := Reason{}, true
		switch {
		case d.GPUMemoryMiB > 0:
			r, ok = g.takesShare(d)
		case d.gpu():
			r, ok = g.takesWhole(want)
		}
		if ok {
			free++
		} else {
			why(r)
		}
	}
	if d.gpu() && d.GPUMemoryMiB == 0 && free < want {
		// Idle ones, and not enough of them.
		for range free {
			why(Reason{Code: TooFewGPUs, Want: int64(want), Have: int64(free)})
		}
		return 0
	}
	return free
}
