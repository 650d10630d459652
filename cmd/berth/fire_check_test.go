package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berth-gpu/berth/api"
)

// note is what the test itself did, written down before it did it.
type note struct {
	at   time.Time
	what string // one of the words below
	who  string // what it was done to
}

const (
	noteFault    = "fault"    // who: a GPU, whose daemon, server or client is hurt
	noteDown     = "down"     // who: an instance, or server; killed or stopped
	noteUp       = "up"       // and that is over
	noteAccepted = "accepted" // who: a task's id; the server has answered for it
	noteChanged  = "changed"  // who: a service, or a standalone task that is stopped
)

// exclusive is NVML's number of EXCLUSIVE_PROCESS.
const exclusive = 3

// theServer is what notes call it.
const theServer = "server"

// How long what is allowed for a while is allowed.
const (
	faultExcuses = 90 * time.Second        // a fault may end containers and daemons of its GPU
	startWindow  = 30 * time.Second        // between the gate and Docker's start, on a busy machine
	startSamples = 30                      // of which at least so many samples are
	foundWithin  = 30 * time.Second        // a process past MPS is found, and its container ended
	keptStopped  = time.Hour - time.Minute // the server keeps a stopped task an hour
	settleTime   = 45 * time.Second        // an end has its reason at the server by then, two copies are one
)

// witness checks invariants 1 to 6 over samples and notes, in order of time. It is pure:
// the same samples and notes give the same violations.
type witness struct {
	lost time.Duration // an agent that is away for so long excuses that its tasks move

	total      map[string]int64     // by GPU: MiB it can give, as the server last said
	home       map[string]string    // by GPU: its instance
	faults     map[string]time.Time // by GPU: when it was hurt last
	hurt       map[string]time.Time // by instance: when one of its GPUs was
	down       map[string]time.Time // who is away, since when
	up         map[string]time.Time // who was away, when that was over
	away       map[string]time.Time // who was away for longer than lost, until when (zero: still)
	changed    map[string]time.Time // by service or task, the first time
	accepted   map[string]time.Time // by task
	daemons    map[string]procKey   // by GPU
	daemonSeen map[string]time.Time // by GPU: when a daemon and a server were there last
	without    map[string]int       // samples since
	ending     map[string]bool      // instances that are terminated, or gone
	leaving    map[string]time.Time // instances that drain, since when
	main       map[string]procKey   // by container: its process
	before     map[string]seenContainer
	beforeAt   time.Time
	ended      []seenEnd
	tasks      map[string]api.Task   // as the server said last
	term       uint64                // its
	answered   time.Time             // when that was
	owner      map[string]string     // by container: its task at the server, once it was shown
	twice      map[string]time.Time  // by task: since when it runs beside the one whose place it takes
	desired    map[string]int        // by service, as the server said last
	past       map[procKey]time.Time // processes past MPS, since when
	started    map[string]string     // by container: Docker's StartedAt
	said       map[string]time.Time
	samples    int
	longest    time.Duration // between two samples
	answers    int
}

type seenEnd struct {
	c  seenContainer
	at time.Time
}

func newWitness(lost time.Duration) *witness {
	return &witness{lost: lost, total: map[string]int64{}, home: map[string]string{}, faults: map[string]time.Time{}, hurt: map[string]time.Time{},
		down: map[string]time.Time{}, up: map[string]time.Time{}, away: map[string]time.Time{}, changed: map[string]time.Time{}, accepted: map[string]time.Time{},
		daemons: map[string]procKey{}, daemonSeen: map[string]time.Time{}, without: map[string]int{}, ending: map[string]bool{}, leaving: map[string]time.Time{}, main: map[string]procKey{},
		before: map[string]seenContainer{}, tasks: map[string]api.Task{}, owner: map[string]string{}, twice: map[string]time.Time{}, past: map[procKey]time.Time{}, said: map[string]time.Time{}, desired: map[string]int{}, started: map[string]string{}}
}

func (w *witness) note(n note) {
	switch n.what {
	case noteFault:
		w.faults[n.who] = n.at
		w.hurt[w.home[n.who]] = n.at
	case noteDown:
		if w.down[n.who].IsZero() {
			w.down[n.who] = n.at
		}
	case noteUp:
		if since := w.down[n.who]; !since.IsZero() && n.at.Sub(since) >= w.lost {
			w.away[n.who] = n.at
		}
		delete(w.down, n.who)
		w.up[n.who] = n.at
	case noteAccepted:
		w.accepted[n.who] = n.at
	case noteChanged:
		if w.changed[n.who].IsZero() {
			w.changed[n.who] = n.at
		}
	}
}

// see takes one sample and says what it violates.
func (w *witness) see(s sample) (bad []string) {
	say := func(format string, args ...any) { // once, though it lasts
		text := fmt.Sprintf(format, args...)
		if key := text[:min(len(text), 60)]; s.At.Sub(w.said[key]) > time.Minute {
			w.said[key] = s.At
			bad = append(bad, text)
		}
	}
	w.samples++
	if !w.beforeAt.IsZero() {
		w.longest = max(w.longest, s.At.Sub(w.beforeAt))
	}
	w.seeMachines(s, say)
	w.seeServer(s, say)
	asked := len(s.Trouble) == 0 // otherwise Docker gave no list
	if asked {
		w.seeSums(s, say)
	}
	w.seeGPUs(s, say)
	if asked {
		w.seeContainers(s, say)
	}
	w.settle(s.At, say)
	w.beforeAt = s.At
	return bad
}

type sayer func(format string, args ...any)

// seeMachines: an agent ends only when it was killed or its machine is taken away.
func (w *witness) seeMachines(s sample, say sayer) {
	there := map[string]bool{}
	for _, m := range s.Machines {
		there[m.ID] = true
		if m.Ending {
			w.ending[m.ID] = true
		}
		for _, g := range m.GPUs {
			w.home[g] = m.ID
		}
		// A sample may come later than the word that the agent is up again.
		if m.PID != 0 && !m.Alive && !m.Ending && w.down[m.ID].IsZero() && s.At.After(w.up[m.ID]) {
			say("5: the agent of %s (pid %d) has ended, and nobody killed it", m.ID, m.PID)
		}
	}
	for _, id := range w.home {
		if !there[id] {
			w.ending[id] = true
		}
	}
}

// excused says whether something of the test's excuses that what runs on a GPU of an
// instance comes to an end.
func (w *witness) excused(gpus, instance string, now time.Time) bool {
	for _, g := range strings.Split(gpus, ",") {
		if at, ok := w.faults[g]; ok && now.Sub(at) < faultExcuses {
			return true
		}
	}
	if w.ending[instance] || !w.leaving[instance].IsZero() {
		return true
	}
	// A server that was away excuses nothing: it has to give agents a full grace first.
	if since, ok := w.down[instance]; ok && now.Sub(since) >= w.lost {
		return true
	}
	until, ok := w.away[instance]
	return ok && now.Sub(until) < faultExcuses
}

// seeServer holds an answer against what was promised before.
func (w *witness) seeServer(s sample, say sayer) {
	a := s.Server
	if a == nil {
		return
	}
	w.answers++
	for _, in := range a.Instances {
		for _, g := range in.GPUs {
			if g.TotalMemoryInMiB > 0 {
				w.total[g.ID] = g.TotalMemoryInMiB
			}
			w.home[g.ID] = in.Name
			if g.RemainingMemoryInMiB < 0 {
				say("1: the server has GPU %s over by %d MiB", g.ID, -g.RemainingMemoryInMiB)
			}
		}
		if in.Status == api.InstanceDraining {
			if w.leaving[in.Name].IsZero() {
				w.leaving[in.Name] = a.From
				if w.hurt[in.Name].IsZero() && !w.wasAway(in.Name, s.At) {
					say("5: %s is drained, and nothing was done to it", in.Name)
				}
			}
		} else {
			delete(w.leaving, in.Name)
		}
	}
	now := map[string]api.Task{}
	sums, modes := map[string]int64{}, map[string]string{}
	for _, t := range a.Tasks {
		now[t.ID] = t
		for _, c := range t.Containers {
			if was, known := w.owner[c.RuntimeID]; known && was != t.ID {
				say("4: container %.12s is task %s's and task %s's", c.RuntimeID, was, t.ID)
			}
			if c.RuntimeID != "" {
				w.owner[c.RuntimeID] = t.ID
			}
		}
	}
	for _, t := range a.Tasks {
		old, known := w.tasks[t.ID]
		switch {
		case known && old.Generation != 0 && t.Generation != old.Generation:
			say("4: task %s had generation %d and has %d", t.ID, old.Generation, t.Generation)
		case known && old.LastStatus == api.StatusStopped && t.LastStatus != api.StatusStopped:
			say("4: task %s was STOPPED and is %s", t.ID, t.LastStatus)
		case known && old.Instance != "" && t.Instance != old.Instance:
			say("4: task %s was on %s and is on %q", t.ID, old.Instance, t.Instance)
		case t.LastStatus == api.StatusStopped && (t.StopCode == "" || t.StoppedReason == ""):
			say("4: task %s is STOPPED without a reason (%q, %q)", t.ID, t.StopCode, t.StoppedReason)
		case t.LastStatus == api.StatusPending && t.Instance == "" && t.Reason == "":
			say("4: task %s waits without a reason", t.ID)
		case t.Instance != "" && t.Generation == 0:
			say("4: task %s is placed on %s without a generation", t.ID, t.Instance)
		}
		if t.LastStatus == api.StatusStopped {
			continue
		}
		cap := capOf(t.Family)
		for _, g := range t.GPUIDs {
			mode := api.ModeNvidiaMPS
			if cap == 0 {
				mode = api.ModeDedicated
			}
			if was := modes[g]; was != "" && (was != mode || mode == api.ModeDedicated) {
				say("2: the server has GPU %s as %s and as %s", g, was, mode)
			}
			modes[g] = mode
			if sums[g] += cap; w.total[g] > 0 && sums[g] > w.total[g] {
				say("1: the server has %d MiB of tasks on GPU %s, which gives %d", sums[g], g, w.total[g])
			}
		}
	}
	if a.Term != 0 && a.Term < w.term { // 0: it did not lead when it was asked first
		say("4: the server's term was %d and is %d", w.term, a.Term)
	}
	w.term = max(w.term, a.Term)
	for id, t := range w.tasks { // what stopped an hour ago may go
		if _, there := now[id]; !there && t.StoppedAt != nil && a.To.Sub(*t.StoppedAt) > keptStopped {
			delete(w.accepted, id)
			delete(w.tasks, id)
		}
	}
	for id, at := range w.accepted {
		if _, there := now[id]; !there && a.From.After(at) {
			say("4: task %s was accepted %s ago and the server does not know it", id, s.At.Sub(at).Round(time.Millisecond))
		}
	}
	for id, t := range w.tasks {
		if _, there := now[id]; !there {
			say("4: the server has forgotten task %s (%s)", id, t.LastStatus)
		}
	}
	w.seeCopies(a, now, s.At, say)
	w.tasks, w.answered = now, a.To
}

// seeCopies: a task and the one that takes its place run together for a while at most,
// and never a third; no service has more than it may have.
func (w *witness) seeCopies(a *seenServer, now map[string]api.Task, at time.Time, say sayer) {
	both := map[string]bool{}
	of := map[string]int{}
	for _, t := range now {
		if t.LastStatus != api.StatusRunning {
			continue
		}
		of[t.Group]++
		old, known := now[t.Replaces]
		if t.Replaces == "" || !known || old.LastStatus != api.StatusRunning {
			continue
		}
		both[t.ID] = true
		if w.twice[t.ID].IsZero() {
			w.twice[t.ID] = at
		}
		if older, known := now[old.Replaces]; known && older.LastStatus == api.StatusRunning {
			say("4: three tasks run in one place: %s, %s, %s", older.ID, old.ID, t.ID)
		}
		if d := at.Sub(w.twice[t.ID]); d > settleTime && w.down[theServer].IsZero() {
			say("4: for %s two tasks run in one place: %s on %s, %s on %s", d, old.ID, old.Instance, t.ID, t.Instance)
		}
	}
	for id := range w.twice {
		if !both[id] {
			delete(w.twice, id)
		}
	}
	if a.To.Sub(a.From) > time.Second {
		return // services and tasks may be of different times
	}
	for _, s := range a.Services {
		if n := of["service:"+s.Name]; n > (max(s.DesiredCount, w.desired[s.Name])*s.MaximumPercent+99)/100 {
			say("4: %d tasks of service %s run, of %d at %d %%", n, s.Name, s.DesiredCount, s.MaximumPercent)
		}
		w.desired[s.Name] = s.DesiredCount
	}
}

func (w *witness) wasAway(who string, now time.Time) bool {
	since, ok := w.down[who]
	return ok && now.Sub(since) >= w.lost || !w.away[who].IsZero()
}

// lineOf is the first task of those that took each other's place.
func lineOf(all map[string]api.Task, t api.Task) string {
	for range 1000 {
		before, known := all[t.Replaces]
		if t.Replaces == "" || !known {
			break
		}
		t = before
	}
	return t.ID
}

// capOf is the cap that a family of this test names: name-MiB.
func capOf(family string) int64 {
	_, mib, _ := strings.Cut(family, "-")
	n, _ := strconv.ParseInt(mib, 10, 64)
	return n
}

// seeSums: what runs on a GPU is within what it gives, and of one kind. Docker may call a
// container running whose processes have ended: those that live count.
func (w *witness) seeSums(s sample, say sayer) {
	containers := map[string]seenContainer{}
	for _, c := range s.Containers {
		containers[c.ID] = c
	}
	sums, whole := map[string]int64{}, map[string]string{}
	counted := map[string]bool{}
	for _, p := range s.Procs {
		c, ours := containers[p.Container]
		if p.Kind != "client" || !ours || counted[c.ID] {
			continue
		}
		counted[c.ID] = true
		limit := capOf(c.Family)
		if c.GPUs != "" && c.CapMiB != limit {
			say("3: container %.12s of family %s has a cap of %d MiB", c.ID, c.Family, c.CapMiB)
		}
		for g := range strings.SplitSeq(c.GPUs, ",") {
			if g == "" {
				continue
			}
			if limit == 0 {
				if other := whole[g]; other != "" {
					say("2: containers %.12s and %.12s both have GPU %s whole", c.ID, other, g)
				}
				whole[g] = c.ID
			}
			sums[g] += limit
		}
	}
	for g, sum := range sums {
		if sum > 0 && whole[g] != "" {
			say("2: GPU %s is shared (%d MiB) and container %.12s has it whole", g, sum, whole[g])
		}
		if w.total[g] > 0 && sum > w.total[g] {
			say("1: containers on GPU %s have %d MiB, it gives %d", g, sum, w.total[g])
		}
	}
}

// seeGPUs: nothing runs past MPS on a GPU that is shared, and daemons stay what they are.
func (w *witness) seeGPUs(s sample, say sayer) {
	byContainer := map[string]seenContainer{}
	for _, c := range s.Containers {
		byContainer[c.ID] = c
	}
	clients, past := map[string]bool{}, map[string]seenProc{}
	daemons, servers := map[string]procKey{}, map[string]bool{}
	for _, p := range s.Procs {
		switch p.Kind {
		case "daemon":
			if other, two := daemons[p.GPU]; two {
				say("3: two daemons of GPU %s: %d and %d", p.GPU, other.pid, p.PID)
			}
			daemons[p.GPU] = procKey{p.PID, p.Start}
		case "server":
			servers[p.GPU] = true
		case "client":
			for _, h := range p.Holds {
				if h.Kind == "M" {
					clients[h.GPU] = true
				} else {
					past[h.GPU] = p
				}
			}
		}
	}
	for key := range w.past {
		if !slices.ContainsFunc(s.Procs, func(p seenProc) bool { return key == procKey{p.PID, p.Start} }) {
			delete(w.past, key)
		}
	}
	for g, p := range past {
		c := byContainer[p.Container]
		if _, ours := w.home[g]; !ours || !clients[g] && (c.ID == "" || capOf(c.Family) == 0) {
			continue
		}
		key := procKey{p.PID, p.Start}
		if w.past[key].IsZero() {
			w.past[key] = s.At
		}
		switch {
		// In life it gets an error. A simulated client in a container cannot see the mode.
		case s.Modes[g] != exclusive:
			say("3: process %d of container %.12s (%s) uses GPU %s past MPS, in compute mode %d", p.PID, p.Container, c.Family, g, s.Modes[g])
		case s.At.Sub(w.past[key]) > foundWithin && w.down[w.home[g]].IsZero():
			say("3: process %d of container %.12s (%s) uses GPU %s past MPS for %s", p.PID, p.Container, c.Family, g, s.At.Sub(w.past[key]))
		}
	}
	for g, id := range w.home {
		now, there := daemons[g]
		if was, had := w.daemons[g]; had && (!there || was != now) && !w.ending[id] && s.At.Sub(w.faults[g]) >= faultExcuses {
			say("5: the daemon of GPU %s was pid %d and is %d, and nothing was done to it", g, was.pid, now.pid)
		}
		if there {
			w.daemons[g] = now
		} else {
			delete(w.daemons, g)
		}
		if w.without[g]++; there && servers[g] {
			w.daemonSeen[g], w.without[g] = s.At, 0
		}
	}
}

// seeContainers: a container starts once, on a GPU that is held, and ends with a reason.
func (w *witness) seeContainers(s sample, say sayer) {
	mains := map[string]procKey{}
	for _, p := range s.Procs {
		if old, more := mains[p.Container]; p.Kind == "client" && (!more || p.Start < old.start || p.Start == old.start && p.PID < old.pid) {
			mains[p.Container] = procKey{p.PID, p.Start}
		}
	}
	now := map[string]seenContainer{}
	for _, c := range s.Containers {
		if !c.running() {
			continue
		}
		now[c.ID] = c
		if c.Restarts > 0 {
			say("5: container %.12s of task %s was restarted %d times", c.ID, w.owner[c.ID], c.Restarts)
		}
		if was := w.started[c.ID]; was != "" && c.StartedAt != "" && was != c.StartedAt {
			say("5: container %.12s of task %s was started at %s and again at %s", c.ID, w.owner[c.ID], was, c.StartedAt)
		}
		if c.StartedAt != "" {
			w.started[c.ID] = c.StartedAt
		}
		if was, had := w.main[c.ID]; had && mains[c.ID] != (procKey{}) && mains[c.ID] != was {
			say("5: container %.12s of task %s ran as pid %d and runs as %d", c.ID, w.owner[c.ID], was.pid, mains[c.ID].pid)
		} else if mains[c.ID] != (procKey{}) {
			w.main[c.ID] = mains[c.ID]
		}
		_, ran := w.before[c.ID]
		if !ran {
			// On a machine that stands still, so does the observer: then there are few samples.
			if c.CapMiB > 0 && s.At.Sub(w.daemonSeen[c.GPUs]) > startWindow && w.without[c.GPUs] > startSamples {
				say("3: container %.12s (%s) started on GPU %s, which has had no daemon and server since %s", c.ID, c.Family, c.GPUs, w.daemonSeen[c.GPUs].Format(time.StampMilli))
			}
		} else if mode, known := s.Modes[c.GPUs]; c.CapMiB > 0 && mains[c.ID] == w.main[c.ID] && (!known || mode != exclusive) && !w.ending[c.Instance] {
			say("3: container %.12s (%s) runs on GPU %s in compute mode %d", c.ID, c.Family, c.GPUs, mode)
		}
		t, known := w.tasks[w.owner[c.ID]]
		// Docker was asked after this answer of the server was.
		if known && t.LastStatus == api.StatusStopped && w.answered.Before(s.At) {
			say("4: container %.12s runs, and its task %s is STOPPED: %s", c.ID, t.ID, t.StoppedReason)
		}
		if known && t.Generation != 0 && t.Generation != c.Generation {
			say("4: container %.12s has generation %d of task %s, which has %d", c.ID, c.Generation, t.ID, t.Generation)
		}
	}
	for id, c := range w.before {
		if _, still := now[id]; !still {
			w.ended = append(w.ended, seenEnd{c, s.At})
			delete(w.main, id)
		}
	}
	w.before = now
}

// settle looks for the reasons of containers that have ended.
func (w *witness) settle(now time.Time, say sayer) {
	w.ended = slices.DeleteFunc(w.ended, func(e seenEnd) bool {
		t := w.tasks[w.owner[e.c.ID]]
		service := strings.TrimPrefix(t.Group, "service:")
		asked := func(who string) bool { at, ok := w.changed[who]; return ok && at.Before(e.at) }
		byService := t.ID == "" || t.StopCode == api.StopServiceScheduler
		switch {
		case asked(lineOf(w.tasks, t)) || byService && asked(service), strings.HasPrefix(e.c.Family, "brief-"): // that one ends by itself
			return true
		case w.excused(e.c.GPUs, e.c.Instance, e.at):
			return true
		case now.Sub(e.at) < settleTime:
			return false // the server may say that its machine leaves
		}
		say("5: container %.12s of task %s (%s, GPU %s on %s) ended at %s, and nothing was done to it; the server says %s, %s: %s",
			e.c.ID, t.ID, t.Group, e.c.GPUs, e.c.Instance, e.at.Format(time.StampMilli), t.LastStatus, t.StopCode, t.StoppedReason)
		return true
	})
}
