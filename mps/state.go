package mps

import (
	"slices"
	"time"
)

// State is all that the supervisor of one GPU knows. It is made by NewState and
// changed by Step alone.
type State struct {
	Phase  Phase     `json:"phase,omitzero"`
	Reason string    `json:"reason,omitzero"`
	Since  time.Time `json:"since,omitzero"`
	Notice string    `json:"notice,omitzero"`

	// wanted
	Use     Use `json:"use,omitzero"`
	Clients int `json:"clients"` // capped containers alive; -1: not known yet

	// found or made
	Looked     bool      `json:"looked,omitzero"` // what runs has been looked for since something was lost
	Daemon     Process   `json:"daemon,omitzero"`
	Server     Process   `json:"server,omitzero"`    // was ready
	Orphans    []Process `json:"orphans,omitzero"`   // ours, and neither of these
	Strays     bool      `json:"strays,omitzero"`    // servers run that nobody asked for
	Exclusive  bool      `json:"exclusive,omitzero"` // the compute mode, as seen last
	Intent     bool      `json:"intent,omitzero"`    // EXCLUSIVE_PROCESS may be set by us
	ID         string    `json:"id,omitzero"`        // BERTH_MPS_ID
	BootID     string    `json:"bootId,omitzero"`
	SingleUID  bool      `json:"singleUid,omitzero"`
	Daemons    int       `json:"daemons,omitzero"`  // started, of this boot
	Stranger   string    `json:"stranger,omitzero"` // who has our folder, and is not ours
	Unsupport  string    `json:"unsupport,omitzero"`
	Quarantine string    `json:"quarantine,omitzero"`

	// trouble
	Fault    *Fault      `json:"fault,omitzero"`
	Failures []time.Time `json:"failures,omitzero"`
	Attempts int         `json:"attempts,omitzero"` // failures since things last went well
	Until    time.Time   `json:"until,omitzero"`    // no start before
	Tries    int         `json:"tries,omitzero"`    // of what has to be done again where it stands: a look, a kill
	RetryAt  time.Time   `json:"retryAt,omitzero"`
	Trouble  string      `json:"trouble,omitzero"`  // what went wrong there
	Suspect  string      `json:"suspect,omitzero"`  // a line of the log that looks like a fault
	Tampered bool        `json:"tampered,omitzero"` // the defaults of servers to come are not ours
	Probes   int         `json:"probes,omitzero"`   // probes in a row that were not answered
	Budget   Budget      `json:"budget,omitzero"`

	// the loop
	Job        Job           `json:"job,omitzero"`    // in flight
	Ending     Job           `json:"ending,omitzero"` // the job in flight, or that was when the agent died, if it ends processes
	Cancelled  bool          `json:"cancelled,omitzero"`
	InspectAt  time.Time     `json:"inspectAt,omitzero"`
	ProbeEvery time.Duration `json:"probeEvery,omitzero"`
	Saved      Record        `json:"saved,omitzero"`  // stored
	Saving     Record        `json:"saving,omitzero"` // stored or being stored
	SaveAt     time.Time     `json:"saveAt,omitzero"`
	Random     uint64        `json:"random,omitzero"` // the supervisor's own stream of randomness
}

// Fault is why a GPU is closed, and what of it has to go before it opens again.
type Fault struct {
	Cause  Cause  `json:"cause"`
	Reason string `json:"reason"`
	Daemon bool   `json:"daemon,omitempty"` // the daemon and all servers; else the servers alone
}

func (f *Fault) clone() *Fault {
	if f == nil {
		return nil
	}
	g := *f
	return &g
}

// NewState is the state of a supervisor that has seen nothing yet. A record of
// another boot is void: its processes are gone, and the compute mode with them.
func NewState(rec Record, unsupported, bootID string, budget Budget, probeEvery time.Duration, random uint64, now time.Time) State {
	s := State{
		Phase: PhaseStarting, Since: now, Use: UseNone, Clients: -1,
		Unsupport: unsupported, BootID: bootID, Budget: budget, ProbeEvery: probeEvery, Random: random,
		Saved: rec, Saving: rec,
	}
	if rec.BootID != bootID {
		rec = Record{}
	}
	s.ID, s.Daemon, s.Server, s.Orphans = rec.ID, rec.Daemon, rec.Server, slices.Clone(rec.Orphans)
	s.SingleUID, s.Intent, s.Daemons = rec.SingleUID, rec.Exclusive, rec.Daemons
	s.Failures, s.Quarantine = slices.Clone(rec.Failures), rec.Quarantine
	s.Fault, s.Ending = rec.Fault.clone(), rec.Ending
	if rec.Use != "" {
		s.Use = rec.Use
	}
	return s
}

// Record is what has to survive.
func (s State) Record() Record {
	return Record{
		BootID: s.BootID, ID: s.ID, Daemon: s.Daemon, Server: s.Server, Orphans: slices.Clone(s.Orphans),
		SingleUID: s.SingleUID, Use: s.Use, Fault: s.Fault.clone(), Ending: s.Ending, Exclusive: s.Intent, Daemons: s.Daemons,
		Failures: slices.Clone(s.Failures), Quarantine: s.Quarantine,
	}
}

// Status is the state in short.
func (s State) Status() Status {
	var cause Cause
	if s.Fault != nil {
		cause = s.Fault.Cause
	}
	return Status{
		Cause: cause, State: s.Phase, Reason: s.Reason, Since: s.Since, Use: s.Use, Notice: s.Notice,
		DaemonPID: s.Daemon.PID, ServerPID: s.Server.PID,
		Restarts: max(0, s.Daemons-1), Failures: len(s.Failures), Budget: s.Budget.Failures, SingleUID: s.SingleUID,
	}
}
