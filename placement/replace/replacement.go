// Package replace decides which machines are replaced, and takes each through its
// replacement: a new machine is launched and has joined before the old one's tasks are
// moved, and the old one is terminated when nothing runs on it any more.
//
// It is pure. A Replacement is stored before the actions that Step gave with it are done,
// and each action may be done again, so that a server that restarts at any moment goes on
// where the last one was: a launch whose reply was lost is looked for before it is
// repeated, with the same token. One goroutine owns a replacement.
package replace

import (
	"fmt"
	"slices"
	"time"
)

// State is where a replacement stands.
type State string

// The states of a replacement, which its type draws.
const (
	Cordon    State = "CORDON"    // nothing is placed on the machine any more
	Launch    State = "LAUNCH"    // the provider makes a newcomer
	Join      State = "JOIN"      // it has to register, be connected and not be impaired
	Discard   State = "DISCARD"   // a newcomer that is not wanted is terminated
	Move      State = "MOVE"      // tasks that can run elsewhere are started there first
	Drain     State = "DRAIN"     // the others end by themselves, at the deadline by order
	Terminate State = "TERMINATE" // the provider ends the old machine
	Done      State = "DONE"
	Failed    State = "FAILED"
)

// Replacement is one machine's. It is stored; key: its ID.
//
//	          nothing is      launched,          joined, not        nothing          nothing is left,
//	          placed here     or found           impaired           movable left     or all told to end
//	CORDON ─────────> LAUNCH ─────────> JOIN ─────────────> MOVE ─────────────> DRAIN ─────────────> TERMINATE ──> DONE
//	   │               │  ^              │                   │                                           │
//	   │   no launch   │  │ another      │ too late          │ the newcomer broke, and                   │ the provider
//	   │   succeeds    v  │              │ or impaired       │ tasks found no room by                    │ does not end it
//	   │            DISCARD <────────────┘                   │ the deadline                              │
//	   │               │  │                                  v                                           v
//	   │   called off  │  └─────── newcomers used up ───> FAILED <───────────────────────────────────────┘
//	   └───────────────┴──> DONE
//
// In FAILED the machine stays cordoned and its tasks run on. Until a newcomer has
// registered, what the policy began is called off when the machine is well again (its
// agent came back, say): whatever was launched is terminated and the machine takes tasks
// again. After that, and for what an operator asked for, it goes on. On a lost machine nothing
// can be waited for: MOVE and DRAIN are passed at once.
type Replacement struct {
	ID       string `json:"id"` // also the first newcomer's token at the provider
	Instance string `json:"instance"`
	Reason   string `json:"reason"`             // why it is replaced
	Operator bool   `json:"operator,omitempty"` // asked for by a person: never called off
	State    State  `json:"state"`
	Says     string `json:"says,omitempty"` // what it waits for, or how it ended

	StartedAt time.Time `json:"startedAt"`
	ChangedAt time.Time `json:"changedAt"`       // of State
	MoveAt    time.Time `json:"moveAt,omitzero"` // the drain deadline counts from here
	EndAt     time.Time `json:"endAt,omitzero"`  // the tasks that were left were told to end

	Cordoned  bool       `json:"cordoned,omitempty"` // by this replacement, not before it
	Newcomers []Newcomer `json:"newcomers,omitempty"`
	Next      State      `json:"next,omitempty"`    // after DISCARD
	Why       string     `json:"why,omitempty"`     // of DISCARD and FAILED
	Excused   bool       `json:"excused,omitempty"` // an operator let the policy go on after this failed

	Call       int        `json:"call,omitempty"`       // number of the last call to the provider
	Calling    ActionKind `json:"calling,omitempty"`    // which call that is, until its result is known
	Unsure     bool       `json:"unsure,omitempty"`     // a launch of the last newcomer may have succeeded
	Terminated bool       `json:"terminated,omitempty"` // what this state terminates is dead
	Attempts   int        `json:"attempts,omitempty"`   // calls that failed in this state
	RetryAt    time.Time  `json:"retryAt,omitzero"`     // no call before
	Trouble    string     `json:"trouble,omitempty"`    // the last call's error
}

// Newcomer is one machine that was launched, or is about to be, to take the old one's place.
type Newcomer struct {
	Token       string    `json:"token"`        // the provider's: the same token is the same machine
	ID          string    `json:"id,omitempty"` // the provider's; its agent registers under it
	LaunchedAt  time.Time `json:"launchedAt,omitzero"`
	JoinedAt    time.Time `json:"joinedAt,omitzero"`
	FailedAt    time.Time `json:"failedAt,omitzero"`
	Failed      string    `json:"failed,omitempty"`     // why it was given up
	DiscardedAt time.Time `json:"discardedAt,omitzero"` // it is to be terminated, or was
	Excused     bool      `json:"excused,omitempty"`    // its failure counts no longer
}

// New is a replacement that begins.
func New(id, instance, reason string, operator bool, now time.Time) Replacement {
	now = stored(now)
	return Replacement{ID: id, Instance: instance, Reason: reason, Operator: operator, State: Cordon, StartedAt: now, ChangedAt: now,
		Says: fmt.Sprintf("%s takes no more tasks", instance), Newcomers: []Newcomer{{Token: id}}}
}

// Over says whether it has ended.
func (r Replacement) Over() bool { return r.State == Done || r.State == Failed }

// Newcomer is the last machine that was launched to take the old one's place, as far as
// it is known: the one that an Observation speaks of. "" when there is none, or none any
// more.
func (r Replacement) Newcomer() string {
	if len(r.Newcomers) == 0 {
		return ""
	}
	n := r.Newcomers[len(r.Newcomers)-1]
	if r.Over() && !n.DiscardedAt.IsZero() {
		return ""
	}
	return n.ID
}

// Retired says whether an instance is one that this replacement has ended or is about to
// end: its agent is told so, and never registered again.
func (r Replacement) Retired(instance string) bool {
	if instance == r.Instance {
		return r.State == Terminate || r.State == Done && r.Next != Done
	}
	return slices.ContainsFunc(r.Newcomers, func(n Newcomer) bool { return n.ID == instance && !n.DiscardedAt.IsZero() })
}

// Observation is what the server sees of a replacement's machines, and what came of the
// provider's calls.
type Observation struct {
	// Standing is the machine's status in the fleet, api.InstanceActive or
	// api.InstanceDraining; "": it is not there.
	Standing string `json:"standing,omitempty"`
	// Lost: nothing was heard of it past the grace; its tasks count as gone.
	Lost bool `json:"lost,omitempty"`
	// Recovered: it is connected, and Wants finds no reason for its replacement.
	Recovered bool `json:"recovered,omitempty"`
	TasksLeft int  `json:"tasksLeft,omitempty"` // placed on it and not STOPPED
	Movable   int  `json:"movable,omitempty"`   // of these, which start elsewhere and whose successors do not run yet
	NotEnding int  `json:"notEnding,omitempty"` // of these, which are not being stopped

	NewcomerStanding string `json:"newcomerStanding,omitempty"` // of the last newcomer; "": it is not there
	NewcomerJoined   bool   `json:"newcomerJoined,omitempty"`   // its stream is open and its health known
	NewcomerImpaired bool   `json:"newcomerImpaired,omitempty"` // or one of its GPUs is FAILED

	// LeaderSince is when this server began to lead: what nobody could see before
	// counts for no deadline.
	LeaderSince time.Time `json:"leaderSince,omitzero"`
	InFlight    bool      `json:"inFlight,omitempty"` // a call of this replacement has not returned yet
	Result      *Result   `json:"result,omitempty"`   // one that has returned since the last Step
}

// Result is what came of one call to the provider.
type Result struct {
	Call  int    `json:"call"`            // the action's
	ID    string `json:"id,omitempty"`    // of Launch, and of Find where it found something
	Found bool   `json:"found,omitempty"` // of Find
	Err   string `json:"err,omitempty"`
}

// ActionKind is what is to be done.
type ActionKind string

// Actions. The first five change the fleet, in the same transaction as the replacement;
// the others are calls to the provider, made once that is stored, each with a time limit
// (Policy.CallTimeout), and each with a Result that carries their number.
const (
	DoCordon   ActionKind = "cordon"   // Instance is DRAINING
	DoUncordon ActionKind = "uncordon" // Instance is ACTIVE again
	DoEndTasks ActionKind = "endTasks" // every task on Instance is stopped, with InfrastructureHealth
	DoRetire   ActionKind = "retire"   // Instance's agent is told RETIRED, now and whenever it comes
	DoForget   ActionKind = "forget"   // Instance leaves the fleet; a task on it that is not STOPPED is, with InfrastructureHealth

	DoLaunch    ActionKind = "launch"    // a machine for Token
	DoFind      ActionKind = "find"      // the machine that was made for Token
	DoTerminate ActionKind = "terminate" // Instance, dead or alive
)

// Action is one thing to do.
type Action struct {
	Kind     ActionKind `json:"kind"`
	Instance string     `json:"instance,omitempty"`
	Token    string     `json:"token,omitempty"`
	Call     int        `json:"call,omitempty"`
}

// stored is a time as a record has it after it was stored and read.
func stored(t time.Time) time.Time { return t.UTC().Round(0) }
