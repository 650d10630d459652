// Package fleet is the placement server's model: task definitions, services, instances
// with their GPUs, and tasks, with the indexes over them.
//
// It is pure and owned by one goroutine. A record is never changed once it was put: to
// change one, copy it, change the copy, put that; so a record that was read may be kept
// and handed to other goroutines.
package fleet

import (
	"encoding/json"
	"time"

	"github.com/berth-gpu/berth/api"
)

// Kinds of stored records.
const (
	KindDefinition  = "definition"
	KindService     = "service"
	KindInstance    = "instance"
	KindTask        = "task"
	KindReplacement = "replacement" // package replace's
	KindCounter     = "counter"
	KindEvent       = "event"
)

// Definition is one revision of a task definition. Key: family:revision.
type Definition struct {
	Family       string          `json:"family"`
	Revision     int             `json:"revision"`
	Hash         string          `json:"hash"` // of JSON; the same content is the same revision
	JSON         json.RawMessage `json:"json"` // as RegisterTaskDefinition takes it
	RegisteredAt time.Time       `json:"registeredAt"`
}

// Service keeps a count of tasks of one definition. Key: its name.
type Service struct {
	Name              string        `json:"name"`
	Definition        string        `json:"definition"` // family:revision
	Desired           int           `json:"desired"`
	MinHealthyPercent int           `json:"minHealthyPercent"`
	MaximumPercent    int           `json:"maximumPercent"`
	StopAfter         time.Duration `json:"stopAfter,omitempty"` // disconnect: stop-after; 0: never
	Deleted           bool          `json:"deleted,omitempty"`   // its tasks are stopped, then it goes
	CreatedAt         time.Time     `json:"createdAt"`
	Failures          int           `json:"failures,omitempty"` // tasks in a row that did not stay up
	FailedAt          time.Time     `json:"failedAt,omitzero"`  // when the last of them ended
	RetryAt           time.Time     `json:"retryAt,omitzero"`   // no start before
	Reason            string        `json:"reason,omitempty"`   // what it waits for
}

// Instance is one machine. Key: its ID, the agent's instance name.
type Instance struct {
	ID           string            `json:"id"`
	AgentID      string            `json:"agentId"`
	Status       string            `json:"status"` // api.InstanceActive, InstanceDraining
	DrainReason  string            `json:"drainReason,omitempty"`
	RegisteredAt time.Time         `json:"registeredAt"`
	BootID       string            `json:"bootId"`
	Version      string            `json:"version"` // of its agent
	CPU          int64             `json:"cpu"`     // ECS units, for tasks
	MemoryMiB    int64             `json:"memoryMiB"`
	Ports        []api.Port        `json:"ports,omitempty"` // reserved
	Attributes   map[string]string `json:"attributes,omitempty"`
	GPUs         []GPU             `json:"gpus,omitempty"`
	Cutoff       time.Time         `json:"cutoff,omitzero"` // the lease was missed: AGENT_CONNECTIVITY is IMPAIRED since
	Lost         bool              `json:"lost,omitempty"`  // and the grace is over: its tasks count as gone
}

// GPU is one device of an instance.
type GPU struct {
	ID             string `json:"id"`
	Index          int    `json:"index"`
	Name           string `json:"name"`
	TotalMiB       int64  `json:"totalMiB"` // allocatable
	MaxClients     int    `json:"maxClients"`
	NoSharing      string `json:"noSharing,omitempty"`
	Standing       string `json:"standing"` // api.GPUOpen...
	StandingReason string `json:"standingReason,omitempty"`
}

// Task is one start of a definition: placed once, on one instance. Another try is
// another task, with Replaces. Key: its ID.
//
//	PENDING (no Instance) ──placed──> PENDING ──agent──> RUNNING ──> DEACTIVATING ──agent──> STOPPED
type Task struct {
	ID          string        `json:"id"` // 32 hex digits
	Service     string        `json:"service,omitempty"`
	Definition  string        `json:"definition"`
	Replaces    string        `json:"replaces,omitempty"`
	Reschedule  bool          `json:"reschedule,omitempty"` // standalone: started elsewhere when its machine or GPU is lost
	ClientToken string        `json:"clientToken,omitempty"`
	StopAfter   time.Duration `json:"stopAfter,omitempty"`

	Instance   string   `json:"instance,omitempty"` // "": not placed yet
	GPUs       []string `json:"gpus,omitempty"`
	Generation uint64   `json:"generation,omitempty"` // given when placed; larger than any before

	Desired        string          `json:"desired"`    // api.StatusRunning, StatusStopped
	LastStatus     string          `json:"lastStatus"` // api.StatusPending...
	StopCode       string          `json:"stopCode,omitempty"`
	StoppedReason  string          `json:"stoppedReason,omitempty"`
	Infrastructure bool            `json:"infrastructure,omitempty"` // its end was not its own doing
	Gone           bool            `json:"gone,omitempty"`           // its instance is lost: a copy may still run there
	Counted        bool            `json:"counted,omitempty"`        // its service has taken note of its end
	Containers     []api.Container `json:"containers,omitempty"`     // as its agent saw them last

	CreatedAt  time.Time `json:"createdAt"`
	PlacedAt   time.Time `json:"placedAt,omitzero"`
	StartedAt  time.Time `json:"startedAt,omitzero"`
	StoppingAt time.Time `json:"stoppingAt,omitzero"`
	StoppedAt  time.Time `json:"stoppedAt,omitzero"`
}

// Counter is a number that only grows. Key: its name.
type Counter struct {
	Value uint64 `json:"value"`
}

// Generation is the key of the counter that numbers the starts of tasks.
const Generation = "generation"
