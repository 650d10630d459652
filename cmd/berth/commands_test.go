package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
)

// What the page does not show.
func TestFleetOutput(t *testing.T) {
	nothing := func(f *fleet) { f.insts, f.tasks, f.services, f.replacements = nil, nil, nil, nil }
	for _, tc := range []struct {
		file string
		args []string
		with func(*fleet)
	}{
		{"fleet-ps.json", []string{"ps", "--service", "web", "--instance", "node-2", "-o", "json"}, nil},
		{"fleet-ps-agent.txt", []string{"ps", "--instance", "node-1"}, func(f *fleet) {
			// An agent's own tasks have no instance; those a server gave it have its ids for names.
			f.insts = f.insts[:1]
			for i := range f.tasks {
				f.tasks[i].Instance, f.tasks[i].Group, f.tasks[i].ID = "", "", "a9e7"+f.tasks[i].ID[4:]
			}
		}},
		{"fleet-ps-stopped.txt", []string{"ps", "-a", "--service", "web"}, func(f *fleet) {
			code := 1
			f.tasks[1].LastStatus, f.tasks[1].StopCode, f.tasks[1].StoppedReason = api.StatusStopped, api.StopInfrastructure, "node-1 is lost"
			f.tasks[1].Containers[0].LastStatus, f.tasks[1].Containers[0].ExitCode = api.StatusStopped, &code
		}},
		{"fleet-instances.json", []string{"instances", "node-2", "-o", "json"}, nil},
		{"fleet-instances-none.txt", []string{"instances"}, nothing},
		{"fleet-top-one.txt", []string{"top", "node-1"}, nil},
		{"fleet-top-none.txt", []string{"top"}, nothing},
		{"fleet-top-many.txt", []string{"top"}, func(f *fleet) {
			for range 7 {
				f.tasks = append(f.tasks, f.tasks[3])
			}
		}},
		{"fleet-ls-none.txt", []string{"service", "ls"}, nothing},
		{"fleet-replacements-none.txt", []string{"replace", "ls"}, nothing},
		{"fleet-explain-running.txt", []string{"explain", "77aa"}, func(f *fleet) {
			f.explanation = api.Explanation{Task: f.tasks[2].ID, Status: api.StatusRunning, Says: "it was placed on node-2, GPU 0: the least memory is left there", Machines: 3, GPUs: 6}
		}},
		{"fleet-drain-none.txt", []string{"drain", "node-2"}, func(f *fleet) { f.moves = nil }},
	} {
		t.Run(tc.file, func(t *testing.T) {
			f := startFleet(t)
			if tc.with != nil {
				tc.with(f)
			}
			out, errs, code := f.berth(t, tc.args...)
			if code != 0 || errs != "" {
				t.Errorf("exit code %d; stderr %q", code, errs)
			}
			golden(t, tc.file, out)
		})
	}
}

// Members that this berth does not know go through, whichever way the answer goes.
func TestJSONKeepsTheFuture(t *testing.T) {
	t.Chdir("testdata")
	for _, args := range [][]string{
		{"ps"}, {"ps", "--service", "web"}, {"instances"}, {"instances", "node-1"}, {"top"}, {"explain", "8c0d"}, {"events"},
		{"run", "-f", "chat.json"}, {"run", "-f", "chat.json", "--wait"}, {"stop", "77aa"}, {"stop", "77aa", "f00d", "--wait"},
		{"service", "create", "api", "-f", "chat.json", "--count", "1", "--wait"}, {"service", "scale", "web", "2"}, {"service", "delete", "embed", "--wait"},
		{"service", "update", "web", "--max", "150"}, {"service", "ls"},
		{"drain", "node-1", "--dry-run"}, {"drain", "node-1", "--wait"}, {"replace", "node-1"}, {"replace", "--resume"}, {"replacements"},
	} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			f := startFleet(t)
			f.future = true
			out, _, code := f.berth(t, append(args, "-o", "json")...)
			if code != 0 || !strings.Contains(strings.ReplaceAll(out, `\u003c`, "<"), "<kept") {
				t.Errorf("exit code %d; the unknown member is gone from %s", code, out)
			}
			for dec := json.NewDecoder(strings.NewReader(out)); dec.More(); {
				var any json.RawMessage
				if err := dec.Decode(&any); err != nil {
					t.Fatalf("%v in %s", err, out)
				}
			}
		})
	}
}

// A command that is wrong says so before anything is asked for.
func TestFleetUsage(t *testing.T) {
	t.Chdir("testdata")
	bad := t.TempDir() + "/bad.json"
	if err := os.WriteFile(bad, []byte("{\n  \"family\": \"x\",\n  'cpu': 1\n}"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name string
		args []string
		says string
	}{
		{"run without a file", []string{"run"}, `required flag(s) "file" not set`},
		{"a file that is not there", []string{"run", "-f", "none.json"}, "--file: open none.json: no such file or directory"},
		{"a file that is no JSON", []string{"run", "-f", bad}, "--file: " + bad + ", line 3: invalid character '\\'' looking for beginning of object key string. A task definition is JSON; docs/task-definition.md shows one"},
		{"no stdin", []string{"run", "-f", "-"}, "--file: stdin is closed"},
		{"no task at all", []string{"run", "-f", "chat.json", "--count", "0"}, "--count: 0 is not within 1 and 100"},
		{"too many tasks", []string{"run", "-f", "chat.json", "--count", "101"}, "--count: 101 is not within 1 and 100"},
		{"a limit below none", []string{"run", "-f", "chat.json", "--timeout", "-1s"}, "--timeout: -1s is less than 0; 0 means no limit"},
		{"service alone", []string{"service"}, "give create, scale, update, delete or ls; berth service --help tells them apart"},
		{"a service without a count", []string{"service", "create", "x", "-f", "chat.json"}, `required flag(s) "count" not set`},
		{"a count below none", []string{"service", "create", "x", "-f", "chat.json", "--count", "-1"}, "--count: -1 is less than 0"},
		{"more than all healthy", []string{"service", "update", "web", "--min-healthy", "101"}, "--min-healthy: 101 is not within 0 and 100 (per cent)"},
		{"at most less than all", []string{"service", "update", "web", "--max", "50"}, "--max: 50 is less than 100 (per cent)"},
		{"a part of a second", []string{"service", "update", "web", "--disconnect-stop-after", "1500ms"}, "--disconnect-stop-after: 1.5s is not a number of whole seconds from 0 up"},
		{"an update of nothing", []string{"service", "update", "web"}, "nothing to change: give --file, --count, --min-healthy, --max or --disconnect-stop-after"},
		{"a scale to no number", []string{"service", "scale", "web", "many"}, `N: "many" is not a number of tasks from 0 up`},
		{"a scale below none", []string{"service", "scale", "--", "web", "-2"}, `N: "-2" is not a number of tasks from 0 up`},
		{"drain and undo", []string{"drain", "node-1", "--undo", "--wait"}, "if any flags in the group [dry-run undo wait] are set none of the others can be; [undo wait] were all set"},
		{"a replacement of nothing", []string{"replace"}, "accepts 1 arg(s), received 0"},
		{"resume and a machine", []string{"replace", "--resume", "node-1"}, `unknown command "node-1" for "berth replace"`},
		{"nothing to stop", []string{"stop"}, "requires at least 1 arg(s), only received 0"},
		{"an event number that is none", []string{"events", "--after", "-1"}, `invalid argument "-1" for "--after" flag: strconv.ParseUint: parsing "-1": invalid syntax`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := startFleet(t)
			_, errs, code := f.berth(t, tc.args...)
			if code != exitUsage || errs != "berth: "+tc.says+"\n" {
				t.Errorf("exit code %d\ngot  %swant berth: %s", code, errs, tc.says)
			}
			if len(f.asked) > 0 {
				t.Errorf("asked %v", f.asked)
			}
		})
	}
}

// What a server refuses goes to the operator as it is.
func TestFleetRefusals(t *testing.T) {
	t.Chdir("testdata")
	for _, tc := range []struct {
		args []string
		says string
	}{
		{[]string{"service", "scale", "nope", "3"}, `no service "nope"; berth service ls lists them`},
		{[]string{"service", "delete", "nope", "--wait"}, `no service "nope"; berth service ls lists them`},
		{[]string{"service", "create", "web", "-f", "chat.json", "--count", "9"}, "service web is there already, with a count of 2; berth service update changes it"},
		{[]string{"deregister", "node-1"}, "instance node-1: its agent is connected and would join again at once"},
		{[]string{"deregister", "node-3"}, "instance node-3: 1 task is on it and may still run there"},
		{[]string{"instances", "nope"}, `no instance "nope"; berth instances lists them`},
		{[]string{"top", "nope"}, `no instance "nope"; berth instances lists them`},
		{[]string{"explain", "zz"}, `no task "zz"; berth ps -a lists the tasks`},
		{[]string{"stop", "77aa", "zz"}, `no task "zz"; berth ps -a lists the tasks`},
	} {
		f := startFleet(t)
		_, errs, code := f.berth(t, tc.args...)
		if code != exitFailed || errs != "berth: "+tc.says+"\n" {
			t.Errorf("berth %v: exit code %d\ngot  %swant berth: %s", tc.args, code, errs, tc.says)
		}
		if slices.ContainsFunc(f.asked, func(s string) bool { return strings.Contains(s, "/stop") }) {
			t.Errorf("berth %v stopped one of them: %v", tc.args, f.asked)
		}
	}
}

// An agent knows one machine: what needs all of them says so.
func TestAgentIsNoServer(t *testing.T) {
	t.Chdir("testdata")
	for _, args := range [][]string{
		{"run", "-f", "chat.json"}, {"service", "ls"}, {"service", "create", "x", "-f", "chat.json", "--count", "1"}, {"service", "scale", "x", "1"}, {"service", "delete", "x"},
		{"explain", "3f2a"}, {"drain", "node-1"}, {"replace", "node-1"}, {"replace", "--resume"}, {"deregister", "node-1"}, {"replacements"}, {"events"}, {"events", "-f"},
	} {
		a := startAgent(t)
		_, errs, code := a.berth(t, args...)
		want := "berth: an agent listens at " + a.socket + ", and this needs a placement server, which knows all machines. Name its socket with --socket or BERTH_SOCKET (berth server's is /run/berth/server.sock)\n"
		if code != exitFailed || errs != want {
			t.Errorf("berth %v: exit code %d, %q", args, code, errs)
		}
	}
}

// Where there is a server's socket, it is the one that is asked, but for doctor.
func TestServerSocketComesFirst(t *testing.T) {
	f, agent := startFleet(t), startAgent(t).socket
	ask := func(args ...string) string {
		var out bytes.Buffer
		a := newApp(nil, &out, &out, func(string) string { return "" })
		a.now = func() time.Time { return noon }
		a.serverSocket, a.agentSocket = f.socket, agent
		run(context.Background(), a, args)
		return out.String()
	}
	if out := ask("instances"); !strings.Contains(out, "node-3") {
		t.Errorf("instances asked somebody else: %s", out)
	}
	if out := ask("doctor"); strings.Contains(out, f.socket) {
		t.Errorf("doctor asked the server: %s", out)
	}
	agent += ".none"
	if out := ask("doctor"); !strings.Contains(out, f.socket) {
		t.Errorf("doctor did not ask the server, where there is no agent: %s", out)
	}
}

// Completion of each kind of name, and silence where nobody answers.
func TestCompletion(t *testing.T) {
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"stop", ""}, "8c0d1e2f\tweb PENDING\n77aa0011\tweb RUNNING\n3f2a9c1b\tweb RUNNING\nf00d0011\ttrainer RUNNING\n"},
		{[]string{"stop", "77aa", "3f"}, "3f2a9c1b\tweb RUNNING\n"},
		{[]string{"explain", "3f2a9c1b7"}, "3f2a9c1b7d5e4f60a1b2c3d4e5f60718\tweb RUNNING\n"},
		{[]string{"explain", "77aa", ""}, ""},
		{[]string{"logs", "be00"}, "be000001/model\tchat RUNNING\nbe000001/metrics\tchat RUNNING\n"},
		{[]string{"drain", "node-"}, "node-1\tACTIVE IMPAIRED\nnode-2\tACTIVE OK\nnode-3\tDRAINING IMPAIRED\n"},
		{[]string{"top", "node-2"}, "node-2\tACTIVE OK\n"},
		{[]string{"service", "scale", ""}, "embed\tembed:1\nweb\tchat:3\n"},
		{[]string{"ps", "--service", "w"}, "web\tchat:3\n"},
		{[]string{"ps", "-o", ""}, "text\njson\n"},
	} {
		f := startFleet(t)
		i := f.add(api.Task{Family: "chat"}, life{})
		f.tasks[i].LastStatus, f.tasks[i].Instance = api.StatusRunning, "node-2"
		f.tasks[i].Containers = []api.Container{{Name: "model"}, {Name: "metrics"}}
		if tc.args[0] == "stop" {
			f.tasks[i].LastStatus = api.StatusStopped
		}
		out, _, _ := f.berth(t, append([]string{"__complete"}, tc.args...)...)
		got, directive, _ := strings.Cut(out, ":")
		for strings.Contains(directive, "\n") && strings.Contains(directive, ":") { // "embed:1" has one too
			before, after, _ := strings.Cut(directive, ":")
			got, directive = got+":"+before, after
		}
		if got != tc.want || directive != "4\n" {
			t.Errorf("%v: got %q and %q, want %q and 4", tc.args, got, directive, tc.want)
		}
		f.close()
		if out, errs, _ := f.berth(t, append([]string{"__complete"}, tc.args...)...); tc.args[len(tc.args)-2] != "-o" && (out != ":4\n" || strings.Contains(errs, "cannot")) {
			t.Errorf("%v without a server: %q, %q", tc.args, out, errs)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if out, errs, code := berth(t, nil, "completion", shell); code != 0 || errs != "" || !strings.Contains(out, "berth") {
			t.Errorf("completion %s: exit code %d, %q", shell, code, errs)
		}
	}
}

// The exit codes stand in berth's own help as in the page.
func TestHelpNamesTheExitCodes(t *testing.T) {
	out, _, code := berth(t, nil, "--help")
	for _, line := range []string{"  0    done", "  1    refused", "  2    a wrong", "  3    nobody", "  4    the time", "  130  interrupted"} {
		if !strings.Contains(out, line) || code != 0 {
			t.Errorf("no %q in berth --help (exit code %d)", line, code)
		}
	}
}
