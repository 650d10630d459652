package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/berth-gpu/berth/agent/engine"
	"github.com/berth-gpu/berth/agent/state"
	"github.com/berth-gpu/berth/api"
)

// load takes over what an earlier agent left: its tasks, item by item, with what
// Docker has of them now. Nothing is restarted: a running container is seen to
// run, and that is all.
func (a *Agent) load(ctx context.Context) error {
	a.tasks, a.strangers = map[string]*task{}, map[string]bool{}
	rebooted, err := a.store.Begin(a.settings.Instance, a.bootID)
	if err != nil {
		return err
	}
	if err := a.loadServer(); err != nil {
		return err
	}
	records, aside, err := a.store.Tasks()
	if err != nil {
		return err
	}
	for _, s := range aside {
		a.log.Error("set a damaged record aside; its containers are removed, its source may start it again",
			zap.String("kind", s.Kind), zap.String("key", s.Key), zap.String("why", s.Reason))
	}
	for _, rec := range records {
		def, err := a.rules.Parse(rec.Definition)
		if err == nil && len(def.ContainerDefinitions) != len(rec.Containers) {
			err = fmt.Errorf("%d containers are recorded, the definition has %d", len(rec.Containers), len(def.ContainerDefinitions))
		}
		if err != nil {
			a.log.Error("a stored task's definition is not valid any more; its containers are removed",
				zap.String("task", rec.ID), zap.Error(err))
			if err := a.store.Forget(rec); err != nil {
				return err
			}
			continue
		}
		t := newTask(*rec, def)
		t.stored = *rec
		if rebooted && rec.Stopped.IsZero() {
			void(&t.rec, time.Now())
		}
		a.tasks[rec.ID] = t
	}
	if rebooted {
		a.log.Info("this machine has booted since the last agent ran: what was stored of processes is void")
	}
	list, err := a.settled(ctx)
	if err != nil {
		return err
	}
	a.listAt = time.Now()
	a.listed(list, 0)
	if err := a.openUnits(ctx, rebooted); err != nil {
		return err
	}
	a.capacity = a.measureCapacity()
	for _, c := range a.books().contradictions {
		a.log.Error("the stored tasks contradict each other", zap.String("what", c))
	}
	running := 0
	for _, t := range a.tasks {
		for _, s := range t.seen {
			if s.Running {
				running++
			}
		}
	}
	a.log.Info("state loaded", zap.Int("tasks", len(a.tasks)), zap.Int("adopted containers", running))
	return nil
}

// settled is Docker's list without containers that were made and not started. The agent
// before this one may have asked for the start of one and been killed: Docker gets to
// that in its own time, whatever has become of the GPU and the task by then. A container
// that is removed is never started, and launched anew where it is still wanted.
func (a *Agent) settled(ctx context.Context) ([]engine.Container, error) {
	list, err := a.docker.List(ctx, a.settings.Instance)
	if err != nil {
		return nil, err
	}
	unsure := false
	for _, c := range list {
		if c.State != engine.Created || c.ExitCode != 0 { // one that could not start has a code
			continue
		}
		unsure = true
		if err := a.docker.Remove(ctx, c.ID); err != nil { // it may run by now
			a.log.Info("a container was made and not started, and cannot be removed", zap.String("container", c.Name), zap.Error(err))
		}
	}
	if !unsure {
		return list, nil
	}
	return a.docker.List(ctx, a.settings.Instance)
}

// void ends a task of an earlier boot: its containers ended with that boot.
func void(rec *state.Task, now time.Time) {
	end(rec, now, api.StopInfrastructure, "the machine was rebooted")
	rec.StoppedByAgent, rec.Stopped = true, now
	for i := range rec.Containers {
		rec.Containers[i].Done = true
	}
}

// beginList asks Docker for all containers of this instance.
func (a *Agent) beginList(now time.Time) {
	a.clock++
	began := a.clock
	a.listing, a.listDue, a.listAt = true, false, now
	a.owned.Go(func() {
		list, err := a.docker.List(a.ctx, a.settings.Instance)
		a.post(func() {
			a.listing = false
			if err != nil {
				if a.listErr == nil {
					a.log.Warn("cannot list containers, retrying", zap.Error(err))
				}
				a.listErr = err
				return
			}
			a.listErr = nil
			a.listed(list, began)
		})
	})
}

// listed takes Docker's list in. It says nothing about a container whose last
// operation ended after the list began, or is under way.
func (a *Agent) listed(list []engine.Container, began uint64) {
	there := map[*task]map[string]bool{}
	for _, c := range list {
		t := a.tasks[c.Labels.Task]
		if t == nil || t.rec.Generation != c.Labels.Generation || containerIndex(&t.rec, c.Labels.Container) < 0 {
			a.removeStranger(c)
			continue
		}
		if there[t] == nil {
			there[t] = map[string]bool{}
		}
		there[t][c.Labels.Container] = true
		if t.touched[c.Labels.Container] <= began && t.busy[c.Labels.Container] == nil {
			t.seen[c.Labels.Container] = sight(c)
		}
	}
	for _, t := range a.tasks {
		for name := range t.seen {
			if !there[t][name] && t.touched[name] <= began && t.busy[name] == nil {
				delete(t.seen, name)
			}
		}
	}
}

// removeStranger stops and removes a container that carries this agent's
// instance and belongs to no task of it: its record was lost or set aside. It
// may hold GPU memory that the books do not know.
func (a *Agent) removeStranger(c engine.Container) {
	if removing := a.strangers[c.ID]; removing || a.owned == nil {
		a.listDue = true
		return
	}
	a.strangers[c.ID] = true
	a.log.Warn("removing a container that no task knows", zap.String("container", c.Name), zap.String("task", c.Labels.Task),
		zap.Uint64("generation", c.Labels.Generation))
	a.owned.Go(func() {
		_, err := a.docker.Stop(a.ctx, c.ID, a.settings.Docker.StopTimeout)
		if err == nil {
			err = a.docker.Remove(a.ctx, c.ID)
		}
		gone := err == nil || errors.Is(err, engine.ErrVanished)
		if gone {
			err = a.cgroups.Remove(a.ctx, c.Labels.Task)
		}
		if err != nil && a.ctx.Err() == nil {
			a.log.Warn("cannot remove it, retrying", zap.String("container", c.Name), zap.Error(err))
		}
		a.post(func() {
			if a.strangers[c.ID] = false; gone { // else it is there still, and tried again
				delete(a.strangers, c.ID)
			}
		})
	})
}

// watchDocker turns Docker's events into lists.
func (a *Agent) watchDocker(ctx context.Context) {
	for e := range a.docker.Events(ctx, a.settings.Instance) {
		if e.Lost || e.Action == "die" || e.Action == "start" || e.Action == "destroy" || e.Action == "health_status" || e.Action == "oom" || e.Action == "pause" || e.Action == "unpause" {
			a.post(func() { a.listDue = true })
		}
	}
}
