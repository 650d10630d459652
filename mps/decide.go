package mps

import "time"

// use is what the GPU is to be. A GPU with a server is kept for its clients until
// they have ended.
func (s *State) use() Use {
	if (s.Use == UseIdle || s.Use == UseDedicated) && s.Clients != 0 && s.Server.PID != 0 {
		return UseMPS
	}
	return s.Use
}

// end is the phase in which nothing of ours runs, if there is cause for one.
func (s *State) end() (Phase, string) {
	switch {
	case s.Unsupport != "":
		return PhaseUnsupported, s.Unsupport
	case s.Use == UseNone:
		return PhaseAbsent, ""
	case s.Quarantine != "":
		return PhaseQuarantined, s.Quarantine
	}
	return "", ""
}

// exclusive says that the mode may be EXCLUSIVE_PROCESS.
func (s *State) exclusive() bool { return s.Exclusive || s.Intent }

// remains are the processes of ours, the daemon first: it would start servers anew.
func (s *State) remains() []Process {
	var list []Process
	for _, p := range append([]Process{s.Daemon, s.Server}, s.Orphans...) {
		if p.PID != 0 {
			list = append(list, p)
		}
	}
	return list
}

func (s *State) do(job Job) Do {
	return Do{Job: job, ID: s.ID, Daemon: s.Daemon, Server: s.Server}
}

func (s *State) doKill() Do {
	do := s.do(JobKill)
	do.Kill = s.remains()
	return do
}

// decide names the phase and the next job. No job is in flight.
func (s *State) decide(now time.Time) Do {
	if s.Unsupport != "" && s.ID == "" && !s.exclusive() {
		s.enter(PhaseUnsupported, s.Unsupport, now)
		return Do{}
	}
	// 1. Closed, and clients may be alive: nothing is ended under them.
	if s.Fault != nil && s.Clients != 0 {
		s.enter(PhaseDraining, s.Fault.Reason, now)
		return Do{}
	}
	// 2. What failed where it stands is tried again in its time.
	if now.Before(s.RetryAt) {
		phase := s.Phase
		if s.Fault == nil && !s.Looked {
			phase = PhaseBackoff
		}
		s.enter(phase, s.Trouble, now)
		return Do{}
	}
	// 3. What runs?
	if !s.Looked {
		if s.Fault != nil {
			s.enter(PhaseStopping, s.Fault.Reason, now)
		} else {
			s.enter(PhaseStarting, "", now)
		}
		return s.do(JobLook)
	}
	// 4. What is broken goes.
	if s.Fault != nil {
		s.enter(PhaseStopping, s.Fault.Reason, now)
		if do := s.clean(); do.Job != JobNone {
			return do
		}
		s.Fault = nil
	}
	// 5. Nothing is wanted, or nothing may be.
	if end, why := s.end(); end != "" {
		return s.finish(end, why, now)
	}
	// 6. A daemon.
	if s.Daemon.PID == 0 {
		return s.raise(now)
	}
	// 7. The server and the mode, as wanted.
	if s.Server.PID == 0 && s.Clients > 0 {
		s.broke(now, LostServer, sayClientsWithout(s.Clients, "MPS server"), false)
		s.enter(PhaseDraining, s.Fault.Reason, now)
		return Do{}
	}
	if s.use() == UseMPS {
		return s.hold(now)
	}
	return s.release(now)
}

// clean is the next job to get rid of a fault; none is left when it is gone.
func (s *State) clean() Do {
	switch {
	case s.Fault.Daemon && len(s.remains()) > 0:
		return s.doKill()
	case !s.Fault.Daemon && s.Daemon.PID != 0 && (s.Server.PID != 0 || s.Strays):
		do := s.do(JobStopServers)
		do.Force = true
		return do
	case s.exclusive():
		return s.do(JobSetDefault)
	}
	return Do{}
}

// finish takes everything down, in MPS's order: clients, server, mode, daemon.
func (s *State) finish(end Phase, why string, now time.Time) Do {
	if len(s.remains()) == 0 && !s.exclusive() {
		s.enter(end, why, now)
		return Do{}
	}
	if s.Clients != 0 {
		if why == "" {
			why = givenBackLater
		}
		s.enter(PhaseDraining, why, now)
		return Do{}
	}
	switch {
	case s.Daemon.PID != 0 && (s.Server.PID != 0 || s.Strays):
		s.enter(PhaseReleasing, why, now)
		return s.do(JobStopServers)
	case s.exclusive():
		s.enter(PhaseReleasing, why, now)
		return s.do(JobSetDefault)
	case len(s.Orphans) > 0:
		s.enter(PhaseStopping, why, now)
		return s.doKill()
	default:
		s.enter(PhaseStopping, why, now)
		return s.do(JobQuitDaemon)
	}
}

// raise starts a daemon, once nothing is in its way.
func (s *State) raise(now time.Time) Do {
	switch {
	case s.Clients < 0:
		s.enter(PhaseStarting, waitsForClients, now)
	case s.Clients > 0:
		// Found after a start of the agent: they are drained like those of a daemon that died under its eyes.
		s.broke(now, LostDaemon, sayClientsWithout(s.Clients, "MPS control daemon"), false)
		s.Looked = true
		s.enter(PhaseDraining, s.Fault.Reason, now)
	case len(s.Orphans) > 0:
		s.enter(PhaseStopping, orphansFirst, now)
		return s.doKill()
	case s.exclusive():
		s.enter(PhaseStarting, "", now)
		return s.do(JobSetDefault)
	case now.Before(s.Until):
		s.enter(PhaseBackoff, s.lastFailure(), now)
	case s.Stranger != "":
		s.Looked = false
		s.enter(PhaseBackoff, s.Stranger, now)
		return s.do(JobLook)
	default:
		s.enter(PhaseStarting, "", now)
		s.ID = s.newID()
		return s.do(JobStartDaemon)
	}
	return Do{}
}

// lastFailure is what the pause before the next start is for.
func (s *State) lastFailure() string {
	switch {
	case s.Stranger != "":
		return s.Stranger
	case s.Phase == PhaseBackoff, s.Phase == PhaseStopping:
		return s.Reason
	}
	return ""
}

// hold brings the server first and then the mode: in the other order a process
// that skips MPS could take the GPU, and the server would fail.
func (s *State) hold(now time.Time) Do {
	switch {
	case s.Server.PID == 0 && s.Clients < 0:
		s.enter(PhaseServerStarting, waitsForClients, now)
	case s.Server.PID == 0 && now.Before(s.Until):
		s.enter(PhaseBackoff, s.lastFailure(), now)
	case s.Server.PID == 0 && s.exclusive():
		s.enter(PhaseServerStarting, "", now)
		return s.do(JobSetDefault)
	case s.Server.PID == 0:
		s.enter(PhaseServerStarting, "", now)
		return s.do(JobStartServer)
	case !s.Exclusive || !s.Saved.Exclusive:
		why := ""
		if s.Phase == PhaseHeld {
			why = s.Notice
		}
		s.enter(PhaseServerStarting, why, now)
		s.Intent = true // stored before it is set
		return s.do(JobSetExclusive)
	default:
		if s.Phase != PhaseHeld {
			s.well()
		}
		s.enter(PhaseHeld, "", now)
		return s.watch(now)
	}
	return Do{}
}

// release is for a GPU that nobody shares: no server, mode DEFAULT.
func (s *State) release(now time.Time) Do {
	if s.Server.PID != 0 || s.Strays || s.exclusive() {
		if s.Clients != 0 {
			s.enter(PhaseReleasing, waitsForClients, now)
			return Do{}
		}
		s.enter(PhaseReleasing, "", now)
		if s.Server.PID != 0 || s.Strays {
			return s.do(JobStopServers)
		}
		return s.do(JobSetDefault)
	}
	if s.use() == UseDedicated {
		s.enter(PhaseDedicated, "", now)
	} else {
		s.enter(PhaseIdle, "", now)
	}
	return s.watch(now)
}

// watch is the work of a GPU that is well.
func (s *State) watch(now time.Time) Do {
	switch {
	case s.Tampered:
		s.Tampered = false
		return s.do(JobReapply)
	case !now.Before(s.InspectAt):
		return s.do(JobInspect)
	}
	return Do{}
}

// closeWhileBusy names the phase when something was learnt while a job is in
// flight: a closed GPU is closed at once, not when the job has ended.
func (s *State) closeWhileBusy(now time.Time) {
	switch {
	case s.Fault != nil && s.Clients != 0:
		s.enter(PhaseDraining, s.Fault.Reason, now)
	case s.Fault != nil:
		s.enter(PhaseStopping, s.Fault.Reason, now)
	case s.Phase == PhaseHeld && (s.Server.PID == 0 || s.Daemon.PID == 0):
		s.enter(PhaseReleasing, "", now)
	case s.Phase == PhaseHeld:
		if end, why := s.end(); end != "" {
			s.enter(PhaseDraining, why, now)
		}
	}
}
