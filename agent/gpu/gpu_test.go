package gpu_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"reflect"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berth-gpu/berth/agent/gpu"
	"github.com/berth-gpu/berth/agent/gpu/nvmlsim"
)

func devices(t *testing.T, n *gpu.NVML) []gpu.Device {
	t.Helper()
	all, err := n.Devices(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestInventoryOfAMixedMachine(t *testing.T) {
	spec := steer(t, func(s *nvmlsim.Spec) {
		t4 := nvmlsim.T4()
		t4.UUID, t4.PCIBusID, t4.Minor, t4.NUMANode = "GPU-00000000-0000-4000-8000-000000000004", "00000000:F1:00.0", 77, -1
		s.GPUs = append(s.GPUs, t4)
		s.GPUs[0].Links = []nvmlsim.Link{{Remote: s.GPUs[1].PCIBusID}, {Remote: "00000000:04:00.0", Switch: true}, {Remote: "00000000:05:00.0", Switch: true, Down: true}}
	})
	n := open(t, time.Minute)
	got := devices(t, n)
	want := gpu.Device{
		UUID: spec.GPUs[0].UUID, Name: "NVIDIA H200", PCIBusID: "00000000:10:00.0", Index: 0, Minor: spec.GPUs[0].Minor, NUMANode: 0,
		TotalMiB: 143771, ReservedMiB: 617, ComputeMajor: 9, ComputeMinor: 0, Architecture: "Hopper",
		DriverVersion: "580.159.03", DriverBranch: 580, CUDAVersion: 13000, ECC: true,
		NVLinks: []gpu.NVLink{{Link: 0, Up: true, RemotePCIBusID: "00000000:18:00.0", RemoteType: "GPU"},
			{Link: 1, Up: true, RemotePCIBusID: "00000000:04:00.0", RemoteType: "SWITCH"}, {Link: 2}},
		Peers: []gpu.Peer{{UUID: spec.GPUs[1].UUID, Path: gpu.PathSystem, NVLinks: 1}, {UUID: spec.GPUs[2].UUID, Path: gpu.PathSystem}},
	}
	if len(got) != 3 || !reflect.DeepEqual(got[0], want) {
		t.Fatalf("got  %+v\nwant %+v", got, want)
	}
	if got[0].UsableMiB() != 143154 {
		t.Errorf("usable %d MiB", got[0].UsableMiB())
	}
	last := got[2]
	if last.Index != 2 || last.Minor != 77 || last.NUMANode != -1 || last.ComputeMajor != 7 || last.ComputeMinor != 5 ||
		last.Architecture != "Turing" || len(last.NVLinks) != 0 || last.PCIBusID != "00000000:F1:00.0" {
		t.Errorf("the T4: %+v", last)
	}
}

func TestFactsThatDecideWhetherMPSIsSupported(t *testing.T) {
	for _, c := range []struct {
		name  string
		steer func(*nvmlsim.Spec)
		want  func(gpu.Device) bool
	}{
		{"a vGPU slice", func(s *nvmlsim.Spec) { s.GPUs[0].Virtualization = 2 }, func(d gpu.Device) bool { return d.VGPU }},
		{"passed through to a virtual machine", func(s *nvmlsim.Spec) { s.GPUs[0].Virtualization = 1 }, func(d gpu.Device) bool { return !d.VGPU }},
		{"virtualization unknown", func(s *nvmlsim.Spec) { s.GPUs[0].Virtualization = -1 }, func(d gpu.Device) bool { return !d.VGPU }},
		{"virtualization fails", func(s *nvmlsim.Spec) {
			s.Faults = []nvmlsim.Fault{{Call: "DeviceGetVirtualizationMode", Error: "UNKNOWN"}}
		}, func(d gpu.Device) bool { return !d.VGPU && d.Err == nil }},
		{"MIG on", func(s *nvmlsim.Spec) { s.GPUs[0].MIG = 1 }, func(d gpu.Device) bool { return d.MIG }},
		{"MIG unknown to it", func(s *nvmlsim.Spec) { s.GPUs[0].MIG = -1 }, func(d gpu.Device) bool { return !d.MIG }},
		{"an older driver", func(s *nvmlsim.Spec) { s.Driver = "535.261.03" }, func(d gpu.Device) bool { return d.DriverBranch == 535 }},
		{"a driver version that is none", func(s *nvmlsim.Spec) { s.Driver = "unknown" }, func(d gpu.Device) bool { return d.DriverBranch == 0 && d.DriverVersion == "unknown" }},
		{"memory v2 unknown to NVML", func(s *nvmlsim.Spec) { s.Variants = []string{"memory-v2-not-supported"} },
			func(d gpu.Device) bool { return d.TotalMiB == 143771 && d.ReservedMiB == 0 }},
		{"part of a MiB", func(s *nvmlsim.Spec) { s.GPUs[0].TotalBytes, s.GPUs[0].ReservedBytes = 10<<20-1, 1<<20+1 },
			func(d gpu.Device) bool { return d.TotalMiB == 9 && d.ReservedMiB == 2 }},
		{"no minor", func(s *nvmlsim.Spec) {
			s.Faults = []nvmlsim.Fault{{Call: "DeviceGetMinorNumber", Error: "NOT_SUPPORTED"}}
		}, func(d gpu.Device) bool { return d.Minor == -1 && d.Err == nil }},
		{"a fact that must be known fails", func(s *nvmlsim.Spec) {
			s.Faults = []nvmlsim.Fault{{Call: "DeviceGetName", Error: "UNKNOWN", UUID: s.GPUs[0].UUID}}
		}, func(d gpu.Device) bool {
			return d.Err != nil && strings.HasPrefix(d.Err.Error(), "DeviceGetName of GPU "+d.UUID)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			steer(t, c.steer)
			all := devices(t, open(t, time.Minute))
			if !c.want(all[0]) {
				t.Errorf("%+v", all[0])
			}
			if all[1].Err != nil {
				t.Errorf("the other GPU: %v", all[1].Err)
			}
		})
	}
}

func TestProcesses(t *testing.T) {
	spec, err := sim.Spec()
	if err != nil {
		t.Fatal(err)
	}
	one, other := spec.GPUs[0].UUID, spec.GPUs[1].UUID
	server := start(t, "nvidia-cuda-mps-server", holding{one, nvmlsim.KindServer, 30})
	capped := start(t, "cuda-client", holding{one, nvmlsim.KindClient, 2048})
	stray := start(t, "cuda-client", holding{one, nvmlsim.KindCompute, 512}, holding{one, nvmlsim.KindCompute, 1}, holding{other, nvmlsim.KindCompute, 7})
	start(t, "some-other", holding{one, nvmlsim.KindCompute, 9999})
	type processes = []gpu.Process
	for _, c := range []struct {
		variant string
		want    processes
	}{
		{"", processes{{server.pid, 30, gpu.KindCompute}, {capped.pid, 2048, gpu.KindMPSClient}, {stray.pid, 513, gpu.KindCompute}}},
		{"mps-clients-in-compute-list", processes{{server.pid, 30, gpu.KindCompute}, {capped.pid, 2048, gpu.KindMPSClient}, {stray.pid, 513, gpu.KindCompute}}},
		{"mps-clients-only-in-compute-list", processes{{server.pid, 30, gpu.KindCompute}, {capped.pid, 2048, gpu.KindCompute}, {stray.pid, 513, gpu.KindCompute}}},
		{"process-memory-not-available", processes{{server.pid, -1, gpu.KindCompute}, {capped.pid, -1, gpu.KindMPSClient}, {stray.pid, -1, gpu.KindCompute}}},
	} {
		t.Run("variant "+c.variant, func(t *testing.T) {
			steer(t, func(s *nvmlsim.Spec) {
				if c.variant != "" {
					s.Variants = []string{c.variant}
				}
			})
			n := open(t, time.Minute)
			sample, err := n.Sample(t.Context(), one)
			if err != nil {
				t.Fatal(err)
			}
			want := byPID(c.want)
			if !reflect.DeepEqual(sample.Processes, want) {
				t.Errorf("got  %v\nwant %v", sample.Processes, want)
			}
			if u := (gpu.Usage{UsedMiB: 2591, TotalMiB: 143771, GPUPercent: 60, MemoryPercent: 30}); sample.Usage != u {
				t.Errorf("usage %+v, want %+v", sample.Usage, u)
			}
			got, err := n.Processes(t.Context(), other)
			if err != nil || len(got) != 1 || got[0].PID != stray.pid {
				t.Errorf("on the other GPU: %v, %v", got, err)
			}
		})
	}
	n := open(t, time.Minute)
	capped.kill()
	until(t, "a killed client is gone", func() bool {
		got, err := n.Processes(t.Context(), one)
		return err == nil && len(got) == 2
	})
	stray.kill()
	server.kill()
	until(t, "the GPU is empty", func() bool {
		u, err := n.Usage(t.Context(), one)
		return err == nil && u == gpu.Usage{TotalMiB: 143771}
	})
}

func byPID(p []gpu.Process) []gpu.Process {
	for i := range p {
		for j := i; j > 0 && p[j].PID < p[j-1].PID; j-- {
			p[j], p[j-1] = p[j-1], p[j]
		}
	}
	return p
}

func TestMoreProcessesThanTheFirstBufferHolds(t *testing.T) {
	spec, err := sim.Spec()
	if err != nil {
		t.Fatal(err)
	}
	uuid := spec.GPUs[0].UUID
	for range 9 {
		start(t, "cuda-client", holding{uuid, nvmlsim.KindClient, 10})
	}
	n := open(t, time.Minute)
	until(t, "nine clients", func() bool {
		got, err := n.Processes(t.Context(), uuid)
		return err == nil && len(got) == 9
	})
}

func TestComputeMode(t *testing.T) {
	spec := steer(t, func(*nvmlsim.Spec) {})
	uuid := spec.GPUs[0].UUID
	n := open(t, time.Minute)
	mode := func(n *gpu.NVML, uuid string) gpu.ComputeMode {
		t.Helper()
		m, err := n.ComputeMode(t.Context(), uuid)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	if m := mode(n, uuid); m != gpu.ComputeDefault {
		t.Errorf("at first %s", m)
	}
	if err := n.SetComputeMode(t.Context(), uuid, gpu.ComputeExclusiveProcess); err != nil {
		t.Fatal(err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := n.ComputeMode(t.Context(), uuid); !errors.Is(err, gpu.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	n = open(t, time.Minute)
	if m, other := mode(n, uuid), mode(n, spec.GPUs[1].UUID); m != gpu.ComputeExclusiveProcess || other != gpu.ComputeDefault {
		t.Errorf("after reopening %s, and the other GPU %s", m, other)
	}
	if err := sim.SetComputeMode(uuid, 2); err != nil {
		t.Fatal(err)
	}
	if m := mode(n, uuid); m != gpu.ComputeProhibited {
		t.Errorf("set by a stranger: %s", m)
	}
	if err := sim.SetVariant("compute-mode-does-not-stick", true); err != nil {
		t.Fatal(err)
	}
	err := n.SetComputeMode(t.Context(), uuid, gpu.ComputeDefault)
	if want := "compute mode of GPU " + uuid + ": set to DEFAULT, reads PROHIBITED"; err == nil || err.Error() != want {
		t.Errorf("a mode that does not stick: %v", err)
	}
	if err := sim.SetVariant("compute-mode-does-not-stick", false); err != nil {
		t.Fatal(err)
	}
	if err := n.SetComputeMode(t.Context(), uuid, gpu.ComputeDefault); err != nil {
		t.Error(err)
	}
	if err := sim.Fail("DeviceSetComputeMode", uuid, "NO_PERMISSION"); err != nil {
		t.Fatal(err)
	}
	if err := n.SetComputeMode(t.Context(), uuid, gpu.ComputeDefault); !errors.Is(err, gpu.ErrNoPermission) {
		t.Errorf("without permission: %v", err)
	}
}

func TestUnknownGPU(t *testing.T) {
	n := open(t, time.Minute)
	if _, err := n.Sample(t.Context(), "GPU-00000000-0000-0000-0000-000000000000"); !errors.Is(err, gpu.ErrUnknownGPU) {
		t.Error(err)
	}
}

func TestOneLibraryAndOneUser(t *testing.T) {
	n := open(t, time.Minute)
	if _, err := gpu.Open(sim.Library()); err == nil || !strings.Contains(err.Error(), "open already") {
		t.Errorf("a second user: %v", err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := gpu.Open("/nonexistent/libnvidia-ml.so.1"); err == nil || !strings.Contains(err.Error(), "can load one only") {
		t.Errorf("a second library: %v", err)
	}
}

func TestOpenFails(t *testing.T) {
	t.Run("no library", func(t *testing.T) {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(self)
		cmd.Env = append(os.Environ(), "GPU_TEST_OPEN=/nonexistent/libnvidia-ml.so.1")
		out, err := cmd.CombinedOutput()
		want := "no NVML library: /nonexistent/libnvidia-ml.so.1 cannot be loaded; install the NVIDIA driver on this machine, or name its libnvidia-ml.so.1 in gpu.nvmlLibrary\n"
		if string(out) != want || err != nil {
			t.Errorf("%q, %v", out, err)
		}
	})
	for _, c := range []struct {
		name, err string
		is        error
	}{
		{"DRIVER_NOT_LOADED", "NVIDIA driver not loaded: load it (modprobe nvidia) or install the driver for this kernel", gpu.ErrNoDriver},
		{"LIB_RM_VERSION_MISMATCH", "NVML library " + sim.Library() + ": its version is not the loaded kernel driver's; reboot or reload the driver", nil},
		{"UNKNOWN", "NVML library " + sim.Library() + ": Init: Unknown Error", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			steer(t, func(s *nvmlsim.Spec) { s.Faults = []nvmlsim.Fault{{Call: "Init", Error: c.name}} })
			_, err := gpu.Open(sim.Library())
			if err == nil || err.Error() != c.err || c.is != nil && !errors.Is(err, c.is) {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestManyAskAtOnce(t *testing.T) {
	spec := steer(t, func(s *nvmlsim.Spec) {})
	n := open(t, time.Minute)
	events, err := n.Xids(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var wait sync.WaitGroup
	for i := range 8 {
		uuid := spec.GPUs[i%2].UUID
		wait.Go(func() {
			for range 20 {
				if _, err := n.Sample(t.Context(), uuid); err != nil {
					t.Error(err)
				}
				if _, err := n.Devices(t.Context()); err != nil {
					t.Error(err)
				}
				if err := n.SetComputeMode(t.Context(), uuid, gpu.ComputeDefault); err != nil {
					t.Error(err)
				}
				n.Hung()
			}
		})
	}
	wait.Go(func() {
		for range 20 {
			if err := sim.Xid(spec.GPUs[0].UUID, 31); err != nil {
				t.Error(err)
			}
		}
	})
	for range 20 {
		if x := <-events; x.Code != 31 || x.Err != nil {
			t.Errorf("%+v", x)
		}
	}
	wait.Wait()
}

func BenchmarkSample(b *testing.B) {
	spec, err := sim.Spec()
	if err != nil {
		b.Fatal(err)
	}
	for range 6 {
		start(b, "cuda-client", holding{spec.GPUs[0].UUID, nvmlsim.KindClient, 1024})
	}
	n := open(b, time.Minute)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := n.Sample(b.Context(), spec.GPUs[0].UUID); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkRound is what an agent does every few seconds: all of 8 GPUs with 6 clients each, the process lists not
// read by anyone just before. cpu-us/op is this process's time in user and kernel mode.
func BenchmarkRound(b *testing.B) {
	spec := steer(b, func(s *nvmlsim.Spec) {
		for i := range 6 {
			g := nvmlsim.H200()
			g.UUID, g.PCIBusID = fmt.Sprintf("GPU-00000000-0000-4000-8000-%012d", i), fmt.Sprintf("00000000:8%d:00.0", i)
			s.GPUs = append(s.GPUs, g)
		}
	})
	for _, g := range spec.GPUs {
		for range 6 {
			start(b, "cuda-client", holding{g.UUID, nvmlsim.KindClient, 1024})
		}
	}
	n := open(b, time.Minute)
	if _, err := n.Xids(b.Context()); err != nil {
		b.Fatal(err)
	}
	stale := time.NewTicker(60 * time.Millisecond)
	defer stale.Stop()
	begin := cpuTime(b)
	for b.Loop() {
		<-stale.C
		for _, g := range spec.GPUs {
			if s, err := n.Sample(b.Context(), g.UUID); err != nil || len(s.Processes) != 6 {
				b.Fatal(s, err)
			}
		}
	}
	b.ReportMetric(float64((cpuTime(b)-begin).Microseconds())/float64(b.N), "cpu-us/op")
}

func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
