// Package agent is the daemon of one GPU machine: it makes running containers
// out of wanted tasks, and holds the GPUs that they share.
//
// It never chooses a GPU: a wanted task comes from a source that has chosen, a folder
// or a placement server (package stream). It keeps its own books all the same and refuses what they cannot bear. Docker's
// list is the truth about containers, its events are hints; a change is on disk
// before it is acted on, so the agent may be killed at any line: the next one
// adopts every container and MPS daemon that runs and restarts none. It touches
// only containers that carry its own berth.instance.
//
// One goroutine (Run's) owns all that is decided. Everything that takes time is
// done by goroutines that Run starts, hands a copy of what they need, and waits
// for; they send back what became of it. Methods may be called from anywhere.
package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/berth-gpu/berth/agent/cgroup"
	"github.com/berth-gpu/berth/agent/engine"
	"github.com/berth-gpu/berth/agent/gpu"
	"github.com/berth-gpu/berth/agent/state"
	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/api/flight"
	"github.com/berth-gpu/berth/config"
	"github.com/berth-gpu/berth/config/taskdef"
)

// Wanted is one task that a source wants here, on GPUs that it has chosen.
type Wanted struct {
	Name       string          // whose task it is, over all its generations
	Generation uint64          // of this start; larger than any before for the name
	Hash       string          // of the definition as it was given
	Definition json.RawMessage // as RegisterTaskDefinition takes it
	GPUs       []string        // uuids, in the order in which containers get them
	StopAfter  time.Duration   // the placement server not heard for this long: the agent ends the task itself; 0: never
	Stop       *Stop           // set: it is to end, and stays wanted; the first reason given is kept
}

// Stop is how a source wants a task ended.
type Stop struct {
	Code   string // api.StopUserInitiated...
	Reason string
}

// Order is everything that a source wants of this machine now. What is not in
// it is stopped. Waiting and Problems are shown to people as they are.
type Order struct {
	Tasks    []Wanted
	Waiting  []api.Waiting
	Problems []api.BadInput

	// Fleet says that it is a placement server's: each name is one start's alone and
	// generations are the whole fleet's; a start that was refused stays refused while
	// it is in the order; and what is not in it any more can be read until its
	// cleanup, where a folder's is removed once it has stopped. What is in it is not
	// removed: its source has yet to learn how it ended.
	Fleet bool
	Term  uint64 // of the leadership that ordered it; one lower than was obeyed before is refused
}

// ErrOldTerm refuses an order of a leader that has been succeeded.
var ErrOldTerm = errors.New("an order of an older leadership term")

// Agent is the daemon.
type Agent struct {
	settings *config.Agent
	version  string
	log      *zap.Logger

	store   *state.Store
	docker  *engine.Engine
	info    engine.Info
	cgroups *cgroup.Tree
	nvml    *gpu.NVML // nil without a driver
	noNVML  error     // why
	flight  *flight.Recorder

	agentID string
	bootID  string
	ec2     string
	started time.Time
	rules   taskdef.Rules

	inbox    chan func()   // run by the loop, one at a time
	poked    chan struct{} // a holder has something to say
	resample chan struct{} // sample the GPUs now
	view     atomic.Pointer[View]
	changed  notifier
	term     atomic.Uint64 // highest obeyed, as it is stored
	link     atomic.Pointer[Link]
	contact  contact

	loop // owned by Run's goroutine
}

// Open reads the agent's state, connects to Docker and NVML, and changes
// nothing yet. A machine without an NVIDIA driver is served without GPUs.
func Open(ctx context.Context, settings *config.Agent, version string, log *zap.Logger) (_ *Agent, err error) {
	a := &Agent{settings: settings, version: version, log: log, started: time.Now(),
		inbox: make(chan func(), 64), poked: make(chan struct{}, 1), resample: make(chan struct{}, 1), rules: rules(settings)}
	defer func() {
		if err != nil {
			a.close()
		}
	}()
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, err
	}
	a.bootID = strings.TrimSpace(string(boot))
	for _, dir := range []string{settings.RunDir, settings.LogDir} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
	}
	if a.store, err = state.Open(settings.StateDir); err != nil {
		return nil, err
	}
	a.openFlight()
	if a.docker, err = engine.Open(ctx, settings.Docker.Host, log); err != nil {
		return nil, err
	}
	if a.info, err = a.docker.Info(ctx); err != nil {
		return nil, err
	}
	if a.cgroups, err = openCgroups(settings, a.info); err != nil {
		return nil, err
	}
	a.nvml, err = gpu.Open(settings.GPU.NVMLLibrary)
	if errors.Is(err, gpu.ErrNoLibrary) || errors.Is(err, gpu.ErrNoDriver) {
		a.noNVML = err
		log.Warn("no GPU here", zap.Error(err))
	} else if err != nil {
		return nil, err
	}
	if err := a.load(ctx); err != nil {
		return nil, err
	}
	return a, nil
}

func rules(s *config.Agent) taskdef.Rules {
	return taskdef.Rules{RunDir: s.RunDir, Protected: []string{s.StateDir, s.TaskDir}, DisablePrivileged: s.Docker.DisablePrivileged}
}

// Rules are those that a definition must pass on this machine.
func (a *Agent) Rules() taskdef.Rules { return a.rules }

func (a *Agent) close() {
	if a.nvml != nil {
		a.nvml.Close()
	}
	if a.docker != nil {
		a.docker.Close()
	}
	a.flight.Close()
	if a.store != nil {
		a.store.Close()
	}
}

// Run does the agent's work until ctx ends. It then returns within seconds and
// leaves every container and daemon running.
func (a *Agent) Run(ctx context.Context) error {
	defer a.close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var owned sync.WaitGroup
	defer owned.Wait()
	defer cancel() // before the wait
	a.owned, a.ctx = &owned, ctx

	listeners, err := a.listen()
	if err != nil {
		return err
	}
	for _, l := range listeners {
		owned.Go(func() { a.serve(ctx, l) })
	}
	for _, u := range a.units {
		if u.holder != nil {
			owned.Go(func() {
				if err := u.holder.Run(ctx); err != nil && ctx.Err() == nil {
					a.post(func() { u.broken = "its supervisor ended: " + err.Error() })
				}
			})
		}
	}
	owned.Go(func() { a.watchDocker(ctx) })
	if a.nvml != nil {
		owned.Go(func() { a.watchSamples(ctx) })
		owned.Go(func() { a.watchXids(ctx) })
	}
	owned.Go(func() { a.identify(ctx) })
	return a.work(ctx)
}

// post hands f to the loop. It gives up when the agent ends.
func (a *Agent) post(f func()) bool {
	select {
	case a.inbox <- f:
		return true
	case <-a.ctx.Done():
		return false
	}
}

// poke makes the loop look again. It never blocks.
func (a *Agent) poke() {
	select {
	case a.poked <- struct{}{}:
	default:
	}
}

// call runs f in the loop and answers once the round after it is over, when
// what f changed is stored. What f writes is its own: the caller may be gone.
func call[T any](ctx context.Context, a *Agent, f func() (T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	done := make(chan result, 1)
	var none T
	select {
	case a.inbox <- func() {
		v, err := f()
		a.after = append(a.after, func() { done <- result{v, cmp.Or(err, a.storeErr)} })
	}:
	case <-ctx.Done():
		return none, ctx.Err()
	}
	select {
	case r := <-done:
		return r.v, r.err
	case <-ctx.Done():
		return none, ctx.Err()
	}
}

// NextGeneration is a number larger than any that was used here before.
func (a *Agent) NextGeneration() (uint64, error) { return a.store.NextGeneration() }

// Want replaces what the source wants. Each wanted task that cannot be taken is
// in the map, by name, with its reason; the others are stored when Want returns. On
// an error nothing can be relied on but what the view shows.
func (a *Agent) Want(ctx context.Context, o Order) (map[string]string, error) {
	return call(ctx, a, func() (map[string]string, error) { return a.want(o) })
}

// Stop ends one task, named by the start of its id. It answers once that is stored.
func (a *Agent) Stop(ctx context.Context, id, reason string) error {
	_, err := call(ctx, a, func() (none struct{}, err error) {
		t, err := a.find(id)
		if err == nil {
			a.endTask(t, api.StopUserInitiated, reason, false)
		}
		return none, err
	})
	return err
}

// notifier wakes whoever waits for the view to change.
type notifier struct {
	mu sync.Mutex
	c  chan struct{}
}

func (n *notifier) wait() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.c == nil {
		n.c = make(chan struct{})
	}
	return n.c
}

func (n *notifier) wake() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.c != nil {
		close(n.c)
		n.c = nil
	}
}

// View is the agent's last published state.
func (a *Agent) View() *View { return a.view.Load() }

// Changed is closed when the view is not what it was any more.
func (a *Agent) Changed() <-chan struct{} { return a.changed.wait() }

func clientDir(s *config.Agent, uuid string) string {
	return filepath.Join(s.RunDir, "mps", uuid, "client")
}

func shortID(id string) string { return fmt.Sprintf("%.12s", id) }
