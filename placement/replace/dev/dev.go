// Package dev is a provider of machines for trials: each is simulated on this host and
// has a real berth-agent of its own, as a process that goes on when the server ends. All
// machines share the host's Docker engine, in which the label berth.instance keeps them
// apart.
//
// A machine is a folder with a record, machine.json, that is written before anything
// else is made; so whoever opens the folder again knows every machine, whatever was cut
// short. Every operation may be repeated and may run beside others, in this process or
// another: a lock file serves one at a time on each machine. Every wait ends with its
// context or before.
package dev

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"go.uber.org/zap"
)

// Options are what every machine is made with.
type Options struct {
	Dir    string // everything but the sockets; it is made
	RunDir string // sockets and MPS pipe folders: short, see Open
	Berth  string // the program berth, with the simulators in sim/ beside it
	Agent  string // the program berth-agent

	GPUs         int
	GPUMemoryMiB int64
	Server       string // the address that agents stream to; "": none
	Cluster      string // "": the agent's default
	// Settings go over those that a simulated machine needs; keys as in the agent's
	// file, with dots: "mps.budget.failures".
	Settings map[string]any
	Log      *zap.Logger // nil: none
}

// Machine is one machine.
type Machine struct {
	ID    string // the instance that its agent registers as
	Token string
	PID   int // of its agent; 0: it does not run
}

// Provider makes and ends machines. Its methods may be called from any goroutine.
type Provider struct{ Options }

// ErrEnded: the machine was terminated. Its token makes no other one.
var ErrEnded = errors.New("its machine was terminated")

// MPS takes 87 bytes of a pipe folder: RunDir/dev-0123456789ab/mps/GPU-<36>/pipe.
const (
	pipeBytes = 87
	nameBytes = len("dev-0123456789ab")
	tailBytes = len("/mps/GPU-00000000-0000-0000-0000-000000000000/pipe")
)

// Open returns the provider of the machines in a folder.
func Open(o Options) (*Provider, error) {
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	for _, path := range []*string{&o.Dir, &o.RunDir, &o.Berth, &o.Agent} {
		if *path == "" {
			return nil, errors.New("dev: dir, runDir and the paths of berth and berth-agent are needed")
		}
		abs, err := filepath.Abs(*path)
		if err != nil {
			return nil, err
		}
		*path = abs
	}
	if most := pipeBytes - tailBytes - nameBytes - 1; len(o.RunDir) > most {
		return nil, fmt.Errorf("dev: runDir: %s has %d bytes; MPS leaves %d for it: give a shorter one", o.RunDir, len(o.RunDir), most)
	}
	for _, program := range []string{o.Berth, o.Agent} {
		if _, err := os.Stat(program); err != nil {
			return nil, fmt.Errorf("dev: %w (make build makes it)", err)
		}
	}
	p := &Provider{o}
	// Containers of any user go through these folders.
	for _, dir := range []string{p.Dir, p.RunDir, p.machines()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("dev: %w", err)
		}
	}
	return p, nil
}

var plainToken = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,11}$`)

// Name is the ID of the machine for a token.
func Name(token string) string {
	if plainToken.MatchString(token) {
		return "dev-" + token
	}
	sum := sha256.Sum256([]byte(token))
	return "dev-" + hex.EncodeToString(sum[:6])
}

// Find is the machine that was made for a token, also one whose making was cut short.
func (p *Provider) Find(ctx context.Context, token string) (m Machine, found bool, err error) {
	m, err = p.look(Name(token))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Machine{}, false, nil
	case err == nil && m.Token != token:
		return Machine{}, false, fmt.Errorf("dev: %s was made for the token %q, not for %q", m.ID, m.Token, token)
	}
	return m, err == nil, err
}

// List is every machine, by ID.
func (p *Provider) List(ctx context.Context) (all []Machine, err error) {
	entries, err := os.ReadDir(p.machines())
	if err != nil {
		return nil, fmt.Errorf("dev: %w", err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue // it is being removed
		}
		m, err := p.look(e.Name())
		if errors.Is(err, fs.ErrNotExist) {
			continue // it was cut short before it was one, or ended just now
		} else if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	return all, nil
}

func (p *Provider) look(id string) (Machine, error) {
	r, err := p.read(id)
	if err != nil {
		return Machine{}, err
	}
	m := Machine{ID: id, Token: r.Token}
	if agent := p.agentOf(r); agent != nil {
		m.PID = agent.pid
		agent.release()
	}
	return m, nil
}

// LoadSample makes the sample image known to Docker, once for this provider's folder.
func (p *Provider) LoadSample(ctx context.Context, ref string) error {
	unlock, err := p.lock(ctx, "sample")
	if err != nil {
		return err
	}
	defer unlock()
	mark := filepath.Join(p.Dir, "sample")
	if have, err := os.ReadFile(mark); err == nil && string(have) == ref {
		return nil
	}
	tar := filepath.Join(p.Dir, "sample.tar")
	defer os.Remove(tar)
	if err := p.program(ctx, time.Minute, "", p.Berth, "sim", "image", tar); err != nil {
		return err
	}
	if err := p.program(ctx, time.Minute, "", p.Agent, "image", "import", tar, ref); err != nil {
		return err
	}
	return write(mark, []byte(ref))
}
