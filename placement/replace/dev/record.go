package dev

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// record is machine.json. A machine lives so, each step stored before the next:
//
//	(nothing) ──> Token, Mark ──> Made ──> PID ──> Ending ──> (only its name, in ended/)
//	                 folder      sim/, agent.yaml   agent    purged
//
// An agent that was started and not recorded is known by its Mark.
type record struct {
	ID     string `json:"id"`
	Token  string `json:"token"`
	Mark   string `json:"mark"` // random; in the environment of its agent
	Made   bool   `json:"made,omitempty"`
	PID    int    `json:"pid,omitempty"`
	Start  uint64 `json:"startTime,omitempty"` // of the process: clock ticks since boot
	Ending bool   `json:"ending,omitempty"`    // it is not started again
}

func (p *Provider) machines() string        { return filepath.Join(p.Dir, "machines") }
func (p *Provider) folder(id string) string { return filepath.Join(p.machines(), id) }
func (p *Provider) sim(id string) string    { return filepath.Join(p.folder(id), "machine") }
func (p *Provider) config(id string) string { return filepath.Join(p.folder(id), "agent.yaml") }
func (p *Provider) runDir(id string) string { return filepath.Join(p.RunDir, id) }
func (p *Provider) tomb(id string) string   { return filepath.Join(p.Dir, "ended", id) }

// Socket is where a machine's agent answers.
func (p *Provider) Socket(id string) string { return filepath.Join(p.runDir(id), "agent.sock") }

// LogFile is where a machine's agent writes.
func (p *Provider) LogFile(id string) string { return filepath.Join(p.folder(id), "agent.log") }

// Simulated is a machine's folder of steer files.
func (p *Provider) Simulated(id string) string { return p.sim(id) }

func (p *Provider) read(id string) (r record, err error) {
	path := filepath.Join(p.folder(id), "machine.json")
	b, err := os.ReadFile(path)
	if err != nil {
		return r, fmt.Errorf("dev: %w", err)
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return r, fmt.Errorf("dev: %s: %w", path, err)
	}
	return r, nil
}

func (p *Provider) save(r record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return write(filepath.Join(p.folder(r.ID), "machine.json"), append(b, '\n'))
}

// write puts a file in place whole, so that it is there after a crash of the host too.
func write(path string, content []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return fmt.Errorf("dev: %w", err)
	}
	defer os.Remove(f.Name())
	_, err = f.Write(content)
	if err = errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("dev: write %s: %w", path, err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return fmt.Errorf("dev: %w", err)
	}
	return nil
}

// Made says whether a machine is one of this provider's, running or not.
func (p *Provider) Made(id string) bool {
	r, err := p.read(id)
	return err == nil && r.ID == id
}

// ended says whether a machine was terminated.
func (p *Provider) ended(id string) (bool, error) {
	_, err := os.Stat(p.tomb(id))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// lock serves one operation at a time on a machine. A process that dies lets go of it.
func (p *Provider) lock(ctx context.Context, id string) (unlock func(), err error) {
	dir := filepath.Join(p.Dir, "locks")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("dev: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, id), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("dev: %w", err)
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, fmt.Errorf("dev: lock %s: %w", f.Name(), err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("dev: another operation on %s is under way: %w", id, ctx.Err())
		}
	}
}
