// Package api is what the parts of berth say to each other.
//
// This file is the agent's local API: JSON over HTTP on a unix socket that only
// root can open. Words and spellings are those of the Amazon ECS API
// (DescribeContainerInstances, DescribeTasks), so that what an operator reads
// here is what `aws ecs` shows.
package api

import "time"

// Sharing modes of a GPU, as in ECS's GpuDevice.sharingMode.
const (
	ModeIdle      = "IDLE"
	ModeNvidiaMPS = "NVIDIA_MPS"
	ModeDedicated = "DEDICATED"
)

// Task and container states, as ECS's lastStatus and desiredStatus spell them.
const (
	StatusPending      = "PENDING"
	StatusRunning      = "RUNNING"
	StatusDeactivating = "DEACTIVATING" // being stopped
	StatusStopped      = "STOPPED"
)

// Health states of a machine, as in ECS's InstanceHealthCheckState.
const (
	HealthOK               = "OK"
	HealthImpaired         = "IMPAIRED"
	HealthInsufficientData = "INSUFFICIENT_DATA"
	HealthInitializing     = "INITIALIZING"
)

// Instance is one machine as its agent sees it: GET /v1/instances, a list of one.
type Instance struct {
	Name          string            `json:"name"`              // berth.instance, unique per agent
	Cluster       string            `json:"cluster"`           // ECS_CLUSTER
	Version       string            `json:"version"`           // of berth-agent
	AgentID       string            `json:"agentId,omitempty"` // random, kept with the agent's state
	Status        string            `json:"status"`            // ACTIVE, DRAINING
	Connected     bool              `json:"agentConnected"`    // to the server that answers, or to itself
	BootID        string            `json:"bootId"`
	StartedAt     time.Time         `json:"startedAt"` // the agent's
	EC2InstanceID string            `json:"ec2InstanceId,omitempty"`
	Attributes    map[string]string `json:"attributes,omitempty"`
	DriverVersion string            `json:"driverVersion,omitempty"`
	Registered    Resources         `json:"registeredResources"`
	Remaining     Resources         `json:"remainingResources"`
	ReservedPorts []Port            `json:"reservedPorts,omitempty"`
	GPUs          []GPU             `json:"gpuDevices"`
	Health        Health            `json:"healthStatus"`
	Waiting       []Waiting         `json:"waiting,omitempty"` // wanted tasks that have no GPU yet
	Problems      []BadInput        `json:"problems,omitempty"`
}

// Resources are a machine's amounts besides GPUs.
type Resources struct {
	CPU       int64 `json:"cpu"`         // ECS CPU units: 1024 are one vCPU
	MemoryMiB int64 `json:"memoryInMiB"` // host memory
}

// Port is one host port.
type Port struct {
	Number   int    `json:"port"`
	Protocol string `json:"protocol"` // tcp, udp
}

// GPU is one device. The first seven fields are ECS's GpuDevice.
type GPU struct {
	ID                   string `json:"gpuId"`
	SharingMode          string `json:"sharingMode"`
	TotalMemoryInMiB     int64  `json:"totalMemoryInMiB"`     // allocatable: total - reserved - the MPS server's reserve
	RemainingMemoryInMiB int64  `json:"remainingMemoryInMiB"` // total - sum of caps, not measured use
	ContainerCount       int    `json:"containerCount"`

	Index           int       `json:"index"` // NVML's
	Name            string    `json:"name"`  // NVIDIA H200
	UsedMemoryInMiB int64     `json:"usedMemoryInMiB"`
	UtilizationPct  int       `json:"utilizationPercent"`
	MaxClients      int       `json:"maxClients"`          // MPS clients of the driver branch
	NoSharing       string    `json:"noSharing,omitempty"` // why MPS cannot run here
	Standing        string    `json:"standing"`            // towards placement: OPEN, CLOSED, DRAINING, FAILED
	StandingReason  string    `json:"standingReason,omitempty"`
	ComputeMode     string    `json:"computeMode"` // DEFAULT, EXCLUSIVE_PROCESS, PROHIBITED
	Held            bool      `json:"held"`
	HeldReason      string    `json:"heldReason,omitempty"` // why not
	MPS             MPS       `json:"mps"`
	Slices          []Slice   `json:"slices"`
	Since           time.Time `json:"since"` // of the supervisor's state
}

// MPS is the GPU's daemon as its supervisor sees it.
type MPS struct {
	State         string `json:"state"` // the supervisor's: HELD, DRAINING, QUARANTINED...
	Reason        string `json:"reason,omitempty"`
	DaemonPID     int    `json:"daemonPid,omitempty"`
	ServerPID     int    `json:"serverPid,omitempty"`
	Restarts      int    `json:"restarts"` // daemons started after the first
	Failures      int    `json:"failures"` // within the budget's window
	Budget        int    `json:"budget"`
	SingleUID     bool   `json:"singleUid,omitempty"` // the binary knows no -multiuser-server
	PipeDirectory string `json:"pipeDirectory"`
}

// Slice is what one container holds of a GPU.
type Slice struct {
	TaskID          string `json:"taskId"`
	Family          string `json:"family"`
	Container       string `json:"container"`
	MemoryInMiB     int64  `json:"memoryInMiB"`          // the cap; the whole GPU's memory for a DEDICATED one
	MaxComputePct   int32  `json:"maxComputePercent"`    // 0: none asked for
	UsedMemoryInMiB int64  `json:"usedMemoryInMiB"`      // by NVML, summed over its processes
	LastStatus      string `json:"lastStatus,omitempty"` // the container's
}

// Health is ECS's healthStatus.
type Health struct {
	OverallStatus string         `json:"overallStatus"`
	Details       []HealthDetail `json:"details"`
}

// HealthDetail is one check's result.
type HealthDetail struct {
	Type             string    `json:"type"` // CONTAINER_RUNTIME, ACCELERATED_COMPUTE
	Status           string    `json:"status"`
	StatusReason     string    `json:"statusReason,omitempty"`
	LastStatusChange time.Time `json:"lastStatusChange"`
}

// Waiting is a wanted task that no GPU can take now, with one sentence per GPU.
type Waiting struct {
	Name    string   `json:"name"` // the task definition file's
	Family  string   `json:"family"`
	Reasons []string `json:"reasons"`
}

// BadInput is a task definition file that was refused, with every problem in it.
type BadInput struct {
	Name     string   `json:"name"`
	Problems []string `json:"problems"`
}

// Task is one task: GET /v1/tasks (all), newest first.
type Task struct {
	ID             string      `json:"taskId"`
	Name           string      `json:"name"` // the wanted task it serves: the file's name
	Family         string      `json:"family"`
	Group          string      `json:"group,omitempty"`             // ECS's: service:NAME or family:NAME
	Instance       string      `json:"containerInstance,omitempty"` // where it is placed
	Definition     string      `json:"taskDefinition,omitempty"`    // family:revision, at the server
	Replaces       string      `json:"replaces,omitempty"`          // the task whose place it takes
	Generation     uint64      `json:"generation"`
	LastStatus     string      `json:"lastStatus"`
	DesiredStatus  string      `json:"desiredStatus"`
	StopCode       string      `json:"stopCode,omitempty"`
	StoppedReason  string      `json:"stoppedReason,omitempty"`
	Reason         string      `json:"reason,omitempty"` // what it waits for while PENDING
	GPUIDs         []string    `json:"gpuIds,omitempty"`
	CreatedAt      time.Time   `json:"createdAt"`
	StartedAt      *time.Time  `json:"startedAt,omitempty"`
	StoppedAt      *time.Time  `json:"stoppedAt,omitempty"`
	Containers     []Container `json:"containers"`
	Infrastructure bool        `json:"stoppedByInfrastructure,omitempty"` // berth itself or its GPU ended it: it may be started elsewhere
}

// Container is one container of a task.
type Container struct {
	Name          string   `json:"name"`
	RuntimeID     string   `json:"runtimeId,omitempty"` // Docker's id
	Image         string   `json:"image"`
	LastStatus    string   `json:"lastStatus"`
	ExitCode      *int     `json:"exitCode,omitempty"`
	Reason        string   `json:"reason,omitempty"`
	HealthStatus  string   `json:"healthStatus,omitempty"` // HEALTHY, UNHEALTHY, UNKNOWN
	RestartCount  int      `json:"restartCount"`
	GPUIDs        []string `json:"gpuIds,omitempty"`
	MemoryInMiB   int64    `json:"gpuMemoryInMiB,omitempty"`
	MaxComputePct int32    `json:"maxComputePercent,omitempty"`
}

// Check is one precondition: GET /v1/doctor returns them all.
type Check struct {
	Name string `json:"name"` // driver, mps, docker, cgroup, ...
	OK   bool   `json:"ok"`
	Says string `json:"says"`           // what was found
	Do   string `json:"do,omitempty"`   // what to do about it, when not OK
	Warn bool   `json:"warn,omitempty"` // not OK, and berth works all the same
}

// Error is the body of every answer that is not 2xx.
type Error struct {
	Message string `json:"message"`
}

// The local API's paths. A task is stopped with POST, and its stopped state is
// in GET /v1/tasks. Logs answer text/plain; query: container (needed when the task has
// more than one), follow=1, tail=N (default: all).
const (
	PathTasks   = "/v1/tasks"
	PathStop    = "/v1/tasks/{id}/stop"
	PathLogs    = "/v1/tasks/{id}/logs"
	PathDoctor  = "/v1/doctor"
	PathMetrics = "/metrics"
)
