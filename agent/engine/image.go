package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/image"
	"go.uber.org/zap"
)

// Pull is when an image is pulled: ECS_IMAGE_PULL_BEHAVIOR.
type Pull string

// ECS's behaviours.
const (
	PullDefault      Pull = "default"       // pull; where that fails, what the machine has
	PullAlways       Pull = "always"        // pull; where that fails, the task fails
	PullOnce         Pull = "once"          // pull, unless this agent process pulled it already
	PullPreferCached Pull = "prefer-cached" // pull only what the machine has not
)

// EnsureImage makes the image present and returns its id. progress, where not
// nil, is called with Docker's lines ("Pulling fs layer") as they come.
func (e *Engine) EnsureImage(ctx context.Context, ref string, when Pull, progress func(string)) (string, error) {
	cached, err := e.ImageID(ctx, ref)
	if err != nil {
		return "", err
	}
	switch when {
	case PullAlways, PullDefault, "":
	case PullPreferCached:
		if cached != "" {
			return cached, nil
		}
	case PullOnce:
		e.mu.Lock()
		pulled := e.pulled[ref]
		e.mu.Unlock()
		if cached != "" && pulled {
			return cached, nil
		}
	default:
		return "", ErrCannotPull.errorf("image pull behavior: %q; give default, always, once or prefer-cached", when)
	}
	err = call(ctx, ErrCannotPull, pullLimit, "pulled", func(ctx context.Context) error {
		return e.pull(ctx, ref, progress)
	})
	switch {
	case err == nil:
		e.mu.Lock()
		e.pulled[ref] = true
		e.mu.Unlock()
	case (when == PullDefault || when == "") && cached != "" && ctx.Err() == nil:
		e.log.Info("cannot pull an image, using the one that is here", zap.String("image", ref), zap.String("id", cached), zap.Error(err))
		return cached, nil
	default:
		return "", err
	}
	id, err := e.ImageID(ctx, ref)
	if err == nil && id == "" {
		err = ErrCannotPull.errorf("image %q: pulled, and gone again", ref)
	}
	return id, err
}

// ImageID is the id of the image that the machine has under ref; empty when
// it has none.
func (e *Engine) ImageID(ctx context.Context, ref string) (string, error) {
	var id string
	err := call(ctx, ErrCannotInspect, inspectLimit, "inspected", func(ctx context.Context) error {
		found, err := e.docker.ImageInspect(ctx, ref)
		if err != nil && !errdefs.IsNotFound(err) {
			return fmt.Errorf("image %q: %w", ref, err)
		}
		id = found.ID
		return nil
	})
	return id, err
}

// LoadImage makes the image ref out of a tar of its root file system, as
// `docker import` does; changes are Dockerfile instructions such as
// `ENTRYPOINT ["/cuda-client"]`. It returns the image's id.
func (e *Engine) LoadImage(ctx context.Context, ref string, rootfs io.Reader, changes []string) (string, error) {
	var id string
	err := call(ctx, ErrCannotPull, pullLimit, "loaded", func(ctx context.Context) error {
		body, err := e.docker.ImageImport(ctx, image.ImportSource{Source: rootfs, SourceName: "-"}, ref, image.ImportOptions{Changes: changes})
		if err != nil {
			return fmt.Errorf("image %q: %w", ref, err)
		}
		defer body.Close()
		return stream(body, func(line string) { id = line })
	})
	return id, err
}

// RemoveImage removes the tag, and the image where that was its last. One that
// is gone is no error.
func (e *Engine) RemoveImage(ctx context.Context, ref string) error {
	return call(ctx, ErrCannotRemove, removeLimit, "removed", func(ctx context.Context) error {
		if _, err := e.docker.ImageRemove(ctx, ref, image.RemoveOptions{PruneChildren: true}); err != nil && !errdefs.IsNotFound(err) {
			return fmt.Errorf("image %q: %w", ref, err)
		}
		return nil
	})
}

func (e *Engine) pull(ctx context.Context, ref string, progress func(string)) error {
	body, err := e.docker.ImagePull(ctx, ref, image.PullOptions{})
	if err != nil {
		return fmt.Errorf("image %q: %w", ref, err)
	}
	defer body.Close()
	if progress == nil {
		progress = func(string) {}
	}
	if err := stream(body, progress); err != nil {
		return fmt.Errorf("image %q: %w", ref, err)
	}
	return nil
}

// stream reads Docker's progress messages. A pull that fails half way answers
// 200 and says so in its last message.
func stream(body io.Reader, line func(string)) error {
	decoder := json.NewDecoder(body)
	for {
		var message struct {
			Status, ID  string
			Error       string
			ErrorDetail struct{ Message string }
		}
		switch err := decoder.Decode(&message); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case message.ErrorDetail.Message != "":
			return errors.New(message.ErrorDetail.Message)
		case message.Error != "":
			return errors.New(message.Error)
		case message.ID != "":
			line(message.ID + ": " + message.Status)
		default:
			line(message.Status)
		}
	}
}
