package mpssim

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
)

// logger writes NVIDIA's log lines: local time with milliseconds, who, pid in five
// columns, text. Each line is one write, so that several processes can share a
// pipe or a file opened for append.
type logger struct {
	mu  sync.Mutex
	out io.Writer
	pid int
}

func (l *logger) line(tag, format string, args ...any) {
	l.lineFor(l.pid, tag, format, args...)
}

func (l *logger) lineFor(pid int, tag, format string, args ...any) {
	line := formatLine(time.Now(), tag, pid, fmt.Sprintf(format, args...))
	l.mu.Lock()
	defer l.mu.Unlock()
	// A log that cannot be written stops nobody: "No logs will be available."
	_, _ = io.WriteString(l.out, line)
}

func formatLine(at time.Time, tag string, pid int, text string) string {
	return fmt.Sprintf("[%s %s %5d] %s\n", at.Format("2006-01-02 15:04:05.000"), tag, pid, strings.TrimRight(text, "\n"))
}

const (
	tagControl = "Control"
	tagOther   = "Other"  // a server before it has a device
	tagServer  = "Server" // and after
)
