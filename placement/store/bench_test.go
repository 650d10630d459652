package store_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/placement/store"
)

// task is about what a stored task takes.
var task = map[string]string{"id": strings.Repeat("a", 32), "containers": strings.Repeat("x", 600)}

func groups(n, salt int) []store.Group {
	all := make([]store.Group, n)
	for i := range all {
		task["salt"] = fmt.Sprint(salt)
		all[i] = store.Group{{Kind: "task", Key: fmt.Sprintf("%032x", i), Value: task}}
	}
	return all
}

// BenchmarkCommit is from the call until the disk has them all. It depends on how
// long the disk takes to sync more than on anything else: one sync a transaction.
func BenchmarkCommit(b *testing.B) {
	s := open(b, store.Options{Dir: folder(b)})
	term := lead(b, s, "bench")
	for _, n := range []int{1, 127, 20_000} {
		b.Run(fmt.Sprint("records=", n), func(b *testing.B) {
			for i := 0; b.Loop(); i++ {
				if err := term.Commit(context.Background(), groups(n, i)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkLoad is what a new leader reads.
func BenchmarkLoad(b *testing.B) {
	s := open(b, store.Options{Dir: folder(b)})
	term := lead(b, s, "bench")
	if err := term.Commit(limit(b, time.Minute), groups(20_000, 0)); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if records, _, err := term.Load(context.Background()); err != nil || len(records) != 20_000 {
			b.Fatal(len(records), err)
		}
	}
}

// BenchmarkOpen is the time that a restart of the server is without its store, until
// it leads.
func BenchmarkOpen(b *testing.B) {
	dir := folder(b)
	s := open(b, store.Options{Dir: dir})
	if err := lead(b, s, "bench").Commit(limit(b, time.Minute), groups(20_000, 0)); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		b.StopTimer()
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		s = open(b, store.Options{Dir: dir})
		lead(b, s, "bench")
	}
}
