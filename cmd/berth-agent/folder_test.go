package main

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/berth-gpu/berth/agent"
	"github.com/berth-gpu/berth/config/taskdef"
	"github.com/berth-gpu/berth/placement/fit"
)

// A file is one wanted task: what becomes of it, for every state of the last one.
func TestPlan(t *testing.T) {
	parse := func(mib int) *taskdef.Definition {
		d, err := taskdef.Parse(fmt.Appendf(nil, `{"family":"f","containerDefinitions":[{"name":"c","image":"i","memory":64,
			"resourceRequirements":[{"type":"GPU","sharingStrategy":{"nvidiaMps":{"memory":%d}}}]}]}`, mib))
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	one := file{name: "a", hash: "new", def: parse(60)}
	bad := file{name: "a", err: errors.New("family: missing")}
	last := func(edit func(*agent.Standing)) []agent.Standing {
		s := agent.Standing{Wanted: agent.Wanted{Name: "a", Generation: 5, Hash: "new"}}
		if edit != nil {
			edit(&s)
		}
		return []agent.Standing{s, {Wanted: agent.Wanted{Name: "a", Generation: 4, Hash: "new"}, Stopped: true, StoppedByAgent: true}}
	}
	machine := func() fit.Machine {
		return fit.Machine{CPU: 1024, MemoryMiB: 1024, Ports: map[fit.Port]bool{},
			GPUs: []fit.GPU{{ID: "GPU-0", Mode: fit.Idle, TotalMiB: 100, MaxClients: 48}}}
	}
	for _, tt := range []struct {
		name     string
		files    []file
		standing []agent.Standing
		want     string
	}{
		{"new", []file{one}, nil, "start a on [GPU-0]"},
		{"two that do not fit together, by file name", []file{one, {name: "b", def: parse(60)}}, nil,
			"start a on [GPU-0]; b waits: GPU 0 (GPU-0): 60 MiB wanted, 40 MiB free: 20 MiB short"},
		{"running", []file{one}, last(nil), "keep 5"},
		{"ended by itself", []file{one}, last(func(s *agent.Standing) { s.Stopped = true }), "keep 5"},
		{"stopped by berth", []file{one}, last(func(s *agent.Standing) { s.Stopped, s.StoppedByAgent = true, true }), "start a on [GPU-0]"},
		{"being stopped by berth", []file{one}, last(func(s *agent.Standing) { s.StoppedByAgent = true }), "keep 5"},
		{"changed while it runs", []file{one}, last(func(s *agent.Standing) { s.Hash = "old" }),
			"a waits: the task of the file's earlier content (generation 5) has not stopped yet"},
		{"changed and stopped", []file{one}, last(func(s *agent.Standing) { s.Hash, s.Stopped = "old", true }), "start a on [GPU-0]"},
		{"turned bad while it runs", []file{bad}, last(nil), "keep 5"},
		{"bad and new", []file{bad}, nil, ""},
		{"let go, and there again", []file{one}, last(func(s *agent.Standing) { s.Released, s.Stopped = true, true }), "start a on [GPU-0]"},
		{"gone", nil, last(nil), ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			keep, starts, waiting := plan(tt.files, tt.standing, machine())
			var said []string
			for _, k := range keep {
				said = append(said, fmt.Sprintf("keep %d", k.Generation))
			}
			for _, s := range starts {
				said = append(said, fmt.Sprintf("start %s on %v", s.file.name, s.gpus))
			}
			for _, w := range waiting {
				said = append(said, fmt.Sprintf("%s waits: %s", w.Name, strings.Join(w.Reasons, ", ")))
			}
			if got := strings.Join(said, "; "); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}
