package service

import (
	"fmt"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/placement/fleet"
)

// Look is a service of the fleet as Step takes it. There has to be one of that name.
func Look(f *fleet.Fleet, name string, now time.Time) Input {
	tasks := f.TasksOf(name)
	in := Input{Service: *f.Service(name), Now: now, Tasks: make([]Task, 0, len(tasks))}
	for _, t := range tasks {
		in.Tasks = append(in.Tasks, View(f, t))
	}
	return in
}

// LookAlone is a task without a service as Standalone takes it.
func LookAlone(f *fleet.Fleet, t *fleet.Task, now time.Time) Alone {
	return Alone{Task: View(f, t), Successor: len(f.Successors(t.ID)) > 0, Now: now}
}

// View is a task as its service sees it.
func View(f *fleet.Fleet, t *fleet.Task) Task {
	v := Task{ID: t.ID, Definition: t.Definition, Replaces: t.Replaces, Reschedule: t.Reschedule, Desired: t.Desired, LastStatus: t.LastStatus,
		Placed: t.Instance != "", Gone: t.Gone, Infrastructure: t.Infrastructure, StopCode: t.StopCode, Counted: t.Counted,
		CreatedAt: t.CreatedAt, StartedAt: t.StartedAt, EndedAt: t.StoppingAt}
	if v.EndedAt.IsZero() {
		v.EndedAt = t.StoppedAt
	}
	if v.LastStatus == api.StatusRunning && v.Desired == api.StatusRunning {
		v.Healthy, v.Unhealthy = health(f, t)
	}
	if v.LastStatus != api.StatusStopped && t.Instance != "" {
		v.Vacate, v.VacateCode = vacate(f.Instance(t.Instance), t)
	}
	return v
}

// Healths of a container that berth reads, as in ECS's HealthStatus.
const containerHealthy = "HEALTHY"

// health is what the task's health checks say, where it has any.
func health(f *fleet.Fleet, t *fleet.Task) (healthy, unhealthy bool) {
	healthy = true
	for _, c := range t.Containers {
		switch c.HealthStatus {
		case "", containerHealthy:
			continue
		case api.ContainerUnhealthy:
			unhealthy = unhealthy || essential(f, t.Definition, c.Name)
		}
		if essential(f, t.Definition, c.Name) {
			healthy = false
		}
	}
	return healthy, unhealthy
}

// essential: every container is, unless its definition says no.
func essential(f *fleet.Fleet, definition, container string) bool {
	parsed := f.Parsed(definition)
	if parsed == nil {
		return true
	}
	for i := range parsed.ContainerDefinitions {
		c := &parsed.ContainerDefinitions[i]
		if c.Name != nil && *c.Name == container {
			return c.Essential == nil || *c.Essential
		}
	}
	return true
}

// vacate says why a task has to leave where it is, and with which stop code. A lost
// machine is no reason by itself: its tasks are Gone, each when it may be replaced. A GPU
// that its agent does not name any more says nothing: one that is lost is FAILED.
func vacate(i *fleet.Instance, t *fleet.Task) (why, code string) {
	if i == nil {
		return fmt.Sprintf("instance %s has left", t.Instance), api.StopInfrastructure
	}
	if t.StopAfter > 0 && !i.Cutoff.IsZero() {
		return "", "" // its agent cannot be told to stop it, and there must be no second copy
	}
	for _, id := range t.GPUs {
		for _, g := range i.GPUs {
			if g.ID == id && (g.Standing == api.GPUDraining || g.Standing == api.GPUFailed) {
				return because(fmt.Sprintf("GPU %d of %s is %s", g.Index, i.ID, g.Standing), g.StandingReason), api.StopInfrastructure
			}
		}
	}
	if i.Status == api.InstanceDraining {
		return because(i.ID+" is draining", i.DrainReason), api.StopServiceScheduler
	}
	return "", ""
}
