package cgroup

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/cgroups/v3/cgroup2"
)

// v2 is the one hierarchy of cgroup v2, mounted at root.
type v2 struct {
	driver Driver
	root   string
}

func openV2(d Driver, root string) (*v2, error) {
	data, err := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
	if err != nil {
		return nil, fmt.Errorf("cgroup v2 at %s: %w", root, err)
	}
	have := strings.Fields(string(data))
	for _, need := range []string{"cpu", "memory", "pids"} {
		if !slices.Contains(have, need) {
			return nil, fmt.Errorf("cgroup v2 at %s has no controller %q (has %v): it is bound to v1, or switched off at boot", root, need, have)
		}
	}
	return &v2{driver: d, root: root}, nil
}

func (v *v2) ensure(ctx context.Context, p place, l Limits) error {
	r := resourcesV2(l)
	if !v.driver.Systemd {
		// The library makes the folders and switches the controllers on in each group
		// above. Swap comes after, since a kernel without it has no file for it.
		group, err := cgroup2.NewManager(v.root, p.dir, r)
		if err != nil {
			return err
		}
		return v.update(group, p.dir, l, r)
	}
	made := *r
	if l.CPUUnits == 0 {
		made.CPU = &cgroup2.CPU{Weight: r.CPU.Weight} // the library cannot tell systemd of "max"
	}
	return bounded(ctx, func() error {
		group, err := cgroup2.NewSystemd("/", p.unit, -1, &made)
		if err != nil {
			return fmt.Errorf("systemd unit %s: %w", p.unit, err)
		}
		return v.update(group, p.dir, l, r)
	})
}

// update writes what making the group did not: where it was there before, all.
func (v *v2) update(group *cgroup2.Manager, dir string, l Limits, r *cgroup2.Resources) error {
	if _, err := os.Stat(filepath.Join(v.root, dir, "memory.swap.max")); err == nil {
		swap := int64(math.MaxInt64)
		if l.MemoryBytes > 0 && l.SwapBytes >= 0 {
			swap = l.SwapBytes
		}
		r.Memory.Swap = &swap
	}
	return group.Update(r)
}

// resourcesV2 are the limits as the v2 kernel counts them. The largest number
// reads back as "max".
func resourcesV2(l Limits) *cgroup2.Resources {
	memory, pids, period := int64(math.MaxInt64), int64(-1), uint64(l.period())
	if l.MemoryBytes > 0 {
		memory = l.MemoryBytes
	}
	if l.PIDs > 0 {
		pids = l.PIDs
	}
	shares := uint64(1024)
	if l.Shares > 0 {
		shares = uint64(l.Shares)
	}
	weight := cgroup2.ConvertCPUSharesToCgroupV2Value(shares)
	cpu := &cgroup2.CPU{Weight: &weight, Max: cgroup2.NewCPUMax(nil, &period)}
	if q := l.quotaUS(); q > 0 {
		cpu.Max = cgroup2.NewCPUMax(&q, &period)
	}
	return &cgroup2.Resources{CPU: cpu, Memory: &cgroup2.Memory{Max: &memory}, Pids: &cgroup2.Pids{Max: pids}}
}

func (v *v2) lacks() string {
	// The root group has no memory.swap.max; a kernel without swap accounting
	// has it nowhere. What a container of Docker's would lack is in its info.
	return ""
}

func (v *v2) read(dir string) (Limits, error) {
	var l Limits
	text, err := v.text(dir, "cpu.max") // "150000 100000", "max 100000"
	if err != nil {
		return l, err
	}
	quota, period, _ := strings.Cut(text, " ")
	q, err := parseLimit("cpu.max", quota)
	if err != nil {
		return l, err
	}
	if l.PeriodUS, err = parseLimit("cpu.max", period); err != nil {
		return l, err
	}
	l.CPUUnits = units(q, l.PeriodUS)
	if l.MemoryBytes, err = v.number(dir, "memory.max"); err != nil {
		return l, err
	}
	if l.MemoryBytes > 0 {
		switch swap, err := v.text(dir, "memory.swap.max"); {
		case errors.Is(err, os.ErrNotExist), swap == "max":
			l.SwapBytes = -1
		case err != nil:
			return l, err
		default:
			if l.SwapBytes, err = parseLimit("memory.swap.max", swap); err != nil {
				return l, err
			}
		}
	}
	l.PIDs, err = v.number(dir, "pids.max")
	return l, err
}

func (v *v2) number(dir, file string) (int64, error) {
	text, err := v.text(dir, file)
	if err != nil {
		return 0, err
	}
	return parseLimit(file, text)
}

func (v *v2) text(dir, file string) (string, error) {
	data, err := os.ReadFile(filepath.Join(v.root, dir, file))
	return strings.TrimSpace(string(data)), err
}

func (v *v2) remove(ctx context.Context, p place) error {
	if v.driver.Systemd {
		group, err := cgroup2.LoadSystemd("/", p.unit)
		if err != nil {
			return err
		}
		if err := bounded(ctx, group.DeleteSystemd); err != nil && !noUnit(err) {
			return fmt.Errorf("systemd unit %s: %w", p.unit, err)
		}
	}
	return removeDirs(ctx, filepath.Join(v.root, p.dir))
}

func (v *v2) roots() []string { return []string{v.root} }

// bounded runs f, which speaks to systemd and knows no context, until ctx
// ends. Then f is left behind, to end when systemd answers or its connection
// breaks; what it makes meanwhile the next Ensure finds.
func bounded(ctx context.Context, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("systemd does not answer: %w", ctx.Err())
	}
}

// noUnit says that systemd knows no such unit: it is gone already.
func noUnit(err error) bool {
	return strings.Contains(err.Error(), "not loaded")
}
