package engine

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
)

// Start starts a container that was made. One that runs already is left alone.
func (e *Engine) Start(ctx context.Context, id string) error {
	return call(ctx, ErrCannotStart, startLimit, "running", func(ctx context.Context) error {
		if err := e.unmoved(ctx, id); err != nil {
			return err
		}
		return e.docker.ContainerStart(ctx, id, container.StartOptions{})
	})
}

// unmoved says that the machine's folders which the container mounts are where
// the rules of guard.go found them. Docker follows links at each start, and who
// can write to a folder above could have turned it into one since.
func (e *Engine) unmoved(ctx context.Context, id string) error {
	r, err := e.docker.ContainerInspect(ctx, id)
	if err != nil {
		return err
	}
	for _, bind := range r.HostConfig.Binds {
		source, _, _ := strings.Cut(bind, ":")
		if real, err := resolve(source); err != nil || real != source {
			return fmt.Errorf("volume folder %q is a link since the container was made (to %q, %v); put the folder back, or start the task anew", source, real, err)
		}
	}
	return nil
}

// Signal sends a signal ("TERM", "KILL", ...) to the container's first
// process; empty means its stop signal, which is TERM unless its image says
// otherwise. One that does not run is no error: then there is nothing to stop.
func (e *Engine) Signal(ctx context.Context, id, signal string) error {
	if signal == "" {
		c, err := e.Inspect(ctx, id)
		if err != nil {
			return err
		}
		signal = c.StopSignal
	}
	return call(ctx, ErrCannotStop, signalLimit, "stopped", func(ctx context.Context) error {
		err := e.docker.ContainerKill(ctx, id, signal)
		if errdefs.IsConflict(err) { // "is not running"
			return nil
		}
		return err
	})
}

// Kill is Signal(ctx, id, "KILL").
func (e *Engine) Kill(ctx context.Context, id string) error { return e.Signal(ctx, id, "KILL") }

// Wait returns the container as it is once it has stopped, however long that
// takes; ctx bounds it.
func (e *Engine) Wait(ctx context.Context, id string) (Container, error) {
	done, failed := e.docker.ContainerWait(ctx, id, container.WaitConditionNotRunning)
	select { // ctx ends the request, and so comes out of failed
	case <-done:
	case err := <-failed:
		switch {
		case ctx.Err() != nil:
			return Container{}, ctx.Err()
		case errdefs.IsNotFound(err):
			return Container{}, ErrVanished.as(err)
		}
		return Container{}, ErrCannotInspect.as(err)
	}
	return e.Inspect(ctx, id)
}

// Stop sends the stop signal, waits for at most timeout, then kills, and
// returns the container as it ended. The agent, which puts terminate_client
// before the kill of an MPS client, does the same with Signal, Wait and Kill.
func (e *Engine) Stop(ctx context.Context, id string, timeout time.Duration) (Container, error) {
	if err := e.Signal(ctx, id, ""); err != nil {
		return Container{}, err
	}
	graceful, cancel := context.WithTimeout(ctx, timeout)
	c, err := e.Wait(graceful, id)
	cancel()
	if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
		return c, err
	}
	if err := e.Kill(ctx, id); err != nil {
		return Container{}, err
	}
	// A killed process that does not go is stuck in the kernel.
	var stopped Container
	err = call(ctx, ErrCannotStop, 2*time.Minute, "stopped", func(ctx context.Context) (err error) {
		stopped, err = e.Wait(ctx, id)
		return err
	})
	return stopped, err
}

// Remove removes a container that has stopped, with its anonymous volumes. One
// that is gone is no error; one that runs is.
func (e *Engine) Remove(ctx context.Context, id string) error {
	err := call(ctx, ErrCannotRemove, removeLimit, "removed", func(ctx context.Context) error {
		return e.docker.ContainerRemove(ctx, id, container.RemoveOptions{RemoveVolumes: true})
	})
	if errors.Is(err, ErrVanished) {
		return nil
	}
	return err
}
