package agent

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/berth-gpu/berth/agent/state"
	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/config/taskdef"
	"github.com/berth-gpu/berth/healthcheck"
	"github.com/berth-gpu/berth/mps"
)

// View is what the agent shows: made anew each round, never changed after.
type View struct {
	Instance api.Instance
	Tasks    []api.Task // newest first
	Standing []Standing // for sources
	Room     Room
}

// Standing is what a source has to know of a task that it asked for.
type Standing struct {
	Wanted              // as it was accepted
	Stopped        bool // all of it has ended
	StoppedByAgent bool // berth itself had to stop it: it may be started again
	Released       bool // the source let go of it
}

// Room is what is left, for whoever chooses GPUs.
type Room struct {
	CPU       int64 // ECS units
	MemoryMiB int64
	Ports     []taskdef.Port // taken
	GPUs      []GPURoom
}

// GPURoom is one GPU's.
type GPURoom struct {
	ID             string
	Index          int
	Mode           string // api.ModeIdle...
	AllocatableMiB int64
	AllocatedMiB   int64
	Clients        int
	MaxClients     int
	Closed         string // why nothing may start on it now
	NoSharing      string // why MPS cannot run on it
}

// publish makes the view of this round.
func (a *Agent) publish(now time.Time) {
	books := a.books()
	v := &View{Room: Room{CPU: books.freeCPU, MemoryMiB: books.freeMemoryMiB}}
	for p := range books.ports {
		v.Room.Ports = append(v.Room.Ports, p)
	}
	slices.SortFunc(v.Room.Ports, func(x, y taskdef.Port) int {
		return cmp.Or(cmp.Compare(x.Host, y.Host), cmp.Compare(x.Protocol, y.Protocol))
	})
	in := &v.Instance
	*in = api.Instance{
		Name: a.settings.Instance, Cluster: a.settings.Cluster, Version: a.version, AgentID: a.agentID, Status: api.InstanceActive, Connected: true, BootID: a.bootID,
		StartedAt: a.started, EC2InstanceID: a.ec2, Attributes: a.settings.Attributes,
		Registered: api.Resources{CPU: a.capacity.cpu, MemoryMiB: a.capacity.memoryMiB},
		Remaining:  api.Resources{CPU: books.freeCPU, MemoryMiB: books.freeMemoryMiB},
		Waiting:    a.order.Waiting, Problems: a.order.Problems,
	}
	for _, p := range a.capacity.ports {
		in.ReservedPorts = append(in.ReservedPorts, api.Port{Number: p.Host, Protocol: p.Protocol})
	}
	if l := a.link.Load(); l != nil {
		in.Connected = l.Connected
		if l.Refused {
			in.Problems = append(slices.Clone(in.Problems), api.BadInput{Name: "server", Problems: []string{l.Says}})
		}
	}
	tasks := a.inOrder()
	slices.Reverse(tasks)
	for _, t := range tasks {
		v.Tasks = append(v.Tasks, a.showTask(t))
		v.Standing = append(v.Standing, Standing{
			Wanted:  Wanted{Name: t.rec.Name, Generation: t.rec.Generation, Hash: t.rec.Hash, Definition: t.rec.Definition, GPUs: t.rec.GPUs},
			Stopped: !t.rec.Stopped.IsZero(), StoppedByAgent: t.rec.StoppedByAgent, Released: t.rec.Released})
	}
	for i, u := range a.units {
		in.DriverVersion = u.dev.DriverVersion
		acc := books.gpus[i]
		in.GPUs = append(in.GPUs, a.showGPU(u, acc, tasks))
		v.Room.GPUs = append(v.Room.GPUs, GPURoom{ID: u.dev.UUID, Index: u.dev.Index, Mode: acc.mode, AllocatableMiB: acc.allocatableMiB,
			AllocatedMiB: acc.allocatedMiB, Clients: acc.clients, MaxClients: acc.maxClients, Closed: u.closed(), NoSharing: u.noSharing})
	}
	seen := healthcheck.Examination{Last: a.health, Checks: a.checks(), Now: now}
	a.health = seen.Health()
	a.recordHealth(seen, a.health)
	in.Health = a.health
	old := a.view.Swap(v)
	if old == nil || !reflect.DeepEqual(old, v) {
		a.changed.wake()
	}
}

func (a *Agent) showTask(t *task) api.Task {
	out := api.Task{
		ID: t.rec.ID, Name: t.rec.Name, Family: *t.def.Family, Generation: t.rec.Generation, LastStatus: status(&t.rec), DesiredStatus: t.rec.Desired,
		StopCode: t.rec.StopCode, StoppedReason: t.rec.StoppedReason, GPUIDs: t.rec.GPUs, CreatedAt: t.rec.Accepted,
		StartedAt: timeOrNil(t.rec.Started), StoppedAt: timeOrNil(t.rec.Stopped), Infrastructure: t.rec.StoppedByAgent,
	}
	if out.LastStatus == api.StatusPending || out.LastStatus == api.StatusDeactivating {
		out.Reason = t.waits
	}
	for i := range t.rec.Containers {
		out.Containers = append(out.Containers, showContainer(t, i))
	}
	return out
}

func showContainer(t *task, i int) api.Container {
	c, def := t.rec.Containers[i], &t.def.ContainerDefinitions[i]
	mib, percent, _ := taskdef.Share(def)
	out := api.Container{Name: c.Name, RuntimeID: c.DockerID, Image: *def.Image, LastStatus: containerStatus(t, c), ExitCode: c.ExitCode, Reason: c.Reason,
		HealthStatus: t.seen[c.Name].Health, RestartCount: c.Restarts, GPUIDs: gpusOf(t, i), MemoryInMiB: mib, MaxComputePct: percent}
	return out
}

func containerStatus(t *task, c state.Container) string {
	switch {
	case t.seen[c.Name].Running:
		return api.StatusRunning
	case c.Done || c.ExitCode != nil:
		return api.StatusStopped
	}
	return api.StatusPending
}

func (a *Agent) showGPU(u *unit, acc account, tasks []*task) api.GPU {
	g := api.GPU{
		ID: u.dev.UUID, SharingMode: acc.mode, TotalMemoryInMiB: acc.allocatableMiB, RemainingMemoryInMiB: acc.allocatableMiB - acc.allocatedMiB,
		ContainerCount: acc.clients, Index: u.dev.Index, Name: u.dev.Name, UsedMemoryInMiB: u.sample.Usage.UsedMiB,
		UtilizationPct: max(0, u.sample.Usage.GPUPercent), ComputeMode: mode(u.sample, u.sampleErr),
		MaxClients: acc.maxClients, NoSharing: u.noSharing, Held: u.held(), Since: u.status.Since, Slices: []api.Slice{},
		MPS: api.MPS{State: string(u.status.State), Reason: u.status.Reason, DaemonPID: u.status.DaemonPID, ServerPID: u.status.ServerPID,
			Restarts: u.status.Restarts, Failures: u.status.Failures, Budget: u.status.Budget, SingleUID: u.status.SingleUID,
			PipeDirectory: mps.Dirs{Run: a.settings.RunDir, UUID: u.dev.UUID}.Pipe()},
	}
	g.Standing, g.StandingReason = u.standing()
	if !g.Held {
		g.HeldReason = u.notHeld()
	}
	for _, t := range tasks {
		if !t.rec.Stopped.IsZero() || !slices.Contains(t.rec.GPUs, u.dev.UUID) {
			continue
		}
		for i := range t.def.ContainerDefinitions {
			if !slices.Contains(gpusOf(t, i), u.dev.UUID) {
				continue
			}
			def, c := &t.def.ContainerDefinitions[i], t.rec.Containers[i]
			mib, percent, shared := taskdef.Share(def)
			if !shared {
				mib = acc.allocatableMiB
			}
			g.Slices = append(g.Slices, api.Slice{TaskID: t.rec.ID, Family: *t.def.Family, Container: c.Name, MemoryInMiB: mib, MaxComputePct: percent,
				UsedMemoryInMiB: u.usedMiB[c.DockerID], LastStatus: containerStatus(t, c)})
		}
	}
	sort.SliceStable(g.Slices, func(i, j int) bool { return g.Slices[i].TaskID < g.Slices[j].TaskID })
	return g
}

// held is the last word of supervisor and samples; the gate itself always looks
// afresh.
func (u *unit) held() bool {
	return u.status.State == mps.PhaseHeld && u.closed() == "" && len(u.strays) == 0
}

func (u *unit) notHeld() string {
	if c := u.closed(); c != "" {
		return c
	}
	if len(u.strays) > 0 {
		return u.strays[0]
	}
	if u.status.Reason != "" {
		return fmt.Sprintf("%s: %s", u.status.State, u.status.Reason)
	}
	return string(u.status.State)
}

// checks are what the machine's health is made from.
func (a *Agent) checks() []healthcheck.Check {
	docker := healthcheck.Check{Type: healthcheck.ContainerRuntime, OK: a.listErr == nil}
	if a.listErr != nil {
		docker.Reason = a.listErr.Error()
	}
	out := []healthcheck.Check{docker}
	if a.noNVML != nil {
		return out
	}
	gpus := healthcheck.Check{Type: healthcheck.AcceleratedCompute, OK: len(a.unreadable) == 0, Reason: strings.Join(a.unreadable, "; ")}
	for _, u := range a.units {
		why := u.closed()
		if why == "" && len(u.strays) > 0 {
			why = u.strays[0]
		}
		if why != "" {
			gpus.OK = false
			if gpus.Reason != "" {
				gpus.Reason += "; "
			}
			gpus.Reason += fmt.Sprintf("GPU %d (%s): %s", u.dev.Index, u.dev.UUID, why)
		}
		gpus.Pending = gpus.Pending || (u.holder != nil && u.status.State == mps.PhaseStarting && u.status.Restarts == 0)
	}
	return append(out, gpus)
}

func timeOrNil(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
