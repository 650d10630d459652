package state_test

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/agent/state"
	"go.etcd.io/bbolt"
)

func open(t *testing.T, dir string) *state.Store {
	t.Helper()
	s, err := state.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func task(id, name string, generation uint64) *state.Task {
	return &state.Task{ID: id, Name: name, Generation: generation, Desired: "RUNNING",
		Definition: json.RawMessage(`{}`), Containers: []state.Container{{Name: "main"}}}
}

func TestTasksSurvive(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	if err := s.PutTasks(task("b", "two", 2), task("a", "one", 1)); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir)
	tasks, aside, err := s.Tasks()
	if err != nil || len(aside) != 0 || len(tasks) != 2 || tasks[0].ID != "a" || tasks[1].ID != "b" {
		t.Fatalf("got %v, aside %v, %v", tasks, aside, err)
	}
	if err := s.Forget(tasks[1]); err != nil {
		t.Fatal(err)
	}
	if g, _ := s.LastGeneration("two"); g != 2 {
		t.Errorf("the generation of a deleted task is %d, want 2: an older start must stay refused", g)
	}
}

func TestGenerationsOnlyRise(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	first, _ := s.NextGeneration()
	s.Close()
	s = open(t, dir)
	second, _ := s.NextGeneration()
	if second <= first {
		t.Errorf("%d after %d", second, first)
	}
	s.PutTasks(task("new", "n", 9))
	s.PutTasks(task("old", "n", 3))
	if g, _ := s.LastGeneration("n"); g != 9 {
		t.Errorf("last generation is %d, want 9", g)
	}
}

func TestBadRecordIsSetAside(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	if err := s.PutTasks(task("good", "good", 1)); err != nil {
		t.Fatal(err)
	}
	s.Close()
	edit(t, dir, "tasks", "bad", []byte(`{"id":"bad","gener`))
	edit(t, dir, "tasks", "liar", []byte(`{"id":"other","generation":1,"containers":[{"name":"x"}]}`))

	s = open(t, dir)
	tasks, aside, err := s.Tasks()
	if err != nil || len(tasks) != 1 || tasks[0].ID != "good" {
		t.Fatalf("got %v, %v", tasks, err)
	}
	if len(aside) != 2 || aside[0].Key != "bad" || aside[1].Key != "liar" || !strings.Contains(aside[1].Reason, `names task "other"`) {
		t.Errorf("aside: %+v", aside)
	}
	if _, aside, _ = s.Tasks(); len(aside) != 0 {
		t.Errorf("set aside twice: %v", aside)
	}
}

func TestRefused(t *testing.T) {
	for _, tt := range []struct {
		name string
		make func(t *testing.T, dir string)
		want string
	}{
		{"a second process", func(t *testing.T, dir string) { open(t, dir) }, "is in use: another berth-agent"},
		{"a newer layout", func(t *testing.T, dir string) {
			open(t, dir).Close()
			edit(t, dir, "meta", "version", []byte{0, 0, 0, 0, 0, 0, 0, 2})
		}, "newer berth-agent (layout 2, this one reads up to 1)"},
		{"a damaged version", func(t *testing.T, dir string) {
			open(t, dir).Close()
			edit(t, dir, "meta", "version", []byte("x"))
		}, "its version record is damaged (1 bytes, want 8)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			tt.make(t, dir)
			_, err := state.Open(dir)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestBegin(t *testing.T) {
	s := open(t, t.TempDir())
	for _, step := range []struct {
		boot     string
		rebooted bool
	}{{"one", false}, {"one", false}, {"two", true}, {"two", false}} {
		got, err := s.Begin("here", step.boot)
		if err != nil || got != step.rebooted {
			t.Errorf("boot %s: rebooted %v, %v", step.boot, got, err)
		}
	}
	if _, err := s.Begin("elsewhere", "two"); err == nil {
		t.Error("another instance's file was taken")
	}
}

func edit(t *testing.T, dir, bucket, key string, v []byte) {
	t.Helper()
	db, err := bbolt.Open(filepath.Join(dir, "agent.db"), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.Update(func(tx *bbolt.Tx) error {
		return tx.Bucket([]byte(bucket)).Put([]byte(key), v)
	}); err != nil {
		t.Fatal(err)
	}
}

func TestServer(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	s.Begin("here", "one")
	id, err := s.AgentID()
	if err != nil || len(id) != 32 {
		t.Fatalf("agent id %q, %v", id, err)
	}
	for _, term := range []uint64{3, 9, 4} {
		if err := s.RaiseTerm(term); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.PutHeard(time.Minute); err != nil {
		t.Fatal(err)
	}
	fleet := task("f", "fleet", 7)
	fleet.Fleet = true
	if err := s.PutTasks(fleet); err != nil {
		t.Fatal(err)
	}
	if err := s.Forget(fleet); err != nil {
		t.Fatal(err)
	}
	s.Close()

	s = open(t, dir)
	if rebooted, _ := s.Begin("here", "one"); rebooted {
		t.Fatal("rebooted")
	}
	again, _ := s.AgentID()
	term, _ := s.Term()
	heard, _ := s.Heard()
	floor, _ := s.Floor()
	last, _ := s.LastGeneration("fleet")
	if again != id || term != 9 || heard != time.Minute || floor != 7 || last != 0 {
		t.Errorf("after a restart: id %q (was %q), term %d, heard %s, floor %d, last %d", again, id, term, heard, floor, last)
	}
	s.Begin("here", "two")
	if heard, _ := s.Heard(); heard != 0 {
		t.Errorf("after a reboot the server was heard at %s", heard)
	}
}
