package agent

import (
	"testing"
	"time"

	"github.com/berth-gpu/berth/agent/state"
	"github.com/berth-gpu/berth/api"
)

// What the silence of a placement server does to a task that may not outlive 30 s of it.
func TestCutOff(t *testing.T) {
	at := func(seconds int) time.Duration { return time.Duration(seconds) * time.Second }
	for _, tt := range []struct {
		name  string
		heard []int // seconds since the boot; the first is what was stored
		look  []int
		want  []bool // at each look: the task has to end
	}{
		{"heard again and again", []int{100, 110, 120}, []int{125}, []bool{false}},
		{"silent", []int{100}, []int{129, 130}, []bool{false, true}},
		{"stopped with its machine, and old words in its buffers", []int{100, 400, 401}, []int{402}, []bool{true}},
		{"a silence that has been dealt with does not count again", []int{100, 400}, []int{401, 402}, []bool{true, false}},
		{"a restarted agent that was down for too long", []int{100}, []int{200}, []bool{true}},
		{"never heard since the boot", []int{0}, []int{3600}, []bool{true}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := contact{last: at(tt.heard[0])}
			for _, s := range tt.heard[1:] {
				c.hear(at(s))
			}
			for i, s := range tt.look {
				rec := state.Task{Desired: api.StatusRunning, StopAfter: 30 * time.Second}
				if got := cutTooLong(&rec, c.silence(at(s))); got != tt.want[i] {
					t.Errorf("at %d s: %v, want %v", s, got, tt.want[i])
				}
			}
		})
	}
	for name, rec := range map[string]state.Task{
		"one without the wish": {Desired: api.StatusRunning},
		"one that ends anyway": {Desired: api.StatusStopped, StopAfter: time.Second},
	} {
		if cutTooLong(&rec, time.Hour) {
			t.Errorf("%s was ended", name)
		}
	}
}
