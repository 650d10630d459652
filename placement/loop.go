package placement

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/berth-gpu/berth/placement/fleet"
	"github.com/berth-gpu/berth/placement/replace"
	"github.com/berth-gpu/berth/placement/store"
)

// leader is one term of leadership: all that the loop alone touches, but for inbox
// and ended.
type leader struct {
	*Server
	ctx   context.Context
	term  *store.Term
	owned *sync.WaitGroup // of everything that the term started
	inbox chan func()     // run by the loop, one at a time
	ended chan struct{}   // closed when the loop is over

	fleet   *fleet.Fleet
	began   time.Time
	agents  map[string]*connection // by instance
	now     time.Time              // of this round, as it is stored
	mono    time.Time              // the same, by the clock that no one sets: what agents' silence is counted by
	created time.Time              // of the task that was made last
	awake   time.Time              // since when this process has been able to hear

	policy       replace.Policy
	replacements map[string]*replace.Replacement
	calls        map[string]*providerCall // by replacement: in flight, or returned
	toCall       []string                 // of these, which this round makes
	foreign      map[string]string        // by instance that the provider did not make: why it should be replaced, as it was said
	held         string                   // why the storm guard lets none begin

	touched struct { // what a round has to look at
		services  map[string]bool
		alone     map[string]bool // standalone tasks, by id
		orders    map[string]bool // by instance
		place     bool
		replacing bool // which machines are due
	}
	wakes   map[string]time.Time // by service: when it is to be asked again
	pruned  time.Time
	reasons map[string]string // why a pending task was not placed, by definition, since the last pass
	changed []store.Op        // besides the fleet's records
	after   []func()          // run when the round is stored
	events  eventLog
}

// lead leads until the term is lost or ctx ends.
func (s *Server) lead(ctx context.Context, term *store.Term) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var owned sync.WaitGroup
	l := &leader{Server: s, ctx: ctx, term: term, owned: &owned, inbox: make(chan func(), 1024), ended: make(chan struct{}),
		began: time.Now(), agents: map[string]*connection{}, replacements: map[string]*replace.Replacement{}, policy: s.policy, calls: map[string]*providerCall{}, foreign: map[string]string{}, wakes: map[string]time.Time{}, reasons: map[string]string{}}
	if err := l.load(ctx); err != nil {
		return err
	}
	s.log.Info("leads", zap.Uint64("term", term.Number()), zap.Int("instances", len(l.fleet.Instances())), zap.Int("tasks", len(l.fleet.Tasks())),
		zap.Duration("took", time.Since(l.began)))
	l.began = time.Now()
	s.term.Store(term.Number())
	s.leader.Store(l)
	s.streams.SetTerm(term.Number(), true)
	defer func() {
		s.leader.Store(nil)
		close(l.ended)
		s.streams.SetTerm(term.Number(), false)
		cancel()
		owned.Wait()
	}()
	return l.work(ctx)
}

// load reads everything that is stored. A record that cannot be read was set aside by
// the store, or is here, and never stops the others.
func (l *leader) load(ctx context.Context) error {
	records, aside, err := l.term.Load(ctx)
	if errors.Is(err, store.ErrNewer) {
		return &fatalError{err}
	}
	if err != nil {
		return err
	}
	l.fleet = fleet.New(l.settings.TrustDomain)
	var fresh []store.Aside // set aside here
	for _, r := range records {
		switch r.Kind {
		case fleet.KindReplacement:
			err = l.loadReplacement(r)
		case fleet.KindEvent:
			err = l.events.load(r.Key, r.Data)
		default:
			err = l.fleet.Load(r.Kind, r.Key, r.Data)
		}
		if err == nil {
			continue
		}
		if err := l.term.SetAside(ctx, r, err.Error()); err != nil {
			return err
		}
		fresh = append(fresh, store.Aside{Kind: r.Kind, Key: r.Key, Reason: err.Error()})
	}
	l.fleet.Changes() // loading changed nothing
	l.events.loaded()
	for _, a := range aside {
		l.log.Error("a damaged record is set aside", zap.String("kind", a.Kind), zap.String("key", a.Key), zap.String("why", a.Reason))
	}
	for _, a := range fresh {
		l.say("server", a.Kind+" "+a.Key, "", "", "a damaged record was set aside: %s", a.Reason)
	}
	l.touchAll()
	return nil
}

func (l *leader) touchAll() {
	l.touched.services, l.touched.alone, l.touched.orders = map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, s := range l.fleet.Services() {
		l.touched.services[s.Name] = true
	}
	for _, t := range l.fleet.TasksOf("") {
		l.touched.alone[t.ID] = true
	}
	l.touched.place, l.touched.replacing = true, true
}

// work is the loop. Each turn: take what has happened, then one round.
func (l *leader) work(ctx context.Context) error {
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	lastTick := time.Time{}
	l.wake(time.Now())
	for {
		ticked := l.mono.Sub(lastTick) >= tickEvery
		if ticked {
			lastTick = l.mono
		}
		if err := l.round(ctx, ticked); err != nil {
			return err
		}
		var f func()
		select {
		case <-ctx.Done():
			return nil
		case <-l.term.Lost():
			return store.ErrDeposed
		case f = <-l.inbox:
		case <-tick.C:
		}
		l.wake(time.Now()) // what has happened, happened now
		if f != nil {
			f()
		}
		for more := true; more; {
			select {
			case f := <-l.inbox:
				f()
			default:
				more = false
			}
		}
	}
}

// wake begins a round. A process that was stopped, or waited long for its store, could
// hear no one meanwhile, and holds that against nobody.
func (l *leader) wake(now time.Time) {
	if pause := now.Sub(l.mono); pause > l.settings.Agents.Lease/2 {
		l.awake = now
		if !l.mono.IsZero() {
			l.log.Warn("stood still: agents' leases begin anew", zap.Duration("for", pause))
		}
	}
	l.mono, l.now = now, now.UTC().Truncate(time.Millisecond)
}

// round decides anew from all that is known, stores what changed, and acts on it.
func (l *leader) round(ctx context.Context, ticked bool) error {
	// 1. Who is heard, and who is not.
	if ticked {
		l.presence()
	}
	// 2. Machines that are to be replaced, and how far that is.
	l.replace(ticked)
	// 3. Services and standalone tasks: what is to be started and stopped.
	l.serve(ticked)
	if ticked {
		l.prune()
	}
	// 4. Pending tasks find their GPUs.
	l.place()
	// 5. Stored first; what is not stored is not done.
	if err := l.commit(ctx); err != nil {
		return err
	}
	// 6. Done and answered.
	l.sendOrders()
	l.callProvider()
	for _, f := range l.after {
		f()
	}
	l.after = nil
	return nil
}

// commit stores all that the round has changed, in the order in which it was changed.
func (l *leader) commit(ctx context.Context) error {
	select {
	case <-l.term.Lost(): // also where there is nothing to store: others lead, and what is known here is old
		return store.ErrDeposed
	default:
	}
	groups := groups(l.fleet.Changes(), l.changed)
	for _, op := range l.events.ops() {
		groups = append(groups, store.Group{op})
	}
	l.changed = nil
	if len(groups) == 0 {
		return nil
	}
	if err := l.term.Commit(ctx, groups); err != nil {
		return fmt.Errorf("cannot store what has changed: %w", err)
	}
	l.events.stored()
	return nil
}

// groups are the changes of a round as they are stored: each by itself, but for a
// replacement, which comes in one piece with the machines that it changed, after all
// else: wherever a crash cuts the round off, its step is done again.
func groups(changes []fleet.Change, others []store.Op) []store.Group {
	with := map[string]int{} // by instance: which of others
	for i, op := range others {
		if r, ok := op.Value.(*replace.Replacement); ok {
			with[r.Instance] = i
			for _, n := range r.Newcomers {
				with[n.ID] = i
			}
		}
	}
	var out []store.Group
	last := make([]store.Group, len(others))
	for _, c := range changes {
		op := store.Op{Kind: c.Kind, Key: c.Key, Value: c.Value}
		if i, ok := with[c.Key]; ok && c.Kind == fleet.KindInstance {
			last[i] = append(last[i], op)
			continue
		}
		out = append(out, store.Group{op})
	}
	for i, op := range others {
		out = append(out, append(last[i], op))
	}
	return out
}
