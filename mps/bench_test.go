package mps_test

import (
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api/flight"
	"github.com/berth-gpu/berth/mps"
)

// BenchmarkProbe is one control command through client/ of the real daemon, in
// wall time, and in CPU time of this process and the utility.
func BenchmarkProbe(b *testing.B) {
	m := newMachine(b, oracle(b))
	m.start(mps.UseIdle, 0)
	m.awaitPhase(mps.PhaseIdle)
	m.stop()
	c := m.control()
	before := cpu()
	for b.Loop() {
		if err := c.Probe(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(cpu()-before)/float64(b.N)/1e6, "cpu-ms/op")
}

// BenchmarkObserve is a whole look for the gate.
func BenchmarkObserve(b *testing.B) {
	m := newMachine(b, oracle(b))
	m.start(mps.UseIdle, 0)
	m.awaitPhase(mps.PhaseIdle)
	for b.Loop() {
		if o := m.holder.Observe(b.Context()); o.Probe != nil {
			b.Fatal(o.Probe)
		}
	}
}

// BenchmarkNoticeDeadDaemon is the time from kill -9 of a held GPU's daemon until
// the GPU is closed.
func BenchmarkNoticeDeadDaemon(b *testing.B) {
	m := newSimulated(b, mps.Config{Budget: mps.Budget{Failures: 1 << 30}, TickEvery: time.Second, ProbeEvery: 5 * time.Second})
	m.start(mps.UseMPS, 0)
	var took []time.Duration
	for b.Loop() {
		b.StopTimer()
		held := m.awaitPhase(mps.PhaseHeld)
		m.holder.Clients(1)
		b.StartTimer()
		began := time.Now()
		kill(b, held.DaemonPID, syscall.SIGKILL)
		for m.holder.Status().State == mps.PhaseHeld {
			m.mu.Lock()
			changed := m.changed
			m.mu.Unlock()
			if m.holder.Status().State == mps.PhaseHeld {
				<-changed
			}
		}
		took = append(took, time.Since(began))
		b.StopTimer()
		m.holder.Clients(0)
		m.await("another daemon", func(s mps.Status) bool { return s.State == mps.PhaseHeld && s.DaemonPID != held.DaemonPID })
		b.StartTimer()
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1e3, "median-ms")
	b.ReportMetric(float64(took[len(took)-1].Microseconds())/1e3, "worst-ms")
}

// BenchmarkStep is one decision, without a flight recorder and with one: that of a
// GPU that is well, each second, and one that changes something.
func BenchmarkStep(b *testing.B) {
	w := newWorld(mps.Record{BootID: "boot", ID: "x", Daemon: mps.Process{PID: 1, Start: 1}, Server: mps.Process{PID: 2, Start: 2}, Use: mps.UseMPS, Exclusive: true}, "")
	w.exclusive = true
	for range 10 {
		if e := goesWell(&w); e != nil {
			w.step(e, true)
		} else {
			w.step(mps.Tick{}, true)
		}
	}
	if w.s.Phase != mps.PhaseHeld {
		b.Fatal(w.s.Phase)
	}
	recorder, err := flight.Open(b.TempDir(), 16<<20, zapNop)
	if err != nil {
		b.Fatal(err)
	}
	defer recorder.Close()
	recorded := mps.Hooks{Decided: func(in, out any) { recorder.Record("mps.Step", testUUID, in, out) }}
	for _, decision := range []struct {
		name  string
		event mps.Event
	}{{"a tick", mps.Tick{}}, {"a loss", mps.Exited{Process: w.s.Server}}} {
		for _, with := range []struct {
			name  string
			hooks mps.Hooks
		}{{"not recorded", mps.Hooks{}}, {"recorded", recorded}} {
			b.Run(decision.name+", "+with.name, func(b *testing.B) {
				for b.Loop() {
					with.hooks.Step(w.s, decision.event, w.now)
				}
			})
		}
	}
}

// BenchmarkIdle is what eight holders of quiet GPUs use of one core, at the default
// pace, the control utility's share included. To be run with -benchtime 1x.
func BenchmarkIdle(b *testing.B) {
	for name, every := range map[string]time.Duration{"default": 0, "never probing": 24 * time.Hour} {
		b.Run(name, func(b *testing.B) { idle(b, every) })
	}
}

func idle(b *testing.B, probeEvery time.Duration) {
	const gpus = 8
	for range gpus {
		m := newMachine(b, oracle(b))
		m.cfg.TickEvery, m.cfg.ProbeEvery = 0, probeEvery
		m.start(mps.UseIdle, 0)
		m.awaitPhase(mps.PhaseIdle)
	}
	const watched = 20 * time.Second
	for b.Loop() {
		before := cpu()
		<-time.After(watched)
		b.ReportMetric(100*float64(cpu()-before)/float64(watched), "core-%")
	}
}

// cpu is the CPU time of this process and its children that have ended.
func cpu() time.Duration {
	var sum time.Duration
	for _, who := range []int{syscall.RUSAGE_SELF, syscall.RUSAGE_CHILDREN} {
		var r syscall.Rusage
		if syscall.Getrusage(who, &r) == nil {
			sum += time.Duration(r.Utime.Nano() + r.Stime.Nano())
		}
	}
	return sum
}
