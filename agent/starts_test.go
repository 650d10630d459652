package agent

import (
	"fmt"
	"os"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/berth-gpu/berth/agent/state"
	"github.com/berth-gpu/berth/api"
)

// Whatever a server orders, in whatever order, with tasks that are forgotten and agents
// that crash between: no start happens twice, a fresh one is always taken, and of what
// was forgotten nothing is kept but the floor.
func TestNoStartHappensTwice(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		dir, err := os.MkdirTemp(memory(), "berth-starts")
		if err != nil {
			rt.Fatal(err)
		}
		defer os.RemoveAll(dir)
		a := reopen(rt, nil, dir)
		defer func() { a.store.Close() }()
		var (
			generation uint64
			wants      []Wanted   // now
			past       [][]Wanted // earlier orders
			started    = map[string]bool{}
		)
		apply := func(tasks []Wanted) map[string]string {
			before := map[string]bool{}
			for _, x := range a.tasks {
				before[x.rec.Name] = true
			}
			refused, err := a.want(Order{Fleet: true, Term: 1, Tasks: tasks})
			if err != nil {
				rt.Fatal(err)
			}
			for _, x := range a.tasks {
				if before[x.rec.Name] {
					continue
				}
				if started[x.rec.Name] {
					rt.Fatalf("%s was started twice", x.rec.Name)
				}
				started[x.rec.Name] = true
			}
			return refused
		}
		rt.Repeat(map[string]func(*rapid.T){
			"place": func(rt *rapid.T) {
				past = append(past, slices.Clone(wants))
				generation++
				name := fmt.Sprint("task-", generation)
				wants = append(wants, wanted(name, generation))
				if why := apply(wants)[name]; why != "" {
					rt.Fatalf("a fresh start was refused: %s", why)
				}
			},
			"want no more": func(rt *rapid.T) {
				if len(wants) == 0 {
					rt.Skip()
				}
				past = append(past, slices.Clone(wants))
				i := rapid.IntRange(0, len(wants)-1).Draw(rt, "which")
				wants = slices.Delete(slices.Clone(wants), i, i+1)
				apply(wants)
			},
			"an old order again": func(rt *rapid.T) {
				if len(past) > 0 {
					apply(rapid.SampledFrom(past).Draw(rt, "order"))
				}
			},
			"the store alone has what was changed": func(rt *rapid.T) { store(rt, a) },
			"forget": func(rt *rapid.T) {
				for _, x := range a.inOrder() {
					if x.rec.Desired == api.StatusStopped && rapid.Bool().Draw(rt, "this one") {
						store(rt, a)
						rec := x.rec
						if err := a.store.Forget(&rec); err != nil {
							rt.Fatal(err)
						}
						if rapid.Bool().Draw(rt, "and the agent lived to know") {
							delete(a.tasks, rec.ID)
						} else {
							a = reopen(rt, a, dir)
						}
						break
					}
				}
			},
			"crash": func(rt *rapid.T) { a = reopen(rt, a, dir) },
			"": func(rt *rapid.T) {
				if floor, _ := a.store.Floor(); floor > generation {
					rt.Fatalf("floor %d, and %d is the newest", floor, generation)
				}
				for name := range started {
					known := a.named(name) != nil
					if last, _ := a.store.LastGeneration(name); (last != 0) != known {
						rt.Fatalf("%s: known %v, generation %d is kept", name, known, last)
					}
				}
			},
		})
	})
}

// memory is a folder that costs no disk, where there is one.
func memory() string {
	if info, err := os.Stat("/dev/shm"); err == nil && info.IsDir() {
		return "/dev/shm"
	}
	return ""
}

// fataler is what rapid's T and testing's have in common here.
type fataler interface {
	Helper()
	Fatal(...any)
}

func store(t fataler, a *Agent) {
	t.Helper()
	var all []*state.Task
	for _, x := range a.tasks {
		all = append(all, &x.rec)
	}
	if err := a.store.PutTasks(all...); err != nil {
		t.Fatal(err)
	}
}

// reopen is an agent after a crash of the one before.
func reopen(t fataler, before *Agent, dir string) *Agent {
	t.Helper()
	if before != nil {
		before.store.Close()
	}
	a := bare(t, dir)
	a.capacity = capacity{cpu: 1 << 40, memoryMiB: 1 << 40}
	return a
}
