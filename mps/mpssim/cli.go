package mpssim

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

const defaultPipeDirectory = "/tmp/nvidia-mps"

func pipeDirectory() string {
	if dir := os.Getenv("CUDA_MPS_PIPE_DIRECTORY"); dir != "" {
		return dir
	}
	return defaultPipeDirectory
}

func help(stdout io.Writer) int {
	fmt.Fprint(stdout, "CUDA MPS Control for Linux/Unix.\nCopyright (C) 2003 - 2023 NVIDIA Corporation.\n\n"+
		"  This program allows multiple CUDA processes to share a single GPU context. For information on how to use the CUDA MPS, "+
		"see the nvidia-cuda-mps-control manual page.\n\n")
	return 0
}

func version(stdout io.Writer, s Steer) int {
	if s.Variant("version-sentence") {
		fmt.Fprintln(stdout, "CUDA MPS Control binary version: "+binaryVersion)
		return 0
	}
	fmt.Fprintln(stdout, binaryVersion)
	return 0
}

func noDaemon(stderr io.Writer) int {
	fmt.Fprintln(stderr, "Cannot find MPS control daemon process")
	return 1
}

// utility sends each line of stdin to the daemon as a command and prints what it
// answers. Its status says only whether there was a daemon to talk to; for `quit` it
// is quitStatus. It waits without limit, as the real one. [B]
func utility(stdin io.Reader, stdout, stderr io.Writer) int {
	// Over the privileged socket, if the file modes let this user; quit needs it.
	c, err := dial(filepath.Join(pipeDirectory(), "control_privileged"))
	if err != nil {
		c, err = dial(filepath.Join(pipeDirectory(), "control"))
	}
	if err != nil {
		return noDaemon(stderr)
	}
	defer c.Close()
	if c.send(wireUI, "") != nil {
		return noDaemon(stderr)
	}
	lines, out := bufio.NewReader(stdin), bufio.NewWriter(stdout)
	for {
		line, err := lines.ReadString('\n')
		if line == "" && err != nil {
			_ = out.Flush()
			return 0
		}
		if c.send(wireUI, strings.TrimSuffix(line, "\n")) != nil {
			_ = out.Flush()
			return noDaemon(stderr)
		}
		verb, rest, _, err := c.receive()
		switch {
		case err != nil:
			_ = out.Flush()
			return noDaemon(stderr)
		case verb == wireExit:
			_ = out.Flush() // the real one now and then loses what it had to print
			status, _ := strconv.Atoi(rest)
			return status
		}
		_, _ = out.WriteString(rest)
	}
}
