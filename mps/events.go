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
	Save struct{ Record Record }
	// Do starts a job on what is named.
	Do struct {
		Job    Job
		ID     string
		Daemon Process
		Server Process
		Kill   []Process
		Force  bool
	}
	// Cancel ends the job in flight, which then fails.
	Cancel struct{ Job Job }
)

func (Save) action()   {}
func (Do) action()     {}
func (Cancel) action() {}

// Event is what happened.
type Event interface{ event() }

type (
	// Want, ClientsAre and Forgive come from the agent.
	Want       struct{ Use Use }
	ClientsAre struct{ N int }
	Forgive    struct{}
	// Tick is a second or so.
	Tick struct{}
	// Exited and Stopped are a recorded process's: by pidfd, and by its state T in /proc.
	Exited  struct{ Process Process }
	Stopped struct{ Process Process }
	// Faulted is a line of the log that looks like a fatal fault.
	Faulted struct{ Line string }
	// Doubt asks for an inspection now: somebody else saw something odd.
	Doubt struct{}

	// Saved, and the ends of jobs.
	Saved      struct{ Record Record }
	SaveFailed struct {
		Reason string
		Job    Job // that was to follow, if any
	}
	Found struct {
		Daemon        Process
		Problem       string // why the daemon cannot be adopted
		Server        Process
		ServerProblem string
		Starting      bool // a server is coming up
		SingleUID     bool // of the daemon
		Orphans       []Process
		Stranger      string // who has our folder, and is not ours
		Exclusive     bool
	}
	DaemonUp struct {
		Daemon    Process
		SingleUID bool
	}
	ServerUp    struct{ Server Process }
	ModeSet     struct{ Exclusive bool }
	ServersDown struct{}
	DaemonDown  struct{}
	Killed      struct{}
	Reapplied   struct{}
	Inspected   struct {
		Split        string // another daemon, or none, has our folder
		Gone         bool   // nobody answers
		Unanswered   string // timed out, or not understood
		Servers      []int
		ServerStatus string // ACTIVE, FAULT..., "" where the daemon has no word for it
		Tampered     string // which default is not berth's
		Exclusive    bool
		ModeUnknown  string
	}
	// Failed ends any job.
	Failed struct {
		Job       Job
		Reason    string
		Permanent bool // no retry can help
		Cancelled bool
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
