package placement

import (
	"cmp"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/placement/fit"
	"github.com/berth-gpu/berth/placement/fleet"
	"github.com/berth-gpu/berth/placement/service"
)

// showTask is a task as people and tools see it.
func (l *leader) showTask(t *fleet.Task) api.Task {
	family, _, _ := strings.Cut(t.Definition, ":")
	out := api.Task{ID: t.ID, Name: cmp.Or(t.Service, family), Family: family, Group: group(t), Instance: t.Instance, Definition: t.Definition,
		Replaces: t.Replaces, Generation: t.Generation, LastStatus: t.LastStatus, DesiredStatus: t.Desired, StopCode: t.StopCode,
		StoppedReason: t.StoppedReason, GPUIDs: t.GPUs, CreatedAt: t.CreatedAt, StartedAt: timeOrNil(t.StartedAt), StoppedAt: timeOrNil(t.StoppedAt),
		Containers: t.Containers, Infrastructure: t.Infrastructure}
	switch {
	case t.LastStatus == api.StatusStopped:
	case t.Gone:
		out.Reason = fmt.Sprintf("%s is not heard: it is stopped there when it returns", t.Instance)
	case t.Instance == "":
		out.Reason = l.whyPending(t)
	default:
		if c := l.agents[t.Instance]; c != nil {
			out.Reason = c.waits[t.ID]
		}
	}
	if out.Containers == nil {
		out.Containers = []api.Container{}
		if def := l.fleet.Parsed(t.Definition); def != nil {
			status := api.StatusPending
			if t.LastStatus == api.StatusStopped {
				status = api.StatusStopped
			}
			for i := range def.ContainerDefinitions {
				c := &def.ContainerDefinitions[i]
				out.Containers = append(out.Containers, api.Container{Name: *c.Name, Image: *c.Image, LastStatus: status})
			}
		}
	}
	return out
}

// group is ECS's word for what a task belongs to.
func group(t *fleet.Task) string {
	if t.Service != "" {
		return "service:" + t.Service
	}
	family, _, _ := strings.Cut(t.Definition, ":")
	return "family:" + family
}

// showTasks are the tasks that the filters let through, newest first.
func (l *leader) showTasks(q url.Values) []api.Task {
	out := []api.Task{}
	for _, t := range l.fleet.Tasks() {
		if l.asked(t, q) {
			out = append(out, l.showTask(t))
		}
	}
	slices.SortFunc(out, func(a, b api.Task) int { return cmp.Or(b.CreatedAt.Compare(a.CreatedAt), cmp.Compare(a.ID, b.ID)) })
	return out
}

// asked says whether a task passes the filters of GET /v1/tasks.
func (l *leader) asked(t *fleet.Task, q url.Values) bool {
	one := func(name string, is func(string) bool) bool {
		return len(q[name]) == 0 || slices.ContainsFunc(q[name], is)
	}
	family, _, _ := strings.Cut(t.Definition, ":")
	return one("ref", func(v string) bool { return strings.HasPrefix(t.ID, v) || cmp.Or(t.Service, family) == v }) &&
		one("line", func(v string) bool { return slices.Contains(l.line(t), v) }) &&
		one("service", func(v string) bool { return t.Service == v }) &&
		one("instance", func(v string) bool { return t.Instance == v }) &&
		one("status", func(v string) bool { return t.LastStatus == v }) &&
		(q.Get("unplaced") != "1" || t.Instance == "" && t.LastStatus == api.StatusPending)
}

// line are a task and those whose place it took, one after the other.
func (l *leader) line(t *fleet.Task) []string {
	ids := []string{t.ID}
	for t != nil && t.Replaces != "" && len(ids) < 1000 {
		ids = append(ids, t.Replaces)
		t = l.fleet.Task(t.Replaces)
	}
	return ids
}

// showInstances are all machines in order of names.
func (l *leader) showInstances() []api.Instance {
	out := []api.Instance{}
	for _, in := range l.fleet.Instances() {
		out = append(out, l.showInstance(in))
	}
	slices.SortFunc(out, func(a, b api.Instance) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// showInstance is the agent's own picture, with what the server knows better: its
// standing in the fleet, and what its tasks hold of it.
func (l *leader) showInstance(in *fleet.Instance) api.Instance {
	out := api.Instance{Health: api.Health{OverallStatus: api.HealthInsufficientData}}
	c := l.agents[in.ID]
	if c != nil && c.view.Name != "" {
		out = c.view
	} else { // not heard by this leader yet
		for _, g := range in.GPUs {
			out.GPUs = append(out.GPUs, api.GPU{ID: g.ID, Index: g.Index, Name: g.Name, MaxClients: g.MaxClients, NoSharing: g.NoSharing, Slices: []api.Slice{}})
		}
	}
	out.Name, out.Cluster, out.Version, out.AgentID, out.BootID = in.ID, l.settings.Cluster, in.Version, in.AgentID, in.BootID
	out.Status, out.Connected, out.Attributes = in.Status, c != nil && c.session != 0 && c.full, in.Attributes
	out.Registered = api.Resources{CPU: in.CPU, MemoryMiB: in.MemoryMiB}
	m := l.fleet.Machine(in.ID)
	out.Remaining = api.Resources{CPU: m.CPU, MemoryMiB: m.MemoryMiB}
	out.GPUs = slices.Clone(out.GPUs)
	for i := range out.GPUs {
		g := &out.GPUs[i]
		for j, have := range in.GPUs {
			if have.ID == g.ID {
				g.Standing, g.StandingReason = have.Standing, have.StandingReason
				free := m.GPUs[j]
				g.SharingMode, g.TotalMemoryInMiB, g.ContainerCount = string(free.Mode), free.TotalMiB, free.Clients
				g.RemainingMemoryInMiB = free.TotalMiB - free.AllocatedMiB
			}
		}
	}
	out.Health = l.health(in, out.Health)
	return out
}

// health adds the server's own check to the agent's, as ECS does since August 2026.
func (l *leader) health(in *fleet.Instance, h api.Health) api.Health {
	d := api.HealthDetail{Type: api.AgentConnectivity, Status: api.HealthOK, LastStatusChange: in.RegisteredAt}
	if !in.Cutoff.IsZero() {
		d.Status, d.LastStatusChange = api.HealthImpaired, in.Cutoff
		d.StatusReason = "its agent has not been heard since " + in.Cutoff.Format(time.RFC3339)
		h.OverallStatus = api.HealthImpaired
	}
	h.Details = append(slices.Clone(h.Details), d)
	return h
}

func (l *leader) showService(s *fleet.Service) api.Service {
	out := api.Service{Name: s.Name, Status: "ACTIVE", TaskDefinition: s.Definition, DesiredCount: s.Desired, MinimumHealthyPercent: s.MinHealthyPercent,
		MaximumPercent: s.MaximumPercent, StopAfterSeconds: int(s.StopAfter / time.Second), CreatedAt: s.CreatedAt, Reason: s.Reason}
	if s.Deleted {
		out.Status = "DRAINING"
	}
	for _, t := range l.fleet.TasksOf(s.Name) {
		switch {
		case t.LastStatus == api.StatusStopped || t.Gone:
		case t.LastStatus == api.StatusRunning:
			out.RunningCount++
		case t.LastStatus == api.StatusPending && t.Desired == api.StatusRunning:
			out.PendingCount++
			if t.Instance == "" && out.Reason == "" {
				out.Reason = l.whyPending(t)
			}
		}
	}
	return out
}

func (l *leader) showServices() []api.Service {
	out := []api.Service{}
	for _, s := range l.fleet.Services() {
		out = append(out, l.showService(s))
	}
	slices.SortFunc(out, func(a, b api.Service) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// explain says why a task is where it is, and what rules out each machine and GPU
// for one that has no place.
func (l *leader) explain(id string) (api.Explanation, error) {
	t, err := l.findTask(id)
	if err != nil {
		return api.Explanation{}, err
	}
	out := api.Explanation{Task: t.ID, Status: t.LastStatus}
	e, _ := l.fleet.Explain(t)
	out.Machines, out.GPUs = e.Machines, e.GPUs
	switch {
	case t.LastStatus == api.StatusStopped:
		out.Says = fmt.Sprintf("it has stopped: %s: %s", t.StopCode, t.StoppedReason)
		return out, nil
	case t.Instance != "":
		out.Says = fmt.Sprintf("it is placed on %s", t.Instance)
		if len(t.GPUs) > 0 {
			out.Says += ", GPU " + strings.Join(t.GPUs, ", ")
		}
		if c := l.agents[t.Instance]; c != nil && c.waits[t.ID] != "" {
			out.Says += "; its agent says: " + c.waits[t.ID]
		}
		if why := service.View(l.fleet, t).Vacate; why != "" {
			out.Says += "; it has to leave: " + why
		}
		return out, nil
	}
	for _, r := range e.RuledOut {
		out.RuledOut = append(out.RuledOut, api.RuledOut{Code: string(r.Code), Machines: r.Machines, GPUs: r.GPUs, Nearest: r.Nearest.String(), Instance: r.Instance})
	}
	switch {
	case out.Machines == 0:
		out.Says = "no machine has joined yet"
	case len(out.RuledOut) == 0:
		out.Says = "it fits and is about to be placed"
	default:
		near := out.RuledOut[0]
		out.Says = fmt.Sprintf("no machine can take it now; nearest is %s: %s", near.Instance, near.Nearest)
	}
	return out, nil
}

// planMoves is what becomes of each task of an instance when it is drained now.
func (l *leader) planMoves(in *fleet.Instance) []api.DrainMove {
	moves := []api.DrainMove{}
	rest := slices.DeleteFunc(slices.Clone(l.fleet.Candidates()), func(c fit.Candidate) bool { return c.ID == in.ID })
	tasks := l.fleet.TasksOn(in.ID)
	slices.SortStableFunc(tasks, func(a, b *fleet.Task) int { // as serve does: services by name, then what stands alone
		return cmp.Or(cmp.Compare(min(len(b.Service), 1), min(len(a.Service), 1)), strings.Compare(a.Service, b.Service))
	})
	for _, t := range tasks {
		if t.LastStatus == api.StatusStopped || t.Desired == api.StatusStopped {
			continue
		}
		family, _, _ := strings.Cut(t.Definition, ":")
		m := api.DrainMove{Task: t.ID, Service: t.Service, Family: family}
		if t.Service == "" && !t.Reschedule {
			m.Says = "stays until it ends: it is a standalone task"
			moves = append(moves, m)
			continue
		}
		m.Moving = true
		d, _ := l.fleet.Demand(t.Definition)
		if id, gpus, ok := fit.Choose(rest, d); ok {
			m.Instance, m.Says = id, "moves to "+id
			i := slices.IndexFunc(rest, func(c fit.Candidate) bool { return c.ID == id })
			rest[i].Machine = rest[i].Machine.Take(d, gpus)
		} else {
			m.Says = "finds no room elsewhere now"
			if e := fit.Explain(rest, d); len(e.RuledOut) > 0 {
				m.Says += "; nearest is " + e.RuledOut[0].Instance + ": " + e.RuledOut[0].Nearest.String()
			}
		}
		moves = append(moves, m)
	}
	return moves
}

func (l *leader) showReplacements() []api.Replacement {
	out := []api.Replacement{}
	for _, id := range slices.Sorted(maps.Keys(l.replacements)) {
		out = append(out, l.showReplacement(l.replacements[id]))
	}
	slices.SortStableFunc(out, func(a, b api.Replacement) int { return b.StartedAt.Compare(a.StartedAt) })
	if len(out) > 0 {
		out[0].Held = l.held // also where none is under way, and none may begin
	}
	return out
}

func timeOrNil(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
