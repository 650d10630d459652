package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/berth-gpu/berth/agent/gpu/nvmlsim"
	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/mps/mpssim"
)

// The observer of a system under fire is a process of its own: this test binary, which
// looks at Docker, the simulated machines, /proc and the server every 50 ms, and writes
// one sample a line. It knows berth's labels and file names and none of its code.

const (
	observeDir = "BERTH_FIRE_OBSERVE" // of berth dev; set, the test binary is the observer
	observeRun = "BERTH_FIRE_RUN"
)

func init() {
	if dir := os.Getenv(observeDir); dir != "" {
		observe(dir, os.Getenv(observeRun))
		os.Exit(0)
	}
}

// sample is what was to be seen at one time. Modes are read first, then Docker is asked,
// then /proc is read. All processes in it lived at one moment: each was seen before the
// end of the reading, and again after it.
type sample struct {
	Seq        uint64          `json:"seq"`
	At         time.Time       `json:"at"`   // before anything was read
	Done       time.Time       `json:"done"` // after everything was
	Machines   []seenMachine   `json:"machines"`
	Modes      map[string]int  `json:"modes"` // by GPU: NVML's number of the compute mode
	Containers []seenContainer `json:"containers"`
	Procs      []seenProc      `json:"procs"`
	Server     *seenServer     `json:"server,omitempty"` // nil: no new answer since the last sample
	Trouble    []string        `json:"trouble,omitempty"`
}

type seenMachine struct {
	ID     string   `json:"id"`
	PID    int      `json:"pid"`    // of its agent, as machine.json has it
	Alive  bool     `json:"alive"`  // that process lives
	Ending bool     `json:"ending"` // it is being terminated
	GPUs   []string `json:"gpus"`
}

type seenContainer struct {
	ID         string `json:"id"`
	Instance   string `json:"instance"`
	Family     string `json:"family"`
	Generation uint64 `json:"generation"`
	State      string `json:"state"`           // Docker's
	GPUs       string `json:"gpus,omitempty"`  // NVIDIA_VISIBLE_DEVICES, "" without any
	CapMiB     int64  `json:"cap,omitempty"`   // 0: none
	StartedAt  string `json:"start,omitempty"` // as Docker said when it was looked at last
	Restarts   int    `json:"restarts,omitempty"`
}

func (c seenContainer) running() bool { return c.State == "running" }

// seenProc is a daemon, a server or a client of the simulated machines.
type seenProc struct {
	PID       int        `json:"pid"`
	Start     uint64     `json:"start"`
	Kind      string     `json:"kind"` // daemon, server, client
	GPU       string     `json:"gpu,omitempty"`
	Container string     `json:"container,omitempty"`
	Holds     []seenHold `json:"holds,omitempty"`
}

type seenHold struct {
	GPU  string `json:"gpu"`
	Kind string `json:"kind"` // S, M, C as nvmlsim has them
	MiB  int64  `json:"mib"`
}

// seenServer is one answer of the server's API.
type seenServer struct {
	From      time.Time      `json:"from"` // when it was asked for
	To        time.Time      `json:"to"`   // when it was there
	Term      uint64         `json:"term"`
	Instances []api.Instance `json:"instances"`
	Tasks     []api.Task     `json:"tasks"`
	Services  []api.Service  `json:"services"`
}

type observer struct {
	dir     string // of the machines
	docker  *http.Client
	details map[string]detail // by container
	looked  map[string]time.Time
	plain   map[int]plainPID // processes that are none of ours
	groups  map[procKey]string
	modes   map[string]string // GPU: its mode file
	machine map[string][]string

	mu     sync.Mutex
	answer *seenServer
}

type detail struct {
	gpus, started string
	cap           int64
	restarts      int
}

type plainPID struct{ first, looked time.Time }

type procKey struct {
	pid   int
	start uint64
}

func observe(dir, run string) {
	o := &observer{dir: filepath.Join(dir, "machines", "machines"), docker: unixClient("/var/run/docker.sock", 5*time.Second), details: map[string]detail{},
		looked: map[string]time.Time{}, plain: map[int]plainPID{}, groups: map[procKey]string{}, modes: map[string]string{}, machine: map[string][]string{}}
	go o.askServer(unixClient(filepath.Join(run, "server.sock"), 3*time.Second))
	out := json.NewEncoder(os.Stdout)
	tick := time.NewTicker(50 * time.Millisecond)
	for seq := uint64(1); ; seq++ {
		s := sample{Seq: seq, At: time.Now()}
		o.look(&s)
		s.Done = time.Now()
		if out.Encode(s) != nil {
			return // whoever listens has gone
		}
		<-tick.C
	}
}

func (o *observer) look(s *sample) {
	trouble := func(err error) {
		if err != nil && len(s.Trouble) < 5 {
			s.Trouble = append(s.Trouble, err.Error())
		}
	}
	s.Machines = o.machines()
	s.Modes = map[string]int{}
	for gpu, path := range o.modes {
		text, err := os.ReadFile(path)
		if err == nil {
			s.Modes[gpu], _ = strconv.Atoi(strings.TrimSpace(string(text)))
		}
	}
	var err error
	s.Containers, err = o.containers()
	trouble(err)
	s.Procs = o.procs()
	o.mu.Lock()
	s.Server, o.answer = o.answer, nil
	o.mu.Unlock()
}

// machines reads the folders of provider dev.
func (o *observer) machines() (all []seenMachine) {
	entries, _ := os.ReadDir(o.dir)
	clear(o.modes)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		var r struct {
			ID     string `json:"id"`
			PID    int    `json:"pid"`
			Start  uint64 `json:"startTime"`
			Ending bool   `json:"ending"`
		}
		b, err := os.ReadFile(filepath.Join(o.dir, e.Name(), "machine.json"))
		if err != nil || json.Unmarshal(b, &r) != nil {
			continue
		}
		if len(o.machine[r.ID]) == 0 {
			if spec, err := nvmlsim.ReadSpec(filepath.Join(o.dir, r.ID, "machine")); err == nil {
				for _, g := range spec.GPUs {
					o.machine[r.ID] = append(o.machine[r.ID], g.UUID)
				}
			}
		}
		m := seenMachine{ID: r.ID, PID: r.PID, Ending: r.Ending, GPUs: o.machine[r.ID]}
		start, _, alive := procStart(r.PID)
		m.Alive = alive && start == r.Start
		for _, g := range m.GPUs {
			o.modes[g] = filepath.Join(o.dir, r.ID, "machine", "sim", "mode."+g)
		}
		all = append(all, m)
	}
	return all
}

// containers asks Docker for those of this system's machines.
func (o *observer) containers() ([]seenContainer, error) {
	var listed []struct {
		ID     string `json:"Id"`
		State  string
		Labels map[string]string
	}
	filters := `{"label":["berth.instance"]}`
	if err := fetch(o.docker, "/containers/json?all=1&filters="+url.QueryEscape(filters), &listed); err != nil {
		return nil, err
	}
	var all []seenContainer
	for _, l := range listed {
		if _, ours := o.machine[l.Labels["berth.instance"]]; !ours {
			continue
		}
		c := seenContainer{ID: l.ID, Instance: l.Labels["berth.instance"], Family: l.Labels["com.amazonaws.ecs.task-definition-family"], State: l.State}
		c.Generation, _ = strconv.ParseUint(l.Labels["berth.generation"], 10, 64)
		d := o.detail(c)
		c.GPUs, c.CapMiB, c.StartedAt, c.Restarts = d.gpus, d.cap, d.started, d.restarts
		all = append(all, c)
	}
	return all, nil
}

// detail inspects a container when it is first seen running, and every two seconds.
func (o *observer) detail(c seenContainer) detail {
	if old, known := o.details[c.ID]; known && (!c.running() || time.Since(o.looked[c.ID]) < 2*time.Second) {
		return old
	} else if !c.running() {
		return detail{}
	}
	var full struct {
		Config       struct{ Env []string }
		State        struct{ StartedAt string }
		RestartCount int
	}
	if fetch(o.docker, "/containers/"+c.ID+"/json", &full) != nil {
		return o.details[c.ID]
	}
	d := detail{started: full.State.StartedAt, restarts: full.RestartCount}
	for _, kv := range full.Config.Env {
		if v, ok := strings.CutPrefix(kv, "NVIDIA_VISIBLE_DEVICES="); ok && v != "void" {
			d.gpus = v
		}
		if v, ok := strings.CutPrefix(kv, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0="); ok {
			d.cap, _ = strconv.ParseInt(strings.TrimSuffix(v, "M"), 10, 64)
		}
	}
	o.details[c.ID], o.looked[c.ID] = d, time.Now()
	return d
}

var containerID = regexp.MustCompile(`[0-9a-f]{64}`)

// procs finds daemons, servers and clients of this system's machines. A process that is
// none is looked at again, since it may become one by exec.
func (o *observer) procs() (all []seenProc) {
	entries, _ := os.ReadDir("/proc")
	now := time.Now()
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		was := o.plain[pid]
		if now.Sub(was.first) > 10*time.Second && now.Sub(was.looked) < 2*time.Second {
			continue
		}
		start, comm, lives := procStart(pid)
		if !lives {
			continue
		}
		if !strings.HasPrefix(comm, "nvidia-cuda-mps") && !strings.HasPrefix(comm, mpssim.ClientName) {
			if was.first.IsZero() || now.Sub(was.looked) > time.Minute {
				was.first = now
			}
			was.looked = now
			o.plain[pid] = was
			continue
		}
		delete(o.plain, pid)
		if p, ours := o.proc(pid, start); ours {
			all = append(all, p)
		}
	}
	alive := map[procKey]bool{}
	all = slices.DeleteFunc(all, func(p seenProc) bool {
		start, _, lives := procStart(p.PID)
		alive[procKey{p.PID, p.Start}] = lives && start == p.Start
		return !lives || start != p.Start
	})
	// What a daemon has forked is its picture until it is a server by exec.
	daemons := map[int]bool{}
	for _, p := range all {
		daemons[p.PID] = p.Kind == "daemon"
	}
	all = slices.DeleteFunc(all, func(p seenProc) bool { return p.Kind == "daemon" && daemons[parentOf(p.PID)] })
	for k := range o.groups {
		if !alive[k] {
			delete(o.groups, k)
		}
	}
	return all
}

func (o *observer) proc(pid int, start uint64) (seenProc, bool) {
	p := seenProc{PID: pid, Start: start}
	proc := "/proc/" + strconv.Itoa(pid) + "/"
	exe, err := os.Readlink(proc + "exe")
	if err != nil {
		return p, false
	}
	exe = strings.TrimSuffix(exe, " (deleted)")
	key := procKey{pid, start}
	if group, known := o.groups[key]; known {
		p.Container = group
	} else {
		text, _ := os.ReadFile(proc + "cgroup")
		p.Container = containerID.FindString(string(text))
		o.groups[key] = p.Container
	}
	switch filepath.Base(exe) {
	case mpssim.ControlName, mpssim.ServerName:
		if !strings.HasPrefix(exe, o.dir+"/") {
			return p, false // the control utility in a container, or somebody else's
		}
		p.Kind = "server"
		if filepath.Base(exe) == mpssim.ControlName {
			cmdline, _ := os.ReadFile(proc + "cmdline")
			if args := strings.Split(string(cmdline), "\x00"); !slices.Contains(args, "-f") && !slices.Contains(args, "-d") {
				return p, false
			}
			p.Kind = "daemon"
		}
		env, _ := os.ReadFile(proc + "environ")
		for _, kv := range strings.Split(string(env), "\x00") {
			if v, ok := strings.CutPrefix(kv, "CUDA_VISIBLE_DEVICES="); ok {
				p.GPU = v
			}
		}
	default:
		p.Kind = "client"
	}
	fds, _ := os.ReadDir(proc + "fd")
	for _, fd := range fds {
		target, err := os.Readlink(proc + "fd/" + fd.Name())
		if err != nil || !strings.HasPrefix(target, "/memfd:cuda:") {
			continue
		}
		name, _, _ := strings.Cut(strings.TrimPrefix(target, "/memfd:cuda:"), " ")
		gpu, kind, _ := strings.Cut(name, ":")
		h := seenHold{GPU: gpu, Kind: kind}
		if info, err := os.Stat(proc + "fd/" + fd.Name()); err == nil {
			h.MiB = info.Size() >> 20
		}
		p.Holds = append(p.Holds, h)
	}
	return p, true
}

// parentOf is a process's parent, or 0.
func parentOf(pid int) (parent int) {
	text, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	stat := string(text)
	if fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:]); len(fields) > 1 {
		parent, _ = strconv.Atoi(fields[1])
	}
	return parent
}

// procStart reads a process's start time and name; a zombie does not live.
func procStart(pid int) (start uint64, comm string, alive bool) {
	if pid == 0 {
		return 0, "", false
	}
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, "", false
	}
	stat := string(text)
	open, end := strings.IndexByte(stat, '('), strings.LastIndexByte(stat, ')')
	fields := strings.Fields(stat[end+1:])
	if open < 0 || len(fields) < 20 || fields[0] == "Z" || fields[0] == "X" {
		return 0, "", false
	}
	start, err = strconv.ParseUint(fields[19], 10, 64)
	return start, stat[open+1 : end], err == nil
}

// askServer asks the server again and again, half of the time at most. While it does not
// answer, samples have none.
func (o *observer) askServer(c *http.Client) {
	for took := time.Duration(0); ; <-time.After(max(took, 50*time.Millisecond)) {
		a := &seenServer{From: time.Now()}
		var about api.Server
		err := fetch(c, api.PathServer, &about)
		// Tasks last: what they hold is on machines that are known by then.
		for path, into := range map[string]any{api.PathInstances: &a.Instances, api.PathServices: &a.Services} {
			if err == nil {
				err = fetch(c, path, into)
			}
		}
		if err == nil {
			err = fetch(c, api.PathTasks, &a.Tasks)
		}
		a.Term, a.To = about.Term, time.Now()
		if took = a.To.Sub(a.From); err == nil {
			o.mu.Lock()
			o.answer = a
			o.mu.Unlock()
		}
	}
}

func unixClient(socket string, limit time.Duration) *http.Client {
	return &http.Client{Timeout: limit, Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
}

func fetch(c *http.Client, path string, into any) error {
	resp, err := c.Get("http://unix" + path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", path, resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(into)
}
