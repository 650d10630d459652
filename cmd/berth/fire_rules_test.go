package main

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
)

// scene is one machine with two GPUs under fire: three tasks of a service on one GPU, and
// time that goes on in steps of 50 ms.
type scene struct {
	w    *witness
	now  time.Time
	next sample // copied into each step
	bad  []string
}

const (
	sceneLost = 11 * time.Second
	shared0   = "GPU-0"
	free1     = "GPU-1"
)

func newScene() *scene {
	s := &scene{w: newWitness(sceneLost), now: noon}
	s.next = sample{Machines: []seenMachine{{ID: "m", PID: 10, Alive: true, GPUs: []string{shared0, free1}}}, Modes: map[string]int{shared0: exclusive, free1: 0}}
	s.next.Server = &seenServer{Instances: []api.Instance{{Name: "m", Status: api.InstanceActive, GPUs: []api.GPU{{ID: shared0, TotalMemoryInMiB: 40000}, {ID: free1, TotalMemoryInMiB: 40000}}}}}
	s.daemon(shared0, 100)
	s.daemon(free1, 110)
	s.next.Procs = append(s.next.Procs, seenProc{PID: 101, Start: 5, Kind: "server", GPU: shared0, Holds: []seenHold{{shared0, "S", 30}}})
	for i, id := range []string{"a", "b", "c"} {
		s.task(id, shared0, "web-10000", "service:web", uint64(i+1))
	}
	s.step(3)
	return s
}

func (s *scene) daemon(gpu string, pid int) {
	s.next.Procs = append(s.next.Procs, seenProc{PID: pid, Start: 5, Kind: "daemon", GPU: gpu})
}

// task adds a running task with its container and process, named alike.
func (s *scene) task(id, gpu, family, group string, generation uint64) {
	mib, kind := capOf(family), "M"
	if mib == 0 {
		kind = "C"
	}
	pid := 200 + len(s.next.Procs)
	s.next.Containers = append(s.next.Containers, seenContainer{ID: "c-" + id, Instance: "m", Family: family, Generation: generation, State: "running", GPUs: gpu, CapMiB: mib, StartedAt: "t"})
	s.next.Procs = append(s.next.Procs, seenProc{PID: pid, Start: 7, Kind: "client", Container: "c-" + id, Holds: []seenHold{{gpu, kind, 100}}})
	s.next.Server.Tasks = append(s.next.Server.Tasks, api.Task{ID: id, Family: family, Group: group, Instance: "m", Generation: generation, LastStatus: api.StatusRunning,
		DesiredStatus: api.StatusRunning, GPUIDs: []string{gpu}, Containers: []api.Container{{RuntimeID: "c-" + id}}})
}

func (s *scene) at(id string) *api.Task {
	i := slices.IndexFunc(s.next.Server.Tasks, func(t api.Task) bool { return t.ID == id })
	return &s.next.Server.Tasks[i]
}

// end ends a task's container.
func (s *scene) end(id string) {
	s.next.Containers = slices.DeleteFunc(s.next.Containers, func(c seenContainer) bool { return c.ID == "c-"+id })
	s.next.Procs = slices.DeleteFunc(s.next.Procs, func(p seenProc) bool { return p.Container == "c-"+id })
}

func (s *scene) stopped(id, code string) {
	t := s.at(id)
	t.LastStatus, t.DesiredStatus, t.StopCode, t.StoppedReason = api.StatusStopped, api.StatusStopped, code, "so it was"
}

func (s *scene) process(pid int) *seenProc {
	i := slices.IndexFunc(s.next.Procs, func(p seenProc) bool { return p.PID == pid })
	return &s.next.Procs[i]
}

func (s *scene) without(pid int) {
	s.next.Procs = slices.DeleteFunc(s.next.Procs, func(p seenProc) bool { return p.PID == pid })
}

func (s *scene) note(what, who string) { s.w.note(note{s.now, what, who}) }

func (s *scene) step(n int) {
	for range n {
		s.now = s.now.Add(50 * time.Millisecond)
		x := s.next
		x.Seq, x.At, x.Done = x.Seq+1, s.now, s.now
		x.Containers, x.Procs = slices.Clone(x.Containers), slices.Clone(x.Procs)
		if x.Server != nil {
			a := *x.Server
			a.From, a.To = s.now.Add(-20*time.Millisecond), s.now.Add(-10*time.Millisecond)
			a.Tasks = slices.Clone(a.Tasks)
			x.Server = &a
		}
		s.bad = append(s.bad, s.w.see(x)...)
	}
}

// pass lets time go on with a step a second.
func (s *scene) pass(d time.Duration) {
	for end := s.now.Add(d); s.now.Before(end); {
		s.now = s.now.Add(time.Second)
		s.step(1)
	}
}

// The observer's judge finds what it is there to find, and nothing else.
func TestWitness(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(s *scene)
		want string // beginning of the first violation; "": none
	}{
		{"nothing happens", func(s *scene) { s.pass(time.Minute) }, ""},
		{"1: containers over what a GPU gives", func(s *scene) {
			for _, id := range []string{"d", "e"} {
				s.task(id, shared0, "web-10000", "service:web", 9)
				s.next.Server.Tasks = s.next.Server.Tasks[:3]
			}
			s.step(1)
		}, "1: containers on GPU GPU-0 have 50000 MiB, it gives 40000"},
		{"1: a container whose process has ended counts no longer", func(s *scene) {
			s.note(noteChanged, "web")
			s.task("d", shared0, "web-10000", "service:web", 9)
			s.task("e", shared0, "web-10000", "service:web", 10)
			s.stopped("a", api.StopServiceScheduler)
			s.next.Procs = slices.DeleteFunc(s.next.Procs, func(p seenProc) bool { return p.Container == "c-a" })
			s.w.answered = s.now.Add(time.Hour) // Docker is late
			s.next.Server.Tasks = slices.DeleteFunc(s.next.Server.Tasks, func(t api.Task) bool { return t.ID == "d" || t.ID == "e" })
			s.next.Server = nil
			s.step(1)
		}, ""},
		{"1: the server places over", func(s *scene) {
			for _, id := range []string{"d", "e"} {
				s.next.Server.Tasks = append(s.next.Server.Tasks, api.Task{ID: id, Family: "web-10000", Instance: "m", Generation: 9, LastStatus: api.StatusPending, GPUIDs: []string{shared0}})
			}
			s.step(1)
		}, "1: the server has 50000 MiB of tasks on GPU GPU-0"},
		{"2: shared and whole at once", func(s *scene) {
			s.task("w", shared0, "whole", "family:whole", 9)
			s.next.Server.Tasks = s.next.Server.Tasks[:3]
			s.step(1)
		}, "2: GPU GPU-0 is shared"},
		{"2: whole twice", func(s *scene) {
			s.task("w", free1, "whole", "family:whole", 9)
			s.task("x", free1, "whole", "family:whole", 10)
			s.next.Server.Tasks = s.next.Server.Tasks[:3]
			s.step(1)
		}, "2: containers c-"},
		{"2: the server has one GPU shared and whole", func(s *scene) {
			s.next.Server.Tasks = append(s.next.Server.Tasks, api.Task{ID: "w", Family: "whole", Instance: "m", Generation: 9, LastStatus: api.StatusPending, GPUIDs: []string{shared0}})
			s.step(1)
		}, "2: the server has GPU GPU-0 as NVIDIA_MPS and as DEDICATED"},
		{"2: a GPU whole is none of the others' business", func(s *scene) {
			s.task("w", free1, "whole", "family:whole", 9)
			s.pass(time.Minute)
		}, ""},
		{"3: a process past MPS, where the mode would let it", func(s *scene) {
			s.process(203).Holds[0].Kind = "C"
			s.next.Modes[shared0] = 0
			s.step(1)
		}, "3: process 203 of container c-a (web-10000) uses GPU GPU-0 past MPS, in compute mode 0"},
		{"3: a process past MPS that nobody finds", func(s *scene) {
			s.process(203).Holds[0].Kind = "C"
			s.pass(foundWithin + 3*time.Second)
		}, "3: process 203 of container c-a (web-10000) uses GPU GPU-0 past MPS for"},
		{"3: a cap that is another one", func(s *scene) { s.next.Containers[0].CapMiB = 20000; s.step(1) }, "3: container c-a of family web-10000 has a cap of 20000 MiB"},
		{"3: two daemons of one GPU", func(s *scene) { s.daemon(shared0, 102); s.step(1) }, "3: two daemons of GPU GPU-0"},
		{"3: a start without daemon and server", func(s *scene) {
			s.pass(startWindow + 5*time.Second)
			s.task("n", free1, "web-10000", "service:web", 9)
			s.next.Modes[free1] = exclusive
			s.step(1)
		}, "3: container c-n (web-10000) started on GPU GPU-1, which has had no daemon and server"},
		{"3: the mode is taken away under a container", func(s *scene) { s.next.Modes[shared0] = 0; s.step(1) }, "3: container c-a (web-10000) runs on GPU GPU-0 in compute mode 0"},
		{"4: an accepted task is not there", func(s *scene) { s.note(noteAccepted, "lost"); s.step(1) }, "4: task lost was accepted"},
		{"4: a task is forgotten", func(s *scene) { s.next.Server.Tasks = s.next.Server.Tasks[1:]; s.step(1) }, "4: the server has forgotten task a"},
		{"4: no answer is no loss", func(s *scene) { s.note(noteAccepted, "later"); s.next.Server = nil; s.pass(time.Minute) }, ""},
		{"4: what stopped an hour ago may go", func(s *scene) {
			long := s.now.Add(-2 * time.Hour)
			s.next.Server.Tasks = append(s.next.Server.Tasks, api.Task{ID: "old", Family: "web-10000", Instance: "m", Generation: 1, LastStatus: api.StatusStopped,
				StopCode: api.StopUserInitiated, StoppedReason: "asked for", StoppedAt: &long})
			s.note(noteAccepted, "old")
			s.step(2)
			s.next.Server.Tasks = s.next.Server.Tasks[:3]
			s.step(1)
		}, ""},
		{"4: a term goes back", func(s *scene) { s.next.Server.Term = 7; s.step(1); s.next.Server.Term = 6; s.step(1) }, "4: the server's term was 7 and is 6"},
		{"4: a generation changes", func(s *scene) { s.at("a").Generation = 7; s.step(1) }, "4: task a had generation 1 and has 7"},
		{"4: a stopped task wakes", func(s *scene) {
			s.stopped("a", api.StopUserInitiated)
			s.end("a")
			s.note(noteChanged, "a")
			s.step(1)
			s.at("a").LastStatus = api.StatusRunning
			s.step(1)
		}, "4: task a was STOPPED and is RUNNING"},
		{"4: a task moves", func(s *scene) { s.at("a").Instance = "n"; s.step(1) }, "4: task a was on m and is on"},
		{"4: an end without a reason", func(s *scene) { s.stopped("a", ""); s.end("a"); s.step(1) }, "4: task a is STOPPED without a reason"},
		{"4: a wait without a reason", func(s *scene) {
			s.next.Server.Tasks = append(s.next.Server.Tasks, api.Task{ID: "p", Family: "web-10000", LastStatus: api.StatusPending})
			s.step(1)
		}, "4: task p waits without a reason"},
		{"4: a container of a stopped task runs on", func(s *scene) { s.stopped("a", api.StopUserInitiated); s.step(2) }, "4: container c-a runs, and its task a is STOPPED"},
		{"4: a container of an older start", func(s *scene) { s.next.Containers[0].Generation = 8; s.step(1) }, "4: container c-a has generation 8 of task a, which has 1"},
		{"4: two copies for long", func(s *scene) {
			s.task("b2", free1, "web-10000", "service:web", 9)
			s.next.Procs = append(s.next.Procs, seenProc{PID: 111, Start: 5, Kind: "server", GPU: free1})
			s.next.Modes[free1] = exclusive
			s.at("b2").Replaces = "b"
			s.pass(settleTime + 3*time.Second)
		}, "4: for 45"},
		{"4: three in one place", func(s *scene) {
			for id, old := range map[string]string{"b2": "b", "b3": "b2"} {
				s.next.Server.Tasks = append(s.next.Server.Tasks, api.Task{ID: id, Family: "web-100", Instance: "m", Generation: 9, LastStatus: api.StatusRunning, Replaces: old})
			}
			s.step(1)
		}, "4: three tasks run in one place: b, b2, b3"},
		{"4: a service has too many", func(s *scene) {
			s.next.Server.Services = []api.Service{{Name: "web", DesiredCount: 2, MaximumPercent: 100}}
			s.step(1)
		}, "4: 3 tasks of service web run, of 2 at 100 %"},
		{"4: two copies for a moment", func(s *scene) {
			s.task("b2", free1, "web-10000", "service:web", 9)
			s.next.Procs = append(s.next.Procs, seenProc{PID: 111, Start: 5, Kind: "server", GPU: free1})
			s.next.Modes[free1] = exclusive
			s.at("b2").Replaces = "b"
			s.note(noteChanged, "b")
			s.pass(5 * time.Second)
			s.stopped("b", api.StopServiceScheduler)
			s.end("b")
			s.pass(2 * settleTime)
		}, ""},
		{"5: a container ends for nothing", func(s *scene) {
			s.stopped("a", api.StopServiceScheduler)
			s.end("a")
			s.pass(settleTime + 3*time.Second)
		}, "5: container c-a of task a (service:web, GPU GPU-0 on m) ended"},
		{"5: a container ends with its GPU's daemon", func(s *scene) {
			s.note(noteFault, shared0)
			s.stopped("a", api.StopInfrastructure)
			s.end("a")
			s.pass(settleTime + 3*time.Second)
		}, ""},
		{"5: a fault on another GPU excuses nothing", func(s *scene) {
			s.note(noteFault, free1)
			s.stopped("a", api.StopInfrastructure)
			s.end("a")
			s.pass(settleTime + 3*time.Second)
		}, "5: container c-a"},
		{"5: a short absence of the agent excuses nothing", func(s *scene) {
			s.note(noteDown, "m")
			s.pass(sceneLost / 2)
			s.note(noteUp, "m")
			s.stopped("a", api.StopInfrastructure)
			s.end("a")
			s.pass(settleTime + 3*time.Second)
		}, "5: container c-a"},
		{"5: a long absence of the server excuses nothing", func(s *scene) {
			s.note(noteDown, theServer)
			s.pass(3 * sceneLost)
			s.note(noteUp, theServer)
			s.stopped("a", api.StopInfrastructure)
			s.end("a")
			s.pass(settleTime + 3*time.Second)
		}, "5: container c-a"},
		{"5: a long absence of the agent", func(s *scene) {
			s.note(noteDown, "m")
			s.pass(sceneLost + time.Second)
			s.note(noteUp, "m")
			s.stopped("a", api.StopInfrastructure)
			s.end("a")
			s.pass(settleTime + 3*time.Second)
		}, ""},
		{"5: a container starts again", func(s *scene) { s.next.Containers[0].StartedAt = "u"; s.step(1) }, "5: container c-a of task a was started at t and again at u"},
		{"5: a container was restarted", func(s *scene) { s.next.Containers[0].Restarts = 1; s.step(1) }, "5: container c-a of task a was restarted 1 times"},
		{"5: a container's process is another one", func(s *scene) { s.process(203).Start = 99; s.step(1) }, "5: container c-a of task a ran as pid 203 and runs as 203"},
		{"5: a daemon goes for nothing", func(s *scene) { s.without(110); s.step(1) }, "5: the daemon of GPU GPU-1 was pid 110 and is 0"},
		{"5: a daemon is another one", func(s *scene) { s.process(110).Start = 99; s.step(1) }, "5: the daemon of GPU GPU-1 was pid 110 and is 110"},
		{"5: a daemon was killed", func(s *scene) { s.note(noteFault, free1); s.without(110); s.step(1) }, ""},
		{"5: an agent ends by itself", func(s *scene) {
			s.next.Machines = []seenMachine{{ID: "m", PID: 10, GPUs: []string{shared0, free1}}}
			s.step(1)
		}, "5: the agent of m (pid 10) has ended"},
		{"5: an agent was killed", func(s *scene) {
			s.note(noteDown, "m")
			s.next.Machines = []seenMachine{{ID: "m", PID: 10, GPUs: []string{shared0, free1}}}
			s.step(1)
		}, ""},
		{"5: a machine is drained for nothing", func(s *scene) { s.next.Server.Instances[0].Status = api.InstanceDraining; s.step(1) }, "5: m is drained, and nothing was done to it"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newScene()
			if len(s.bad) > 0 {
				t.Fatalf("before anything happens: %q", s.bad)
			}
			c.do(s)
			switch {
			case c.want == "" && len(s.bad) > 0:
				t.Errorf("found %q", s.bad)
			case c.want != "" && !slices.ContainsFunc(s.bad, func(b string) bool { return strings.HasPrefix(b, c.want) }):
				t.Errorf("found %q, want %q", s.bad, c.want)
			}
		})
	}
}
