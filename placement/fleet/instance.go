package fleet

import (
	"cmp"
	"fmt"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/placement/fit"
)

// machine is an instance with what is known of it besides its record.
type machine struct {
	record    *Instance
	connected bool
	room      fit.Machine
	fresh     bool            // room is right
	shrunk    map[string]bool // GPUs that have become too small for what is on them
	unseen    bool            // loaded, and shrunk is not right yet
}

// Instance returns one instance, or nil.
func (f *Fleet) Instance(id string) *Instance {
	if m := f.instances[id]; m != nil {
		return m.record
	}
	return nil
}

// Instances returns all, by ID.
func (f *Fleet) Instances() []*Instance {
	out := make([]*Instance, 0, len(f.instances))
	for _, m := range f.ordered() {
		out = append(out, m.record)
	}
	return out
}

// PutInstance adds or replaces an instance.
func (f *Fleet) PutInstance(i *Instance) {
	if m := f.instances[i.ID]; m != nil && same(m.record, i) {
		return
	}
	f.setInstance(i)
	f.mayBeOver(f.instances[i.ID])
	f.change(KindInstance, i.ID, i)
}

// DeleteInstance forgets an instance. Its tasks stay.
func (f *Fleet) DeleteInstance(id string) {
	if f.instances[id] != nil {
		delete(f.instances, id)
		f.order = nil
		f.change(KindInstance, id, nil)
	}
}

func (f *Fleet) setInstance(i *Instance) {
	m := f.instances[i.ID]
	if m == nil {
		m = &machine{shrunk: map[string]bool{}}
		f.instances[i.ID] = m
		f.order = nil
	}
	m.record = i
	f.stale(i.ID)
}

// SetPresence says whether the instance's agent has an open stream. It is known to this
// process alone and never stored.
func (f *Fleet) SetPresence(instance string, connected bool) {
	if m := f.instances[instance]; m != nil && m.connected != connected {
		m.connected = connected
		f.candidates.touch(m)
	}
}

// Connected says whether the instance's agent has an open stream.
func (f *Fleet) Connected(instance string) bool {
	m := f.instances[instance]
	return m != nil && m.connected
}

// Unschedulable says why nothing is placed on the instance now, or nil.
func (f *Fleet) Unschedulable(instance string) *fit.Reason {
	m := f.instances[instance]
	if m == nil {
		return &fit.Reason{Code: fit.Disconnected}
	}
	return m.barred()
}

func (m *machine) barred() *fit.Reason {
	switch {
	case m.record.Lost:
		return &fit.Reason{Code: fit.Lost}
	case !m.connected || !m.record.Cutoff.IsZero():
		return &fit.Reason{Code: fit.Disconnected}
	case m.record.Status == api.InstanceDraining:
		return &fit.Reason{Code: fit.Draining, Detail: m.record.DrainReason}
	}
	return nil
}

// Machine is what the instance has left: what it registered, less what the tasks hold
// that are placed on it and not STOPPED, also those that are being stopped and those
// that are gone. An amount that shrank under its tasks is negative. The value is shared:
// read it only.
func (f *Fleet) Machine(instance string) fit.Machine {
	m := f.instances[instance]
	if m == nil {
		return fit.Machine{}
	}
	return *f.room(m)
}

func (f *Fleet) room(m *machine) *fit.Machine {
	if m.fresh {
		return &m.room
	}
	i := m.record
	r := fit.Machine{CPU: i.CPU, MemoryMiB: i.MemoryMiB, Ports: map[fit.Port]bool{}, GPUs: make([]fit.GPU, len(i.GPUs))}
	for _, p := range i.Ports {
		r.Ports[fit.Port{Number: p.Number, Protocol: p.Protocol}] = true
	}
	for n, g := range i.GPUs {
		r.GPUs[n] = fit.GPU{ID: g.ID, Index: g.Index, Mode: fit.Idle, TotalMiB: g.TotalMiB, MaxClients: g.MaxClients, NoSharing: g.NoSharing}
		if g.Standing != api.GPUOpen {
			r.GPUs[n].Closed = cmp.Or(g.Standing, "UNKNOWN")
			if g.StandingReason != "" {
				r.GPUs[n].Closed += ": " + g.StandingReason
			}
		}
	}
	for _, t := range f.onInstance[i.ID] {
		// Of a task whose definition is not known each of its GPUs is taken whole.
		d, _ := f.Demand(t.Definition)
		r.Hold(d, t.GPUs)
	}
	m.room, m.fresh = r, true
	return &m.room
}

// stale says that an instance's room has to be counted again.
func (f *Fleet) stale(instance string) {
	if m := f.instances[instance]; m != nil {
		m.fresh = false
		f.candidates.touch(m)
	}
}

func (f *Fleet) ordered() []*machine {
	if f.order == nil {
		f.order = sorted(f.instances)
		f.candidates = candidates{}
	}
	return f.order
}

// Contradictions says where the placements break what has to hold always: the caps on a
// GPU exceed what it gives, or it is shared and used whole at once. A GPU that became
// smaller under its tasks is none. It is always empty.
func (f *Fleet) Contradictions() []string {
	var out []string
	for _, m := range f.ordered() {
		if m.unseen {
			f.mayBeOver(m)
		}
		r := f.room(m)
		shared, whole := map[string]int{}, map[string]int{}
		for _, t := range f.TasksOn(m.record.ID) {
			d, known := f.Demand(t.Definition)
			if !known {
				out = append(out, fmt.Sprintf("task %s on %s: its definition %s is not known", t.ID, m.record.ID, t.Definition))
			}
			for _, g := range t.GPUs {
				if d.GPUMemoryMiB > 0 {
					shared[g]++
				} else {
					whole[g]++
				}
			}
		}
		for _, g := range r.GPUs {
			at := fmt.Sprintf("GPU %d (%s) of %s", g.Index, g.ID, m.record.ID)
			if shared[g.ID] > 0 && whole[g.ID] > 0 {
				out = append(out, fmt.Sprintf("%s: shared by %d tasks and used whole by %d", at, shared[g.ID], whole[g.ID]))
			}
			if whole[g.ID] > 1 {
				out = append(out, fmt.Sprintf("%s: used whole by %d tasks", at, whole[g.ID]))
			}
			if over(g) && !m.shrunk[g.ID] {
				out = append(out, fmt.Sprintf("%s: %d MiB in caps and %d clients on it, it gives %d MiB and %d clients", at, g.AllocatedMiB, g.Clients, g.TotalMiB, g.MaxClients))
			}
		}
	}
	return out
}

func over(g fit.GPU) bool {
	return g.Mode == fit.MPS && (g.AllocatedMiB > g.TotalMiB || g.Clients > g.MaxClients)
}

// mayBeOver is called where a machine was loaded or has changed, and no task was placed:
// what is over now has shrunk.
func (f *Fleet) mayBeOver(m *machine) {
	m.unseen = false
	for _, g := range f.room(m).GPUs {
		if over(g) {
			m.shrunk[g.ID] = true
		} else {
			delete(m.shrunk, g.ID)
		}
	}
}

// mustFit is called before a task is placed: nothing that it is placed on may be over
// after.
func (f *Fleet) mustFit(instance string, gpus []string) {
	m := f.instances[instance]
	if m == nil {
		return
	}
	if m.unseen {
		f.mayBeOver(m)
	}
	for _, g := range gpus {
		delete(m.shrunk, g)
	}
}
