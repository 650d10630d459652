package mps_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/berth-gpu/berth/mps"
)

func TestLimitsAsEnvironment(t *testing.T) {
	for _, tc := range []struct {
		limits mps.Limits
		env    string
		err    string
	}{
		{mps.Limits{MemoryMiB: 20480, ActiveThreadPercent: 25},
			"CUDA_MPS_PIPE_DIRECTORY=/run/berth/mps CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=20480M CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25", ""},
		{mps.Limits{MemoryMiB: 1}, "CUDA_MPS_PIPE_DIRECTORY=/run/berth/mps CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1M", ""},
		{mps.Limits{MemoryMiB: 1536, ActiveThreadPercent: 100},
			"CUDA_MPS_PIPE_DIRECTORY=/run/berth/mps CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1536M CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100", ""},
		{mps.Limits{}, "", "memory: 0 MiB is below the least cap, 1 MiB"},
		{mps.Limits{MemoryMiB: -5}, "", "memory: -5 MiB is below the least cap, 1 MiB"},
		{mps.Limits{MemoryMiB: 1, ActiveThreadPercent: 101}, "", "maxComputePercent: 101 is not between 1 and 100"},
		{mps.Limits{MemoryMiB: 1, ActiveThreadPercent: -1}, "", "maxComputePercent: -1 is not between 1 and 100"},
	} {
		env, err := tc.limits.Env()
		if got := strings.Join(env, " "); got != tc.env {
			t.Errorf("%+v: %s", tc.limits, got)
		}
		if err == nil && tc.err != "" || err != nil && err.Error() != tc.err {
			t.Errorf("%+v: error %v, not %q", tc.limits, err, tc.err)
		}
	}
}

func TestReservedVariables(t *testing.T) {
	for _, name := range append(slices.Clone(mps.ReservedVariables), "CUDA_MPS_ANYTHING_TO_COME", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT") {
		if !mps.Reserved(name) {
			t.Errorf("%s may be set", name)
		}
	}
	for _, name := range []string{"CUDA_LAUNCH_BLOCKING", "PATH", "cuda_mps_pipe_directory", "NVIDIA_DRIVER_CAPABILITIES", ""} {
		if mps.Reserved(name) {
			t.Errorf("%s may not be set", name)
		}
	}
	env, err := mps.Limits{MemoryMiB: 1, ActiveThreadPercent: 1}.Env()
	if err != nil {
		t.Fatal(err)
	}
	for _, kv := range env {
		if name, _, _ := strings.Cut(kv, "="); !mps.Reserved(name) {
			t.Errorf("%s is injected and may be set", name)
		}
	}
}

func TestUnsupported(t *testing.T) {
	good := mps.Device{UUID: "GPU-1", DriverBranch: 580, ComputeMajor: 7}
	for _, tc := range []struct {
		name    string
		change  func(*mps.Device)
		control string
		reason  string
	}{
		{"well", func(*mps.Device) {}, "/usr/bin/x", ""},
		{"newer", func(d *mps.Device) { d.DriverBranch = 620; d.ComputeMajor = 12 }, "/usr/bin/x", ""},
		{"vGPU", func(d *mps.Device) { d.VGPU = true }, "/usr/bin/x", "this GPU is a vGPU"},
		{"MIG", func(d *mps.Device) { d.MIG = true }, "/usr/bin/x", "nvidia-smi -i GPU-1 -mig 0"},
		{"Pascal", func(d *mps.Device) { d.ComputeMajor, d.ComputeMinor = 6, 1 }, "/usr/bin/x", "compute capability 6.1 is below 7.0"},
		{"R535", func(d *mps.Device) { d.DriverBranch = 535 }, "/usr/bin/x", "driver branch R535: MPS tasks need driver branch R580 or newer"},
		{"no binary", func(*mps.Device) {}, "", "nvidia-cuda-mps-control was not found"},
	} {
		d := good
		tc.change(&d)
		if reason := mps.Unsupported(d, tc.control); reason != "" != (tc.reason != "") || !strings.Contains(reason, tc.reason) {
			t.Errorf("%s: %q", tc.name, reason)
		}
	}
}

func TestUnsupportedGPUIsLeftAlone(t *testing.T) {
	m := newMachine(t, mps.Config{ControlBinary: "/nonexistent/nvidia-cuda-mps-control"})
	m.start(mps.UseMPS, 0)
	if s := m.awaitPhase(mps.PhaseUnsupported); !strings.Contains(s.Reason, "was not found") {
		t.Errorf("%+v", s)
	}
	if o := m.holder.Observe(t.Context()); o.Probe == nil || o.Status.State != mps.PhaseUnsupported {
		t.Errorf("%+v", o)
	}
	if err := m.holder.Purge(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestFolders(t *testing.T) {
	for _, tc := range []struct {
		name  string
		spoil func(t *testing.T, root string, d *mps.Dirs)
		err   string // ROOT stands for the folder; "" is none
	}{
		{"as they should be", func(*testing.T, string, *mps.Dirs) {}, ""},
		{"a folder that others cannot pass", func(t *testing.T, root string, _ *mps.Dirs) { chmod(t, root, 0o750) },
			"run folder: ROOT has mode 0750; others need x on it, as in 0755, or MPS servers and clients that are not root cannot reach their socket"},
		{"a folder that others may write to", func(t *testing.T, root string, _ *mps.Dirs) { chmod(t, root, 0o777) },
			"run folder: ROOT has mode 0777; group and others may not write to it, as in 0755, or they could put another daemon in the place of berth's"},
		{"a folder that the group may write to", func(t *testing.T, root string, _ *mps.Dirs) { chmod(t, root, 0o775) },
			"run folder: ROOT has mode 0775; group and others may not write to it, as in 0755, or they could put another daemon in the place of berth's"},
		{"another's folder", func(t *testing.T, root string, _ *mps.Dirs) {
			if err := os.Chown(root, 65534, 65534); err != nil {
				t.Skip("not root")
			}
		}, "run folder: ROOT belongs to user 65534; it must belong to root, or its owner could put another daemon in the place of berth's"},
		{"reached through a link", func(t *testing.T, root string, d *mps.Dirs) {
			if err := os.Symlink(root, root+"/l"); err != nil {
				t.Fatal(err)
			}
			d.Run = root + "/l/run"
		}, ""},
		{"too long", func(t *testing.T, root string, d *mps.Dirs) { d.Run = root + "/" + strings.Repeat("x", 40) },
			"and MPS takes at most 87; choose a shorter run folder than ROOT/xxxx"},
		{"relative", func(t *testing.T, _ string, d *mps.Dirs) { d.Run = "run" }, `folder: "run" is not an absolute path`},
		{"a UUID that is a path", func(t *testing.T, _ string, d *mps.Dirs) { d.UUID = "../x" }, `GPU UUID: "../x" cannot name a folder`},
		{"no UUID", func(t *testing.T, _ string, d *mps.Dirs) { d.UUID = "" }, `GPU UUID: "" cannot name a folder`},
		{"a file in the way", func(t *testing.T, root string, d *mps.Dirs) {
			if err := os.WriteFile(filepath.Join(root, "run"), nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}, "not a directory"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root, err := os.MkdirTemp("/tmp", "b")
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(root)
			chmod(t, root, 0o755)
			d := mps.Dirs{Run: filepath.Join(root, "run"), Log: filepath.Join(root, "log"), UUID: testUUID}
			tc.spoil(t, root, &d)
			err = d.Create()
			want := strings.ReplaceAll(tc.err, "ROOT", root)
			if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("%v\nnot %s", err, want)
			}
		})
	}
}

func chmod(t *testing.T, path string, mode os.FileMode) {
	t.Helper()
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

// A holder whose folders are wrong says so, starts nothing, and goes on once they
// are right.
func TestHolderWaitsForItsFolders(t *testing.T) {
	m := newMachine(t, oracle(t))
	chmod(t, m.dir, 0o700)
	m.start(mps.UseIdle, 0)
	s := m.awaitPhase(mps.PhaseBackoff)
	if want := m.dir + " has mode 0700"; !strings.Contains(s.Reason, want) || s.Failures != 0 {
		t.Errorf("%+v", s)
	}
	chmod(t, m.dir, 0o755)
	m.awaitPhase(mps.PhaseIdle)
}

func TestHolderWaitsForItsStore(t *testing.T) {
	m := newMachine(t, oracle(t))
	m.saveErr = os.ErrPermission
	m.start(mps.UseIdle, 0)
	m.await("notice", func(s mps.Status) bool { return strings.Contains(s.Notice, "cannot store the record") })
	if list := m.processes(); len(list) != 0 {
		t.Errorf("started without a store: %v", list)
	}
	m.mu.Lock()
	m.saveErr = nil
	m.mu.Unlock()
	m.awaitPhase(mps.PhaseIdle)
}
