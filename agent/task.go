package agent

import (
	"fmt"
	"slices"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/ecs/types"

	"github.com/berth-gpu/berth/agent/state"
	"github.com/berth-gpu/berth/api"
)

// The life of a task, as its record and Docker's list tell it:
//
//	accepted ──> PENDING ──launch each container, in dependency order──> RUNNING
//	                │                                                       │
//	                │ cannot start, start timeout                           │ an essential container ended,
//	                v                                                       v its source let go, an operator, its GPU was lost
//	            DEACTIVATING ──stop each container, dependents first──> STOPPED ──cleanup delay──> forgotten
//
// Desired only ever goes from RUNNING to STOPPED. A new try is a new task with a
// higher generation.

// Docker's word on one container, as far as the decision needs it.
type seen struct {
	ID       string
	Created  bool // there, and not started yet
	Running  bool
	ExitCode int
	Reason   string // OutOfMemoryError, or Docker's own error
	Health   string // HEALTHY, UNHEALTHY, UNKNOWN; "" without a health check
	Started  time.Time
	Finished time.Time
}

type verb string

const (
	verbLaunch verb = "launch" // pull, create, start: what of these is still to do
	verbStop   verb = "stop"
	verbForget verb = "forget" // remove the task's stopped containers, cgroup and record
)

type action struct {
	verb      verb
	container string // empty for forget
}

// look is all that the decision about one task is made from.
type look struct {
	rec      state.Task
	def      *types.TaskDefinition
	seen     map[string]seen // by container name; absent: Docker has no such container
	busy     map[string]verb // operations under way
	hold     bool            // its last operation was refused or failed, and its retry is not due
	now      time.Time
	cleanup  time.Duration
	awaited  bool          // the placement server may not know yet how it ended: its record stays
	startMax time.Duration // startTimeout where a container names none
}

// step returns the record as it must be stored before the actions are begun.
func step(l look) (state.Task, []action) {
	rec := l.rec
	rec.Containers = slices.Clone(rec.Containers)
	if !rec.Stopped.IsZero() {
		// Somebody may have started a container of it by hand, past the gate.
		if acts, alive := l.stops(&rec); alive {
			return rec, acts
		}
		if (rec.Released || l.now.Sub(rec.Stopped) >= l.cleanup) && !l.hold && !l.awaited {
			return rec, []action{{verb: verbForget}}
		}
		return rec, nil
	}
	// 1. What has happened to each container.
	for i := range rec.Containers {
		if _, busy := l.busy[rec.Containers[i].Name]; !busy {
			l.observe(&rec, i)
		}
	}
	// 2. Whether the task goes on.
	if rec.Desired == api.StatusRunning {
		l.judge(&rec)
	}
	// 3. What to do next.
	if rec.Desired == api.StatusRunning {
		acts := l.launches(&rec)
		if rec.Desired == api.StatusRunning {
			if rec.Started.IsZero() && allStarted(rec.Containers) {
				rec.Started = l.now
			}
			return rec, acts
		}
	}
	acts, alive := l.stops(&rec)
	if !alive {
		rec.Stopped = l.now
		for i := range rec.Containers {
			rec.Containers[i].Done = true
		}
	}
	return rec, acts
}

// observe takes Docker's word into the record of one container.
func (l look) observe(rec *state.Task, i int) {
	c := &rec.Containers[i]
	s, there := l.seen[c.Name]
	switch {
	case c.Done:
	case !there && !c.Started.IsZero():
		c.Done, c.Finished = true, l.now
		c.Reason = "ContainerVanishedError: Docker no longer has the container"
	case !there || s.Created:
		if there {
			c.DockerID = s.ID
		}
	case s.Running:
		if !c.Finished.IsZero() { // it had ended: this is its restart policy's doing
			c.Restarts++
		}
		c.DockerID, c.Started = s.ID, s.Started
		c.Finished, c.ExitCode = time.Time{}, nil
	default: // it ended
		code := s.ExitCode
		c.DockerID, c.Finished, c.ExitCode, c.Reason = s.ID, s.Finished, &code, s.Reason
		if c.Started.IsZero() {
			c.Started = s.Started
		}
		if rec.Desired != api.StatusRunning || !l.restarts(i, s) {
			c.Done = true
		}
	}
}

// restarts applies ECS's restart policy: enabled, an exit code that is not
// ignored, and at least restartAttemptPeriod (default 300 s) since the start.
func (l look) restarts(i int, s seen) bool {
	p := l.def.ContainerDefinitions[i].RestartPolicy
	if p == nil || p.Enabled == nil || !*p.Enabled {
		return false
	}
	if slices.Contains(p.IgnoredExitCodes, int32(s.ExitCode)) {
		return false
	}
	period := 300 * time.Second
	if p.RestartAttemptPeriod != nil {
		period = time.Duration(*p.RestartAttemptPeriod) * time.Second
	}
	return s.Finished.Sub(s.Started) >= period
}

// judge ends the task when an essential container ended, or one that others
// wait for did not reach what they wait for.
func (l look) judge(rec *state.Task) {
	for i, c := range rec.Containers {
		d := &l.def.ContainerDefinitions[i]
		if c.Done && (d.Essential == nil || *d.Essential) {
			code, reason := "EssentialContainerExited", "Essential container in task exited"
			if c.Started.IsZero() {
				code, reason = "TaskFailedToStart", c.Reason
			}
			end(rec, l.now, code, reason)
			return
		}
	}
	for i := range rec.Containers {
		if !rec.Containers[i].Started.IsZero() || rec.Containers[i].Done {
			continue
		}
		for _, dep := range l.def.ContainerDefinitions[i].DependsOn {
			if why := l.hopeless(rec, dep); why != "" {
				end(rec, l.now, "TaskFailedToStart", fmt.Sprintf("TaskDependencyError: container %s waits for %s: %s",
					rec.Containers[i].Name, *dep.ContainerName, why))
				return
			}
		}
	}
}

// hopeless says why a dependency can no longer be met, or "" while it can.
func (l look) hopeless(rec *state.Task, dep types.ContainerDependency) string {
	i := containerIndex(rec, *dep.ContainerName)
	c := rec.Containers[i]
	if c.Done && !l.met(rec, dep) {
		switch {
		case dep.Condition == types.ContainerConditionSuccess && c.ExitCode != nil:
			return fmt.Sprintf("it ended with exit code %d, condition is SUCCESS", *c.ExitCode)
		default:
			return fmt.Sprintf("it ended before it was %s", dep.Condition)
		}
	}
	limit := l.startMax
	if t := l.def.ContainerDefinitions[i].StartTimeout; t != nil {
		limit = time.Duration(*t) * time.Second
	}
	if dep.Condition != types.ContainerConditionStart && !c.Started.IsZero() && !c.Done && limit > 0 &&
		!l.met(rec, dep) && l.now.Sub(c.Started) >= limit {
		return fmt.Sprintf("it was not %s within its start timeout of %s", dep.Condition, limit)
	}
	return ""
}

// met is ECS's four dependency conditions.
func (l look) met(rec *state.Task, dep types.ContainerDependency) bool {
	c := rec.Containers[containerIndex(rec, *dep.ContainerName)]
	switch dep.Condition {
	case types.ContainerConditionStart:
		return !c.Started.IsZero()
	case types.ContainerConditionComplete:
		return c.Done && !c.Started.IsZero()
	case types.ContainerConditionSuccess:
		return c.Done && c.ExitCode != nil && *c.ExitCode == 0
	case types.ContainerConditionHealthy:
		s := l.seen[c.Name]
		return s.Running && s.Health == "HEALTHY"
	}
	return false
}

// launches are the containers that may start now.
func (l look) launches(rec *state.Task) []action {
	var acts []action
	for i, c := range rec.Containers {
		s, there := l.seen[c.Name]
		if _, busy := l.busy[c.Name]; busy || c.Done || (there && s.Running) || l.hold {
			continue
		}
		ready := true
		for _, dep := range l.def.ContainerDefinitions[i].DependsOn {
			ready = ready && l.met(rec, dep)
		}
		if !ready {
			continue
		}
		acts = append(acts, action{verb: verbLaunch, container: c.Name})
	}
	return acts
}

// stops are the containers to stop now: those that no other running one
// depends on. A launch under way is cancelled by its owner and counts as alive; so
// does a container that was made, since Docker may yet start it, unless it is known
// that it cannot start.
func (l look) stops(rec *state.Task) (acts []action, alive bool) {
	up := func(name string) bool {
		_, busy := l.busy[name]
		s := l.seen[name]
		return busy || s.Running || s.Created && !rec.Containers[containerIndex(rec, name)].Done
	}
	for i, c := range rec.Containers {
		if !up(c.Name) {
			continue
		}
		alive = true
		if _, busy := l.busy[c.Name]; busy || l.hold {
			continue
		}
		needed := false
		for j := range rec.Containers {
			for _, dep := range l.def.ContainerDefinitions[j].DependsOn {
				needed = needed || (j != i && *dep.ContainerName == c.Name && up(rec.Containers[j].Name))
			}
		}
		if !needed {
			acts = append(acts, action{verb: verbStop, container: c.Name})
		}
	}
	return acts, alive
}

// end asks for the task's end once; the first reason stays.
func end(rec *state.Task, now time.Time, code, reason string) {
	if rec.Desired == api.StatusStopped {
		return
	}
	rec.Desired, rec.StopCode, rec.StoppedReason, rec.StopAsked = api.StatusStopped, code, reason, now
}

// status is ECS's lastStatus of a task.
func status(rec *state.Task) string {
	switch {
	case !rec.Stopped.IsZero():
		return api.StatusStopped
	case rec.Desired == api.StatusStopped:
		return api.StatusDeactivating
	case !rec.Started.IsZero():
		return api.StatusRunning
	}
	return api.StatusPending
}

func allStarted(cs []state.Container) bool {
	return !slices.ContainsFunc(cs, func(c state.Container) bool { return c.Started.IsZero() })
}

func containerIndex(rec *state.Task, name string) int {
	return slices.IndexFunc(rec.Containers, func(c state.Container) bool { return c.Name == name })
}
