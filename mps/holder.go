package mps

import (
	"context"

	"go.uber.org/zap"
)

// Holder holds one GPU.
type Holder struct {
}

// New makes the Holder of a GPU. rec is what Hooks.Save stored last, zero for a
// GPU not seen before. Nothing happens before Run.
func New(cfg Config, dev Device, rec Record, hooks Hooks, log *zap.Logger) *Holder {
	panic("not built yet")
}

// Run holds the GPU until ctx ends, and then leaves daemon and server running.
func (h *Holder) Run(ctx context.Context) error { panic("not built yet") }

// Want says what the GPU is to be. A GPU is never taken from running clients: it
// changes once Clients is 0.
func (h *Holder) Want(u Use) { panic("not built yet") }

// Clients says how many capped containers of this GPU are alive: started and not
// ended. -1, what a new Holder assumes: not known yet, and until it is nothing is
// started or ended that running clients could need.
func (h *Holder) Clients(n int) { panic("not built yet") }

// Forgive lifts a quarantine and empties the restart budget.
func (h *Holder) Forgive() { panic("not built yet") }

// Status is the Holder's last.
func (h *Holder) Status() Status { panic("not built yet") }

// Observe looks afresh, for the gate: at /proc, the lock, the compute mode, and
// with one control command through client/.
func (h *Holder) Observe(ctx context.Context) Observation { panic("not built yet") }

// TerminateClient makes the server end the contexts of one client process, named
// by its pid on the host; the process itself lives on.
func (h *Holder) TerminateClient(ctx context.Context, hostPID int) error { panic("not built yet") }

// Purge stops what runs, sets DEFAULT and removes the GPU's folders. The caller
// has stopped the GPU's containers.
func (h *Holder) Purge(ctx context.Context) error { panic("not built yet") }
