package healthcheck

import (
	"time"

	"github.com/berth-gpu/berth/api"
)

// Types of a machine's checks, as in ECS's InstanceHealthCheckType.
const (
	ContainerRuntime   = "CONTAINER_RUNTIME"
	AcceleratedCompute = "ACCELERATED_COMPUTE"
)

// Check is one observation of a part of the machine.
type Check struct {
	Type    string `json:"type"`
	OK      bool   `json:"ok"`
	Pending bool   `json:"pending,omitzero"` // not OK or not known yet because it is still starting
	Reason  string `json:"reason,omitzero"`  // why it is not OK
}

// Machine makes the machine's health of its checks, keeping from the last one
// when a status changed. Overall is the most severe: IMPAIRED, INSUFFICIENT_DATA,
// INITIALIZING, OK.
func Machine(last api.Health, checks []Check, now time.Time) api.Health {
	h := api.Health{OverallStatus: api.HealthInsufficientData}
	for i, c := range checks {
		d := api.HealthDetail{Type: c.Type, Status: api.HealthOK, LastStatusChange: now}
		switch {
		case !c.OK:
			d.Status, d.StatusReason = api.HealthImpaired, c.Reason
		case c.Pending:
			d.Status = api.HealthInitializing
		}
		for _, old := range last.Details {
			if old.Type == d.Type && old.Status == d.Status {
				d.LastStatusChange = old.LastStatusChange
			}
		}
		h.Details = append(h.Details, d)
		if i == 0 || severity(d.Status) > severity(h.OverallStatus) {
			h.OverallStatus = d.Status
		}
	}
	return h
}

// Examination is what goes into [Machine], as the flight recorder keeps it.
type Examination struct {
	Last   api.Health `json:"last"`
	Checks []Check    `json:"checks"`
	Now    time.Time  `json:"now"`
}

// Health is what comes out of it.
func (e Examination) Health() api.Health { return Machine(e.Last, e.Checks, e.Now) }

func severity(status string) int {
	switch status {
	case api.HealthImpaired:
		return 3
	case api.HealthInsufficientData:
		return 2
	case api.HealthInitializing:
		return 1
	}
	return 0
}
