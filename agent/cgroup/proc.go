package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// membership is where a process is: its folder in the hierarchy that has
// controllers, and that hierarchy's root.
func membership(pid int) (root, dir string, err error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return "", "", err
	}
	defer f.Close()
	unified := ""
	for s := bufio.NewScanner(f); s.Scan(); {
		// "4:memory:/docker/3f..." or, v2, "0::/system.slice/docker-3f....scope"
		fields := strings.SplitN(s.Text(), ":", 3)
		if len(fields) != 3 {
			continue
		}
		// pids first: a process may sit in the memory hierarchy under another name,
		// and every engine limits or at least counts processes.
		if slices.Contains(strings.Split(fields[1], ","), "pids") {
			return filepath.Join(mountpoint, "pids"), fields[2], nil
		}
		if fields[1] == "" {
			unified = fields[2]
		}
	}
	if unified == "" {
		return "", "", fmt.Errorf("process %d is in no control group", pid)
	}
	return mountpoint, unified, nil
}

// Members is every process of the group that pid is in, and of the groups in
// it: of a container, given its first process.
func Members(pid int) ([]int, error) {
	root, dir, err := membership(pid)
	if err != nil {
		return nil, err
	}
	if path.Clean(dir) == "/" {
		return nil, fmt.Errorf("process %d is in no container's control group", pid)
	}
	return processes(filepath.Join(root, dir))
}

var containerID = regexp.MustCompile(`^(?:docker-)?([0-9a-f]{64})(?:\.scope)?$`)

// ContainerID is the Docker id of the container that pid runs in; empty when
// in none. It is how a process that NVML shows finds its owner.
func ContainerID(pid int) (string, error) {
	_, dir, err := membership(pid)
	if err != nil {
		return "", err
	}
	return containerOf(dir), nil
}

// containerOf finds the id in a group's folder, deepest first: a container may
// have groups of its own inside.
func containerOf(dir string) string {
	parts := strings.Split(dir, "/")
	slices.Reverse(parts)
	for _, part := range parts {
		if m := containerID.FindStringSubmatch(part); m != nil {
			return m[1]
		}
	}
	return ""
}

// processes is every process below dir. Groups that vanish meanwhile hold none.
func processes(dir string) ([]int, error) {
	if _, err := os.Stat(dir); err != nil {
		return nil, err
	}
	var pids []int
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || !d.IsDir() {
			return err
		}
		data, err := os.ReadFile(filepath.Join(p, "cgroup.procs"))
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, field := range strings.Fields(string(data)) {
			pid, err := strconv.Atoi(field)
			if err != nil {
				return fmt.Errorf("%s/cgroup.procs: %q is no pid", p, field)
			}
			pids = append(pids, pid)
		}
		return nil
	})
	slices.Sort(pids)
	return slices.Compact(pids), err
}
