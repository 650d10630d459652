package flight_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"
	"pgregory.net/rapid"

	"github.com/berth-gpu/berth/api/flight"
)

func open(t rapid.TB, dir string, limit int64) *flight.Recorder {
	t.Helper()
	r, err := flight.Open(dir, limit, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// read takes in a whole ring; its entries' numbers must follow each other.
func read(t rapid.TB, path string) (entries []flight.Entry, damage []*flight.Damage) {
	t.Helper()
	for e, err := range flight.Read(path) {
		var d *flight.Damage
		switch {
		case errors.As(err, &d):
			damage = append(damage, d)
			continue
		case err != nil:
			t.Fatal(err)
		}
		if n := len(entries); n > 0 && e.Seq != entries[n-1].Seq+1 {
			t.Fatalf("entry %d follows %d", e.Seq, entries[n-1].Seq)
		}
		entries = append(entries, e)
	}
	return entries, damage
}

// missing is what an entry that is a gap stands for.
func missing(t rapid.TB, e flight.Entry) flight.Missing {
	t.Helper()
	var m flight.Missing
	if e.Machine == flight.Gap {
		if err := json.Unmarshal(e.In, &m); err != nil || m.Dropped < 1 || m.Why == "" {
			t.Fatalf("%v: a gap that says %s", err, e.In)
		}
	}
	return m
}

func ringSize(t rapid.TB, dir string) (bytes int64, files []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		info, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		bytes += info.Size()
	}
	return bytes, files
}

func TestEntry(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "flight")
	r := open(t, dir, 1<<20)
	in := map[string]int{"n": 1}
	r.Record("a.Step", `a "key" <1>`, in, []string{"x"})
	in["n"] = 2 // what was recorded stays
	r.Close()
	r.Record("a.Step", "late", in, in)
	r.Close()
	entries, damage := read(t, dir)
	if len(entries) != 1 || len(damage) != 0 {
		t.Fatal(entries, damage)
	}
	e := entries[0]
	if e.Seq != 1 || time.Since(e.At) > time.Minute || e.Machine != "a.Step" || e.Key != `a "key" <1>` || string(e.In) != `{"n":1}` || string(e.Out) != `["x"]` {
		t.Errorf("%+v: in %s, out %s", e, e.In, e.Out)
	}
	_, files := ringSize(t, dir)
	for path, mode := range map[string]os.FileMode{dir: 0o700, files[0]: 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s has mode %v, %v", path, info.Mode(), err)
		}
	}
}

func TestNilRecorder(t *testing.T) {
	var r *flight.Recorder
	r.Record("a.Step", "", 1, 2)
	r.Close()
}

func TestOpenRefuses(t *testing.T) {
	if _, err := flight.Open(t.TempDir(), 100, zap.NewNop()); err == nil || err.Error() != "flight recorder: a limit of 100 bytes is less than 4096" {
		t.Error(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := flight.Open(file, 1<<20, zap.NewNop()); err == nil {
		t.Error("a file is no folder")
	}
}

func TestReadRefuses(t *testing.T) {
	dir := t.TempDir()
	for _, tc := range []struct{ path, says string }{
		{filepath.Join(dir, "none"), "no such file"},
		{dir, "no flight recorder's folder: it has no file NUMBER.jsonl"},
	} {
		for _, err := range flight.Read(tc.path) {
			if err == nil || !strings.Contains(err.Error(), tc.says) {
				t.Error(err)
			}
		}
	}
}

// Over any number of restarts, with a torn end or without: the ring has the newest
// entries, in order, in no more than its bytes.
func TestRingIsBoundedAndOrdered(t *testing.T) {
	root := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp(root, "ring")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		limit := rapid.Int64Range(4<<10, 16<<10).Draw(t, "limit")
		next, torn := 0, 0
		for range rapid.IntRange(1, 8).Draw(t, "lives") {
			r := open(t, dir, limit)
			budget := int(limit / 4) // of what may wait
			for range rapid.IntRange(0, 20).Draw(t, "entries") {
				size := rapid.IntRange(0, 300).Draw(t, "size")
				if budget -= size + 64; budget < 0 {
					break
				}
				r.Record("a.Step", "k", next, strings.Repeat("x", size))
				next++
			}
			r.Close()
			bytes, files := ringSize(t, dir)
			if bytes > limit || len(files) > 4 {
				t.Fatalf("%d bytes in %d files; the limit is %d", bytes, len(files), limit)
			}
			if len(files) > 0 && rapid.Bool().Draw(t, "torn") {
				f, err := os.OpenFile(files[len(files)-1], os.O_WRONLY|os.O_APPEND, 0)
				if err != nil {
					t.Fatal(err)
				}
				f.WriteString(`{"seq":`)
				f.Close()
				torn++
			}
		}
		if next == 0 {
			return // no file was begun
		}
		open(t, dir, limit).Close() // notes the last torn end
		entries, damage := read(t, dir)
		if len(damage) > 0 {
			t.Fatal(damage[0])
		}
		gaps := 0
		for i := len(entries) - 1; i >= 0; i-- {
			if missing(t, entries[i]).Dropped > 0 {
				gaps++
				continue
			}
			if next--; string(entries[i].In) != fmt.Sprint(next) {
				t.Fatalf("entry %d is %s, not %d", entries[i].Seq, entries[i].In, next)
			}
		}
		if len(entries) == 0 || gaps > torn || next == 0 && gaps != torn {
			t.Fatalf("%d entries, %d gaps for %d torn ends; the first kept is %d", len(entries), gaps, torn, next)
		}
	})
}

// What a file of a ring may look like after a bad end, and what becomes of it.
func TestDamage(t *testing.T) {
	const one, two = `{"seq":41,"at":"2026-12-01T12:00:00Z","machine":"a.Step","key":"k","in":1,"out":1}` + "\n",
		`{"seq":42,"at":"2026-12-01T12:00:00Z","machine":"a.Step","key":"k","in":2,"out":2}` + "\n"
	for _, tc := range []struct {
		name, text string
		says       string // of the damage, before the ring is opened
		read       int    // entries then
		last       uint64 // number of the entry recorded next
		stays      bool   // damage is still there then
	}{
		{"none", one + two, "", 2, 43, false},
		{"a torn line", one + two[:20], ":2: the last line is not finished; skipped", 1, 43, false}, // 42 is the gap
		{"a torn line alone", two[:20], ":1: the last line is not finished; skipped", 0, 42, false},
		{"zeros after a loss of power", one + strings.Repeat("\x00", 30), ":2: the last line is not finished; skipped", 1, 43, false},
		{"a spoilt line", one + "{]\n" + two, ":2: no entry, skipped: invalid character", 2, 43, true},
		{"a line that is no entry", `{"level":"info"}` + "\n" + two, ":1: no entry, skipped: it has no seq or no machine", 1, 43, true},
		{"nothing but a spoilt line", "{]\n", ":1: no entry, skipped: invalid character", 0, 41, true},
		{"empty", "", "", 0, 41, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, fmt.Sprintf("%020d.jsonl", 41))
			if err := os.WriteFile(file, []byte(tc.text), 0o600); err != nil {
				t.Fatal(err)
			}
			entries, damage := read(t, dir)
			if len(entries) != tc.read || (len(damage) > 0) != (tc.says != "") {
				t.Fatalf("%d entries, damage %v", len(entries), damage)
			}
			if tc.says != "" && !strings.Contains(damage[0].Error(), tc.says) {
				t.Errorf("it says %q", damage[0])
			}
			r := open(t, dir, 1<<20)
			r.Record("a.Step", "k", 3, 3)
			r.Close()
			entries, damage = read(t, dir)
			if e := entries[len(entries)-1]; e.Seq != tc.last || string(e.In) != "3" {
				t.Errorf("recorded as %d: %s", e.Seq, e.In)
			}
			if (len(damage) > 0) != tc.stays {
				t.Errorf("damage %v", damage)
			}
			noted := 0
			for _, e := range entries {
				noted += missing(t, e).Dropped
			}
			if torn := strings.Contains(tc.says, "not finished"); (noted == 1) != torn {
				t.Errorf("%d are said to be missing", noted)
			}
		})
	}
}

// A smaller limit than before is kept at once.
func TestLimitShrinks(t *testing.T) {
	dir := t.TempDir()
	r := open(t, dir, 64<<10)
	for i := range 60 {
		r.Record("a.Step", "k", i, strings.Repeat("x", 200))
	}
	r.Close()
	r = open(t, dir, 4<<10)
	r.Record("a.Step", "k", 60, 60)
	r.Close()
	if bytes, _ := ringSize(t, dir); bytes > 4<<10 {
		t.Errorf("%d bytes", bytes)
	}
	if entries, _ := read(t, dir); len(entries) == 0 || string(entries[len(entries)-1].In) != "60" {
		t.Error("the newest entry is not there")
	}
}

// What cannot be kept leaves a gap where it would have stood.
func TestGaps(t *testing.T) {
	dir := t.TempDir()
	r, err := flight.Open(dir, 4<<10, zaptest.NewLogger(t))
	if err != nil {
		t.Fatal(err)
	}
	r.Record("a.Step", "k", 1, 1)
	r.Record("a.Step", "k", 2, strings.Repeat("x", 5000))
	r.Record("a.Step", "k", 3, strings.Repeat("x", 5000))
	r.Record("a.Step", "k", make(chan int), 4)
	r.Record("a.Step", "k", 5, 5)
	r.Close()
	var got []string
	entries, _ := read(t, dir)
	for i, e := range entries {
		if m := missing(t, e); m.Dropped > 0 {
			if next := missing(t, entries[i+1]); next.Why == m.Why {
				continue // the writer came in between: two gaps of one
			}
			got = append(got, m.Why)
		} else {
			got = append(got, string(e.In))
		}
	}
	if s := strings.Join(got, ", "); s != "1, larger than an entry may be, cannot be written as JSON: a.Step, 5" {
		t.Error(s)
	}
}

// Nobody waits for the disk: what it cannot take is counted.
func TestBusyDisk(t *testing.T) {
	dir := t.TempDir()
	r := open(t, dir, 4<<10)
	const each, writers = 10_000, 4
	var all sync.WaitGroup
	for w := range writers {
		all.Go(func() {
			for i := range each {
				r.Record("a.Step", fmt.Sprint(w), i, "0123456789012345678901234567890123456789")
			}
		})
	}
	all.Wait()
	r.Close()
	entries, damage := read(t, dir)
	if len(damage) > 0 || len(entries) == 0 {
		t.Fatal(len(entries), damage)
	}
	dropped, newest := 0, map[string]int{}
	for _, e := range entries {
		if m := missing(t, e); m.Dropped > 0 {
			dropped += m.Dropped
			continue
		}
		var i int
		if err := json.Unmarshal(e.In, &i); err != nil {
			t.Fatal(err)
		}
		if last, ok := newest[e.Key]; ok && i <= last {
			t.Fatalf("%s: %d follows %d", e.Key, i, last)
		}
		newest[e.Key] = i
	}
	if dropped == 0 {
		t.Error("a disk kept up with 40,000 entries in files of 1 KiB")
	}
}

// A disk that takes nothing for a while leaves a gap, and nothing else.
func TestDiskFailsForAWhile(t *testing.T) {
	root := t.TempDir()
	dir, aside := filepath.Join(root, "flight"), filepath.Join(root, "aside")
	r := open(t, dir, 4<<10)
	wide := strings.Repeat("x", 400)
	record := func(i int) { r.Record("a.Step", "k", i, wide) }
	until := func(what string, ok func() bool) {
		for deadline := time.Now().Add(20 * time.Second); !ok(); {
			if time.Now().After(deadline) {
				t.Fatalf("never %s", what)
			}
			time.Sleep(time.Millisecond)
		}
	}
	record(0)
	until("written", func() bool { bytes, _ := ringSize(t, dir); return bytes > 0 })
	// A file stands where the folder was: no file of the ring can be begun.
	if err := os.Rename(dir, aside); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n := 1
	full := func() bool { bytes, _ := ringSize(t, aside); return bytes > 800 } // the first file is full with two
	until("full", func() bool { record(n); n++; return full() || n > 3 })
	for range 3 {
		record(n)
		n++
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	record(n)
	r.Close()
	kept, dropped := 0, 0
	for _, d := range []string{aside, dir} {
		entries, damage := read(t, d)
		if len(damage) > 0 {
			t.Error(damage[0])
		}
		for _, e := range entries {
			if m := missing(t, e); m.Dropped > 0 {
				dropped += m.Dropped
			} else {
				kept++
			}
		}
	}
	if kept+dropped != n+1 {
		t.Errorf("%d recorded, %d kept, %d said to be missing", n+1, kept, dropped)
	}
}

// A recorder that is killed leaves what it had written; the next goes on behind it.
func TestKilled(t *testing.T) {
	if dir := os.Getenv("BERTH_FLIGHT_CHILD"); dir != "" {
		r := open(t, dir, 64<<10)
		fmt.Println("records")
		for i := 0; ; i++ {
			r.Record("a.Step", "k", i, strings.Repeat("x", i%500))
		}
	}
	dir := t.TempDir()
	var last uint64
	for life := range 4 {
		child := exec.Command(os.Args[0], "-test.run=^TestKilled$")
		child.Env = append(os.Environ(), "BERTH_FLIGHT_CHILD="+dir)
		out, err := child.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		text, err := bufio.NewReader(out).ReadString('\n')
		if err != nil {
			t.Error(text, err)
		}
		for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			// A reader beside the writer meets at most an end that is not finished.
			newest := uint64(0)
			for e, err := range flight.Read(dir) {
				var d *flight.Damage
				if err == nil {
					newest = e.Seq
				} else if !errors.As(err, &d) && !strings.Contains(err.Error(), "no flight recorder's folder") || d != nil && !d.Torn {
					t.Error(err)
				}
			}
			if newest > last+100 {
				break
			}
		}
		child.Process.Kill()
		child.Wait()
		entries, damage := read(t, dir)
		if len(damage) > 1 || len(damage) == 1 && !damage[0].Torn {
			t.Errorf("life %d: damage %v", life, damage)
		}
		if len(entries) == 0 || entries[len(entries)-1].Seq <= last {
			t.Fatalf("life %d: %d entries after %d", life, len(entries), last)
		}
		if bytes, _ := ringSize(t, dir); bytes > 64<<10 {
			t.Errorf("life %d: %d bytes", life, bytes)
		}
		last = entries[len(entries)-1].Seq
	}
}
