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
// answers. Its status says only whether the daemon served it; for `quit` it is
// quitStatus. It waits without limit, as the real one. [B]
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
	switch verb, _, _, err := c.receive(); {
	case err != nil:
		return noDaemon(stderr)
	case verb == wireBusy:
		fmt.Fprintln(stderr, "Cannot send command to MPS control daemon process")
		return 1
	}
	out := bufio.NewWriter(stdout)
	defer out.Flush()
	lines, answers := readLines(stdin), readAnswers(c)
	for {
		select {
		case line, more := <-lines:
			if !more {
				return 0
			}
			if c.send(wireUI, line) != nil {
				return 1
			}
		case <-answers: // the daemon has gone: no word about it [B]
			return 1
		}
		a, more := <-answers
		switch {
		case !more:
			return 1
		case a.verb == wireExit:
			status, _ := strconv.Atoi(a.rest)
			return status
		}
		_, _ = out.WriteString(a.rest)
	}
}

func readLines(r io.Reader) <-chan string {
	lines := make(chan string)
	go func() {
		defer close(lines)
		for in := bufio.NewReader(r); ; {
			line, err := in.ReadString('\n')
			if line == "" && err != nil {
				return
			}
			lines <- strings.TrimSuffix(line, "\n")
		}
	}()
	return lines
}

type packet struct{ verb, rest string }

func readAnswers(c conn) <-chan packet {
	answers := make(chan packet)
	go func() {
		defer close(answers)
		for {
			verb, rest, _, err := c.receive()
			if err != nil {
				return
			}
			answers <- packet{verb, rest}
		}
	}()
	return answers
}
