package dev

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"go.uber.org/zap"
)

// How long the steps may take; the caller's context may end them sooner.
const (
	makeLimit   = time.Minute
	answerLimit = 15 * time.Second
	termLimit   = 20 * time.Second // an agent leaves its containers alone when it ends
	purgeLimit  = 3 * time.Minute  // of which tasks take their stop time-outs
	killLimit   = 10 * time.Second
)

// Launch makes the machine of a token and starts its agent. For the same token it is the
// same machine: what was cut short is done, and an agent that does not run is started. A
// machine that was terminated is ErrEnded.
func (p *Provider) Launch(ctx context.Context, token string) (Machine, error) {
	id := Name(token)
	unlock, err := p.lock(ctx, id)
	if err != nil {
		return Machine{}, err
	}
	defer unlock()

	r, err := p.read(id)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if ended, err := p.ended(id); err != nil || ended {
			return Machine{}, errors.Join(err, fmt.Errorf("dev: token %s: %w", token, ErrEnded))
		}
		r = record{ID: id, Token: token, Mark: rand.Text()}
		if err := os.MkdirAll(p.folder(id), 0o755); err != nil {
			return Machine{}, fmt.Errorf("dev: %w", err)
		}
		if err := p.save(r); err != nil {
			return Machine{}, err
		}
	case err != nil:
		return Machine{}, err
	case r.Token != token:
		return Machine{}, fmt.Errorf("dev: %s was made for the token %q, not for %q: give another token", id, r.Token, token)
	}
	return p.start(ctx, r)
}

// Start starts the agent of a machine where it does not run.
func (p *Provider) Start(ctx context.Context, id string) (Machine, error) {
	unlock, err := p.lock(ctx, id)
	if err != nil {
		return Machine{}, err
	}
	defer unlock()
	r, err := p.read(id)
	if err != nil {
		return Machine{}, err
	}
	return p.start(ctx, r)
}

func (p *Provider) start(ctx context.Context, r record) (Machine, error) {
	if r.Ending {
		return Machine{}, fmt.Errorf("dev: %s: %w", r.ID, ErrEnded)
	}
	if !r.Made {
		if err := p.stopErrands(ctx, r); err != nil {
			return Machine{}, err
		}
		// What an earlier try has left was never used.
		if err := os.RemoveAll(p.sim(r.ID)); err != nil {
			return Machine{}, fmt.Errorf("dev: %w", err)
		}
		err := p.program(ctx, makeLimit, r.Mark, p.Berth, "sim", "create", p.sim(r.ID), "--gpus", strconv.Itoa(p.GPUs), "--gpu-memory", strconv.FormatInt(p.GPUMemoryMiB, 10))
		if err != nil {
			return Machine{}, err
		}
		if err := p.configure(r.ID); err != nil {
			return Machine{}, err
		}
		r.Made = true
		if err := p.save(r); err != nil {
			return Machine{}, err
		}
	}
	agent := p.agentOf(r)
	if agent == nil {
		var err error
		if agent, err = p.spawn(&r); err != nil {
			return Machine{}, err
		}
		p.Log.Info("agent started", zap.String("instance", r.ID), zap.Int("pid", agent.pid), zap.String("log", p.LogFile(r.ID)))
	}
	defer agent.release()
	if agent.pid != r.PID || agent.start != r.Start {
		r.PID, r.Start = agent.pid, agent.start
		if err := p.save(r); err != nil {
			return Machine{}, err
		}
	}
	return Machine{r.ID, r.Token, r.PID}, p.answers(ctx, r.ID, agent)
}

// spawn starts the agent in a session of its own, so that it outlives this process and
// no signal of a terminal reaches it.
func (p *Provider) spawn(r *record) (*process, error) {
	log, err := os.OpenFile(p.LogFile(r.ID), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("dev: %w", err)
	}
	defer log.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, fmt.Errorf("dev: %w", err)
	}
	defer null.Close()
	handle, err := os.StartProcess(p.Agent, []string{p.Agent, "run", "--config", p.config(r.ID)}, &os.ProcAttr{Dir: p.folder(r.ID), Env: environment(r.Mark),
		Files: []*os.File{null, log, log}, Sys: &syscall.SysProcAttr{Setsid: true}})
	if err != nil {
		return nil, fmt.Errorf("dev: start %s: %w", p.Agent, err)
	}
	// Nobody waits for it: lives reaps it where it ends before this process.
	start, alive := lives(handle.Pid)
	if !alive {
		_ = handle.Release()
		return nil, p.diedAtOnce(r.ID)
	}
	return &process{handle.Pid, start, handle}, nil
}

// answers waits until the agent answers. One that takes longer is no error: it may join
// yet, and whoever waits for that has a limit.
func (p *Provider) answers(ctx context.Context, id string, agent *process) error {
	ctx, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	dead := false
	_ = every(ctx, func() bool {
		if start, alive := lives(agent.pid); !alive || start != agent.start {
			dead = true
			return true
		}
		conn, err := net.Dial("unix", p.Socket(id))
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	if dead {
		return p.diedAtOnce(id)
	}
	return nil
}

func (p *Provider) diedAtOnce(id string) error {
	said, _ := os.ReadFile(p.LogFile(id))
	return fmt.Errorf("dev: the agent of %s ended at once%s", id, lastLine(said))
}

// configure writes the agent's settings. JSON is YAML.
func (p *Provider) configure(id string) error {
	dir, sim := p.folder(id), p.sim(id)
	if err := os.MkdirAll(filepath.Join(dir, "tasks"), 0o755); err != nil {
		return fmt.Errorf("dev: %w", err)
	}
	all := map[string]any{}
	for key, v := range map[string]any{
		"instance": id, "runDir": p.runDir(id), "stateDir": filepath.Join(dir, "state"), "logDir": filepath.Join(dir, "log"), "taskDir": filepath.Join(dir, "tasks"),
		"metricsAddress": "", "docker.runtime": "plain", "docker.pullBehavior": "prefer-cached",
		"gpu.devRoot": filepath.Join(sim, "dev"), "gpu.nvmlLibrary": filepath.Join(sim, "lib", "libnvidia-ml.so.1"), "gpu.sampleEvery": "1s",
		"mps.controlBinary": filepath.Join(sim, "bin", "nvidia-cuda-mps-control"), "mps.path": filepath.Join(sim, "bin") + ":/usr/sbin:/usr/bin:/sbin:/bin",
		"mps.libraryPath": filepath.Join(sim, "lib"),
	} {
		set(all, key, v)
	}
	if p.Server != "" {
		set(all, "server.address", []string{p.Server})
	}
	if p.Cluster != "" {
		set(all, "cluster", p.Cluster)
	}
	for key, v := range p.Settings {
		set(all, key, v)
	}
	text, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return fmt.Errorf("dev: settings: %w", err)
	}
	return write(p.config(id), append(text, '\n'))
}

// set puts a value under a key with dots.
func set(all map[string]any, key string, v any) {
	for {
		section, rest, ok := strings.Cut(key, ".")
		if !ok {
			all[key] = v
			return
		}
		inner, ok := all[section].(map[string]any)
		if !ok {
			inner = map[string]any{}
			all[section] = inner
		}
		all, key = inner, rest
	}
}

// Terminate ends a machine and takes away all that it was: its agent ends, its tasks are
// stopped, its daemons quit, its folders go. One that was terminated before is no error;
// one that was not made here is.
func (p *Provider) Terminate(ctx context.Context, id string) error {
	if id == "" || id != filepath.Base(id) || id == "." || id == ".." {
		return fmt.Errorf("dev: %q is no machine's id", id)
	}
	unlock, err := p.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	r, err := p.read(id)
	if errors.Is(err, fs.ErrNotExist) {
		if ended, err := p.ended(id); err != nil || !ended {
			return errors.Join(err, fmt.Errorf("dev: %s was not made here: end it where it was made", id))
		}
		return p.remove(id) // what an earlier try has left
	} else if err != nil {
		return err
	}

	// 1. It is not started again, and its agent ends.
	if !r.Ending {
		r.Ending = true
		if err := p.save(r); err != nil {
			return err
		}
	}
	if err := p.bury(r); err != nil {
		return err
	}
	if agent := p.agentOf(r); agent != nil {
		err := agent.end(ctx, syscall.SIGTERM, termLimit)
		if err != nil && ctx.Err() == nil { // stopped, or hung
			err = agent.end(ctx, syscall.SIGKILL, killLimit)
		}
		agent.release()
		if err != nil {
			return fmt.Errorf("dev: the agent of %s (pid %d) does not end: %w", id, agent.pid, err)
		}
	}
	// 2. What the agent made.
	if err := p.stopErrands(ctx, r); err != nil {
		return err
	}
	if _, err := os.Stat(p.config(id)); err == nil && r.Made {
		if err := p.program(ctx, purgeLimit, r.Mark, p.Agent, "purge", "--config", p.config(id)); err != nil {
			return err
		}
	}
	// 3. What is left, as of a machine whose state file was lost.
	if err := p.kill(ctx, r, p.left(r)); err != nil {
		return err
	}
	p.Log.Info("machine terminated", zap.String("instance", id))
	return p.remove(id)
}

func (p *Provider) stopErrands(ctx context.Context, r record) error {
	return p.kill(ctx, r, p.errands(r))
}

// kill ends processes of a machine and lets go of them.
func (p *Provider) kill(ctx context.Context, r record, left []*process) (err error) {
	for _, q := range left {
		p.Log.Warn("a process of an earlier operation was left, and is killed", zap.String("instance", r.ID), zap.Int("pid", q.pid))
		if e := q.end(ctx, syscall.SIGKILL, killLimit); e != nil {
			err = errors.Join(err, fmt.Errorf("dev: process %d of %s does not end: %w", q.pid, r.ID, e))
		}
		q.release()
	}
	return err
}

// bury remembers that a machine is gone, so that a launch that comes late makes none.
func (p *Provider) bury(r record) error {
	if err := os.MkdirAll(filepath.Dir(p.tomb(r.ID)), 0o755); err != nil {
		return fmt.Errorf("dev: %w", err)
	}
	return write(p.tomb(r.ID), []byte(r.Token+"\n"))
}

// remove takes the folders away, the one with the record last.
func (p *Provider) remove(id string) error {
	if err := os.RemoveAll(p.runDir(id)); err != nil {
		return fmt.Errorf("dev: %w", err)
	}
	gone := filepath.Join(p.machines(), ".gone-"+id)
	// Renamed first: a folder that is half gone has no record and counts as none.
	if err := os.Rename(p.folder(id), gone); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("dev: %w", err)
	}
	if err := os.RemoveAll(gone); err != nil {
		return fmt.Errorf("dev: %w", err)
	}
	return nil
}
