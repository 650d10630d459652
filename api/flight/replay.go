package flight

import (
	"cmp"
	"encoding/json"
	"errors"
	"slices"
	"time"
)

// Again runs a recorded decision once more: its input in, what is decided now out.
type Again = func(in json.RawMessage) (out json.RawMessage, err error)

// Report is what a replay found.
type Report struct {
	Machines []Tally  `json:"machines"`          // by name
	Missing  int      `json:"missing,omitempty"` // decisions that were not kept when they were made
	Unread   []string `json:"unread,omitempty"`  // lines that are no entries
	First    *Finding `json:"first,omitempty"`   // the first decision that is not as it was recorded
}

// Tally counts the decisions of one machine.
type Tally struct {
	Machine string `json:"machine"`
	Agree   int    `json:"agree"`
	Differ  int    `json:"differ"`
	Failed  int    `json:"failed"` // could not be run: of another version of berth
}

// Finding is a decision that is another one now.
type Finding struct {
	Seq         uint64       `json:"seq"`
	At          time.Time    `json:"at"`
	Machine     string       `json:"machine"`
	Key         string       `json:"key"`
	Error       string       `json:"error,omitempty"` // why it could not be run
	Differences []Difference `json:"differences,omitempty"`
}

// Agrees says that every decision came out as it was recorded.
func (r Report) Agrees() bool { return r.First == nil }

// Replay runs the entries of a ring, or of one of its files, again: those that
// match, each through its machine's function.
func Replay(path string, machines map[string]Again, match func(Entry) bool) (Report, error) {
	var r Report
	for e, err := range Read(path) {
		var d *Damage
		if errors.As(err, &d) {
			r.Unread = append(r.Unread, d.Error())
			continue
		} else if err != nil {
			return r, err
		}
		if e.Machine == Gap {
			var m Missing
			if json.Unmarshal(e.In, &m) == nil {
				r.Missing += m.Dropped
			}
			continue
		}
		if match(e) {
			r.run(e, machines[e.Machine])
		}
	}
	return r, nil
}

func (r *Report) run(e Entry, again Again) {
	at, found := slices.BinarySearchFunc(r.Machines, e.Machine, func(t Tally, name string) int { return cmp.Compare(t.Machine, name) })
	if !found {
		r.Machines = slices.Insert(r.Machines, at, Tally{Machine: e.Machine})
	}
	t := &r.Machines[at]
	f := Finding{Seq: e.Seq, At: e.At, Machine: e.Machine, Key: e.Key}
	var err error
	if again == nil {
		err = errors.New("this version of berth has no such machine")
	} else {
		f.Differences, err = e.Replay(again)
	}
	switch {
	case err != nil:
		t.Failed++
		f.Error = err.Error()
	case len(f.Differences) > 0:
		t.Differ++
	default:
		t.Agree++
		return
	}
	if r.First == nil {
		r.First = &f
	}
}
