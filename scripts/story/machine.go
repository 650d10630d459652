package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/berth-gpu/berth/api"
)

// process is a child in a session of its own.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{}
}

// wait says whether the process ended within limit.
func (p *process) wait(limit time.Duration) bool {
	select {
	case <-p.ended:
		return true
	case <-time.After(limit):
		return false
	}
}

// startAgent starts berth-agent and waits until it answers.
func (s *story) startAgent(ctx context.Context) error {
	log, err := os.OpenFile(s.logFile(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command("build/berth-agent", "run", "--config", settingsFile())
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	for _, kv := range os.Environ() { // a person's BERTH_ variables are not this agent's
		if !strings.HasPrefix(kv, "BERTH_") {
			cmd.Env = append(cmd.Env, kv)
		}
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	p := &process{cmd, make(chan struct{})}
	go func() { defer close(p.ended); _ = cmd.Wait() }()
	s.agent = p
	_, err = s.until(ctx, 30*time.Second, "the agent answers", func(view) bool { return true })
	return err
}

// command runs a program, whose output the reader sees.
func command(ctx context.Context, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	fmt.Printf("$ %s %s\n", name, strings.Join(args, " "))
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(cmd.Args, " "), err)
	}
	return nil
}

// until looks twice in a tenth of a second until the picture is as it should be.
func (s *story) until(ctx context.Context, limit time.Duration, what string, ok func(view) bool) (view, error) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(limit)
	for {
		v, err := look(ctx)
		if err == nil && ok(v) {
			return v, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return v, errors.New("interrupted")
		case <-s.agent.ended:
			return v, fmt.Errorf("the agent ended (%s) before %s", s.agent.cmd.ProcessState, what)
		case <-deadline:
			if err == nil {
				_ = command(ctx, "build/berth", "ps", "-a", "--socket", socket())
				_ = command(ctx, "build/berth", "top", "--once", "--socket", socket())
			}
			return v, fmt.Errorf("within %s, not seen: %s (%v)", limit, what, err)
		}
	}
}

// logUntil waits for a line of a task's log that has text in it.
func (s *story) logUntil(ctx context.Context, task, text string) (line string, err error) {
	_, err = s.until(ctx, 20*time.Second, "a line with "+text, func(view) bool {
		out, err := exec.CommandContext(ctx, "build/berth", "logs", task, "--socket", socket()).Output()
		for l := range strings.Lines(string(out)) {
			if strings.Contains(l, text) {
				line = strings.TrimSpace(l)
			}
		}
		return err == nil && line != ""
	})
	return line, err
}

// --- what the agent and Docker say ---

func socket() string { return filepath.Join(runDir, "agent.sock") }

func over(path string) *http.Client {
	return &http.Client{Timeout: 60 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", path)
		}}}
}

func get(ctx context.Context, path string, v any) error { return getFrom(ctx, socket(), path, v) }

func getFrom(ctx context.Context, socket, path string, v any) error {
	body, err := ask(ctx, http.MethodGet, socket, path)
	if err != nil {
		return err
	}
	return json.Unmarshal(body, v)
}

func remove(ctx context.Context, socket, path string) error {
	_, err := ask(ctx, http.MethodDelete, socket, path)
	return err
}

func ask(ctx context.Context, method, socket, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://socket"+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := over(socket).Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, body)
	}
	return body, err
}

const docker = "/var/run/docker.sock"

type inspected struct {
	State  struct{ Running bool }
	Config struct{ Env []string }
}

func inspect(ctx context.Context, id string) (i inspected, err error) {
	return i, getFrom(ctx, docker, "/containers/"+id+"/json", &i)
}

func containerRuns(ctx context.Context, id string) (bool, error) {
	i, err := inspect(ctx, id)
	return i.State.Running, err
}

func environment(ctx context.Context, id string) (map[string]string, error) {
	i, err := inspect(ctx, id)
	env := map[string]string{}
	for _, kv := range i.Config.Env {
		name, value, _ := strings.Cut(kv, "=")
		env[name] = value
	}
	return env, err
}

// view is the agent's picture at one moment.
type view struct {
	api.Instance
	Tasks []task
}

type task api.Task

func look(ctx context.Context) (v view, err error) {
	if err := get(ctx, api.PathInstance, &v.Instance); err != nil {
		return v, err
	}
	return v, get(ctx, api.PathTasks, &v.Tasks)
}

func (v view) running() (all []task) {
	for _, t := range v.Tasks {
		if t.LastStatus == api.StatusRunning {
			all = append(all, t)
		}
	}
	return all
}

// task is the newest task of a name, or an empty one.
func (v view) task(name string) task {
	for _, t := range v.Tasks {
		if t.Name == name {
			return t
		}
	}
	return task{}
}

func (v view) byID(id string) task {
	for _, t := range v.Tasks {
		if t.ID == id {
			return t
		}
	}
	return task{}
}

func (t task) container(name string) api.Container {
	for _, c := range t.Containers {
		if c.Name == name {
			return c
		}
	}
	return api.Container{}
}

// indexes are what an operator calls these GPUs.
func (v view) indexes(ids []string) string {
	var names []string
	for _, g := range v.GPUs {
		for _, id := range ids {
			if g.ID == id {
				names = append(names, fmt.Sprint(g.Index))
			}
		}
	}
	return strings.Join(names, ",")
}

// usedBy is the GPU memory that NVML shows for a name's newest task, in MiB.
func (v view) usedBy(name string) (sum int64) {
	id := v.task(name).ID
	for _, g := range v.GPUs {
		for _, s := range g.Slices {
			if s.TaskID == id {
				sum += s.UsedMemoryInMiB
			}
		}
	}
	return sum
}

func (v view) allUse() bool {
	for _, t := range v.running() {
		if v.usedBy(t.Name) == 0 {
			return false
		}
	}
	return true
}

// namesEach says whether each GPU is named by one of the reasons.
func namesEach(reasons []string, gpus []api.GPU) bool {
	all := strings.Join(reasons, "\n")
	for _, g := range gpus {
		if !strings.Contains(all, g.ID) {
			return false
		}
	}
	return len(reasons) >= len(gpus)
}

// sameContainers says whether each container of the one picture's running tasks is the
// very same in the other, running and not restarted.
func sameContainers(before, after view) bool {
	for _, t := range before.running() {
		now := after.byID(t.ID)
		for i, c := range t.Containers {
			if i >= len(now.Containers) || now.Containers[i].RuntimeID != c.RuntimeID || now.Containers[i].LastStatus != api.StatusRunning ||
				now.Containers[i].RestartCount != c.RestartCount {
				return false
			}
		}
	}
	return len(before.running()) > 0
}

// --- what must not be left ---

func leftovers(ctx context.Context) (left []string, err error) {
	var containers []struct {
		Id    string
		Names []string
	}
	filter := url.QueryEscape(`{"label":["berth.instance=` + instance + `"]}`)
	if err := getFrom(ctx, docker, "/containers/json?all=1&filters="+filter, &containers); err != nil {
		return nil, err
	}
	for _, c := range containers {
		left = append(left, fmt.Sprintf("container %.12s %v", c.Id, c.Names))
	}
	left = append(left, programs(machineDir())...)
	modes, err := filepath.Glob(filepath.Join(machineDir(), "sim", "mode.*"))
	if err != nil {
		return nil, err
	}
	for _, m := range modes {
		if text, err := os.ReadFile(m); err == nil && strings.TrimSpace(string(text)) != "0" {
			left = append(left, fmt.Sprintf("compute mode %s of %s", text, strings.TrimPrefix(filepath.Base(m), "mode.")))
		}
	}
	for _, folder := range []string{runDir, filepath.Join(dir, "state"), filepath.Join(dir, "log")} {
		if _, err := os.Lstat(folder); err == nil {
			left = append(left, "folder "+folder)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	for m := range strings.Lines(string(mounts)) {
		if strings.Contains(m, " "+runDir) {
			left = append(left, "mount "+strings.TrimSpace(m))
		}
	}
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(path, instance) {
			left = append(left, "cgroup "+path)
		}
		return nil // groups of others come and go while we look
	})
	return left, nil
}

// programs are the living processes of the machine's own programs.
func programs(machine string) (all []string) {
	bin, err := filepath.Abs(filepath.Join(machine, "bin"))
	if err != nil {
		return nil
	}
	links, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, l := range links {
		if exe, err := os.Readlink(l); err == nil && strings.HasPrefix(exe, bin+"/") {
			all = append(all, fmt.Sprintf("process %s %s", strings.Split(l, "/")[2], filepath.Base(exe)))
		}
	}
	return all
}
