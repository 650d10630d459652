package main

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/berth-gpu/berth/api"
)

// What --wait shows, what it prints at the end, and with which exit code.
func TestWaits(t *testing.T) {
	t.Chdir("testdata")
	run := []string{"run", "-f", "chat.json", "--wait"}
	for _, tc := range []struct {
		name string
		args []string
		with func(*fleet)
		code int
		out  string
		errs string
	}{
		{"a task that ends badly", run, func(f *fleet) { f.exits = []int{3} }, 1,
			"be000001000000000000000000000001\ntask be000001 (chat) ended: model with exit code 3; EssentialContainerExited; essential container model exited\n",
			"task be000001 (chat) waits for a place\ntask be000001 (chat) starts on node-2\ntask be000001 (chat) runs on node-2\n"},
		{"one of two ends badly", append(run, "--count", "2"), func(f *fleet) { f.exits = []int{0, 7} }, 1,
			"be000001000000000000000000000001\nbe000002000000000000000000000002\ntask be000001 (chat) ended: model with exit code 0\n" +
				"task be000002 (chat) ended: model with exit code 7; EssentialContainerExited; essential container model exited\n",
			"2 without a place\n2 starting\n2 running\n"},
		{"no room", append(run, "--timeout", "200ms"), func(f *fleet) { f.hold = true }, 4, "be000001000000000000000000000001\n",
			"task be000001 (chat) waits for a place: no GPU has 20480 MiB left; the nearest miss is node-2, GPU 1: 16384 MiB are free\n" +
				"berth: still waiting after 200ms; what was asked for goes on: task be000001 (chat) waits for a place: no GPU has 20480 MiB left; the nearest miss is node-2, GPU 1: 16384 MiB are free\n"},
		{"no room for two", append(run, "--timeout", "200ms", "--count", "2"), func(f *fleet) { f.hold = true }, 4, "be000001000000000000000000000001\nbe000002000000000000000000000002\n",
			"2 without a place (no GPU has 20480 MiB left; the nearest miss is node-2, GPU 1: 16384 MiB are free)\n" +
				"berth: still waiting after 200ms; what was asked for goes on: 2 without a place (no GPU has 20480 MiB left; the nearest miss is node-2, GPU 1: 16384 MiB are free)\n"},
		{"a stale list is not believed", []string{"service", "scale", "web", "0", "--wait"}, func(f *fleet) { f.services[0].DesiredCount, f.stale = 3, 3 }, 0,
			"service web runs 0 of chat:3\n", "service web (0 wanted): no task, 3 stopping\nservice web (0 wanted): no task\n"},
		{"a service that never runs", []string{"service", "create", "api", "-f", "chat.json", "--count", "1", "--wait", "--timeout", "200ms"}, func(f *fleet) { f.hold = true }, 4, "",
			"service api (1 wanted): 1 without a place (no GPU has 20480 MiB left; the nearest miss is node-2, GPU 1: 16384 MiB are free)\n" +
				"berth: still waiting after 200ms; what was asked for goes on: service api (1 wanted): 1 without a place (no GPU has 20480 MiB left; the nearest miss is node-2, GPU 1: 16384 MiB are free)\n"},
		{"a service that is held back", []string{"service", "update", "embed", "--max", "150", "--wait", "--timeout", "200ms"}, func(f *fleet) {
			f.services[1].DesiredCount, f.services[1].Reason, f.keeps = 1, "3 tasks in a row did not stay up: the next start is in 8 s", true
		}, 4, "", "service embed (1 wanted): no task; 3 tasks in a row did not stay up: the next start is in 8 s\n" +
			"berth: still waiting after 200ms; what was asked for goes on: service embed (1 wanted): no task; 3 tasks in a row did not stay up: the next start is in 8 s\n"},
		{"a replacement that is done", []string{"replace", "node-1", "--wait"}, func(f *fleet) {
			f.replace = []api.Replacement{{ID: "be11000000000000000000000000abcd", Instance: "node-1", State: "MOVE", Newcomer: "dev-9", Says: "1 task has to move"},
				{ID: "be11000000000000000000000000abcd", Instance: "node-1", State: "DONE", Newcomer: "dev-9"}}
		}, 0, "replacement be110000 of node-1: DONE by dev-9\n",
			"replacement be110000 of node-1: CORDON\nreplacement be110000 of node-1: MOVE by dev-9; 1 task has to move\n"},
		{"a replacement that failed", []string{"replace", "node-1", "--wait"}, func(f *fleet) {
			f.replace = []api.Replacement{{ID: "be11000000000000000000000000abcd", Instance: "node-1", State: "FAILED", Says: "no machine could be launched"}}
		}, 1, "replacement be110000 of node-1: FAILED; no machine could be launched\n", "replacement be110000 of node-1: CORDON\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := startFleet(t)
			tc.with(f)
			out, errs, code := f.berth(t, tc.args...)
			if out != tc.out || errs != tc.errs || code != tc.code {
				t.Errorf("exit code %d, want %d\ngot:\n%s%s\nwant:\n%s%s", code, tc.code, out, errs, tc.out, tc.errs)
			}
		})
	}
}

// run --wait follows a task to the one that takes its place.
func TestRunFollowsTheLine(t *testing.T) {
	f := startFleet(t)
	f.noEnd = true
	done := make(chan int, 1)
	var out, errs bytes.Buffer
	moved := &tellingWriter{want: "runs on node-2", tell: func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if !f.noEnd {
			return
		}
		f.noEnd = false
		last := &f.tasks[len(f.tasks)-1]
		f.lives[last.ID] = nil
		last.LastStatus, last.Infrastructure, last.StopCode = api.StatusStopped, true, api.StopInfrastructure
		f.add(api.Task{Family: "chat", Group: "family:chat", Replaces: last.ID}, life{batch: true})
	}}
	a := newApp(nil, &out, moved, func(string) string { return "" })
	a.poll = lookEvery / 50
	done <- run(t.Context(), a, []string{"run", "-f", "testdata/chat.json", "--reschedule", "--wait", "--socket", f.socket})
	errs.WriteString(moved.String())
	if code := <-done; code != 0 || !strings.HasSuffix(out.String(), "task be000002 (chat) ended: model with exit code 0\n") {
		t.Errorf("exit code %d\n%s%s", code, out.String(), errs.String())
	}
}

// A successor that comes a look later is not missed, and the wait ends where none comes.
func TestLineWaitsForASuccessor(t *testing.T) {
	ended := func(id, replaces string, infrastructure bool) kept[api.Task] {
		return kept[api.Task]{is: api.Task{ID: id, Replaces: replaces, LastStatus: api.StatusStopped, Infrastructure: infrastructure}}
	}
	one := []kept[api.Task]{ended("a", "", true)}
	l := &line{ids: []string{"a"}, now: map[string]kept[api.Task]{"a": {is: api.Task{ID: "a"}}}, reschedule: true}
	if l.look(one) {
		t.Error("the first look does not wait for a successor")
	}
	running := kept[api.Task]{is: api.Task{ID: "b", Replaces: "a", LastStatus: api.StatusRunning}}
	if l.look(append(one, running)) || l.now["a"].is.ID != "b" {
		t.Errorf("follows %+v", l.now["a"].is)
	}
	both := append(one, ended("b", "a", true))
	if l.look(both) {
		t.Error("b has only just ended")
	}
	if !l.look(both) {
		t.Error("nothing takes the place of b")
	}
}

// A reply that is lost: the same request goes out again, and what was asked for is there
// once.
func TestLostReplies(t *testing.T) {
	t.Chdir("testdata")
	for _, tc := range []struct {
		args []string
		ask  string
	}{
		{[]string{"run", "-f", "chat.json", "--count", "2"}, "POST /v1/tasks "},
		{[]string{"stop", "77aa"}, "POST /v1/tasks/77aa00112233445566778899aabbccdd/stop"},
		{[]string{"service", "create", "api", "-f", "chat.json", "--count", "2"}, "POST /v1/services "},
		{[]string{"service", "scale", "web", "5"}, "POST /v1/services/web "},
		{[]string{"drain", "node-1"}, "POST /v1/instances/node-1/drain"},
		{[]string{"replace", "node-1"}, "POST /v1/instances/node-1/replace"},
		{[]string{"deregister", "node-3", "--force"}, "DELETE /v1/instances/node-3?force=1"}, // the second finds none: it is done
		{[]string{"service", "delete", "embed"}, "DELETE /v1/services/embed"},
	} {
		t.Run(strings.Join(tc.args, " "), func(t *testing.T) {
			f := startFleet(t)
			f.lose = 2
			want, _, _ := startFleet(t).berth(t, tc.args...)
			out, errs, code := f.berth(t, tc.args...)
			if out != want || errs != "" || code != 0 {
				t.Errorf("exit code %d, %q, %q; want %q", code, out, errs, want)
			}
			if len(f.asked) < 2 || !strings.HasPrefix(f.asked[0], tc.ask) || len(slices.Compact(slices.Clone(f.asked))) != 1 {
				t.Errorf("asked %q", f.asked)
			}
			if tc.args[0] == "run" && (f.made != 2 || !strings.Contains(f.asked[0], `"clientToken":"`)) {
				t.Errorf("%d tasks were made of %s", f.made, f.asked[0])
			}
		})
	}
}

// Two runs are two, whatever they ask for.
func TestTokensDiffer(t *testing.T) {
	f := startFleet(t)
	for range 2 {
		if _, errs, code := f.berth(t, "run", "-f", "testdata/chat.json"); code != 0 {
			t.Fatal(errs)
		}
	}
	if f.made != 2 || f.asked[0] == f.asked[1] {
		t.Errorf("%d tasks of %q", f.made, f.asked)
	}
}

// The definition comes from stdin too.
func TestRunReadsStdin(t *testing.T) {
	f := startFleet(t)
	file, err := os.Open("testdata/chat.json")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var out, errs bytes.Buffer
	if code := run(t.Context(), newApp(file, &out, &errs, func(string) string { return "" }), []string{"run", "-f", "-", "--socket", f.socket}); code != 0 {
		t.Fatal(errs.String())
	}
	if len(f.asked) != 1 || !strings.Contains(f.asked[0], `"family":"chat"`) {
		t.Errorf("asked %q", f.asked)
	}
}

// A server that is not there for a while ends no wait.
func TestWaitOutlastsTheServer(t *testing.T) {
	f := startFleet(t)
	f.noEnd = true
	out := &bytes.Buffer{}
	errs := &tellingWriter{}
	errs.want, errs.tell = "runs on node-2", func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.noEnd {
			f.noEnd, f.drop = false, 5
		}
	}
	a := newApp(nil, out, errs, func(string) string { return "" })
	a.poll = lookEvery / 50
	code := run(t.Context(), a, []string{"run", "-f", "testdata/chat.json", "--wait", "--socket", f.socket})
	if code != 0 || !strings.Contains(errs.String(), "trying again: cannot reach the server at "+f.socket+": the connection broke: ") {
		t.Errorf("exit code %d\n%s%s", code, out, errs.String())
	}
}

// Ctrl-C while waiting: what was asked for goes on, and berth says so.
func TestWaitInterrupted(t *testing.T) {
	f := startFleet(t)
	f.noEnd = true
	ctx, cancel := context.WithCancel(t.Context())
	errs := &tellingWriter{want: "runs on node-2", tell: cancel}
	a := newApp(nil, &bytes.Buffer{}, errs, func(string) string { return "" })
	a.poll = lookEvery / 50
	code := run(ctx, a, []string{"run", "-f", "testdata/chat.json", "--wait", "--socket", f.socket})
	if want := "berth: interrupted; what was asked for goes on: task be000001 (chat) runs on node-2\n"; code != exitInterrupted || !strings.HasSuffix(errs.String(), want) {
		t.Errorf("exit code %d, %q", code, errs.String())
	}
}

// A stream of events that breaks off is taken up where it ended, none lost or repeated.
func TestEventsFollow(t *testing.T) {
	f := startFleet(t)
	f.breaks = 3
	ctx, cancel := context.WithCancel(t.Context())
	out := &tellingWriter{want: "launched dev-4c1d", tell: cancel}
	a := newApp(nil, out, out, func(string) string { return "" })
	a.poll = lookEvery / 50
	if code := run(ctx, a, []string{"events", "-f", "-o", "json", "--socket", f.socket}); code != 0 {
		t.Errorf("exit code %d", code)
	}
	var seqs []string
	for line := range strings.Lines(out.String()) {
		seqs = append(seqs, line[:9])
	}
	if got := strings.Join(seqs, ""); got != `{"seq":41{"seq":42{"seq":43{"seq":45` {
		t.Errorf("got %s", out.String())
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if want := []string{"GET /v1/events?follow=1", "GET /v1/events?after=41&follow=1", "GET /v1/events?after=42&follow=1", "GET /v1/events?after=43&follow=1"}; !slices.Equal(f.asked, want) {
		t.Errorf("asked %q", f.asked)
	}
}

// Without -f, an answer that breaks off is an error, not a short list.
func TestEventsBreakOff(t *testing.T) {
	f := startFleet(t)
	f.breaks = 1
	if _, errs, code := f.berth(t, "events"); code != exitUnreachable || !strings.Contains(errs, "the connection broke") {
		t.Errorf("exit code %d, %q", code, errs)
	}
}

// On a terminal the progress is one line, rewritten and cut to fit, and gone at the end.
func TestProgressOnATerminal(t *testing.T) {
	f := startFleet(t)
	f.mu.Lock()
	f.tasks = nil
	f.hold = true
	f.mu.Unlock()
	keys, screen := openTerminal(t)
	cmd := exec.Command(os.Args[0], "run", "-f", "testdata/chat.json", "--wait")
	cmd.Env = append(os.Environ(), "BERTH_TEST_MAIN=1", "BERTH_SOCKET="+f.socket, "TERM=xterm-256color")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = screen, screen, screen
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	screen.Close()
	seen := record(keys)
	long := "task be000001 (chat) waits for a place: no GPU has 20480 MiB left; the nearest miss is node-2, GPU 1: 16384 MiB are free"
	seen.until(t, "\r"+long[:99]+clearToEnd)
	f.mu.Lock()
	f.hold = false
	f.mu.Unlock()
	seen.until(t, "\rtask be000001 (chat) runs on node-2"+clearToEnd)
	seen.until(t, "\r"+clearToEnd+"task be000001 (chat) ended: model with exit code 0")
	if err := cmd.Wait(); err != nil {
		t.Errorf("run ended with %v", err)
	}
}

// Live top of many machines says which lines it shows, and scrolls.
func TestTopScrolls(t *testing.T) {
	f := startFleet(t)
	f.mu.Lock()
	for i := range 20 {
		inst := f.insts[1]
		inst.Name = fmt.Sprintf("many-%02d", i)
		f.insts = append(f.insts, inst)
	}
	f.mu.Unlock()
	keys, screen := openTerminal(t)
	cmd := exec.Command(os.Args[0], "top", "--every", "30s")
	cmd.Env = append(os.Environ(), "BERTH_TEST_MAIN=1", "BERTH_SOCKET="+f.socket, "TERM=xterm-256color", "NO_COLOR=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = screen, screen, screen
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	screen.Close()
	seen := record(keys)
	// The headline and 37 of the lines below it fit on 40.
	seen.until(t, "lines 1 to 37 of ")
	fmt.Fprint(keys, " ")
	seen.until(t, "lines 38 to 74 of ")
	fmt.Fprint(keys, "\x1b[A")
	seen.until(t, "lines 37 to 73 of ")
	fmt.Fprint(keys, "G")
	seen.until(t, "many-19")
	fmt.Fprint(keys, "g")
	seen.until(t, "lines 1 to 37 of ")
	fmt.Fprint(keys, "q")
	if err := cmd.Wait(); err != nil {
		t.Errorf("top ended with %v", err)
	}
}

// No line of many machines is longer than the terminal, and colour takes no columns.
func TestFleetTopFitsTheTerminal(t *testing.T) {
	p := picture{insts: threeMachines(), pending: fleetTasks()[3:]}
	for _, width := range []int{10, 20, 40, 80, 100, 200} {
		plain, colour := drawTop(p, noon, style{width: width}), drawTop(p, noon, style{width: width, colour: true})
		for i, line := range colour {
			if visible(line) > width || escapes.ReplaceAllString(line, "") != plain[i] {
				t.Errorf("width %d: %q, %q", width, line, plain[i])
			}
		}
	}
	golden(t, "fleet-top-80.txt", strings.Join(drawTop(p, noon, style{width: 80}), "\n")+"\n")
}

// A server that listens and says that it is not ready is asked again only where it may
// have acted already.
func TestNotReady(t *testing.T) {
	dir := t.TempDir()
	for _, lost := range []bool{false, true} {
		socket := filepath.Join(dir, fmt.Sprint(lost)+".sock")
		asked := 0
		serve(t, socket, func(w http.ResponseWriter, r *http.Request) {
			asked++
			switch {
			case lost && asked == 1:
				panic(http.ErrAbortHandler)
			case asked < 3:
				refuse(w, http.StatusServiceUnavailable, "no leader yet; ask again")
			default:
				fmt.Fprint(w, `{"tasks":[{"taskId":"be000001000000000000000000000001"}]}`)
			}
		})
		_, errs, code := berth(t, map[string]string{"BERTH_SOCKET": socket}, "run", "-f", "testdata/chat.json")
		if lost && (code != 0 || asked != 3) || !lost && (code != 1 || asked != 1 || errs != "berth: no leader yet; ask again\n") {
			t.Errorf("lost %v: exit code %d after %d requests: %q", lost, code, asked, errs)
		}
	}
}
