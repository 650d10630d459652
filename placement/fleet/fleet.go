package fleet

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
)

// Fleet is everything the server knows. The zero value is not usable; see New.
type Fleet struct {
	definitions map[string]*definition
	newest      map[string]int // family -> its newest revision
	services    map[string]*Service
	instances   map[string]*machine
	tasks       map[string]*Task
	counters    map[string]uint64

	pending    map[string]*Task            // by ID
	successors map[string]map[string]*Task // task -> those with Replaces = it
	ofService  map[string]map[string]*Task
	onInstance map[string]map[string]*Task // placed there and not STOPPED
	ofToken    map[string]map[string]*Task // by client token

	trust      string     // whose tasks may share a GPU: config.Server.TrustDomain
	order      []*machine // by ID; nil: to be made again
	candidates candidates

	changes []Change
	changed map[recordKey]int // index in changes
}

// New is an empty fleet. Trust says whose tasks may share a GPU, in the words of
// config.Server.TrustDomain; "" is cluster.
func New(trust string) *Fleet {
	return &Fleet{trust: trust,
		definitions: map[string]*definition{}, newest: map[string]int{},
		services: map[string]*Service{}, instances: map[string]*machine{}, tasks: map[string]*Task{}, counters: map[string]uint64{},
		pending: map[string]*Task{}, successors: map[string]map[string]*Task{},
		ofService: map[string]map[string]*Task{}, onInstance: map[string]map[string]*Task{}, ofToken: map[string]map[string]*Task{},
		changed: map[recordKey]int{},
	}
}

type recordKey struct{ kind, key string }

// Change is one record that the store has to be told of.
type Change struct {
	Kind, Key string
	Value     any // *Definition, *Service, *Instance, *Task or *Counter; nil: deleted
}

// Changes returns what was put and deleted since it was last asked, in the order of
// each record's first change, each record once, with its newest value.
func (f *Fleet) Changes() []Change {
	out := f.changes
	f.changes = nil
	clear(f.changed)
	return out
}

func (f *Fleet) change(kind, key string, value any) {
	k := recordKey{kind, key}
	if i, ok := f.changed[k]; ok {
		f.changes[i].Value = value
		return
	}
	f.changed[k] = len(f.changes)
	f.changes = append(f.changes, Change{kind, key, value})
}

// Load takes one stored record, at the start; it is no change. Records may come in any
// order. An error leaves the fleet without that record.
func (f *Fleet) Load(kind, key string, data json.RawMessage) error {
	var err error
	switch kind {
	case KindDefinition:
		err = load(data, key, (*Definition).Key, f.loadDefinition)
	case KindService:
		err = load(data, key, func(s *Service) string { return s.Name }, func(s *Service) error { f.services[key] = s; f.taken(s.Definition); return nil })
	case KindInstance:
		err = load(data, key, func(i *Instance) string { return i.ID }, f.loadInstance)
	case KindTask:
		err = load(data, key, func(t *Task) string { return t.ID }, f.loadTask)
	case KindCounter:
		err = load(data, key, func(*Counter) string { return key }, func(c *Counter) error { f.counters[key] = max(f.counters[key], c.Value); return nil })
	default:
		return fmt.Errorf("record %s/%s: the fleet holds no records of kind %q", kind, key, kind)
	}
	if err != nil {
		return fmt.Errorf("record %s/%s: %w", kind, key, err)
	}
	return nil
}

func (f *Fleet) loadDefinition(d *Definition) error {
	if err := f.setDefinition(d); err != nil {
		return err
	}
	for id := range f.instances { // which may have tasks of it already
		f.stale(id)
	}
	return nil
}

func (f *Fleet) loadInstance(i *Instance) error {
	f.setInstance(i)
	f.instances[i.ID].unseen = true
	return nil
}

func (f *Fleet) loadTask(t *Task) error {
	f.setTask(t)
	f.taken(t.Definition)
	if m := f.instances[t.Instance]; m != nil {
		m.unseen = true
	}
	// The counter may have missed the last write before a crash.
	f.counters[Generation] = max(f.counters[Generation], t.Generation)
	return nil
}

func load[R any](data []byte, key string, name func(*R) string, put func(*R) error) error {
	r := new(R)
	if err := json.Unmarshal(data, r); err != nil {
		return err
	}
	if own := name(r); own != key {
		return fmt.Errorf("it names itself %q, want the key it is stored under", own)
	}
	return put(r)
}

// NextGeneration numbers a start: higher than any before, also after a restart, once
// the changes are stored.
func (f *Fleet) NextGeneration() uint64 {
	f.counters[Generation]++
	n := f.counters[Generation]
	f.change(KindCounter, Generation, &Counter{n})
	return n
}

// Service returns one service, or nil.
func (f *Fleet) Service(name string) *Service { return f.services[name] }

// Services returns all, by name.
func (f *Fleet) Services() []*Service { return sorted(f.services) }

// PutService adds or replaces a service.
func (f *Fleet) PutService(s *Service) {
	if same(f.services[s.Name], s) {
		return
	}
	f.services[s.Name] = s
	f.change(KindService, s.Name, s)
}

// DeleteService forgets a service. Its tasks stay.
func (f *Fleet) DeleteService(name string) {
	if f.services[name] != nil {
		delete(f.services, name)
		f.change(KindService, name, nil)
	}
}

func same[R any](was, is *R) bool {
	return was != nil && (was == is || reflect.DeepEqual(was, is))
}

func sorted[V any](m map[string]V) []V {
	out := make([]V, 0, len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, m[k])
	}
	return out
}

// byAge is the order of tasks: oldest first.
func byAge(a, b *Task) int {
	return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
}

func aged(m map[string]*Task) []*Task {
	out := make([]*Task, 0, len(m))
	for _, t := range m {
		out = append(out, t)
	}
	slices.SortFunc(out, byAge)
	return out
}
