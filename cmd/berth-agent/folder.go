package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/berth-gpu/berth/agent"
	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/config/taskdef"
	"github.com/berth-gpu/berth/placement/fit"
)

// file is one file of the task folder.
type file struct {
	name string // without .json: the wanted task's name
	data []byte
	hash string
	def  *taskdef.Definition
	err  error
	info os.FileInfo // as it was when data was read
}

// start is a task to be started now, on these GPUs.
type start struct {
	file file
	gpus []string
}

// The folder itself is looked at every second, which shows files that came, went
// or were replaced by rename; files that are written in place are found by looking
// at each of them, every five seconds and after every change.
const (
	scanEvery  = time.Second
	filesEvery = 5 * time.Second
)

// folder is the source that wants the files of one folder.
type folder struct {
	dir    string
	agent  *agent.Agent
	log    *zap.Logger
	files  []file      // as they were read last
	info   os.FileInfo // of the folder then
	readAt time.Time
	order  agent.Order // as the agent took it last
}

// watchFolder keeps the agent's wanted tasks equal to the folder's files, as
// kubelet does with static pods, until ctx ends.
func watchFolder(ctx context.Context, a *agent.Agent, dir string, log *zap.Logger) error {
	f := &folder{dir: dir, agent: a, log: log}
	tick := time.NewTicker(scanEvery)
	defer tick.Stop()
	for {
		changed := a.Changed()
		if err := f.sync(ctx); err != nil && ctx.Err() == nil {
			log.Error("cannot read the task folder, retrying: what runs goes on", zap.String("taskDir", dir), zap.Error(err))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		case <-changed:
		}
	}
}

// sync reads the folder once and tells the agent what has changed.
func (f *folder) sync(ctx context.Context) error {
	view := f.agent.View()
	if view == nil {
		return nil
	}
	files, err := f.read()
	if err != nil {
		return err
	}
	keep, starts, waiting := plan(files, view.Standing, machine(view.Room))
	order := agent.Order{Tasks: keep, Waiting: waiting}
	for _, s := range starts {
		g, err := f.agent.NextGeneration()
		if err != nil {
			return err
		}
		order.Tasks = append(order.Tasks, agent.Wanted{Name: s.file.name, Generation: g, Hash: s.file.hash, Definition: json.RawMessage(s.file.data), GPUs: s.gpus})
	}
	for _, f := range files {
		if f.err != nil {
			order.Problems = append(order.Problems, api.BadInput{Name: f.name, Problems: strings.Split(f.err.Error(), "\n")})
		}
	}
	if len(starts) == 0 && reflect.DeepEqual(order, f.order) {
		return nil
	}
	refused, err := f.agent.Want(ctx, order)
	for name, why := range refused {
		f.log.Warn("wanted task refused", zap.String("name", name), zap.String("why", why))
	}
	if err == nil {
		f.order = order
	}
	return err
}

// read reads *.json in order of names; a file that has not changed is not read
// again. A folder that is not there wants nothing; one file that cannot be read
// does not hide the others.
func (f *folder) read() ([]file, error) {
	info, err := os.Stat(f.dir)
	if errors.Is(err, os.ErrNotExist) {
		f.files, f.info = nil, nil
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if f.info != nil && unchanged(f.info, info) && time.Since(f.readAt) < filesEvery {
		return f.files, nil
	}
	entries, err := os.ReadDir(f.dir)
	if err != nil {
		return nil, err
	}
	last := map[string]file{}
	for _, was := range f.files {
		last[was.name] = was
	}
	f.files, f.info, f.readAt = nil, info, time.Now()
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || e.IsDir() || strings.HasPrefix(name, ".") {
			continue
		}
		path := filepath.Join(f.dir, e.Name())
		now, err := os.Stat(path)
		if errors.Is(err, os.ErrNotExist) {
			continue // removed meanwhile
		}
		got := last[name]
		if err != nil || got.info == nil || !unchanged(got.info, now) {
			got = readFile(name, path, f.agent.Rules())
			got.info = now
		}
		f.files = append(f.files, got)
	}
	return f.files, nil
}

func readFile(name, path string, rules taskdef.Rules) file {
	f := file{name: name}
	if f.data, f.err = os.ReadFile(path); f.err != nil {
		return f
	}
	sum := sha256.Sum256(f.data)
	f.hash = hex.EncodeToString(sum[:])
	f.def, f.err = rules.Parse(f.data)
	return f
}

// unchanged trusts a modification time only once it is old enough that a later
// write must have another one.
func unchanged(was, is os.FileInfo) bool {
	return os.SameFile(was, is) && was.Size() == is.Size() && was.ModTime().Equal(is.ModTime()) && time.Since(is.ModTime()) > 2*time.Second
}

// plan is pure: which tasks stay wanted, which are started now and where, and
// which wait and why. A file is one wanted task:
//
//	new, or its content changed          started, once the task of the old content has ended
//	its task runs, or is on its way      kept as it was placed
//	its task was stopped by berth itself started again
//	its task ended by itself             kept STOPPED
//	refused by a rule                    a task of an earlier content goes on
func plan(files []file, standing []agent.Standing, m fit.Machine) (keep []agent.Wanted, starts []start, waiting []api.Waiting) {
	for _, f := range files {
		last, ok := lastOf(standing, f.name)
		if ok && !last.Released && (f.err != nil || last.Hash == f.hash) && !(last.Stopped && last.StoppedByAgent && f.err == nil) {
			keep = append(keep, last.Wanted)
			continue
		}
		if f.err != nil {
			continue
		}
		wait := api.Waiting{Name: f.name, Family: *f.def.Family}
		if ok && !last.Stopped {
			wait.Reasons = []string{fmt.Sprintf("the task of the file's earlier content (generation %d) has not stopped yet", last.Generation)}
			waiting = append(waiting, wait)
			continue
		}
		demand := f.def.Demand()
		gpus, reasons := fit.Place(m, toFit(demand))
		if reasons == nil {
			starts = append(starts, start{f, gpus})
			m = m.Take(toFit(demand), gpus) // the next file is placed beside it
			continue
		}
		for _, r := range reasons {
			wait.Reasons = append(wait.Reasons, r.String())
		}
		waiting = append(waiting, wait)
	}
	return keep, starts, waiting
}

// lastOf is the newest generation of a name; standing is newest first.
func lastOf(standing []agent.Standing, name string) (agent.Standing, bool) {
	i := slices.IndexFunc(standing, func(s agent.Standing) bool { return s.Name == name })
	if i < 0 {
		return agent.Standing{}, false
	}
	return standing[i], true
}

// machine is the agent's room as fit takes it.
func machine(r agent.Room) fit.Machine {
	m := fit.Machine{CPU: r.CPU, MemoryMiB: r.MemoryMiB, Ports: map[fit.Port]bool{}}
	for _, p := range r.Ports {
		m.Ports[fit.Port{Number: p.Host, Protocol: p.Protocol}] = true
	}
	for _, g := range r.GPUs {
		m.GPUs = append(m.GPUs, fit.GPU{ID: g.ID, Index: g.Index, Mode: fit.Mode(g.Mode), TotalMiB: g.AllocatableMiB, AllocatedMiB: g.AllocatedMiB,
			Clients: g.Clients, MaxClients: g.MaxClients, Closed: g.Closed, NoSharing: g.NoSharing})
	}
	return m
}

func toFit(d taskdef.Demand) fit.Demand {
	out := fit.Demand{CPU: d.CPU, MemoryMiB: d.MemoryMiB, GPUMemoryMiB: d.GPUMemoryMiB, Clients: d.SharedContainers, WholeGPUs: d.WholeGPUs, AllGPUs: d.AllGPUs}
	for _, p := range d.Ports {
		out.Ports = append(out.Ports, fit.Port{Number: p.Host, Protocol: p.Protocol})
	}
	return out
}
