package store_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"github.com/berth-gpu/berth/placement/store"
)

// folder is one whose path is short enough for a socket in it.
func folder(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "berth-store-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func limit(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func logger(t testing.TB) *zap.Logger {
	return zaptest.NewLogger(t, zaptest.Level(zap.WarnLevel))
}

// open opens a store that lives as long as the test, unless it is closed before.
func open(t testing.TB, o store.Options) *store.Store {
	t.Helper()
	o.Log = logger(t)
	s, err := store.Open(limit(t, 30*time.Second), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func lead(t testing.TB, s *store.Store, who string) *store.Term {
	t.Helper()
	term, err := s.Campaign(limit(t, 30*time.Second), who)
	if err != nil {
		t.Fatal(err)
	}
	return term
}

// TestRoundTrip: what was committed is there after a restart, and nothing else.
func TestRoundTrip(t *testing.T) {
	dir := folder(t)
	ctx := limit(t, time.Minute)
	s := open(t, store.Options{Dir: dir})
	start := time.Now()
	first := lead(t, s, "one")
	t.Log("campaign", time.Since(start))
	if who, err := s.Leader(ctx); err != nil || who != "one" {
		t.Fatal(who, err)
	}
	var groups []store.Group
	for i := range 300 {
		groups = append(groups, store.Group{{Kind: "task", Key: fmt.Sprintf("t%03d", i), Value: map[string]int{"n": i}}})
	}
	if err := first.Commit(ctx, groups); err != nil {
		t.Fatal(err)
	}
	if err := first.Commit(ctx, []store.Group{{{Kind: "task", Key: "t000"}, {Kind: "task", Key: "t001", Value: "b"}}}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	start = time.Now()
	s = open(t, store.Options{Dir: dir})
	t.Log("reopen", time.Since(start))
	second := lead(t, s, "two")
	t.Log("campaign", time.Since(start))
	if second.Number() <= first.Number() {
		t.Errorf("term %d after %d", second.Number(), first.Number())
	}
	records, aside, err := second.Load(ctx)
	if err != nil || len(aside) > 0 || len(records) != 299 || records[0].Key != "t001" || string(records[0].Data) != `"b"` {
		t.Fatal(len(records), aside, err)
	}
	var v struct{ N int }
	if err := json.Unmarshal(records[298].Data, &v); err != nil || v.N != 299 {
		t.Error(v, err)
	}
	_ = filepath.Join
}
