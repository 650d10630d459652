package rig

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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

// System is a placement server with its store, and simulated machines with an agent
// each: berth dev.
type System struct {
	Dir      string // everything but RunDir
	RunDir   string // short: at most 20 bytes
	Machines int    // to begin with
	GPUs     int    // of each, of 80 GiB
	Settings []string

	dev *process
}

// Log is where berth dev's output goes; server.log and the agents' logs are beside it.
func (s *System) Log() string { return filepath.Join(s.Dir, "dev.log") }

// Socket is the server's.
func (s *System) Socket() string { return filepath.Join(s.RunDir, "server.sock") }

// Machine is the folder of a simulated machine, which berth fault takes.
func (s *System) Machine(instance string) string {
	return filepath.Join(s.Dir, "machines", "machines", instance, "machine")
}

// Names are the machines there are, by their folders.
func (s *System) Names() (all []string) {
	found, _ := filepath.Glob(s.Machine("dev-*"))
	for _, f := range found {
		all = append(all, filepath.Base(filepath.Dir(f)))
	}
	return all
}

func (s *System) flags() []string { return []string{"--dir", s.Dir, "--run-dir", s.RunDir} }

// Sweep takes away what an earlier system in the same folder has left. One that still
// runs is an error.
func (s *System) Sweep(ctx context.Context) error {
	var server api.Server
	if s.Get(ctx, api.PathServer, &server) == nil {
		return fmt.Errorf("a server answers at %s already: end its berth dev first (kill -INT)", s.Socket())
	}
	if _, err := os.Stat(filepath.Join(s.Dir, "machines")); err == nil {
		if err := Command(ctx, "build/berth", append([]string{"dev", "--down"}, s.flags()...)...); err != nil {
			return err
		}
	}
	return errors.Join(os.RemoveAll(s.Dir), os.MkdirAll(s.Dir, 0o755))
}

// Start starts berth dev, and waits until its server answers and every machine has joined.
func (s *System) Start(ctx context.Context) (Fleet, error) {
	args := append([]string{"dev", "--instances", strconv.Itoa(s.Machines), "--gpus", strconv.Itoa(s.GPUs), "--gpu-memory", "81920"}, s.flags()...)
	for _, kv := range s.Settings {
		args = append(args, "--agent-setting", kv)
	}
	fmt.Printf("$ build/berth %s\n", strings.Join(args, " "))
	p, err := start(s.Log(), "build/berth", args...)
	if err != nil {
		return Fleet{}, err
	}
	s.dev = p
	return s.Until(ctx, 2*time.Minute, "every machine has joined", func(f Fleet) bool { return len(f.Well()) == s.Machines })
}

// Signal sends berth dev a signal that ends it, and waits until it has. After an
// interrupt it takes everything away first.
func (s *System) Signal(sig os.Signal) (*os.ProcessState, error) {
	if s.dev == nil {
		return nil, errors.New("berth dev does not run")
	}
	state, err := s.dev.end(sig, 4*time.Minute)
	if err == nil {
		s.dev = nil
	}
	return state, err
}

// Abandon is for the end of a program: what is left is taken away, if there is anything.
func (s *System) Abandon() (there bool, err error) {
	if s.dev != nil {
		there = true
		if _, err := s.Signal(os.Interrupt); err != nil {
			_, _ = s.Signal(syscall.SIGKILL)
		}
	}
	if _, err := os.Stat(filepath.Join(s.Dir, "machines")); err != nil {
		return there, nil
	}
	return true, Command(context.Background(), "build/berth", append([]string{"dev", "--down"}, s.flags()...)...)
}

// RemoveImage removes the sample image; used says that a container of somebody else has it,
// so that it stays.
func RemoveImage(ctx context.Context) (used bool, err error) {
	_, err = ask(ctx, http.MethodDelete, docker, "/images/berth-sample:latest", nil)
	if err != nil && strings.Contains(err.Error(), "409 ") {
		return true, nil
	}
	return false, err
}

// Berth runs an operator's command on the system, whose output the reader sees.
func (s *System) Berth(ctx context.Context, args ...string) error {
	return Command(ctx, "build/berth", append(args, "--socket", s.Socket())...)
}

// Get asks the server.
func (s *System) Get(ctx context.Context, path string, v any) error {
	return getFrom(ctx, s.Socket(), path, v)
}

// Fleet is the server's picture at one moment.
type Fleet struct {
	Instances []api.Instance
	Tasks     []Task // newest first
}

// Look takes the server's picture.
func (s *System) Look(ctx context.Context) (f Fleet, err error) {
	if err := s.Get(ctx, api.PathInstances, &f.Instances); err != nil {
		return f, err
	}
	return f, s.Get(ctx, api.PathTasks, &f.Tasks)
}

// Until looks ten times a second until the picture is as it should be.
func (s *System) Until(ctx context.Context, limit time.Duration, what string, ok func(Fleet) bool) (Fleet, error) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(limit)
	for {
		f, err := s.Look(ctx)
		if err == nil && ok(f) {
			return f, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return f, errors.New("interrupted")
		case <-s.dev.ended:
			return f, fmt.Errorf("berth dev ended (%s) before %s; %s says why", s.dev.cmd.ProcessState, what, s.Log())
		case <-deadline:
			if err == nil {
				_ = s.Berth(ctx, "ps", "-a")
				_ = s.Berth(ctx, "top", "--once")
			}
			return f, fmt.Errorf("within %s, not seen: %s (%v)", limit, what, err)
		}
	}
}

// LogUntil waits for a line of a task's log that has text in it.
func (s *System) LogUntil(ctx context.Context, task, text string) (line string, err error) {
	_, err = s.Until(ctx, 20*time.Second, "a line with "+text, func(Fleet) bool {
		out, err := exec.CommandContext(ctx, "build/berth", "logs", task, "--socket", s.Socket()).Output()
		line = lineWith(string(out), text)
		return err == nil && line != ""
	})
	return line, err
}

// Events are the server's, after a sequence number.
func (s *System) Events(ctx context.Context, after uint64) (all []api.Event, err error) {
	answer, err := ask(ctx, http.MethodGet, s.Socket(), fmt.Sprintf("%s?after=%d", api.PathEvents, after), nil)
	if err != nil {
		return nil, err
	}
	for lines := json.NewDecoder(bytes.NewReader(answer)); ; {
		var e api.Event
		switch err := lines.Decode(&e); {
		case errors.Is(err, io.EOF):
			return all, nil
		case err != nil:
			return nil, err
		}
		all = append(all, e)
	}
}

// Well are the machines that take tasks and whose health is OK.
func (f Fleet) Well() (all []api.Instance) {
	for _, in := range f.Instances {
		if in.Connected && in.Status == api.InstanceActive && in.Health.OverallStatus == api.HealthOK {
			all = append(all, in)
		}
	}
	return all
}

// Instance is the machine with this name, or an empty one.
func (f Fleet) Instance(name string) api.Instance {
	for _, in := range f.Instances {
		if in.Name == name {
			return in
		}
	}
	return api.Instance{}
}

// GPU is the one with this id, or an empty one.
func (f Fleet) GPU(id string) api.GPU {
	for _, in := range f.Instances {
		for _, g := range in.GPUs {
			if g.ID == id {
				return g
			}
		}
	}
	return api.GPU{}
}

// Running are the tasks of a name that run.
func (f Fleet) Running(name string) (all []Task) {
	for _, t := range f.Tasks {
		if t.Name == name && t.LastStatus == api.StatusRunning {
			all = append(all, t)
		}
	}
	return all
}

// Task is the newest task of a name, or an empty one.
func (f Fleet) Task(name string) Task {
	for _, t := range f.Tasks {
		if t.Name == name {
			return t
		}
	}
	return Task{}
}

// Leftovers is what must not be there once these machines are gone, and is.
func (s *System) Leftovers(ctx context.Context, instances ...string) (left []string, err error) {
	containers, err := Containers(ctx, "berth.instance")
	if err != nil {
		return nil, err
	}
	var dirs []string
	for _, name := range instances {
		for _, c := range containers {
			if c.Labels["berth.instance"] == name {
				left = append(left, c.String())
			}
		}
		folder, err := filepath.Abs(filepath.Dir(s.Machine(name)))
		if err != nil {
			return nil, err
		}
		left = append(left, processesUnder(folder)...)
		dirs = append(dirs, filepath.Join(s.RunDir, name), folder)
	}
	left = append(left, existing(dirs...)...)
	mounts, err := mountsUnder(dirs...)
	if err != nil {
		return nil, err
	}
	return append(append(left, mounts...), cgroupsOf(instances...)...), nil
}

// AllLeftovers is what must not be there once the whole system is gone, and is.
func (s *System) AllLeftovers(ctx context.Context, instances ...string) ([]string, error) {
	left, err := s.Leftovers(ctx, instances...)
	left = append(left, processesUnder(s.Dir)...)
	return append(left, existing(s.RunDir, filepath.Join(s.Dir, "server"), filepath.Join(s.Dir, "machines"))...), err
}
