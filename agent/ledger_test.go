package agent

import (
	"testing"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/config/taskdef"
	"pgregory.net/rapid"
)

func testCapacity() capacity {
	return capacity{cpu: 2048, memoryMiB: 4096,
		gpus:  []gpuCapacity{{"GPU-0", 80000, 48}, {"GPU-1", 80000, 48}},
		ports: []taskdef.Port{{Host: 22, Protocol: "tcp"}}}
}

func shares(id string, mib int64, gpus ...string) holding {
	return holding{id: id, demand: taskdef.Demand{GPUMemoryMiB: mib, SharedContainers: 1}, gpus: gpus}
}

func wholes(id string, gpus ...string) holding {
	return holding{id: id, demand: taskdef.Demand{WholeGPUs: len(gpus)}, gpus: gpus}
}

func TestLedgerRefuses(t *testing.T) {
	held := []holding{shares("a", 50000, "GPU-0"), {id: "b", demand: taskdef.Demand{CPU: 1024, MemoryMiB: 1024,
		Ports: []taskdef.Port{{Host: 80, Protocol: "tcp"}}}}}
	for _, tt := range []struct {
		name string
		t    holding
		want string
	}{
		{"a share that fits", shares("n", 30000, "GPU-0"), ""},
		{"one MiB too much", shares("n", 30001, "GPU-0"), "gpus[0]: 30001 MiB wanted, GPU-0 has 30000 MiB free of 80000"},
		{"a whole GPU that is shared", wholes("n", "GPU-0"), "gpus[0]: a whole GPU is wanted, GPU-0 is in use as NVIDIA_MPS"},
		{"an idle whole GPU", wholes("n", "GPU-1"), ""},
		{"one GPU twice", wholes("n", "GPU-1", "GPU-1"), "gpus[1]: GPU-1 is given twice"},
		{"no such GPU", shares("n", 1, "GPU-9"), "gpus[0]: GPU-9 is not a GPU of this machine"},
		{"no GPU chosen", shares("n", 1), "gpus: 0 given, the task definition asks for 1"},
		{"all GPUs, one missing", holding{id: "n", demand: taskdef.Demand{AllGPUs: true}, gpus: []string{"GPU-1"}}, "gpus: 1 given, the task definition asks for 2"},
		{"cpu", holding{id: "n", demand: taskdef.Demand{CPU: 1025}}, "cpu: 1025 units wanted, 1024 free"},
		{"memory", holding{id: "n", demand: taskdef.Demand{MemoryMiB: 3073}}, "memory: 3073 MiB wanted, 3072 MiB free"},
		{"a taken port", holding{id: "n", demand: taskdef.Demand{Ports: []taskdef.Port{{Host: 80, Protocol: "tcp"}}}}, "hostPort: 80/tcp is held by task b"},
		{"the other protocol", holding{id: "n", demand: taskdef.Demand{Ports: []taskdef.Port{{Host: 80, Protocol: "udp"}}}}, ""},
		{"a reserved port", holding{id: "n", demand: taskdef.Demand{Ports: []taskdef.Port{{Host: 22, Protocol: "tcp"}}}}, "hostPort: 22/tcp is held by the machine (reserved)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := books(testCapacity(), held)
			if got := l.refuse(tt.t); got != tt.want {
				t.Errorf("got  %q\nwant %q", got, tt.want)
			}
		})
	}
}

func TestLedgerContradictions(t *testing.T) {
	l := books(testCapacity(), []holding{shares("a", 1, "GPU-0"), wholes("b", "GPU-0"), shares("c", 1, "GPU-7")})
	if len(l.contradictions) != 2 {
		t.Errorf("got %q, want the mixed GPU and the missing one", l.contradictions)
	}
}

// Invariants 1 and 2 over any sequence of tasks, whatever GPU they come with.
func TestLedgerHolds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := testCapacity()
		var tasks []holding
		for i := range rapid.IntRange(1, 60).Draw(t, "steps") {
			if len(tasks) > 0 && rapid.Bool().Draw(t, "leave") {
				k := rapid.IntRange(0, len(tasks)-1).Draw(t, "which")
				tasks = append(tasks[:k:k], tasks[k+1:]...)
				continue
			}
			gpu := rapid.SampledFrom([]string{"GPU-0", "GPU-1"}).Draw(t, "gpu")
			n := shares(string(rune('a'+i)), rapid.Int64Range(1, 90000).Draw(t, "mib"), gpu)
			if rapid.IntRange(0, 4).Draw(t, "kind") == 0 {
				n = wholes(n.id, gpu)
			}
			l := books(c, tasks)
			if l.refuse(n) != "" {
				continue
			}
			tasks = append(tasks, n)
			l = books(c, tasks)
			if len(l.contradictions) > 0 {
				t.Fatalf("accepted a contradiction: %q", l.contradictions)
			}
			for _, g := range l.gpus {
				if g.allocatedMiB > g.allocatableMiB || g.clients > g.maxClients || (g.mode == api.ModeIdle) != (g.clients == 0) {
					t.Fatalf("over: %+v", g)
				}
			}
		}
	})
}
