package mps

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"time"
)

// Replay runs one decision of [Step] again, from what Hooks.Decided was told went
// in, and returns what comes out, as Hooks.Decided is told it: the same bytes, as
// long as Step decides the same.
func Replay(in json.RawMessage) (json.RawMessage, error) {
	var d decided
	if err := strictly(in, &d); err != nil {
		return nil, fmt.Errorf("mps: the input is not one of this version: %w", err)
	}
	s, actions := Step(d.State, d.Event, d.Now)
	return json.Marshal(follows{s, actions})
}

// decided is what goes into Step, and follows is what comes out.
type decided struct {
	State State
	Event Event
	Now   time.Time
}

type follows struct {
	State   State
	Actions []Action
}

// A thing of one of several types is written as an object of one member, named by
// its type: {"ClientsAre": {"n": 1}}.
type named map[string]any

func nameOf(v any) string { return reflect.TypeOf(v).Name() }

func (d decided) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Event named     `json:"event"`
		Now   time.Time `json:"now"`
		State State     `json:"state"`
	}{named{nameOf(d.Event): d.Event}, d.Now, d.State})
}

func (f follows) MarshalJSON() ([]byte, error) {
	actions := make([]named, 0, len(f.Actions))
	for _, a := range f.Actions {
		actions = append(actions, named{nameOf(a): a})
	}
	return json.Marshal(struct {
		Actions []named `json:"actions"`
		State   State   `json:"state"`
	}{actions, f.State})
}

// events are all types of Event, to be read by name.
var events = func() map[string]reflect.Type {
	m := map[string]reflect.Type{}
	for _, e := range []Event{Want{}, ClientsAre{}, Forgive{}, Tick{}, Exited{}, Stopped{}, Faulted{}, Doubt{}, Saved{}, SaveFailed{},
		Found{}, DaemonUp{}, ServerUp{}, ModeSet{}, ServersDown{}, DaemonDown{}, Killed{}, Reapplied{}, Inspected{}, Failed{}} {
		m[nameOf(e)] = reflect.TypeOf(e)
	}
	return m
}()

func (d *decided) UnmarshalJSON(b []byte) error {
	var raw struct {
		Event map[string]json.RawMessage `json:"event"`
		Now   time.Time                  `json:"now"`
		State State                      `json:"state"`
	}
	if err := strictly(b, &raw); err != nil {
		return err
	}
	if len(raw.Event) != 1 {
		return fmt.Errorf("event: %d members; it has one, named by what happened", len(raw.Event))
	}
	for name, text := range raw.Event {
		t, ok := events[name]
		if !ok {
			return fmt.Errorf("event: %q is none that this version knows", name)
		}
		into := reflect.New(t)
		if err := strictly(text, into.Interface()); err != nil {
			return fmt.Errorf("event %s: %w", name, err)
		}
		d.Event = into.Elem().Interface().(Event)
	}
	d.Now, d.State = raw.Now, raw.State
	return nil
}

func strictly(b []byte, into any) error {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return err
	}
	if _, err := dec.Token(); err != io.EOF {
		return errors.New("more than one JSON value")
	}
	return nil
}

// step is Step, and tells Decided of it.
func (h Hooks) step(s State, e Event, now time.Time) (State, []Action) {
	after, actions := Step(s, e, now)
	if h.Decided != nil && !routine(s, after, actions) {
		h.Decided(decided{s, e, now}, follows{after, actions})
	}
	return after, actions
}

// routine says that a decision is not worth to be kept: nothing changed but the
// rhythm of inspections. A GPU that is well makes such ones each second.
func routine(before, after State, actions []Action) bool {
	for _, a := range actions {
		if do, ok := a.(Do); !ok || do.Job != JobInspect {
			return false
		}
	}
	for _, s := range []*State{&before, &after} {
		s.InspectAt = time.Time{}
		if s.Job == JobInspect {
			s.Job = JobNone
		}
	}
	return reflect.DeepEqual(before, after)
}

// An Observation's errors are written as what they say.

type plainObservation Observation

func (o Observation) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		plainObservation
		Probe   *string `json:"probe,omitzero"`
		ModeErr *string `json:"modeErr,omitzero"`
	}{plainObservation(o), said(o.Probe), said(o.ModeErr)})
}

// UnmarshalJSON reads what MarshalJSON wrote. Its errors are texts: errors.Is
// finds nothing in them.
func (o *Observation) UnmarshalJSON(b []byte) error {
	var raw struct {
		plainObservation
		Probe   *string `json:"probe"`
		ModeErr *string `json:"modeErr"`
	}
	if err := strictly(b, &raw); err != nil {
		return err
	}
	*o = Observation(raw.plainObservation)
	for _, e := range []struct {
		text *string
		into *error
	}{{raw.Probe, &o.Probe}, {raw.ModeErr, &o.ModeErr}} {
		if e.text != nil {
			*e.into = errors.New(*e.text)
		}
	}
	return nil
}

func said(err error) *string {
	if err == nil {
		return nil
	}
	text := err.Error()
	return &text
}
