package mps_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/mps"
)

// world is a supervisor and what is true around it.
type world struct {
	s         mps.State
	now       time.Time
	exclusive bool // the GPU's compute mode
	meddled   bool // somebody else set it, and the supervisor has not looked since
	nextPID   int
	replayed  bool // each decision is run again from its JSON
}

var epoch = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

func newWorld(rec mps.Record, unsupported string) world {
	return world{
		s: mps.NewState(rec, unsupported, "boot", mps.Budget{Failures: 2, Window: 10 * time.Minute},
			5*time.Second, 1, epoch),
		now: epoch, nextPID: 1000,
	}
}

func (w *world) process() mps.Process {
	w.nextPID++
	return mps.Process{PID: w.nextPID, Start: uint64(w.nextPID)}
}

// step gives the supervisor an event, stores what it wants stored, and returns the
// jobs and cancels. A rule that is broken is the error.
func (w *world) step(e mps.Event, canSave bool) ([]mps.Action, error) {
	var rest []mps.Action
	pending := []mps.Event{e}
	for len(pending) > 0 {
		before := w.s
		next, actions := mps.Step(before, pending[0], w.now)
		if w.replayed {
			if err := mps.Replays(before, pending[0], w.now, next, actions); err != nil {
				return nil, err
			}
		}
		w.s, pending = next, pending[1:]
		for i, a := range actions {
			if save, ok := a.(mps.Save); ok {
				if canSave {
					pending = append(pending, mps.Saved(save))
					continue
				}
				failed := mps.SaveFailed{Reason: "no space"}
				if i+1 < len(actions) {
					failed.Job = actions[i+1].(mps.Do).Job
				}
				pending = append(pending, failed)
				break
			}
			if err := w.allowed(a); err != nil {
				return nil, err
			}
			rest = append(rest, a)
		}
	}
	return rest, w.rules()
}

// allowed says whether the supervisor may ask for this now. What was to be stored
// before it has been.
func (w *world) allowed(a mps.Action) error {
	do, ok := a.(mps.Do)
	if !ok {
		return nil
	}
	s := w.s
	stored := append([]mps.Process{s.Saving.Daemon, s.Saving.Server}, s.Saving.Orphans...)
	switch do.Job {
	case mps.JobStartDaemon, mps.JobStartServer:
		if s.Quarantine != "" || s.Unsupport != "" {
			return fmt.Errorf("%s on a GPU that is left alone", do.Job)
		}
		if s.Clients != 0 {
			return fmt.Errorf("%s with clients %d", do.Job, s.Clients)
		}
		if s.Fault != nil {
			return fmt.Errorf("%s before a fault was cleaned up", do.Job)
		}
		if do.Job == mps.JobStartDaemon && (s.Saving.ID != do.ID || do.ID == "" || len(s.Orphans) > 0) {
			return fmt.Errorf("daemon %q started; stored is %q; orphans %v", do.ID, s.Saving.ID, s.Orphans)
		}
	case mps.JobKill:
		for _, p := range do.Kill {
			if !slices.Contains(stored, p) || do.ID != s.Saving.ID {
				return fmt.Errorf("kill of %v, which is not stored", p)
			}
		}
		fallthrough
	case mps.JobStopServers, mps.JobQuitDaemon, mps.JobSetDefault:
		if s.Clients != 0 {
			return fmt.Errorf("%s with clients %d", do.Job, s.Clients)
		}
	case mps.JobSetExclusive:
		if !s.Saving.Exclusive {
			return fmt.Errorf("EXCLUSIVE_PROCESS before the intent was stored")
		}
		if s.Server.PID == 0 {
			return fmt.Errorf("EXCLUSIVE_PROCESS without a server")
		}
	}
	return nil
}

// rules must hold in every state.
func (w *world) rules() error {
	s := w.s
	switch s.Phase {
	case mps.PhaseHeld:
		if s.Daemon.PID == 0 || s.Server.PID == 0 || !s.Saved.Exclusive || !s.Exclusive || s.Fault != nil || s.Quarantine != "" {
			return fmt.Errorf("HELD without daemon, server, mode or stored intent")
		}
	case mps.PhaseAbsent, mps.PhaseUnsupported, mps.PhaseQuarantined:
		if s.Daemon.PID != 0 || s.Server.PID != 0 || len(s.Orphans) > 0 {
			return fmt.Errorf("%s with something running", s.Phase)
		}
		fallthrough
	case mps.PhaseIdle, mps.PhaseDedicated:
		if s.Server.PID != 0 {
			return fmt.Errorf("%s with a server", s.Phase)
		}
		if w.exclusive && !w.meddled {
			return fmt.Errorf("%s with mode EXCLUSIVE_PROCESS", s.Phase)
		}
	}
	return nil
}

// choice is one thing that can happen next.
type choice struct {
	name    string
	canSave bool
	happen  func(w *world) mps.Event
}

// choices are all things that can happen in a world.
func choices(w world) []choice {
	var list []choice
	add := func(name string, happen func(*world) mps.Event) {
		list = append(list, choice{name, true, happen})
	}
	plain := func(name string, e mps.Event) { add(name, func(*world) mps.Event { return e }) }
	s := w.s
	for _, u := range []mps.Use{mps.UseNone, mps.UseIdle, mps.UseMPS, mps.UseDedicated} {
		if s.Use != u {
			plain("want "+string(u), mps.Want{Use: u})
		}
	}
	for _, n := range []int{-1, 0, 1} {
		if s.Clients != n {
			plain(fmt.Sprint("clients ", n), mps.ClientsAre{N: n})
		}
	}
	for _, d := range []time.Duration{time.Second, 76 * time.Second} {
		add(fmt.Sprint("tick ", d), func(w *world) mps.Event { w.now = w.now.Add(d); return mps.Tick{} })
	}
	list = append(list, choice{"tick, and nothing can be stored", false, func(w *world) mps.Event { w.now = w.now.Add(2 * time.Second); return mps.Tick{} }})
	if s.Quarantine != "" {
		plain("forgive", mps.Forgive{})
	}
	if s.Daemon.PID != 0 {
		plain("daemon exits", mps.Exited{Process: s.Daemon})
		plain("daemon stops", mps.Stopped{Process: s.Daemon})
	}
	if s.Server.PID != 0 {
		plain("server exits", mps.Exited{Process: s.Server})
		plain("server stops", mps.Stopped{Process: s.Server})
		plain("fault in the log", mps.Faulted{Line: "FAULT"})
	}
	if len(s.Orphans) > 0 {
		plain("orphan exits", mps.Exited{Process: s.Orphans[0]})
	}
	if s.Job == mps.JobNone {
		plain("doubt", mps.Doubt{})
	}
	add("somebody turns the mode", func(w *world) mps.Event { w.exclusive, w.meddled = !w.exclusive, true; return mps.Tick{} })
	return append(list, ends(w)...)
}

// ends are all ways in which the job in flight can end.
func ends(w world) []choice {
	var list []choice
	s := w.s
	add := func(name string, happen func(*world) mps.Event) {
		list = append(list,
			choice{string(s.Job) + ": " + name, true, happen},
			choice{string(s.Job) + ": " + name + ", and nothing can be stored", false, happen})
	}
	plain := func(name string, e mps.Event) { add(name, func(*world) mps.Event { return e }) }
	if s.Job == mps.JobNone {
		return nil
	}
	plain("fails", mps.Failed{Job: s.Job, Reason: "it failed", Cancelled: s.Cancelled})
	mode := func(to bool) func(*world) mps.Event {
		return func(w *world) mps.Event {
			w.exclusive, w.meddled = to, false
			return mps.ModeSet{Exclusive: to}
		}
	}
	found := func(name string, f mps.Found) {
		add(name, func(w *world) mps.Event {
			w.meddled = false
			f.Exclusive = w.exclusive
			return f
		})
	}
	other := mps.Process{PID: 7, Start: 7}
	third := mps.Process{PID: 8, Start: 8}
	switch s.Job {
	case mps.JobLook:
		found("nothing", mps.Found{})
		found("as recorded", mps.Found{Daemon: s.Daemon, Server: s.Server, Orphans: s.Orphans})
		found("daemon and server", mps.Found{Daemon: other, Server: third})
		found("a daemon alone", mps.Found{Daemon: other})
		found("a daemon, its server starting", mps.Found{Daemon: other, Starting: true})
		found("a daemon, its server in FAULT", mps.Found{Daemon: other, ServerProblem: "FAULT"})
		found("a daemon that is frozen", mps.Found{Daemon: other, Problem: "frozen", Orphans: []mps.Process{third}})
		found("an orphan", mps.Found{Orphans: []mps.Process{third}})
		found("a daemon and an orphan", mps.Found{Daemon: other, Orphans: []mps.Process{third}})
		found("a stranger", mps.Found{Stranger: "pid 9 has the folder"})
	case mps.JobStartDaemon:
		add("works", func(w *world) mps.Event { return mps.DaemonUp{Daemon: w.process()} })
	case mps.JobStartServer:
		add("works", func(w *world) mps.Event { return mps.ServerUp{Server: w.process()} })
		plain("can never work", mps.Failed{Job: s.Job, Reason: "no device", Permanent: true})
	case mps.JobSetExclusive:
		add("works", mode(true))
		add("fails halfway", func(w *world) mps.Event {
			w.exclusive = true
			return mps.Failed{Job: s.Job, Reason: "read back failed"}
		})
	case mps.JobSetDefault:
		add("works", mode(false))
	case mps.JobStopServers:
		plain("works", mps.ServersDown{})
	case mps.JobQuitDaemon:
		plain("works", mps.DaemonDown{})
	case mps.JobKill:
		plain("works", mps.Killed{})
	case mps.JobReapply:
		plain("works", mps.Reapplied{})
	case mps.JobInspect:
		well := mps.Inspected{}
		if s.Server.PID != 0 {
			well.Servers, well.ServerStatus = []int{s.Server.PID}, "ACTIVE"
		}
		inspected := func(name string, change func(*mps.Inspected)) {
			i := well
			change(&i)
			add(name, func(w *world) mps.Event { w.meddled = false; i.Exclusive = w.exclusive; return i })
		}
		inspected("well", func(*mps.Inspected) {})
		inspected("split", func(i *mps.Inspected) { i.Split = "files were replaced" })
		inspected("gone", func(i *mps.Inspected) { i.Gone = true })
		inspected("unanswered", func(i *mps.Inspected) { i.Unanswered = "timed out" })
		inspected("another server", func(i *mps.Inspected) { i.Servers = []int{9} })
		inspected("FAULT", func(i *mps.Inspected) { i.ServerStatus = "FAULT" })
		inspected("tampered", func(i *mps.Inspected) { i.Tampered = "a limit" })
	}
	return list
}

// key tells worlds apart by what matters: roles for pids, and for times whether
// they are still to come.
type key struct {
	phase                                               mps.Phase
	use                                                 mps.Use
	job                                                 mps.Job
	cause                                               mps.Cause
	clients, orphans, failures, attempts, tries, probes int
	flags                                               [22]bool
}

func (w world) key() key {
	s := w.s
	later := func(t time.Time) bool { return t.After(w.now) }
	k := key{
		phase: s.Phase, use: s.Use, job: s.Job, clients: s.Clients, orphans: len(s.Orphans),
		failures: len(s.Failures), attempts: min(s.Attempts, 2), tries: min(s.Tries, 1), probes: s.Probes,
		flags: [22]bool{
			s.Looked, s.Daemon.PID != 0, s.Server.PID != 0, s.Strays, s.Exclusive, s.Intent, s.Quarantine != "",
			s.Stranger != "", s.Unsupport != "", later(s.Until), later(s.RetryAt), later(s.SaveAt), later(s.InspectAt),
			s.Suspect != "", s.Tampered, s.Cancelled, s.Saved.Exclusive, s.Saving.Exclusive,
			reflect.DeepEqual(s.Saving, s.Record()), w.exclusive, w.meddled, s.Fault != nil && s.Fault.Daemon,
		},
	}
	if s.Fault != nil {
		k.cause = s.Fault.Cause
	}
	return k
}

// reachesHeld lets everything go well from here on, and says whether the GPU gets
// held, or is left alone for a reason that stays.
func (w world) reachesHeld() bool {
	w.replayed = false
	ask := []mps.Event{mps.Want{Use: mps.UseMPS}, mps.ClientsAre{N: 0}}
	for range 60 {
		if w.s.Phase == mps.PhaseHeld && w.s.Job == mps.JobNone {
			return true
		}
		if w.s.Phase == mps.PhaseQuarantined && w.s.Quarantine != "" || w.s.Phase == mps.PhaseUnsupported && w.s.Unsupport != "" {
			return true
		}
		var e mps.Event
		if len(ask) > 0 {
			e, ask = ask[0], ask[1:]
		} else if e = goesWell(&w); e == nil {
			w.now = w.now.Add(76 * time.Second)
			e = mps.Tick{}
		}
		if _, err := w.step(e, true); err != nil {
			return false
		}
	}
	return false
}

// goesWell ends the job in flight as it should.
func goesWell(w *world) mps.Event {
	s := w.s
	if s.Job == mps.JobLook {
		w.meddled = false
		return mps.Found{Daemon: s.Daemon, Server: s.Server, Orphans: s.Orphans, Exclusive: w.exclusive}
	}
	for _, c := range ends(*w) {
		if strings.HasSuffix(c.name, ": works") || strings.HasSuffix(c.name, ": well") {
			return c.happen(w)
		}
	}
	return nil
}

// TestSupervisorExplored tries every sequence of events to a depth, breadth first,
// from a GPU never seen, from one that is held, and from what a crash of the agent
// may leave. BERTH_EXPLORE=2 goes two events deeper.
func TestSupervisorExplored(t *testing.T) {
	daemon, server := mps.Process{PID: 1, Start: 1}, mps.Process{PID: 2, Start: 2}
	for _, start := range []struct {
		name      string
		world     world
		exclusive bool
		depth     int
	}{
		{"a GPU never seen", newWorld(mps.Record{}, ""), false, 6},
		{"held when the agent died", newWorld(mps.Record{BootID: "boot", ID: "x", Daemon: daemon, Server: server, Use: mps.UseMPS, Exclusive: true, Daemons: 1}, ""), true, 5},
		{"quarantined when the agent died", newWorld(mps.Record{BootID: "boot", ID: "x", Use: mps.UseMPS, Quarantine: "2 failures"}, ""), false, 5},
		{"held before the host's reboot", newWorld(mps.Record{BootID: "another", ID: "x", Daemon: daemon, Server: server, Use: mps.UseMPS, Exclusive: true}, ""), false, 5},
		{"unsupported, held before", newWorld(mps.Record{BootID: "boot", ID: "x", Daemon: daemon, Exclusive: true}, "too old"), true, 5},
		{"held, with clients", heldWorld(t), true, 5},
	} {
		t.Run(start.name, func(t *testing.T) {
			t.Parallel()
			more, _ := strconv.Atoi(os.Getenv("BERTH_EXPLORE"))
			type node struct {
				w    world
				path []string
			}
			start.world.exclusive = start.exclusive
			frontier := []node{{w: start.world}}
			seen := map[key]bool{start.world.key(): true}
			steps, phases := 0, map[mps.Phase]int{}
			for depth := range start.depth + more {
				var next []node
				for _, n := range frontier {
					for _, c := range choices(n.w) {
						w := n.w
						w.replayed = depth < 2+more // all would take minutes
						e := c.happen(&w)
						_, err := w.step(e, c.canSave)
						steps++
						path := func() string { return strings.Join(append(slices.Clone(n.path), c.name), "\n  ") }
						if err != nil {
							t.Fatalf("%v\nafter:\n  %s\nstate: %+v", err, path(), w.s)
						}
						if k := w.key(); !seen[k] {
							seen[k] = true
							phases[w.s.Phase]++
							if !w.reachesHeld() {
								t.Fatalf("never held again, though all goes well\nafter:\n  %s\nstate: %+v", path(), w.s)
							}
							next = append(next, node{w, append(slices.Clone(n.path), c.name)})
						}
					}
				}
				frontier = next
				t.Logf("depth %d: %d states, %d steps", depth+1, len(seen), steps)
			}
			t.Logf("states by phase: %v", phases)
		})
	}
}

// heldWorld is a GPU that became held without trouble, and has clients.
func heldWorld(t *testing.T) world {
	w := newWorld(mps.Record{}, "")
	for _, e := range []mps.Event{mps.Want{Use: mps.UseMPS}, mps.ClientsAre{N: 0}, nil, nil, nil, nil, mps.ClientsAre{N: 1}} {
		if e == nil {
			e = goesWell(&w)
		}
		if _, err := w.step(e, true); err != nil {
			t.Fatal(err)
		}
	}
	if w.s.Phase != mps.PhaseHeld {
		t.Fatalf("not held: %+v", w.s)
	}
	return w
}

// TestSupervisorWalks goes deeper than the exploration can, at random.
func TestSupervisorWalks(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv("BERTH_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("BERTH_SEED=%d walks the same way again", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	held := 0
	for walk := range 1000 {
		w := newWorld(mps.Record{}, "")
		w.replayed = walk%50 == 0
		var path []string
		for range 80 {
			// Mostly the job ends; else walks would be all about what comes in between.
			list := choices(w)
			if e := ends(w); len(e) > 0 && random.IntN(4) > 0 {
				list = e
			}
			c := list[random.IntN(len(list))]
			if random.IntN(4) == 0 {
				if e := goesWell(&w); e != nil {
					c = choice{"goes well", true, func(*world) mps.Event { return e }}
				}
			}
			path = append(path, c.name)
			if _, err := w.step(c.happen(&w), c.canSave); err != nil {
				t.Fatalf("BERTH_SEED=%d: %v\nafter:\n  %s\nstate: %+v", seed, err, strings.Join(path, "\n  "), w.s)
			}
			if w.s.Phase == mps.PhaseHeld {
				held++
			}
		}
		if !w.reachesHeld() {
			t.Fatalf("BERTH_SEED=%d: never held again, though all goes well\nafter:\n  %s\nstate: %+v", seed, strings.Join(path, "\n  "), w.s)
		}
	}
	t.Logf("80000 steps, %d of them in HELD", held)
}
