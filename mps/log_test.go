package mps

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The lines are from real logs: R535 seen, R460 to R580 from field reports.
func TestLogGrammar(t *testing.T) {
	const at = "[2026-12-01 07:11:01.958 "
	for _, tc := range []struct {
		line   string
		kind   logKind
		server int
	}{
		{"Control  8017] Starting control daemon using socket /run/berth/mps/GPU-x/pipe/control", logOther, 0},
		{"Control  8017] Starting new server 14830 for user 0", logServerStarting, 14830},
		{"Control 14830] Starting new server 14830 for user 0", logServerStarting, 14830}, // R580: the child's pid
		{"Control  8017] NEW SERVER 14830: Ready", logServerReady, 14830},
		{"Control  8017] Server 14830 exited with status 0", logServerExited, 14830},
		{"Control  8017] Server 14830 exited with status 1", logServerExited, 14830},
		{"Control  8017] Server encountered a fatal exception. Shutting down", logServerFatal, 0},
		{"Control  8017] Insufficient privileges for UID 65534", logRefused, 0},
		{"Control  8017] Not enough privilege to execute quit command", logRefused, 0},
		{"Control  8017] NEW CLIENT 14824 from user 0: Server already exists", logOther, 0},
		{"Other 14830] Driver initialization failed with: no CUDA-capable device is detected", logOther, 14830},
		{"Other 14830] Failed to start : no CUDA-capable device is detected", logServerFailed, 14830},
		{"Legacy Server 14830] Failed to start : invalid argument", logServerFailed, 14830},
		{"Server 14830] Client {PID: 4267, Context ID: 0} is INACTIVE", logFault, 14830},
		{"Server 14830] Server status changed to FAULT", logFault, 14830},
		{"Server 14830] Active Threads Percentage set to default", logOther, 14830},
		{"Server 14830] Server Priority set to 0", logOther, 14830},
		// What a tenant can put into the log.
		{"Control  8017] Cmd:FAULT", logOther, 0},
		{"Control  8017] Cmd:NEW SERVER 14830: Ready", logOther, 0},
		{`Control  8017] Unknown command "Server 14830 exited with status 1"`, logOther, 0},
		{"Control  8017] Cmd:[2026-12-01 07:11:01.958 Server 14830] FAULT", logOther, 0},
	} {
		l, ok := parseLogLine(at + tc.line)
		if !ok {
			t.Errorf("%s: not taken for a line", tc.line)
			continue
		}
		if kind, server := l.kind(); kind != tc.kind || server != tc.server {
			t.Errorf("%s: kind %d of server %d, not %d of %d", tc.line, kind, server, tc.kind, tc.server)
		}
	}
	for _, line := range []string{"", "Cannot find MPS control daemon process", "[2026-12-01] Control 1] x", at + "Control] x"} {
		if _, ok := parseLogLine(line); ok {
			t.Errorf("%q taken for a line of the log", line)
		}
	}
}

func TestWhyAServerDidNotStart(t *testing.T) {
	for _, tc := range []struct {
		name, log, reason string
		permanent         bool
	}{
		{"no device", `[2026-12-01 12:03:02.902 Other  9254] Startup
[2026-12-01 12:03:02.935 Other  9254] Driver initialization failed with: no CUDA-capable device is detected
[2026-12-01 12:03:02.936 Other  9254] Failed to start : no CUDA-capable device is detected
[2026-12-01 12:03:02.936 Control  9242] Server encountered a fatal exception. Shutting down
[2026-12-01 12:03:02.937 Control  9242] Server 9254 exited with status 1`,
			"MPS server 9254: Failed to start : no CUDA-capable device is detected", true},
		{"before Volta", `[2026-12-01 12:03:02.936 Legacy Server  9254] Failed to start : invalid argument`,
			"MPS server 9254: Failed to start : invalid argument", true},
		{"busy", `[2026-12-01 12:03:02.902 Other  9254] Startup
[2026-12-01 12:03:02.936 Server  9254] Creating server context on device 0 (NVIDIA A16)
[2026-12-01 12:03:02.937 Control  9242] Server 9254 exited with status 1`,
			"MPS server 9254 exited; its last words: Creating server context on device 0 (NVIDIA A16)", false},
		{"another server's words", `[2026-12-01 12:03:02.936 Other  9000] Failed to start : invalid argument
[2026-12-01 12:03:02.937 Control  9242] Server 9254 exited with status 1`,
			"MPS server 9254 exited without a word", false},
	} {
		path := filepath.Join(t.TempDir(), "log")
		if err := os.WriteFile(path, []byte(tc.log+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		lines := tail{path: path}
		reason, permanent := startFailure(9254, lines.next())
		if !strings.HasPrefix(reason, tc.reason) || permanent != tc.permanent {
			t.Errorf("%s: %q, permanent %v", tc.name, reason, permanent)
		}
	}
}

func TestTailReadsWholeLinesOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	lines := tail{path: path}
	write := func(text string) {
		f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteString(text); err != nil {
			t.Fatal(err)
		}
	}
	read := func() string {
		var words []string
		for _, l := range lines.next() {
			words = append(words, l.text)
		}
		return strings.Join(words, "|")
	}
	const at = "[2026-12-01 07:11:01.958 Control  8017] "
	expect := func(want string) {
		t.Helper()
		if got := read(); got != want {
			t.Errorf("read %q, not %q", got, want)
		}
	}
	expect("")
	write(at + "one\n" + at + "tw")
	expect("one")
	expect("")
	write("o\n")
	expect("two")
	write(at + "three\n")
	if err := lines.cut(); err != nil {
		t.Fatal(err)
	}
	write(at + "4\n")
	expect("4")
	if b, err := os.ReadFile(path + ".1"); err != nil || strings.Count(string(b), "\n") != 3 {
		t.Errorf("left beside it: %q, %v", b, err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	expect("")
}

// Only a process that is the recorded one in all three is killed.
func TestKillTakesNobodyElse(t *testing.T) {
	self, err := identify(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if err := kill(t.Context(), self, "some id"); err == nil || !strings.Contains(err.Error(), `its BERTH_MPS_ID is "", and berth recorded "some id"`) {
		t.Errorf("kill of a process with another environment: %v", err)
	}
	if err := kill(t.Context(), self, ""); err == nil {
		t.Error("kill without an id")
	}
	if err := kill(t.Context(), Process{PID: self.PID, Start: self.Start + 1}, ""); err != nil {
		t.Errorf("a pid that is another's by now is gone, not an error: %v", err)
	}
	if v := (Process{PID: self.PID, Start: self.Start + 1}).view(); v.Alive {
		t.Error("a process with another start time is taken for the recorded one")
	}
}
