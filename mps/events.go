package mps

// Job is work that takes time. At most one is in flight; its end is an event.
type Job string

const (
	JobNone         Job = ""
	JobLook         Job = "look"          // folders, processes, lock, daemon, servers, mode -> Found
	JobStartDaemon  Job = "start daemon"  // -> DaemonUp
	JobStartServer  Job = "start server"  // -> ServerUp
	JobSetExclusive Job = "set exclusive" // -> ModeSet
	JobSetDefault   Job = "set default"   // -> ModeSet
	JobStopServers  Job = "stop servers"  // -> ServersDown
	JobQuitDaemon   Job = "quit daemon"   // -> DaemonDown
	JobKill         Job = "kill"          // -> Killed
	JobInspect      Job = "inspect"       // -> Inspected
	JobReapply      Job = "reapply"       // the defaults of servers to come -> Reapplied
)

// Action is what the loop is to do, in the order given; when one fails, those
// after it are not done. A Cancel is done at once, whatever is in flight.
type Action interface{ action() }

type (
	// Save stores the record.
	Save struct {
		Record Record `json:"record,omitzero"`
	}
	// Do starts a job on what is named.
	Do struct {
		Job    Job       `json:"job,omitzero"`
		ID     string    `json:"id,omitzero"`
		Daemon Process   `json:"daemon,omitzero"`
		Server Process   `json:"server,omitzero"`
		Kill   []Process `json:"kill,omitzero"`
		Force  bool      `json:"force,omitzero"`
	}
	// Cancel ends the job in flight, which then fails.
	Cancel struct {
		Job Job `json:"job,omitzero"`
	}
)

func (Save) action()   {}
func (Do) action()     {}
func (Cancel) action() {}

// Event is what happened.
type Event interface{ event() }

type (
	// Want, ClientsAre and Forgive come from the agent.
	Want struct {
		Use Use `json:"use,omitzero"`
	}
	ClientsAre struct {
		N int `json:"n"`
	}
	Forgive struct{}
	// Tick is a second or so.
	Tick struct{}
	// Exited and Stopped are a recorded process's: by pidfd, and by its state T in /proc.
	Exited struct {
		Process Process `json:"process,omitzero"`
	}
	Stopped struct {
		Process Process `json:"process,omitzero"`
	}
	// Faulted is a line of the log that looks like a fatal fault.
	Faulted struct {
		Line string `json:"line,omitzero"`
	}
	// Doubt asks for an inspection now: somebody else saw something odd.
	Doubt struct{}

	// Saved, and the ends of jobs.
	Saved struct {
		Record Record `json:"record,omitzero"`
	}
	SaveFailed struct {
		Reason string `json:"reason,omitzero"`
		Job    Job    `json:"job,omitzero"` // that was to follow, if any
	}
	Found struct {
		Daemon        Process   `json:"daemon,omitzero"`
		Problem       string    `json:"problem,omitzero"` // why the daemon cannot be adopted
		Server        Process   `json:"server,omitzero"`
		ServerProblem string    `json:"serverProblem,omitzero"`
		Starting      bool      `json:"starting,omitzero"`  // a server is coming up
		SingleUID     bool      `json:"singleUid,omitzero"` // of the daemon
		Orphans       []Process `json:"orphans,omitzero"`
		Stranger      string    `json:"stranger,omitzero"` // who has our folder, and is not ours
		Exclusive     bool      `json:"exclusive,omitzero"`
	}
	DaemonUp struct {
		Daemon    Process `json:"daemon,omitzero"`
		SingleUID bool    `json:"singleUid,omitzero"`
	}
	ServerUp struct {
		Server Process `json:"server,omitzero"`
	}
	ModeSet struct {
		Exclusive bool `json:"exclusive"`
	}
	ServersDown struct{}
	DaemonDown  struct{}
	Killed      struct{}
	Reapplied   struct{}
	Inspected   struct {
		Split        string `json:"split,omitzero"`      // another daemon, or none, has our folder
		Gone         bool   `json:"gone,omitzero"`       // nobody answers
		Unanswered   string `json:"unanswered,omitzero"` // timed out, or not understood
		Servers      []int  `json:"servers,omitzero"`
		ServerStatus string `json:"serverStatus,omitzero"` // ACTIVE, FAULT..., "" where the daemon has no word for it
		Tampered     string `json:"tampered,omitzero"`     // which default is not berth's
		Exclusive    bool   `json:"exclusive,omitzero"`
		ModeUnknown  string `json:"modeUnknown,omitzero"`
	}
	// Failed ends any job.
	Failed struct {
		Job       Job    `json:"job,omitzero"`
		Reason    string `json:"reason,omitzero"`
		Permanent bool   `json:"permanent,omitzero"` // no retry can help
		Cancelled bool   `json:"cancelled,omitzero"`
	}
)

func (Want) event()        {}
func (ClientsAre) event()  {}
func (Forgive) event()     {}
func (Tick) event()        {}
func (Exited) event()      {}
func (Stopped) event()     {}
func (Faulted) event()     {}
func (Doubt) event()       {}
func (Saved) event()       {}
func (SaveFailed) event()  {}
func (Found) event()       {}
func (DaemonUp) event()    {}
func (ServerUp) event()    {}
func (ModeSet) event()     {}
func (ServersDown) event() {}
func (DaemonDown) event()  {}
func (Killed) event()      {}
func (Reapplied) event()   {}
func (Inspected) event()   {}
func (Failed) event()      {}
