package mps

// Phase is where the supervisor stands with its GPU. Containers with a cap may
// start in HELD and nowhere else.
//
//	                     Want NONE, nothing runs
//	 ABSENT <------------------------------------------------------+
//	   |                                                           |
//	   | Want anything                                             |
//	   v          not adopted, clear                               |
//	STARTING <-------------------- BACKOFF <------------------ STOPPING
//	   |                           1,2,4..60 s                 ours ended,
//	   | daemon answers through client/                        mode DEFAULT
//	   |                                                         |   ^
//	   +-----> IDLE <------------------+                         |   | clear:
//	   |        |                      |                         |   | no client
//	   |        | Want NVIDIA_MPS      |                         |   |
//	   |        v                      |                         | DRAINING
//	   +-> SERVER_STARTING         RELEASING                     |   ^
//	   |        |                  server down,                  |   | daemon or server lost,
//	   |        | server ready,    then mode DEFAULT             |   | stopped, wedged, in FAULT,
//	   |        | then intent      |   ^                         |   | split brain; Want NONE
//	   |        | saved, then      |   | clear, and              |   |
//	   |        | EXCLUSIVE_PROCESS|   | Want is another         |   +--- from any state
//	   |        v                  |   |                         |        above
//	   |      HELD ----------------|---+                         |
//	   |                           v                             v
//	   +---------------------> DEDICATED                    QUARANTINED   budget used up, or
//	                                                                      no retry can help
//	UNSUPPORTED: the GPU or driver cannot; final.
//
// "Clear" is Clients(0). A GPU with clients is drained before anything of its is
// ended, also on its way to QUARANTINED or ABSENT, and EXCLUSIVE_PROCESS stays
// until then: new processes in those containers get an error, and not the GPU
// without a cap.
type Phase string

const (
	PhaseAbsent         Phase = "ABSENT"          // nothing runs, mode DEFAULT
	PhaseUnsupported    Phase = "UNSUPPORTED"     // see [Unsupported]
	PhaseStarting       Phase = "STARTING"        // looking for what runs, or starting the daemon
	PhaseIdle           Phase = "IDLE"            // daemon up, no server, mode DEFAULT
	PhaseServerStarting Phase = "SERVER_STARTING" // server coming up, then the mode set
	PhaseHeld           Phase = "HELD"            // daemon and server up, mode EXCLUSIVE_PROCESS
	PhaseReleasing      Phase = "RELEASING"       // server going down, then mode DEFAULT
	PhaseDedicated      Phase = "DEDICATED"       // as IDLE; one container has the GPU whole
	PhaseDraining       Phase = "DRAINING"        // closed; waits for its clients to end
	PhaseStopping       Phase = "STOPPING"        // ending what is ours, mode DEFAULT
	PhaseBackoff        Phase = "BACKOFF"         // waits before the next try
	PhaseQuarantined    Phase = "QUARANTINED"     // left alone until an operator has seen to it
)
