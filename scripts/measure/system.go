package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/scripts/rig"
)

const (
	systemStarts   = 12
	systemFailures = 3
	systemService  = "web"
	systemTasks    = 8
)

// system measures a placement server with three real agents on simulated machines. The
// first failure of a daemon is past its budget.
func (m *measure) system(ctx context.Context) (err error) {
	s := &rig.System{Dir: "build/bench/system", RunDir: "/run/berth-bench", Machines: 3, GPUs: 2, Settings: []string{"mps.budget.failures=1"}}
	if err := s.Sweep(ctx); err != nil {
		return err
	}
	defer func() {
		_, left := s.Abandon()
		_, _ = rig.RemoveImage(context.Background())
		err = errors.Join(err, left)
	}()
	if _, err := s.Start(ctx); err != nil {
		return err
	}
	o := reach(s.Socket())
	m.printf("## A task, from the request until it runs\n\nA placement server and 3 machines of 2 GPUs (`berth dev`): the real server, agents and Docker.\n\n")
	if err := m.systemStarts(ctx, o); err != nil {
		return err
	}
	m.printf("## A GPU given up: its tasks, elsewhere\n\n")
	if err := m.systemMoves(ctx, s, o); err != nil {
		return err
	}
	_, err = s.Signal(os.Interrupt)
	return err
}

// systemStarts runs tasks by turns with containers of plain Docker.
func (m *measure) systemStarts(ctx context.Context, o operator) error {
	var plain, answered, started, known []time.Duration
	held, err := o.run(ctx, task("held", 1024)) // so that the GPU is held: its server up, in exclusive mode
	if err != nil {
		return err
	}
	if _, err := o.reaches(ctx, held, api.StatusRunning); err != nil {
		return err
	}
	for i := range systemStarts + warmUps {
		_, p, err := rig.PlainStart(ctx, "berth-sample:latest", []string{"/bin/cuda-client", "sleep", "1h"})
		if err != nil {
			return err
		}
		asked := time.Now()
		id, err := o.run(ctx, task("start", 1024))
		if err != nil {
			return err
		}
		answer := time.Since(asked)
		t, err := o.reaches(ctx, id, api.StatusRunning)
		if err != nil {
			return err
		}
		shown := time.Since(asked)
		_, at, err := rig.Times(ctx, t.Containers[0].RuntimeID)
		if err != nil {
			return err
		}
		if i >= warmUps {
			plain, answered, started, known = append(plain, p), append(answered, answer), append(started, at.Sub(asked)), append(known, shown)
		}
		if err := o.stop(ctx, id); err != nil {
			return err
		}
		if _, err := o.reaches(ctx, id, api.StatusStopped); err != nil {
			return err
		}
	}
	if err := o.stop(ctx, held); err != nil { // no service's: it would stay where it is
		return err
	}
	ratio := func(d []time.Duration) string { return fmt.Sprintf("%.2f", float64(median(d))/float64(median(plain))) }
	m.printf("%d times by turns, the same image, all from the request on; the ratios are of the medians:\n\n| | | beside plain Docker |\n|---|---|---|\n", systemStarts)
	m.printf("| plain Docker (create and start, as `docker run -d`), until the container runs | %s | 1 |\n", spread(plain))
	m.printf("| RunTask, until it is placed, stored and answered | %s | %s |\n", spread(answered), ratio(answered))
	m.printf("| RunTask, until its container runs, capped | %s | %s |\n", spread(started), ratio(started))
	m.printf("| RunTask, until the server shows it RUNNING (asked every 5 ms) | %s | %s |\n\n", spread(known), ratio(known))
	return nil
}

// reaches waits for a task's status.
func (o operator) reaches(ctx context.Context, id, status string) (t api.Task, err error) {
	var last error
	err = until(ctx, time.Minute, 5*time.Millisecond, "task "+id+" is "+status, func() bool {
		t, last = o.task(ctx, id)
		return last == nil && t.LastStatus == status
	})
	return t, errors.Join(err, last)
}

// systemMoves kills the daemon of a GPU with tasks, past its budget, again and again. The
// machine is replaced each time, and the next GPU is one of another machine.
func (m *measure) systemMoves(ctx context.Context, s *rig.System, o operator) error {
	if _, err := o.do(ctx, http.MethodPost, api.PathServices, api.Service{Name: systemService, Definition: []byte(task(systemService, 20480)), DesiredCount: systemTasks,
		MinimumHealthyPercent: 100, MaximumPercent: 200}, nil); err != nil {
		return err
	}
	var noticed, moved, replaced []time.Duration
	sat := 0
	for range systemFailures {
		f, err := s.Until(ctx, time.Minute, "the service runs and its clients are attached", func(f rig.Fleet) bool {
			return len(f.Well()) == s.Machines && len(f.Running(systemService)) == systemTasks && fullest(f).used
		})
		if err != nil {
			return err
		}
		victim := fullest(f)
		events, err := s.Events(ctx, 0)
		if err != nil {
			return err
		}
		last := events[len(events)-1].Seq
		killed := time.Now()
		if err := rig.Command(ctx, "build/berth", "fault", "kill-daemon", "--machine", s.Machine(victim.machine), "--gpu", victim.gpu); err != nil {
			return err
		}
		var verdict api.Event
		if err := until(ctx, 20*time.Second, 20*time.Millisecond, "a verdict on the GPU", func() bool {
			events, err := s.Events(ctx, last)
			for _, e := range events {
				if err == nil && e.Kind == "gpu" && e.Subject == victim.gpu {
					verdict = e
					return true
				}
			}
			return false
		}); err != nil {
			return err
		}
		// When the containers themselves started, by Docker's clock.
		var latest time.Time
		if _, err := s.Until(ctx, time.Minute, "all run elsewhere", func(f rig.Fleet) bool {
			n := 0
			latest = time.Time{}
			for _, t := range f.Running(systemService) {
				if t.GPUIDs[0] == victim.gpu || t.StartedAt == nil {
					continue
				}
				n++
				if t.StartedAt.After(latest) {
					latest = *t.StartedAt
				}
			}
			return n >= systemTasks
		}); err != nil {
			return err
		}
		sat += victim.tasks
		noticed, moved = append(noticed, verdict.At.Sub(killed)), append(moved, latest.Sub(verdict.At))
		if _, err := s.Until(ctx, 3*time.Minute, "the machine is replaced", func(f rig.Fleet) bool {
			return f.Instance(victim.machine).Name == "" && len(f.Well()) == s.Machines
		}); err != nil {
			return err
		}
		replaced = append(replaced, time.Since(verdict.At))
	}
	m.printf("A service of %d tasks of 20 GiB. `kill -9` of the MPS daemon of the GPU with most of them, past its budget, %d times (%d tasks in all were on it):\n\n| | |\n|---|---|\n", systemTasks, systemFailures, sat)
	m.printf("| from the kill to the server's verdict that its tasks have to move (with the start of `berth fault`) | %s |\n", spread(noticed))
	m.printf("| from the verdict until all %d run elsewhere, with containers of their own | %s |\n", systemTasks, spread(moved))
	m.printf("| from the verdict until the machine is drained, gone and replaced by a new one that is well | %s |\n\n", spread(replaced))
	m.goal(median(moved) <= 5*time.Second, "verdict to running elsewhere within 5 s, by the median")
	return nil
}

type loaded struct {
	machine, gpu string
	tasks        int
	used         bool // NVML shows memory of each
}

// fullest is the GPU with the most tasks of the service.
func fullest(f rig.Fleet) (most loaded) {
	for _, in := range f.Instances {
		for _, g := range in.GPUs {
			l := loaded{machine: in.Name, gpu: g.ID, used: true}
			for _, t := range f.Running(systemService) {
				if t.GPUIDs[0] == g.ID {
					l.tasks++
				}
			}
			for _, s := range g.Slices {
				l.used = l.used && s.UsedMemoryInMiB > 0
			}
			if l.tasks > most.tasks {
				most = l
			}
		}
	}
	return most
}
