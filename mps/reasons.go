package mps

import (
	"fmt"
	"time"
)

// Cause is what a closed GPU means for the containers that still run on it.
type Cause string

const (
	// LostDaemon: the daemon is gone, frozen or cut off. Clients live on [D]; their
	// new processes get an error as long as the mode is EXCLUSIVE_PROCESS.
	LostDaemon Cause = "DAEMON_LOST"
	// LostServer: the contexts of all clients are gone; their processes get an error
	// with the next call.
	LostServer Cause = "SERVER_LOST"
	// ClientFault: one client's fatal error reached all clients, and the server takes
	// new ones only when every one of them has ended [D].
	ClientFault Cause = "CLIENT_FAULT"
)

// The sentences that Status.Reason and Status.Notice can hold, besides those of
// Unsupported, of Dirs.Check and of failed jobs.

// waitsForClients is why nothing is begun that running clients could suffer from.
const waitsForClients = "waits to be told which containers run on this GPU"

const givenBackLater = "the GPU is given back once its containers have ended"

const orphansFirst = "servers of an earlier daemon are ended first"

func sayDaemonEnded(p Process) string {
	return fmt.Sprintf("the MPS control daemon (%v) has ended", p)
}

func sayServerEnded(p Process) string { return fmt.Sprintf("the MPS server (%v) has ended", p) }

const whileAway = " while berth was away"

func sayDaemonStopped(p Process) string {
	return fmt.Sprintf("the MPS control daemon (%v) is stopped, by SIGSTOP or a debugger", p)
}

func sayServerStopped(p Process) string {
	return fmt.Sprintf("the MPS server (%v) is stopped, by SIGSTOP or a debugger", p)
}

func sayNobodyAnswers(p Process) string {
	return fmt.Sprintf("the MPS control daemon (%v) runs, and nobody answers on its folder", p)
}

func sayWedged(p Process, probes int, last string) string {
	return fmt.Sprintf("the MPS control daemon (%v) left %d probes unanswered; the last: %s", p, probes, last)
}

func sayNotListed(p Process) string {
	return fmt.Sprintf("the MPS server (%v) is not in the daemon's list", p)
}

func sayInFault(p Process) string {
	return fmt.Sprintf("the MPS server (%v) is in FAULT: a client's fatal error reached every client of the GPU", p)
}

func sayLogTellsFault(p Process, line string) string {
	return fmt.Sprintf("the MPS server (%v) reports a fault: %s", p, line)
}

func sayOrphanBeside(p Process) string {
	return fmt.Sprintf("a server of an earlier daemon (%v) still runs beside the daemon's own", p)
}

func sayClientsWithout(clients int, what string) string {
	if clients == 1 {
		return "1 capped container runs, and no " + what
	}
	return fmt.Sprintf("%d capped containers run, and no %s", clients, what)
}

func sayLocksElsewhere(p Process, holder int) string {
	who := fmt.Sprintf("pid %d", holder)
	if holder == 0 {
		who = "nobody"
	}
	return fmt.Sprintf("the lock of the pipe folder is held by %s and not by the MPS control daemon (%v): its files were replaced", who, p)
}

func sayLinkElsewhere(p Process) string {
	return fmt.Sprintf("client/control is not the socket of the MPS control daemon (%v): its files were replaced", p)
}

func sayOverBudget(failures int, window time.Duration, last string) string {
	return fmt.Sprintf("%d failures within %v; the last: %s", failures, window, last)
}

// sayStranger refuses a folder that somebody else has. Berth names the process and
// leaves it alone: it has no record of it.
func sayStranger(dirs Dirs, holder int) string {
	who := fmt.Sprintf("pid %d", holder)
	if holder < 0 {
		who = "a process outside of this pid namespace"
	} else if stat, err := readStat(holder); err == nil {
		who += " (" + stat.comm + ")"
	}
	return fmt.Sprintf("the pipe folder %s is held by %s, which berth has no record of; stop it, berth does not", dirs.Pipe(), who)
}

func sayStrangeServer(dirs Dirs, pid int) string {
	return fmt.Sprintf("an MPS server (pid %d) runs on the pipe folder %s, which berth has no record of; stop it, berth does not", pid, dirs.Pipe())
}

// Notices: what was changed by somebody else and put back.

func noticeStray(pid int) string {
	return fmt.Sprintf("an MPS server that berth did not start was found (pid %d) and shut down", pid)
}

func noticeMode(exclusive bool) string {
	return "the compute mode was changed by somebody else, to " + modeName(exclusive) + ", and put back"
}

func noticeModeUnknown(why string) string { return "the compute mode cannot be read: " + why }

func noticeStore(why string) string { return "cannot store the record: " + why }

func modeName(exclusive bool) string {
	if exclusive {
		return "EXCLUSIVE_PROCESS"
	}
	return "DEFAULT"
}
