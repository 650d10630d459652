package engine

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berth-gpu/berth/agent/cgroup"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"go.uber.org/zap"
)

// State is a container's, in Docker's words.
type State string

// Docker's states.
const (
	Created    State = "created"
	Running    State = "running"
	Paused     State = "paused"
	Restarting State = "restarting"
	Removing   State = "removing"
	Exited     State = "exited"
	Dead       State = "dead"
)

// Container is one of this agent's containers, as Docker has it now.
type Container struct {
	ID, Name     string
	Labels       Labels
	ImageID      string
	State        State
	ExitCode     int  // of State Exited; 137 after SIGKILL
	OOMKilled    bool // the kernel killed a process of it for memory
	Error        string
	PID          int // of its first process, on the machine; 0 when not running
	CreatedAt    time.Time
	StartedAt    time.Time // zero: never
	FinishedAt   time.Time // zero: never, or running again
	Health       string    // ECS's HEALTHY, UNHEALTHY, UNKNOWN; empty: it has no health check
	RestartCount int
	Ports        []Port
	StopSignal   string // SIGTERM unless its image says otherwise
}

// Port is a port of the container reached through one of the machine's.
type Port struct {
	Container, Host int
	Protocol        string // tcp, udp
}

// Alive says that it has, or may have, processes.
func (c Container) Alive() bool {
	return c.State == Running || c.State == Paused || c.State == Restarting
}

// Started says that it ran at least once.
func (c Container) Started() bool { return !c.StartedAt.IsZero() }

// Reason is why it stopped, in ECS's words: empty when it ended by itself.
func (c Container) Reason() string {
	switch {
	case c.Alive():
		return ""
	case c.OOMKilled && c.ExitCode != 0:
		// On cgroup v1 the kernel tells a whole task of an out-of-memory kill in its
		// parent cgroup, so a sibling that ends with 0 has the flag too.
		return ErrOutOfMemory.Code + ": Container killed due to memory usage"
	case c.State == Dead:
		return ErrDockerState.Code + ": Docker could not remove the container: " + c.Error
	case c.Error != "":
		return ErrCannotStart.Code + ": " + c.Error
	}
	return ""
}

// Limits of single calls to Docker, ECS's where it has one.
const (
	inspectLimit = 30 * time.Second
	listLimit    = time.Minute
	createLimit  = 4 * time.Minute
	startLimit   = 3 * time.Minute
	signalLimit  = 30 * time.Second
	removeLimit  = 5 * time.Minute
	pullLimit    = 2 * time.Hour
)

// Inspect reads one container, by id or name. It need not be one of ours:
// then its Labels are empty.
func (e *Engine) Inspect(ctx context.Context, id string) (Container, error) {
	var c Container
	err := call(ctx, ErrCannotInspect, inspectLimit, "inspected", func(ctx context.Context) error {
		r, err := e.docker.ContainerInspect(ctx, id)
		if err != nil {
			return err
		}
		c, err = fromDocker(r)
		return err
	})
	return c, err
}

// List is every container of the instance, running or not, oldest first. A
// container that vanishes meanwhile is left out; one that cannot be read is
// left out with a warning, so that one bad record hides no other.
func (e *Engine) List(ctx context.Context, instance string) ([]Container, error) {
	var found []container.Summary
	err := call(ctx, ErrCannotList, listLimit, "listed", func(ctx context.Context) (err error) {
		found, err = e.docker.ContainerList(ctx, container.ListOptions{All: true, Filters: byInstance(instance)})
		return err
	})
	if err != nil {
		return nil, err
	}
	list := make([]Container, 0, len(found))
	for _, summary := range found {
		c, err := e.Inspect(ctx, summary.ID)
		switch {
		case errors.Is(err, ErrVanished):
			continue
		case ctx.Err() != nil, errors.Is(err, ErrTimeout):
			return nil, err
		case err == nil:
			_, err = labelsOf(summary.Labels)
		}
		if err != nil {
			e.log.Warn("cannot read a container, leaving it out", zap.String("id", summary.ID), zap.Strings("names", summary.Names), zap.Error(err))
			continue
		}
		list = append(list, c)
	}
	slices.SortFunc(list, func(a, b Container) int {
		if c := a.CreatedAt.Compare(b.CreatedAt); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return list, nil
}

// PIDs is every process of a running container, as the machine numbers them.
func (e *Engine) PIDs(ctx context.Context, id string) ([]int, error) {
	c, err := e.Inspect(ctx, id)
	if err != nil || c.PID == 0 {
		return nil, err
	}
	pids, err := cgroup.Members(c.PID)
	if err != nil {
		// Its first process may have ended since.
		if again, inspectErr := e.Inspect(ctx, id); inspectErr != nil || again.PID != c.PID {
			return nil, inspectErr
		}
		return nil, ErrCannotInspect.as(err)
	}
	return pids, nil
}

func byInstance(instance string) filters.Args {
	return filters.NewArgs(filters.Arg("label", LabelInstance+"="+instance))
}

func fromDocker(r container.InspectResponse) (Container, error) {
	if r.ContainerJSONBase == nil || r.State == nil || r.Config == nil {
		return Container{}, errors.New("docker's answer has no state or no config")
	}
	c := Container{
		ID:           r.ID,
		Name:         strings.TrimPrefix(r.Name, "/"),
		ImageID:      r.Image,
		State:        State(r.State.Status),
		ExitCode:     r.State.ExitCode,
		OOMKilled:    r.State.OOMKilled,
		Error:        r.State.Error,
		PID:          r.State.Pid,
		CreatedAt:    parseTime(r.Created),
		StartedAt:    parseTime(r.State.StartedAt),
		FinishedAt:   parseTime(r.State.FinishedAt),
		RestartCount: r.RestartCount,
		StopSignal:   r.Config.StopSignal,
	}
	if c.StopSignal == "" {
		c.StopSignal = "SIGTERM"
	}
	if c.Alive() {
		c.FinishedAt = time.Time{}
	}
	c.Labels, _ = labelsOf(r.Config.Labels)
	if h := r.State.Health; h != nil {
		c.Health = health(h.Status)
	}
	if r.NetworkSettings != nil {
		for port, bindings := range r.NetworkSettings.Ports {
			for _, b := range bindings {
				host, err := strconv.Atoi(b.HostPort)
				if err != nil {
					continue
				}
				// Docker lists a port once for IPv4 and once for IPv6.
				p := Port{Container: port.Int(), Host: host, Protocol: port.Proto()}
				if !slices.Contains(c.Ports, p) {
					c.Ports = append(c.Ports, p)
				}
			}
		}
		slices.SortFunc(c.Ports, func(a, b Port) int {
			if a.Container != b.Container {
				return a.Container - b.Container
			}
			return a.Host - b.Host
		})
	}
	return c, nil
}

// health is ECS's word for Docker's: "starting" is UNKNOWN there.
func health(docker string) string {
	switch docker {
	case container.Healthy:
		return "HEALTHY"
	case container.Unhealthy:
		return "UNHEALTHY"
	case container.Starting:
		return "UNKNOWN"
	}
	return ""
}

// parseTime reads Docker's times; "0001-01-01T00:00:00Z" is its never.
func parseTime(s string) time.Time {
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil || t.Year() <= 1 {
		return time.Time{}
	}
	return t
}
