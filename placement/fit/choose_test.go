package fit_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/berth-gpu/berth/placement/fit"
	"pgregory.net/rapid"
)

func at(id string, m fit.Machine) fit.Candidate { return fit.Candidate{ID: id, Machine: m} }

func barred(c fit.Candidate, r fit.Reason) fit.Candidate {
	c.Barred = &r
	return c
}

func TestChoose(t *testing.T) {
	idle, half := gpu(0, fit.Idle, 0), gpu(0, fit.MPS, 40000)
	small := gpu(0, fit.Idle, 0)
	small.TotalMiB = 24000
	other := gpu(0, fit.MPS, 40000)
	other.Trust = "team-a"
	poor := machine(half)
	poor.MemoryMiB = 100
	two := func() fit.Machine { return machine(idle, gpu(1, fit.Idle, 0)) }
	whole := func(n int) fit.Demand { return fit.Demand{WholeGPUs: n} }

	for _, tt := range []struct {
		name       string
		candidates []fit.Candidate
		d          fit.Demand
		want       string
	}{
		{"the GPU left with the least", []fit.Candidate{at("a", machine(idle)), at("b", machine(half)), at("c", machine(idle))}, share(20000), "b: GPU-0"},
		{"a small GPU before a large one", []fit.Candidate{at("a", machine(idle)), at("b", machine(small))}, share(20000), "b: GPU-0"},
		{"among equals one that is shared", []fit.Candidate{at("a", machine(idle)), at("b", machine(gpu(0, fit.MPS, 0)))}, share(1), "b: GPU-0"},
		{"among equals the lowest id", []fit.Candidate{at("b", machine(half)), at("a", machine(half))}, share(1), "a: GPU-0"},
		{"host memory counts", []fit.Candidate{at("a", machine(idle)), at("b", poor)}, fit.Demand{GPUMemoryMiB: 1, Clients: 1, MemoryMiB: 200}, "a: GPU-0"},
		{"not a barred one", []fit.Candidate{barred(at("a", machine(half)), fit.Reason{Code: fit.Draining}), at("b", machine(idle))}, share(1), "b: GPU-0"},
		{"not with another trust domain", []fit.Candidate{at("a", machine(other)), at("b", machine(idle))}, share(1), "b: GPU-0"},
		{"with its own trust domain", []fit.Candidate{at("a", machine(other)), at("b", machine(idle))}, fit.Demand{GPUMemoryMiB: 1, Clients: 1, Trust: "team-a"}, "a: GPU-0"},
		{"a whole GPU from the fullest machine", []fit.Candidate{at("a", two()), at("b", machine(idle, gpu(1, fit.MPS, 9)))}, whole(1), "b: GPU-0"},
		{"two whole GPUs", []fit.Candidate{at("a", machine(idle)), at("b", two())}, whole(2), "b: GPU-0 GPU-1"},
		{"no GPU asked for: none is kept from others", []fit.Candidate{at("a", machine(idle)), at("b", machine())}, fit.Demand{CPU: 1}, "b: "},
		{"nowhere", []fit.Candidate{at("a", machine(half))}, share(50000), "none"},
		{"an empty fleet", nil, share(1), "none"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := "none"
			if id, gpus, ok := fit.Choose(tt.candidates, tt.d); ok {
				got = id + ": " + strings.Join(gpus, " ")
			}
			if got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

func TestExplain(t *testing.T) {
	near, far, closed, dedicated := gpu(0, fit.MPS, 61000), gpu(1, fit.MPS, 79000), gpu(0, fit.Idle, 0), gpu(1, fit.Dedicated, 80000)
	closed.Closed = "CLOSED: the daemon starts"
	candidates := []fit.Candidate{
		at("a", machine(near, far)),
		at("b", machine(closed, dedicated)),
		barred(at("c", machine(near, far, closed)), fit.Reason{Code: fit.Draining, Detail: "driver update"}),
		at("d", machine()),
		at("e", fit.Machine{GPUs: []fit.GPU{near}, CPU: 90, MemoryMiB: 8192}),
		barred(at("f", machine(near)), fit.Reason{Code: fit.Lost}),
	}
	for _, tt := range []struct {
		name string
		d    fit.Demand
		want string
	}{
		{"a shared task", fit.Demand{CPU: 100, GPUMemoryMiB: 20000, Clients: 1}, `
GPU_CLOSED 0 1 b: GPU 0 (GPU-0): closed to starts: CLOSED: the daemon starts
GPU_MEMORY 0 2 a: GPU 0 (GPU-0): 20000 MiB wanted, 19000 MiB free: 1000 MiB short
CPU 1 1 e: 100 CPU units wanted, 90 free: 10 short
GPU_DEDICATED 0 1 b: GPU 1 (GPU-1): a whole-GPU task has it
DRAINING 1 3 c: it is draining: driver update
LOST 1 1 f: its agent has not been heard for so long that its tasks are started elsewhere
NO_GPU 1 0 d: this machine has no GPU
free 2 0 of 6 9`},
		{"whole GPUs", fit.Demand{WholeGPUs: 2}, `
GPU_CLOSED 0 1 b: GPU 0 (GPU-0): closed to starts: CLOSED: the daemon starts
GPU_DEDICATED 0 1 b: GPU 1 (GPU-1): a whole-GPU task has it
GPU_SHARED 0 3 a: GPU 0 (GPU-0): shared by 1 containers, a whole GPU is wanted
DRAINING 1 3 c: it is draining: driver update
LOST 1 1 f: its agent has not been heard for so long that its tasks are started elsewhere
NO_GPU 1 0 d: this machine has no GPU
free 3 0 of 6 9`},
		{"a task without GPU", fit.Demand{MemoryMiB: 8000}, `
DRAINING 1 3 c: it is draining: driver update
LOST 1 1 f: its agent has not been heard for so long that its tasks are started elsewhere
free 4 5 of 6 9`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := drawn(fit.Explain(candidates, tt.d)); got != tt.want {
				t.Errorf("got:%s\nwant:%s", got, tt.want)
			}
		})
	}
	if got := drawn(fit.Explain([]fit.Candidate{at("a", machine(gpu(0, fit.Idle, 0), gpu(1, fit.MPS, 1)))}, fit.Demand{WholeGPUs: 2})); got != `
TOO_FEW_IDLE_GPUS 0 1 a: 2 idle GPUs wanted, 1 there
GPU_SHARED 0 1 a: GPU 1 (GPU-1): shared by 1 containers, a whole GPU is wanted
free 1 0 of 1 2` {
		t.Errorf("idle GPUs, and too few of them:%s", got)
	}
}

func drawn(e fit.Explanation) string {
	var b strings.Builder
	for _, o := range e.RuledOut {
		fmt.Fprintf(&b, "\n%s %d %d %s: %s", o.Code, o.Machines, o.GPUs, o.Instance, o.Nearest)
	}
	fmt.Fprintf(&b, "\nfree %d %d of %d %d", e.FreeMachines, e.FreeGPUs, e.Machines, e.GPUs)
	return b.String()
}

func anyMachine(t *rapid.T) fit.Machine {
	m := machine()
	m.CPU, m.MemoryMiB = rapid.Int64Range(-1, 4).Draw(t, "cpu"), rapid.Int64Range(-1, 4).Draw(t, "memory")
	if rapid.Bool().Draw(t, "port") {
		m.Ports[fit.Port{Number: 80, Protocol: "tcp"}] = true
	}
	for i := range rapid.IntRange(0, 4).Draw(t, "gpus") {
		g := fit.GPU{ID: fmt.Sprintf("GPU-%d", i), Index: i, Mode: fit.Idle, TotalMiB: rapid.Int64Range(5, 8).Draw(t, "total"), MaxClients: 3}
		switch rapid.IntRange(0, 3).Draw(t, "mode") {
		case 0:
			g.Mode, g.AllocatedMiB, g.Clients = fit.Dedicated, g.TotalMiB, 1
		case 1, 2:
			g.Mode, g.AllocatedMiB, g.Clients = fit.MPS, rapid.Int64Range(1, 9).Draw(t, "allocated"), rapid.IntRange(1, 4).Draw(t, "clients")
			g.Trust = rapid.SampledFrom([]string{"", "", "x"}).Draw(t, "trust")
		}
		if rapid.IntRange(0, 5).Draw(t, "closed") == 0 {
			g.Closed = "CLOSED"
		}
		if rapid.IntRange(0, 9).Draw(t, "nosharing") == 0 {
			g.NoSharing = "old"
		}
		m.GPUs = append(m.GPUs, g)
	}
	return m
}

func anyDemand(t *rapid.T) fit.Demand {
	d := fit.Demand{CPU: rapid.Int64Range(0, 2).Draw(t, "wantCPU"), MemoryMiB: rapid.Int64Range(0, 2).Draw(t, "wantMemory")}
	if rapid.IntRange(0, 3).Draw(t, "wantPort") == 0 {
		d.Ports = []fit.Port{{Number: 80, Protocol: "tcp"}}
	}
	switch rapid.IntRange(0, 5).Draw(t, "kind") {
	case 0:
	case 1:
		d.WholeGPUs = rapid.IntRange(1, 3).Draw(t, "whole")
	case 2:
		d.AllGPUs = true
	default:
		d.GPUMemoryMiB, d.Clients = rapid.Int64Range(1, 8).Draw(t, "mib"), rapid.IntRange(1, 2).Draw(t, "containers")
		d.Trust = rapid.SampledFrom([]string{"", "", "x"}).Draw(t, "domain")
	}
	return d
}

// Choose takes a machine exactly where Place says that one takes the demand, the GPUs
// that Place gives there, and whatever the order of the candidates; the counts of
// Explain add up to the fleet's; and all of it goes through JSON unchanged.
func TestChooseAndExplainAgreeWithPlace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var candidates []fit.Candidate
		for i := range rapid.IntRange(0, 5).Draw(t, "machines") {
			c := at(fmt.Sprintf("m%d", i), anyMachine(t))
			if rapid.IntRange(0, 5).Draw(t, "barred") == 0 {
				c = barred(c, fit.Reason{Code: rapid.SampledFrom([]fit.Code{fit.Lost, fit.Disconnected, fit.Draining}).Draw(t, "why")})
			}
			candidates = append(candidates, c)
		}
		d := anyDemand(t)
		id, gpus, ok := fit.Choose(candidates, d)

		fits := map[string][]string{}
		for _, c := range candidates {
			if place, reasons := fit.Place(c.Machine, d); len(reasons) == 0 && c.Barred == nil {
				fits[c.ID] = place
			}
		}
		if ok != (len(fits) > 0) || ok && !slices.Equal(fits[id], gpus) {
			t.Fatalf("chose %s %v %v; Place: %v", id, gpus, ok, fits)
		}
		shuffled := rapid.Permutation(candidates).Draw(t, "order")
		if id2, gpus2, _ := fit.Choose(shuffled, d); id2 != id || !slices.Equal(gpus, gpus2) {
			t.Fatalf("in another order %s %v, not %s %v", id2, gpus2, id, gpus)
		}

		e := fit.Explain(candidates, d)
		machines, all := e.FreeMachines, e.FreeGPUs
		for i, o := range e.RuledOut {
			machines += o.Machines
			all += o.GPUs
			if o.Machines == 0 && o.GPUs == 0 || o.Nearest.Code != o.Code {
				t.Fatalf("ruledOut[%d]: %+v", i, o)
			}
		}
		if machines != len(candidates) || machines != e.Machines || all != e.GPUs {
			t.Fatalf("%d machines and %d GPUs add up to %d and %d", e.Machines, e.GPUs, machines, all)
		}
		if d.GPUMemoryMiB > 0 && (e.FreeGPUs > 0) != ok {
			t.Fatalf("%d GPUs free, and ok is %v", e.FreeGPUs, ok)
		}

		if len(candidates) > 0 {
			in := fit.PlaceIn{Machine: candidates[0].Machine, Demand: d}
			data, err := json.Marshal(in)
			if err != nil {
				t.Fatal(err)
			}
			var back fit.PlaceIn
			if err := json.Unmarshal(data, &back); err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(in.Do(), back.Do()) {
				t.Fatalf("through JSON: %+v, not %+v", back.Do(), in.Do())
			}
		}
	})
}

func TestPortText(t *testing.T) {
	for _, text := range []string{"", "80", "x/tcp", "/"} {
		if err := new(fit.Port).UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q is taken", text)
		}
	}
}

// A fleet of 1,000 machines with 8 GPUs each, half full.
func BenchmarkChoose(b *testing.B) {
	var candidates []fit.Candidate
	for i := range 1000 {
		m := machine()
		for g := range 8 {
			m.GPUs = append(m.GPUs, gpu(g, fit.MPS, int64(i*8+g)%80000))
		}
		candidates = append(candidates, at(fmt.Sprintf("m%04d", i), m))
	}
	b.Run("fits", func(b *testing.B) {
		for b.Loop() {
			fit.Choose(candidates, share(20480))
		}
	})
	b.Run("explain", func(b *testing.B) {
		for b.Loop() {
			fit.Explain(candidates, share(80001))
		}
	})
}
