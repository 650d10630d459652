package fleet

import (
	"fmt"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/placement/fit"
)

// candidates are the machines as fit takes them, kept from one task to the next.
type candidates struct {
	list  []fit.Candidate
	index map[*machine]int
	stale map[*machine]bool
}

func (c *candidates) touch(m *machine) {
	if c.stale != nil {
		c.stale[m] = true
	}
}

// Candidates are all machines as fit takes them, by ID. The slice is the fleet's own:
// read it only, and before the next change.
func (f *Fleet) Candidates() []fit.Candidate {
	order := f.ordered()
	c := &f.candidates
	if c.list == nil {
		c.list = make([]fit.Candidate, len(order))
		c.index, c.stale = make(map[*machine]int, len(order)), make(map[*machine]bool, len(order))
		for i, m := range order {
			c.index[m], c.stale[m] = i, true
		}
	}
	for m := range c.stale {
		if i, ok := c.index[m]; ok {
			c.list[i] = fit.Candidate{ID: m.record.ID, Machine: *f.room(m), Barred: m.barred()}
		}
	}
	clear(c.stale)
	return c.list
}

// Placement is one decision: where a task goes, and what it was decided from.
type Placement struct {
	Task     *Task       `json:"task"` // as it was put
	Demand   fit.Demand  `json:"demand"`
	Machine  fit.Machine `json:"machine"` // the chosen one, before: fit.Place gives Task.GPUs
	Instance string      `json:"instance"`
}

// PlacePending places every pending task that fits somewhere, oldest first. One that
// does not fit holds up none behind it.
func (f *Fleet) PlacePending(now time.Time) []Placement {
	var out []Placement
	// Placing takes room and gives none, so what did not fit once does not fit later.
	full, demands := map[string]bool{}, map[string]bool{}
	for _, t := range f.Pending() {
		if full[t.Definition] {
			continue
		}
		if len(demands) > 0 && demands[f.demandKey(t)] {
			full[t.Definition] = true // another definition, of the same amounts
			continue
		}
		p, ok := f.place(t, now)
		if !ok {
			full[t.Definition], demands[f.demandKey(t)] = true, true
			continue
		}
		out = append(out, p)
	}
	return out
}

// demandKey is the same for two tasks that need the same.
func (f *Fleet) demandKey(t *Task) string {
	d, known := f.Demand(t.Definition)
	return fmt.Sprintf("%+v %t", d, known)
}

func (f *Fleet) place(t *Task, now time.Time) (Placement, bool) {
	d, ok := f.Demand(t.Definition)
	if !ok {
		return Placement{}, false
	}
	instance, gpus, ok := fit.Choose(f.Candidates(), d)
	if !ok {
		return Placement{}, false
	}
	placed := *t
	placed.Instance, placed.GPUs, placed.Generation, placed.PlacedAt = instance, gpus, f.NextGeneration(), now
	before := f.Machine(instance)
	f.PutTask(&placed)
	return Placement{Task: &placed, Demand: d, Machine: before, Instance: instance}, true
}

// Explain says what rules out each machine and GPU for a task, wherever it is now.
func (f *Fleet) Explain(t *Task) (fit.Explanation, bool) {
	d, ok := f.Demand(t.Definition)
	return fit.Explain(f.Candidates(), d), ok
}

// Counts are how many tasks of a service there are that have not STOPPED.
type Counts struct {
	Running, Pending, Stopping int
}

// Count counts the tasks of a service. One that is being stopped counts as Stopping alone.
func (f *Fleet) Count(service string) Counts {
	var c Counts
	for _, t := range f.ofService[service] {
		switch {
		case t.LastStatus == api.StatusStopped:
		case t.Desired == api.StatusStopped:
			c.Stopping++
		case t.LastStatus == api.StatusRunning:
			c.Running++
		default:
			c.Pending++
		}
	}
	return c
}
