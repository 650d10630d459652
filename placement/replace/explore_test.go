package replace_test

import (
	"flag"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/placement/replace"
)

// slow is a policy whose every wait is a few minutes, so that the exploration's clock
// goes by minutes.
var slow = replace.Policy{When: replace.WhenAny, AtOncePercent: 10, PerHour: 6, JoinTimeout: 2 * time.Minute, DrainDeadline: 2 * time.Minute, StopTimeout: time.Minute,
	Newcomers: 2, Attempts: 2, Backoff: time.Minute, BackoffMax: time.Minute}

// world is one replacement, the server that makes its calls, the provider that answers
// them, and the machines. It is a value: a copy is another future.
type world struct {
	R   replace.Replacement
	Now time.Time

	// The server's memory, which a restart loses.
	Flying *replace.Action
	Since  time.Time

	// The provider: machines by their number, 0 the old one and n that of the nth token.
	Alive  [3]bool
	Dead   [3]bool         // terminated: its token makes none
	Ghost  *replace.Action // a call of a server that is gone, which has not arrived yet
	Late   bool            // it has, and may have made what nobody knows
	Echo   *replace.Result // a reply that may come once more
	Faults int             // that may happen still

	// The fleet.
	Old      string // its standing
	New      [3]string
	Healthy  bool // the newcomer's
	Lost     bool
	Back     bool // it is well again
	Movable  int
	Stays    int // standalone tasks
	Told     bool
	WasEnded bool // tasks were told to end at the deadline, or are gone
}

func begin(operator bool, faults int) world {
	w := world{R: replace.New("r", "old", "1 GPU failed", operator, epoch), Now: epoch, Since: epoch, Old: api.InstanceActive, Movable: 1, Stays: 1, Faults: faults}
	w.Alive[0] = true
	return w
}

func number(instance string) int {
	var n int
	if _, err := fmt.Sscanf(instance, "new-%d", &n); err != nil {
		return 0
	}
	return n
}

func (w *world) newest() int { return number(w.R.Newcomer()) }

func (w *world) observe(result *replace.Result) replace.Observation {
	o := replace.Observation{Standing: w.Old, Lost: w.Lost, Recovered: w.Back, LeaderSince: w.Since, InFlight: w.Flying != nil, Result: result}
	if w.Old != "" {
		o.TasksLeft, o.Movable = w.Movable+w.Stays, w.Movable
		if !w.Told {
			o.NotEnding = o.TasksLeft
		}
	}
	if n := w.newest(); n > 0 {
		o.NewcomerStanding = w.New[n]
		o.NewcomerJoined = w.New[n] != ""
		o.NewcomerImpaired = !w.Healthy
	}
	return o
}

// round is the server's: it steps until nothing changes, and does what it is told.
func (w *world) round(result *replace.Result) error {
	for i := 0; ; i++ {
		if i == 8 {
			return fmt.Errorf("no rest: %s", w.R.Says)
		}
		before, o := w.R, w.observe(result)
		next, actions := replace.Step(before, o, w.Now, slow)
		result, w.R = nil, next
		for _, a := range actions {
			if err := w.do(a, o); err != nil {
				return err
			}
		}
		if len(actions) == 0 && reflect.DeepEqual(before, next) {
			return w.check()
		}
	}
}

func (w *world) do(a replace.Action, o replace.Observation) error {
	set := func(standing string) {
		if n := number(a.Instance); n > 0 {
			w.New[n] = standing
		} else {
			w.Old = standing
		}
	}
	switch a.Kind {
	case replace.DoCordon:
		set(api.InstanceDraining)
	case replace.DoUncordon:
		set(api.InstanceActive)
	case replace.DoForget:
		if w.Alive[number(a.Instance)] {
			return fmt.Errorf("%s is forgotten and alive", a.Instance)
		}
		set("")
	case replace.DoEndTasks:
		if w.Now.Before(w.R.MoveAt.Add(slow.DrainDeadline)) {
			return fmt.Errorf("tasks end before the deadline")
		}
		w.Told, w.WasEnded = true, true
	case replace.DoRetire:
		if !w.R.Retired(a.Instance) {
			return fmt.Errorf("%s is retired, and Retired does not say so", a.Instance)
		}
	default:
		if w.Flying != nil {
			return fmt.Errorf("%s while %s is under way", a.Kind, w.Flying.Kind)
		}
		if a.Kind == replace.DoTerminate && a.Instance == "old" {
			switch {
			case w.R.Newcomers[len(w.R.Newcomers)-1].JoinedAt.IsZero():
				return fmt.Errorf("the old machine is terminated and none has joined")
			case o.TasksLeft > 0 && !w.Lost && w.Old != "" && !w.WasEnded:
				return fmt.Errorf("the old machine is terminated under %d tasks", o.TasksLeft)
			}
		}
		w.Flying = &a
	}
	return nil
}

// check is what always holds.
func (w *world) check() error {
	alive := 0
	for n := 1; n < len(w.Alive); n++ {
		if w.Alive[n] {
			alive++
		}
	}
	calledOff := w.R.Next == replace.Done
	switch {
	case alive > 1:
		return fmt.Errorf("two newcomers are alive")
	case w.R.Says == "":
		return fmt.Errorf("it says nothing")
	case w.Old == api.InstanceActive && w.R.State != replace.Cordon && !calledOff:
		return fmt.Errorf("the machine takes tasks in %s", w.R.State)
	case !w.R.Over():
		return nil
	case w.Flying != nil:
		return fmt.Errorf("it is over while %s is under way", w.Flying.Kind)
	case w.R.State == replace.Failed && (w.R.Why == "" || w.Old == api.InstanceActive):
		return fmt.Errorf("failed without a reason, or not cordoned")
	case w.R.State == replace.Done && calledOff && (alive > 0 && !w.Late || !w.Alive[0] || w.Old != api.InstanceActive):
		return fmt.Errorf("called off, and a newcomer is left or the machine takes no tasks")
	case w.R.State == replace.Done && !calledOff && (w.Alive[0] || w.Old != ""):
		return fmt.Errorf("done, and the old machine is not gone")
	}
	return nil
}

// reaches the provider: the call's effect and its true reply.
func (w *world) reach(a replace.Action) replace.Result {
	r := replace.Result{Call: a.Call}
	n := 0
	switch a.Token {
	case "r":
		n = 1
	case "r-2":
		n = 2
	}
	switch a.Kind {
	case replace.DoLaunch:
		if w.Dead[n] {
			r.Err = "was terminated"
			return r
		}
		w.Alive[n] = true
		r.ID = fmt.Sprintf("new-%d", n)
	case replace.DoFind:
		if r.Found = w.Alive[n]; r.Found {
			r.ID = fmt.Sprintf("new-%d", n)
		}
	case replace.DoTerminate:
		n = number(a.Instance)
		w.Alive[n], w.Dead[n] = false, true
	}
	return r
}

type event struct {
	name string
	do   func(w *world) error
}

// events are what can happen to a world.
func (w world) events() (all []event) {
	add := func(name string, do func(w *world) error) { all = append(all, event{name, do}) }
	fault := func(name string, do func(w *world) error) {
		if w.Faults > 0 {
			add(name, func(w *world) error { w.Faults--; return do(w) })
		}
	}
	if w.R.Over() {
		return nil
	}
	add("minute", func(w *world) error { w.Now = w.Now.Add(time.Minute); return w.round(nil) })
	if w.Flying != nil {
		reply := func(w *world) *replace.Result {
			r := w.reach(*w.Flying)
			w.Flying, w.Echo = nil, &r
			return &r
		}
		add("reply", func(w *world) error { return w.round(reply(w)) })
		fault("error, nothing done", func(w *world) error {
			r := &replace.Result{Call: w.Flying.Call, Err: "no"}
			w.Flying = nil
			return w.round(r)
		})
		fault("error, done", func(w *world) error {
			r := reply(w)
			return w.round(&replace.Result{Call: r.Call, Err: "time-out"})
		})
		fault("restart, done", func(w *world) error { reply(w); w.Since = w.Now; return w.round(nil) })
		fault("restart, done later", func(w *world) error { w.Ghost, w.Flying, w.Since = w.Flying, nil, w.Now; return w.round(nil) })
	}
	fault("restart, not done", func(w *world) error { w.Flying, w.Since = nil, w.Now; return w.round(nil) })
	if w.Ghost != nil {
		add("a late call arrives", func(w *world) error {
			r := w.reach(*w.Ghost)
			w.Ghost, w.Echo, w.Late = nil, &r, true
			return w.round(nil)
		})
	}
	if w.Echo != nil {
		fault("a reply comes again", func(w *world) error { return w.round(w.Echo) })
	}
	if n := w.newest(); n > 0 && w.Alive[n] {
		if w.New[n] == "" && !w.R.Retired(fmt.Sprintf("new-%d", n)) {
			add("joins", func(w *world) error { w.New[n], w.Healthy = api.InstanceActive, true; return w.round(nil) })
			fault("joins impaired", func(w *world) error { w.New[n], w.Healthy = api.InstanceActive, false; return w.round(nil) })
		}
		if w.New[n] != "" && w.Healthy {
			fault("newcomer breaks", func(w *world) error { w.Healthy = false; return w.round(nil) })
			if w.Movable > 0 && w.Old == api.InstanceDraining {
				add("task moves", func(w *world) error { w.Movable--; return w.round(nil) })
			}
		}
	}
	if w.Stays > 0 {
		add("task ends", func(w *world) error { w.Stays--; return w.round(nil) })
	}
	if w.Told && w.Movable > 0 {
		add("task stops", func(w *world) error { w.Movable--; return w.round(nil) })
	}
	if w.Alive[0] && w.Old != "" {
		if !w.Lost {
			// Its tasks are gone from then on: they run elsewhere, and if it comes back they stop.
			fault("old is lost", func(w *world) error {
				w.Lost, w.Back, w.Told, w.WasEnded = true, false, true, true
				w.Movable, w.Stays = 0, w.Movable+w.Stays
				return w.round(nil)
			})
		}
		if !w.Back {
			fault("old is well again", func(w *world) error { w.Lost, w.Back = false, true; return w.round(nil) })
		}
		if w.Old == api.InstanceDraining && w.R.State != replace.Discard {
			fault("somebody undrains", func(w *world) error { w.Old = api.InstanceActive; return w.round(nil) })
		}
	}
	return all
}

// key names a world up to the clock: of the moments that still matter, how long ago they
// were counts, and no longer than the longest wait.
func (w world) key() string {
	minutes := func(t time.Time) int { // of a wait that began then, or when this server did
		if w.Since.After(t) {
			t = w.Since
		}
		return min(int(w.Now.Sub(t)/time.Minute), 2)
	}
	var join, move, end, retry int
	r := w.R
	switch n := r.Newcomers[len(r.Newcomers)-1]; r.State {
	case replace.Join:
		join = minutes(n.LaunchedAt)
	case replace.Move, replace.Drain:
		move = minutes(r.MoveAt)
		if !r.EndAt.IsZero() {
			end = 1 + minutes(r.EndAt)
		}
	}
	if w.Now.Before(r.RetryAt) {
		retry = 1
	}
	var b strings.Builder
	// Of calls counts on which one flies, and whether a reply is that one's.
	kind := func(a *replace.Action) string {
		if a == nil {
			return ""
		}
		return string(a.Kind) + a.Instance + a.Token
	}
	echo := ""
	if w.Echo != nil && w.Faults > 0 {
		echo = fmt.Sprint(w.Echo.Call == r.Call, w.Echo.ID, w.Echo.Err)
	}
	fmt.Fprint(&b, r.State, r.Next, r.Cordoned, len(r.Newcomers), r.Newcomer(), r.Calling, r.Unsure, r.Terminated, r.Attempts, r.EndAt.IsZero(),
		join, move, end, retry, "|", kind(w.Flying), "|", kind(w.Ghost), "|", echo, "|",
		w.Alive, w.Dead, w.Late, w.Faults, w.Old, w.New, w.Healthy, w.Lost, w.Back, w.Movable, w.Stays, w.Told, w.WasEnded)
	return b.String()
}

// settle lets everything go well from here on; the replacement has to end.
func (w world) settle() error {
	for range 60 {
		if w.R.Over() {
			return nil
		}
		events := w.events()
		next := events[0] // minute
		for _, e := range events {
			if e.name == "reply" {
				next = e
			}
		}
		if err := next.do(&w); err != nil {
			return err
		}
	}
	return fmt.Errorf("it does not end: %s %s", w.R.State, w.R.Says)
}

var faults = flag.Int("faults", 2, "how many faults TestEveryWay lets happen on one way")

// TestEveryWay goes every way that a replacement can go with so many faults: what always
// holds does after each event, and from everywhere it comes to its end, with a reason.
func TestEveryWay(t *testing.T) {
	for _, operator := range []bool{false, true} {
		type node struct {
			w    world
			from int
			by   string
		}
		start := begin(operator, *faults)
		if err := start.round(nil); err != nil {
			t.Fatal(err)
		}
		nodes := []node{{w: start, from: -1}}
		seen := map[string]bool{start.key(): true}
		way := func(i int, last string) string {
			steps := []string{last}
			for ; i > 0; i = nodes[i].from {
				steps = append(steps, nodes[i].by+" -> "+string(nodes[i].w.R.State))
			}
			slices.Reverse(steps)
			return strings.Join(steps, "\n")
		}
		ends, states := map[string]int{}, map[replace.State]int{}
		for i := 0; i < len(nodes); i++ {
			states[nodes[i].w.R.State]++
			if nodes[i].w.R.Over() {
				ends[string(nodes[i].w.R.State)+" "+string(nodes[i].w.R.Next)]++
			}
			for _, e := range nodes[i].w.events() {
				w := nodes[i].w
				if err := e.do(&w); err != nil {
					t.Fatalf("%v, after:\n%s", err, way(i, e.name))
				}
				if k := w.key(); !seen[k] {
					seen[k] = true
					nodes = append(nodes, node{w, i, e.name})
				}
			}
			if i%7 == 0 {
				if again := reread(t, nodes[i].w.R); !reflect.DeepEqual(again, nodes[i].w.R) {
					t.Fatalf("stored and read it is another:\n%+v\n%+v", nodes[i].w.R, again)
				}
				if err := nodes[i].w.settle(); err != nil {
					t.Fatalf("%v, after:\n%s", err, way(i, "all goes well"))
				}
			}
		}
		t.Logf("operator %v: %d worlds, %v, ends %v", operator, len(nodes), states, ends)
		for _, s := range []replace.State{replace.Launch, replace.Join, replace.Discard, replace.Move, replace.Drain, replace.Terminate, replace.Done, replace.Failed} {
			if states[s] == 0 {
				t.Errorf("no way leads to %s", s)
			}
		}
	}
}
