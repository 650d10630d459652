package engine

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/docker/docker/api/types/events"
	"github.com/docker/docker/api/types/filters"
	"go.uber.org/zap"
)

// Event is a hint that a container of the instance changed. It may come twice,
// late or not at all: Inspect and List tell the truth.
type Event struct {
	Lost   bool // events may be missing before this one: list again; nothing else is set
	ID     string
	Labels Labels
	Action string // Docker's: create, start, oom, die, kill, destroy, health_status, ...
	Health string // ECS's word, of health_status
	Exit   int    // exit code, of die
	Time   time.Time
}

// Backoff between two tries to reach Docker's event stream.
const (
	eventsBackoff    = 100 * time.Millisecond
	eventsMaxBackoff = 5 * time.Second
	eventsQueue      = 1024
)

// Events streams hints about the instance's containers until ctx ends, and
// then closes the channel. It begins with Lost, as does every new connection
// after one broke, and Lost stands for what a slow reader missed: whoever lists
// at each Lost misses nothing.
func (e *Engine) Events(ctx context.Context, instance string) <-chan Event {
	out := make(chan Event, eventsQueue)
	go func() {
		defer close(out)
		for wait := eventsBackoff; ; wait = min(2*wait, eventsMaxBackoff) {
			connected, err := e.follow(ctx, instance, out)
			if ctx.Err() != nil {
				return
			}
			if connected {
				wait = eventsBackoff
			}
			e.log.Warn("cannot read docker's events, retrying", zap.Error(err), zap.Duration("in", wait))
			select {
			case <-time.After(wait):
			case <-ctx.Done():
				return
			}
		}
	}()
	return out
}

// follow reads one connection to its end.
func (e *Engine) follow(ctx context.Context, instance string, out chan Event) (connected bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Docker answers before it subscribes; what happens in between is kept and
	// sent because of since.
	since := time.Now()
	messages, errs := e.docker.Events(ctx, events.ListOptions{
		Since:   strconv.FormatInt(since.Unix(), 10),
		Filters: filters.NewArgs(filters.Arg("type", string(events.ContainerEventType)), filters.Arg("label", LabelInstance+"="+instance)),
	})
	select {
	case err := <-errs:
		return false, err
	default:
	}
	lost := true
	for {
		if lost {
			select {
			case out <- Event{Lost: true}:
				lost = false
			case err := <-errs:
				return true, err
			case <-messages: // stands for itself in Lost
			}
			continue
		}
		select {
		case m := <-messages:
			select {
			case out <- fromMessage(m):
			default: // full: the reader lists once it has caught up
				lost = true
			}
		case err := <-errs:
			return true, err
		}
	}
}

func fromMessage(m events.Message) Event {
	ev := Event{ID: m.Actor.ID, Action: string(m.Action), Time: time.Unix(0, m.TimeNano)}
	ev.Labels, _ = labelsOf(m.Actor.Attributes)
	// "health_status: healthy", "exec_start: /bin/true"
	if action, rest, ok := strings.Cut(ev.Action, ": "); ok {
		ev.Action = action
		if action == string(events.ActionHealthStatus) {
			ev.Health = health(rest)
		}
	}
	ev.Exit, _ = strconv.Atoi(m.Actor.Attributes["exitCode"])
	return ev
}
