package placement

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/berth-gpu/berth/api"
)

// doctor looks at what the server needs and has, and says what to do about what is not
// well. It changes nothing.
func (s *Server) doctor(ctx context.Context) []api.Check {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	store := api.Check{Name: "store", OK: true, Says: "etcd in " + s.settings.DataDir}
	if len(s.settings.Etcd.Endpoints) > 0 {
		store.Says = "etcd at " + strings.Join(s.settings.Etcd.Endpoints, ", ")
	}
	if says := s.store.Problem(); says != "" {
		store.OK, store.Says = false, says // which says what to do
	}
	leads := api.Check{Name: "leader", OK: s.leader.Load() != nil, Says: fmt.Sprintf("this server leads, term %d", s.term.Load())}
	if !leads.OK {
		leads.Says, leads.Do = "nobody leads", "the log says why no leader is elected; the store has to answer"
		if who, err := s.store.Leader(ctx); err == nil && who != "" {
			leads.Warn, leads.Says, leads.Do = true, who+" leads", "ask that one; this server takes over when it ends"
		}
		return []api.Check{store, leads}
	}
	rest, err := call(ctx, s, func(l *leader) ([]api.Check, error) { return l.checks(), nil })
	if err != nil {
		rest = []api.Check{{Name: "loop", Says: "it does not answer: " + err.Error(), Do: "the log says what it waits for, the store most likely"}}
	}
	return append([]api.Check{store, leads}, rest...)
}

// checks are what the leader knows of the fleet's state.
func (l *leader) checks() []api.Check {
	var away []string
	all := l.fleet.Instances()
	for _, in := range all {
		if !l.connected(in.ID) {
			away = append(away, in.ID)
		}
	}
	agents := api.Check{Name: "agents", OK: len(away) == 0, Warn: true, Says: count(len(all), "instance") + ", all connected"}
	if !agents.OK {
		agents.Says = fmt.Sprintf("%d of %s not connected: %s", len(away), count(len(all), "instance"), strings.Join(away, ", "))
		agents.Do = "see to these machines and their agents' logs; `berth deregister` takes one out that will not return"
	}
	pending := l.fleet.Pending()
	placed := api.Check{Name: "placement", OK: len(pending) == 0, Warn: true, Says: "every task has a place"}
	if !placed.OK {
		placed.Says = fmt.Sprintf("%s without a place; the oldest: %s", count(len(pending), "task"), l.whyPending(pending[0]))
		placed.Do = fmt.Sprintf("berth explain %.12s", pending[0].ID)
	}
	replacing := api.Check{Name: "replacement", OK: l.held == "", Warn: true, Says: "nothing holds it up"}
	switch {
	case l.machines == nil:
		replacing.Says = "off: no provider is configured"
	case l.held != "":
		replacing.Says, replacing.Do = l.held, "berth replacements"
	}
	return []api.Check{agents, placed, replacing}
}
