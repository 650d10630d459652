package mps

import (
	"context"
	"time"
)

// Use is what the agent wants of the GPU.
type Use string

const (
	UseNone      Use = "NONE"       // give it back: no daemon, mode DEFAULT (drain, uninstall)
	UseIdle      Use = "IDLE"       // ready to be shared: daemon up, no server, mode DEFAULT
	UseMPS       Use = "NVIDIA_MPS" // shared: server up, mode EXCLUSIVE_PROCESS
	UseDedicated Use = "DEDICATED"  // one container has it whole: no server, mode DEFAULT
)

// Config is what an operator may set; a zero field has the default named here.
type Config struct {
	RunDir        string // /run/berth
	LogDir        string // /var/log/berth
	ControlBinary string // nvidia-cuda-mps-control, looked up in Path
	Path          string // PATH of the daemon, which finds nvidia-cuda-mps-server through it [B]
	LibraryPath   string // LD_LIBRARY_PATH of the daemon, through which servers find libcuda.so.1 [B]

	TickEvery          time.Duration // 1 s: a look at /proc and the log, no process is made
	ProbeEvery         time.Duration // 10 s: one control command through client/, 3-6 ms of CPU; a third as often while no server runs
	ProbeTimeout       time.Duration // 2 s
	StartTimeout       time.Duration // 10 s, for the daemon to answer
	ServerStartTimeout time.Duration // 60 s, for a server to be ready
	StopTimeout        time.Duration // 5 s, for a server or daemon to go when told
	LogLimitBytes      int64         // 8 MiB: the daemon's log is cut to nothing past this
	Budget             Budget
}

// Budget is how often a GPU's daemon or server may fail before it is left alone.
type Budget struct {
	Failures int           `json:"failures,omitzero"` // 5
	Window   time.Duration `json:"window,omitzero"`   // 10 min
}

// Hooks are what the Holder needs of its surroundings. All but Decided must be set.
type Hooks struct {
	// ComputeMode and SetComputeMode read and write the GPU's compute mode:
	// EXCLUSIVE_PROCESS or, false, DEFAULT.
	ComputeMode    func(ctx context.Context) (exclusive bool, err error)
	SetComputeMode func(ctx context.Context, exclusive bool) error
	// Save stores the record durably before it returns.
	Save func(Record) error
	// Notify is told each change of Status, in order, from the Holder's loop: it must not block.
	Notify func(Status)
	// Decided is told each decision that changed something, in order, from the
	// Holder's loop: what went into Step and what came out, which encode to JSON for
	// [Replay]. It must not block. An inspection in its time that finds everything as
	// it was is not told.
	Decided func(in, out any)
}

// Process names one process of this boot: a pid alone may be used again.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // field 22 of /proc/PID/stat, in clock ticks since boot
}

// Record is what must survive a crash of the agent. One of another boot is void.
type Record struct {
	BootID     string      `json:"bootId"`
	ID         string      `json:"id,omitempty"` // BERTH_MPS_ID of the daemon started last, stored before its start
	Daemon     Process     `json:"daemon,omitzero"`
	Server     Process     `json:"server,omitzero"` // stored once it was ready
	Orphans    []Process   `json:"orphans,omitzero"`
	SingleUID  bool        `json:"singleUid,omitempty"`  // the binary knows no -multiuser-server
	Use        Use         `json:"use,omitempty"`        // wanted
	Exclusive  bool        `json:"exclusive,omitempty"`  // EXCLUSIVE_PROCESS may be set: stored before it is, cleared after DEFAULT is
	Daemons    int         `json:"daemons,omitempty"`    // started
	Fault      *Fault      `json:"fault,omitempty"`      // a GPU that is drained stays so over a restart of the agent
	Ending     Job         `json:"ending,omitempty"`     // what ends processes now, so that their end is no loss
	Failures   []time.Time `json:"failures,omitzero"`    // within the budget's window
	Quarantine string      `json:"quarantine,omitempty"` // why
}

// Status is the Holder in short.
type Status struct {
	State     Phase     `json:"state,omitzero"`
	Reason    string    `json:"reason,omitzero"` // one sentence: why it is in this state, or what it waits for
	Cause     Cause     `json:"cause,omitzero"`  // what broke, until it has been put right; "" when nothing did
	Since     time.Time `json:"since,omitzero"`
	Use       Use       `json:"use,omitzero"`
	DaemonPID int       `json:"daemonPid,omitzero"` // 0: none
	ServerPID int       `json:"serverPid,omitzero"` // 0: none
	Restarts  int       `json:"restarts,omitzero"`  // daemons started after the first
	Failures  int       `json:"failures,omitzero"`  // within the budget's window
	Budget    int       `json:"budget,omitzero"`
	SingleUID bool      `json:"singleUid,omitzero"`
	Notice    string    `json:"notice,omitzero"` // what was found changed by somebody else and put back, last
}

// Observation is a fresh look for the gate: nothing in it is older than the call.
type Observation struct {
	At     time.Time   `json:"at,omitzero"`
	Status Status      `json:"status,omitzero"`
	Daemon ProcessView `json:"daemon,omitzero"`
	Server ProcessView `json:"server,omitzero"`
	// LockHolder is the pid that holds the pipe folder's lock, 0 for nobody.
	LockHolder int `json:"lockHolder,omitzero"`
	// Probe is what a control command through client/ met: nil when it was answered.
	Probe     error         `json:"probe,omitzero"`
	ProbeTook time.Duration `json:"probeTook,omitzero"`
	// ServerStatus is the daemon's word for its server: ACTIVE, FAULT, INITIALIZING,
	// or "" where the daemon has no such command.
	ServerStatus string `json:"serverStatus,omitzero"`
	Exclusive    bool   `json:"exclusive,omitzero"` // the compute mode is EXCLUSIVE_PROCESS
	ModeErr      error  `json:"modeErr,omitzero"`   // when the compute mode could not be read
}

// ProcessView is a recorded process as /proc shows it.
type ProcessView struct {
	PID   int    `json:"pid,omitzero"`   // 0: none is recorded
	Alive bool   `json:"alive,omitzero"` // there, with the recorded start time, and not a zombie
	State string `json:"state,omitzero"` // letter of /proc/PID/stat: S sleeping, T stopped, D in the kernel...
}

// Stopped says that the process is there but does nothing: SIGSTOP, a debugger.
func (v ProcessView) Stopped() bool { return v.State == "T" || v.State == "t" }
