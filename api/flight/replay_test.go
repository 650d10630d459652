package flight_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/berth-gpu/berth/api/flight"
)

func TestDiff(t *testing.T) {
	for _, tc := range []struct{ name, was, is, want string }{
		{"the same", `{"a":1}`, `{"a":1}`, ""},
		{"the same in another order", `{"a":1,"b":2}`, `{"b":2, "a":1}`, ""},
		{"a number", `{"a":{"b":1}}`, `{"a":{"b":2}}`, "a.b: 1 -> 2"},
		{"large numbers", `18446744073709551615`, `18446744073709551614`, ": 18446744073709551615 -> 18446744073709551614"},
		{"in a list", `{"actions":[{"Do":{"job":"look"}}]}`, `{"actions":[{"Do":{"job":"kill"}}]}`, `actions[0].Do.job: "look" -> "kill"`},
		{"one more", `[1]`, `[1,{"a":"<"}]`, `[1]:  -> {"a":"<"}`},
		{"one less", `{"a":[1,2]}`, `{"a":[1]}`, `a[1]: 2 -> `},
		{"a member more and one less", `{"a":1}`, `{"b":null}`, "a: 1 -> ; b:  -> null"},
		{"another kind", `{"a":[1]}`, `{"a":{"0":1}}`, `a: [1] -> {"0":1}`},
		{"a number that is a text", `{"a":1}`, `{"a":"1"}`, `a: 1 -> "1"`},
		{"an instant in two zones", `["2026-12-01T12:00:00Z"]`, `["2026-12-01T13:00:00+01:00"]`, ""},
		{"two instants", `["2026-12-01T12:00:00Z"]`, `["2026-12-01T12:00:00.1Z"]`, `[0]: "2026-12-01T12:00:00Z" -> "2026-12-01T12:00:00.1Z"`},
		{"true", `true`, `false`, ": true -> false"},
	} {
		got, err := flight.Diff(json.RawMessage(tc.was), json.RawMessage(tc.is))
		if err != nil {
			t.Errorf("%s: %v", tc.name, err)
		}
		var lines []string
		for _, d := range got {
			lines = append(lines, fmt.Sprintf("%s: %s -> %s", d.Path, d.Recorded, d.Now))
		}
		if s := strings.Join(lines, "; "); s != tc.want {
			t.Errorf("%s: %s", tc.name, s)
		}
	}
	if _, err := flight.Diff(nil, json.RawMessage(`1`)); err == nil {
		t.Error("nothing was recorded, and that is no error")
	}
}

func TestReplay(t *testing.T) {
	type input struct{ A, B int }
	sum := flight.Of(func(in input) int { return in.A + in.B })
	for _, tc := range []struct{ name, in, out, want, err string }{
		{"the same", `{"A":1,"B":2}`, `3`, "", ""},
		{"another", `{"A":1,"B":2}`, `4`, ": 4 -> 3", ""},
		{"of another version", `{"A":1,"C":2}`, `3`, "", `the input is not one of this version: json: unknown field "C"`},
		{"two inputs", `{"A":1} {}`, `1`, "", "the input is not one JSON value"},
	} {
		got, err := flight.Entry{In: json.RawMessage(tc.in), Out: json.RawMessage(tc.out)}.Replay(sum)
		if fmt.Sprint(err) != tc.err && (err != nil || tc.err != "") {
			t.Errorf("%s: %v", tc.name, err)
		}
		s := ""
		if len(got) > 0 {
			s = fmt.Sprintf("%s: %s -> %s", got[0].Path, got[0].Recorded, got[0].Now)
		}
		if s != tc.want {
			t.Errorf("%s: %q", tc.name, s)
		}
	}
}

func BenchmarkRecord(b *testing.B) {
	r := open(b, b.TempDir(), 16<<20)
	defer r.Close()
	in := map[string]string{"state": strings.Repeat("x", 1000)}
	for b.Loop() {
		r.Record("a.Step", "k", in, in)
	}
}
