package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// v1 is a hierarchy for each controller. The group is made in all of them, and
// removed from all: Docker makes the parent in each one where it makes a
// container, and leaves it there.
type v1 struct {
	driver     Driver
	subsystems []cgroup1.Subsystem
}

// rooted is a subsystem that knows its folders; all but systemd's do.
type rooted interface{ Path(string) string }

func openV1(d Driver) (*v1, error) {
	subsystems, err := cgroup1.Default()
	if err != nil {
		return nil, fmt.Errorf("cgroup v1: %w", err)
	}
	v := &v1{driver: d}
	found := map[cgroup1.Name]bool{}
	for _, s := range subsystems {
		if d.Systemd && s.Name() == cgroup1.SystemdDbus {
			continue // systemd keeps its own hierarchy
		}
		v.subsystems = append(v.subsystems, s)
		found[s.Name()] = true
	}
	for _, need := range []cgroup1.Name{cgroup1.Cpu, cgroup1.Memory, cgroup1.Pids} {
		if !found[need] {
			return nil, fmt.Errorf("cgroup v1: no hierarchy for controller %q under %s: mount it, or switch it on at boot", need, mountpoint)
		}
	}
	return v, nil
}

func (v *v1) ensure(ctx context.Context, p place, l Limits) error {
	// The library's controller asks systemd for the unit; the slice above it
	// follows from its name, and is named only as what the unit wants.
	if v.driver.Systemd {
		systemd, err := cgroup1.NewSystemd(mountpoint)
		if err != nil {
			return err
		}
		above := filepath.Base(filepath.Dir(p.dir))
		if err := bounded(ctx, func() error { return systemd.Create(filepath.Join(above, p.unit), nil) }); err != nil {
			return fmt.Errorf("systemd unit %s: %w", p.unit, err)
		}
	}
	group, err := cgroup1.New(cgroup1.StaticPath(p.dir), &specs.LinuxResources{}, cgroup1.WithHierarchy(v.hierarchy))
	if err != nil {
		return err
	}
	if err := group.Update(v.resources(l)); err != nil {
		return err
	}
	if err := v.setMemory(p.dir, l); err != nil {
		return err
	}
	if l.PIDs == 0 { // the library never takes a limit away
		return os.WriteFile(v.file("pids", p.dir, "pids.max"), []byte("max"), 0)
	}
	return nil
}

func (v *v1) hierarchy() ([]cgroup1.Subsystem, error) { return v.subsystems, nil }

// resources are the limits as the v1 kernel counts them, but for memory.
func (v *v1) resources(l Limits) *specs.LinuxResources {
	quota, period, shares := int64(-1), uint64(l.period()), uint64(1024)
	if q := l.quotaUS(); q > 0 {
		quota = q
	}
	if l.Shares > 0 {
		shares = uint64(l.Shares)
	}
	return &specs.LinuxResources{
		CPU:  &specs.LinuxCPU{Quota: &quota, Period: &period, Shares: &shares},
		Pids: &specs.LinuxPids{Limit: &l.PIDs},
	}
}

// setMemory sets memory, and memory and swap together, which the kernel refuses
// to be the smaller at any moment: so it depends on what was there before which
// comes first. (The library's Update means to know, and in v3.1.3 changes the
// places of the wrong two.)
func (v *v1) setMemory(dir string, l Limits) error {
	memory, memsw := int64(-1), int64(-1)
	if l.MemoryBytes > 0 {
		memory = l.MemoryBytes
		if l.SwapBytes >= 0 {
			memsw = l.MemoryBytes + l.SwapBytes
		}
	}
	set := func(name string, value int64) error {
		return os.WriteFile(v.file("memory", dir, name), []byte(strconv.FormatInt(value, 10)), 0)
	}
	const limit, both = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
	if !v.swap() {
		return set(limit, memory)
	}
	if set(limit, memory) == nil {
		return set(both, memsw)
	}
	if err := set(both, memsw); err != nil {
		return err
	}
	return set(limit, memory)
}

// swap says that the kernel accounts for swap (swapaccount=1 at boot).
func (v *v1) swap() bool {
	_, err := os.Stat(v.file("memory", "/", "memory.memsw.limit_in_bytes"))
	return err == nil
}

func (v *v1) lacks() string {
	if !v.swap() {
		return "the kernel does not account for swap, so a task's swap is not limited (boot with swapaccount=1)"
	}
	return ""
}

func (v *v1) read(dir string) (Limits, error) {
	var l Limits
	quota, err := v.number("cpu", dir, "cpu.cfs_quota_us")
	if err != nil {
		return l, err
	}
	if l.PeriodUS, err = v.number("cpu", dir, "cpu.cfs_period_us"); err != nil {
		return l, err
	}
	l.CPUUnits = units(quota, l.PeriodUS)
	if l.Shares, err = v.number("cpu", dir, "cpu.shares"); err != nil {
		return l, err
	}
	if l.MemoryBytes, err = v.number("memory", dir, "memory.limit_in_bytes"); err != nil {
		return l, err
	}
	memsw, err := v.number("memory", dir, "memory.memsw.limit_in_bytes")
	switch {
	case errors.Is(err, fs.ErrNotExist):
		l.SwapBytes = -1
	case err != nil:
		return l, err
	case l.MemoryBytes == 0:
		l.SwapBytes = 0
	case memsw == 0:
		l.SwapBytes = -1
	default:
		l.SwapBytes = memsw - l.MemoryBytes
	}
	l.PIDs, err = v.number("pids", dir, "pids.max")
	return l, err
}

// number reads a limit; 0 is none.
func (v *v1) number(controller, dir, file string) (int64, error) {
	data, err := os.ReadFile(v.file(controller, dir, file))
	if err != nil {
		return 0, err
	}
	return parseLimit(file, strings.TrimSpace(string(data)))
}

func (v *v1) file(controller, dir, name string) string {
	for _, s := range v.subsystems {
		if r, ok := s.(rooted); ok && s.Name() == cgroup1.Name(controller) {
			return filepath.Join(r.Path(dir), name)
		}
	}
	return filepath.Join(mountpoint, controller, dir, name)
}

func (v *v1) remove(ctx context.Context, p place) error {
	if v.driver.Systemd {
		systemd, err := cgroup1.NewSystemd(mountpoint)
		if err != nil {
			return err
		}
		if err := bounded(ctx, func() error { return systemd.Delete(p.unit) }); err != nil && !noUnit(err) {
			return fmt.Errorf("systemd unit %s: %w", p.unit, err)
		}
	}
	var errs []error
	for _, root := range v.roots() {
		errs = append(errs, removeDirs(ctx, filepath.Join(root, p.dir)))
	}
	return errors.Join(errs...)
}

// roots includes v2's, where it is mounted beside v1: Docker puts each container
// there too, and leaves the parent's folder.
func (v *v1) roots() []string {
	var roots []string
	if cgroups.Mode() == cgroups.Hybrid {
		roots = append(roots, filepath.Join(mountpoint, "unified"))
	}
	for _, s := range v.subsystems {
		if r, ok := s.(rooted); ok {
			roots = append(roots, r.Path("/"))
		}
	}
	return roots
}

// parseLimit reads a limit of either version; 0 is none.
func parseLimit(file, text string) (int64, error) {
	if text == "max" || text == "-1" {
		return 0, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %q is no limit", file, text)
	}
	// v1's memory limit "none" is the largest number of whole pages.
	if n >= 1<<62 {
		return 0, nil
	}
	return n, nil
}

// units turns a quota back into ECS's CPU units; ensure rounds down, so this
// rounds up. 0: no quota.
func units(quotaUS, periodUS int64) int64 {
	if quotaUS <= 0 || periodUS <= 0 {
		return 0
	}
	return (quotaUS*1024 + periodUS - 1) / periodUS
}
