package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/containerd/cgroups/v3"
)

// Driver is how the engine names and makes control groups; Docker and berth
// must agree on it.
type Driver struct {
	Version int  // 1 or 2
	Systemd bool // else cgroupfs
}

// ParseDriver reads the engine's words: driver "cgroupfs" or "systemd", version
// "1" or "2".
func ParseDriver(driver, version string) (Driver, error) {
	d := Driver{Systemd: driver == "systemd"}
	switch {
	case driver != "systemd" && driver != "cgroupfs":
		return d, fmt.Errorf("docker's cgroup driver: %q; berth needs cgroupfs or systemd (a rootless Docker has none)", driver)
	case version == "1":
		d.Version = 1
	case version == "2":
		d.Version = 2
	default:
		return d, fmt.Errorf("docker's cgroup version: %q; 1 or 2", version)
	}
	return d, nil
}

func (d Driver) String() string {
	if d.Systemd {
		return fmt.Sprintf("cgroup v%d, systemd", d.Version)
	}
	return fmt.Sprintf("cgroup v%d, cgroupfs", d.Version)
}

// Limits of a task as a whole. Zero means that there is none.
type Limits struct {
	CPUUnits    int64 // ECS CPU units, 1024 a processor: a quota
	Shares      int64 // beside the machine's other tasks, in ECS CPU units: 2 to 262144
	PeriodUS    int64 // of the CPU quota, microseconds; default 100000 (ECS_CGROUP_CPU_PERIOD)
	MemoryBytes int64
	SwapBytes   int64 // on top of MemoryBytes: -1 as much as the machine has, 0 none; needs MemoryBytes
	PIDs        int64
}

const defaultPeriodUS = 100_000

// What the kernel takes as CPU shares.
const (
	minShares = 2
	maxShares = 262144
)

// minQuotaUS is the least quota that the kernel takes (1 ms).
const minQuotaUS = 1000

// period is PeriodUS with its default.
func (l Limits) period() int64 {
	if l.PeriodUS == 0 {
		return defaultPeriodUS
	}
	return l.PeriodUS
}

// quotaUS is the CPU time in one period; 0: no quota.
func (l Limits) quotaUS() int64 {
	if l.CPUUnits == 0 {
		return 0
	}
	return max(l.CPUUnits*l.period()/1024, minQuotaUS)
}

func (l Limits) check() error {
	switch {
	case l.CPUUnits < 0 || l.CPUUnits > 1024*8192: // the kernel has at most 8192 processors
		return fmt.Errorf("task cpu: %d units; 0 (no limit) to %d", l.CPUUnits, 1024*8192)
	case l.Shares != 0 && (l.Shares < minShares || l.Shares > maxShares):
		return fmt.Errorf("task cpu shares: %d; 0 (the kernel's 1024) or %d to %d", l.Shares, minShares, maxShares)
	case l.period() < 1000 || l.period() > 1_000_000:
		return fmt.Errorf("task cpu period: %d us; 1000 to 1000000", l.PeriodUS)
	case l.MemoryBytes < 0:
		return fmt.Errorf("task memory: %d bytes; 0 (no limit) or more", l.MemoryBytes)
	case l.SwapBytes < -1:
		return fmt.Errorf("task swap: %d bytes; -1 (no limit), 0 (none) or more", l.SwapBytes)
	case l.PIDs < 0:
		return fmt.Errorf("task pids: %d; 0 (no limit) or more", l.PIDs)
	}
	return nil
}

// Tree is the groups of one agent's tasks.
type Tree struct {
	driver   Driver
	instance string
	groups   hierarchy
}

// hierarchy is what the versions of cgroups do differently. Folders begin with
// '/' and are below each hierarchy's root.
type hierarchy interface {
	ensure(ctx context.Context, p place, l Limits) error
	read(dir string) (Limits, error)
	remove(ctx context.Context, p place) error
	// lacks says what the kernel cannot limit here; empty: nothing.
	lacks() string
	// roots are the folders under which the group of a task may be found.
	roots() []string
}

// Open is the groups of the agent named instance. It makes nothing.
func Open(d Driver, instance string) (*Tree, error) {
	if instance == "" {
		return nil, errors.New("instance: empty; control groups need a name")
	}
	t := &Tree{driver: d, instance: instance}
	var err error
	switch d.Version {
	case 1:
		t.groups, err = openV1(d)
	case 2:
		t.groups, err = openV2(d, mountpoint)
	default:
		err = fmt.Errorf("cgroup version: %d; 1 or 2", d.Version)
	}
	return t, err
}

// mountpoint is where every distribution mounts cgroups.
const mountpoint = "/sys/fs/cgroup"

// Parent is the task's group as Docker is told of it.
func (t *Tree) Parent(task string) string { return t.driver.of(t.instance, task).parent }

// Ensure makes the task's group with these limits, or sets them on the one
// that is there, and returns what Docker takes as CgroupParent.
func (t *Tree) Ensure(ctx context.Context, task string, l Limits) (parent string, err error) {
	if task == "" {
		return "", errors.New("task: empty; its control group needs a name")
	}
	if err := l.check(); err != nil {
		return "", err
	}
	p := t.driver.of(t.instance, task)
	for try := 1; ; try++ {
		err := t.groups.ensure(ctx, p, l)
		// Another agent's RemoveAll may take the folder above away meanwhile.
		if errors.Is(err, fs.ErrNotExist) && try < 3 {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("control group %s of task %s: %w", p.parent, task, err)
		}
		return p.parent, nil
	}
}

// Read is the limits that the kernel has for the task; fs.ErrNotExist when it
// has no group.
func (t *Tree) Read(task string) (Limits, error) {
	return t.groups.read(t.driver.of(t.instance, task).dir)
}

// BusyError is a group that holds processes, and so is not removed.
type BusyError struct {
	Group string
	PIDs  []int
}

func (e *BusyError) Error() string {
	return fmt.Sprintf("control group %s still holds processes %v", e.Group, e.PIDs)
}

// Remove removes the task's group, in every hierarchy. One that is gone is no
// error; one with processes is a BusyError and is left as it was.
func (t *Tree) Remove(ctx context.Context, task string) error {
	if task == "" {
		return errors.New("task: empty; its control group needs a name")
	}
	return t.remove(ctx, t.driver.of(t.instance, task))
}

// RemoveAll removes the groups of every task and the instance's own, and
// with it what is above when no other agent has groups.
func (t *Tree) RemoveAll(ctx context.Context) error {
	tasks, err := t.List()
	errs := []error{err}
	for _, task := range tasks {
		errs = append(errs, t.Remove(ctx, task))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	p := t.driver.of(t.instance, "")
	if err := t.remove(ctx, p); err != nil {
		return err
	}
	if !t.driver.Systemd {
		for _, root := range t.groups.roots() {
			os.Remove(filepath.Join(root, top)) // refused while another agent has groups there
		}
	}
	return nil
}

func (t *Tree) remove(ctx context.Context, p place) error {
	pids, err := t.members(p.dir)
	if err != nil {
		return fmt.Errorf("control group %s: %w", p.parent, err)
	}
	if len(pids) > 0 {
		return &BusyError{Group: p.parent, PIDs: pids}
	}
	if err := t.groups.remove(ctx, p); err != nil {
		return fmt.Errorf("control group %s: %w", p.parent, err)
	}
	return nil
}

// List is the tasks that have a group, in any hierarchy, sorted.
func (t *Tree) List() ([]string, error) {
	var tasks []string
	for _, root := range t.groups.roots() {
		folders, err := os.ReadDir(filepath.Join(root, t.driver.of(t.instance, "").dir))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, f := range folders {
			if task, ok := t.driver.taskOf(t.instance, f.Name()); ok && f.IsDir() && !slices.Contains(tasks, task) {
				tasks = append(tasks, task)
			}
		}
	}
	slices.Sort(tasks)
	return tasks, nil
}

// Processes is every process in the task's group and the groups in it, sorted.
func (t *Tree) Processes(task string) ([]int, error) {
	return t.members(t.driver.of(t.instance, task).dir)
}

func (t *Tree) members(dir string) ([]int, error) {
	var pids []int
	for _, root := range t.groups.roots() {
		found, err := processes(filepath.Join(root, dir))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		pids = append(pids, found...)
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}

// Detect says, for `berth doctor`, whether this machine has the groups that
// the engine's driver speaks of, and what berth cannot limit here.
func Detect(d Driver) (says string, err error) {
	mode := cgroups.Mode()
	switch {
	case d.Version == 2 && mode != cgroups.Unified:
		return "", fmt.Errorf("docker uses cgroup v2, and %s holds none: mount cgroup2 there", mountpoint)
	case d.Version == 1 && mode != cgroups.Legacy && mode != cgroups.Hybrid:
		return "", fmt.Errorf("docker uses cgroup v1, and %s holds none: mount the v1 hierarchies there", mountpoint)
	}
	if d.Systemd {
		if _, err := os.Stat("/run/systemd/system"); err != nil {
			return "", errors.New("docker uses the systemd cgroup driver, and systemd does not run: set Docker's native.cgroupdriver to cgroupfs")
		}
	}
	t, err := Open(d, "doctor")
	if err != nil {
		return "", err
	}
	says = d.String()
	if lacks := t.groups.lacks(); lacks != "" {
		says += "; " + lacks
	}
	return says, nil
}

// removeDirs removes an empty group and the empty groups in it, deepest first:
// those that a container left which was killed half way. The kernel refuses one
// with a process, and is asked again for a moment while it reaps the last.
func removeDirs(ctx context.Context, dir string) error {
	var dirs []string
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && d.IsDir() {
			dirs = append(dirs, p)
		}
		return err
	})
	if err != nil {
		return err
	}
	slices.Reverse(dirs)
	deadline := time.Now().Add(time.Second)
	for _, d := range dirs {
		for {
			err := os.Remove(d)
			if err == nil || errors.Is(err, fs.ErrNotExist) {
				break
			}
			if ctx.Err() != nil || time.Now().After(deadline) {
				return err
			}
			select {
			case <-time.After(10 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	}
	return nil
}
