package replace

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// When machines are replaced for their GPUs' sake.
const (
	WhenNever = "never" // nor when they are lost
	WhenAny   = "any"   // one GPU is FAILED
	WhenAll   = "all"   // every GPU is
	WhenBelow = "below" // the usable share is below Policy.BelowPercent
)

// Policy is how an operator wants machines replaced.
type Policy struct {
	When         string `json:"when"`
	BelowPercent int    `json:"belowPercent,omitempty"` // 1 to 100, of the machine's GPUs

	AtOncePercent int `json:"atOncePercent"` // of the fleet: so many replacements are not over, at least one
	PerHour       int `json:"perHour"`       // so many begin in any hour

	JoinTimeout   time.Duration `json:"joinTimeout"`   // from launched to joined
	DrainDeadline time.Duration `json:"drainDeadline"` // for MOVE and DRAIN together
	StopTimeout   time.Duration `json:"stopTimeout"`   // for tasks that were told to end
	Newcomers     int           `json:"newcomers"`     // launched for one replacement at most
	Attempts      int           `json:"attempts"`      // calls that may fail in one state
	Backoff       time.Duration `json:"backoff"`       // after the first failure; doubles
	BackoffMax    time.Duration `json:"backoffMax"`
	CallTimeout   time.Duration `json:"callTimeout"` // for one call
}

// Default is the policy of an operator who says nothing. A provider that fails is tried
// for about a quarter of an hour.
func Default() Policy {
	return Policy{When: WhenAny, AtOncePercent: 10, PerHour: 6, JoinTimeout: 10 * time.Minute, DrainDeadline: 15 * time.Minute, StopTimeout: 2 * time.Minute,
		Newcomers: 3, Attempts: 12, Backoff: 2 * time.Second, BackoffMax: 2 * time.Minute, CallTimeout: 5 * time.Minute}
}

// ParseWhen reads the setting replaceWhen: never, any, all, or a share as 50%.
func ParseWhen(text string) (when string, belowPercent int, err error) {
	switch text {
	case WhenNever, WhenAny, WhenAll:
		return text, 0, nil
	}
	if share, ok := strings.CutSuffix(text, "%"); ok {
		if n, err := strconv.Atoi(share); err == nil && n >= 1 && n <= 100 {
			return WhenBelow, n, nil
		}
	}
	return "", 0, fmt.Errorf("replaceWhen: %q is none of never, any, all and a share of usable GPUs from 1%% to 100%%; give one", text)
}

// Machine is one machine of the fleet, as the policy sees it.
type Machine struct {
	ID     string `json:"id"`
	GPUs   int    `json:"gpus"`           // that it has
	Usable int    `json:"usable"`         // of these, those not FAILED
	Lost   bool   `json:"lost,omitempty"` // nothing was heard of it past the grace
}

// Wants says why the policy wants a machine replaced, or "".
func Wants(p Policy, m Machine) string {
	bad := m.GPUs - m.Usable
	switch {
	case p.When == WhenNever:
	case m.Lost:
		return sayLost
	case bad <= 0:
	case p.When == WhenAny, p.When == WhenAll && m.Usable <= 0, p.When == WhenBelow && m.Usable*100 < p.BelowPercent*m.GPUs:
		return sayGPUs(bad, m.GPUs)
	}
	return ""
}
