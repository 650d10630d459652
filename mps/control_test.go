package mps_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-gpu/berth/mps"
)

// utility is a control utility that does what a script says, for what the real one
// does only in bad times.
func utility(t *testing.T, script string, timeout time.Duration) *mps.Control {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, "nvidia-cuda-mps-control")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	return mps.NewControl(path, mps.Dirs{Run: dir, Log: dir, UUID: testUUID}, []string{"PATH=/usr/bin:/bin"}, timeout)
}

func TestControlIsJudgedByItsOutput(t *testing.T) {
	for _, tc := range []struct {
		name   string
		script string
		err    error // nil: none
		says   string
	}{
		{"answered", `echo 100.0`, nil, ""},
		{"answered, with status 1", `echo 100.0; exit 1`, nil, ""},
		{"answered, and the pipe is held open by a grandchild", `echo 100.0; sleep 30 &`, nil, ""},
		{"carriage returns", `printf '100.0\r\n'`, nil, ""},
		{"nothing, with status 0", `exit 0`, mps.ErrReply, "it broke off"},
		{"nothing at first, then answered", `cd "${0%/*}"; mkdir once 2>/dev/null && exit 0; echo 100.0`, nil, ""},
		{"busy at first, then answered", `cd "${0%/*}"; mkdir once 2>/dev/null && { echo Cannot send command to MPS control daemon process >&2; exit 1; }; echo 100.0`, nil, ""},
		{"not running", `echo Cannot find MPS control daemon process >&2; exit 1`, mps.ErrNotRunning, ""},
		{"not running, with status 0", `echo Cannot find MPS control daemon process >&2; exit 0`, mps.ErrNotRunning, ""},
		{"something else", `echo hello`, mps.ErrReply, `"hello"`},
		{"killed halfway", `printf 10; kill -9 $$`, mps.ErrReply, `"10"`},
		{"silent", `sleep 30`, mps.ErrWedged, "does not answer within 300ms"},
		{"silent, and deaf to TERM", `trap '' TERM INT HUP; sleep 30; sleep 30`, mps.ErrWedged, ""},
		{"silent, with a grandchild of another session", `setsid sleep 2 & sleep 30`, mps.ErrWedged, ""},
		{"too much", `yes 100.0 | head -c 3000000`, nil, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := utility(t, tc.script, 300*time.Millisecond)
			if tc.err != mps.ErrWedged {
				c = utility(t, tc.script, 20*time.Second) // on a busy machine a shell takes its time
			}
			began := time.Now()
			err := c.Probe(t.Context())
			if !errors.Is(err, tc.err) || err != nil && !strings.Contains(err.Error(), tc.says) {
				t.Errorf("%v, not %v with %q", err, tc.err, tc.says)
			}
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("it took %v", took)
			}
		})
	}
}

func TestControlRefusals(t *testing.T) {
	for _, tc := range []struct {
		name  string
		reply string
		ask   func(context.Context, *mps.Control) error
		err   error
	}{
		{"unknown command", `Unknown command "get_server_status"`, func(ctx context.Context, c *mps.Control) error { _, err := c.ServerStatus(ctx, 1); return err }, mps.ErrUnknownCommand},
		{"no such server", "Server 1 not found", func(ctx context.Context, c *mps.Control) error { return c.ShutdownServer(ctx, 1, false) }, mps.ErrNoServer},
		{"no such client's server", "Server 1 not found\nServer 1 not found!\n1", func(ctx context.Context, c *mps.Control) error { return c.TerminateClient(ctx, 1, 2) }, mps.ErrNoServer},
		{"another user", "Insufficient privileges for UID 1000", func(ctx context.Context, c *mps.Control) error { return c.StartServer(ctx, 0) }, mps.ErrPrivilege},
		{"no user", "A user id (UID) is required to start a new server", func(ctx context.Context, c *mps.Control) error { return c.StartServer(ctx, 0) }, mps.ErrReply},
		{"a CUDA error", "CUDA_ERROR_INVALID_VALUE", func(ctx context.Context, c *mps.Control) error { return c.TerminateClient(ctx, 1, 2) }, mps.ErrReply},
		{"terminated", "0", func(ctx context.Context, c *mps.Control) error { return c.TerminateClient(ctx, 1, 2) }, nil},
		{"limit not taken", "1M", func(ctx context.Context, c *mps.Control) error { return c.SetMemoryLimit(ctx, 512) }, mps.ErrReply},
		{"limit silently dropped", "", func(ctx context.Context, c *mps.Control) error { return c.SetMemoryLimit(ctx, 512) }, mps.ErrReply},
		{"limit taken", "512M", func(ctx context.Context, c *mps.Control) error { return c.SetMemoryLimit(ctx, 512) }, nil},
		{"percentage not taken", "100.0\n100.0", func(ctx context.Context, c *mps.Control) error { return c.SetThreadPercent(ctx, 30) }, mps.ErrReply},
		{"percentage taken", "30.0\n30.0", func(ctx context.Context, c *mps.Control) error { return c.SetThreadPercent(ctx, 30) }, nil},
		{"server list", "12\n13", func(ctx context.Context, c *mps.Control) error { _, err := c.Servers(ctx); return err }, nil},
		{"server list with a word in it", "12\nthirteen", func(ctx context.Context, c *mps.Control) error { _, err := c.Servers(ctx); return err }, mps.ErrReply},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := utility(t, "cat >/dev/null\ncat <<'END'\n"+tc.reply+"\n100.0\nEND\n", 20*time.Second)
			if err := tc.ask(t.Context(), c); !errors.Is(err, tc.err) {
				t.Errorf("%v, not %v", err, tc.err)
			}
		})
	}
}

func TestProcessesAreReadByTheirHeader(t *testing.T) {
	c := utility(t, `cat >/dev/null; cat <<'END'
PID   ID  SERVER  DEVICE             NAMESPACE   COMMAND
9741  0   6472    GPU-cb1213a3-d6a4  4026531836  ./nbody
9755  1   6472    GPU-cb1213a3-d6a4  4026531840  python train.py
100.0
END
`, 20*time.Second)
	rows, err := c.Processes(t.Context())
	if err != nil || len(rows) != 2 {
		t.Fatalf("%+v, %v", rows, err)
	}
	if want := (mps.ClientProcess{PID: 9755, Server: 6472, Device: "GPU-cb1213a3-d6a4", Command: "python"}); rows[1].PID != want.PID || rows[1].Server != want.Server || rows[1].Device != want.Device {
		t.Errorf("%+v", rows[1])
	}
}

// Two commands at the same time would fail in the field: the second waits, and is
// given up with its context.
func TestCommandsTakeTurns(t *testing.T) {
	dir := t.TempDir()
	c := utility(t, `mkdir `+dir+`/busy || { echo two at once; exit 0; }
sleep 0.02; rmdir `+dir+`/busy; echo 100.0`, 20*time.Second)
	var all sync.WaitGroup
	for range 10 {
		all.Go(func() {
			if err := c.Probe(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()

	slow := utility(t, `sleep 30`, 2*time.Second)
	all.Go(func() { slow.Probe(t.Context()) })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := slow.Probe(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("a command whose caller has left: %v", err)
	}
	all.Wait()
}

func TestUtilityThatIsNotThere(t *testing.T) {
	c := mps.NewControl("/nonexistent/nvidia-cuda-mps-control", mps.Dirs{Run: "/r", Log: "/l", UUID: testUUID}, nil, time.Second)
	if err := c.Probe(t.Context()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
}
