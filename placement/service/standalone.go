package service

import (
	"time"

	"github.com/berth-gpu/berth/api"
)

// Alone is a task without a service, and the one that was started in its place.
type Alone struct {
	Task      Task      `json:"task"`
	Successor bool      `json:"successor,omitempty"` // there is, or was, one
	Now       time.Time `json:"now"`
}

// Do is Standalone, for the flight recorder.
func (in Alone) Do() []Action { return Standalone(in) }

// Standalone decides what to do for a task without a service.
//
// Such a task is one run, not one of several that are alike: of a rescheduled one
// there are never two copies, unless its machine is cut off. So it is stopped before it
// is started elsewhere, where a service's task is stopped after. Without Reschedule it
// ends with a machine that is lost and stays on one that is drained, as in ECS, and on a
// failed GPU it is left to end by itself.
func Standalone(in Alone) []Action {
	t := &in.Task
	var out []Action
	running := t.Desired == api.StatusRunning && t.LastStatus != api.StatusStopped
	switch {
	case running && t.Gone:
		out = append(out, Action{Task: t.ID, Code: api.StopInfrastructure, Reason: "its machine is lost"})
	case running && t.Vacate != "" && t.Reschedule:
		return append(out, Action{Task: t.ID, Code: api.StopInfrastructure, Reason: because("it is started elsewhere", t.Vacate)})
	}
	over := t.LastStatus == api.StatusStopped && (t.Infrastructure || t.StopCode == api.StopInfrastructure)
	if t.Reschedule && !in.Successor && (t.Gone || over) {
		out = append(out, Action{Definition: t.Definition, Replaces: t.ID})
	}
	return out
}
