package mps

// Phase is where the supervisor stands with its GPU. Containers with a cap may
// start in HELD and nowhere else.
//
//	ABSENT --1--> STARTING --2--> IDLE, DEDICATED --3--> SERVER_STARTING --4--> HELD
//	  ^             ^  ^               ^                       |               |
//	  |             |  |               +------- RELEASING <----+-------5-------+
//	  |             |  |                            |                          |
//	  |            11  +---- BACKOFF                6                          7 from any
//	  |             |           ^                   v                          v of these
//	  +------9------+-----10----+-------------- STOPPING <---------8------- DRAINING
//	                                                |
//	                                                +--12--> QUARANTINED     UNSUPPORTED
//
//	 1  a use is wanted; what runs is looked for, and adopted with what it has
//	 2  the daemon's lock and socket are its own, it answers through client/
//	 3  Want NVIDIA_MPS
//	 4  the server is ready, then the intent is stored, then EXCLUSIVE_PROCESS is set
//	 5  clear, and another use is wanted: server down, then DEFAULT, then as wanted
//	 6  Want NONE: the daemon quits
//	 7  daemon or server ended, stopped, wedged, in FAULT, cut off; clients without them;
//	    Want NONE while clients live
//	 8  clear: what is ours and broken is ended (server, or server and daemon), mode DEFAULT
//	 9  nothing of ours runs, and Want is NONE
//	10  a start failed: 1, 2, 4 .. 60 s; or a stranger has the folder
//	11  something that was well was lost: at once, and straight to SERVER_STARTING or IDLE
//	    when the daemon lives
//	12  the budget is used up, or no retry can help; Forgive leads back to STARTING
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
