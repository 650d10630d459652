package engine

import (
	"context"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/volume"
	"go.uber.org/zap"
)

// Create makes the container and returns its id, without starting it. It is
// idempotent: where a container of that name with the same instance, task,
// generation and container label exists, in whatever state, its id is returned.
// A name that is held by any other container is an error; that container is
// left alone.
func (e *Engine) Create(ctx context.Context, r Request) (string, error) {
	t, err := translate(r, e.machine())
	if err != nil {
		return "", ErrCannotCreate.as(err)
	}
	if err := e.ensureVolumes(ctx, r, t.volumes); err != nil {
		return "", err
	}
	name := r.Labels.Name()
	var id string
	err = call(ctx, ErrCannotCreate, createLimit, "created", func(ctx context.Context) error {
		made, err := e.docker.ContainerCreate(ctx, t.config, t.host, t.network, nil, name)
		if errdefs.IsConflict(err) {
			id, err = e.holder(ctx, name, r.Labels)
			return err
		}
		if err != nil {
			return err
		}
		for _, w := range made.Warnings {
			e.log.Info("docker warns about a new container", zap.String("container", name), zap.String("warning", w))
		}
		id = made.ID
		return nil
	})
	return id, err
}

// holder is the id of the container that has our name, where it is ours.
func (e *Engine) holder(ctx context.Context, name string, want Labels) (string, error) {
	held, err := e.docker.ContainerInspect(ctx, name)
	if err != nil {
		return "", fmt.Errorf("container name %q is taken, and its holder cannot be read: %w", name, err)
	}
	if labels, err := labelsOf(held.Config.Labels); err == nil && labels.Same(want) {
		return held.ID, nil
	}
	return "", fmt.Errorf("container name %q is held by container %.12s (image %s, created %s), which is not this task's: rename or remove it",
		name, held.ID, held.Config.Image, held.Created)
}

// ensureVolumes makes the Docker volumes that the container mounts. One that a
// task on a shared GPU finds made by someone else is held to the same rules as
// the folders of the machine.
func (e *Engine) ensureVolumes(ctx context.Context, r Request, wanted []wantedVolume) error {
	for _, w := range wanted {
		err := call(ctx, ErrCannotCreate, createLimit, "created", func(ctx context.Context) error {
			found, err := e.docker.VolumeInspect(ctx, w.options.Name)
			if errdefs.IsNotFound(err) {
				if !w.provision {
					return fmt.Errorf("%s: no Docker volume %q on this machine; create it or set autoprovision", w.path, w.options.Name)
				}
				found, err = e.docker.VolumeCreate(ctx, w.options)
			}
			if err != nil {
				return fmt.Errorf("%s: volume %q: %w", w.path, w.options.Name, err)
			}
			return guardDriver(w.path, found.Driver, found.Options, r.Grant.Shared, r.Settings, e.machine())
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// RemoveVolumes removes the Docker volumes that lived with the task. A
// volume that a container still uses is an error.
func (e *Engine) RemoveVolumes(ctx context.Context, instance, task string) error {
	return call(ctx, ErrCannotRemove, removeLimit, "removed", func(ctx context.Context) error {
		found, err := e.docker.VolumeList(ctx, volume.ListOptions{Filters: filters.NewArgs(
			filters.Arg("label", LabelInstance+"="+instance), filters.Arg("label", LabelTask+"="+task))})
		if err != nil {
			return err
		}
		for _, v := range found.Volumes {
			if err := e.docker.VolumeRemove(ctx, v.Name, false); err != nil && !errdefs.IsNotFound(err) {
				return fmt.Errorf("volume %q: %w", v.Name, err)
			}
		}
		return nil
	})
}

func (e *Engine) machine() machine {
	return machine{
		socket:  strings.TrimPrefix(e.host, "unix://"),
		resolve: resolve,
		device:  deviceMajor,
	}
}
