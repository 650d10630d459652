package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/mps/mpssim"
)

// definition is one of the workload's. The family names the cap, so that the witness
// knows it: name-MiB; without one the task takes whole GPUs.
func (f *fireSystem) definition(family string, percent, revision int, command ...string) json.RawMessage {
	c := map[string]any{"name": "main", "image": f.image, "entryPoint": []string{"/bin/cuda-client"}, "command": command, "memory": 32,
		"environment": []any{map[string]any{"name": "REVISION", "value": fmt.Sprint(revision)}}}
	if mib := capOf(family); mib > 0 {
		share := map[string]any{"memory": mib}
		if percent > 0 {
			share["maxComputePercent"] = percent
		}
		c["resourceRequirements"] = []any{map[string]any{"type": "GPU", "sharingStrategy": map[string]any{"nvidiaMps": share}}}
	} else {
		c["resourceRequirements"] = []any{map[string]any{"type": "GPU", "value": "1"}}
	}
	b, err := json.Marshal(map[string]any{"family": family, "containerDefinitions": []any{c}})
	if err != nil {
		panic(err)
	}
	return b
}

// fireLoad is the rolling workload: it asks until it is answered, as berth's commands
// do, and so knows what the server has accepted.
type fireLoad struct {
	*fireSystem
	random   *mathrand.Rand
	revision int
	desired  int      // of the service roll
	alone    []string // standalone tasks that were not stopped yet
	accepted int
}

const steady, rolling = "steady", "rolling"

// sure asks until the server answers, for as long as a restart may take.
func (l *fireLoad) sure(ctx context.Context, method, path string, in, into any) error {
	end := time.Now().Add(90 * time.Second)
	for {
		err := l.ask(method, path, in, into)
		var no *refusal
		if err == nil || errors.As(err, &no) && no.status < 500 {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
		if time.Now().After(end) {
			return fmt.Errorf("no answer for 90 s: %w", err)
		}
	}
}

// begin makes the services.
func (l *fireLoad) begin(ctx context.Context) error {
	l.desired = 3
	l.note(noteChanged, rolling)
	return errors.Join(
		l.sure(ctx, "POST", api.PathServices, api.Service{Name: steady, DesiredCount: 8, MinimumHealthyPercent: 100, MaximumPercent: 200,
			Definition: l.definition("steady-12288", 0, 0, "run", "--memory", "1GiB")}, nil),
		l.sure(ctx, "POST", api.PathServices, api.Service{Name: rolling, DesiredCount: l.desired, MinimumHealthyPercent: 50, MaximumPercent: 200,
			Definition: l.definition("rolling-10240", 30, 0, "run", "--memory", "512MiB")}, nil))
}

// turn does one thing.
func (l *fireLoad) turn(ctx context.Context) error {
	service := strings.Replace(api.PathService, "{name}", rolling, 1)
	switch l.random.IntN(8) {
	case 0, 1:
		l.desired = 1 + l.random.IntN(4)
		l.note(noteChanged, rolling)
		return l.sure(ctx, "POST", service, api.ServiceUpdate{DesiredCount: &l.desired}, nil)
	case 2:
		l.revision++
		l.note(noteChanged, rolling)
		return l.sure(ctx, "POST", service, api.ServiceUpdate{Definition: l.definition("rolling-10240", 30, l.revision, "run", "--memory", "512MiB")}, nil)
	case 3:
		return l.run(ctx, false, l.definition("brief-4096", 0, 0, "run", "--memory", "64MiB", "--for", fmt.Sprintf("%dms", 200+l.random.IntN(4000))))
	case 4:
		if len(l.alone) < 4 {
			return l.run(ctx, l.random.IntN(2) == 0, l.definition("alone-8192", 20, 0, "run", "--memory", "256MiB"))
		}
	case 5:
		if len(l.alone) < 4 {
			return l.run(ctx, true, l.definition("whole", 0, 0, "run", "--memory", "1GiB"))
		}
	}
	if len(l.alone) > 0 {
		return l.stop(ctx)
	}
	return nil
}

func (l *fireLoad) run(ctx context.Context, reschedule bool, definition json.RawMessage) error {
	var a api.RunTaskAnswer
	in := api.RunTask{Definition: definition, Count: 1 + l.random.IntN(2), Reschedule: reschedule, ClientToken: rand.Text()}
	if err := l.sure(ctx, "POST", api.PathTasks, in, &a); err != nil {
		return err
	}
	if len(a.Tasks) != in.Count {
		l.fail("4: %d tasks asked for, %d answered", in.Count, len(a.Tasks))
	}
	for _, t := range a.Tasks {
		l.note(noteAccepted, t.ID)
		l.accepted++
		if !strings.HasPrefix(t.Family, "brief") {
			l.alone = append(l.alone, t.ID)
		}
	}
	return nil
}

// stop ends one of the standalone tasks, and whatever takes its place meanwhile.
func (l *fireLoad) stop(ctx context.Context) error {
	i := l.random.IntN(len(l.alone))
	id := l.alone[i]
	l.alone = slices.Delete(l.alone, i, i+1)
	l.note(noteChanged, id)
	for {
		var all []api.Task
		if err := l.sure(ctx, "GET", api.PathTasks+"?line="+id, nil, &all); err != nil {
			return err
		}
		left := false
		for _, t := range all {
			if t.LastStatus == api.StatusStopped {
				continue
			}
			left = left || t.DesiredStatus == api.StatusRunning
			if err := l.sure(ctx, "POST", strings.Replace(api.PathStop, "{id}", t.ID, 1), struct{}{}, nil); err != nil {
				return err
			}
		}
		if !left {
			return nil
		}
	}
}

// rest stops all standalone tasks, for the end.
func (l *fireLoad) rest(ctx context.Context) error {
	for len(l.alone) > 0 {
		if err := l.stop(ctx); err != nil {
			return err
		}
	}
	return nil
}

// drive does one thing after another until ctx ends.
func (l *fireLoad) drive(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Duration(150+l.random.IntN(700)) * time.Millisecond):
		}
		if err := l.turn(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
}

// hurt makes one GPU's daemon, server or a client fail now and then, and once in a while
// kills a daemon each time it comes back, until its GPU is given up.
func (f *fireSystem) hurt(ctx context.Context, random *mathrand.Rand, bursts int) {
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Duration(3000+random.IntN(4000)) * time.Millisecond):
		}
		dir, gpu := f.someGPU(random)
		if gpu == "" {
			continue
		}
		if bursts > 0 && n%4 == 2 {
			bursts--
			f.burst(ctx, dir, gpu)
			continue
		}
		// A clean machine has a fault within its budget.
		f.note(noteFault, gpu)
		switch random.IntN(3) {
		case 0:
			mpssim.KillDaemon(dir, gpu)
		case 1:
			mpssim.CrashServer(dir, gpu)
		default:
			mpssim.FatalFault(dir, gpu, 700)
		}
	}
}

func (f *fireSystem) burst(ctx context.Context, dir, gpu string) {
	f.note("burst", gpu)
	bounded, cancel := context.WithTimeout(ctx, 40*time.Second)
	defer cancel()
	for killed := 0; killed < 4; {
		if pids, _ := mpssim.Daemons(dir, gpu); len(pids) > 0 {
			f.note(noteFault, gpu)
			mpssim.KillDaemon(dir, gpu)
			killed++
		}
		select {
		case <-bounded.Done():
			return
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// someGPU is a machine's folder and one of its GPUs.
func (f *fireSystem) someGPU(random *mathrand.Rand) (dir, gpu string) {
	ids := f.ids()
	if len(ids) == 0 {
		return "", ""
	}
	id := ids[random.IntN(len(ids))]
	f.mu.Lock()
	defer f.mu.Unlock()
	var gpus []string
	for g, at := range f.witness.home {
		if at == id && !f.witness.ending[id] {
			gpus = append(gpus, g)
		}
	}
	if len(gpus) == 0 {
		return "", ""
	}
	slices.Sort(gpus)
	return filepath.Join(f.dir, "machines", "machines", id, "machine"), gpus[random.IntN(len(gpus))]
}

// decoys are processes that look like berth's and are nobody's: whoever kills by name
// kills them.
func (f *fireSystem) decoys(ctx context.Context) (alive func() []string, stop func()) {
	f.t.Helper()
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		f.t.Fatal(err)
	}
	type decoy struct {
		cmd   *exec.Cmd
		ended chan error
	}
	var all []decoy
	dir := filepath.Join(filepath.Dir(f.dir), "decoys")
	for _, name := range []string{mpssim.ControlName, mpssim.ServerName, mpssim.ClientName, "berth-agent", "berth"} {
		path := filepath.Join(dir, name)
		if out, err := exec.CommandContext(ctx, "install", "-D", sleep, path).CombinedOutput(); err != nil {
			f.t.Fatalf("%v: %s", err, out)
		}
		cmd := exec.Command(path, "100000")
		cmd.Env = []string{"BERTH_MPS_ID=decoy", "CUDA_VISIBLE_DEVICES=GPU-00000000-0000-0000-0000-000000000000"}
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			f.t.Fatal(err)
		}
		d := decoy{cmd, make(chan error, 1)}
		go func() { d.ended <- cmd.Wait() }()
		all = append(all, d)
	}
	alive = func() (dead []string) {
		for _, d := range all {
			select {
			case err := <-d.ended:
				d.ended <- err
				dead = append(dead, fmt.Sprintf("%s: %v", d.cmd.Path, err))
			default:
			}
		}
		return dead
	}
	return alive, func() {
		for _, d := range all {
			d.cmd.Process.Kill()
			<-d.ended
		}
	}
}
