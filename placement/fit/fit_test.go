package fit_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/berth-gpu/berth/placement/fit"
	"pgregory.net/rapid"
)

func gpu(index int, mode fit.Mode, allocated int64) fit.GPU {
	g := fit.GPU{
		ID: fmt.Sprintf("GPU-%d", index), Index: index, Mode: mode,
		TotalMiB: 80000, AllocatedMiB: allocated, MaxClients: 48,
	}
	if mode == fit.MPS {
		g.Clients = 1
	}
	return g
}

func machine(gpus ...fit.GPU) fit.Machine {
	return fit.Machine{GPUs: gpus, CPU: 4096, MemoryMiB: 8192, Ports: map[fit.Port]bool{}}
}

func share(mib int64) fit.Demand { return fit.Demand{GPUMemoryMiB: mib, Clients: 1} }

func TestPlace(t *testing.T) {
	full := gpu(0, fit.MPS, 0)
	full.Clients = 48
	closed := gpu(0, fit.MPS, 0)
	closed.Closed = "DRAINING: the daemon died"
	old := gpu(0, fit.Idle, 0)
	old.NoSharing = "driver branch 535"
	busyPort := machine()
	busyPort.Ports[fit.Port{Number: 80, Protocol: "tcp"}] = true

	for _, tt := range []struct {
		name string
		m    fit.Machine
		d    fit.Demand
		want string // GPUs, or the reasons, one a line
	}{
		{"no GPU asked for", machine(), fit.Demand{CPU: 10}, ""},
		{"best fit leaves the least", machine(gpu(0, fit.Idle, 0), gpu(1, fit.MPS, 50000)), share(20480), "GPU-1"},
		{"only the idle one has room", machine(gpu(0, fit.Idle, 0), gpu(1, fit.MPS, 70000)), share(20480), "GPU-0"},
		{"among equals the one shared already", machine(gpu(0, fit.Idle, 0), gpu(1, fit.MPS, 0)), share(1), "GPU-1"},
		{"an exact fit", machine(gpu(0, fit.MPS, 59520)), share(20480), "GPU-0"},
		{"each GPU says what it lacks", machine(gpu(0, fit.MPS, 61440), gpu(1, fit.MPS, 51200)), share(30720),
			"GPU 0 (GPU-0): 30720 MiB wanted, 18560 MiB free: 12160 MiB short\nGPU 1 (GPU-1): 30720 MiB wanted, 28800 MiB free: 1920 MiB short"},
		{"never on a whole-GPU task's", machine(gpu(0, fit.Dedicated, 80000)), share(1), "GPU 0 (GPU-0): a whole-GPU task has it"},
		{"larger than the GPU", machine(gpu(0, fit.Idle, 0)), share(80001), "GPU 0 (GPU-0): 80001 MiB wanted, the whole GPU has 80000 MiB: it can never fit"},
		{"client limit", machine(full), share(1), "GPU 0 (GPU-0): 1 MPS clients wanted, room for 0"},
		{"closed", machine(closed), share(1), "GPU 0 (GPU-0): closed to starts: DRAINING: the daemon died"},
		{"MPS unsupported", machine(old), share(1), "GPU 0 (GPU-0): cannot be shared: driver branch 535"},
		{"a whole GPU where MPS is unsupported", machine(old), fit.Demand{WholeGPUs: 1}, "GPU-0"},
		{"a whole GPU never on a shared one", machine(gpu(0, fit.MPS, 1)), fit.Demand{WholeGPUs: 1},
			"1 idle GPUs wanted, 0 there\nGPU 0 (GPU-0): shared by 1 containers, a whole GPU is wanted"},
		{"two whole GPUs", machine(gpu(0, fit.Idle, 0), gpu(1, fit.Idle, 0), gpu(2, fit.Idle, 0)), fit.Demand{WholeGPUs: 2}, "GPU-0 GPU-1"},
		{"all GPUs, one shared", machine(gpu(0, fit.Idle, 0), gpu(1, fit.MPS, 5)), fit.Demand{AllGPUs: true},
			"2 idle GPUs wanted, 1 there\nGPU 1 (GPU-1): shared by 1 containers, a whole GPU is wanted"},
		{"no GPU here", machine(), share(1), "this machine has no GPU"},
		{"CPU, memory and a port", busyPort, fit.Demand{CPU: 5000, MemoryMiB: 9000, Ports: []fit.Port{{Number: 80, Protocol: "tcp"}}},
			"5000 CPU units wanted, 4096 free: 904 short\n9000 MiB of host memory wanted, 8192 MiB free: 808 MiB short\nhost port 80/tcp is taken"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			gpus, reasons := fit.Place(tt.m, tt.d)
			got := strings.Join(gpus, " ")
			if reasons != nil {
				var lines []string
				for _, r := range reasons {
					lines = append(lines, r.String())
				}
				got = strings.Join(lines, "\n")
			}
			if got != tt.want {
				t.Errorf("got:\n%s\nwant:\n%s", got, tt.want)
			}
		})
	}
}

// Under any arrivals and departures: no GPU over, no mode mixed, and no task
// waits that some GPU could take.
func TestPlaceHolds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := machine()
		m.CPU, m.MemoryMiB = 1<<40, 1<<40
		for i := range rapid.IntRange(1, 4).Draw(t, "gpus") {
			m.GPUs = append(m.GPUs, gpu(i, fit.Idle, 0))
		}
		type placed struct {
			gpus []int
			d    fit.Demand
		}
		var tasks []placed
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			if len(tasks) > 0 && rapid.Bool().Draw(t, "leave") {
				i := rapid.IntRange(0, len(tasks)-1).Draw(t, "which")
				for _, g := range tasks[i].gpus {
					apply(&m.GPUs[g], tasks[i].d, -1)
				}
				tasks = slices.Delete(tasks, i, i+1)
				continue
			}
			d := share(rapid.Int64Range(1, 90000).Draw(t, "mib"))
			if rapid.IntRange(0, 3).Draw(t, "kind") == 0 {
				d = fit.Demand{WholeGPUs: rapid.IntRange(1, 3).Draw(t, "whole")}
			}
			ids, reasons := fit.Place(m, d)
			if (ids == nil) == (reasons == nil) {
				t.Fatalf("placed %v with reasons %v", ids, reasons)
			}
			if ids == nil {
				if d.WholeGPUs == 0 {
					for _, g := range m.GPUs {
						if g.Mode != fit.Dedicated && g.TotalMiB-g.AllocatedMiB >= d.GPUMemoryMiB && g.Clients < g.MaxClients {
							t.Fatalf("%d MiB waits though %s has room: %v", d.GPUMemoryMiB, g.ID, reasons)
						}
					}
				}
				continue
			}
			p := placed{d: d}
			for _, id := range ids {
				i := slices.IndexFunc(m.GPUs, func(g fit.GPU) bool { return g.ID == id })
				if m.GPUs[i].Mode == fit.Dedicated || (d.WholeGPUs > 0 && m.GPUs[i].Mode != fit.Idle) {
					t.Fatalf("placed on %s in mode %s", id, m.GPUs[i].Mode)
				}
				apply(&m.GPUs[i], d, 1)
				p.gpus = append(p.gpus, i)
			}
			tasks = append(tasks, p)
			for _, g := range m.GPUs {
				if g.AllocatedMiB > g.TotalMiB || g.Clients > g.MaxClients {
					t.Fatalf("%s is over: %+v", g.ID, g)
				}
			}
		}
	})
}

func apply(g *fit.GPU, d fit.Demand, sign int64) {
	if d.WholeGPUs > 0 {
		g.Mode, g.AllocatedMiB = fit.Dedicated, g.TotalMiB
		if sign < 0 {
			g.Mode, g.AllocatedMiB = fit.Idle, 0
		}
		return
	}
	g.AllocatedMiB += sign * d.GPUMemoryMiB
	g.Clients += int(sign) * d.Clients
	g.Mode = fit.MPS
	if g.Clients == 0 {
		g.Mode = fit.Idle
	}
}
