package healthcheck_test

import (
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api/flight"
	"github.com/berth-gpu/berth/healthcheck"
	"github.com/berth-gpu/berth/mps"
)

func held() mps.Observation {
	return mps.Observation{
		Status:       mps.Status{State: mps.PhaseHeld},
		Daemon:       mps.ProcessView{PID: 10, Alive: true, State: "S"},
		Server:       mps.ProcessView{PID: 11, Alive: true, State: "S"},
		LockHolder:   10,
		ProbeTook:    3 * time.Millisecond,
		ServerStatus: "ACTIVE",
		Exclusive:    true,
	}
}

// replays says whether a recorded decision comes out again, byte for byte.
func replays(t *testing.T, again func(json.RawMessage) (json.RawMessage, error), in, out any) {
	t.Helper()
	recorded, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	want, err := json.Marshal(out)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := again(recorded); err != nil || string(got) != string(want) {
		t.Errorf("replayed: %v\nin  %s\nwas %s\nis  %s", err, recorded, want, got)
	}
}

func TestHeld(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*mps.Observation)
		want healthcheck.Verdict
	}{
		{"held", func(o *mps.Observation) {}, healthcheck.Verdict{Held: true}},
		{"held on a branch without get_server_status", func(o *mps.Observation) { o.ServerStatus = "" }, healthcheck.Verdict{Held: true}},
		{"an answer in just the limit", func(o *mps.Observation) { o.ProbeTook = 2 * time.Second }, healthcheck.Verdict{Held: true}},
		{"not yet", func(o *mps.Observation) { o.Status.State = mps.PhaseServerStarting },
			healthcheck.Verdict{Code: healthcheck.NotHolding, Reason: "the GPU is SERVER_STARTING"}},
		{"draining", func(o *mps.Observation) {
			o.Status.State, o.Status.Reason = mps.PhaseDraining, "the daemon died"
		}, healthcheck.Verdict{Code: healthcheck.NotHolding, Reason: "the GPU is DRAINING: the daemon died"}},
		{"the daemon died this instant", func(o *mps.Observation) { o.Daemon.Alive = false },
			healthcheck.Verdict{Code: healthcheck.DaemonGone, Reason: "the MPS control daemon (pid 10) is gone"}},
		{"SIGSTOP", func(o *mps.Observation) { o.Daemon.State = "T" },
			healthcheck.Verdict{Code: healthcheck.DaemonStopped, Reason: "the MPS control daemon (pid 10) is stopped (state T)"}},
		{"a second daemon", func(o *mps.Observation) { o.LockHolder = 99 },
			healthcheck.Verdict{Code: healthcheck.StrangerDaemon, Reason: "the pipe folder's lock is held by pid 99, not by the recorded daemon 10"}},
		{"no server", func(o *mps.Observation) { o.Server.Alive = false },
			healthcheck.Verdict{Code: healthcheck.ServerGone, Reason: "the MPS server (pid 11) is gone"}},
		{"a stopped server", func(o *mps.Observation) { o.Server.State = "t" },
			healthcheck.Verdict{Code: healthcheck.ServerStopped, Reason: "the MPS server (pid 11) is stopped (state t)"}},
		{"nothing through client/", func(o *mps.Observation) { o.Probe = errors.New("no daemon listens") },
			healthcheck.Verdict{Code: healthcheck.NoAnswer, Reason: "the MPS control daemon does not answer through the client folder: no daemon listens"}},
		{"a slow answer", func(o *mps.Observation) { o.ProbeTook = 2*time.Second + time.Millisecond },
			healthcheck.Verdict{Code: healthcheck.SlowAnswer, Reason: "the MPS control daemon took 2.001s to answer, more than 2s"}},
		{"FAULT", func(o *mps.Observation) { o.ServerStatus = "FAULT" },
			healthcheck.Verdict{Code: healthcheck.ServerNotReady, Reason: "the MPS server is FAULT"}},
		{"compute mode unread", func(o *mps.Observation) { o.ModeErr = errors.New("NVML does not answer") },
			healthcheck.Verdict{Code: healthcheck.ModeUnknown, Reason: "the GPU's compute mode cannot be read: NVML does not answer"}},
		{"DEFAULT", func(o *mps.Observation) { o.Exclusive = false },
			healthcheck.Verdict{Code: healthcheck.NotExclusive, Reason: "the GPU's compute mode is not EXCLUSIVE_PROCESS"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := held()
			tt.edit(&o)
			got := healthcheck.Held(o)
			if got != tt.want {
				t.Errorf("got  %+v\nwant %+v", got, tt.want)
			}
			replays(t, flight.Of(healthcheck.Held), o, got)
		})
	}
}
