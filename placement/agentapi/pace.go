package agentapi

import "time"

// An agent sends a report each 20 ms at most. One that sends more is not refused, it is
// read more slowly: gRPC's window then slows it down.
const (
	paceEach  = 10 * time.Millisecond
	paceBurst = 200 // reports at once, after a rest
)

// pace is how often something may happen. The zero value is rested.
type pace struct {
	next time.Time // when the next one is due at an even pace
}

// wait counts one at now, and is how long it has to wait first.
func (p *pace) wait(now time.Time) time.Duration {
	if p.next.Before(now) {
		p.next = now
	}
	wait := p.next.Sub(now) - paceBurst*paceEach
	p.next = p.next.Add(paceEach)
	return max(wait, 0)
}
