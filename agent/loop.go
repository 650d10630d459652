package agent

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/berth-gpu/berth/agent/engine"
	"github.com/berth-gpu/berth/agent/state"
	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/config/taskdef"
	"github.com/berth-gpu/berth/mps"
)

// loop is what Run's goroutine alone touches.
type loop struct {
	ctx   context.Context
	owned *sync.WaitGroup // of everything that Run started

	tasks      map[string]*task
	units      []*unit  // in NVML's order
	unreadable []string // GPUs that NVML counts and cannot read
	capacity   capacity
	order      Order
	ordered    map[string]uint64  // generations in the placement server's newest order, by name; nil: none has come yet
	refused    map[string]refusal // of that order, by name
	heardAt    time.Duration      // since boot: when the placement server was heard, as it is stored
	after      []func()           // run when the round is over

	listDue   bool
	listing   bool
	listAt    time.Time // of the last list that began
	listErr   error
	clock     uint64 // counts lists and ended operations, to tell stale lists
	storeErr  error
	health    api.Health
	strangers map[string]bool // containers of ours that no task knows: true while one is being removed
}

// task is one accepted task in memory.
type task struct {
	rec        state.Task
	stored     state.Task // as it is on disk
	def        *taskdef.Definition
	demand     taskdef.Demand
	seen       map[string]seen
	busy       map[string]*operation
	touched    map[string]uint64 // by container: clock when its last operation ended
	forgetting bool

	waits    string // why its last launch was refused
	retryAt  time.Time
	refusals int
}

// operation is something slow under way for one container.
type operation struct {
	verb    verb
	cancel  context.CancelFunc
	entered bool // a launch that may have passed the gate: it counts as a client
}

const (
	tickEvery   = time.Second
	relistEvery = 30 * time.Second // Docker's events are only hints
	retryFirst  = 100 * time.Millisecond
	retryMost   = 5 * time.Second
)

// work is the agent's loop. Each turn: take what has happened, then one round.
func (a *Agent) work(ctx context.Context) error {
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	for {
		a.round(time.Now())
		select {
		case <-ctx.Done():
			return nil
		case f := <-a.inbox:
			f()
		case <-a.poked:
		case <-tick.C:
		}
		for more := true; more; {
			select {
			case f := <-a.inbox:
				f()
			default:
				more = false
			}
		}
	}
}

// round decides anew from all that is known and begins what follows from it.
func (a *Agent) round(now time.Time) {
	// 1. Ask Docker when a hint or the time says so.
	if !a.listing && (a.listDue || now.Sub(a.listAt) >= relistEvery) {
		a.beginList(now)
	}
	// 2. GPUs that are lost to their tasks.
	a.readHolders()
	a.missing()
	a.drain(now)
	a.cutOff()
	// 3. Each task's next record and actions.
	type decided struct {
		t    *task
		rec  state.Task
		acts []action
	}
	tasks := a.inOrder()
	all := make([]decided, 0, len(tasks)) // does not grow: changed points into it
	var changed []*state.Task
	for _, t := range tasks {
		rec, acts := step(a.look(t, now))
		all = append(all, decided{t, rec, acts})
		if !reflect.DeepEqual(rec, t.stored) {
			changed = append(changed, &all[len(all)-1].rec)
		}
	}
	// 4. Stored first; what cannot be stored is not done.
	a.storeErr = a.store.PutTasks(changed...)
	if a.storeErr != nil {
		a.log.Error("cannot store the tasks, nothing is begun until it works", zap.Error(a.storeErr))
	} else {
		for _, d := range all {
			a.tell(d.t, &d.rec)
			d.t.rec, d.t.stored = d.rec, d.rec
		}
		// 5. Begun.
		for _, d := range all {
			for _, act := range d.acts {
				a.begin(d.t, act)
			}
		}
	}
	a.informHolders()
	// 6. Show it.
	a.publish(now)
	for _, f := range a.after {
		f()
	}
	a.after = nil
}

func (a *Agent) look(t *task, now time.Time) look {
	busy := make(map[string]verb, len(t.busy))
	for name, op := range t.busy {
		busy[name] = op.verb
	}
	return look{rec: t.rec, awaited: a.awaited(&t.rec), def: &t.def.TaskDefinition, seen: t.seen, busy: busy, now: now,
		hold: now.Before(t.retryAt) || t.forgetting, cleanup: a.settings.Task.CleanupAfter, startMax: a.settings.Docker.StartTimeout}
}

// tell logs a task's change of state once.
func (a *Agent) tell(t *task, next *state.Task) {
	if was, is := status(&t.stored), status(next); was != is {
		a.log.Info("task", zap.String("task", t.rec.ID), zap.String("name", t.rec.Name), zap.Uint64("generation", t.rec.Generation),
			zap.String("was", was), zap.String("is", is), zap.String("stopCode", next.StopCode), zap.String("reason", next.StoppedReason))
	}
}

// begin starts one action; its end comes back through the inbox.
func (a *Agent) begin(t *task, act action) {
	switch act.verb {
	case verbForget:
		if !t.forgetting {
			t.forgetting = true
			rec := t.rec
			a.owned.Go(func() { a.forget(rec) })
		}
	case verbLaunch:
		job, err := a.job(t, act.container)
		a.operate(t, act, a.launched, func(ctx context.Context, op *operation) outcome {
			if err != nil {
				return outcome{err: err}
			}
			job.enter = func() error {
				_, err := call(ctx, a, func() (none struct{}, err error) { return none, a.enter(t, op) })
				return err
			}
			return a.launch(ctx, job)
		})
	case verbStop:
		job, _ := a.job(t, act.container) // what is wrong with its GPUs matters to a launch alone
		a.operate(t, act, a.stopped, func(ctx context.Context, _ *operation) outcome { return a.stop(ctx, job) })
	}
}

// operate runs an operation on one container, and gives its outcome to ended, in the loop.
func (a *Agent) operate(t *task, act action, ended func(*task, string, outcome), do func(context.Context, *operation) outcome) {
	ctx, cancel := context.WithCancel(a.ctx)
	op := &operation{verb: act.verb, cancel: cancel}
	t.busy[act.container] = op
	a.owned.Go(func() {
		defer cancel()
		got := do(ctx, op)
		a.post(func() { ended(t, act.container, got) })
	})
}

// ended takes an operation's end into the task.
func (a *Agent) ended(t *task, container string, got outcome) {
	a.clock++
	t.touched[container] = a.clock
	delete(t.busy, container)
	switch {
	case got.removed:
		delete(t.seen, container)
	case got.container != nil:
		t.seen[container] = sight(*got.container)
	}
	a.listDue = true
}

func (a *Agent) launched(t *task, name string, got outcome) {
	a.ended(t, name, got)
	switch {
	case got.err == nil:
		t.waits, t.refusals, t.retryAt = "", 0, time.Time{}
	case got.killed:
		a.endTask(t, api.StopInfrastructure, got.err.Error(), true)
	case got.unsure:
		a.endTask(t, api.StopTaskFailedToStart, got.err.Error(), false)
	case t.rec.Desired == api.StatusStopped: // cancelled; what it left behind is stopped next
	case got.refused || a.ctx.Err() != nil:
		t.waits = got.err.Error()
		wait := min(retryFirst<<min(t.refusals, 10), retryMost)
		t.refusals++
		t.retryAt = time.Now().Add(wait)
		if a.ctx.Err() == nil && t.refusals == 1 {
			a.log.Info("launch refused, retrying", zap.String("task", t.rec.ID), zap.String("container", name), zap.String("why", t.waits))
		}
	default:
		t.rec.Containers = slices.Clone(t.rec.Containers)
		c := &t.rec.Containers[containerIndex(&t.rec, name)]
		c.Done, c.Reason = true, got.err.Error()
		a.log.Warn("launch failed", zap.String("task", t.rec.ID), zap.String("container", name), zap.Error(got.err))
	}
}

func (a *Agent) stopped(t *task, name string, got outcome) {
	a.ended(t, name, got)
	if got.err != nil && a.ctx.Err() == nil {
		t.waits, t.retryAt = got.err.Error(), time.Now().Add(time.Second)
		a.log.Warn("stop failed, retrying", zap.String("task", t.rec.ID), zap.String("container", name), zap.Error(got.err))
	}
}

// endTask asks for a task's end; its launches are cancelled. The round that
// follows stores it.
func (a *Agent) endTask(t *task, code, reason string, byAgent bool) {
	if t.rec.Desired == api.StatusStopped {
		return
	}
	end(&t.rec, time.Now(), code, reason)
	t.rec.StoppedByAgent = byAgent
	t.waits, t.retryAt = "", time.Time{}
	for _, op := range t.busy {
		if op.verb == verbLaunch {
			op.cancel()
		}
	}
}

// want is Want in the loop: accept what is new, let go of what is not there.
func (a *Agent) want(o Order) (map[string]string, error) {
	if o.Fleet {
		if err := a.obey(o); err != nil {
			return nil, err
		}
	}
	refused := map[string]string{}
	wanted := map[string]Wanted{}
	for _, w := range o.Tasks {
		wanted[w.Name] = w
	}
	waiting := map[string]bool{}
	for _, w := range o.Waiting {
		waiting[w.Name] = true
	}
	for _, t := range a.tasks {
		w, ok := wanted[t.rec.Name]
		if ok && w.Generation == t.rec.Generation {
			t.rec.StopAfter = w.StopAfter
			if w.Stop != nil {
				a.endTask(t, w.Stop.Code, w.Stop.Reason, false)
			}
			continue
		}
		// Where another start of the same name is to come, what this one leaves
		// can be read until its cleanup.
		t.rec.Released = !o.Fleet && !ok && !waiting[t.rec.Name]
		a.endTask(t, api.StopUserInitiated, "no longer wanted by its source", false)
	}
	was := a.refused
	a.refused, a.ordered = map[string]refusal{}, nil
	if o.Fleet {
		a.ordered = make(map[string]uint64, len(o.Tasks))
		for _, w := range o.Tasks {
			a.ordered[w.Name] = w.Generation
		}
	}
	var failed error
	for _, w := range o.Tasks {
		why := ""
		if r, ok := was[w.Name]; ok && r.generation == w.Generation {
			why = r.why
		} else {
			var err error
			if why, err = a.accept(w, o.Fleet); err != nil {
				failed = errors.Join(failed, fmt.Errorf("%s: %w", w.Name, err))
			}
		}
		if why == "" {
			continue
		}
		refused[w.Name] = why
		if o.Fleet {
			a.refused[w.Name] = refusal{w.Generation, why}
		}
	}
	a.order = o
	return refused, failed
}

// refusal is why a start was not taken.
type refusal struct {
	generation uint64
	why        string
}

// accept takes one wanted task into the books and the store, or says why not. An
// error is the store's, and passes.
func (a *Agent) accept(w Wanted, fleet bool) (why string, err error) {
	id := taskID(a.settings.Instance, w.Name, w.Generation)
	if _, known := a.tasks[id]; known {
		return "", nil
	}
	last, err := a.store.LastGeneration(w.Name)
	if err != nil {
		return "", err
	}
	if fleet {
		floor, err := a.store.Floor()
		if err != nil {
			return "", err
		}
		last = max(last, floor)
	}
	switch {
	case w.Generation <= last:
		return fmt.Sprintf("generation: %d was given, %d has been started already; an older start is refused", w.Generation, last), nil
	case w.Stop != nil:
		return "stop: the task is to end and was never started here", nil
	case len(w.Definition) == 0:
		return "definition: none was given, and this start is not known here", nil
	}
	def, err := a.rules.Parse(w.Definition)
	if err != nil {
		return err.Error(), nil
	}
	t := newTask(state.Task{ID: id, Name: w.Name, Hash: w.Hash, Generation: w.Generation, Definition: w.Definition, GPUs: w.GPUs, Fleet: fleet, StopAfter: w.StopAfter,
		Desired: api.StatusRunning, Accepted: time.Now()}, def)
	for _, c := range def.ContainerDefinitions {
		t.rec.Containers = append(t.rec.Containers, state.Container{Name: *c.Name})
	}
	l := a.books()
	if why := l.refuse(t.holding()); why != "" {
		return why, nil
	}
	for _, id := range w.GPUs {
		if u := a.unit(id); t.demand.GPUMemoryMiB > 0 && u.noSharing != "" {
			return fmt.Sprintf("gpus: %s cannot be shared: %s", id, u.noSharing), nil
		}
	}
	if err := a.store.PutTasks(&t.rec); err != nil {
		return "", err
	}
	t.stored = t.rec
	a.tasks[id] = t
	a.log.Info("task accepted", zap.String("task", id), zap.String("name", w.Name), zap.Uint64("generation", w.Generation), zap.Strings("gpus", w.GPUs))
	return "", nil
}

func newTask(rec state.Task, def *taskdef.Definition) *task {
	return &task{rec: rec, def: def, demand: def.Demand(), seen: map[string]seen{}, busy: map[string]*operation{}, touched: map[string]uint64{}}
}

func (t *task) shared() bool { return t.demand.GPUMemoryMiB > 0 }

func (t *task) holding() holding { return holding{id: t.rec.ID, demand: t.demand, gpus: t.rec.GPUs} }

func (a *Agent) books() ledger {
	var held []holding
	for _, t := range a.inOrder() {
		if t.rec.Stopped.IsZero() {
			held = append(held, t.holding())
		}
	}
	return books(a.capacity, held)
}

// taskID is the same for the same start, so that an accept that was cut short
// is not done twice.
func taskID(instance, name string, generation uint64) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%s\x00%d", instance, name, generation))
	return hex.EncodeToString(sum[:16])
}

func (a *Agent) inOrder() []*task {
	all := make([]*task, 0, len(a.tasks))
	for _, t := range a.tasks {
		all = append(all, t)
	}
	slices.SortFunc(all, func(x, y *task) int { return int(x.rec.Generation) - int(y.rec.Generation) })
	return all
}

// find is the one task whose id begins with prefix.
func (a *Agent) find(prefix string) (*task, error) {
	var found *task
	for id, t := range a.tasks {
		if strings.HasPrefix(id, prefix) && prefix != "" {
			if found != nil {
				return nil, fmt.Errorf("task %q: more than one task begins with it; give more of the id", prefix)
			}
			found = t
		}
	}
	if found == nil {
		return nil, fmt.Errorf("task %q: there is no such task; `berth ps --all` lists them", prefix)
	}
	return found, nil
}

// enter lets a launch go to the gate. From the end of this round the GPU's holder
// knows of it, so that a daemon that is lost from now on is not replaced before
// the launch has ended one way or the other.
func (a *Agent) enter(t *task, op *operation) error {
	want := mps.PhaseDedicated
	if t.shared() {
		want = mps.PhaseHeld
	}
	for _, id := range t.rec.GPUs {
		if u := a.unit(id); u.holder != nil && u.status.State != want {
			return fmt.Errorf("GPU %s is %s: %s", id, u.status.State, cmp.Or(u.status.Reason, "on its way"))
		}
	}
	if n := len(a.strangers); n > 0 && len(t.rec.GPUs) > 0 {
		return fmt.Errorf("%d containers that no task knows are being removed first: what they hold of the GPUs is not in the books", n)
	}
	op.entered = true
	return nil
}

// informHolders tells each GPU's holder how it is to be used and how many
// capped containers are alive on it: those that run, those whose launch is
// under way and have entered, and those that are to end and that Docker may yet start.
func (a *Agent) informHolders() {
	for _, u := range a.units {
		if u.holder == nil {
			continue
		}
		use, clients := mps.UseIdle, 0
		for _, t := range a.tasks {
			if !slices.Contains(t.rec.GPUs, u.dev.UUID) || !t.rec.Stopped.IsZero() {
				continue
			}
			use = mps.UseDedicated
			if t.shared() {
				use = mps.UseMPS
			}
			for i := range t.def.ContainerDefinitions {
				c := &t.def.ContainerDefinitions[i]
				_, _, shared := taskdef.Share(c)
				op := t.busy[*c.Name]
				s := t.seen[*c.Name]
				late := s.Created && t.rec.Desired == api.StatusStopped && !t.rec.Containers[i].Done
				if shared && (s.Running || late || (op != nil && op.entered)) {
					clients++
				}
			}
		}
		u.holder.Clients(clients)
		u.holder.Want(use)
	}
}

func sight(c engine.Container) seen {
	return seen{ID: c.ID, Created: c.State == engine.Created, Running: c.Alive(), ExitCode: c.ExitCode, Reason: c.Reason(),
		Health: c.Health, Started: c.StartedAt, Finished: c.FinishedAt}
}
