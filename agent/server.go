package agent

import (
	"context"
	"fmt"
	"io"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/berth-gpu/berth/agent/engine"
	"github.com/berth-gpu/berth/agent/state"
	"github.com/berth-gpu/berth/api"
)

// Link is how the agent stands with its placement server.
type Link struct {
	Address   string
	Connected bool
	Refused   bool   // by a rule; an operator has to see to it
	Says      string // one sentence
	Do        string // about it
}

// SetLink shows a link in the view and to the doctor.
func (a *Agent) SetLink(l Link) {
	a.link.Store(&l)
	a.poke()
}

// Term is the highest leadership term whose orders were obeyed; 0: none.
func (a *Agent) Term() uint64 { return a.term.Load() }

// Heard says that the placement server has just been heard. Tasks with StopAfter
// live by it.
func (a *Agent) Heard() { a.contact.hear(sinceBoot()) }

// Logs is what a container of the newest start of a name wrote, or the task's only
// container where none is named. tail is in lines, 0 for all. The reader must be
// closed.
func (a *Agent) Logs(ctx context.Context, name, container string, follow bool, tail int) (io.ReadCloser, error) {
	id, err := call(ctx, a, func() (string, error) {
		var newest *task
		for _, t := range a.tasks {
			if t.rec.Name == name && (newest == nil || newest.rec.Generation < t.rec.Generation) {
				newest = t
			}
		}
		if newest == nil {
			return "", fmt.Errorf("task %q: it is not on this machine, or its containers were removed task.cleanupAfter its end", name)
		}
		return newest.logsOf(container)
	})
	if err != nil {
		return nil, err
	}
	return a.docker.Logs(ctx, id, engine.LogOptions{Follow: follow, Tail: tail})
}

// loadServer reads what is stored of the placement server.
func (a *Agent) loadServer() error {
	id, err := a.store.AgentID()
	if err != nil {
		return err
	}
	term, err := a.store.Term()
	if err != nil {
		return err
	}
	a.agentID = id
	a.term.Store(term)
	if a.heardAt, err = a.store.Heard(); err != nil {
		return err
	}
	a.contact.last = a.heardAt
	if len(a.settings.Server.Address) > 0 {
		a.link.Store(&Link{Says: "no server has been reached yet"})
	}
	return nil
}

// obey prepares for a placement server's order, or refuses it whole.
func (a *Agent) obey(o Order) error {
	term := a.term.Load()
	if o.Term < term {
		return fmt.Errorf("%w: %d, and %d was obeyed already", ErrOldTerm, o.Term, term)
	}
	if o.Term > term {
		if err := a.store.RaiseTerm(o.Term); err != nil {
			return err
		}
		a.term.Store(o.Term)
	}
	a.cutOff() // a silence that ended with this order is not its tasks'
	for _, w := range o.Tasks {
		if w.StopAfter > 0 {
			return a.keepHeard()
		}
	}
	return nil
}

// cutOff ends the tasks that may not outlive the server's silence.
func (a *Agent) cutOff() {
	silence := a.contact.silence(sinceBoot())
	counts := false // a restarted agent would have to know when the server was heard
	for _, t := range a.tasks {
		counts = counts || t.rec.StopAfter > 0 && t.rec.Stopped.IsZero()
		if cutTooLong(&t.rec, silence) {
			a.endTask(t, api.StopInfrastructure, fmt.Sprintf("cut off from the placement server for %s", t.rec.StopAfter), true)
		}
	}
	if counts {
		if err := a.keepHeard(); err != nil {
			a.log.Error("cannot store when the placement server was heard; after a restart the agent may end tasks too early", zap.Error(err))
		}
	}
}

// keepHeard stores when the server was heard last.
func (a *Agent) keepHeard() error {
	last := a.contact.heard()
	if last-a.heardAt < heardEvery {
		return nil
	}
	if err := a.store.PutHeard(last); err != nil {
		return err
	}
	a.heardAt = last
	return nil
}

// awaited says that the placement server still wants a task, or has not said so since
// this agent began: a server that was away must find out how it ended.
func (a *Agent) awaited(rec *state.Task) bool {
	if !rec.Fleet || len(a.settings.Server.Address) == 0 {
		return false
	}
	return a.ordered == nil || a.ordered[rec.Name] == rec.Generation
}

// checkServer is the doctor's.
func (a *Agent) checkServer() api.Check {
	l := a.link.Load()
	if l == nil {
		return api.Check{Name: "server", OK: true, Says: "none is set: tasks come from " + a.settings.TaskDir}
	}
	return api.Check{Name: "server", OK: l.Connected, Says: l.Says, Do: l.Do}
}

// sinceBoot is the time since the boot, suspended time too.
func sinceBoot() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic(err) // no Linux that runs this lacks it
	}
	return time.Duration(ts.Nano())
}
