package mpssim

// What driver branches differ in. The table is in mps.md's version map; R535 is
// [B], the others are [D] and [I].

const binaryVersion = "13000" // CUDA 13.0, R580

func hasVersionFlag(branch int) bool  { return branch >= 550 }
func hasMultiuser(branch int) bool    { return branch >= 550 }
func hasServerStatus(branch int) bool { return branch >= 550 }
func hasPidFile(branch int) bool      { return branch >= 550 }
func hasVersionLine(branch int) bool  { return branch >= 550 }

// logsChildPid: the daemon logs a server's start with the server's pid as its own.
func logsChildPid(branch int) bool { return branch >= 580 }

// readsUUIDKeys: a limit set for a device's UUID can be read back and holds.
func readsUUIDKeys(branch int) bool { return branch >= 590 }

// maxContexts is how many client contexts one server has room for on a GPU.
func maxContexts(branch int) int {
	if branch >= 590 {
		return 60
	}
	return 48
}
