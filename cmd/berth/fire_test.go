package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
)

// kill -9 of agents, server, both, and SIGSTOP and SIGCONT of each, at 50 random moments
// of a rolling workload with faults, while an observer looks on. Nothing accepted is
// lost, no invariant is broken in any sample, nothing is restarted that need not be, and
// in the end all is as it was asked for. BERTH_FIRE_SEED repeats a run,
// BERTH_FIRE_MOMENTS makes it longer, BERTH_FIRE_RACE=1 builds the programs under the
// race detector, BERTH_FIRE_KEEP=1 keeps the folder of a run that failed.
func TestUnderFire(t *testing.T) {
	number := func(name string, otherwise uint64) uint64 {
		if n, err := strconv.ParseUint(os.Getenv(name), 10, 64); err == nil {
			return n
		}
		return otherwise
	}
	seed := number("BERTH_FIRE_SEED", uint64(time.Now().UnixNano()))
	moments := int(number("BERTH_FIRE_MOMENTS", 50))
	t.Logf("BERTH_FIRE_SEED=%d BERTH_FIRE_MOMENTS=%d", seed, moments)
	random := rand.New(rand.NewPCG(seed, 0))

	f := newFireSystem(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	f.startServer()
	defer f.clear()
	decoysLeft, endDecoys := f.decoys(ctx)
	defer endDecoys()
	stopObserver := f.observe()
	defer func() { stopObserver() }()
	f.note(noteDown, theServer)
	if !f.until(2*time.Minute, func() bool { return f.joined() == fireMachines || f.serverLives() != nil }) || f.serverLives() != nil {
		t.Fatalf("not all machines have joined: %v", f.serverLives())
	}
	f.note(noteUp, theServer)

	load := &fireLoad{fireSystem: f, random: rand.New(rand.NewPCG(seed, 1))}
	if err := load.begin(ctx); err != nil {
		t.Fatal(err)
	}
	if !f.until(2*time.Minute, func() bool { return f.counts() == "" }) {
		t.Fatalf("the services do not come up: %s", f.counts())
	}

	rolling, end := context.WithCancel(ctx)
	defer end()
	var owned sync.WaitGroup
	var loadFailed error
	owned.Go(func() { loadFailed = load.drive(rolling) })
	owned.Go(func() { f.hurt(rolling, rand.New(rand.NewPCG(seed, 2)), 1+moments/40) })
	began := time.Now()
	for n := range moments {
		<-time.After(time.Duration(random.IntN(1500)) * time.Millisecond) // the random moment
		if err := f.strike(n, random); err != nil {
			t.Errorf("moment %d: %v", n, err)
			end()
			break
		}
		if dead := decoysLeft(); len(dead) > 0 {
			t.Errorf("6: a process that is none of berth's was killed: %v", dead)
		}
		if len(f.failures()) > 20 {
			break
		}
	}
	took := time.Since(began)
	end()
	owned.Wait()
	if loadFailed != nil {
		t.Errorf("the workload: %v", loadFailed)
	}
	if err := f.serverLives(); err != nil {
		f.tell()
		t.Fatal(err)
	}

	// In the end all is as it was asked for.
	if err := load.rest(ctx); err != nil {
		t.Error(err)
	}
	settled := time.Now()
	if !f.until(4*time.Minute, func() bool { f.operate(); return f.unsettled(load) == "" }) {
		t.Errorf("4 minutes after the last moment: %s", f.unsettled(load))
	}
	t.Logf("%d moments in %s, all settled %s later; %d tasks accepted", moments, took.Round(time.Second), time.Since(settled).Round(time.Second), load.accepted)
	f.pending(t)
	f.replays(t)
	stopObserver()
	stopObserver = func() {}
	if dead := decoysLeft(); len(dead) > 0 {
		t.Errorf("6: a process that is none of berth's was killed: %v", dead)
	}
	f.mu.Lock()
	w := f.witness
	t.Logf("%d samples, %d answers of the server in them; the longest time between two samples was %s", w.samples, w.answers, w.longest.Round(time.Millisecond))
	f.mu.Unlock()
	f.tell()
	f.ends(t)
}

// tell says what the witness has found.
func (f *fireSystem) tell() {
	for i, b := range f.failures() {
		if i == 30 {
			f.t.Errorf("and %d more", len(f.failures())-i)
			break
		}
		f.t.Error(b)
	}
}

// strike does one of the things that have to be survived, to the server, to agents or
// to both, and undoes it.
func (f *fireSystem) strike(n int, random *rand.Rand) error {
	ids := f.ids()
	f.keepLogs(ids)
	which := random.IntN(6)
	kill := which < 3
	server, agents := which%3 != 0, which%3 != 1
	if !agents {
		ids = nil
	} else if k := random.IntN(len(ids) + 1); k > 0 { // one of them, or all
		ids = ids[k-1 : k]
	}
	away := time.Duration(random.IntN(1500)) * time.Millisecond
	if n%17 == 11 {
		away = fireLease + fireGrace + 4*time.Second // these count as lost
	}
	f.note("strike", fmt.Sprintf("kill=%t server=%t %v away=%s", kill, server, ids, away))
	for _, id := range ids {
		f.note(noteDown, id)
	}
	if server {
		f.note(noteDown, theServer)
	}
	signal := syscall.SIGSTOP
	if kill {
		signal = syscall.SIGKILL
	}
	if server {
		f.signalServer(signal)
	}
	for _, id := range ids {
		f.signalAgent(id, signal)
	}
	<-time.After(away)
	if kill && server {
		f.startServer()
	} else if server {
		f.signalServer(syscall.SIGCONT)
	}
	for _, id := range ids {
		if kill {
			if err := f.startAgent(id); err != nil {
				return err
			}
		} else {
			f.signalAgent(id, syscall.SIGCONT)
		}
		f.note(noteUp, id)
	}
	if server {
		if !f.until(time.Minute, func() bool { return f.ask("GET", api.PathServices, nil, nil) == nil }) {
			return fmt.Errorf("the server does not answer within a minute: %v", f.serverLives())
		}
		f.note(noteUp, theServer)
	}
	return f.serverLives()
}

// joined is how many machines are connected and well.
func (f *fireSystem) joined() (n int) {
	var all []api.Instance
	if f.ask("GET", api.PathInstances, nil, &all) != nil {
		return 0
	}
	for _, in := range all {
		if in.Connected && in.Status == api.InstanceActive && in.Health.OverallStatus == api.HealthOK {
			n++
		}
	}
	return n
}

// counts says which service has not what it should have; "" when all have.
func (f *fireSystem) counts() string {
	var all []api.Service
	if err := f.ask("GET", api.PathServices, nil, &all); err != nil {
		return err.Error()
	}
	for _, s := range all {
		if s.RunningCount != s.DesiredCount || s.PendingCount != 0 {
			return fmt.Sprintf("service %s: %d of %d run, %d pending: %s", s.Name, s.RunningCount, s.DesiredCount, s.PendingCount, s.Reason)
		}
	}
	if len(all) != 2 {
		return fmt.Sprintf("%d services", len(all))
	}
	return ""
}

// operate does what berth asks of its operator: a replacement that failed, since the
// newcomer was hurt too, is begun anew.
func (f *fireSystem) operate() {
	var all []api.Instance
	var replacements []api.Replacement
	if f.ask("GET", api.PathInstances, nil, &all) != nil || f.ask("GET", api.PathReplacements, nil, &replacements) != nil {
		return
	}
	for _, in := range all {
		i := slices.IndexFunc(replacements, func(r api.Replacement) bool { return r.Instance == in.Name }) // the newest
		if in.Status == api.InstanceDraining && i >= 0 && replacements[i].State == "FAILED" {
			f.note("operator", in.Name)
			f.ask("POST", strings.Replace(api.PathReplace, "{name}", in.Name, 1), struct{}{}, nil)
		}
	}
}

// unsettled says what is not yet as it was asked for.
func (f *fireSystem) unsettled(l *fireLoad) string {
	if why := f.counts(); why != "" {
		return why
	}
	// A newcomer that outlived its replacement is one more.
	if n, all := f.joined(), len(f.ids()); n < fireMachines || n != all {
		return fmt.Sprintf("%d machines of %d are well, want %d", n, all, fireMachines)
	}
	var replacements []api.Replacement
	if err := f.ask("GET", api.PathReplacements, nil, &replacements); err != nil {
		return err.Error()
	}
	for _, r := range replacements {
		if r.State != "DONE" && r.State != "FAILED" { // a machine of a failed one is there, and not well
			return fmt.Sprintf("the replacement of %s is in %s: %s %s", r.Instance, r.State, r.Says, r.Held)
		}
	}
	var tasks []api.Task
	if err := f.ask("GET", api.PathTasks, nil, &tasks); err != nil {
		return err.Error()
	}
	running, where := 0, map[string]string{}
	for _, t := range tasks {
		switch {
		case t.LastStatus == api.StatusStopped:
		case t.LastStatus == api.StatusRunning && t.DesiredStatus == api.StatusRunning:
			running++
			for _, c := range t.Containers {
				where[c.RuntimeID] = t.ID
			}
		default:
			return fmt.Sprintf("task %s (%s) is %s, to be %s: %s %s", t.ID, t.Group, t.LastStatus, t.DesiredStatus, t.Reason, t.StoppedReason)
		}
	}
	if want := 8 + l.desired; running != want {
		return fmt.Sprintf("%d tasks run, want %d", running, want)
	}
	for _, id := range f.ids() {
		var listed []struct {
			ID string `json:"Id"`
		}
		if err := fetch(f.docker, "/containers/json?filters="+url.QueryEscape(`{"label":["berth.instance=`+id+`"]}`), &listed); err != nil {
			return err.Error()
		}
		for _, c := range listed {
			if where[c.ID] == "" {
				return fmt.Sprintf("container %.12s runs on %s and is no running task's", c.ID, id)
			}
			delete(where, c.ID)
		}
	}
	for c, t := range where {
		return fmt.Sprintf("task %s is RUNNING, and its container %.12s does not run", t, c)
	}
	return ""
}

// pending gives the witness the time it waits for reasons.
func (f *fireSystem) pending(t *testing.T) {
	f.until(settleTime+10*time.Second, func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.witness.ended) == 0
	})
}

// replays: what was decided is decided again the same.
func (f *fireSystem) replays(t *testing.T) {
	folders := []string{filepath.Join(f.dir, "server", "flight")}
	for _, id := range f.ids() {
		folders = append(folders, filepath.Join(f.dir, "machines", "machines", id, "state", "flight"))
	}
	for _, folder := range folders {
		if out, err := exec.Command(filepath.Join(f.programs, "berth"), "replay", folder).CombinedOutput(); err != nil {
			t.Errorf("berth replay %s: %v\n%s", folder, err, tail(out, 4000))
		}
	}
}

// ends: Ctrl-C takes everything away.
func (f *fireSystem) ends(t *testing.T) {
	ids := f.ids()
	f.server.Process.Signal(syscall.SIGINT)
	select {
	case err := <-f.ended:
		f.ended <- err
		if err != nil {
			t.Errorf("berth dev ended with %v after SIGINT: %v", err, f.serverLives())
		}
	case <-time.After(2 * time.Minute):
		t.Error("berth dev did not end within 2 minutes of SIGINT")
		return
	}
	for _, id := range ids {
		var left []struct {
			ID string `json:"Id"`
		}
		if err := fetch(f.docker, "/containers/json?all=1&filters="+url.QueryEscape(`{"label":["berth.instance=`+id+`"]}`), &left); err != nil || len(left) > 0 {
			t.Errorf("containers of %s are left: %v %v", id, left, err)
		}
	}
	if all, _ := os.ReadDir(f.run); len(all) > 0 {
		t.Errorf("%s is left: %v", f.run, all)
	}
	procs, _ := os.ReadDir("/proc")
	for _, e := range procs {
		exe, err := os.Readlink(filepath.Join("/proc", e.Name(), "exe"))
		if err == nil && (strings.HasPrefix(exe, f.dir+"/") || strings.HasPrefix(exe, f.programs+"/")) {
			t.Errorf("process %s (%s) is left", e.Name(), exe)
		}
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	if strings.Contains(string(mounts), f.dir+"/") || strings.Contains(string(mounts), f.run+"/") {
		t.Error("mounts are left")
	}
}

// clear takes away what a test that failed has left.
func (f *fireSystem) clear() {
	if f.serverLives() == nil {
		f.signalServer(syscall.SIGCONT)
		f.signalServer(syscall.SIGKILL)
	}
	for _, id := range f.ids() {
		f.signalAgent(id, syscall.SIGCONT)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		if err := f.machines.Terminate(ctx, id); err != nil {
			f.t.Error(err)
		}
		cancel()
	}
	os.RemoveAll(f.run)
}
