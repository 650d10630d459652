package store

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// sized is a write of one key that takes so many bytes in all.
func sized(key string, bytes int) write {
	return write{key: key, value: make([]byte, bytes-overhead-len(key))}
}

func group(first, n int) []write {
	var g []write
	for i := range n {
		g = append(g, write{key: fmt.Sprint("k", first+i)})
	}
	return g
}

func TestPack(t *testing.T) {
	for _, test := range []struct {
		name   string
		groups [][]write
		want   string // operations of each transaction
		err    string
	}{
		{name: "nothing", want: "[]"},
		{name: "empty groups", groups: [][]write{{}, {}}, want: "[]"},
		{name: "one group of all a transaction takes", groups: [][]write{group(0, 127)}, want: "[127]"},
		{name: "one more", groups: [][]write{group(0, 127), group(127, 1)}, want: "[127 1]"},
		{name: "a group is not split", groups: [][]write{group(0, 100), group(100, 28), group(128, 99)}, want: "[100 127]"},
		{name: "order is kept though a later group would fit", groups: [][]write{group(0, 100), group(100, 100), group(200, 27)}, want: "[100 127]"},
		{name: "all the bytes", groups: [][]write{{sized("a", 1<<19)}, {sized("b", 1<<19)}}, want: "[2]"},
		{name: "a byte more", groups: [][]write{{sized("a", 1<<19)}, {sized("b", 1<<19+1)}}, want: "[1 1]"},
		{name: "one record of all the bytes", groups: [][]write{group(0, 1), {sized("b", 1<<20)}, group(1, 1)}, want: "[1 1 1]"},
		{name: "a key again", groups: [][]write{group(0, 2), group(1, 2), group(5, 1)}, want: "[2 3]"},
		{name: "too many operations", groups: [][]write{group(0, 1), group(0, 128)},
			err: "a group of 128 operations and 4498 bytes, the first on k0: want at most 127 and 1048576, which one transaction takes"},
		{name: "too many bytes", groups: [][]write{{sized("berth/record/task/a", 1<<20+1)}},
			err: "a group of 1 operations and 1048577 bytes, the first on task/a: want at most 127 and 1048576, which one transaction takes"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := pack(test.groups)
			if test.err != "" {
				if got != nil || err == nil || err.Error() != test.err {
					t.Errorf("got %v %v", got, err)
				}
				return
			}
			sizes := []int{}
			for _, transaction := range got {
				sizes = append(sizes, len(transaction))
			}
			if err != nil || fmt.Sprint(sizes) != test.want {
				t.Errorf("got %v %v, want %s", sizes, err, test.want)
			}
		})
	}
}

// TestPackAlways: everything comes out in its order, each group in one
// transaction, none over a limit and none with a key twice.
func TestPackAlways(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		groups := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) []write {
			n := rapid.IntRange(0, 60).Draw(t, "n")
			start := rapid.IntRange(0, 200).Draw(t, "start")
			g := group(start, n)
			for i := range g {
				g[i].value = make([]byte, rapid.SampledFrom([]int{0, 10, 8000}).Draw(t, "bytes"))
			}
			return g
		}), 0, 20).Draw(t, "groups")
		transactions, err := pack(groups)
		if err != nil {
			t.Fatal(err)
		}
		var in, out []write
		ends := map[int]bool{0: true} // how many writes come before a group's end
		for _, g := range groups {
			in = append(in, g...)
			ends[len(in)] = true
		}
		for _, transaction := range transactions {
			size, keys := 0, map[string]bool{}
			for _, w := range transaction {
				size += w.size()
				if keys[w.key] {
					t.Fatalf("%s twice", w.key)
				}
				keys[w.key] = true
			}
			out = append(out, transaction...)
			if len(transaction) == 0 || len(transaction) > maxOps || size > maxBytes {
				t.Fatalf("%d operations, %d bytes", len(transaction), size)
			}
			if !ends[len(out)] {
				t.Fatalf("a group was split after %d writes", len(out))
			}
		}
		if len(in) != len(out) {
			t.Fatalf("%d in, %d out", len(in), len(out))
		}
		for i := range in {
			if in[i].key != out[i].key || !bytes.Equal(in[i].value, out[i].value) {
				t.Fatalf("%d: %s in, %s out", i, in[i].key, out[i].key)
			}
		}
	})
}

func TestEncode(t *testing.T) {
	for _, test := range []struct {
		name  string
		group Group
		want  string
	}{
		{"a put and a delete", Group{{"task", "a", map[string]int{"n": 1}}, {"task", "b", nil}}, `berth/record/task/a={"v":1,"d":{"n":1}} berth/record/task/b deleted`},
		{"a key with a slash", Group{{"event", "2026/1", "x"}}, `berth/record/event/2026/1={"v":1,"d":"x"}`},
		{"the later of two counts", Group{{"task", "a", 1}, {"task", "b", 2}, {"task", "a", nil}}, `berth/record/task/a deleted berth/record/task/b={"v":1,"d":2}`},
		{"no key", Group{{"task", "", 1}}, `record "" of kind "task": want a key, and a kind without /`},
		{"a kind with a slash", Group{{"a/b", "c", 1}}, `record "c" of kind "a/b": want a key, and a kind without /`},
		{"no JSON", Group{{"task", "a", func() {}}}, `record a of kind task: json: unsupported type: func()`},
		{"JSON that is none", Group{{"task", "a", json.RawMessage("{")}}, `record a of kind task: json: error calling MarshalJSON for type json.RawMessage: unexpected end of JSON input`},
	} {
		t.Run(test.name, func(t *testing.T) {
			writes, err := encode(test.group)
			var got []string
			for _, w := range writes {
				if w.delete {
					got = append(got, w.key+" deleted")
				} else {
					got = append(got, w.key+"="+string(w.value))
				}
			}
			if err != nil {
				got = []string{err.Error()}
			}
			if strings.Join(got, " ") != test.want {
				t.Errorf("got %s, want %s", strings.Join(got, " "), test.want)
			}
		})
	}
}

func TestDecode(t *testing.T) {
	for _, test := range []struct{ name, value, want string }{
		{"a record", `{"v":1,"d":{"a":1}}`, `{"a":1}`},
		{"fields of later", `{"v":1,"d":1,"x":2}`, `1`},
		{"nothing", ``, `not a record: unexpected end of JSON input`},
		{"half", `{"v":1,"d":{"a"`, `not a record: unexpected end of JSON input`},
		{"no version", `{"d":1}`, `not a record: no version`},
		{"no data", `{"v":1}`, `not a record: nothing in it`},
		{"null", `{"v":1,"d":null}`, `not a record: nothing in it`},
		{"newer", `{"v":2,"e":1}`, `version 2, and this berth knows 1: a newer berth wrote it; upgrade this one`},
	} {
		t.Run(test.name, func(t *testing.T) {
			data, err := decode([]byte(test.value))
			got := string(data)
			if err != nil {
				got = err.Error()
			}
			if got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}
