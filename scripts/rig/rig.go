// Package rig starts an agent on a simulated machine, or a whole system of a placement
// server and such machines, and looks at it from outside, with what an operator has:
// berth, berth-agent, the task folder, berth's sockets, Docker's.
// It is for the programs behind make demo and make bench, which run as root in the
// repository's root.
package rig

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/berth-gpu/berth/api"
)

// Rig is one agent on one simulated machine.
type Rig struct {
	Dir      string // everything but RunDir: build/demo
	Instance string // letters and digits, so that it is the same in a cgroup's name
	RunDir   string // short: socket paths have 107 bytes

	agent *process
}

// Settings is the agent's settings file.
func (r *Rig) Settings() string { return filepath.Join(r.Dir, "agent.yaml") }

// Machine is the simulated machine's folder.
func (r *Rig) Machine() string { return filepath.Join(r.Dir, "machine") }

// Log is where the agent's log goes.
func (r *Rig) Log() string { return filepath.Join(r.Dir, "agent.log") }

// Task is the file of the task definition with this name.
func (r *Rig) Task(name string) string { return filepath.Join(r.Dir, "tasks", name+".json") }

// Socket is the agent's.
func (r *Rig) Socket() string { return filepath.Join(r.RunDir, "agent.sock") }

// Prepare makes the machine of so many GPUs of 80 GiB, loads the sample image, and
// writes the sample tasks and the settings, with these lines added: the first may
// continue the file's last section, mps.
func (r *Rig) Prepare(ctx context.Context, gpus int, settings ...string) error {
	err := Command(ctx, "env", append([]string{"SIMULATE=" + strconv.Itoa(gpus), "scripts/prepare", r.Dir, r.Instance, r.RunDir}, settings...)...)
	if err != nil {
		return err
	}
	return os.RemoveAll(r.Log())
}

// Purge takes away all that the agent has made, and the image.
func (r *Rig) Purge(ctx context.Context) error {
	if err := Command(ctx, "env", "BERTH_LOG_LEVEL=error", "build/berth-agent", "purge", "--config", r.Settings()); err != nil {
		return err
	}
	if err := os.Remove(r.Settings()); err != nil {
		return err
	}
	_, err := ask(ctx, http.MethodDelete, docker, "/images/berth-sample:latest", nil)
	return err
}

// Abandon is for the end of a program: if an agent still runs, it is ended, and what is
// left is purged.
func (r *Rig) Abandon() error {
	if r.agent != nil {
		_ = r.agent.cmd.Process.Signal(syscall.SIGTERM)
		r.agent.wait(30 * time.Second)
		r.agent = nil
	}
	if _, err := os.Stat(r.Settings()); err != nil {
		return nil
	}
	return r.Purge(context.Background())
}

// process is a child in a session of its own.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{}
}

// wait says whether the process ended within limit.
func (p *process) wait(limit time.Duration) bool {
	select {
	case <-p.ended:
		return true
	case <-time.After(limit):
		return false
	}
}

// start starts a program in a session of its own, with its output at the end of a file.
func start(logFile, program string, args ...string) (*process, error) {
	log, err := os.OpenFile(logFile, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	for _, kv := range os.Environ() { // a person's BERTH_ variables are not this program's
		if !strings.HasPrefix(kv, "BERTH_") {
			cmd.Env = append(cmd.Env, kv)
		}
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{cmd, make(chan struct{})}
	go func() { defer close(p.ended); _ = cmd.Wait() }()
	return p, nil
}

// end sends a signal that ends the process, and waits until it has.
func (p *process) end(sig os.Signal, limit time.Duration) (*os.ProcessState, error) {
	if err := p.cmd.Process.Signal(sig); err != nil {
		return nil, err
	}
	if !p.wait(limit) {
		return nil, fmt.Errorf("%s does not end", filepath.Base(p.cmd.Path))
	}
	return p.cmd.ProcessState, nil
}

// Start starts the agent and waits until it answers.
func (r *Rig) Start(ctx context.Context) error {
	p, err := start(r.Log(), "build/berth-agent", "run", "--config", r.Settings())
	if err != nil {
		return err
	}
	r.agent = p
	_, err = r.Until(ctx, 30*time.Second, "the agent answers", func(View) bool { return true })
	return err
}

// PID is the agent's.
func (r *Rig) PID() int { return r.agent.cmd.Process.Pid }

// Signal sends the agent a signal that ends it, and waits until it has.
func (r *Rig) Signal(sig os.Signal) (*os.ProcessState, error) {
	state, err := r.agent.end(sig, 30*time.Second)
	if err != nil {
		return nil, err
	}
	r.agent = nil
	return state, nil
}

// Command runs a program, whose output the reader sees.
func Command(ctx context.Context, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	fmt.Printf("$ %s %s\n", name, strings.Join(args, " "))
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(cmd.Args, " "), err)
	}
	return nil
}

// Until looks twice in a tenth of a second until the picture is as it should be.
func (r *Rig) Until(ctx context.Context, limit time.Duration, what string, ok func(View) bool) (View, error) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(limit)
	for {
		v, err := r.Look(ctx)
		if err == nil && ok(v) {
			return v, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return v, errors.New("interrupted")
		case <-r.agent.ended:
			return v, fmt.Errorf("the agent ended (%s) before %s", r.agent.cmd.ProcessState, what)
		case <-deadline:
			if err == nil {
				_ = Command(ctx, "build/berth", "ps", "-a", "--socket", r.Socket())
				_ = Command(ctx, "build/berth", "top", "--once", "--socket", r.Socket())
			}
			return v, fmt.Errorf("within %s, not seen: %s (%v)", limit, what, err)
		}
	}
}

// LogUntil waits for a line of a task's log that has text in it.
func (r *Rig) LogUntil(ctx context.Context, task, text string) (line string, err error) {
	_, err = r.Until(ctx, 20*time.Second, "a line with "+text, func(View) bool {
		out, err := exec.CommandContext(ctx, "build/berth", "logs", task, "--socket", r.Socket()).Output()
		line = lineWith(string(out), text)
		return err == nil && line != ""
	})
	return line, err
}

// lineWith is the last line with a text in it.
func lineWith(log, text string) (line string) {
	for l := range strings.Lines(log) {
		if strings.Contains(l, text) {
			line = strings.TrimSpace(l)
		}
	}
	return line
}

// Get asks the agent.
func (r *Rig) Get(ctx context.Context, path string, v any) error {
	return getFrom(ctx, r.Socket(), path, v)
}

// View is the agent's picture at one moment.
type View struct {
	api.Instance
	Tasks []Task
}

// Task is one of its tasks.
type Task api.Task

// Look takes the agent's picture.
func (r *Rig) Look(ctx context.Context) (v View, err error) {
	var instances []api.Instance
	if err := r.Get(ctx, api.PathInstances, &instances); err != nil {
		return v, err
	}
	v.Instance = instances[0]
	return v, r.Get(ctx, api.PathTasks, &v.Tasks)
}

// Running are the tasks that run.
func (v View) Running() (all []Task) {
	for _, t := range v.Tasks {
		if t.LastStatus == api.StatusRunning {
			all = append(all, t)
		}
	}
	return all
}

// Task is the newest task of a name, or an empty one.
func (v View) Task(name string) Task {
	for _, t := range v.Tasks {
		if t.Name == name {
			return t
		}
	}
	return Task{}
}

// Gone says whether the newest task of a name has stopped; the agent forgets one that
// has stopped and is not wanted any more.
func (v View) Gone(name string) bool {
	t := v.Task(name)
	return t.ID == "" || t.LastStatus == api.StatusStopped
}

// ByID is the task with an id, or an empty one.
func (v View) ByID(id string) Task {
	for _, t := range v.Tasks {
		if t.ID == id {
			return t
		}
	}
	return Task{}
}

// Container is one container of the task, or an empty one.
func (t Task) Container(name string) api.Container {
	for _, c := range t.Containers {
		if c.Name == name {
			return c
		}
	}
	return api.Container{}
}

// Indexes are what an operator calls these GPUs.
func (v View) Indexes(ids []string) string {
	var names []string
	for _, g := range v.GPUs {
		for _, id := range ids {
			if g.ID == id {
				names = append(names, fmt.Sprint(g.Index))
			}
		}
	}
	return strings.Join(names, ",")
}

// UsedBy is the GPU memory that NVML shows for a name's newest task, in MiB.
func (v View) UsedBy(name string) (sum int64) {
	id := v.Task(name).ID
	for _, g := range v.GPUs {
		for _, s := range g.Slices {
			if s.TaskID == id {
				sum += s.UsedMemoryInMiB
			}
		}
	}
	return sum
}

// AllUse says whether NVML shows memory in use for every task that runs.
func (v View) AllUse() bool {
	for _, t := range v.Running() {
		if v.UsedBy(t.Name) == 0 {
			return false
		}
	}
	return true
}

// NamesEach says whether each GPU is named by one of the reasons.
func NamesEach(reasons []string, gpus []api.GPU) bool {
	all := strings.Join(reasons, "\n")
	for _, g := range gpus {
		if !strings.Contains(all, g.ID) {
			return false
		}
	}
	return len(reasons) >= len(gpus)
}

// SameContainers says whether each container of the one picture's running tasks is the
// very same in the other, running and not restarted.
func SameContainers(before, after View) bool {
	for _, t := range before.Running() {
		now := after.ByID(t.ID)
		for i, c := range t.Containers {
			if i >= len(now.Containers) || now.Containers[i].RuntimeID != c.RuntimeID || now.Containers[i].LastStatus != api.StatusRunning ||
				now.Containers[i].RestartCount != c.RestartCount {
				return false
			}
		}
	}
	return len(before.Running()) > 0
}
