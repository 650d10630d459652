package config

import (
	"path/filepath"
	"time"
)

// Agent is everything an operator can say about one berth-agent. Amounts of
// memory are MiB, CPU is in ECS units (1024 are one vCPU).
type Agent struct {
	Instance       string // name of this agent, unique on its machine: the label berth.instance
	Cluster        string
	RunDir         string // sockets and pipe folders; gone after a reboot
	StateDir       string // agent.db
	LogDir         string // the agent's and the MPS daemons' logs
	TaskDir        string // task definitions wanted on this machine, one a file
	MetricsAddress string // loopback host:port; "" for none
	LogLevel       string // debug, info, warn, error
	TrustDomain    string // who may share a GPU: cluster
	Attributes     map[string]string

	Server   Upstream
	Docker   Docker
	GPU      GPU
	MPS      MPS
	Task     Task
	Reserved Reserved
}

// Upstream is the placement server that the agent streams to.
type Upstream struct {
	Address   []string // host:port or unix:/path, tried in turn; none: the task folder is the source
	CA        string   // file of the certificates that the server's is checked against; "" for plain text
	Cert, Key string   // files of the agent's own
}

// Docker is how the agent uses the engine.
type Docker struct {
	Host              string // unix:///var/run/docker.sock
	Runtime           string // auto, nvidia, cdi, plain
	NvidiaRuntime     string // the engine's name for the NVIDIA runtime
	PullBehavior      string // default, always, once, prefer-cached
	StopTimeout       time.Duration
	StartTimeout      time.Duration
	CreateTimeout     time.Duration
	PullTimeout       time.Duration
	DisablePrivileged bool
}

// GPU is where the devices are and how they are watched.
type GPU struct {
	DevRoot     string
	NVMLLibrary string // "" for the system's libnvidia-ml.so.1
	ReserveMiB  int64  // per GPU, kept for the MPS server
	SampleEvery time.Duration
}

// MPS is how the control daemons are run and what follows when one is lost.
type MPS struct {
	ControlBinary      string // nvidia-cuda-mps-control, found through Path
	Path               string // PATH of the daemon
	LibraryPath        string // LD_LIBRARY_PATH of the daemon
	ProbeEvery         time.Duration
	ProbeTimeout       time.Duration
	StartTimeout       time.Duration
	ServerStartTimeout time.Duration
	Budget             Budget
	OnDaemonLoss       string // drain, restart
	DrainDeadline      time.Duration
}

// Budget is at how many failures of its daemon or server within Window a GPU is
// quarantined.
type Budget struct {
	Failures int
	Window   time.Duration
}

// Task holds limits for every task.
type Task struct {
	CleanupAfter time.Duration // a stopped task's containers are removed after this
	PidsLimit    int64         // 0 for none
	CPUPeriod    time.Duration // of the task's cgroup
}

// Reserved is what the machine keeps from tasks.
type Reserved struct {
	MemoryMiB int64
	CPU       int64
	Ports     []uint16
	UDPPorts  []uint16
}

// Values of settings that are one of a few words.
const (
	RuntimeAuto   = "auto"
	RuntimeNvidia = "nvidia"
	RuntimeCDI    = "cdi"
	RuntimePlain  = "plain"

	PullDefault      = "default"
	PullAlways       = "always"
	PullOnce         = "once"
	PullPreferCached = "prefer-cached"

	LossDrain   = "drain"
	LossRestart = "restart"
)

// Socket is the agent's local API, which only root can open.
func (a *Agent) Socket() string { return filepath.Join(a.RunDir, "agent.sock") }

// StateFile is the agent's database.
func (a *Agent) StateFile() string { return filepath.Join(a.StateDir, "agent.db") }
