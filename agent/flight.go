package agent

import (
	"path/filepath"
	"reflect"

	"go.uber.org/zap"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/api/flight"
	"github.com/berth-gpu/berth/healthcheck"
	"github.com/berth-gpu/berth/mps"
)

// The flight recorder's folder, under the agent's state, and its most bytes.
const (
	flightDir   = "flight"
	flightLimit = 16 << 20
)

// openFlight opens the flight recorder. An agent whose recorder does not open
// works without one.
func (a *Agent) openFlight() {
	var err error
	if a.flight, err = flight.Open(filepath.Join(a.settings.StateDir, flightDir), flightLimit, a.log); err != nil {
		a.log.Error("decisions are not recorded", zap.Error(err))
	}
}

// recordVerdict keeps what the gate said of a GPU, when it is not what it said last.
func (a *Agent) recordVerdict(u *unit, o mps.Observation, v healthcheck.Verdict) {
	if last := u.verdict.Swap(&v); last == nil || *last != v {
		a.flight.Record("healthcheck.Held", u.dev.UUID, o, v)
	}
}

// recordHealth keeps how the machine's health was made, when it is not what it was.
func (a *Agent) recordHealth(e healthcheck.Examination, h api.Health) {
	if !reflect.DeepEqual(e.Last, h) {
		a.flight.Record("healthcheck.Machine", a.settings.Instance, e, h)
	}
}
