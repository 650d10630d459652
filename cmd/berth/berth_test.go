package main

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/config"
)

// What each command prints, stored beside the command.
func TestOutput(t *testing.T) {
	idle := func(a *agent) {
		a.instance = api.Instance{Name: "node-2", Cluster: "default", Status: "ACTIVE", Version: "0.1.0", StartedAt: noon,
			Health: api.Health{OverallStatus: api.HealthInitializing}}
		a.tasks = nil
	}
	checks := func(a *agent) {
		a.checks = []api.Check{
			{Name: "driver", OK: true, Says: "NVIDIA driver 580.159.03"},
			{Name: "mps", OK: false, Says: "nvidia-cuda-mps-control is not on the PATH", Do: "install the package that carries it, or set mps.controlBinary"},
			{Name: "conflicts", Warn: true, Says: "nvidia-mps.service is enabled", Do: "systemctl disable --now nvidia-mps.service"},
			{Name: "cgroup", OK: true, Says: "version 2, systemd driver"},
		}
	}
	healthy := func(a *agent) { a.checks = []api.Check{{Name: "driver", OK: true, Says: "NVIDIA driver 580.159.03"}} }
	logs := func(a *agent) { a.log = "one\ntwo\nthree <3>\n" }
	for _, tc := range []struct {
		file string
		args []string
		code int
		with func(*agent)
	}{
		{"ps.txt", []string{"ps"}, 0, nil},
		{"ps-all.txt", []string{"ps", "--all"}, 0, nil},
		{"ps-none.txt", []string{"ps"}, 0, idle},
		{"ps.json", []string{"ps", "-o", "json"}, 0, nil},
		{"instances.txt", []string{"instances"}, 0, nil},
		{"instances-none.txt", []string{"instances"}, 0, idle},
		{"instances.json", []string{"instances", "-o", "json"}, 0, nil},
		{"top.txt", []string{"top"}, 0, nil},
		{"top.txt", []string{"top", "--once"}, 0, nil},
		{"top-none.txt", []string{"top", "--once"}, 0, idle},
		{"doctor.txt", []string{"doctor"}, 1, checks},
		{"doctor.json", []string{"doctor", "-o", "json"}, 1, checks},
		{"doctor-healthy.txt", []string{"doctor"}, 0, healthy},
		{"logs.txt", []string{"logs", "3f2a/server"}, 0, logs},
		{"logs-tail.txt", []string{"logs", "--tail", "2", "40-vision"}, 0, logs},
		{"logs.json", []string{"logs", "-o", "json", "40-vision"}, 0, logs},
	} {
		t.Run(tc.file, func(t *testing.T) {
			a := startAgent(t)
			if tc.with != nil {
				tc.with(a)
			}
			out, errs, code := a.berth(t, tc.args...)
			if code != tc.code || errs != "" {
				t.Errorf("exit code %d, want %d; stderr %q", code, tc.code, errs)
			}
			golden(t, tc.file, out)
		})
	}
}

// What berth says, and with which exit code it ends, when something is not as it
// should be.
func TestErrors(t *testing.T) {
	for _, tc := range []struct {
		name string
		args []string
		code int
		says string
	}{
		{"an unknown command", []string{"pss"}, 2, `unknown command "pss" for "berth"`},
		{"an unknown flag", []string{"ps", "--colour"}, 2, "unknown flag: --colour"},
		{"an argument too many", []string{"instances", "x", "y"}, 2, "accepts at most 1 arg(s), received 2"},
		{"a machine that is not there", []string{"instances", "x"}, 1, `no instance "x"; berth instances lists them`},
		{"no task", []string{"logs"}, 2, "accepts 1 arg(s), received 0"},
		{"an output that is none", []string{"ps", "-o", "yaml"}, 2, `--output: "yaml" is neither text nor json`},
		{"an interval that is too short", []string{"top", "--every", "1ms"}, 2, "--every: 1ms is less than 100ms"},
		{"no line at all", []string{"logs", "--tail=0", "3f2a"}, 2, "--tail: 0 is less than 1; leave it out for all lines"},
		{"an empty container", []string{"logs", "3f2a/"}, 2, `"3f2a/": the container's name is empty`},
		{"a prefix of two tasks", []string{"stop", "a1"}, 1,
			`"a1" fits 2 tasks, give more of the id: a17b3c5d7e9f10213243546576879809 (30-ranker), a1ff00112233445566778899aabbccdd (40-vision)`},
		{"a task that is not there", []string{"stop", "zz"}, 1, `no task "zz"; berth ps -a lists the tasks`},
		{"an empty task", []string{"stop", ""}, 2, "TASK is empty; berth ps -a lists the tasks"},
		{"a task of two containers", []string{"logs", "3f2a"}, 1,
			"task 3f2a9c1b (10-llm-small) has 2 containers; name one of them: 3f2a9c1b/server, 3f2a9c1b/metrics"},
		{"a container that is not there", []string{"logs", "3f2a/db"}, 1, `task 3f2a9c1b (10-llm-small) has no container "db"; it has server, metrics`},
		{"a task without containers", []string{"logs", "00aa"}, 1, "task 00aa0011 (50-whole) has no container yet: it is PENDING"},
		{"a refused stop", []string{"stop", "3f2a"}, 1, "task 3f2a9c1b: generation 1 is older than 2"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := startAgent(t)
			a.refuse = "task 3f2a9c1b: generation 1 is older than 2"
			_, errs, code := a.berth(t, tc.args...)
			if code != tc.code || !strings.HasPrefix(errs, "berth: "+tc.says+"\n") {
				t.Errorf("exit code %d, want %d\ngot  %swant berth: %s", code, tc.code, errs, tc.says)
			}
		})
	}
}

// An agent that cannot be reached: the sentence says what to do, the code is 3.
func TestUnreachable(t *testing.T) {
	dir, err := os.MkdirTemp("", "berth")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	missing := filepath.Join(dir, "missing.sock")
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	dead := filepath.Join(dir, "dead.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: dead})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()

	for _, tc := range []struct {
		name, socket string
		code         int
		says         string
	}{
		{"no socket", missing, 3, "there is no such socket. Start the agent (berth-agent run --config FILE, or make run) or the server"},
		{"a socket of a dead agent", dead, 3, "nobody listens there: the agent or server that made this socket has ended"},
		{"a file", file, 3, "nobody listens there"},
		{"a path that is too long", filepath.Join(dir, strings.Repeat("x", 120)), 2, "a unix socket's path has at most 107"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, cmd := range [][]string{{"ps"}, {"top", "--once"}, {"doctor"}, {"instances"}, {"logs", "x"}, {"stop", "x"}} {
				_, errs, code := berth(t, nil, append(cmd, "--socket", tc.socket)...)
				if code != tc.code || !strings.Contains(errs, tc.says) {
					t.Errorf("berth %v: exit code %d, want %d; got %q, want %q", cmd, code, tc.code, errs, tc.says)
				}
			}
		})
	}
}

// berth looks where an agent that is told nothing listens.
func TestDefaultSocket(t *testing.T) {
	settings, _, err := config.Load("", nil)
	if err != nil {
		t.Fatal(err)
	}
	if settings.Socket() != agentSocket {
		t.Errorf("the agent listens at %s, berth looks at %s", settings.Socket(), agentSocket)
	}
}

func TestStopWaits(t *testing.T) {
	a := startAgent(t)
	a.stopping = 3
	out, errs, code := a.berth(t, "stop", "--wait", "3f2a")
	want := "task 3f2a9c1b (10-llm-small) is STOPPED: stopped by an operator\n"
	progress := "task 3f2a9c1b (10-llm-small) is DEACTIVATING\n"
	if out != want || errs != progress || code != 0 {
		t.Errorf("got %q, %q, %d; want %q, %q", out, errs, code, want, progress)
	}
	if asked := a.requests(); !slices.Contains(asked, "POST /v1/tasks/3f2a9c1b7d5e4f60a1b2c3d4e5f60718/stop") {
		t.Errorf("asked %v", asked)
	}
}

func TestStopDoesNotWait(t *testing.T) {
	a := startAgent(t)
	a.stopping = 100
	out, _, code := a.berth(t, "stop", "3f2a")
	if want := "task 3f2a9c1b (10-llm-small) is being stopped; it is DEACTIVATING now\n"; out != want || code != 0 {
		t.Errorf("got %q, %d; want %q", out, code, want)
	}
}

func TestStopGivesUpWaiting(t *testing.T) {
	a := startAgent(t)
	a.stopping = 1 << 30
	_, errs, code := a.berth(t, "stop", "--wait", "--timeout", "300ms", "3f2a")
	if want := "berth: still waiting after 300ms; what was asked for goes on: task 3f2a9c1b (10-llm-small) is DEACTIVATING\n"; !strings.HasSuffix(errs, want) || code != 4 {
		t.Errorf("got %q, %d; want %q", errs, code, want)
	}
}

// Members that this berth does not know go through: -o json is the agent's answer.
func TestJSONKeepsWhatItDoesNotKnow(t *testing.T) {
	a := startAgent(t)
	out, _, _ := a.berth(t, "ps", "-o", "json")
	var tasks []api.Task
	if err := json.Unmarshal([]byte(out), &tasks); err != nil || len(tasks) != 6 {
		t.Errorf("%d tasks, %v", len(tasks), err)
	}
	var app app
	var sink strings.Builder
	app.out = &sink
	if err := app.printJSON(json.RawMessage(`{"new":1}`)); err != nil || !strings.Contains(sink.String(), `"new": 1`) {
		t.Errorf("got %q, %v", sink.String(), err)
	}
}

// Following ends with the context (Ctrl-C), with what came until then and code 0.
func TestLogsFollow(t *testing.T) {
	a := startAgent(t)
	a.log = "first\n"
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := &tellingWriter{want: "first\n", tell: cancel}
	app := newApp(nil, out, out, func(string) string { return "" })
	if code := run(ctx, app, []string{"logs", "-f", "40-vision", "--socket", a.socket}); code != 0 || out.String() != "first\n" {
		t.Errorf("exit code %d, printed %q", code, out.String())
	}
	if asked := a.requests(); asked[1] != "GET /v1/tasks/a1ff00112233445566778899aabbccdd/logs?container=detector&follow=1" {
		t.Errorf("asked %v", asked)
	}
}

// tellingWriter calls tell when it has been given all of want.
type tellingWriter struct {
	strings.Builder
	want string
	tell func()
}

func (w *tellingWriter) Write(p []byte) (int, error) {
	n, err := w.Builder.Write(p)
	if strings.Contains(w.String(), w.want) {
		w.tell()
	}
	return n, err
}
