package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/berth-gpu/berth/api"
)

// The fleet that the server is measured with: 20 tasks a machine, three to a GPU.
const (
	fleetMachines = 1000
	fleetGPUs     = 8
	fleetGPUMiB   = 81920
	fleetServices = 4
	fleetEach     = 5000 // tasks of a service
	fleetTasks    = fleetServices * fleetEach
	fleetTaskMiB  = 24576

	fleetRuns    = 300 // RunTask, one after the other
	fleetClients = 16
	fleetMore    = 1600 // RunTask by all clients
	fleetFails   = 10   // GPUs
	fleetKills   = 3
	fleetIdle    = 30 * time.Second
)

// fleetServer is the real berth server over a folder of its own.
type fleetServer struct {
	operator
	dir, socket, agents string

	cmd *exec.Cmd
	at  time.Time // of its start
}

func (s *fleetServer) start() error {
	log, err := os.OpenFile(filepath.Join(s.dir, "server.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	s.cmd = exec.Command("build/berth", "server", "--data-dir", filepath.Join(s.dir, "data"))
	s.cmd.Stdout, s.cmd.Stderr = log, log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "BERTH_") {
			s.cmd.Env = append(s.cmd.Env, kv)
		}
	}
	s.cmd.Env = append(s.cmd.Env, "BERTH_PLACEMENT_CLUSTER=bench", "BERTH_PLACEMENT_SOCKET="+s.socket, "BERTH_PLACEMENT_AGENTS_LISTEN=unix:"+s.agents)
	s.at = time.Now()
	return s.cmd.Start()
}

// kill ends the server at once.
func (s *fleetServer) kill() {
	if s.cmd != nil {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
		s.cmd = nil
	}
}

// wholeFleet measures the server alone, with a fleet of agents that have no machines.
func (m *measure) wholeFleet(ctx context.Context) (err error) {
	dir, err := filepath.Abs("build/bench/fleet")
	if err != nil {
		return err
	}
	const run = "/run/berth-bench-fleet"
	clean := func() error { return errors.Join(os.RemoveAll(dir), os.RemoveAll(run)) }
	if err := errors.Join(clean(), os.MkdirAll(dir, 0o700), os.MkdirAll(run, 0o700)); err != nil {
		return err
	}
	s := &fleetServer{dir: dir, socket: filepath.Join(run, "server.sock"), agents: filepath.Join(run, "agents.sock")}
	s.operator = reach(s.socket)
	if err := s.start(); err != nil {
		return err
	}
	var w *swarm
	defer func() {
		s.kill()
		if w != nil {
			w.end()
		}
		if err == nil {
			err = clean()
		} else {
			err = fmt.Errorf("%w (%s has the server's log)", err, dir)
		}
	}()
	if err := until(ctx, time.Minute, 10*time.Millisecond, "an empty server leads", func() bool { return s.leads(ctx) }); err != nil {
		return err
	}
	m.printf("## A server with %d machines and %d tasks\n\n", fleetMachines, fleetTasks)
	m.printf("The real `berth server` with its embedded store on this machine's disk. The agents are one process beside it, on the same cores:\n")
	m.printf("they speak the real stream (each its own, with a pulse every 2.5 s and a new picture of its %d GPUs every 10 s) and start\ntheir tasks in no time. Each service has %d tasks.\n\n", fleetGPUs, fleetEach)
	m.printf("| | |\n|---|---|\n")

	began := time.Now()
	w = newSwarm("unix:"+s.agents, "bench", fleetMachines, fleetGPUs, fleetGPUMiB)
	if err := m.allSynced(ctx, w); err != nil {
		return err
	}
	m.printf("| %d agents join, from nothing to orders for the last | %s |\n", fleetMachines, sec(time.Since(began)))
	for _, part := range []func(context.Context, *fleetServer, *swarm) error{m.fill, m.runTasks, m.burst, m.lists, m.failedGPUs, m.idleFleet, m.recoveries} {
		if err := errors.Join(part(ctx, s, w), w.wrong()); err != nil {
			return err
		}
	}
	return nil
}

func (m *measure) allSynced(ctx context.Context, w *swarm) error {
	return until(ctx, 3*time.Minute, 5*time.Millisecond, "every agent has its orders", func() bool { return w.synced.Load() == int64(len(w.agents)) })
}

// fill starts the services.
func (m *measure) fill(ctx context.Context, s *fleetServer, w *swarm) error {
	began := time.Now()
	for i := range fleetServices {
		name := fmt.Sprintf("service-%d", i)
		if _, err := s.do(ctx, http.MethodPost, api.PathServices, api.Service{Name: name, Definition: []byte(task(name, fleetTaskMiB)), DesiredCount: fleetEach,
			MinimumHealthyPercent: 100, MaximumPercent: 200}, nil); err != nil {
			return err
		}
	}
	if err := until(ctx, 3*time.Minute, 5*time.Millisecond, "all tasks run", func() bool { return w.running.Load() == fleetTasks }); err != nil {
		return err
	}
	took := time.Since(began)
	if err := until(ctx, time.Minute, 50*time.Millisecond, "the server knows it", func() bool { return s.knowsRunning(ctx) == fleetTasks }); err != nil {
		return err
	}
	m.printf("| %d services of %d tasks: accepted, placed, stored, ordered | %s: %.0f tasks/s |\n", fleetServices, fleetEach, sec(took), fleetTasks/took.Seconds())
	m.printf("| the same, until the server knows and has stored that all run | %s |\n", sec(time.Since(began)))
	return nil
}

// knowsRunning counts the running tasks of services, as the server shows them.
func (s *fleetServer) knowsRunning(ctx context.Context) (n int) {
	var all []api.Service
	if _, err := s.do(ctx, http.MethodGet, api.PathServices, nil, &all); err != nil {
		return -1
	}
	for _, v := range all {
		n += v.RunningCount
	}
	return n
}

// runTasks runs one task after the other, and stops each again.
func (m *measure) runTasks(ctx context.Context, s *fleetServer, w *swarm) error {
	var answered, ordered []time.Duration
	for i := range fleetRuns + warmUps {
		asked := time.Now()
		id, err := s.run(ctx, task("one", 1024))
		if err != nil {
			return err
		}
		took := time.Since(asked)
		if err := until(ctx, time.Minute, 100*time.Microsecond, "the start is ordered", func() bool { return !w.orderedAt(id).IsZero() }); err != nil {
			return err
		}
		if i >= warmUps {
			answered, ordered = append(answered, took), append(ordered, w.orderedAt(id).Sub(asked))
		}
		if err := s.stop(ctx, id); err != nil {
			return err
		}
	}
	m.printf("| RunTask, %d one after the other: placed, stored and answered | %s |\n| the same, until its agent has the order | %s |\n", fleetRuns, spread99(answered), spread99(ordered))
	return nil
}

// burst runs tasks as fast as several clients ask for them.
func (m *measure) burst(ctx context.Context, s *fleetServer, w *swarm) error {
	var mu sync.Mutex
	var took []time.Duration
	var ids []string
	var errs []error
	var all sync.WaitGroup
	began := time.Now()
	for range fleetClients {
		all.Go(func() {
			for range fleetMore / fleetClients {
				asked := time.Now()
				id, err := s.run(ctx, task("one", 1024))
				mu.Lock()
				took, ids, errs = append(took, time.Since(asked)), append(ids, id), append(errs, err)
				mu.Unlock()
				if err != nil {
					return
				}
			}
		})
	}
	all.Wait()
	lasted := time.Since(began)
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := until(ctx, time.Minute, 5*time.Millisecond, "all are ordered", func() bool {
		for _, id := range ids {
			if w.orderedAt(id).IsZero() {
				return false
			}
		}
		return true
	}); err != nil {
		return err
	}
	m.printf("| RunTask by %d clients at once, %d in all | %.0f a second; each answered after %s |\n", fleetClients, fleetMore, fleetMore/lasted.Seconds(), spread99(took))
	for _, id := range ids {
		if err := s.stop(ctx, id); err != nil {
			return err
		}
	}
	return until(ctx, time.Minute, 5*time.Millisecond, "all have stopped", func() bool { return w.running.Load() == fleetTasks })
}

// lists asks for all there is.
func (m *measure) lists(ctx context.Context, s *fleetServer, _ *swarm) error {
	for _, list := range []struct{ says, path string }{
		{"every task (`berth ps` asks for it)", api.PathTasks}, {"every machine (`berth instances`)", api.PathInstances},
	} {
		var took []time.Duration
		var size int
		for range 10 {
			began := time.Now()
			n, err := s.do(ctx, http.MethodGet, list.path, nil, nil)
			if err != nil {
				return err
			}
			size, took = n, append(took, time.Since(began))
		}
		m.printf("| %s, %.1f MB of JSON, median of 10 | %s |\n", list.says, float64(size)/1e6, ms(median(took)))
	}
	return nil
}

// failedGPUs lets GPUs with three tasks each fail, and waits until others have been
// ordered to start what was on them.
func (m *measure) failedGPUs(ctx context.Context, s *fleetServer, w *swarm) error {
	var took []time.Duration
	for i := range fleetFails {
		f := w.agents[i]
		f.mu.Lock()
		on := len(f.view.GPUs[0].Slices)
		f.mu.Unlock()
		began, before := time.Now(), w.orderedCount()
		if err := f.failNow(0); err != nil {
			return err
		}
		if err := until(ctx, time.Minute, 200*time.Microsecond, "its tasks are ordered elsewhere", func() bool { return w.orderedCount() == before+on }); err != nil {
			return err
		}
		took = append(took, time.Since(began))
		if err := until(ctx, time.Minute, time.Millisecond, "its tasks have stopped", func() bool { return s.knowsRunning(ctx) == fleetTasks && f.free(0) }); err != nil {
			return err
		}
	}
	m.printf("| a GPU with its tasks is given up, %d times: from its agent's word until the orders for their replacements are elsewhere | %s |\n", fleetFails, spread99(took))
	return nil
}

// idleFleet watches the server while nothing happens but what its agents say.
func (m *measure) idleFleet(ctx context.Context, s *fleetServer, _ *swarm) error {
	if err := pause(ctx, fleetIdle/3); err != nil {
		return err
	}
	own, _, err := cpuTime(s.cmd.Process.Pid)
	if err != nil {
		return err
	}
	began := time.Now()
	if err := pause(ctx, fleetIdle); err != nil {
		return err
	}
	own2, _, err := cpuTime(s.cmd.Process.Pid)
	if err != nil {
		return err
	}
	took := time.Since(began)
	rss, err := residentKiB(s.cmd.Process.Pid)
	if err != nil {
		return err
	}
	m.printf("| the idle server, watched for %s: CPU | %.1f %% of a core |\n| its resident memory, etcd's in it | %.0f MiB |\n", took.Round(time.Second), 100*float64(own2-own)/float64(took), float64(rss)/1024)
	db, err := os.Stat(filepath.Join(s.dir, "data", "etcd", "data", "member", "snap", "db"))
	if err != nil {
		return err
	}
	m.printf("| the store's database, with 5 minutes of history | %.0f MB |\n| its log (WAL) and snapshots | %.0f MB |\n", float64(db.Size())/1e6, float64(folderSize(filepath.Join(s.dir, "data", "etcd"))-db.Size())/1e6)
	m.printf("| the flight recorder's ring | %.0f MB |\n", float64(folderSize(filepath.Join(s.dir, "data", "flight")))/1e6)
	return nil
}

func folderSize(dir string) (sum int64) {
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil
		}
		if info, err := d.Info(); err == nil {
			sum += info.Size()
		}
		return nil
	})
	return sum
}

// recoveries kills the server and starts it again.
func (m *measure) recoveries(ctx context.Context, s *fleetServer, w *swarm) error {
	var leads, synced []time.Duration
	w.mu.Lock()
	ordered, stopped := len(w.ordered), w.stopped.Load()
	w.mu.Unlock()
	for range fleetKills {
		s.kill()
		if err := until(ctx, time.Minute, time.Millisecond, "every agent knows that its stream broke", func() bool { return w.synced.Load() == 0 }); err != nil {
			return err
		}
		if err := s.start(); err != nil {
			return err
		}
		if err := until(ctx, 3*time.Minute, 2*time.Millisecond, "the server leads again", func() bool { return s.leads(ctx) }); err != nil {
			return err
		}
		leads = append(leads, time.Since(s.at))
		if err := m.allSynced(ctx, w); err != nil {
			return err
		}
		synced = append(synced, time.Since(s.at))
		if n := s.knowsRunning(ctx); n != fleetTasks {
			return fmt.Errorf("after a restart the server shows %d running tasks, not %d", n, fleetTasks)
		}
		if err := pause(ctx, 3*time.Second); err != nil {
			return err
		}
	}
	if w.orderedCount() != ordered || w.stopped.Load() != stopped {
		return fmt.Errorf("the server's restarts started %d tasks and stopped %d", w.orderedCount()-ordered, w.stopped.Load()-stopped)
	}
	m.printf("| `kill -9` and start, %d times: from the start of the process until it leads with everything loaded | %s |\n", fleetKills, each(leads))
	m.printf("| the same, until all %d agents are back and have their orders | %s |\n\n", fleetMachines, each(synced))
	m.printf("No task was started, stopped or lost by the restarts. An agent whose stream broke tries again after 0.25 s at first and 3 s at most.\n\n")
	return nil
}

func (s *swarm) orderedCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.ordered)
}

func sec(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }

func each(all []time.Duration) string {
	var out []string
	for _, d := range all {
		out = append(out, sec(d))
	}
	return strings.Join(out, ", ")
}
