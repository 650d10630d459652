package healthcheck

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/mps"
)

// Collector shows an agent's state as Prometheus metrics. It keeps nothing: each
// scrape reads what the agent shows at that moment.
type Collector struct {
	read func() (api.Instance, []api.Task)
}

// NewCollector makes a Collector of what read returns.
func NewCollector(read func() (api.Instance, []api.Task)) *Collector { return &Collector{read} }

var (
	gpuLabels = []string{"gpu", "index"}

	descInfo      = describe("gpu_info", "A GPU of this machine, always 1.", "gpu", "index", "name", "driver")
	descHeld      = describe("gpu_held", "1 while capped containers may start on the GPU.", gpuLabels...)
	descMode      = describe("gpu_sharing_mode", "1 for the GPU's mode, 0 for the others.", "gpu", "index", "mode")
	descState     = describe("mps_state", "1 for the state of the GPU's MPS supervisor, 0 for the others.", "gpu", "index", "state")
	descRestarts  = describe("mps_restarts_total", "MPS control daemons started after the first.", gpuLabels...)
	descFailures  = describe("mps_failures", "Failures within the restart budget's window.", gpuLabels...)
	descTotal     = describe("gpu_memory_allocatable_bytes", "GPU memory that tasks can have.", gpuLabels...)
	descAllocated = describe("gpu_memory_allocated_bytes", "Sum of the caps on the GPU.", gpuLabels...)
	descUsed      = describe("gpu_memory_used_bytes", "GPU memory in use, by NVML.", gpuLabels...)
	descSlices    = describe("gpu_slices", "Containers that hold a part of the GPU.", gpuLabels...)
	descCap       = describe("slice_memory_cap_bytes", "GPU memory cap of one container.", "gpu", "task", "family", "container")
	descSliceUsed = describe("slice_memory_used_bytes", "GPU memory that one container uses, by NVML.", "gpu", "task", "family", "container")
	descTasks     = describe("tasks", "Tasks by last status.", "status")
	descWaiting   = describe("tasks_waiting", "Wanted tasks that no GPU can take now.")
	descHealth    = describe("health", "1 for a check's status, 0 for the others.", "type", "status")
)

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("berth_"+name, help, labels, nil)
}

var states = []mps.Phase{mps.PhaseAbsent, mps.PhaseUnsupported, mps.PhaseStarting, mps.PhaseIdle, mps.PhaseServerStarting, mps.PhaseHeld,
	mps.PhaseReleasing, mps.PhaseDedicated, mps.PhaseDraining, mps.PhaseStopping, mps.PhaseBackoff, mps.PhaseQuarantined}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descInfo, descHeld, descMode, descState, descRestarts, descFailures, descTotal, descAllocated,
		descUsed, descSlices, descCap, descSliceUsed, descTasks, descWaiting, descHealth} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	in, tasks := c.read()
	for _, g := range in.GPUs {
		index := strconv.Itoa(g.Index)
		gauge(descInfo, 1, g.ID, index, g.Name, in.DriverVersion)
		gauge(descHeld, truth(g.Held), g.ID, index)
		for _, m := range []string{api.ModeIdle, api.ModeNvidiaMPS, api.ModeDedicated} {
			gauge(descMode, truth(g.SharingMode == m), g.ID, index, m)
		}
		for _, s := range states {
			gauge(descState, truth(g.MPS.State == string(s)), g.ID, index, string(s))
		}
		ch <- prometheus.MustNewConstMetric(descRestarts, prometheus.CounterValue, float64(g.MPS.Restarts), g.ID, index)
		gauge(descFailures, float64(g.MPS.Failures), g.ID, index)
		gauge(descTotal, bytes(g.TotalMemoryInMiB), g.ID, index)
		gauge(descAllocated, bytes(g.TotalMemoryInMiB-g.RemainingMemoryInMiB), g.ID, index)
		gauge(descUsed, bytes(g.UsedMemoryInMiB), g.ID, index)
		gauge(descSlices, float64(len(g.Slices)), g.ID, index)
		for _, s := range g.Slices {
			gauge(descCap, bytes(s.MemoryInMiB), g.ID, s.TaskID, s.Family, s.Container)
			gauge(descSliceUsed, bytes(s.UsedMemoryInMiB), g.ID, s.TaskID, s.Family, s.Container)
		}
	}
	count := map[string]int{api.StatusPending: 0, api.StatusRunning: 0, api.StatusDeactivating: 0, api.StatusStopped: 0}
	for _, t := range tasks {
		count[t.LastStatus]++
	}
	for s, n := range count {
		gauge(descTasks, float64(n), s)
	}
	gauge(descWaiting, float64(len(in.Waiting)))
	for _, d := range in.Health.Details {
		for _, s := range []string{api.HealthOK, api.HealthInitializing, api.HealthInsufficientData, api.HealthImpaired} {
			gauge(descHealth, truth(d.Status == s), d.Type, s)
		}
	}
}

func bytes(mib int64) float64 { return float64(mib << 20) }

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
