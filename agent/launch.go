package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
	"go.uber.org/zap"

	"github.com/berth-gpu/berth/agent/cgroup"
	"github.com/berth-gpu/berth/agent/engine"
	"github.com/berth-gpu/berth/agent/state"
	"github.com/berth-gpu/berth/config"
	"github.com/berth-gpu/berth/config/taskdef"
	"github.com/berth-gpu/berth/healthcheck"
	"github.com/berth-gpu/berth/mps"
)

// job is a copy of what an operation on one container needs.
type job struct {
	task      state.Task
	request   engine.Request
	image     string
	limits    cgroup.Limits
	units     []*unit // its GPUs: only dev and holder, which never change, and verdict are used
	shared    bool
	seen      seen
	there     bool
	stopAfter time.Duration
	enter     func() error
	closed    string // why a GPU of it was closed when the job was made
}

// outcome is what became of an operation.
type outcome struct {
	container *engine.Container // as Docker has it now, if known
	removed   bool              // Docker has it no longer
	err       error
	refused   bool // try again later: the GPU is not held, or Docker does not answer
	killed    bool // it had to be killed though it had run before: the task is over
	unsure    bool // Docker was asked to start it and may do so yet: the task is over
}

// job gathers what is needed for the container, from the loop.
func (a *Agent) job(t *task, name string) (job, error) {
	i := containerIndex(&t.rec, name)
	def := &t.def.ContainerDefinitions[i]
	s, there := t.seen[name]
	j := job{task: t.rec, image: *def.Image, seen: s, there: there, stopAfter: a.settings.Docker.StopTimeout}
	if def.StopTimeout != nil {
		j.stopAfter = time.Duration(*def.StopTimeout) * time.Second
	}
	j.limits = cgroup.Limits{PeriodUS: a.settings.Task.CPUPeriod.Microseconds(), PIDs: a.settings.Task.PidsLimit}
	j.limits.CPUUnits, _ = taskdef.TaskCPU(&t.def.TaskDefinition)
	j.limits.Shares = t.demand.CPU
	if mib, ok := taskdef.TaskMemory(&t.def.TaskDefinition); ok {
		j.limits.MemoryBytes = mib << 20
	}
	j.request = engine.Request{Task: &t.def.TaskDefinition, Container: def,
		Labels: engine.Labels{Instance: a.settings.Instance, Task: t.rec.ID, Generation: t.rec.Generation, Container: name,
			Family: *t.def.Family, Cluster: a.settings.Cluster},
		Settings: engine.Settings{RunDir: a.settings.RunDir, StopTimeout: a.settings.Docker.StopTimeout, AllowPrivileged: !a.settings.Docker.DisablePrivileged},
	}
	for _, id := range gpusOf(t, i) {
		u := a.unit(id)
		if u == nil {
			return j, fmt.Errorf("GPU %s is no longer in this machine", id)
		}
		if why := u.closed(); why != "" {
			j.closed = fmt.Sprintf("GPU %s is closed: %s", id, why)
		}
		j.units = append(j.units, u)
	}
	_, _, j.shared = taskdef.Share(def)
	var err error
	j.request.Grant, err = a.grant(j.units, def)
	return j, err
}

// gpusOf are the task's GPUs that container i gets: the one that they share, or
// as many whole ones as it asks for, in the containers' order.
func gpusOf(t *task, i int) []string {
	at := 0
	for k := range t.def.ContainerDefinitions {
		c := &t.def.ContainerDefinitions[k]
		if _, _, shared := taskdef.Share(c); shared {
			if k == i {
				return t.rec.GPUs
			}
			continue
		}
		n, all := taskdef.WholeGPUs(c)
		if all {
			n = len(t.rec.GPUs)
		}
		if k == i {
			return t.rec.GPUs[min(at, len(t.rec.GPUs)):min(at+n, len(t.rec.GPUs))]
		}
		at += n
	}
	return nil
}

// grant is what gives a container its GPUs, and a capped one its caps: the
// environment and the client folder come together or not at all.
func (a *Agent) grant(units []*unit, def *types.ContainerDefinition) (engine.Grant, error) {
	if len(units) == 0 {
		return engine.Grant{}, nil // NVIDIA_VISIBLE_DEVICES=void
	}
	g := engine.Grant{}
	var ids []string
	for _, u := range units {
		ids = append(ids, u.dev.UUID)
		if u.dev.Minor < 0 {
			return g, fmt.Errorf("NVML does not say which device node GPU %s has", u.dev.UUID)
		}
		node := "nvidia" + strconv.Itoa(u.dev.Minor)
		g.Devices = append(g.Devices, engine.Device{Host: filepath.Join(a.settings.GPU.DevRoot, node), Container: "/dev/" + node})
	}
	g.VisibleDevices = strings.Join(ids, ",")
	for _, node := range []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"} {
		host := filepath.Join(a.settings.GPU.DevRoot, node)
		if _, err := os.Stat(host); err == nil {
			g.Devices = append(g.Devices, engine.Device{Host: host, Container: "/dev/" + node})
		}
	}
	switch a.runtime() {
	case config.RuntimeNvidia:
		g.Runtime = a.settings.Docker.NvidiaRuntime
	case config.RuntimeCDI:
		for _, id := range ids {
			g.CDI = append(g.CDI, "nvidia.com/gpu="+id)
		}
		// CDI brings the nodes; a variable that names the GPU would have the NVIDIA
		// runtime, where it is Docker's default, bring them a second time.
		g.Devices, g.VisibleDevices = nil, ""
	}
	if mib, percent, shared := taskdef.Share(def); shared {
		env, err := mps.Limits{MemoryMiB: mib, ActiveThreadPercent: percent}.Env()
		if err != nil {
			return g, err
		}
		g.Shared, g.Env = true, env
		g.Mounts = []engine.Mount{{Source: clientDir(a.settings, ids[0]), Target: mps.ContainerPipeDirectory, ReadOnly: true}}
	}
	return g, nil
}

// runtime is how GPUs get into containers here.
func (a *Agent) runtime() string {
	if r := a.settings.Docker.Runtime; r != config.RuntimeAuto {
		return r
	}
	for _, r := range a.info.Runtimes {
		if r == a.settings.Docker.NvidiaRuntime {
			return config.RuntimeNvidia
		}
	}
	if a.info.CDI {
		return config.RuntimeCDI
	}
	return config.RuntimePlain
}

// launch brings one container up: what of pulling, creating and starting is
// still to be done. The gate is passed before create and again, afresh, right
// before the start; and once more after it, because the daemon may have died
// between the two and then the container's CUDA would run without a cap.
func (a *Agent) launch(ctx context.Context, j job) outcome {
	id := j.seen.ID
	if !j.there {
		pull, cancel := context.WithTimeout(ctx, a.settings.Docker.PullTimeout)
		defer cancel()
		if _, err := a.docker.EnsureImage(pull, j.image, engine.Pull(a.settings.Docker.PullBehavior), func(line string) {
			a.log.Debug("pull", zap.String("image", j.image), zap.String("says", line))
		}); err != nil {
			return a.failed(ctx, err)
		}
		parent, err := a.cgroups.Ensure(ctx, j.task.ID, j.limits)
		if err != nil {
			return a.failed(ctx, &engine.Error{Code: "ResourceInitializationError", Err: err})
		}
		j.request.CgroupParent = parent
	}
	if len(j.units) > 0 {
		if err := j.enter(); err != nil {
			return outcome{err: err, refused: true}
		}
	}
	if !j.there {
		var err error
		if err = a.gate(ctx, j); err != nil {
			return outcome{err: err, refused: true}
		}
		create, cancel := context.WithTimeout(ctx, a.settings.Docker.CreateTimeout)
		defer cancel()
		if id, err = a.docker.Create(create, j.request); err != nil {
			return a.failed(ctx, err)
		}
	}
	if err := a.gate(ctx, j); err != nil {
		return a.outcome(ctx, id, outcome{err: err, refused: true})
	}
	if err := ctx.Err(); err != nil {
		return a.outcome(ctx, id, outcome{err: err})
	}
	// Once asked, Docker starts it, whoever waits for that: a stop that comes now has to
	// wait for it too, or the container would run when its task counts as stopped.
	if err := a.docker.Start(a.ctx, id); err != nil {
		o := a.failed(ctx, err)
		o.unsure = errors.Is(err, engine.ErrTimeout)
		return a.outcome(ctx, id, o)
	}
	if err := a.gate(ctx, j); err != nil && ctx.Err() == nil {
		a.log.Warn("the GPU was lost while a container started on it, taking the container back",
			zap.String("task", j.task.ID), zap.String("container", j.request.Labels.Container), zap.Error(err))
		if kill := a.takeBack(ctx, j, id); kill != nil {
			err = errors.Join(err, kill)
		}
		return a.outcome(ctx, id, outcome{err: err, refused: true, killed: j.there && !j.seen.Created})
	}
	return a.outcome(ctx, id, outcome{})
}

// takeBack kills a container that has just been started on a GPU that is no
// longer held, and removes it, so that its next launch is a first one.
func (a *Agent) takeBack(ctx context.Context, j job, id string) error {
	if err := a.docker.Kill(ctx, id); err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if _, err := a.docker.Wait(wait, id); err != nil {
		return err
	}
	if j.there && !j.seen.Created { // it has run before: its past stays readable
		return nil
	}
	return a.docker.Remove(ctx, id)
}

// gate says why a container may not start now, or nil. Nothing but a fresh look
// opens it, and nothing skips it.
func (a *Agent) gate(ctx context.Context, j job) error {
	if j.closed != "" {
		return errors.New(j.closed)
	}
	for _, u := range j.units {
		if j.shared && u.holder == nil {
			return fmt.Errorf("GPU %s cannot be shared: %s", u.dev.UUID, u.noSharing)
		}
		if !j.shared {
			if u.holder == nil {
				continue
			}
			if s := u.holder.Status(); s.State != mps.PhaseDedicated {
				return fmt.Errorf("GPU %s is not free of MPS yet: %s", u.dev.UUID, s.State)
			}
			continue
		}
		o := u.holder.Observe(ctx)
		v := healthcheck.Held(o)
		a.recordVerdict(u, o, v)
		if !v.Held {
			return fmt.Errorf("GPU %s is not held: %s", u.dev.UUID, v.Reason)
		}
	}
	return nil
}

// failed sorts an error of Docker's: one that may pass is tried again.
func (a *Agent) failed(ctx context.Context, err error) outcome {
	return outcome{err: err, refused: ctx.Err() != nil || a.docker.Ping(ctx) != nil}
}

// outcome adds what Docker has now.
func (a *Agent) outcome(ctx context.Context, id string, o outcome) outcome {
	// The launch may have been cancelled; what it left behind is to be known all the same.
	look, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	c, err := a.docker.Inspect(look, id)
	switch {
	case err == nil:
		o.container = &c
	case errors.Is(err, engine.ErrVanished):
		o.removed = true
	default: // it is there; the next list says more
		o.container = &engine.Container{ID: id, State: engine.Created}
	}
	return o
}

// Bounds of the steps of a stop, past the container's own stop timeout.
const (
	terminateTimeout = 2 * time.Second  // terminate_client, per container
	killTimeout      = 30 * time.Second // a killed process that does not go is stuck in the kernel
)

// stop ends one container in MPS's order: TERM, its stop timeout,
// terminate_client for each of its processes, KILL. A client that is killed with
// work in flight can hang the server and every other client [D].
func (a *Agent) stop(ctx context.Context, j job) outcome {
	id := j.seen.ID
	if j.seen.Created {
		// It has not run. Docker may have been asked to start it, by an agent that was
		// killed, say, and get to that later: once it is removed it never will.
		if err := a.docker.Remove(ctx, id); err != nil {
			return a.outcome(ctx, id, outcome{err: err})
		}
		return outcome{removed: true}
	}
	if err := a.docker.Signal(ctx, id, ""); err != nil {
		return a.outcome(ctx, id, outcome{err: err})
	}
	graceful, cancel := context.WithTimeout(ctx, j.stopAfter)
	c, err := a.docker.Wait(graceful, id)
	cancel()
	if err == nil {
		return outcome{container: &c}
	}
	if ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) {
		return a.outcome(ctx, id, outcome{err: err})
	}
	if j.shared {
		a.terminateClients(ctx, j, id)
	}
	if err := a.docker.Kill(ctx, id); err != nil {
		return a.outcome(ctx, id, outcome{err: err})
	}
	killed, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	c, err = a.docker.Wait(killed, id)
	if err != nil {
		return a.outcome(ctx, id, outcome{err: err})
	}
	return outcome{container: &c}
}

func (a *Agent) terminateClients(ctx context.Context, j job, id string) {
	ctx, cancel := context.WithTimeout(ctx, terminateTimeout)
	defer cancel()
	pids, err := a.docker.PIDs(ctx, id)
	if err != nil {
		a.log.Warn("cannot list a container's processes before its kill", zap.String("task", j.task.ID), zap.Error(err))
	}
	for _, u := range j.units {
		if u.holder.Status().DaemonPID == 0 {
			continue // nobody is there to tell
		}
		for _, pid := range pids {
			if err := u.holder.TerminateClient(ctx, pid); err != nil {
				a.log.Info("terminate_client", zap.String("task", j.task.ID), zap.Int("pid", pid), zap.Error(err))
			}
		}
	}
}

// forget removes what a stopped task left: containers, volumes, cgroup, record.
// What fails is tried again with the next list.
func (a *Agent) forget(rec state.Task) {
	id := rec.ID
	err := a.remove(a.ctx, id)
	if err == nil {
		err = a.store.Forget(&rec)
	}
	a.post(func() {
		t := a.tasks[id]
		if t == nil {
			return
		}
		t.forgetting = false
		if err != nil {
			t.retryAt = time.Now().Add(retryMost)
			a.log.Warn("cannot remove a stopped task, retrying", zap.String("task", id), zap.Error(err))
			return
		}
		delete(a.tasks, id)
	})
}

func (a *Agent) remove(ctx context.Context, taskID string) error {
	all, err := a.docker.List(ctx, a.settings.Instance)
	if err != nil {
		return err
	}
	for _, c := range all {
		if c.Labels.Task != taskID {
			continue
		}
		if err := a.docker.Remove(ctx, c.ID); err != nil {
			return err
		}
	}
	if err := a.docker.RemoveVolumes(ctx, a.settings.Instance, taskID); err != nil {
		return err
	}
	return a.cgroups.Remove(ctx, taskID)
}
