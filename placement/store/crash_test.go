package store_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/berth-gpu/berth/placement/store"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("BERTH_TEST_MAIN"); dir != "" {
		fmt.Println("ended:", writeForEver(dir))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// writeForEver commits, time after time, groups of three records that carry one
// number, and says each number once it is stored.
func writeForEver(dir string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s, err := store.Open(ctx, store.Options{Dir: dir, Log: zap.NewNop()})
	if err != nil {
		return err
	}
	term, err := s.Campaign(ctx, "child")
	if err != nil {
		return err
	}
	records, _, err := term.Load(ctx)
	if err != nil {
		return err
	}
	n := 0
	if len(records) > 0 {
		if err := json.Unmarshal(records[0].Data, &n); err != nil {
			return err
		}
	}
	for {
		n++
		var groups []store.Group
		for g := range 3 {
			var group store.Group
			for i := range 60 { // two groups do not fit into a transaction with a third
				group = append(group, store.Op{Kind: fmt.Sprint("group", g), Key: fmt.Sprint(i), Value: n})
			}
			groups = append(groups, group)
		}
		if err := term.Commit(ctx, groups); err != nil {
			return err
		}
		fmt.Println(n)
	}
}

// TestKill: after a kill -9 amid commits, what was acknowledged is there, no group
// is half there, and none is younger than one before it.
func TestKill(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	last := 0
	for range 3 {
		child := exec.Command(os.Args[0])
		child.Env = append(os.Environ(), "BERTH_TEST_MAIN="+dir)
		out, err := child.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for n := 2 + rand.IntN(5); n > 0 && lines.Scan(); n-- {
			if last, err = strconv.Atoi(lines.Text()); err != nil {
				t.Error(lines.Text())
			}
		}
		time.Sleep(time.Duration(rand.IntN(4000)) * time.Microsecond) // anywhere in a commit
		if err := child.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		for lines.Scan() { // acknowledged between our last look and the kill
			if last, err = strconv.Atoi(lines.Text()); err != nil {
				t.Error(lines.Text())
			}
		}
		_ = child.Wait()

		s := open(t, store.Options{Dir: dir})
		records, aside, err := lead(t, s, "parent").Load(limit(t, 10*time.Second))
		if err != nil || len(aside) > 0 || len(records) != 180 {
			t.Fatal(len(records), aside, err)
		}
		numbers := map[string]int{}
		for _, r := range records {
			var n int
			if err := json.Unmarshal(r.Data, &n); err != nil {
				t.Fatal(err)
			}
			if before, ok := numbers[r.Kind]; ok && before != n {
				t.Errorf("%s is half stored: %d and %d", r.Kind, before, n)
			}
			numbers[r.Kind] = n
		}
		if a, b, c := numbers["group0"], numbers["group1"], numbers["group2"]; a < b || b < c || c < last {
			t.Errorf("%v after %d was acknowledged", numbers, last)
		}
		t.Logf("%d acknowledged, found %v", last, numbers)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestLostAnswers: over connections that break at any moment, each commit is stored
// once, in its order.
func TestLostAnswers(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	open(t, store.Options{Dir: dir})
	etcd := client(t, socket(dir))
	s := open(t, store.Options{Endpoints: []string{breaking(t, filepath.Join(dir, "etcd", "client.sock"), filepath.Join(dir, "proxy.sock"))}})
	term := lead(t, s, "one")
	first := term.Number()
	ctx := limit(t, time.Minute)
	given := 0
	for i := 1; i <= 40; i++ {
		// Some are given up, and may be stored or not.
		try, cancel := ctx, context.CancelFunc(func() {})
		if i%5 == 0 {
			try, cancel = context.WithTimeout(ctx, time.Duration(rand.IntN(3000))*time.Microsecond)
		}
		before, was := value(t, etcd, "berth/record/task/x")
		err := term.Commit(try, one("x", i))
		cancel()
		if errors.Is(err, store.ErrDeposed) {
			// Its lease was not renewed in time, which the breaks may bring about.
			term = lead(t, s, "one")
			continue
		}
		now, is := value(t, etcd, "berth/record/task/x")
		mine := fmt.Sprintf(`{"v":1,"d":%d}`, i)
		switch {
		case err == nil && now == mine && is == was+1:
		case errors.Is(err, context.DeadlineExceeded) && (now == mine && is == was+1 || now == before && is == was):
			given++
		default:
			t.Fatalf("commit %d: %v; %s, written %d times, and before it %s, %d times", i, err, now, is, before, was)
		}
	}
	t.Logf("%d given up, terms %d to %d", given, first, term.Number())
}

// breaking is a way to the socket at to that breaks, all connections at once, after
// some bytes of answers.
func breaking(t *testing.T, to, at string) string {
	t.Helper()
	l, err := net.Listen("unix", at)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	done := make(chan struct{})
	t.Cleanup(func() {
		close(done)
		l.Close()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("unix", to)
			if err != nil {
				in.Close()
				continue
			}
			hangUp := sync.OnceFunc(func() { in.Close(); out.Close() })
			wg.Go(func() { _, _ = io.Copy(out, in); hangUp() })
			wg.Go(func() { _, _ = io.CopyN(in, out, 300+rand.Int64N(3000)); hangUp() })
			wg.Go(func() {
				select {
				case <-done:
				case <-time.After(time.Minute):
				}
				hangUp()
			})
		}
	})
	return "unix://" + at
}

// TestNoNetwork: the embedded etcd listens on one socket, in a folder that nobody
// else enters.
func TestNoNetwork(t *testing.T) {
	dir := folder(t)
	open(t, store.Options{Dir: dir})
	mine := map[string]bool{}
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if at, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil {
			mine[strings.TrimSuffix(strings.TrimPrefix(at, "socket:["), "]")] = true
		}
	}
	for _, file := range []string{"tcp", "tcp6", "udp", "udp6"} {
		data, err := os.ReadFile("/proc/self/net/" + file)
		if err != nil {
			continue // no IPv6 here
		}
		for _, line := range strings.Split(string(data), "\n")[1:] {
			if f := strings.Fields(line); len(f) > 9 && mine[f[9]] {
				t.Errorf("%s: %s", file, line)
			}
		}
	}
	info, err := os.Stat(filepath.Join(dir, "etcd"))
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Error(info.Mode(), err)
	}
	if info, err := os.Stat(filepath.Join(dir, "etcd", "client.sock")); err != nil || info.Mode().Type() != os.ModeSocket {
		t.Error(err)
	}
}

// TestDamaged: over files that etcd cannot read, Open says where they are and what
// to do.
func TestDamaged(t *testing.T) {
	t.Parallel()
	whole := folder(t)
	s := open(t, store.Options{Dir: whole})
	if err := lead(t, s, "one").Commit(limit(t, 30*time.Second), one("x", strings.Repeat("x", 100_000))); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	const db, wal = "etcd/data/member/snap/db", "etcd/data/member/wal/0000000000000000-0000000000000000.wal"
	over := func(path string, at int64, b byte) error {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = f.WriteAt(bytes.Repeat([]byte{b}, 8192), at)
		return err
	}
	todo := "; if its files are damaged, put back a copy of the folder, or move it away to begin with an empty store"
	for _, test := range []struct {
		name   string
		damage func(dir string) error
		want   string
	}{
		{"a database cut short", func(dir string) error { return os.Truncate(filepath.Join(dir, db), 4*4096) },
			`store: DIR/etcd/data/member/snap/db is damaged: it has 16384 bytes of \d+; put back a copy of the store's folder, DIR/etcd, or move it away to begin with an empty store`},
		{"a database without a head", func(dir string) error { return over(filepath.Join(dir, db), 0, 0) },
			`store: the embedded etcd cannot start over DIR/etcd: failed to open database: invalid database` + todo},
		{"a log written over", func(dir string) error { return over(filepath.Join(dir, wal), 2048, 1) },
			`store: the embedded etcd cannot start over DIR/etcd: .*` + todo},
		{"an empty log", func(dir string) error { return os.Truncate(filepath.Join(dir, wal), 0) },
			`store: the embedded etcd cannot start over DIR/etcd: .*` + todo},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := folder(t)
			if err := os.CopyFS(dir, os.DirFS(whole)); err != nil {
				t.Fatal(err)
			}
			if err := test.damage(dir); err != nil {
				t.Fatal(err)
			}
			_, err := store.Open(limit(t, 20*time.Second), store.Options{Dir: dir, Log: zap.NewNop()})
			want := "^" + strings.ReplaceAll(test.want, "DIR", regexp.QuoteMeta(dir)) + "$"
			if err == nil || !regexp.MustCompile(want).MatchString(err.Error()) {
				t.Errorf("got  %v\nwant %s", err, want)
			}
		})
	}
}

// TestDiedBefore: a start that follows one which died amid etcd's says so, once.
func TestDiedBefore(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	if err := os.MkdirAll(filepath.Join(dir, "etcd"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "etcd", "starting"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for want := 1; want >= 0; want-- {
		core, logs := observer.New(zap.WarnLevel)
		s, err := store.Open(limit(t, 20*time.Second), store.Options{Dir: dir, Log: zap.New(core)})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if n := logs.FilterMessageSnippet("the last start died while etcd read its files").Len(); n != want {
			t.Errorf("said %d times, want %d", n, want)
		}
	}
}
