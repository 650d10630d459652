package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/berth-gpu/berth/agent/gpu"
	"github.com/berth-gpu/berth/agent/state"
	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/config"
	"github.com/berth-gpu/berth/healthcheck"
	"github.com/berth-gpu/berth/mps"
)

// unit is one GPU and all that the agent knows of it.
type unit struct {
	dev       gpu.Device
	holder    *mps.Holder // nil where MPS cannot run
	noSharing string      // why it cannot
	status    mps.Status
	verdict   atomic.Pointer[healthcheck.Verdict] // the gate's last

	sample    gpu.Sample
	sampleErr error
	usedMiB   map[string]int64 // by Docker id
	strays    []string         // processes that use the GPU outside MPS while it is shared
	broken    string           // an Xid that means the GPU itself; until the next boot
	brokenAt  time.Time
	lost      bool // NVML says so now
	lostAt    time.Time
	faultAt   time.Time // of the last Xid by which one client's fault ends all clients
}

// gpuRecord is what is stored of a GPU.
type gpuRecord struct {
	BootID   string     `json:"bootId"`
	Broken   string     `json:"broken,omitempty"`
	BrokenAt time.Time  `json:"brokenAt,omitzero"`
	MPS      mps.Record `json:"mps"`
	Device   gpu.Device `json:"device"` // as it was when NVML last saw it
}

// closed says why nothing may start on the GPU for now, or "". A GPU that is only
// on its way (its daemon or server is starting) is open: the gate waits for it.
func (u *unit) closed() string {
	switch {
	case u.lost:
		return "the GPU is lost: it fell off the bus or needs a reset"
	case u.broken != "":
		return u.broken
	case errors.Is(u.sampleErr, gpu.ErrHung):
		return u.sampleErr.Error()
	case u.holder == nil:
		return ""
	}
	switch u.status.State {
	case mps.PhaseDraining, mps.PhaseQuarantined, mps.PhaseBackoff, mps.PhaseStopping:
		return fmt.Sprintf("%s: %s", u.status.State, u.status.Reason)
	}
	return ""
}

// standing is the GPU's towards placement, and why where it is not OPEN.
func (u *unit) standing() (standing, reason string) {
	why := u.closed()
	switch {
	case why == "":
		return api.GPUOpen, ""
	case u.lost || u.broken != "" || u.status.State == mps.PhaseQuarantined:
		return api.GPUFailed, why
	case u.status.State == mps.PhaseDraining:
		return api.GPUDraining, u.status.Reason // the standing says the rest
	}
	return api.GPUClosed, why
}

// loss is why and since when the GPU is lost to the tasks that run on it. A
// quarantined one has no more tasks that run, and those that wait for it to be
// held would wait for ever: its loss is as old as time.
func (u *unit) loss() (reason string, since time.Time) {
	switch {
	case u.lost:
		return u.closed(), u.lostAt
	case u.broken != "":
		return u.broken, u.brokenAt
	case u.status.State == mps.PhaseDraining:
		return u.status.Reason, u.status.Since
	case u.status.State == mps.PhaseQuarantined:
		return u.closed(), time.Unix(0, 0)
	}
	return "", time.Time{}
}

// overdue says whether the tasks of a lost GPU are to be stopped. Clients of a
// dead daemon live on and have until the deadline, or none with `onDaemonLoss:
// restart`; those of a server that died or faulted have lost their contexts, and
// the GPU opens again only when the last of them has ended.
func overdue(s config.MPS, cause mps.Cause, since, now time.Time) bool {
	return s.OnDaemonLoss == config.LossRestart || cause == mps.LostServer || cause == mps.ClientFault || now.Sub(since) >= s.DrainDeadline
}

// drain ends the tasks whose GPU has been lost for too long. Their source may
// start them again, under a new generation.
func (a *Agent) drain(now time.Time) {
	for _, u := range a.units {
		reason, since := u.loss()
		if reason == "" && now.Sub(u.faultAt) < aroundLoss {
			// The server is well again once all its clients have ended, which may be
			// before the supervisor has seen it in FAULT.
			for _, t := range a.inOrder() {
				if t.shared() && slices.Contains(t.rec.GPUs, u.dev.UUID) && fellWithGPU(&t.rec, u.faultAt) {
					t.rec.StopCode, t.rec.StoppedByAgent = api.StopInfrastructure, true
					t.rec.StoppedReason = fmt.Sprintf("a fatal fault of one client ended all clients of GPU %s", u.dev.UUID)
				}
			}
		}
		if reason == "" {
			continue
		}
		why := fmt.Sprintf("GPU %s was lost: %s", u.dev.UUID, reason)
		for _, t := range a.inOrder() {
			if !slices.Contains(t.rec.GPUs, u.dev.UUID) {
				continue
			}
			if fellWithGPU(&t.rec, since) {
				t.rec.StopCode, t.rec.StoppedReason, t.rec.StoppedByAgent = api.StopInfrastructure, why, true
			}
			if overdue(a.settings.MPS, u.status.Cause, since, now) && (u.lost || u.broken != "" || t.shared()) {
				a.endTask(t, api.StopInfrastructure, why, true)
			}
		}
	}
}

// missing ends the tasks that have not started on a GPU that is not here any more.
// What runs on it goes on: the agent may only fail to see it.
func (a *Agent) missing() {
	for _, t := range a.tasks {
		for _, id := range t.rec.GPUs {
			if a.unit(id) == nil && t.rec.Started.IsZero() {
				a.endTask(t, api.StopInfrastructure, fmt.Sprintf("GPU %s is not in this machine any more", id), true)
			}
		}
	}
}

// aroundLoss is how long before a loss is noticed its victims may have ended: a
// fault is seen in the daemon's log or at the next probe. A fault's victims may
// also end this long after it.
const aroundLoss = 10 * time.Second

// fellWithGPU says that a task ended by itself, with an error, when its GPU was
// lost: most programs end when their CUDA context is gone. That is the GPU's
// doing, not the task's.
func fellWithGPU(rec *state.Task, since time.Time) bool {
	if rec.StopCode != api.StopEssentialExited || rec.StoppedByAgent || since.Unix() == 0 {
		return false
	}
	return slices.ContainsFunc(rec.Containers, func(c state.Container) bool {
		return c.ExitCode != nil && *c.ExitCode != 0 && c.Finished.After(since.Add(-aroundLoss)) && !c.Finished.After(rec.StopAsked)
	})
}

// openUnits lists the GPUs and makes a holder for each that MPS can hold, with
// its record, unless that is of an earlier boot.
func (a *Agent) openUnits(ctx context.Context, rebooted bool) error {
	if a.nvml == nil {
		return nil
	}
	found, err := a.nvml.Inventory(ctx)
	if err != nil {
		return err
	}
	records := map[string]*gpuRecord{}
	aside, err := a.store.GPUs(func(uuid string) any {
		records[uuid] = new(gpuRecord)
		return records[uuid]
	})
	if err != nil {
		return err
	}
	for _, s := range aside {
		delete(records, s.Key)
		a.log.Error("set a damaged record aside", zap.String("kind", s.Kind), zap.String("key", s.Key), zap.String("why", s.Reason))
	}
	control := mps.FindControl(a.settings.MPS.ControlBinary, a.settings.MPS.Path)
	for _, d := range found.Devices {
		old := records[d.UUID]
		delete(records, d.UUID)
		rec := gpuRecord{BootID: a.bootID}
		if old != nil && old.BootID == a.bootID && !rebooted {
			rec = *old
		}
		rec.Device = d
		rec.Device.Err = nil
		if err := a.store.UpdateGPU(d.UUID, func(json.RawMessage) (any, error) { return rec, nil }); err != nil {
			return err
		}
		a.addUnit(rec, control)
	}
	// A GPU that fell off the bus while no agent ran: its daemon and its tasks are
	// still here, and to be seen to.
	for uuid, rec := range records {
		if rec.BootID != a.bootID || rebooted || rec.Device.UUID != uuid {
			continue
		}
		u := a.addUnit(*rec, control)
		u.lost, u.lostAt = true, time.Now()
		a.log.Error("a GPU of this boot is lost", zap.String("gpu", uuid))
		if len(found.Unreadable) > 0 {
			found.Unreadable = found.Unreadable[1:] // it is one of these, whose UUID NVML does not tell
		}
	}
	for _, bad := range found.Unreadable {
		a.unreadable = append(a.unreadable, fmt.Sprintf("GPU %d cannot be read: %v", bad.Index, bad.Err))
		a.log.Error("a GPU cannot be read; restart the agent once it is well", zap.Int("index", bad.Index), zap.Error(bad.Err))
	}
	return nil
}

// addUnit makes a GPU known to the agent, with a holder where MPS can hold it.
func (a *Agent) addUnit(rec gpuRecord, control string) *unit {
	d := rec.Device
	u := &unit{dev: d, usedMiB: map[string]int64{}, broken: rec.Broken, brokenAt: rec.BrokenAt}
	a.units = append(a.units, u)
	dev := mps.Device{UUID: d.UUID, DriverBranch: d.DriverBranch, ComputeMajor: d.ComputeMajor, ComputeMinor: d.ComputeMinor, VGPU: d.VGPU, MIG: d.MIG}
	if u.noSharing = mps.Unsupported(dev, control); u.noSharing != "" {
		a.log.Warn("this GPU cannot be shared", zap.String("gpu", d.UUID), zap.String("why", u.noSharing))
		u.status = mps.Status{State: mps.PhaseUnsupported, Reason: u.noSharing, Since: a.started}
		return u
	}
	u.holder = mps.New(a.mpsConfig(), dev, rec.MPS, a.hooks(u), a.log)
	u.status = u.holder.Status()
	return u
}

func (a *Agent) mpsConfig() mps.Config {
	s := a.settings
	return mps.Config{RunDir: s.RunDir, LogDir: s.LogDir, ControlBinary: s.MPS.ControlBinary, Path: s.MPS.Path, LibraryPath: s.MPS.LibraryPath,
		ProbeEvery: s.MPS.ProbeEvery, ProbeTimeout: s.MPS.ProbeTimeout, StartTimeout: s.MPS.StartTimeout, ServerStartTimeout: s.MPS.ServerStartTimeout,
		Budget: mps.Budget{Failures: s.MPS.Budget.Failures, Window: s.MPS.Budget.Window}}
}

// hooks tie a holder to NVML and the store.
func (a *Agent) hooks(u *unit) mps.Hooks {
	uuid := u.dev.UUID
	gone := func(err error) error {
		if errors.Is(err, gpu.ErrLost) || errors.Is(err, gpu.ErrUnknownGPU) {
			a.sampleNow() // the loop is told by the sample
			return fmt.Errorf("%w: %w", mps.ErrGPUGone, err)
		}
		return err
	}
	return mps.Hooks{
		ComputeMode: func(ctx context.Context) (bool, error) {
			m, err := a.nvml.ComputeMode(ctx, uuid)
			return m == gpu.ComputeExclusiveProcess, gone(err)
		},
		SetComputeMode: func(ctx context.Context, exclusive bool) error {
			m := gpu.ComputeDefault
			if exclusive {
				m = gpu.ComputeExclusiveProcess
			}
			return gone(a.nvml.SetComputeMode(ctx, uuid, m))
		},
		Save: func(r mps.Record) error {
			return a.store.UpdateGPU(uuid, func(old json.RawMessage) (any, error) {
				rec := gpuRecord{BootID: a.bootID}
				if err := decodeRecord(old, a.bootID, &rec); err != nil {
					return nil, err
				}
				rec.MPS = r
				return rec, nil
			})
		},
		Notify:  func(mps.Status) { a.poke() },
		Decided: func(in, out any) { a.flight.Record("mps.Step", uuid, in, out) },
	}
}

// readHolders takes in what the holders say now.
func (a *Agent) readHolders() {
	for _, u := range a.units {
		if u.holder == nil {
			continue
		}
		was := u.status
		u.status = u.holder.Status()
		if u.status.State == was.State {
			continue
		}
		if u.status.State == mps.PhaseHeld || u.status.State == mps.PhaseDedicated {
			a.retryNow(u.dev.UUID)
		}
		a.sampleNow() // who uses the GPU now matters most when its daemon has just been lost
	}
}

// sampleNow has the GPUs sampled at once. It never blocks.
func (a *Agent) sampleNow() {
	select {
	case a.resample <- struct{}{}:
	default:
	}
}

// breakGPU closes a GPU until the next boot.
func (a *Agent) breakGPU(u *unit, why string) {
	if u.broken != "" {
		return
	}
	u.broken, u.brokenAt = why, time.Now()
	a.log.Error("GPU closed", zap.String("gpu", u.dev.UUID), zap.String("why", why))
	err := a.store.UpdateGPU(u.dev.UUID, func(old json.RawMessage) (any, error) {
		rec := gpuRecord{BootID: a.bootID}
		if err := decodeRecord(old, a.bootID, &rec); err != nil {
			return nil, err
		}
		rec.Broken, rec.BrokenAt = u.broken, u.brokenAt
		return rec, nil
	})
	if err != nil {
		a.log.Error("cannot store that the GPU is closed; it is for as long as this agent runs", zap.Error(err))
	}
}

// decodeRecord reads a stored record; one of another boot counts as none.
func decodeRecord(old json.RawMessage, bootID string, into *gpuRecord) error {
	if old == nil {
		return nil
	}
	var rec gpuRecord
	if err := json.Unmarshal(old, &rec); err != nil {
		return err
	}
	if rec.BootID == bootID {
		*into = rec
	}
	return nil
}

// retryNow lets launches that the gate refused try again at once.
func (a *Agent) retryNow(uuid string) {
	for _, t := range a.tasks {
		if slices.Contains(t.rec.GPUs, uuid) {
			t.retryAt, t.refusals = time.Time{}, 0
		}
	}
}

func (a *Agent) unit(uuid string) *unit {
	for _, u := range a.units {
		if u.dev.UUID == uuid {
			return u
		}
	}
	return nil
}

// measureCapacity is what the machine has for tasks. It does not change while the
// agent runs.
func (a *Agent) measureCapacity() capacity {
	c := capacity{cpu: hostCPUUnits() - a.settings.Reserved.CPU, memoryMiB: hostMemoryMiB() - a.settings.Reserved.MemoryMiB, ports: reservedPorts(a.settings.Reserved)}
	for _, u := range a.units {
		c.gpus = append(c.gpus, gpuCapacity{uuid: u.dev.UUID, allocatableMiB: max(0, u.dev.UsableMiB()-a.settings.GPU.ReserveMiB), maxClients: mps.MaxClients(u.dev.DriverBranch)})
	}
	return c
}
