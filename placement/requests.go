package placement

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/placement/fleet"
)

// Limits of requests, the first two as ECS has them.
const (
	mostTasksAtOnce = 100
	mostDesired     = 5000
	mostStopAfter   = 24 * 60 * 60 // seconds
)

// names are what ECS takes for a service.
var names = regexp.MustCompile(`^[A-Za-z0-9_-]{1,255}$`)

// newID is a task's id: 32 hex digits.
func newID() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// register takes a definition as it came in a request.
func (l *leader) registerDefinition(data []byte) (string, error) {
	if len(data) == 0 {
		return "", refuse(http.StatusBadRequest, "taskDefinition: it is missing; give a task definition as RegisterTaskDefinition takes it")
	}
	d, err := l.fleet.Register(data, l.now)
	if err != nil {
		return "", refuse(http.StatusBadRequest, "%w", err)
	}
	return d.Key(), nil
}

// runTask accepts standalone tasks. The same client token again gives the same tasks,
// and starts those that a crash cut off.
func (l *leader) runTask(in api.RunTask) (api.RunTaskAnswer, error) {
	count := cmp.Or(in.Count, 1)
	if count < 1 || count > mostTasksAtOnce {
		return api.RunTaskAnswer{}, refuse(http.StatusBadRequest, "count: %d is not within 1 and %d", in.Count, mostTasksAtOnce)
	}
	if len(in.ClientToken) > 64 {
		return api.RunTaskAnswer{}, refuse(http.StatusBadRequest, "clientToken: it has %d characters; at most 64", len(in.ClientToken))
	}
	var all []*fleet.Task
	if in.ClientToken != "" {
		for _, t := range l.fleet.OfToken(in.ClientToken) {
			if l.fleet.Task(t.Replaces) == nil { // the first of its line that is known still
				all = append(all, t)
			}
		}
	}
	var key string
	if len(all) > 0 { // asked again: there may be a newer revision by now
		key = all[0].Definition
		d, err := l.fleet.Read(in.Definition)
		if have := l.fleet.Definition(key); err != nil || have != nil && have.Hash != d.Hash { // one that is set aside is no other one
			return api.RunTaskAnswer{}, refuse(http.StatusConflict, "clientToken: %q was used for %s, which is another definition; use another one", in.ClientToken, key)
		}
	} else {
		var err error
		if key, err = l.registerDefinition(in.Definition); err != nil {
			return api.RunTaskAnswer{}, err
		}
	}
	// Past this time some may be forgotten, and are not missing.
	for len(all) < count && (len(all) == 0 || l.now.Sub(all[0].CreatedAt) < keptStopped) {
		t := &fleet.Task{ID: newID(), Definition: key, Reschedule: in.Reschedule, ClientToken: in.ClientToken,
			Desired: api.StatusRunning, LastStatus: api.StatusPending, CreatedAt: l.creation()}
		l.putTask(t)
		l.say("task", t.ID, "", "", "accepted: %s", key)
		all = append(all, t)
	}
	l.touched.place = true
	var out api.RunTaskAnswer
	for _, t := range all {
		out.Tasks = append(out.Tasks, l.showTask(t))
	}
	return out, nil
}

// findTask is the one task whose id begins with prefix.
func (l *leader) findTask(prefix string) (*fleet.Task, error) {
	if t := l.fleet.Task(prefix); t != nil {
		return t, nil
	}
	var found *fleet.Task
	for _, t := range l.fleet.Tasks() {
		if prefix != "" && strings.HasPrefix(t.ID, prefix) {
			if found != nil {
				return nil, refuse(http.StatusConflict, "task %q: more than one task begins with it; give more of the id", prefix)
			}
			found = t
		}
	}
	if found == nil {
		return nil, refuse(http.StatusNotFound, "task %q: there is no such task; `berth ps --all` lists them", prefix)
	}
	return found, nil
}

// stopByOperator ends a task. One of a service is started anew by its service; the
// line of a rescheduled one ends.
func (l *leader) stopByOperator(id string) error {
	t, err := l.findTask(id)
	if err != nil {
		return err
	}
	next := *t
	next.Reschedule = false
	if t.Desired == api.StatusStopped {
		if t.Reschedule && len(l.fleet.Successors(t.ID)) == 0 {
			l.putTask(&next) // it is moved: it ends, and is not started elsewhere
		}
		return nil
	}
	l.stopTask(&next, api.StopUserInitiated, "stopped by an operator")
	l.settle(&next)
	return nil
}

// createService makes a service. What a service is already is that service.
func (l *leader) createService(in api.Service) (api.Service, error) {
	var none api.Service
	if !names.MatchString(in.Name) {
		return none, refuse(http.StatusBadRequest, "serviceName: %q is not 1 to 255 letters, digits, hyphens and underscores", in.Name)
	}
	s := fleet.Service{Name: in.Name, Desired: in.DesiredCount, MinHealthyPercent: in.MinimumHealthyPercent, MaximumPercent: in.MaximumPercent,
		CreatedAt: l.now}
	if err := checkService(&s, in.StopAfterSeconds); err != nil {
		return none, err
	}
	old := l.fleet.Service(in.Name)
	if old != nil && old.Deleted {
		return none, refuse(http.StatusConflict, "serviceName: %q is being deleted, its tasks still stop; try again when `berth service ls` shows it no longer", in.Name)
	}
	key, err := l.registerDefinition(in.Definition)
	if err != nil {
		return none, err
	}
	s.Definition = key
	if old != nil {
		if old.Definition != s.Definition || old.Desired != s.Desired || old.MinHealthyPercent != s.MinHealthyPercent || old.MaximumPercent != s.MaximumPercent || old.StopAfter != s.StopAfter {
			return none, refuse(http.StatusConflict, "serviceName: there is a service %q already, and it is another one; `berth service update` changes it", in.Name)
		}
		return l.showService(old), nil
	}
	l.fleet.PutService(&s)
	l.touched.services[s.Name] = true
	l.say("service", s.Name, "", s.Name, "created: %s of %s", count(s.Desired, "task"), s.Definition)
	return l.showService(&s), nil
}

// checkService checks a service, and sets its StopAfter to a number of seconds.
func checkService(s *fleet.Service, stopAfter int) error {
	switch {
	case s.Desired < 0 || s.Desired > mostDesired:
		return refuse(http.StatusBadRequest, "desiredCount: %d is not within 0 and %d", s.Desired, mostDesired)
	case s.MinHealthyPercent < 0 || s.MinHealthyPercent > 100:
		return refuse(http.StatusBadRequest, "minimumHealthyPercent: %d is not within 0 and 100", s.MinHealthyPercent)
	case s.MaximumPercent < 100 || s.MaximumPercent > 1000:
		return refuse(http.StatusBadRequest, "maximumPercent: %d is not within 100 and 1000", s.MaximumPercent)
	case stopAfter < 0 || stopAfter > mostStopAfter:
		return refuse(http.StatusBadRequest, "disconnectStopAfterSeconds: %d is not within 0 and %d", stopAfter, mostStopAfter)
	}
	s.StopAfter = time.Duration(stopAfter) * time.Second
	return nil
}

// count is a number of things, in words.
func count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

func (l *leader) findService(name string) (*fleet.Service, error) {
	s := l.fleet.Service(name)
	if s == nil {
		return nil, refuse(http.StatusNotFound, "service %q: there is no such service; `berth service ls` lists them", name)
	}
	return s, nil
}

func (l *leader) updateService(name string, in api.ServiceUpdate) (api.Service, error) {
	var none api.Service
	old, err := l.findService(name)
	if err != nil {
		return none, err
	}
	if old.Deleted {
		return none, refuse(http.StatusConflict, "service %q is being deleted", name)
	}
	next := *old
	if in.DesiredCount != nil {
		next.Desired = *in.DesiredCount
	}
	if in.MinimumHealthyPercent != nil {
		next.MinHealthyPercent = *in.MinimumHealthyPercent
	}
	if in.MaximumPercent != nil {
		next.MaximumPercent = *in.MaximumPercent
	}
	stopAfter := int(old.StopAfter / time.Second)
	if in.StopAfterSeconds != nil {
		stopAfter = *in.StopAfterSeconds
	}
	if err := checkService(&next, stopAfter); err != nil {
		return none, err
	}
	if len(in.Definition) > 0 {
		if next.Definition, err = l.registerDefinition(in.Definition); err != nil {
			return none, err
		}
	}
	if next == *old {
		return l.showService(old), nil
	}
	// A change by a person is a new try.
	next.Failures, next.RetryAt = 0, time.Time{}
	l.fleet.PutService(&next)
	l.touched.services[name] = true
	l.say("service", name, "", name, "updated: %s of %s", count(next.Desired, "task"), next.Definition)
	return l.showService(&next), nil
}

func (l *leader) deleteService(name string) (api.Service, error) {
	old, err := l.findService(name)
	if err != nil {
		return api.Service{}, err
	}
	if !old.Deleted {
		next := *old
		next.Deleted, next.Desired = true, 0
		l.fleet.PutService(&next)
		l.touched.services[name] = true
		l.say("service", name, "", name, "deleted: its tasks are stopped")
		old = &next
	}
	return l.showService(old), nil
}

// drain sets an instance DRAINING, or says what would become of its tasks.
func (l *leader) drain(id string, dry, undo bool) (api.Drain, error) {
	in := l.fleet.Instance(id)
	if in == nil {
		return api.Drain{}, notFound("instance", id)
	}
	if undo {
		if r := l.replacementOf(id); r != nil {
			return api.Drain{}, refuse(http.StatusConflict, "instance %s is being replaced (%s): it cannot be made ACTIVE again", id, r.ID)
		}
		l.setDraining(in, false, "")
		return api.Drain{Instance: id}, nil
	}
	out := api.Drain{Instance: id, Moves: l.planMoves(in)}
	if !dry {
		l.setDraining(in, true, "drained by an operator")
	}
	return out, nil
}

// deregister lets an instance leave the fleet: one that was taken out of service, or
// whose agent will never be heard again. What still runs on it is given up, as ECS's
// DeregisterContainerInstance does with force; an agent that comes back joins anew and
// stops it.
func (l *leader) deregister(id string, force bool) error {
	in := l.fleet.Instance(id)
	if in == nil {
		return notFound("instance", id)
	}
	if r := l.replacementOf(id); r != nil {
		return refuse(http.StatusConflict, "instance %s is being replaced (%s) and leaves by itself", id, r.ID)
	}
	if l.connected(id) {
		return refuse(http.StatusConflict, "instance %s: its agent is connected and would join again at once; stop that first (berth-agent purge)", id)
	}
	if n := len(l.fleet.TasksOn(id)); n > 0 && !force {
		return refuse(http.StatusConflict, "instance %s: it has %s that may still run there; drain it and wait, or give force to call that stopped", id, count(n, "task"))
	}
	l.leave(id, "deregistered by an operator")
	return nil
}

// leave takes an instance out of the fleet; what was on it has stopped.
func (l *leader) leave(id, reason string) {
	l.endTasksOn(id, id+" has left the fleet: "+reason, true)
	if l.fleet.Instance(id) != nil {
		l.fleet.DeleteInstance(id)
		l.touched.replacing = true
		l.say("instance", id, id, "", "left the fleet: %s", reason)
	}
	if c := l.agents[id]; c != nil {
		session := c.session // one that is only just there comes again, and joins
		l.after = append(l.after, func() { l.streams.Close(id, session, nil) })
	}
	delete(l.agents, id)
}

// setDraining makes an instance DRAINING or ACTIVE.
func (l *leader) setDraining(in *fleet.Instance, draining bool, reason string) {
	status := api.InstanceActive
	if draining {
		status = api.InstanceDraining
	}
	if in.Status == status {
		return
	}
	next := *in
	next.Status, next.DrainReason = status, reason
	l.fleet.PutInstance(&next)
	l.touchServicesOn(in.ID)
	l.touched.place = true
	l.say("instance", in.ID, in.ID, "", "%s", strings.TrimSuffix(fmt.Sprintf("%s: %s", status, reason), ": "))
}
