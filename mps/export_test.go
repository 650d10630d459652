package mps

import (
	"encoding/json"
	"fmt"
	"reflect"
	"time"
)

// Replays says whether a decision comes out again, byte for byte, of what
// Hooks.Decided is told.
func Replays(before State, e Event, now time.Time, after State, actions []Action) error {
	in, err := json.Marshal(decided{before, e, now})
	if err != nil {
		return err
	}
	was, err := json.Marshal(follows{after, actions})
	if err != nil {
		return err
	}
	is, err := Replay(in)
	if err == nil && string(is) != string(was) {
		err = fmt.Errorf("replayed it is another decision\nin  %s\nwas %s\nis  %s", in, was, is)
	}
	return err
}

// Survives says whether what goes into Step is the same after it was JSON.
func Survives(s State, e Event, now time.Time) error {
	text, err := json.Marshal(decided{s, e, now})
	if err != nil {
		return err
	}
	var d decided
	if err := json.Unmarshal(text, &d); err != nil {
		return fmt.Errorf("%w: %s", err, text)
	}
	if want := (decided{s, e, now}); !reflect.DeepEqual(d, want) {
		return fmt.Errorf("%s\nis  %+v\nwas %+v", text, d, want)
	}
	return nil
}

// EventTypes are those that a recorded decision may have, by name.
func EventTypes() map[string]reflect.Type { return events }

// Step is mps.Step as a Holder's loop takes it, with Decided.
func (h Hooks) Step(s State, e Event, now time.Time) (State, []Action) { return h.step(s, e, now) }
