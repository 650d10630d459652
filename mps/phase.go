package mps

// Phase is where the supervisor stands with its GPU.
type Phase string

const (
	PhaseAbsent         Phase = "ABSENT"
	PhaseUnsupported    Phase = "UNSUPPORTED"
	PhaseStarting       Phase = "STARTING"
	PhaseIdle           Phase = "IDLE"
	PhaseServerStarting Phase = "SERVER_STARTING"
	PhaseHeld           Phase = "HELD"
	PhaseReleasing      Phase = "RELEASING"
	PhaseDedicated      Phase = "DEDICATED"
	PhaseDraining       Phase = "DRAINING"
	PhaseStopping       Phase = "STOPPING"
	PhaseBackoff        Phase = "BACKOFF"
	PhaseQuarantined    Phase = "QUARANTINED"
)
