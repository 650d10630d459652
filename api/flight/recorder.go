package flight

import (
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
)

// Recorder writes a ring. The nil Recorder records nothing. Its methods may be
// called from anywhere.
type Recorder struct {
	log     *zap.Logger
	most    int // bytes of entries that may wait for the disk
	largest int // bytes of one entry: a few large ones must not drive out all others

	mu     sync.Mutex
	queue  []waiting
	bytes  int // of the queue
	closed bool
	wake   chan struct{} // holds one: there is something in the queue, or the end

	writer sync.WaitGroup
	ring   ring // the writer's
}

// waiting is an entry for the writer, or a gap.
type waiting struct {
	at           time.Time
	machine, key string
	in, out      []byte
	missing      Missing // a gap, where something is
}

// Open opens the ring in a folder, which is made where there is none, and goes on
// behind its last entry. The ring's files have limit bytes together at most.
func Open(dir string, limit int64, log *zap.Logger) (*Recorder, error) {
	if limit < leastLimit {
		return nil, fmt.Errorf("flight recorder: a limit of %d bytes is less than %d", limit, leastLimit)
	}
	r := &Recorder{log: log, most: int(limit / segments), largest: int(min(limit/segments, max(1<<10, limit/64))) - headMost, wake: make(chan struct{}, 1)}
	r.ring = ring{dir: dir, most: limit / segments}
	torn, err := r.ring.open()
	if err != nil {
		return nil, fmt.Errorf("flight recorder: %w", err)
	}
	if torn {
		r.queue = append(r.queue, waiting{at: time.Now(), missing: Missing{1, whyTorn}})
		r.wake <- struct{}{}
	}
	r.writer.Go(r.write)
	return r, nil
}

// Record keeps one decision. It encodes in and out before it returns, and never
// waits for the disk.
func (r *Recorder) Record(machine, key string, in, out any) {
	if r == nil {
		return
	}
	w := waiting{at: time.Now(), machine: machine, key: key}
	var err error
	if w.in, err = json.Marshal(in); err == nil {
		w.out, err = json.Marshal(out)
	}
	if err != nil {
		r.log.Error("flight recorder: a decision cannot be recorded", zap.String("machine", machine), zap.Error(err))
		w = waiting{at: w.at, missing: Missing{1, whyEncode + machine}}
	}
	r.mu.Lock()
	r.put(w)
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// put queues an entry, or counts it where it would have stood.
func (r *Recorder) put(w waiting) {
	size := len(w.in) + len(w.out) + len(w.machine) + len(w.key)
	switch {
	case r.closed:
		return
	case w.missing.Dropped > 0:
	case size > r.largest:
		w.missing = Missing{1, whyLarge}
	case r.bytes+size > r.most || len(r.queue) >= queueMost:
		w.missing = Missing{1, whyBusy}
	}
	if w.missing.Dropped == 0 {
		r.queue, r.bytes = append(r.queue, w), r.bytes+size
		return
	}
	for i := len(r.queue) - 1; i >= 0 && i >= len(r.queue)-gapsAtMost && r.queue[i].missing.Dropped > 0; i-- {
		if r.queue[i].missing.Why == w.missing.Why || i == len(r.queue)-gapsAtMost {
			r.queue[i].missing.Dropped += w.missing.Dropped
			return
		}
	}
	r.queue = append(r.queue, waiting{at: w.at, missing: w.missing})
}

const (
	headMost   = 128  // bytes of a line besides machine, key, in and out
	queueMost  = 4096 // entries that may wait, however small
	gapsAtMost = 16   // reasons for a gap told apart in one place
)

// write is the writer: it owns the ring and ends with Close.
func (r *Recorder) write() {
	defer r.ring.close()
	ill := false
	for range r.wake {
		r.mu.Lock()
		queue, closed := r.queue, r.closed
		r.queue, r.bytes = nil, 0
		r.mu.Unlock()
		missed, err := r.ring.add(queue)
		switch {
		case err != nil && !ill:
			r.log.Warn("flight recorder: cannot write, decisions are missing from now on", zap.Error(err))
		case err == nil && ill:
			r.log.Info("flight recorder: writes again")
		}
		if len(queue) > 0 {
			ill = err != nil
		}
		if closed {
			return
		}
		if missed > 0 {
			r.mu.Lock()
			// In front: what was recorded meanwhile came later.
			r.queue = slices.Insert(r.queue, 0, waiting{at: time.Now(), missing: Missing{missed, whyDisk + err.Error()}})
			r.mu.Unlock()
		}
	}
}

// Close writes what was recorded before it, and ends the Recorder.
func (r *Recorder) Close() {
	if r == nil {
		return
	}
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
	r.writer.Wait()
}
