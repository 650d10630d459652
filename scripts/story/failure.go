package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/scripts/rig"
)

// victim is the GPU whose daemon is killed.
type victim struct {
	machine, gpu string
	sat          int // tasks on it when it was given up
}

// on are the service's running tasks on a GPU; off are those on others.
func on(f rig.Fleet, gpu string) (on, off []rig.Task) {
	for _, t := range f.Running(service) {
		if len(t.GPUIDs) == 1 && t.GPUIDs[0] == gpu {
			on = append(on, t)
		} else {
			off = append(off, t)
		}
	}
	return on, off
}

// tasksOf are the service's running tasks on a machine.
func tasksOf(f rig.Fleet, machine string) (n int) {
	for _, t := range f.Running(service) {
		if t.Instance == machine {
			n++
		}
	}
	return n
}

// fullest is the machine, not one of these, with the most tasks of the service.
func fullest(f rig.Fleet, not string) (name string) {
	for _, in := range f.Instances {
		if in.Name != not && (name == "" || tasksOf(f, in.Name) > tasksOf(f, name)) {
			name = in.Name
		}
	}
	return name
}

func (s *story) killDaemon(ctx context.Context) error {
	return rig.Command(ctx, "build/berth", "fault", "kill-daemon", "--machine", s.Machine(s.victim.machine), "--gpu", s.victim.gpu)
}

// kill kills the daemon of the victim under its tasks, and waits for the server's verdict
// that they have to move.
func (s *story) kill(ctx context.Context) (verdict api.Event, err error) {
	events, err := s.Events(ctx, 0)
	if err != nil {
		return verdict, err
	}
	var last uint64
	if len(events) > 0 {
		last = events[len(events)-1].Seq
	}
	if err := s.killDaemon(ctx); err != nil {
		return verdict, err
	}
	_, err = s.Until(ctx, 20*time.Second, "a verdict on the GPU", func(rig.Fleet) bool {
		events, err := s.Events(ctx, last)
		for _, e := range events {
			if err == nil && e.Kind == "gpu" && e.Subject == s.victim.gpu {
				verdict = e
				return true
			}
		}
		return false
	})
	return verdict, err
}

// move kills the daemon under the victim's tasks, and waits until all that are desired
// run elsewhere.
func (s *story) move(ctx context.Context) (sat int, took time.Duration, err error) {
	before, err := s.Look(ctx)
	if err != nil {
		return 0, 0, err
	}
	there, _ := on(before, s.victim.gpu)
	verdict, err := s.kill(ctx)
	if err != nil {
		return 0, 0, err
	}
	fmt.Printf("      %s\n", verdict.Says)
	after, err := s.Until(ctx, 2*time.Minute, "the service runs elsewhere", func(f rig.Fleet) bool {
		_, off := on(f, s.victim.gpu)
		took = time.Since(verdict.At)
		return len(off) >= desired
	})
	if err != nil {
		return 0, 0, err
	}
	_, off := on(after, s.victim.gpu)
	up := 0
	for _, t := range off {
		if ok, err := rig.Runs(ctx, t.Containers[0].RuntimeID); err == nil && ok {
			up++
		}
	}
	s.check(len(there) > 0 && up >= desired, "%d tasks were on it; %d containers run on other GPUs", len(there), up)
	said := "within the goal of " + moveGoal.String()
	if took > moveGoal {
		said = "past the goal of " + moveGoal.String()
	}
	s.check(took <= moveLimit, "verdict to all %d running: %s, %s (the demo fails past %s)", desired, took.Round(10*time.Millisecond), said, moveLimit)
	return len(there), took, nil
}

func (s *story) daemonLost(ctx context.Context) error {
	f, err := s.Look(ctx)
	if err != nil {
		return err
	}
	s.victim.machine = fullest(f, "")
	for _, g := range f.Instance(s.victim.machine).GPUs {
		if s.victim.gpu == "" || len(g.Slices) > len(f.GPU(s.victim.gpu).Slices) {
			s.victim.gpu = g.ID
		}
	}
	fmt.Printf("      GPU %d of %s\n", f.GPU(s.victim.gpu).Index, s.victim.machine)
	if _, _, err := s.move(ctx); err != nil {
		return err
	}
	return s.back(ctx, f.GPU(s.victim.gpu).MPS.DaemonPID)
}

// back waits until the victim is open again, with another daemon and no task.
func (s *story) back(ctx context.Context, not int) error {
	f, err := s.Until(ctx, time.Minute, "the GPU is open again", func(f rig.Fleet) bool {
		g := f.GPU(s.victim.gpu)
		return g.Standing == api.GPUOpen && g.MPS.DaemonPID != 0 && g.MPS.DaemonPID != not && len(g.Slices) == 0
	})
	if err != nil {
		return err
	}
	m := f.GPU(s.victim.gpu).MPS
	s.check(m.Failures > 0 && m.Failures < m.Budget, "the GPU is open again with another daemon (pid %d): %d failures, of which it has %d", m.DaemonPID, m.Failures, m.Budget)
	return nil
}

func (s *story) budgetSpent(ctx context.Context) error {
	for {
		f, err := s.Look(ctx)
		if err != nil {
			return err
		}
		m := f.GPU(s.victim.gpu).MPS
		if m.Failures >= m.Budget-1 {
			return nil
		}
		if err := s.killDaemon(ctx); err != nil {
			return err
		}
		if err := s.back(ctx, m.DaemonPID); err != nil {
			return err
		}
	}
}

func (s *story) drained(ctx context.Context) error {
	before, err := s.Look(ctx)
	if err != nil {
		return err
	}
	other := fullest(before, s.victim.machine)
	if err := s.Berth(ctx, "drain", other, "--dry-run"); err != nil {
		return err
	}
	after, err := s.Look(ctx)
	if err != nil {
		return err
	}
	s.check(same(before, after) && after.Instance(other).Status == api.InstanceActive, "nothing was done")
	if err := s.Berth(ctx, "drain", other, "--wait"); err != nil {
		return err
	}
	if after, err = s.Look(ctx); err != nil {
		return err
	}
	there, _ := on(after, s.victim.gpu)
	if !s.check(len(after.Running(service)) == desired && tasksOf(after, other) == 0, "%d of %d tasks run, none on %s", len(after.Running(service)), desired, other) || len(there) == 0 {
		return errors.New("no task came to be on the GPU again")
	}
	return s.Berth(ctx, "drain", other, "--undo")
}

func (s *story) givenUp(ctx context.Context) (err error) {
	if s.victim.sat, s.moved, err = s.move(ctx); err != nil {
		return err
	}
	var r api.Replacement
	_, err = s.Until(ctx, 3*time.Minute, "the machine is replaced", func(rig.Fleet) bool {
		var all []api.Replacement
		if s.Get(ctx, api.PathReplacements, &all) != nil || len(all) == 0 {
			return false
		}
		r = all[0]
		return r.State == "DONE" || r.State == "FAILED"
	})
	if err != nil {
		_ = s.Berth(ctx, "replacements")
		return err
	}
	if err := s.Berth(ctx, "replacements"); err != nil {
		return err
	}
	given, err := s.given(ctx)
	if err != nil {
		return err
	}
	s.check(given != "", "the server's word: %s", given)
	s.check(r.State == "DONE" && r.Instance == s.victim.machine, "%s is replaced: %s", r.Instance, r.Reason)
	f, err := s.Until(ctx, 30*time.Second, "the service runs", func(f rig.Fleet) bool { return len(f.Running(service)) == desired })
	if err != nil {
		return err
	}
	s.meet(f)
	s.check(len(f.Well()) == machines && f.Instance(r.Newcomer).Name == r.Newcomer, "%s has joined: %d machines are well", r.Newcomer, len(f.Well()))
	left, err := s.Leftovers(ctx, r.Instance)
	if err != nil {
		return err
	}
	s.check(len(left) == 0 && f.Instance(r.Instance).Name == "", "%s is gone from the fleet, and nothing of it is left", r.Instance)
	for _, l := range left {
		fmt.Printf("        %s\n", l)
	}
	return s.Berth(ctx, "instances")
}

// given is the event that the victim is FAILED.
func (s *story) given(ctx context.Context) (says string, err error) {
	events, err := s.Events(ctx, 0)
	for _, e := range events {
		if e.Kind == "gpu" && e.Subject == s.victim.gpu && strings.Contains(e.Says, api.GPUFailed) {
			says = e.Says
		}
	}
	return says, err
}

// watched says what the watcher saw of the whole story.
func (s *story) watched() {
	var server, docker []int
	mute := 0
	for _, w := range s.watch.samples {
		if w.server >= 0 {
			server = append(server, w.server)
		} else if !w.away {
			mute++
		}
		if w.docker >= 0 {
			docker = append(docker, w.docker)
		} else {
			mute++
		}
	}
	floor := desired - s.victim.sat
	s.check(least(server) >= floor && least(docker) >= floor, "of %d tasks never fewer than %d ran by the server in %d samples, and %d by Docker in %d (allowed: %d, which leaves out what sat on that GPU)",
		desired, least(server), len(server), least(docker), len(docker), floor)
	s.check(mute == 0, "the server and Docker answered each time, but for the server's own absence")
}
