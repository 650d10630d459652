package flight

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"time"
)

// Entry is one decision.
type Entry struct {
	Seq     uint64          `json:"seq"` // one more than the entry before it, over restarts too
	At      time.Time       `json:"at"`
	Machine string          `json:"machine"` // what decided: mps.Step, healthcheck.Held, fit.Place ...
	Key     string          `json:"key"`     // on what: a GPU's uuid, a service's name ...
	In      json.RawMessage `json:"in"`
	Out     json.RawMessage `json:"out,omitempty"`
}

// Gap is the Machine of an entry that stands for decisions that are not there. Its In
// is a [Missing].
const Gap = "gap"

// Missing says how many decisions a gap stands for, and why.
type Missing struct {
	Dropped int    `json:"dropped"`
	Why     string `json:"why"`
}

// Why entries are missing.
const (
	whyBusy   = "the disk did not keep up"
	whyLarge  = "larger than an entry may be"
	whyDisk   = "the disk took nothing: "
	whyTorn   = "whoever recorded ended while it was written"
	whyEncode = "cannot be written as JSON: "
)

// Of makes a decision replayable: what it returns decodes f's input, calls f, and
// encodes what f says. An input with a field that I does not have is refused: it
// was recorded by another version of berth.
func Of[I, O any](f func(I) O) func(json.RawMessage) (json.RawMessage, error) {
	return func(raw json.RawMessage) (json.RawMessage, error) {
		var in I
		if err := strictly(raw, &in); err != nil {
			return nil, err
		}
		return json.Marshal(f(in))
	}
}

func strictly(raw json.RawMessage, into any) error {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return fmt.Errorf("the input is not one of this version: %w", err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return fmt.Errorf("the input is not one JSON value")
	}
	return nil
}

// Replay runs the decision again, and says in what it differs now.
func (e Entry) Replay(again func(json.RawMessage) (json.RawMessage, error)) ([]Difference, error) {
	now, err := again(e.In)
	if err != nil {
		return nil, err
	}
	return Diff(e.Out, now)
}
