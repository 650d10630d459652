package gpu

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// lane lets one call at a time into NVML, and knows how long it has been there.
//
//	free ──call──> busy ──its limit passes──> hung ──it comes back──> free
//	                 └────────it comes back───────────────────────────^
//
// A hung lane refuses at once, so that however often it is asked, one thread is stuck in it.
type lane struct {
	slot    chan struct{}              // holds the call that is inside
	current atomic.Pointer[inLaneCall] // the same call
}

type inLaneCall struct {
	HungError
	limit time.Duration
}

func newLane() *lane { return &lane{slot: make(chan struct{}, 1)} }

// hung is the call that is past its limit, or nil.
func (l *lane) hung() *HungError {
	if c := l.current.Load(); c != nil && time.Since(c.Since) >= c.limit {
		return &c.HungError
	}
	return nil
}

// run makes a call in a lane and waits for it as long as ctx and limit allow. A call that is given up goes on; what
// it returns is dropped, so it must not write to anything that the caller reads. inUse is held for reading while it is
// inside NVML.
func run[T any](ctx context.Context, l *lane, inUse *sync.RWMutex, uuid, name string, limit time.Duration, call func() (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	var none T
	if h := l.hung(); h != nil {
		return none, h
	}
	if err := ctx.Err(); err != nil {
		return none, err
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case l.slot <- struct{}{}:
	case <-ctx.Done():
		return none, ctx.Err()
	case <-timer.C:
		if c := l.current.Load(); c != nil {
			return none, &c.HungError
		}
		return none, &HungError{UUID: uuid, Call: name, Since: time.Now().Add(-limit)}
	}
	this := &inLaneCall{HungError{UUID: uuid, Call: name, Since: time.Now()}, limit}
	l.current.Store(this)
	done := make(chan result, 1)
	go func() {
		inUse.RLock()
		value, err := call()
		inUse.RUnlock()
		l.current.Store(nil)
		<-l.slot
		done <- result{value, err}
	}()
	timer.Reset(limit)
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
		return none, ctx.Err()
	case <-timer.C:
		return none, &this.HungError
	}
}
