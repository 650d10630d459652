package mps_test

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-gpu/berth/mps"
)

// That decisions come out again is tested where they are made: each of the
// stories, of the first ones explored and of some walks is replayed (world.step).

// Every type of event can be recorded, and every field of it and of the state
// survives.
func TestDecisionSurvivesJSON(t *testing.T) {
	types := mps.EventTypes()
	file, err := parser.ParseFile(token.NewFileSet(), "events.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	methods := 0
	for _, d := range file.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Name.Name != "event" {
			continue
		}
		methods++
		if name := f.Recv.List[0].Type.(*ast.Ident).Name; types[name] == nil {
			t.Errorf("%s is an event, and cannot be read back", name)
		}
	}
	if methods != len(types) {
		t.Errorf("%d events, %d of them can be read back", methods, len(types))
	}
	for name, typ := range types {
		for _, n := range []int{0, 1, 2} { // elements of each list; none is not nil
			var s mps.State
			e := reflect.New(typ)
			fill(t, reflect.ValueOf(&s).Elem(), n)
			fill(t, e.Elem(), n)
			if err := mps.Survives(s, e.Elem().Interface().(mps.Event), epoch); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := mps.Survives(mps.State{}, reflect.New(typ).Elem().Interface().(mps.Event), epoch); err != nil {
			t.Errorf("%s, empty: %v", name, err)
		}
	}
}

// fill gives each field a value that is not its zero.
func fill(t *testing.T, v reflect.Value, n int) {
	t.Helper()
	switch v.Kind() {
	case reflect.String:
		v.SetString("<" + v.Type().Name() + ">")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(1<<53 + 1)
	case reflect.Uint64:
		v.SetUint(1<<64 - 1)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem(), n)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), n, n))
		for i := range n {
			fill(t, v.Index(i), n)
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(epoch.Add(time.Nanosecond)))
			return
		}
		for i := range v.NumField() {
			fill(t, v.Field(i), n)
		}
	default:
		t.Fatalf("no value for %s", v.Type())
	}
}

func TestReplayRefuses(t *testing.T) {
	for _, tc := range []struct{ name, in, says string }{
		{"no JSON", `{`, "unexpected EOF"},
		{"nothing that happened", `{"state": {}, "now": "2026-12-01T12:00:00Z"}`, "event: 0 members"},
		{"an event of another version", `{"event": {"Melted": {}}}`, `event: "Melted" is none that this version knows`},
		{"a field of another version", `{"event": {"Want": {"use": "IDLE", "soon": true}}}`, `event Want: json: unknown field "soon"`},
		{"a state of another version", `{"event": {"Tick": {}}, "state": {"mood": "good"}}`, `unknown field "mood"`},
	} {
		if _, err := mps.Replay(json.RawMessage(tc.in)); err == nil || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
}

func TestObservationSurvivesJSON(t *testing.T) {
	full := mps.Observation{At: epoch, Status: mps.Status{State: mps.PhaseHeld, Since: epoch, Budget: 5},
		Daemon: mps.ProcessView{PID: 10, Alive: true, State: "S"}, Server: mps.ProcessView{PID: 11, Alive: true, State: "T"},
		LockHolder: 10, Probe: mps.ErrWedged, ProbeTook: time.Second, ServerStatus: "FAULT", Exclusive: true, ModeErr: errors.New("")}
	for _, o := range []mps.Observation{{}, full} {
		text, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		var got mps.Observation
		if err := json.Unmarshal(text, &got); err != nil {
			t.Fatal(err)
		}
		for _, e := range []struct{ got, want error }{{got.Probe, o.Probe}, {got.ModeErr, o.ModeErr}} {
			if (e.got == nil) != (e.want == nil) || e.got != nil && e.got.Error() != e.want.Error() {
				t.Errorf("the error %v became %v in %s", e.want, e.got, text)
			}
		}
		got.Probe, got.ModeErr = o.Probe, o.ModeErr
		if got != o {
			t.Errorf("%+v\nbecame %+v\nin %s", o, got, text)
		}
	}
	if err := json.Unmarshal([]byte(`{"mood": "good"}`), new(mps.Observation)); err == nil {
		t.Error("a field of another version is taken")
	}
}

// A GPU that is well decides each second, and leaves nothing in the recorder.
func TestRoutineIsNotRecorded(t *testing.T) {
	w := heldWorld(t)
	well := func() mps.Event {
		if e := goesWell(&w); e != nil {
			return e
		}
		w.now = w.now.Add(time.Second)
		return mps.Tick{}
	}
	told := func(e mps.Event) (told bool) {
		w.s, _ = mps.Hooks{Decided: func(in, out any) { told = true }}.Step(w.s, e, w.now)
		return told
	}
	inspected := 0
	for range 60 {
		if w.s.Job == mps.JobInspect {
			inspected++
		}
		if told(well()) {
			t.Fatalf("recorded, though nothing changed: %+v", w.s)
		}
	}
	if inspected == 0 {
		t.Error("nothing was inspected")
	}
	if told(mps.Want{Use: mps.UseMPS}) || told(mps.ClientsAre{N: 1}) {
		t.Error("what is wanted already was recorded")
	}
	for _, e := range []mps.Event{mps.Faulted{Line: "a fault"}, mps.ClientsAre{N: 2}, mps.Exited{Process: w.s.Server}} {
		if !told(e) {
			t.Errorf("%T was not recorded", e)
		}
	}
}

// What a Holder's loop decides is told in order, and each replays.
func TestHolderTellsItsDecisions(t *testing.T) {
	m := newSimulated(t, mps.Config{})
	var mu sync.Mutex
	var told [][2]json.RawMessage
	m.decided = func(in, out any) {
		var pair [2]json.RawMessage
		for i, v := range []any{in, out} {
			text, err := json.Marshal(v)
			if err != nil {
				t.Error(err)
			}
			pair[i] = text
		}
		mu.Lock()
		defer mu.Unlock()
		told = append(told, pair)
	}
	m.start(mps.UseMPS, 0)
	m.awaitPhase(mps.PhaseHeld)
	m.stop()
	mu.Lock()
	defer mu.Unlock()
	if len(told) < 5 {
		t.Errorf("a GPU was held with %d decisions", len(told))
	}
	for _, pair := range told {
		out, err := mps.Replay(pair[0])
		if err != nil || string(out) != string(pair[1]) {
			t.Errorf("%v\nin  %s\nwas %s\nis  %s", err, pair[0], pair[1], out)
		}
	}
}
