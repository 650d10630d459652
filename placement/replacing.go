package placement

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/api/agentpb"
	"github.com/berth-gpu/berth/config"
	"github.com/berth-gpu/berth/placement/fleet"
	"github.com/berth-gpu/berth/placement/replace"
	"github.com/berth-gpu/berth/placement/replace/dev"
	"github.com/berth-gpu/berth/placement/store"
)

// keptReplacements is how many that are over are kept, to be shown and for the storm
// guard's count.
const keptReplacements = 200

// providerCall is one call to the provider, in flight or returned.
type providerCall struct {
	action replace.Action
	result *replace.Result // nil: in flight
}

func (l *leader) loadReplacement(r store.Record) error {
	var got replace.Replacement
	if err := json.Unmarshal(r.Data, &got); err != nil {
		return err
	}
	if got.ID != r.Key {
		return fmt.Errorf("id: %q is stored under %q", got.ID, r.Key)
	}
	l.replacements[got.ID] = &got
	return nil
}

// policy is replace's, as the settings have it.
func policy(s *config.Server, when string, below int) replace.Policy {
	p := replace.Default()
	p.When, p.BelowPercent = when, below
	p.AtOncePercent, p.PerHour = s.Replace.AtOnce, s.Replace.PerHour
	p.DrainDeadline, p.JoinTimeout = s.Replace.DrainDeadline, s.Replace.JoinTimeout
	return p
}

// replace begins the replacements that are due, and takes each one that is under way a
// step on.
func (l *leader) replace(ticked bool) {
	if l.machines == nil {
		return
	}
	if l.touched.replacing || ticked {
		l.touched.replacing = false
		l.beginDue()
	}
	for _, id := range slices.Sorted(maps.Keys(l.replacements)) {
		r := l.replacements[id]
		call := l.calls[id]
		if r.Over() || !ticked && (call == nil || call.result == nil) {
			continue
		}
		l.stepReplacement(r, call)
	}
}

func (l *leader) beginDue() {
	in := replace.DueIn{Policy: l.policy, Machines: l.replaceable(), Replacements: l.allReplacements(), Now: l.now}
	out := in.Do()
	if out.Held != l.held || len(out.Begin) > 0 {
		l.flight.Record("replace.Due", "fleet", in, out)
	}
	if out.Held != l.held && out.Held != "" {
		l.say("replacement", "policy", "", "", "%s", out.Held)
	}
	l.held = out.Held
	for _, b := range out.Begin {
		l.begin(b.Instance, b.Reason, false)
	}
}

// replaceable are the machines as the policy sees them. One that the provider did not
// make is of the fleet and never due: it must not hold up the others.
func (l *leader) replaceable() []replace.Machine {
	all := l.machineStates()
	for i := range all {
		m := &all[i]
		why := replace.Wants(l.policy, *m)
		if why != "" && !l.machines.Made(m.ID) {
			m.Usable, m.Lost = m.GPUs, false
			if l.foreign[m.ID] != why {
				l.foreign[m.ID] = why
				l.say("replacement", m.ID, m.ID, "", "%s should be replaced (%s), and the provider did not make it: replace it by hand", m.ID, why)
			}
		} else {
			delete(l.foreign, m.ID)
		}
	}
	return all
}

func (l *leader) begin(instance, reason string, operator bool) *replace.Replacement {
	r := replace.New(newID(), instance, reason, operator, l.now)
	l.putReplacement(&r)
	l.say("replacement", r.ID, instance, "", "%s is to be replaced: %s", instance, reason)
	return &r
}

func (l *leader) putReplacement(r *replace.Replacement) {
	l.replacements[r.ID] = r
	l.changed = append(l.changed, store.Op{Kind: fleet.KindReplacement, Key: r.ID, Value: r})
}

// machineStates are the machines as the policy sees them.
func (l *leader) machineStates() []replace.Machine {
	var out []replace.Machine
	for _, in := range l.fleet.Instances() {
		out = append(out, machineState(in))
	}
	slices.SortFunc(out, func(a, b replace.Machine) int { return strings.Compare(a.ID, b.ID) })
	return out
}

func machineState(in *fleet.Instance) replace.Machine {
	m := replace.Machine{ID: in.ID, GPUs: len(in.GPUs), Lost: in.Lost}
	for _, g := range in.GPUs {
		if g.Standing != api.GPUFailed {
			m.Usable++
		}
	}
	return m
}

func (l *leader) allReplacements() []replace.Replacement {
	var out []replace.Replacement
	for _, id := range slices.Sorted(maps.Keys(l.replacements)) {
		out = append(out, *l.replacements[id])
	}
	return out
}

func (l *leader) stepReplacement(r *replace.Replacement, call *providerCall) {
	in := replace.StepIn{Replacement: *r, Observation: l.observe(r), Now: l.now, Policy: l.policy}
	if call != nil {
		in.Observation.InFlight, in.Observation.Result = call.result == nil, call.result
	}
	next, actions := replace.Step(in.Replacement, in.Observation, in.Now, in.Policy)
	if call != nil && call.result != nil {
		delete(l.calls, r.ID)
	}
	if reflect.DeepEqual(next, *r) && len(actions) == 0 {
		return
	}
	l.flight.Record("replace.Step", r.ID, in, replace.StepOut{Replacement: next, Actions: actions})
	if next.State != r.State || next.Says != r.Says {
		l.say("replacement", r.ID, r.Instance, "", "%s: %s", next.State, next.Says)
	}
	l.putReplacement(&next)
	for _, a := range actions {
		l.act(&next, a)
	}
	l.present(newcomer(&next))
	if next.Over() {
		l.pruneReplacements()
	}
}

// observe is what is to be seen of a replacement's machines.
func (l *leader) observe(r *replace.Replacement) replace.Observation {
	o := replace.Observation{LeaderSince: l.began.UTC()}
	if in := l.fleet.Instance(r.Instance); in != nil {
		o.Standing, o.Lost = in.Status, in.Lost
		o.Recovered = l.connected(in.ID) && replace.Wants(l.policy, machineState(in)) == ""
		for _, t := range l.fleet.TasksOn(in.ID) {
			if t.LastStatus == api.StatusStopped {
				continue
			}
			o.TasksLeft++
			if t.Desired == api.StatusStopped {
				continue
			}
			o.NotEnding++
			if t.Service != "" || t.Reschedule {
				o.Movable++
			}
		}
	}
	if in := l.fleet.Instance(r.Newcomer()); in != nil {
		o.NewcomerStanding = in.Status
		o.NewcomerJoined = l.connected(in.ID) && len(in.GPUs) > 0
		m := machineState(in)
		if c := l.agents[in.ID]; c != nil {
			health := c.view.Health.OverallStatus
			o.NewcomerJoined = o.NewcomerJoined && health != api.HealthInitializing && health != api.HealthInsufficientData
			o.NewcomerImpaired = health == api.HealthImpaired || m.Usable < m.GPUs
		}
	}
	return o
}

// present tells the fleet whether tasks may be placed on an instance: its agent is
// connected and has stopped what counts as stopped, and it is no newcomer that has yet to
// prove itself, which may be terminated with all that is on it.
func (l *leader) present(id string) {
	awaited := false
	for _, r := range l.replacements {
		awaited = awaited || newcomer(r) == id && (r.State == replace.Launch || r.State == replace.Join || r.State == replace.Discard)
	}
	if now := l.connected(id) && !awaited && len(l.agents[id].over) == 0; now != l.fleet.Connected(id) {
		l.fleet.SetPresence(id, now)
		l.touched.place = true
	}
}

// newcomer is the name of a replacement's newcomer, also while the provider makes it and
// has not returned: its agent may be faster.
func newcomer(r *replace.Replacement) string {
	if id := r.Newcomer(); id != "" || r.Over() || len(r.Newcomers) == 0 {
		return id
	}
	return dev.Name(r.Newcomers[len(r.Newcomers)-1].Token)
}

// connected says whether an agent's stream is open and its full report has come.
func (l *leader) connected(id string) bool {
	c := l.agents[id]
	return c != nil && c.session != 0 && c.full
}

// act does what changes the fleet at once, and leaves the provider's calls to
// callProvider, which makes them once this round is stored.
func (l *leader) act(r *replace.Replacement, a replace.Action) {
	in := l.fleet.Instance(a.Instance)
	switch a.Kind {
	case replace.DoCordon, replace.DoUncordon:
		if in != nil {
			l.setDraining(in, a.Kind == replace.DoCordon, "being replaced: "+r.Reason)
		}
	case replace.DoEndTasks:
		l.endTasksOn(a.Instance, r.Instance+" is replaced: "+r.Reason, false)
	case replace.DoRetire:
		if c := l.agents[a.Instance]; c != nil && c.session != 0 {
			session := c.session
			says := l.retired(a.Instance, c.agentID)
			l.after = append(l.after, func() {
				l.streams.Close(a.Instance, session, &agentpb.Refusal{Code: agentpb.Refusal_RETIRED, Says: says})
			})
		}
	case replace.DoForget:
		l.leave(a.Instance, r.Reason)
	default:
		l.calls[r.ID] = &providerCall{action: a}
		l.toCall = append(l.toCall, r.ID)
	}
}

// endTasksOn stops every task of an instance; dead says that nothing runs there any more.
func (l *leader) endTasksOn(instance, reason string, dead bool) {
	for _, t := range l.fleet.TasksOn(instance) {
		if t.LastStatus == api.StatusStopped {
			continue
		}
		next := *t
		l.takeAway(&next, reason)
		if dead {
			l.stopped(&next)
		} else {
			l.settle(&next)
		}
	}
}

// callProvider makes this round's calls; their results come back through the inbox.
func (l *leader) callProvider() {
	for _, id := range l.toCall {
		a := l.calls[id].action
		l.owned.Go(func() {
			ctx, cancel := context.WithTimeout(l.ctx, l.policy.CallTimeout)
			defer cancel()
			result := replace.Result{Call: a.Call}
			var err error
			switch a.Kind {
			case replace.DoLaunch:
				m, e := l.machines.Launch(ctx, a.Token)
				result.ID, err = m.ID, e
			case replace.DoFind:
				m, found, e := l.machines.Find(ctx, a.Token)
				if found && e == nil && m.PID == 0 { // its making was cut short, with the server that made it: it goes on
					m, e = l.machines.Launch(ctx, a.Token)
				}
				result.ID, result.Found, err = m.ID, found, e
			case replace.DoTerminate:
				err = l.machines.Terminate(ctx, a.Instance)
			}
			if err != nil {
				result.Err = err.Error()
			}
			select {
			case l.inbox <- func() {
				if r := l.replacements[id]; r == nil || r.Over() {
					delete(l.calls, id) // nobody waits for it any more
				} else if c := l.calls[id]; c != nil && c.action.Call == a.Call {
					c.result = &result
				}
			}:
			case <-l.ctx.Done():
			}
		})
	}
	l.toCall = nil
}

// retired says why an agent is never to return, or "".
func (l *leader) retired(instance, agentID string) string {
	for _, r := range l.replacements {
		if r.Retired(instance) {
			return fmt.Sprintf("%s was replaced (%s): its tasks stop, and it is not taken back", instance, r.Reason)
		}
	}
	return ""
}

// replacementOf is the one under way for an instance, or nil.
func (l *leader) replacementOf(instance string) *replace.Replacement {
	for _, r := range l.replacements {
		if r.Instance == instance && !r.Over() {
			return r
		}
	}
	return nil
}

func (l *leader) replaceByOperator(id string) (api.Replacement, error) {
	if l.fleet.Instance(id) == nil {
		return api.Replacement{}, notFound("instance", id)
	}
	if l.machines == nil {
		return api.Replacement{}, refuse(http.StatusConflict, "provider: none is configured that could launch the newcomer; `berth drain %s` moves the tasks off this machine", id)
	}
	if !l.machines.Made(id) {
		return api.Replacement{}, refuse(http.StatusConflict, "instance %s: the provider did not make it and cannot terminate it; `berth drain %s` moves the tasks off this machine", id, id)
	}
	r := l.replacementOf(id)
	switch {
	case r == nil:
		r = l.begin(id, "asked for by an operator", true)
	case !r.Operator: // from now on it is not called off
		next := *r
		next.Operator = true
		r = &next
		l.putReplacement(r)
	}
	return l.showReplacement(r), nil
}

// resume lets the policy go on after newcomers failed alike.
func (l *leader) resume() []api.Replacement {
	for _, r := range replace.Resume(l.allReplacements()) {
		l.putReplacement(&r)
	}
	l.held, l.touched.replacing = "", true
	l.say("replacement", "policy", "", "", "resumed by an operator")
	return l.showReplacements()
}

func (l *leader) showReplacement(r *replace.Replacement) api.Replacement {
	out := api.Replacement{ID: r.ID, Instance: r.Instance, Newcomer: r.Newcomer(), State: string(r.State), Reason: r.Reason, Says: r.Says,
		StartedAt: r.StartedAt, ChangedAt: r.ChangedAt}
	if !r.Over() {
		out.Held = l.held
	}
	return out
}

// pruneReplacements forgets the oldest that are over.
func (l *leader) pruneReplacements() {
	var over []*replace.Replacement
	for _, r := range l.replacements {
		if r.Over() {
			over = append(over, r)
		}
	}
	slices.SortFunc(over, func(a, b *replace.Replacement) int { return a.ChangedAt.Compare(b.ChangedAt) })
	for _, r := range over[:max(0, len(over)-keptReplacements)] {
		if l.now.Sub(r.ChangedAt) < time.Hour {
			continue // the storm guard counts it
		}
		delete(l.replacements, r.ID)
		l.changed = append(l.changed, store.Op{Kind: fleet.KindReplacement, Key: r.ID})
	}
}
