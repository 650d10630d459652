package stream

import "time"

// ending is how a stream ended, as far as it decides when to try again.
type ending int

const (
	broken    ending = iota // it could not be opened, or broke
	notLeader               // this server leads nobody now; it is well, and so is asking often
	refused                 // by a rule: only people change that
	retired                 // the instance was given up
)

// ended is the end of one stream.
type ended struct {
	how ending
	err error
}

func (e *ended) Error() string { return e.err.Error() }

// Bounds of the wait between two tries. The longest decides how soon an agent that
// was cut off stops what runs elsewhere by now, which it has to within 5 s.
const (
	retryFirst   = 250 * time.Millisecond
	retryMost    = 3 * time.Second
	leaderMost   = time.Second
	refusedWait  = 30 * time.Second
	retiredEvery = 2 * time.Minute
)

// retry decides where and when the next stream is tried.
type retry struct {
	addresses int
	at        int // the address to try
	failures  int // since the last stream that was welcomed
}

// next moves on to the next address, after the wait that it returns. spread, from 0
// up to 1, keeps the agents of a fleet apart.
func (r *retry) next(how ending, welcomed bool, spread float64) time.Duration {
	if welcomed {
		r.failures = 0
	}
	r.at = (r.at + 1) % r.addresses
	// It doubles once every address has been tried.
	wait := retryFirst << min(r.failures/r.addresses, 10)
	r.failures++
	switch how {
	case broken:
		wait = min(wait, retryMost)
	case notLeader:
		wait = min(wait, leaderMost)
	case refused:
		wait = refusedWait
	case retired:
		wait = retiredEvery
	}
	return wait/2 + time.Duration(spread*float64(wait/2))
}
