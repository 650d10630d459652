package api

import (
	"encoding/json"
	"time"
)

// This file is what a placement server adds to the local API, on a socket of its own
// that only root can open. An agent answers GET /v1/instances and /v1/tasks with its
// own machine and tasks, a server with all of them.
//
// GET /v1/tasks takes filters: ref (a task's id, the start of one, or its name), line (a
// task's id: it and those that took its place; may be repeated), service, instance,
// unplaced=1 (PENDING on no instance). They spare work and are no promise: an agent knows
// none of them, and whoever asks leaves out himself what he did not ask for.
//
// A reply can be lost, so every request may be sent again: RunTask has its token, POST
// /v1/services with what a service is already gives that service (as ECS's CreateService
// does), and a stop, an update, a drain or a replacement asked for twice is one.

// AgentConnectivity is the health check of a machine that the server itself makes, as
// in ECS's InstanceHealthCheckType.
const AgentConnectivity = "AGENT_CONNECTIVITY"

// States of an instance, as in ECS's ContainerInstanceStatus.
const (
	InstanceActive   = "ACTIVE"
	InstanceDraining = "DRAINING" // takes no new task; its service tasks are placed elsewhere
)

// Stop codes of a task, as in ECS's TaskStopCode.
const (
	StopTaskFailedToStart = "TaskFailedToStart"
	StopEssentialExited   = "EssentialContainerExited"
	StopUserInitiated     = "UserInitiated"
	StopServiceScheduler  = "ServiceSchedulerInitiated"
	StopInfrastructure    = "InfrastructureHealth"
	StopSpotInterruption  = "SpotInterruption"
	StopTerminationNotice = "TerminationNotice"
)

// Standing of a GPU towards placement.
const (
	GPUOpen     = "OPEN"
	GPUClosed   = "CLOSED"   // nothing starts on it for now; what runs stays
	GPUDraining = "DRAINING" // its tasks have to move before it can be mended
	GPUFailed   = "FAILED"   // quarantined, lost or broken until somebody sees to it
)

// Health of a container, as in ECS's HealthStatus.
const ContainerUnhealthy = "UNHEALTHY"

// RunTask is POST /v1/tasks. The answer is RunTaskAnswer, once the tasks are stored.
type RunTask struct {
	Definition  json.RawMessage `json:"taskDefinition"`        // as RegisterTaskDefinition takes it
	Count       int             `json:"count"`                 // 1 to 100
	Reschedule  bool            `json:"reschedule,omitempty"`  // a lost machine or GPU does not end it: it is started elsewhere
	ClientToken string          `json:"clientToken,omitempty"` // the same token again gives the same tasks
}

// RunTaskAnswer is what was made of it.
type RunTaskAnswer struct {
	Tasks []Task `json:"tasks"`
}

// Service is one service: GET /v1/services (all), POST /v1/services (create),
// POST /v1/services/{name} (update: the members that are given), DELETE
// /v1/services/{name}.
type Service struct {
	Name                  string          `json:"serviceName"`
	Status                string          `json:"status"`               // ACTIVE, DRAINING (deleted, its tasks still stop), INACTIVE
	TaskDefinition        string          `json:"taskDefinition"`       // family:revision
	Definition            json.RawMessage `json:"definition,omitempty"` // on create and update
	DesiredCount          int             `json:"desiredCount"`
	RunningCount          int             `json:"runningCount"`
	PendingCount          int             `json:"pendingCount"`
	MinimumHealthyPercent int             `json:"minimumHealthyPercent"`                // 0 to 100
	MaximumPercent        int             `json:"maximumPercent"`                       // 100 or more
	StopAfterSeconds      int             `json:"disconnectStopAfterSeconds,omitempty"` // a cut-off agent stops its tasks itself after this
	CreatedAt             time.Time       `json:"createdAt"`
	Reason                string          `json:"reason,omitempty"` // what it waits for
}

// ServiceUpdate is the body of POST /v1/services/{name}; what is absent stays.
type ServiceUpdate struct {
	Definition            json.RawMessage `json:"definition,omitempty"`
	DesiredCount          *int            `json:"desiredCount,omitempty"`
	MinimumHealthyPercent *int            `json:"minimumHealthyPercent,omitempty"`
	MaximumPercent        *int            `json:"maximumPercent,omitempty"`
	StopAfterSeconds      *int            `json:"disconnectStopAfterSeconds,omitempty"`
}

// Explanation is why a task is where it is: GET /v1/tasks/{id}/explain.
type Explanation struct {
	Task     string     `json:"taskId"`
	Status   string     `json:"lastStatus"`
	Says     string     `json:"says"`               // one sentence
	Machines int        `json:"machines"`           // in the fleet
	GPUs     int        `json:"gpus"`               // in the fleet
	RuledOut []RuledOut `json:"ruledOut,omitempty"` // nearest miss first; the counts add up to Machines and GPUs
}

// RuledOut counts what one reason rules out. Each machine that lacks something itself
// counts as one machine with all of its GPUs; any other counts as none, and each of its
// GPUs under its own reason.
type RuledOut struct {
	Code     string `json:"code"` // of package fit
	Machines int    `json:"machines"`
	GPUs     int    `json:"gpus"`
	Nearest  string `json:"nearest"`  // the sentence of the nearest miss
	Instance string `json:"instance"` // where that is
}

// Drain is POST /v1/instances/{name}/drain; with dryRun=1 nothing is done.
// With undo=1 the instance is ACTIVE again.
type Drain struct {
	Instance string      `json:"instance"`
	Moves    []DrainMove `json:"moves"`
}

// DrainMove is what becomes of one task of a drained instance.
type DrainMove struct {
	Task     string `json:"taskId"`
	Service  string `json:"service,omitempty"`
	Family   string `json:"family"`
	Instance string `json:"instance,omitempty"` // where it would go now
	Moving   bool   `json:"moving,omitempty"`   // it is placed elsewhere, at once or when there is room; otherwise it stays until it ends
	Says     string `json:"says"`               // one sentence: moves there, finds no room, or stays (standalone)
}

// Replacement is one machine's: GET /v1/replacements (newest first), and the answer of
// POST /v1/instances/{name}/replace.
type Replacement struct {
	ID        string    `json:"id"`
	Instance  string    `json:"instance"`
	Newcomer  string    `json:"newcomer,omitempty"` // the instance that takes its place
	State     string    `json:"state"`              // of package replace
	Reason    string    `json:"reason"`             // why it is replaced
	Says      string    `json:"says,omitempty"`     // what it waits for, or why it failed
	StartedAt time.Time `json:"startedAt"`
	ChangedAt time.Time `json:"changedAt"`
	Held      string    `json:"held,omitempty"` // why the storm guard lets none begin now
}

// Event is one thing that happened: GET /v1/events, oldest first, one JSON object a
// line. Query: after=SEQ, follow=1.
type Event struct {
	Seq      uint64    `json:"seq"`
	At       time.Time `json:"at"`
	Kind     string    `json:"kind"` // task, service, instance, gpu, replacement, server
	Subject  string    `json:"subject"`
	Says     string    `json:"says"`
	Instance string    `json:"instance,omitempty"`
	Service  string    `json:"service,omitempty"`
}

// The server's paths, besides those of the local API. GET /v1/tasks/{id}/logs is answered
// through the stream of the task's agent.
const (
	PathInstances    = "/v1/instances"
	PathInstance     = "/v1/instances/{name}" // DELETE: it leaves the fleet; force=1: with tasks on it
	PathExplain      = "/v1/tasks/{id}/explain"
	PathServices     = "/v1/services"
	PathService      = "/v1/services/{name}"
	PathDrain        = "/v1/instances/{name}/drain"
	PathReplace      = "/v1/instances/{name}/replace"
	PathReplacements = "/v1/replacements"
	PathResume       = "/v1/replacements/resume" // POST: replacements may begin again after newcomers failed alike
	PathEvents       = "/v1/events"
	PathServer       = "/v1/server"
)

// Server is GET /v1/server.
type Server struct {
	Version string `json:"version"`
	Cluster string `json:"cluster"`
	Leader  bool   `json:"leader"`
	Term    uint64 `json:"term"`
	Dir     string `json:"dataDir,omitempty"`
}
