package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
)

// Error is a failure under the name that ECS shows for it in a container's
// reason: "CannotCreateContainerError: ...". errors.Is(err, ErrCannotCreate)
// asks for the name alone.
type Error struct {
	Code string
	Err  error
}

// The names, as ECS's agent spells them.
var (
	ErrCannotPull    = &Error{Code: "CannotPullContainerError"}
	ErrCannotCreate  = &Error{Code: "CannotCreateContainerError"}
	ErrCannotStart   = &Error{Code: "CannotStartContainerError"}
	ErrCannotStop    = &Error{Code: "CannotStopContainerError"}
	ErrCannotRemove  = &Error{Code: "CannotRemoveContainerError"}
	ErrCannotInspect = &Error{Code: "CannotInspectContainerError"}
	ErrCannotList    = &Error{Code: "CannotListContainersError"}
	ErrOutOfMemory   = &Error{Code: "OutOfMemoryError"}
	ErrTimeout       = &Error{Code: "DockerTimeoutError"}
	ErrVanished      = &Error{Code: "ContainerVanishedError"}
	ErrDockerState   = &Error{Code: "DockerStateError"}
)

func (e *Error) Error() string {
	if e.Err == nil {
		return e.Code
	}
	return e.Code + ": " + e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }

// Is says that e has target's name; target is one of the variables above.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Err == nil && t.Code == e.Code
}

// as gives err the name kind, unless it already has one.
func (kind *Error) as(err error) error {
	if e := (*Error)(nil); errors.As(err, &e) {
		return err
	}
	return &Error{Code: kind.Code, Err: err}
}

func (kind *Error) errorf(format string, args ...any) error {
	return &Error{Code: kind.Code, Err: fmt.Errorf(format, args...)}
}

// call runs one request to Docker under its own limit. A limit reached is
// DockerTimeoutError with ECS's sentence, a container that is gone is
// ContainerVanishedError, and everything else gets the name kind. A context
// that the caller cancelled is passed on as it is.
func call(ctx context.Context, kind *Error, limit time.Duration, transition string, do func(context.Context) error) error {
	begun := time.Now()
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := do(bounded)
	switch {
	case err == nil:
		return nil
	case errors.Is(ctx.Err(), context.Canceled):
		return ctx.Err()
	case bounded.Err() != nil:
		waited := time.Since(begun).Round(time.Second)
		return ErrTimeout.errorf("Could not transition to %s; timed out after waiting %s (%w)", transition, waited, context.DeadlineExceeded)
	case errdefs.IsNotFound(err) && kind != ErrCannotCreate && kind != ErrCannotPull: // there it is the image
		return ErrVanished.as(err)
	default:
		return kind.as(err)
	}
}
