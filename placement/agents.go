package placement

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/api/agentpb"
	"github.com/berth-gpu/berth/placement/fleet"
)

// connection is what the loop knows of one agent besides its stored record. It
// outlives the agent's streams.
type connection struct {
	session uint64    // of the open stream; 0: none
	agentID string    // as Hello gave it
	heard   time.Time // last, on whatever stream; by the leader's mono
	full    bool      // this stream's full report has come

	view     api.Instance         // as the agent showed itself last
	known    map[string]uint64    // by task: the generation that the agent has reported on this stream
	waits    map[string]string    // by task: what it waits for, as its agent says
	revision uint64               // of the orders sent last on this stream
	sent     map[string]sentOrder // what they were
	over     map[string]bool      // tasks that the agent has and has not stopped, and that hold nothing here any more
}

type sentOrder struct {
	generation uint64
	stop       bool
}

// hello answers an agent that wants to speak for an instance. It is called on the
// stream's own goroutine.
func (s *Server) hello(ctx context.Context, h *agentpb.Hello, session uint64) *agentpb.Refusal {
	refusal, err := call(ctx, s, func(l *leader) (*agentpb.Refusal, error) {
		if ctx.Err() != nil {
			return nil, ctx.Err() // its stream is over already, and nobody will say so
		}
		return l.hello(h, session), nil
	})
	if err != nil {
		return &agentpb.Refusal{Code: agentpb.Refusal_NOT_LEADER, Says: err.Error()}
	}
	return refusal
}

func (l *leader) hello(h *agentpb.Hello, session uint64) *agentpb.Refusal {
	if h.Term > l.term.Number() {
		return &agentpb.Refusal{Code: agentpb.Refusal_NOT_LEADER,
			Says: fmt.Sprintf("term: the agent has obeyed term %d, this leader has %d: its store is older than what the agent has seen; start the server on the newest store", h.Term, l.term.Number())}
	}
	if why := l.retired(h.Instance, h.AgentId); why != "" {
		return &agentpb.Refusal{Code: agentpb.Refusal_RETIRED, Says: why}
	}
	c := l.agents[h.Instance]
	if in := l.fleet.Instance(h.Instance); c == nil && in != nil && in.AgentID != h.AgentId && l.mono.Sub(l.began) < l.settings.Agents.Lease {
		return &agentpb.Refusal{Code: agentpb.Refusal_NAME_IN_USE, Says: fmt.Sprintf("another agent spoke for instance %s before this server led, and may be back within the lease: "+
			"if that one is gone for good, this one is taken then; otherwise give each machine a name of its own (instance in the agent's settings)", h.Instance)}
	}
	if c == nil {
		c = &connection{}
		l.agents[h.Instance] = c
	}
	c.session, c.agentID, c.heard, c.full = session, h.AgentId, l.mono, false
	c.known, c.waits, c.over, c.sent, c.revision = map[string]uint64{}, map[string]string{}, map[string]bool{}, nil, 0
	return nil
}

// report takes one report into the loop. It is called on the stream's own goroutine,
// which reads no further until the loop has it.
func (s *Server) report(ctx context.Context, instance string, session uint64, r *agentpb.Report) {
	l := s.leader.Load()
	if l == nil {
		return
	}
	// What takes time is done here, not in the loop.
	got := decodeReport(r)
	for _, err := range got.bad {
		s.log.Error("an agent's report cannot be read", zap.String("instance", instance), zap.Error(err))
	}
	select {
	case l.inbox <- func() { l.reported(instance, session, got) }:
	case <-l.ended:
	case <-ctx.Done():
	}
}

// gone notes the end of a stream.
func (s *Server) gone(instance string, session uint64, why error) {
	l := s.leader.Load()
	if l == nil {
		return
	}
	select {
	case l.inbox <- func() { l.disconnected(instance, session, why) }:
	case <-l.ended:
	}
}

// report is a decoded agentpb.Report.
type report struct {
	full      bool
	instance  *api.Instance
	tasks     []api.Task
	forgotten []string
	refused   []*agentpb.Refused
	bad       []error
}

func decodeReport(r *agentpb.Report) report {
	out := report{full: r.Full, forgotten: r.Forgotten, refused: r.Refused}
	if len(r.Instance) > 0 {
		out.instance = new(api.Instance)
		if err := json.Unmarshal(r.Instance, out.instance); err != nil {
			out.instance = nil
			out.bad = append(out.bad, fmt.Errorf("instance: %w", err))
		}
	}
	for i, data := range r.Tasks {
		var t api.Task
		if err := json.Unmarshal(data, &t); err != nil {
			out.bad = append(out.bad, fmt.Errorf("tasks[%d]: %w", i, err))
			continue
		}
		t.StoppedReason, t.Reason = bounded(t.StoppedReason), bounded(t.Reason)
		for k := range t.Containers {
			t.Containers[k].Reason = bounded(t.Containers[k].Reason)
		}
		out.tasks = append(out.tasks, t)
	}
	return out
}

// mostWords is how many bytes are kept of one sentence of an agent. Some come from
// Docker and from drivers, and what one machine says must not be more than the store
// takes.
const mostWords = 1024

func bounded(text string) string {
	if len(text) <= mostWords {
		return text
	}
	return strings.ToValidUTF8(text[:mostWords], "") + "..."
}

func (l *leader) disconnected(instance string, session uint64, why error) {
	c := l.agents[instance]
	if c == nil || c.session != session {
		return
	}
	if l.fleet.Instance(instance) == nil {
		delete(l.agents, instance) // it never showed itself: a name, and nothing else
		return
	}
	c.session = 0
	l.present(instance)
	l.say("instance", instance, instance, "", "its agent's stream ended: %v", why)
}

// reported takes a report of an agent.
func (l *leader) reported(instance string, session uint64, r report) {
	c := l.agents[instance]
	if c == nil || c.session != session {
		return // of a stream that is over
	}
	c.heard = l.mono
	if r.full && r.instance == nil {
		says := "the first report of a stream has to show the instance, in words that this server reads: make the versions of berth-agent and berth server the same"
		l.log.Error("an agent's stream is ended", zap.String("instance", instance), zap.String("why", says))
		l.after = append(l.after, func() {
			l.streams.Close(instance, session, &agentpb.Refusal{Code: agentpb.Refusal_INVALID, Says: says})
		})
		return
	}
	if r.instance != nil {
		c.view = *r.instance
		l.register(instance, c, r.instance)
	}
	in := l.fleet.Instance(instance)
	if in == nil {
		return // the machine has not been shown yet: there is nothing to place on
	}
	if r.full {
		c.full = true
		l.touched.orders[instance], l.touched.place = true, true
	}
	for i := range r.tasks {
		c.known[r.tasks[i].Name] = r.tasks[i].Generation
		l.sawTask(instance, c, &r.tasks[i])
	}
	for _, name := range r.forgotten {
		delete(c.known, name)
		delete(c.over, name)
	}
	if r.full && len(c.over) > 0 {
		l.say("instance", instance, instance, "", "%s that counted as stopped still run there: nothing is placed on it until they have", count(len(c.over), "task"))
	}
	if r.full || len(r.tasks)+len(r.forgotten) > 0 {
		l.present(instance)
	}
	for _, f := range r.refused {
		t := l.fleet.Task(f.Name)
		if t == nil || t.Instance != instance || t.Generation != f.Generation || t.LastStatus == api.StatusStopped {
			continue
		}
		next := *t
		l.stopTask(&next, api.StopTaskFailedToStart, fmt.Sprintf("refused by the agent of %s: %s", instance, bounded(f.Why)))
		l.stopped(&next)
	}
	l.heardAgain(in.ID)
}

// register makes the instance's record what its agent says of the machine.
func (l *leader) register(id string, c *connection, v *api.Instance) {
	old := l.fleet.Instance(id)
	next := fleet.Instance{ID: id, Status: api.InstanceActive, RegisteredAt: l.now}
	if old != nil {
		next = *old
	}
	next.AgentID, next.BootID, next.Version = c.agentID, v.BootID, v.Version
	next.CPU, next.MemoryMiB, next.Ports, next.Attributes = v.Registered.CPU, v.Registered.MemoryMiB, v.ReservedPorts, v.Attributes
	next.GPUs = nil
	for _, g := range v.GPUs {
		next.GPUs = append(next.GPUs, fleet.GPU{ID: g.ID, Index: g.Index, Name: g.Name, TotalMiB: g.TotalMemoryInMiB, MaxClients: g.MaxClients,
			NoSharing: g.NoSharing, Standing: g.Standing, StandingReason: bounded(g.StandingReason)})
	}
	if old != nil && reflect.DeepEqual(*old, next) {
		return
	}
	l.fleet.PutInstance(&next)
	l.touched.place, l.touched.replacing = true, true
	l.touchServicesOn(id)
	switch {
	case old == nil:
		l.say("instance", id, id, "", "joined: %s, agent %s", count(len(next.GPUs), "GPU"), next.Version)
	case old.AgentID != next.AgentID:
		l.say("instance", id, id, "", "another agent speaks for it: what ran under the old one's state is over")
		for _, t := range l.fleet.TasksOn(id) {
			if t.LastStatus != api.StatusStopped {
				gone := *t
				l.takeAway(&gone, "the agent of "+id+" has lost its state")
				l.stopped(&gone)
			}
		}
	}
	for _, g := range next.GPUs {
		was := fleet.GPU{Standing: api.GPUOpen}
		if old != nil {
			if i := slices.IndexFunc(old.GPUs, func(o fleet.GPU) bool { return o.ID == g.ID }); i >= 0 {
				was = old.GPUs[i]
			}
		}
		if was.Standing != g.Standing {
			says := g.Standing
			if g.StandingReason != "" {
				says += ": " + g.StandingReason
			}
			l.say("gpu", g.ID, id, "", "GPU %d is %s", g.Index, says)
		}
	}
}

// sawTask takes an agent's word on one task.
func (l *leader) sawTask(instance string, c *connection, v *api.Task) {
	delete(c.waits, v.Name)
	delete(c.over, v.Name)
	t := l.fleet.Task(v.Name)
	if t == nil || t.Instance != instance || t.Generation != v.Generation || t.LastStatus == api.StatusStopped {
		if v.LastStatus != api.StatusStopped {
			c.over[v.Name] = true
		}
		return // not ours, or over: the orders do not have it, and the agent stops it
	}
	if v.Reason != "" {
		c.waits[v.Name] = v.Reason
	}
	next := *t
	next.Containers = v.Containers
	if v.StartedAt != nil && next.StartedAt.IsZero() {
		next.StartedAt = within(*v.StartedAt, next.PlacedAt, l.now)
	}
	switch v.LastStatus {
	case api.StatusRunning:
		if next.Desired == api.StatusRunning {
			next.LastStatus = api.StatusRunning
		}
	case api.StatusDeactivating, api.StatusStopped:
		if next.Desired == api.StatusRunning {
			// It ended at the agent's own side; its reasons are the first ones.
			l.stopTask(&next, v.StopCode, v.StoppedReason)
			next.Infrastructure = v.Infrastructure
		}
		if v.LastStatus == api.StatusStopped {
			next.StopCode, next.StoppedReason = cmp.Or(next.StopCode, v.StopCode), cmp.Or(next.StoppedReason, v.StoppedReason)
			if v.StoppedAt != nil {
				next.StoppedAt = within(*v.StoppedAt, next.PlacedAt, l.now)
			}
			l.stopped(&next)
			return
		}
	}
	if !reflect.DeepEqual(*t, next) {
		if t.LastStatus != next.LastStatus {
			l.say("task", t.ID, instance, t.Service, "%s on %s", next.LastStatus, instance)
		}
		l.putTask(&next)
	}
}

// within is an agent's time as the server takes it: not before from, and not after to.
// What is decided from how long a task was up must not hang on an agent's clock.
func within(at, from, to time.Time) time.Time {
	at = at.UTC().Truncate(time.Millisecond)
	if at.Before(from) {
		at = from
	}
	if at.After(to) {
		at = to
	}
	return at
}

// heardAgain ends an instance's cut-off.
func (l *leader) heardAgain(id string) {
	in := l.fleet.Instance(id)
	if in.Cutoff.IsZero() && !in.Lost {
		return
	}
	next := *in
	next.Cutoff, next.Lost = time.Time{}, false
	l.fleet.PutInstance(&next)
	l.touched.place, l.touched.replacing, l.touched.orders[id] = true, true, true
	l.touchServicesOn(id)
	l.say("instance", id, id, "", "its agent is heard again after %s", l.now.Sub(in.Cutoff).Round(time.Second))
}

// presence finds the agents that are not heard any more.
func (l *leader) presence() {
	for _, in := range l.fleet.Instances() {
		heard := l.heard(in.ID)
		silent := l.mono.Sub(heard)
		if silent < l.settings.Agents.Lease {
			continue
		}
		next := *in
		if in.Cutoff.IsZero() {
			next.Cutoff = l.now.Add(-silent.Truncate(time.Millisecond))
			l.say("instance", in.ID, in.ID, "", "its agent has not been heard for %s: nothing is placed on it", silent.Round(time.Second))
		}
		if !in.Lost && silent >= l.settings.Agents.Lease+l.settings.Agents.Grace {
			next.Lost = true
			l.say("instance", in.ID, in.ID, "", "its agent has not been heard for %s: its tasks are started elsewhere", silent.Round(time.Second))
		}
		if next.Lost != in.Lost || !next.Cutoff.Equal(in.Cutoff) {
			l.fleet.PutInstance(&next)
			l.touched.replacing = true
		}
		if next.Lost {
			l.lose(&next, silent)
		}
	}
	for _, id := range l.fleet.Absent() {
		l.abandon(id)
	}
}

// abandon ends the tasks on a machine whose record was set aside, as if it had been
// deregistered, unless its agent comes within the time after which it would be lost: then
// it is in the fleet again, with them.
func (l *leader) abandon(id string) {
	silent := l.mono.Sub(l.heard(id))
	for _, t := range l.fleet.TasksOn(id) {
		if silent < l.settings.Agents.Lease+l.settings.Agents.Grace || t.StopAfter > 0 && silent < t.StopAfter+l.stopTime(t) {
			continue
		}
		next := *t
		l.takeAway(&next, id+" is not in the fleet, and its agent has not been heard")
		l.stopped(&next)
	}
}

// heard is when an agent was heard last. A new leader, and one that stood still, has
// heard everybody when it began, so that it counts none as lost before a full grace has
// passed.
func (l *leader) heard(id string) time.Time {
	if c := l.agents[id]; c != nil && c.heard.After(l.awake) {
		return c.heard
	}
	return l.awake
}

// lose marks the tasks of a lost instance as gone: they count no longer, and are
// stopped when their agent returns. A task with stop-after is gone once its agent has
// stopped it by itself, and no sooner.
func (l *leader) lose(in *fleet.Instance, silent time.Duration) {
	for _, t := range l.fleet.TasksOn(in.ID) {
		if t.Gone || t.LastStatus == api.StatusStopped || t.StopAfter > 0 && silent < t.StopAfter+l.stopTime(t) {
			continue
		}
		next := *t
		l.takeAway(&next, fmt.Sprintf("%s is lost: its agent has not been heard since %s", in.ID, in.Cutoff.Format(time.RFC3339)))
		next.Gone = true
		l.putTask(&next)
	}
}

// longestStop stands for the stop timeouts, in seconds, of a definition that was set aside.
const longestStop = 600

// stopTime is how long after its stop-after a task may still run: where the cut goes one
// way alone, its agent has heard the server for up to a lease longer; then come the
// longest stop timeout of its containers (Docker's and berth's default is 30 s) and
// some room for the kill.
func (l *leader) stopTime(t *fleet.Task) time.Duration {
	longest := int32(longestStop)
	if def := l.fleet.Parsed(t.Definition); def != nil {
		longest = 0
		for _, c := range def.ContainerDefinitions {
			if c.StopTimeout == nil {
				longest = max(longest, 30)
			} else {
				longest = max(longest, *c.StopTimeout)
			}
		}
	}
	return l.settings.Agents.Lease + time.Duration(longest)*time.Second + 10*time.Second
}

// sendOrders tells each agent what is wanted of it, where that has changed.
func (l *leader) sendOrders() {
	for _, id := range slices.Sorted(maps.Keys(l.touched.orders)) {
		c := l.agents[id]
		if c == nil || c.session == 0 || !c.full {
			delete(l.touched.orders, id)
			continue
		}
		orders, sent := l.orders(id, c)
		if c.revision == 0 || !maps.Equal(sent, c.sent) {
			c.revision++
			orders.Revision = c.revision
			c.sent = sent
			l.streams.Send(id, c.session, orders)
		}
		delete(l.touched.orders, id)
	}
}

// orders are all that is wanted of an instance.
func (l *leader) orders(id string, c *connection) (*agentpb.Orders, map[string]sentOrder) {
	out, sent := &agentpb.Orders{}, map[string]sentOrder{}
	for _, t := range l.fleet.TasksOn(id) {
		if t.LastStatus == api.StatusStopped {
			continue
		}
		w := &agentpb.Wanted{Name: t.ID, Generation: t.Generation, Gpus: t.GPUs, StopAfterMs: uint64(t.StopAfter.Milliseconds())}
		// Of a definition that was damaged and set aside, what its agent knows runs on, and
		// what it does not know it refuses.
		if def := l.fleet.Definition(t.Definition); def != nil {
			w.Hash = def.Hash
			if c.known[t.ID] != t.Generation {
				w.Definition = def.JSON
			}
		}
		if t.Desired == api.StatusStopped {
			w.Stop = &agentpb.Stop{Code: t.StopCode, Reason: t.StoppedReason}
		}
		out.Tasks = append(out.Tasks, w)
		sent[t.ID] = sentOrder{t.Generation, w.Stop != nil}
	}
	return out, sent
}
