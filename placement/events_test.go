package placement_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/placement"
)

// TestEvents: numbered without a gap, in order, told to who follows, kept over a
// restart, and bounded.
func TestEvents(t *testing.T) {
	t.Parallel()
	s := settings(t)
	r, w := serve(t, s), newWorld(t)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	q, err := http.NewRequestWithContext(ctx, "GET", "http://berth"+api.PathEvents+"?follow=1", nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := r.http.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	followed := bufio.NewScanner(res.Body)

	m := join(t, w, r, "m1", 1, 80000)
	id := run(t, r.client, api.RunTask{Definition: shared("job", 1000)})[0]
	reaches(t, r.client, id, api.StatusRunning)
	m.standing(0, api.GPUClosed, "its daemon is being restarted")
	m.exits(id, 0)
	reaches(t, r.client, id, api.StatusStopped)
	want := []string{"joined: 1 GPU, agent test", "accepted: job:1", "placed on m1, GPU GPU-m1-0 (generation 1)", "RUNNING on m1",
		"GPU 0 is CLOSED: its daemon is being restarted", "STOPPED: EssentialContainerExited: Essential container in task exited"}
	var first []api.Event
	until(t, "every event is there", func() bool { first = events(t, r.client); return len(first) >= len(want) })
	next := 0
	for i, e := range first {
		if e.Seq != uint64(i+1) || e.At.IsZero() || i > 0 && e.At.Before(first[i-1].At) {
			t.Errorf("event %d is %+v", i, e)
		}
		if next < len(want) && e.Says == want[next] {
			next++
		}
		if !followed.Scan() {
			t.Fatal("who follows is told no more", followed.Err())
		}
		var told api.Event
		if err := json.Unmarshal(followed.Bytes(), &told); err != nil || told != e {
			t.Errorf("who follows was told %+v (%v), not %+v", told, err, e)
		}
	}
	if next < len(want) {
		t.Errorf("no %q, in this order, in %+v", want[next], first)
	}
	if text := ask[string](t, r.client, "GET", api.PathEvents+"?after="+fmt.Sprint(len(first)-1), nil); strings.Count(text, "\n") != 1 {
		t.Errorf("after all but the last: %q", text)
	}
	m.setUp(false)
	r.stop(t)
	if followed.Scan(); followed.Scan() {
		for followed.Scan() {
		}
	}

	r = serve(t, s)
	again := events(t, r.client)
	if len(again) < len(first) || !slices.Equal(again[:len(first)], first) {
		t.Errorf("after a restart: %+v\nbefore: %+v", again, first)
	}
	for i := range placement.KeptEvents/100 + 10 {
		var parts []chan error
		for k := range 100 {
			done := make(chan error, 1)
			parts = append(parts, done)
			go func() { done <- r.server.Say(context.Background(), "server", "test", fmt.Sprint(i, " ", k)) }()
		}
		for _, done := range parts {
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		}
	}
	r.stop(t)
	r = serve(t, s)
	kept := events(t, r.client)
	if n := len(kept); n < placement.KeptEvents || n > placement.KeptEvents+200 {
		t.Errorf("%d events are kept, want %d and not many more", n, placement.KeptEvents)
	}
	for i, e := range kept {
		if e.Seq != kept[0].Seq+uint64(i) {
			t.Fatalf("after event %d comes %d", kept[i-1].Seq, e.Seq)
		}
	}
}

// TestLogs: a task's output comes through its agent's stream.
func TestLogs(t *testing.T) {
	t.Parallel()
	r, w := serve(t, settings(t)), newWorld(t)
	id := run(t, r.client, api.RunTask{Definition: shared("job", 1000)})[0]
	if no := refused(t, r.client, "GET", at(api.PathLogs, id), nil); no.status != 409 || !strings.Contains(no.says, "has not been placed yet") {
		t.Error(no)
	}
	m := join(t, w, r, "m1", 1, 80000)
	reaches(t, r.client, id, api.StatusRunning)
	if got := ask[string](t, r.client, "GET", at(api.PathLogs, id[:8]), nil); got != "hello from m1\n" {
		t.Errorf("%q", got)
	}
	// One that is followed ends with its stream, and does not look whole.
	res, err := r.http.Get("http://berth" + at(api.PathLogs, id) + "?follow=1")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	lines := bufio.NewScanner(res.Body)
	if !lines.Scan() || lines.Text() != "hello from m1" {
		t.Errorf("%q %v", lines.Text(), lines.Err())
	}
	m.setUp(false)
	if lines.Scan() || lines.Err() == nil {
		t.Errorf("its agent is cut off, and the answer ended as a whole one: %q", lines.Text())
	}
	until(t, "the server knows", func() bool { return !instance(t, r.client, "m1").Connected })
	if no := refused(t, r.client, "GET", at(api.PathLogs, id), nil); no.status != 503 || !strings.Contains(no.says, "is on m1, whose agent is not connected now") {
		t.Error(no)
	}
	m.mu.Lock()
	delete(m.copies, id)
	m.mu.Unlock()
}

// TestExplain: the counts add up to the fleet.
func TestExplain(t *testing.T) {
	t.Parallel()
	r, w := serve(t, settings(t)), newWorld(t)
	id := run(t, r.client, api.RunTask{Definition: shared("big", 70000)})[0]
	if e := ask[api.Explanation](t, r.client, "GET", at(api.PathExplain, id), nil); e.Says != "no machine has joined yet" || e.Machines != 0 || e.GPUs != 0 {
		t.Errorf("%+v", e)
	}
	join(t, w, r, "small", 2, 60000)
	startMachine(t, w, r, "closed", 2, 80000, func(m *machine) {
		m.standing(0, api.GPUFailed, "Xid 79")
		m.standing(1, api.GPUFailed, "Xid 79")
	})
	until(t, "it has joined", func() bool { return instance(t, r.client, "closed").Connected })
	away := startMachine(t, w, r, "away", 3, 60000)
	until(t, "it has joined", func() bool { return instance(t, r.client, "away").Connected })
	away.setUp(false)
	until(t, "it is away", func() bool { return !instance(t, r.client, "away").Connected })
	e := ask[api.Explanation](t, r.client, "GET", at(api.PathExplain, id), nil)
	machines, gpus := 0, 0
	for _, o := range e.RuledOut {
		machines, gpus = machines+o.Machines, gpus+o.GPUs
		if o.Code == "" || o.Nearest == "" || o.Instance == "" {
			t.Errorf("%+v", o)
		}
	}
	if e.Machines != 3 || e.GPUs != 7 || gpus != 7 || machines != 1 || e.Status != api.StatusPending || len(e.RuledOut) != 3 {
		t.Errorf("%+v", e)
	}
	if !strings.HasPrefix(e.Says, "no machine can take it now; nearest is ") || task(t, r.client, id).Reason != e.Says {
		t.Errorf("explain says %q, ps %q", e.Says, task(t, r.client, id).Reason)
	}
	sound(t, r)
}
