package gpu

import (
	"context"
	"errors"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// eventWait is how long one call waits for an event inside NVML, where nothing can interrupt it. An
// event ends the wait at once.
const eventWait = time.Second

// errNoEvent: the wait ended without one.
var errNoEvent = errors.New("no event")

// Xids listens for critical events of all GPUs, also of those that Devices finds later, until ctx ends, and then closes
// the channel. Events from before are not told, nor those of the moment in which NVML is initialised anew because a GPU
// is missing. One listener at a time.
func (n *NVML) Xids(ctx context.Context) (<-chan Xid, error) {
	if n.closing.Err() != nil {
		return nil, ErrClosed
	}
	if !n.listening.CompareAndSwap(false, true) {
		return nil, errors.New("NVML events: there is a listener already")
	}
	n.mu.Lock()
	known := len(n.devices)
	n.mu.Unlock()
	if known == 0 {
		if _, err := n.Devices(ctx); err != nil {
			n.listening.Store(false)
			return nil, err
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(n.closing, cancel)
	l := &listener{n: n}
	// Registered before Xids returns, so that no event after it is missed.
	if _, err := run(ctx, n.events, &n.inUse, "", "DeviceRegisterEvents", n.options.CallTimeout, func() (struct{}, error) {
		return struct{}{}, l.register()
	}); err != nil {
		stop()
		cancel()
		n.listening.Store(false)
		return nil, err
	}
	out := make(chan Xid)
	n.listeners.Go(func() {
		defer stop()
		defer cancel()
		l.listen(ctx, out)
	})
	return out, nil
}

// listener is used inside the events lane alone, but for n.
type listener struct {
	n          *NVML
	set        nvml.EventSet
	epoch      int64
	registered []seen
}

func (l *listener) listen(ctx context.Context, out chan<- Xid) {
	n := l.n
	limit := eventWait + n.options.CallTimeout
	trouble := ""
	for ctx.Err() == nil {
		xid, err := run(ctx, n.events, &n.inUse, "", "EventSetWait", limit, l.next)
		switch {
		case err == nil:
			trouble = ""
			select {
			case out <- xid:
			case <-ctx.Done():
			}
			continue
		case errors.Is(err, errNoEvent):
			trouble = ""
			continue
		case errors.Is(err, errInUse):
			pause(ctx, 10*time.Millisecond)
			continue
		case ctx.Err() != nil:
			continue
		}
		if err.Error() == trouble {
			pause(ctx, time.Second)
			continue
		}
		trouble = err.Error()
		select {
		case out <- Xid{At: time.Now(), Err: err}:
		case <-ctx.Done():
		}
	}
	close(out)
	n.listening.Store(false)
	// The last wait may be inside NVML still; the set goes after it. A wait that hangs keeps it.
	_, _ = run(context.Background(), n.events, &n.inUse, "", "EventSetFree", limit, func() (struct{}, error) {
		l.free()
		return struct{}{}, nil
	})
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// next waits for one event. It lets go of NVML when NVML is to be initialised anew.
func (l *listener) next() (Xid, error) {
	if l.n.reinit.Load() {
		l.free()
		return Xid{}, errInUse
	}
	if err := l.register(); err != nil {
		return Xid{}, err
	}
	data, ret := l.set.Wait(uint32(eventWait.Milliseconds()))
	switch {
	case ret == nvml.ERROR_TIMEOUT:
		return Xid{}, errNoEvent
	case ret != nvml.SUCCESS:
		// One GPU that is lost can fail the wait for all: a fresh set leaves it out. It is made at once, since
		// what comes while there is none is not told.
		err := callError("EventSetWait", "", ret)
		l.free()
		return Xid{}, errors.Join(err, l.register())
	case data.EventType != nvml.EventTypeXidCriticalError:
		return Xid{}, errNoEvent
	}
	return Xid{UUID: l.uuid(data.Device), Code: int(data.EventData), At: time.Now()}, nil
}

// uuid tells which GPU an event is of, also when it can no longer be asked: Xid 79 comes from one that is lost.
func (l *listener) uuid(handle nvml.Device) string {
	for _, r := range l.registered {
		if r.handle == handle {
			return r.uuid
		}
	}
	uuid, _ := handle.GetUUID()
	return uuid
}

// register makes the set, and adds the GPUs that it lacks. One that cannot be added now is tried again at the next wait.
func (l *listener) register() error {
	n := l.n
	if epoch := n.epoch.Load(); epoch != l.epoch {
		l.set, l.registered, l.epoch = nil, nil, epoch // the set went with the NVML that it was made in
	}
	if l.set == nil {
		set, ret := n.lib.EventSetCreate()
		if err := callError("EventSetCreate", "", ret); err != nil {
			return err
		}
		l.set = set
	}
	n.mu.Lock()
	var lacking []string
	for uuid, d := range n.devices {
		// One that does not answer now could make this call hang, and with it the events of all.
		if d.last.UUID != "" && d.last.Err == nil && d.hung() == nil && !l.has(uuid) {
			lacking = append(lacking, uuid)
		}
	}
	n.mu.Unlock()
	for _, uuid := range lacking {
		handle, ret := n.lib.DeviceGetHandleByUUID(uuid)
		if ret != nvml.SUCCESS {
			continue
		}
		types, ret := handle.GetSupportedEventTypes()
		if ret != nvml.SUCCESS || types&nvml.EventTypeXidCriticalError == 0 {
			continue
		}
		if handle.RegisterEvents(nvml.EventTypeXidCriticalError, l.set) == nvml.SUCCESS {
			l.registered = append(l.registered, seen{uuid: uuid, handle: handle})
		}
	}
	return nil
}

func (l *listener) has(uuid string) bool {
	for _, r := range l.registered {
		if r.uuid == uuid {
			return true
		}
	}
	return false
}

func (l *listener) free() {
	if l.set != nil && l.epoch == l.n.epoch.Load() {
		l.set.Free()
	}
	l.set, l.registered = nil, nil
}
