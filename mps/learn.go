package mps

import (
	"slices"
	"time"
)

// learn takes in what the event tells. What follows from it is decide's.
func (s *State) learn(e Event, now time.Time) {
	switch e := e.(type) {
	case Want:
		s.Use = e.Use
	case ClientsAre:
		s.Clients = max(-1, e.N)
	case Forgive:
		s.Quarantine, s.Failures = "", nil
		s.well()
		s.done()
	case Tick:
		s.forget(now)
	case Doubt:
		s.InspectAt = now
	case Faulted:
		if s.Server.PID != 0 && s.Suspect == "" {
			s.Suspect, s.InspectAt = e.Line, now
		}
	case Exited:
		s.learnExit(e.Process, now)
	case Stopped:
		switch e.Process {
		case Process{}:
		case s.Daemon:
			s.broke(now, LostDaemon, sayDaemonStopped(e.Process), true)
		case s.Server:
			s.broke(now, LostServer, sayServerStopped(e.Process), true)
		}
	case Saved:
		s.Saved = e.Record
	case SaveFailed:
		s.Saving, s.SaveAt = s.Saved, now.Add(time.Second)
		s.Notice = noticeStore(e.Reason)
		if e.Job == s.Job {
			s.Job, s.Ending = JobNone, JobNone
		}
	default:
		s.learnEnd(e, now)
	}
}

// learnExit: a recorded process has ended.
func (s *State) learnExit(p Process, now time.Time) {
	switch {
	case p == Process{}:
	case p == s.Daemon:
		s.Daemon = Process{}
		if s.Server.PID != 0 {
			s.Orphans = append(s.Orphans, s.Server)
			s.Server = Process{}
		}
		if s.Ending != JobQuitDaemon && s.Ending != JobKill {
			s.broke(now, LostDaemon, sayDaemonEnded(p), true)
		}
	case p == s.Server:
		s.Server = Process{}
		if s.Ending == JobNone {
			s.broke(now, LostServer, sayServerEnded(p), true)
		}
	default:
		s.Orphans = slices.DeleteFunc(s.Orphans, func(o Process) bool { return o == p })
		if len(s.Orphans) == 0 {
			s.Orphans = nil
		}
	}
}

// learnEnd: the job in flight has ended. An end of a job that is not is dropped.
func (s *State) learnEnd(e Event, now time.Time) {
	ended := func(job Job) bool {
		if s.Job != job {
			return false
		}
		s.Job = JobNone
		if job != JobLook {
			s.Ending = JobNone
		}
		return true
	}
	switch e := e.(type) {
	case Found:
		if ended(JobLook) {
			s.done()
			s.learnFound(e, now)
			s.Ending = JobNone
		}
	case DaemonUp:
		if ended(JobStartDaemon) {
			s.Daemon, s.SingleUID = e.Daemon, e.SingleUID
			s.Daemons++
			s.InspectAt = now.Add(s.ProbeEvery)
		}
	case ServerUp:
		if ended(JobStartServer) {
			s.Server, s.Strays = e.Server, false
			s.InspectAt = now.Add(s.ProbeEvery)
		}
	case ModeSet:
		if ended(JobSetExclusive) || ended(JobSetDefault) {
			s.done()
			s.Exclusive = e.Exclusive
			s.Intent = e.Exclusive
		}
	case ServersDown:
		if ended(JobStopServers) {
			s.done()
			s.Server, s.Strays = Process{}, false
		}
	case DaemonDown:
		if ended(JobQuitDaemon) {
			s.done()
			s.Daemon, s.Server, s.Orphans, s.Strays = Process{}, Process{}, nil, false
		}
	case Killed:
		if ended(JobKill) {
			s.done()
			s.Daemon, s.Server, s.Orphans = Process{}, Process{}, nil
			s.Strays, s.Looked = false, false // and look whether it is so
		}
	case Reapplied:
		ended(JobReapply)
	case Inspected:
		if ended(JobInspect) {
			s.InspectAt = now.Add(s.pace())
			s.learnInspected(e, now)
		}
	case Failed:
		if ended(e.Job) {
			s.learnFailed(e, now)
		}
	}
}

// pace is how often a GPU that is well is looked at. Nothing depends on an idle
// daemon until the next server is started, which looks for itself.
func (s *State) pace() time.Duration {
	if s.Server.PID == 0 {
		return 3 * s.ProbeEvery
	}
	return s.ProbeEvery
}

// learnFound: what runs, compared with what was recorded.
func (s *State) learnFound(f Found, now time.Time) {
	daemon, server := s.Daemon, s.Server
	s.Looked = true
	s.Daemon, s.Server, s.Orphans = f.Daemon, f.Server, f.Orphans
	s.Strays = f.Starting || f.ServerProblem != ""
	s.Stranger, s.Exclusive = f.Stranger, f.Exclusive
	if f.Daemon.PID != 0 && f.Problem == "" {
		s.SingleUID = f.SingleUID
	}
	switch {
	case f.Stranger != "":
		s.pause(now)
	case f.Problem != "":
		s.broke(now, LostDaemon, f.Problem, true)
		s.Looked = true
	case daemon != Process{} && f.Daemon != daemon && s.Ending != JobQuitDaemon && s.Ending != JobKill:
		s.broke(now, LostDaemon, sayDaemonEnded(daemon)+whileAway, true)
		s.Looked = true
	case f.Daemon != Process{} && len(f.Orphans) > 0:
		s.broke(now, LostDaemon, sayOrphanBeside(f.Orphans[0]), false)
		s.Looked = true
	case f.ServerProblem != "":
		s.broke(now, ClientFault, f.ServerProblem, false)
	case server != Process{} && f.Server != server && s.Ending == JobNone:
		s.broke(now, LostServer, sayServerEnded(server)+whileAway, true)
	}
}

// maxProbes is how many probes in a row may stay unanswered.
const maxProbes = 3

func (s *State) learnInspected(i Inspected, now time.Time) {
	if i.ModeUnknown != "" {
		s.Notice = noticeModeUnknown(i.ModeUnknown)
	} else if i.Exclusive != s.Exclusive {
		s.Exclusive = i.Exclusive
		s.Notice = noticeMode(i.Exclusive)
	}
	if s.Fault != nil {
		return
	}
	switch {
	case i.Split != "":
		s.broke(now, LostDaemon, i.Split, true)
		return
	case i.Gone:
		s.broke(now, LostDaemon, sayNobodyAnswers(s.Daemon), true)
		return
	case i.Unanswered != "":
		s.Probes++
		s.InspectAt = now.Add(time.Second) // it may be wedged: look again soon
		if s.Probes >= maxProbes {
			s.broke(now, LostDaemon, sayWedged(s.Daemon, s.Probes, i.Unanswered), true)
		}
		return
	}
	s.Probes = 0
	if s.Server.PID == 0 {
		s.Strays = len(i.Servers) > 0
		if s.Phase == PhaseIdle || s.Phase == PhaseDedicated {
			s.well()
		}
		if s.Strays {
			s.Notice = noticeStray(i.Servers[0])
		}
	} else {
		suspect := s.Suspect
		s.Suspect = ""
		switch {
		case !slices.Contains(i.Servers, s.Server.PID):
			s.broke(now, LostServer, sayNotListed(s.Server), true)
			return
		case i.ServerStatus == "FAULT":
			s.broke(now, ClientFault, sayInFault(s.Server), false)
			return
		case i.ServerStatus == "" && suspect != "":
			s.broke(now, ClientFault, sayLogTellsFault(s.Server, suspect), false)
			return
		}
	}
	if i.Tampered != "" {
		s.Tampered = true
		s.Notice = i.Tampered + "; put back"
	}
}

// learnFailed: a job has not done what it should. Its reason is told verbatim.
func (s *State) learnFailed(f Failed, now time.Time) {
	switch f.Job {
	case JobStartDaemon:
		s.strike(now, f.Reason)
		s.pause(now)
		// It may half run: look, and end it.
		s.broke(now, LostDaemon, f.Reason, false)
	case JobStartServer, JobSetExclusive:
		if f.Cancelled {
			s.Strays = true
			return
		}
		if s.Fault == nil {
			s.strike(now, f.Reason)
			s.pause(now)
		}
		s.broke(now, LostServer, f.Reason, false)
	case JobStopServers, JobQuitDaemon:
		// Stronger means: by signal, those that were recorded.
		s.broke(now, LostDaemon, f.Reason, false)
	case JobLook, JobKill, JobSetDefault:
		s.retry(now, f.Reason)
	case JobReapply:
		s.Notice = f.Reason
	}
	if f.Permanent && s.Quarantine == "" {
		s.Quarantine = f.Reason
	}
}
