package placement

import (
	"context"
	"time"

	"github.com/berth-gpu/berth/placement/fleet"
	"github.com/berth-gpu/berth/placement/replace"
	"github.com/berth-gpu/berth/placement/store"
)

// What is pure in the loop.
func Groups(changes []fleet.Change, others []store.Op) []store.Group { return groups(changes, others) }
func Newcomer(r *replace.Replacement) string                         { return newcomer(r) }
func Within(at, from, to time.Time) time.Time                        { return within(at, from, to) }

// Contradictions are the fleet's own, and how many tasks, services and instances it has.
func (s *Server) Contradictions(ctx context.Context) ([]string, error) {
	return call(ctx, s, func(l *leader) ([]string, error) { return l.fleet.Contradictions(), nil })
}

// KeptEvents is how many events are kept at least.
const KeptEvents = keptEvents

// Say notes an event, as the loop does.
func (s *Server) Say(ctx context.Context, kind, subject, says string) error {
	_, err := call(ctx, s, func(l *leader) (struct{}, error) {
		l.say(kind, subject, "", "", "%s", says)
		return struct{}{}, nil
	})
	return err
}
