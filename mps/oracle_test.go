package mps_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/berth-gpu/berth/mps"
)

// oracle is the real control daemon, R535 from Debian's non-free archive. It runs
// without a GPU; its servers then never become ready.
func oracle(t *testing.T) mps.Config {
	t.Helper()
	root := os.Getenv("BERTH_MPS_ORACLE")
	if root == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			t.Skip("the real control daemon is not here: no home folder to look in")
		}
		root = filepath.Join(home, ".cache", "berth", "mps-oracle")
	}
	cfg := mps.Config{
		ControlBinary: filepath.Join(root, "usr/bin/nvidia-cuda-mps-control"),
		Path:          filepath.Join(root, "usr/bin") + ":" + filepath.Join(root, "usr/sbin"),
		LibraryPath:   filepath.Join(root, "usr/lib/x86_64-linux-gnu/nvidia/current"),
	}
	if _, err := os.Stat(cfg.ControlBinary); err != nil {
		t.Skipf("the real control daemon is not here: %s; BERTH_MPS_ORACLE names the folder that nvidia-cuda-mps is unpacked into", root)
	}
	return cfg
}

func TestRealDaemonIsStartedAndAnswers(t *testing.T) {
	m := newMachine(t, oracle(t))
	m.start(mps.UseIdle, 0)
	s := m.awaitPhase(mps.PhaseIdle)
	if !s.SingleUID {
		t.Error("R535 refuses -multiuser-server, and the status does not say so")
	}
	o := m.holder.Observe(t.Context())
	if o.Probe != nil || !o.Daemon.Alive || o.LockHolder != s.DaemonPID {
		t.Errorf("observation of a daemon that is well: %+v", o)
	}
}
