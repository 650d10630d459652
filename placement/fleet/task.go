package fleet

import (
	"slices"

	"github.com/berth-gpu/berth/api"
)

// Task returns one task, or nil.
func (f *Fleet) Task(id string) *Task { return f.tasks[id] }

// Tasks returns all, oldest first.
func (f *Fleet) Tasks() []*Task { return aged(f.tasks) }

// TasksOf returns a service's tasks, oldest first, with those that have stopped and
// are not forgotten. The tasks of service "" are those that stand alone.
func (f *Fleet) TasksOf(service string) []*Task { return aged(f.ofService[service]) }

// TasksOn returns the tasks that hold something of an instance, oldest first: placed
// there and not STOPPED.
func (f *Fleet) TasksOn(instance string) []*Task { return aged(f.onInstance[instance]) }

// Absent are the instances that are not here and hold tasks all the same, by ID: their
// records could not be loaded.
func (f *Fleet) Absent() []string {
	var out []string
	for id := range f.onInstance {
		if f.instances[id] == nil {
			out = append(out, id)
		}
	}
	slices.Sort(out)
	return out
}

// Pending returns the tasks that wait to be placed, oldest first.
func (f *Fleet) Pending() []*Task { return aged(f.pending) }

// Successors returns the tasks that were started in a task's place, oldest first.
func (f *Fleet) Successors(task string) []*Task { return aged(f.successors[task]) }

// OfToken returns the tasks that were started with a client token, oldest first.
func (f *Fleet) OfToken(token string) []*Task { return aged(f.ofToken[token]) }

// PutTask adds or replaces a task.
func (f *Fleet) PutTask(t *Task) {
	was := f.tasks[t.ID]
	if same(was, t) {
		return
	}
	if t.Instance != "" && (was == nil || was.Instance != t.Instance || !slices.Equal(was.GPUs, t.GPUs)) {
		f.mustFit(t.Instance, t.GPUs)
	}
	f.setTask(t)
	f.change(KindTask, t.ID, t)
}

// DeleteTask forgets a task, and what it held with it.
func (f *Fleet) DeleteTask(id string) {
	if t := f.tasks[id]; t != nil {
		f.unindex(t)
		delete(f.tasks, id)
		f.change(KindTask, id, nil)
	}
}

func (f *Fleet) setTask(t *Task) {
	if was := f.tasks[t.ID]; was != nil {
		f.unindex(was)
	}
	f.tasks[t.ID] = t
	into(f.ofService, t.Service, t)
	if t.Replaces != "" {
		into(f.successors, t.Replaces, t)
	}
	if t.ClientToken != "" {
		into(f.ofToken, t.ClientToken, t)
	}
	switch {
	case t.LastStatus == api.StatusStopped:
	case t.Instance != "":
		into(f.onInstance, t.Instance, t)
		f.stale(t.Instance)
	case t.Desired == api.StatusRunning:
		f.pending[t.ID] = t
	}
}

func (f *Fleet) unindex(t *Task) {
	outOf(f.ofService, t.Service, t)
	outOf(f.successors, t.Replaces, t)
	outOf(f.onInstance, t.Instance, t)
	outOf(f.ofToken, t.ClientToken, t)
	delete(f.pending, t.ID)
	f.stale(t.Instance)
}

func into(m map[string]map[string]*Task, key string, t *Task) {
	in := m[key]
	if in == nil {
		in = map[string]*Task{}
		m[key] = in
	}
	in[t.ID] = t
}

func outOf(m map[string]map[string]*Task, key string, t *Task) {
	in := m[key]
	delete(in, t.ID)
	if len(in) == 0 {
		delete(m, key)
	}
}
