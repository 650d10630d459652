package healthcheck_test

import (
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/api/flight"
	"github.com/berth-gpu/berth/healthcheck"
)

func TestMachine(t *testing.T) {
	noon := time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
	ok := healthcheck.Check{Type: healthcheck.ContainerRuntime, OK: true}
	bad := healthcheck.Check{Type: healthcheck.AcceleratedCompute, Reason: "GPU 0: DRAINING"}
	starting := healthcheck.Check{Type: healthcheck.AcceleratedCompute, OK: true, Pending: true}
	for _, tt := range []struct {
		name   string
		checks []healthcheck.Check
		want   string
	}{
		{"nothing looked at", nil, api.HealthInsufficientData},
		{"well", []healthcheck.Check{ok}, api.HealthOK},
		{"a GPU starts", []healthcheck.Check{ok, starting}, api.HealthInitializing},
		{"a GPU is lost", []healthcheck.Check{ok, bad}, api.HealthImpaired},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := healthcheck.Machine(api.Health{}, tt.checks, noon)
			if got.OverallStatus != tt.want {
				t.Errorf("got %s, want %s", got.OverallStatus, tt.want)
			}
			for _, last := range []api.Health{{}, got} {
				seen := healthcheck.Examination{Last: last, Checks: tt.checks, Now: noon.Add(time.Minute)}
				replays(t, flight.Of(healthcheck.Examination.Health), seen, seen.Health())
			}
		})
	}
	first := healthcheck.Machine(api.Health{}, []healthcheck.Check{ok, bad}, noon)
	again := healthcheck.Machine(first, []healthcheck.Check{ok, bad}, noon.Add(time.Hour))
	if !again.Details[1].LastStatusChange.Equal(noon) {
		t.Errorf("a status that did not change counts as changed at %s", again.Details[1].LastStatusChange)
	}
	well := bad
	well.OK, well.Reason = true, ""
	if got := healthcheck.Machine(again, []healthcheck.Check{ok, well}, noon.Add(2*time.Hour)).Details[1]; !got.LastStatusChange.Equal(noon.Add(2*time.Hour)) || got.Status != api.HealthOK {
		t.Errorf("recovered: %+v", got)
	}
}
