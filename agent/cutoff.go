package agent

import (
	"sync"
	"time"

	"github.com/berth-gpu/berth/agent/state"
	"github.com/berth-gpu/berth/api"
)

// heardEvery bounds how often the time of the last word from the placement server is
// stored. A restarted agent counts from what is stored, so it may end a task this
// much too early, and never too late.
const heardEvery = 2 * time.Second

// contact is when the placement server was heard, as time since the boot: no clock
// that somebody sets moves it, and a suspended machine's time counts.
type contact struct {
	mu      sync.Mutex
	last    time.Duration
	longest time.Duration // silence between two words, since it was last asked for
}

func (c *contact) hear(now time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.longest = max(c.longest, now-c.last)
	c.last = max(c.last, now)
}

// silence is the longest since it was last asked for, with the one that lasts. One
// that has ended counts: an agent that was stopped with its machine finds words in
// its buffers that were said before, and its tasks may run elsewhere by now.
func (c *contact) silence(now time.Duration) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	longest := max(c.longest, now-c.last)
	c.longest = 0
	return longest
}

func (c *contact) heard() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last
}

// cutTooLong says that a task has to end because its agent was cut off for silence.
func cutTooLong(rec *state.Task, silence time.Duration) bool {
	return rec.StopAfter > 0 && rec.Desired == api.StatusRunning && silence >= rec.StopAfter
}
