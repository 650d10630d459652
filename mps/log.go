package mps

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// With -f the daemon and its servers write to one file, a line each:
//
//	[2026-12-01 07:11:01.958 Control  8017] NEW SERVER 14830: Ready
//
// A client chooses the text of "Cmd:" lines and of the echo of unknown commands,
// so a line counts for something only if its text begins as the daemon's does.
var logPattern = regexp.MustCompile(`^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ([A-Za-z ]+?) +(\d+)\] (.*)$`)

// logLine is one line of the daemon's log.
type logLine struct {
	tag  string // Control; Other, Server or Legacy Server for a server
	pid  int    // who wrote it
	text string
}

func parseLogLine(line string) (logLine, bool) {
	m := logPattern.FindStringSubmatch(line)
	if m == nil {
		return logLine{}, false
	}
	pid, _ := strconv.Atoi(m[2])
	return logLine{tag: m[1], pid: pid, text: m[3]}, true
}

// logKind is what a line tells.
type logKind int

const (
	logOther          logKind = iota
	logServerStarting         // Starting new server N for user U
	logServerReady            // NEW SERVER N: Ready
	logServerExited           // Server N exited with status S: 0 also for SIGKILL [B]
	logServerFatal            // Server encountered a fatal exception. Shutting down
	logServerFailed           // a server's own: Failed to start : REASON
	logFault                  // a server's own: FAULT, INACTIVE
	logRefused                // Insufficient privileges for UID N
)

var (
	logStarting = regexp.MustCompile(`^Starting new server (\d+) for user \d+$`)
	logReady    = regexp.MustCompile(`^NEW SERVER (\d+): Ready$`)
	logExited   = regexp.MustCompile(`^Server (\d+) exited with status -?\d+$`)
	// No real fault line has been seen yet: the documents promise these words only
	// [D]. A word, so that "default" is none.
	logFaultWord = regexp.MustCompile(`\b(FAULT|fault|INACTIVE)\b`)
)

// kind classifies the line and names the server it is about, 0 for none.
func (l logLine) kind() (kind logKind, server int) {
	number := func(m []string) int { n, _ := strconv.Atoi(m[1]); return n }
	if l.tag != "Control" {
		switch {
		case strings.HasPrefix(l.text, "Failed to start"), strings.HasPrefix(l.text, "Invalid CUDA_VISIBLE_DEVICES"):
			return logServerFailed, l.pid
		case logFaultWord.MatchString(l.text):
			return logFault, l.pid
		}
		return logOther, l.pid
	}
	if m := logReady.FindStringSubmatch(l.text); m != nil {
		return logServerReady, number(m)
	}
	if m := logExited.FindStringSubmatch(l.text); m != nil {
		return logServerExited, number(m)
	}
	if m := logStarting.FindStringSubmatch(l.text); m != nil {
		return logServerStarting, number(m)
	}
	switch {
	case strings.HasPrefix(l.text, "Server encountered a fatal exception"):
		return logServerFatal, 0
	case strings.HasPrefix(l.text, "Insufficient privileges"), strings.HasPrefix(l.text, "Not enough privilege"):
		return logRefused, 0
	}
	return logOther, 0
}

// tail reads what is appended to the log, whole lines only.
type tail struct {
	path   string
	offset int64
	rest   []byte // a line that has no end yet
}

// maxTailBytes bounds one read; what was written before the last of it is skipped.
const maxTailBytes = 1 << 20

// skipToEnd makes the next read begin at what is not written yet.
func (t *tail) skipToEnd() {
	t.rest = nil
	if info, err := os.Stat(t.path); err == nil {
		t.offset = info.Size()
	}
}

// next returns the lines that came since the last call.
func (t *tail) next() []logLine {
	// Mostly nothing came: one system call.
	var stat unix.Stat_t
	if err := unix.Stat(t.path, &stat); err != nil || stat.Size == t.offset {
		return nil
	}
	f, err := os.Open(t.path)
	if err != nil {
		return nil
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil
	}
	if info.Size() < t.offset { // cut to nothing
		t.offset, t.rest = 0, nil
	}
	if info.Size()-t.offset > maxTailBytes {
		t.offset, t.rest = info.Size()-maxTailBytes, nil
	}
	b, err := io.ReadAll(io.NewSectionReader(f, t.offset, info.Size()-t.offset))
	if err != nil {
		return nil
	}
	t.offset += int64(len(b))
	text := append(t.rest, b...)
	end := bytes.LastIndexByte(text, '\n') + 1
	t.rest = bytes.Clone(text[end:])
	if len(t.rest) > maxReplyBytes {
		t.rest = nil
	}
	var lines []logLine
	for raw := range strings.Lines(string(text[:end])) {
		if line, ok := parseLogLine(strings.TrimRight(raw, "\r\n")); ok {
			lines = append(lines, line)
		} else if raw = strings.TrimSpace(raw); raw != "" {
			lines = append(lines, logLine{text: raw}) // stderr of the binary itself
		}
	}
	return lines
}

// cut empties the log and leaves what was in it beside it, in place of what was
// left there before. The daemon writes with O_APPEND, to which that is nothing [B].
func (t *tail) cut() error {
	from, err := os.Open(t.path)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.OpenFile(t.path+".1", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	return errors.Join(err, to.Close(), os.Truncate(t.path, 0))
}

// startFailure says from the log why a server did not come up, and whether no
// retry can help.
func startFailure(server int, lines []logLine) (reason string, permanent bool) {
	last := ""
	for _, line := range lines {
		if line.tag == "Control" || line.tag == "" || server != 0 && line.pid != server {
			continue
		}
		if kind, _ := line.kind(); kind == logServerFailed {
			return fmt.Sprintf("MPS server %d: %s", line.pid, line.text), permanentFailure(line.text)
		}
		last = line.text
	}
	if last == "" {
		return fmt.Sprintf("MPS server %d exited without a word: nvidia-cuda-mps-server is not on the daemon's PATH or not executable, or libcuda.so.1 is not on its library path", server), false
	}
	return fmt.Sprintf("MPS server %d exited; its last words: %s", server, last), false
}

func permanentFailure(text string) bool {
	for _, cause := range []string{
		"no CUDA-capable device is detected", // no device node, no driver, a wrong CUDA_VISIBLE_DEVICES [B]
		"invalid argument",                   // a GPU before Volta [I k8s-device-plugin#685]
		"Invalid CUDA_VISIBLE_DEVICES",
	} {
		if strings.Contains(text, cause) {
			return true
		}
	}
	return false
}
