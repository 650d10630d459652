package mps

import (
	"slices"
	"time"
)

// State is all that the supervisor of one GPU knows. It is made by NewState and
// changed by Step alone.
type State struct {
	Phase  Phase
	Reason string
	Since  time.Time
	Notice string

	// wanted
	Use     Use
	Clients int // capped containers alive; -1: not known yet

	// found or made
	Looked     bool // what runs has been looked for since something was lost
	Daemon     Process
	Server     Process   // was ready
	Orphans    []Process // ours, and neither of these
	Strays     bool      // servers run that nobody asked for
	Exclusive  bool      // the compute mode, as seen last
	Intent     bool      // EXCLUSIVE_PROCESS may be set by us
	ID         string    // BERTH_MPS_ID
	BootID     string
	SingleUID  bool
	Daemons    int    // started, of this boot
	Stranger   string // who has our folder, and is not ours
	Unsupport  string
	Quarantine string

	// trouble
	Fault    *Fault
	Failures []time.Time
	Attempts int       // failures since things last went well
	Until    time.Time // no start before
	Tries    int       // of what has to be done again where it stands: a look, a kill
	RetryAt  time.Time
	Trouble  string // what went wrong there
	Suspect  string // a line of the log that looks like a fault
	Tampered bool   // the defaults of servers to come are not ours
	Probes   int    // probes in a row that were not answered
	Budget   Budget

	// the loop
	Job        Job // in flight
	Ending     Job // the job in flight, or that was when the agent died, if it ends processes
	Cancelled  bool
	InspectAt  time.Time
	ProbeEvery time.Duration
	Saved      Record // stored
	Saving     Record // stored or being stored
	SaveAt     time.Time
	Random     uint64 // the supervisor's own stream of randomness
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
