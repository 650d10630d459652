package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/berth-gpu/berth/agent/engine"
)

// Purge takes away all that this agent ever made on the machine: it stops its
// tasks, quits the MPS daemons, sets the GPUs' compute mode back to DEFAULT, and
// removes containers, volumes, cgroups and folders. Each step is said to say. It
// goes on past what fails and returns all of that. The agent must not run; Open
// has seen to that.
func (a *Agent) Purge(ctx context.Context, say func(format string, args ...any)) error {
	defer a.close()
	var errs []error
	containers, err := a.docker.List(ctx, a.settings.Instance)
	errs = append(errs, err)
	if len(containers) > 0 {
		say("stopping and removing %d containers", len(containers))
	}
	errs = append(errs, a.purgeContainers(ctx, containers))
	for id := range a.tasks {
		errs = append(errs, a.docker.RemoveVolumes(ctx, a.settings.Instance, id))
	}
	errs = append(errs, a.cgroups.RemoveAll(ctx))
	for _, u := range a.units {
		if u.holder == nil {
			continue
		}
		say("GPU %d (%s): quitting its MPS daemon, compute mode DEFAULT", u.dev.Index, u.dev.UUID)
		bounded, cancel := context.WithTimeout(ctx, purgeTimeout)
		err := u.holder.Purge(bounded)
		cancel()
		if err != nil {
			errs = append(errs, fmt.Errorf("GPU %s: %w", u.dev.UUID, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err // the state stays: it knows what is left
	}
	say("removing %s, %s and the logs in %s", a.settings.RunDir, a.settings.StateFile(), a.settings.LogDir)
	return a.purgeFolders()
}

// purgeTimeout bounds what is done for one GPU: an NVML that hangs must not hold
// up the rest.
const purgeTimeout = time.Minute

func (a *Agent) purgeContainers(ctx context.Context, containers []engine.Container) error {
	var wg sync.WaitGroup
	errs := make([]error, len(containers))
	for i, c := range containers {
		j := a.purgeJob(c)
		wg.Go(func() {
			if c.Alive() {
				if got := a.stop(ctx, j); got.err != nil && !errors.Is(got.err, engine.ErrVanished) {
					errs[i] = fmt.Errorf("container %s: %w", c.Name, got.err)
					return
				}
			}
			if err := a.docker.Remove(ctx, c.ID); err != nil {
				errs[i] = fmt.Errorf("container %s: %w", c.Name, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// purgeJob is how to stop a container of a task that is known, or of none.
func (a *Agent) purgeJob(c engine.Container) job {
	if t := a.tasks[c.Labels.Task]; t != nil && containerIndex(&t.rec, c.Labels.Container) >= 0 {
		t.seen[c.Labels.Container] = sight(c)
		if j, err := a.job(t, c.Labels.Container); err == nil {
			return j
		}
	}
	return job{seen: sight(c), stopAfter: a.settings.Docker.StopTimeout}
}

// purgeFolders removes what berth made, and then its folders where nothing else
// is in them.
func (a *Agent) purgeFolders() error {
	s := a.settings
	a.store.Close()
	a.flight.Close()
	var errs []error
	for _, path := range []string{s.Socket(), s.StateFile()} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	for _, dir := range []string{filepath.Join(s.RunDir, "mps"), filepath.Join(s.LogDir, "mps"), filepath.Join(s.StateDir, flightDir)} {
		errs = append(errs, os.RemoveAll(dir))
	}
	for _, dir := range []string{s.RunDir, s.StateDir, s.LogDir} {
		if left, err := os.ReadDir(dir); err == nil && len(left) == 0 {
			errs = append(errs, os.Remove(dir))
		}
	}
	return errors.Join(errs...)
}
