package mpssim

import (
	"io"
	"os"
	"path/filepath"
	"strings"
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

// controlMain tells apart the uses of nvidia-cuda-mps-control. Both -d and -f
// together are an unknown use, as is anything else: the utility does not say so, it
// looks for a daemon and complains that there is none. [B]
func controlMain(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	if os.Getenv(childFailsEnv) != "" {
		return 1
	}
	m := ownMachine()
	branch := m.branch(m.steer())
	var foreground, background, multiuser bool
	for _, arg := range args {
		switch {
		case arg == "-h" || arg == "--help":
			return help(stdout)
		case arg == "-v" && hasVersionFlag(branch):
			return version(stdout, m.steer())
		case arg == "-f":
			foreground = true
		case arg == "-d":
			background = true
		case (arg == "-multiuser-server" || arg == "-M") && hasMultiuser(branch):
			multiuser = true
		case strings.HasPrefix(arg, "-"):
			return noDaemon(stderr)
		}
	}
	switch {
	case foreground && background:
		return noDaemon(stderr)
	case foreground:
		return runDaemon(m, daemonOptions{multiuser: multiuser}, stdout, stderr)
	case background:
		return daemonize(m, daemonOptions{multiuser: multiuser, background: true}, stderr)
	case multiuser:
		return noDaemon(stderr)
	}
	return utility(stdin, stdout, stderr)
}
