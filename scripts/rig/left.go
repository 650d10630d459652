package rig

import (
	"context"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
)

// Leftovers is what must not be there after a purge, and is.
func (r *Rig) Leftovers(ctx context.Context) (left []string, err error) {
	containers, err := Containers(ctx, "berth.instance="+r.Instance)
	if err != nil {
		return nil, err
	}
	for _, c := range containers {
		left = append(left, c.String())
	}
	left = append(left, r.Programs()...)
	modes, err := filepath.Glob(filepath.Join(r.Machine(), "sim", "mode.*"))
	if err != nil {
		return nil, err
	}
	for _, m := range modes {
		if text, err := os.ReadFile(m); err == nil && strings.TrimSpace(string(text)) != "0" {
			left = append(left, fmt.Sprintf("compute mode %s of %s", text, strings.TrimPrefix(filepath.Base(m), "mode.")))
		}
	}
	left = append(left, existing(r.RunDir, filepath.Join(r.Dir, "state"), filepath.Join(r.Dir, "log"))...)
	mounts, err := mountsUnder(r.RunDir)
	if err != nil {
		return nil, err
	}
	return append(append(left, mounts...), cgroupsOf(r.Instance)...), nil
}

// Programs are the living processes of the machine's own programs.
func (r *Rig) Programs() []string { return processesUnder(filepath.Join(r.Machine(), "bin")) }

// DockerContainer is one container as Docker lists it.
type DockerContainer struct {
	ID     string `json:"Id"`
	Names  []string
	State  string
	Labels map[string]string
}

func (c DockerContainer) String() string { return fmt.Sprintf("container %.12s %v", c.ID, c.Names) }

// Containers are Docker's with a label (name, or name=value), also those that do not run.
func Containers(ctx context.Context, label string) (all []DockerContainer, err error) {
	filter := url.QueryEscape(fmt.Sprintf(`{"label":[%q]}`, label))
	return all, getFrom(ctx, docker, "/containers/json?all=1&filters="+filter, &all)
}

func existing(paths ...string) (left []string) {
	for _, path := range paths {
		if _, err := os.Lstat(path); err == nil {
			left = append(left, "file or folder "+path)
		}
	}
	return left
}

func mountsUnder(dirs ...string) (left []string, err error) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	for m := range strings.Lines(string(mounts)) {
		for _, dir := range dirs {
			if strings.Contains(m, " "+dir+"/") || strings.Contains(m, " "+dir+" ") {
				left = append(left, "mount "+strings.TrimSpace(m))
				break
			}
		}
	}
	return left, nil
}

// cgroupsOf are the cgroups with an instance's name in theirs.
func cgroupsOf(instances ...string) (left []string) {
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil // groups of others come and go while we look
		}
		for _, name := range instances {
			if strings.Contains(path, name) {
				left = append(left, "cgroup "+path)
				break
			}
		}
		return nil
	})
	return left
}

// processesUnder are the living processes whose program or working folder lies in a folder.
func processesUnder(dir string) (all []string) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil
	}
	found, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range found {
		exe, err := os.Readlink(filepath.Join(p, "exe"))
		if err != nil {
			continue // a zombie, or gone
		}
		cwd, _ := os.Readlink(filepath.Join(p, "cwd"))
		if strings.HasPrefix(exe, dir+"/") || strings.HasPrefix(cwd+"/", dir+"/") {
			all = append(all, fmt.Sprintf("process %s %s", filepath.Base(p), filepath.Base(exe)))
		}
	}
	return all
}
