package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"go.uber.org/zap"

	"github.com/berth-gpu/berth/agent/cgroup"
	"github.com/berth-gpu/berth/agent/gpu"
	"github.com/berth-gpu/berth/mps"
)

// reading is one GPU's sample and the containers of its processes.
type reading struct {
	unit   *unit
	sample gpu.Sample
	err    error
	owners map[int]string // Docker ids by pid
}

// watchSamples reads every GPU each sampleEvery, one after the other, and gives
// the loop all of them at once.
func (a *Agent) watchSamples(ctx context.Context) {
	tick := time.NewTicker(a.settings.GPU.SampleEvery)
	defer tick.Stop()
	clients := map[int]string{} // processes that were MPS clients when last seen, and their containers
	for {
		all := make([]reading, len(a.units))
		for i, u := range a.units {
			all[i].unit = u
			all[i].sample, all[i].err = a.nvml.Sample(ctx, u.dev.UUID)
		}
		next := map[int]string{}
		for i := range all {
			a.attribute(ctx, &all[i], clients)
			for _, p := range all[i].sample.Processes {
				if p.Kind == gpu.KindMPSClient {
					next[p.PID] = all[i].owners[p.PID]
				}
			}
		}
		clients = next
		if ctx.Err() != nil {
			return
		}
		a.post(func() {
			for _, r := range all {
				a.sampled(r.unit, r.sample, r.err, r.owners)
			}
		})
		select {
		case <-tick.C:
		case <-a.resample:
		case <-ctx.Done():
			return
		}
	}
}

// attribute finds the containers of a GPU's processes, and which of those that
// NVML lists as compute processes are MPS clients: it may list clients there
// alone. Before anybody is accused of going past MPS the daemon is asked; of a
// daemon that is lost, those that were its clients before count.
func (a *Agent) attribute(ctx context.Context, r *reading, before map[int]string) {
	r.owners = make(map[int]string, len(r.sample.Processes))
	var asked bool
	for i := range r.sample.Processes {
		p := &r.sample.Processes[i]
		owner, known := before[p.PID]
		if !known || p.Kind == gpu.KindCompute {
			owner, _ = cgroup.ContainerID(p.PID) // gone meanwhile: nobody's
		}
		r.owners[p.PID] = owner
		if p.Kind != gpu.KindCompute || owner == "" || r.unit.holder == nil {
			continue
		}
		if !asked {
			asked = true
			ask, cancel := context.WithTimeout(ctx, a.settings.MPS.ProbeTimeout)
			pids, err := r.unit.holder.ClientPIDs(ask)
			cancel()
			if err == nil {
				for _, pid := range pids {
					before[pid] = ""
				}
			}
		}
		if _, client := before[p.PID]; client {
			p.Kind = gpu.KindMPSClient
		}
	}
}

// sampled takes one GPU's sample in, and finds who uses a shared GPU outside MPS.
func (a *Agent) sampled(u *unit, s gpu.Sample, err error, owners map[int]string) {
	if lost := errors.Is(err, gpu.ErrLost) || errors.Is(err, gpu.ErrUnknownGPU); lost != u.lost {
		u.lost, u.lostAt = lost, time.Now()
		a.log.Error("gpu", zap.String("gpu", u.dev.UUID), zap.Bool("lost", lost))
	}
	u.sampleErr = err
	if err != nil {
		return
	}
	u.sample = s
	u.usedMiB = map[string]int64{}
	u.strays = nil
	for _, p := range s.Processes {
		u.usedMiB[owners[p.PID]] += max(p.UsedMiB, 0)
	}
	if u.status.Use != mps.UseMPS {
		return
	}
	// A process that began while its daemon was dying, or one that can no longer be
	// told from such a one, is not its task's doing: the task may be started again.
	own := u.closed() == "" && u.holder.Status().State == mps.PhaseHeld
	for _, p := range s.Processes {
		if p.Kind == gpu.KindMPSClient || p.PID == u.status.ServerPID || (owners[p.PID] == "" && isServer(p.PID)) {
			continue
		}
		t, name := a.ownerOf(owners[p.PID])
		if t == nil {
			u.strays = append(u.strays, fmt.Sprintf("process %d uses the GPU outside MPS and is not berth's", p.PID))
			continue
		}
		u.strays = append(u.strays, fmt.Sprintf("process %d of container %s of task %s uses the GPU outside MPS, without a cap", p.PID, name, shortID(t.rec.ID)))
		a.endTask(t, "EssentialContainerExited", fmt.Sprintf("UncappedProcessError: process %d of container %s used GPU %s outside MPS, where no cap holds", p.PID, name, u.dev.UUID), !own)
	}
}

// ownerOf finds the task and container of a Docker id.
func (a *Agent) ownerOf(dockerID string) (*task, string) {
	if dockerID == "" {
		return nil, ""
	}
	for _, t := range a.tasks {
		for name, s := range t.seen {
			if s.ID == dockerID {
				return t, name
			}
		}
	}
	return nil, ""
}

// Xids that a client causes by itself; the GPU is well. NVIDIA's k8s device
// plugin counts the same ones as the application's. Under MPS 13 and 31 end
// every client of the GPU, which the supervisor sees as FAULT.
var clientXids = []int{13, 31, 43, 45, 68, 109}

func (a *Agent) watchXids(ctx context.Context) {
	xids, err := a.nvml.Xids(ctx)
	if err != nil {
		a.log.Warn("critical events of the GPUs cannot be watched", zap.Error(err))
		return
	}
	for x := range xids {
		if x.Err != nil {
			a.log.Warn("critical events of the GPUs", zap.Error(x.Err))
			continue
		}
		a.post(func() {
			a.log.Warn("xid", zap.String("gpu", x.UUID), zap.Int("xid", x.Code))
			u := a.unit(x.UUID)
			switch {
			case u == nil:
			case x.Code == 13 || x.Code == 31:
				u.faultAt = x.At
			case !slices.Contains(clientXids, x.Code):
				a.breakGPU(u, fmt.Sprintf("Xid %d at %s", x.Code, x.At.UTC().Format(time.RFC3339)))
			}
		})
	}
}

// isServer tells an MPS server, also an orphan, by the name that the kernel cuts to 15 bytes.
func isServer(pid int) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm")
	return err == nil && string(b) == "nvidia-cuda-mps\n"
}

func mode(s gpu.Sample, err error) string {
	if err != nil {
		return "UNKNOWN"
	}
	return s.Mode.String()
}
