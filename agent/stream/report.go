package stream

import (
	"encoding/json"
	"reflect"
	"slices"
	"time"

	"github.com/berth-gpu/berth/agent"
	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/api/agentpb"
)

// useEvery bounds how often a report is sent only because the measured use of the
// GPUs has changed.
const useEvery = 5 * time.Second

// told is what has been reported on one stream.
type told struct {
	view     *agent.View // the one that was looked at last
	instance api.Instance
	settled  api.Instance // without measured use
	usedAt   time.Time    // when measured use was last compared
	tasks    map[string]api.Task
}

// report is what has changed in the view since the last report: all of it in the
// first, nil when there is nothing to say.
func (t *told) report(v *agent.View, now time.Time) (*agentpb.Report, error) {
	due := now.Sub(t.usedAt) >= useEvery
	if v == t.view && !due {
		return nil, nil
	}
	r := &agentpb.Report{Full: t.tasks == nil}
	if settled := withoutUse(v.Instance); r.Full || !reflect.DeepEqual(settled, t.settled) || due && !reflect.DeepEqual(v.Instance, t.instance) {
		var err error
		if r.Instance, err = json.Marshal(v.Instance); err != nil {
			return nil, err
		}
		t.instance, t.settled, t.usedAt = v.Instance, settled, now
	} else if due {
		t.usedAt = now
	}
	tasks, names := make(map[string]api.Task, len(v.Tasks)), make(map[string]bool, len(v.Tasks))
	for _, task := range v.Tasks {
		tasks[task.ID], names[task.Name] = task, true
		if old, known := t.tasks[task.ID]; known && reflect.DeepEqual(old, task) {
			continue
		}
		b, err := json.Marshal(task)
		if err != nil {
			return nil, err
		}
		r.Tasks = append(r.Tasks, b)
	}
	for id, old := range t.tasks {
		if _, there := tasks[id]; !there && !names[old.Name] && !slices.Contains(r.Forgotten, old.Name) {
			r.Forgotten = append(r.Forgotten, old.Name)
		}
	}
	slices.Sort(r.Forgotten)
	t.view, t.tasks = v, tasks
	if !r.Full && r.Instance == nil && r.Tasks == nil && r.Forgotten == nil {
		return nil, nil
	}
	return r, nil
}

// withoutUse is the instance without what is measured, which never rests.
func withoutUse(in api.Instance) api.Instance {
	in.GPUs = slices.Clone(in.GPUs)
	for i := range in.GPUs {
		g := &in.GPUs[i]
		g.UsedMemoryInMiB, g.UtilizationPct = 0, 0
		g.Slices = slices.Clone(g.Slices)
		for k := range g.Slices {
			g.Slices[k].UsedMemoryInMiB = 0
		}
	}
	return in
}

// order is the server's orders as the agent takes them.
func order(o *agentpb.Orders, term uint64) agent.Order {
	out := agent.Order{Fleet: true, Term: term}
	for _, w := range o.Tasks {
		to := agent.Wanted{Name: w.Name, Generation: w.Generation, Hash: w.Hash, Definition: w.Definition, GPUs: w.Gpus,
			StopAfter: time.Duration(min(w.StopAfterMs, uint64(longest/time.Millisecond))) * time.Millisecond}
		if w.Stop != nil {
			to.Stop = &agent.Stop{Code: w.Stop.Code, Reason: w.Stop.Reason}
		}
		out.Tasks = append(out.Tasks, to)
	}
	return out
}

// longest is a time that no machine waits out; it keeps sums of times from overflowing.
const longest = 100 * 365 * 24 * time.Hour

// refusals are what the agent did not take of the orders.
func refusals(o *agentpb.Orders, why map[string]string) []*agentpb.Refused {
	var out []*agentpb.Refused
	for _, w := range o.Tasks {
		if says, ok := why[w.Name]; ok {
			out = append(out, &agentpb.Refused{Name: w.Name, Generation: w.Generation, Why: says})
		}
	}
	return out
}
