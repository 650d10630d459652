package mps

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
)

// Holder holds one GPU: the loop around [Step].
type Holder struct {
	cfg    Config
	dirs   Dirs
	daemon *daemon
	hooks  Hooks
	log    *zap.Logger
	wake   chan struct{} // holds one: there is something in the mailbox

	running sync.Mutex // held by Run

	mu     sync.Mutex
	mail   []Event // for the loop
	state  State   // as of the last step
	flight *flight // the probe that callers of Observe may still join
}

// New makes the Holder of a GPU. rec is what Hooks.Save stored last, zero for a
// GPU not seen before. Nothing happens before Run.
func New(cfg Config, dev Device, rec Record, hooks Hooks, log *zap.Logger) *Holder {
	cfg = cfg.withDefaults()
	dirs := Dirs{Run: cfg.RunDir, Log: cfg.LogDir, UUID: dev.UUID}
	log = log.With(zap.String("gpu", dev.UUID))
	control := NewControl(cfg.ControlBinary, dirs, cfg.environment(), cfg.ProbeTimeout)
	return &Holder{
		cfg: cfg, dirs: dirs, hooks: hooks, log: log,
		daemon: &daemon{cfg: cfg, uuid: dev.UUID, dirs: dirs, control: control, hooks: hooks},
		wake:   make(chan struct{}, 1),
		state: NewState(rec, Unsupported(dev, cfg.ControlBinary), bootID(), cfg.Budget,
			cfg.ProbeEvery, rand.Uint64(), time.Now()),
	}
}

// bootID names the host's boot.
func bootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// Dirs are the GPU's folders.
func (h *Holder) Dirs() Dirs { return h.dirs }

// Want says what the GPU is to be. A GPU is never taken from running clients: it
// changes once Clients is 0.
func (h *Holder) Want(u Use) { h.post(Want{u}) }

// Clients says how many capped containers of this GPU are alive: started and not
// ended. -1, what a new Holder assumes: not known yet, and until it is nothing is
// started or ended that running clients could need. A container counts from its
// start, not before: one that is counted while no server runs closes the GPU.
func (h *Holder) Clients(n int) { h.post(ClientsAre{n}) }

// Forgive lifts a quarantine and empties the restart budget.
func (h *Holder) Forgive() { h.post(Forgive{}) }

// Status is the Holder's last.
func (h *Holder) Status() Status {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state.Status()
}

func (h *Holder) post(e Event) {
	h.mu.Lock()
	h.mail = append(h.mail, e)
	h.mu.Unlock()
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

func (h *Holder) takeMail() []Event {
	h.mu.Lock()
	defer h.mu.Unlock()
	mail := h.mail
	h.mail = nil
	return mail
}

// Run holds the GPU until ctx ends, and then returns and leaves daemon and server
// running.
func (h *Holder) Run(ctx context.Context) error {
	if !h.running.TryLock() {
		return errors.New("the GPU's holder runs already")
	}
	defer h.running.Unlock()
	return newLoop(h).run(ctx)
}

// TerminateClient makes the server end the contexts of one client process, named
// by its pid on the host; the process itself lives on. To be done before a client
// is killed: a kill with work in flight can hang every client of the GPU.
func (h *Holder) TerminateClient(ctx context.Context, hostPID int) error {
	h.mu.Lock()
	server := h.state.Server
	h.mu.Unlock()
	if server.PID == 0 {
		return fmt.Errorf("terminate client %d: %w", hostPID, ErrNoServer)
	}
	if err := h.daemon.control.TerminateClient(ctx, server.PID, hostPID); err != nil {
		return fmt.Errorf("terminate client %d: %w", hostPID, err)
	}
	return nil
}

// Purge stops what runs, sets DEFAULT and removes the GPU's folders and log. The
// caller has stopped the GPU's containers. Where Run is not running, Purge does
// its work.
func (h *Holder) Purge(ctx context.Context) error {
	h.Want(UseNone)
	h.Clients(0)
	// Unlocked by Run, or by us when Run is not running and ours has ended.
	ours, cancel := context.WithCancel(ctx)
	var done sync.WaitGroup
	if h.running.TryLock() {
		done.Go(func() {
			defer h.running.Unlock()
			newLoop(h).run(ours)
		})
	}
	defer done.Wait()
	defer cancel()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		h.mu.Lock()
		s, unread := h.state, len(h.mail)
		h.mu.Unlock()
		atEnd := s.Phase == PhaseAbsent && s.Looked || s.Phase == PhaseUnsupported
		if atEnd && s.Use == UseNone && unread == 0 && len(s.remains()) == 0 && !s.exclusive() {
			if s.Stranger != "" {
				return fmt.Errorf("folders are kept: %s", s.Stranger)
			}
			return h.dirs.remove()
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("purge: the GPU is %s: %s: %w", s.Phase, s.Reason, ctx.Err())
		}
	}
}
