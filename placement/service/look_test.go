package service_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/placement/fleet"
	"github.com/berth-gpu/berth/placement/service"
)

// TestView: what a service sees of a task, beyond its record.
func TestView(t *testing.T) {
	standing := func(standing string) func(*fleet.Instance, *fleet.Task) {
		return func(i *fleet.Instance, _ *fleet.Task) {
			i.GPUs[0].Standing, i.GPUs[0].StandingReason = standing, "why"
		}
	}
	health := func(main, side string) func(*fleet.Instance, *fleet.Task) {
		return func(_ *fleet.Instance, t *fleet.Task) {
			t.Containers = []api.Container{{Name: "main", HealthStatus: main}, {Name: "side", HealthStatus: side}}
		}
	}
	draining := func(i *fleet.Instance, _ *fleet.Task) {
		i.Status, i.DrainReason = api.InstanceDraining, "driver update"
	}
	for _, tt := range []struct {
		name   string
		change func(*fleet.Instance, *fleet.Task)
		want   string
	}{
		{"runs", func(*fleet.Instance, *fleet.Task) {}, "healthy"},
		{"does not run yet", func(_ *fleet.Instance, t *fleet.Task) { t.LastStatus = api.StatusPending }, ""},
		{"its check is good", health("HEALTHY", ""), "healthy"},
		{"its check has not ended", health("UNKNOWN", ""), ""},
		{"its check is bad", health("UNHEALTHY", ""), "unhealthy"},
		{"one that is not essential is ill", health("HEALTHY", "UNHEALTHY"), "healthy"},
		{"its GPU is closed", standing(api.GPUClosed), "healthy"},
		{"its GPU drains", standing(api.GPUDraining), "healthy InfrastructureHealth GPU 0 of m is DRAINING: why"},
		{"its GPU has failed", standing(api.GPUFailed), "healthy InfrastructureHealth GPU 0 of m is FAILED: why"},
		{"its machine drains", draining, "healthy ServiceSchedulerInitiated m is draining: driver update"},
		{"its machine is lost", func(i *fleet.Instance, _ *fleet.Task) { i.Cutoff, i.Lost = time.Unix(1, 0), true }, "healthy"},
		{"cut off, with stop-after, and draining", func(i *fleet.Instance, t *fleet.Task) {
			draining(i, t)
			i.Cutoff, t.StopAfter = time.Unix(1, 0), time.Minute
		}, "healthy"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld()
			d, err := w.f.Register([]byte(`{"family": "f", "containerDefinitions": [{"name": "main", "image": "i", "memory": 64}, {"name": "side", "image": "i", "memory": 64, "essential": false}]}`), w.now)
			if err != nil {
				t.Fatal(err)
			}
			w.join("m", 1, 1000)
			task := &fleet.Task{ID: "t", Definition: d.Key(), Instance: "m", GPUs: []string{"m/0"}, Desired: api.StatusRunning, LastStatus: api.StatusRunning}
			w.instance("m", func(i *fleet.Instance) { tt.change(i, task) })
			w.f.PutTask(task)
			v := service.View(w.f, task)
			got := ""
			if v.Healthy {
				got += "healthy "
			}
			if v.Unhealthy {
				got += "unhealthy "
			}
			got += v.VacateCode + " " + v.Vacate
			if got = strings.TrimSpace(got); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

// The largest service there is, with nothing to do.
func BenchmarkStep(b *testing.B) {
	w := newWorld()
	for i := range 200 {
		w.join(fmt.Sprintf("m%d", i), 8, 50000)
	}
	w.f.PutService(&fleet.Service{Name: "web", Definition: w.define("web", 10000, ""), Desired: 5000, MinHealthyPercent: 100, MaximumPercent: 200})
	w.round()
	w.agents()
	for b.Loop() {
		if out := service.Step(service.Look(w.f, "web", w.now)); len(out.Actions) > 0 || out.Service.Reason != "" {
			b.Fatal(out.Actions)
		}
	}
}
