package mpssim

import (
	"io"
	"os"
	"path/filepath"
)

// Names the program goes by.
const (
	ControlName = "nvidia-cuda-mps-control"
	ServerName  = "nvidia-cuda-mps-server"
	ClientName  = "cuda-client"
)

// Main is the program: argv[0] says as what it runs. It returns the exit status.
func Main(argv []string, stdin io.Reader, stdout, stderr io.Writer) int {
	switch filepath.Base(argv[0]) {
	case ControlName:
		return controlMain(argv[1:], stdin, stdout, stderr)
	case ServerName:
		return serverMain()
	default:
		return clientMain(argv[1:], stdout, stderr)
	}
}

// controlMain tells apart the uses of nvidia-cuda-mps-control. A command line it does
// not know is no error: it is then the utility, which looks for a daemon to give its
// stdin to, and complains only if there is none. [B]
func controlMain(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	if os.Getenv(childFailsEnv) != "" {
		return 1
	}
	m := ownMachine()
	steer := m.steer()
	use, multiuser := controlUse(args, m.branch(steer))
	switch use {
	case "-h":
		return help(stdout)
	case "-v":
		return version(stdout, steer)
	case "-f":
		return runDaemon(m, daemonOptions{multiuser: multiuser}, stdout)
	case "-d":
		return daemonize(m, daemonOptions{multiuser: multiuser, background: true}, stdout)
	}
	return utility(stdin, stdout, stderr)
}

// controlUse is -h, -v, -f, -d, or "" for the utility. R535 knows exactly one argument;
// newer branches also -multiuser-server (-M) beside -f or -d.
func controlUse(args []string, branch int) (use string, multiuser bool) {
	var rest []string
	for _, a := range args {
		if (a == "-multiuser-server" || a == "-M") && hasMultiuser(branch) {
			multiuser = true
		} else {
			rest = append(rest, a)
		}
	}
	if len(rest) != 1 {
		return "", false
	}
	switch rest[0] {
	case "-f", "-d":
		return rest[0], multiuser
	case "-h", "--help":
		if !multiuser {
			return "-h", false
		}
	case "-v":
		if !multiuser && hasVersionFlag(branch) {
			return "-v", false
		}
	}
	return "", false
}
