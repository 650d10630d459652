package placement

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/placement/fleet"
	"github.com/berth-gpu/berth/placement/store"
)

// keptEvents is how many events are kept, at least.
const keptEvents = 4000

// eventLog is what has happened, the newest events of it. The events of one round are
// one record.
type eventLog struct {
	records []eventRecord // stored, oldest first
	count   int           // events in records
	fresh   []api.Event   // of this round
	last    uint64        // sequence number given last
	waiting []chan struct{}
}

type eventRecord struct {
	key    string
	events []api.Event
}

func (e *eventLog) load(key string, data json.RawMessage) error {
	r := eventRecord{key: key}
	if err := json.Unmarshal(data, &r.events); err != nil {
		return err
	}
	e.records = append(e.records, r)
	e.count += len(r.events)
	return nil
}

// loaded puts what was loaded in order.
func (e *eventLog) loaded() {
	slices.SortFunc(e.records, func(a, b eventRecord) int { return int(first(a)) - int(first(b)) })
	for _, r := range e.records {
		if n := len(r.events); n > 0 {
			e.last = max(e.last, r.events[n-1].Seq)
		}
	}
}

func first(r eventRecord) uint64 {
	if len(r.events) == 0 {
		return 0
	}
	return r.events[0].Seq
}

// ops are what is to be stored of this round's events, and to be forgotten for them.
func (e *eventLog) ops() []store.Op {
	if len(e.fresh) == 0 {
		return nil
	}
	var ops []store.Op
	for chunk := range slices.Chunk(e.fresh, 100) { // well below what one transaction takes
		r := eventRecord{fmt.Sprintf("%016x", chunk[0].Seq), chunk}
		ops = append(ops, store.Op{Kind: fleet.KindEvent, Key: r.key, Value: r.events})
		e.records = append(e.records, r)
		e.count += len(chunk)
	}
	for len(e.records) > 1 && e.count-len(e.records[0].events) >= keptEvents {
		ops = append(ops, store.Op{Kind: fleet.KindEvent, Key: e.records[0].key})
		e.count -= len(e.records[0].events)
		e.records = e.records[1:]
	}
	e.fresh = nil
	return ops
}

// stored wakes whoever follows.
func (e *eventLog) stored() {
	for _, c := range e.waiting {
		close(c)
	}
	e.waiting = nil
}

// after are the stored events past seq.
func (e *eventLog) after(seq uint64) []api.Event {
	var out []api.Event
	for _, r := range e.records {
		for _, ev := range r.events {
			if ev.Seq > seq {
				out = append(out, ev)
			}
		}
	}
	return out
}

// more is closed when there are more events.
func (e *eventLog) more() <-chan struct{} {
	more := make(chan struct{})
	e.waiting = append(e.waiting, more)
	return more
}

// say notes one event of this round, and logs it.
func (l *leader) say(kind, subject, instance, service, format string, args ...any) {
	l.events.last++
	at := l.now
	if at.IsZero() {
		at = time.Now().UTC().Truncate(time.Millisecond)
	}
	ev := api.Event{Seq: l.events.last, At: at, Kind: kind, Subject: subject, Says: fmt.Sprintf(format, args...), Instance: instance, Service: service}
	l.events.fresh = append(l.events.fresh, ev)
	l.log.Info(kind, zap.String("subject", subject), zap.String("says", ev.Says), zap.String("instance", instance), zap.String("service", service))
}
