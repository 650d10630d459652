package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Live top on a real terminal: it redraws, follows the machine, says when the agent
// is gone, and each way of ending it puts the screen back.
func TestTopOnATerminal(t *testing.T) {
	for _, end := range []struct {
		name string
		do   func(t *testing.T, keys io.Writer, p *os.Process)
	}{
		{"q", func(t *testing.T, keys io.Writer, _ *os.Process) { fmt.Fprint(keys, "q") }},
		{"Ctrl-C", func(t *testing.T, keys io.Writer, _ *os.Process) { fmt.Fprint(keys, "\x03") }},
		{"SIGTERM", func(t *testing.T, _ io.Writer, p *os.Process) { _ = p.Signal(syscall.SIGTERM) }},
	} {
		t.Run(end.name, func(t *testing.T) {
			a := startAgent(t)
			keys, screen := openTerminal(t)
			cmd := exec.Command(os.Args[0], "top", "--every", "100ms")
			cmd.Env = append(os.Environ(), "BERTH_TEST_MAIN=1", "BERTH_SOCKET="+a.socket, "TERM=xterm-256color", "NO_COLOR=")
			cmd.Stdin, cmd.Stdout, cmd.Stderr = screen, screen, screen
			cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = cmd.Process.Kill() })
			screen.Close()
			seen := record(keys)

			seen.until(t, "\x1b[?1049h")
			seen.until(t, "llm-small/server")
			a.mu.Lock()
			a.instance.GPUs[0].Slices[0].Family = "renamed"
			a.mu.Unlock()
			seen.until(t, "renamed/server")
			a.close()
			seen.until(t, "cannot reach the agent")
			end.do(t, keys, cmd.Process)
			if err := cmd.Wait(); err != nil {
				t.Errorf("top ended with %v", err)
			}
			seen.until(t, "\x1b[?25h\x1b[?1049l")
		})
	}
}

// openTerminal makes a pseudo-terminal of 100 columns and 40 lines.
func openTerminal(t *testing.T) (keys, screen *os.File) {
	t.Helper()
	keys, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { keys.Close() })
	fd := int(keys.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 40, Col: 100}); err != nil {
		t.Fatal(err)
	}
	screen, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	return keys, screen
}

// recorder keeps everything that a terminal was told.
type recorder struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	more chan struct{}
}

func record(r io.Reader) *recorder {
	rec := &recorder{more: make(chan struct{}, 1)}
	go func() {
		defer close(rec.more)
		chunk := make([]byte, 4096)
		for {
			n, err := r.Read(chunk)
			rec.mu.Lock()
			rec.buf.Write(chunk[:n])
			rec.mu.Unlock()
			if err != nil { // EIO: the last process of the terminal has ended
				return
			}
			select {
			case rec.more <- struct{}{}:
			default:
			}
		}
	}()
	return rec
}

// until waits for text to appear after what earlier calls have seen.
func (r *recorder) until(t *testing.T, text string) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		r.mu.Lock()
		all := r.buf.String()
		if _, rest, ok := strings.Cut(all, text); ok {
			r.buf.Reset()
			r.buf.WriteString(rest)
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
		select {
		case _, open := <-r.more:
			if !open {
				r.mu.Lock()
				last := strings.Contains(r.buf.String(), text)
				r.mu.Unlock()
				if !last {
					t.Fatalf("the terminal closed before %q; it showed %q", text, all)
				}
				return
			}
		case <-deadline:
			t.Fatalf("no %q within 20 s; the terminal showed last %q", text, all[max(0, len(all)-2000):])
		}
	}
}
