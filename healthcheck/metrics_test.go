package healthcheck_test

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/healthcheck"
)

func TestCollector(t *testing.T) {
	c := healthcheck.NewCollector(func() (api.Instance, []api.Task) {
		return api.Instance{
			DriverVersion: "580.159.03",
			GPUs: []api.GPU{{ID: "GPU-a", Index: 0, Name: "NVIDIA H100", SharingMode: api.ModeNvidiaMPS, TotalMemoryInMiB: 80000,
				RemainingMemoryInMiB: 59520, UsedMemoryInMiB: 18462, Held: true, MPS: api.MPS{State: "HELD", Restarts: 2, Failures: 1},
				Slices: []api.Slice{{TaskID: "t1", Family: "chat", Container: "main", MemoryInMiB: 20480, UsedMemoryInMiB: 18432}}}},
			Waiting: []api.Waiting{{Name: "big"}},
			Health:  api.Health{Details: []api.HealthDetail{{Type: "ACCELERATED_COMPUTE", Status: api.HealthOK}}},
		}, []api.Task{{LastStatus: api.StatusRunning}}
	})
	if problems, err := testutil.GatherAndLint(registry(t, c)); err != nil || len(problems) > 0 {
		t.Errorf("lint: %v %v", problems, err)
	}
	want := `
# HELP berth_gpu_held 1 while capped containers may start on the GPU.
# TYPE berth_gpu_held gauge
berth_gpu_held{gpu="GPU-a",index="0"} 1
# HELP berth_gpu_memory_allocated_bytes Sum of the caps on the GPU.
# TYPE berth_gpu_memory_allocated_bytes gauge
berth_gpu_memory_allocated_bytes{gpu="GPU-a",index="0"} 2.147483648e+10
# HELP berth_gpu_sharing_mode 1 for the GPU's mode, 0 for the others.
# TYPE berth_gpu_sharing_mode gauge
berth_gpu_sharing_mode{gpu="GPU-a",index="0",mode="DEDICATED"} 0
berth_gpu_sharing_mode{gpu="GPU-a",index="0",mode="IDLE"} 0
berth_gpu_sharing_mode{gpu="GPU-a",index="0",mode="NVIDIA_MPS"} 1
# HELP berth_mps_restarts_total MPS control daemons started after the first.
# TYPE berth_mps_restarts_total counter
berth_mps_restarts_total{gpu="GPU-a",index="0"} 2
# HELP berth_slice_memory_used_bytes GPU memory that one container uses, by NVML.
# TYPE berth_slice_memory_used_bytes gauge
berth_slice_memory_used_bytes{container="main",family="chat",gpu="GPU-a",task="t1"} 1.9327352832e+10
# HELP berth_tasks_waiting Wanted tasks that no GPU can take now.
# TYPE berth_tasks_waiting gauge
berth_tasks_waiting 1
`
	if err := testutil.CollectAndCompare(c, strings.NewReader(want), "berth_gpu_held", "berth_gpu_memory_allocated_bytes",
		"berth_gpu_sharing_mode", "berth_mps_restarts_total", "berth_slice_memory_used_bytes", "berth_tasks_waiting"); err != nil {
		t.Error(err)
	}
}

func registry(t *testing.T, c prometheus.Collector) *prometheus.Registry {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(c); err != nil {
		t.Fatal(err)
	}
	return r
}
