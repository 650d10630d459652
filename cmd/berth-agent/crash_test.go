package main_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
)

// kill -9 of the agent at 20 random moments of a workload that comes and goes.
// After each: every wanted task is accounted for, no GPU is over, and no
// container or daemon was restarted that need not be. BERTH_SEED repeats a run.
func TestAgentKilledTwentyTimes(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("BERTH_SEED"); s != "" {
		seed, _ = strconv.ParseUint(s, 10, 64)
	}
	t.Logf("BERTH_SEED=%d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	r := newRig(t, 40*gib, 40*gib)
	r.want("steady-1", shared(15*gib, 0, "run", "--memory", "1GiB"))
	r.want("steady-2", shared(15*gib, 50, "run", "--memory", "1GiB"))
	r.want("steady-3", plain("sleep", "1h"))
	steady := []string{"steady-1", "steady-2", "steady-3"}
	r.start()
	r.until("the steady ones run", func() bool {
		return r.running("steady-1") && r.running("steady-2") && r.running("steady-3")
	})
	type identity struct {
		id      string
		started time.Time
	}
	containers := map[string]identity{}
	for _, name := range steady {
		c := r.container(name)
		containers[name] = identity{c.ID, c.StartedAt}
	}
	daemons := [2]int{r.gpu(0).MPS.DaemonPID, r.gpu(1).MPS.DaemonPID}
	servers := [2]int{r.gpu(0).MPS.ServerPID, r.gpu(1).MPS.ServerPID}
	wanted := map[string]bool{}
	for round := range 20 {
		// Something is always on its way while the agent dies.
		for range 2 {
			name := fmt.Sprintf("come-%d", random.IntN(4))
			if wanted[name] {
				r.drop(name)
				delete(wanted, name)
			} else {
				r.want(name, shared(5*gib, 0, "run", "--memory", "1GiB"))
				wanted[name] = true
			}
		}
		pause := time.Duration(random.IntN(1500)) * time.Millisecond
		<-time.After(pause) // the random moment
		r.signal(syscall.SIGKILL)
		r.start()
		in := r.inst()
		for _, g := range in.GPUs {
			sum := int64(0)
			for _, s := range g.Slices {
				sum += s.MemoryInMiB
			}
			if sum > g.TotalMemoryInMiB || g.RemainingMemoryInMiB < 0 {
				t.Fatalf("round %d: GPU %d is over: %d of %d MiB", round, g.Index, sum, g.TotalMemoryInMiB)
			}
		}
		for _, name := range steady {
			if c := r.container(name); c.ID != containers[name].id || !c.StartedAt.Equal(containers[name].started) || !c.Alive() {
				t.Fatalf("round %d, killed after %s: %s was restarted: %+v", round, pause, name, c)
			}
		}
		for i := range 2 {
			if g := in.GPUs[i]; g.MPS.DaemonPID != 0 && g.MPS.DaemonPID != daemons[i] || g.MPS.Restarts != 0 {
				t.Fatalf("round %d: the daemon of GPU %d was restarted: %+v", round, i, g.MPS)
			}
		}
	}
	r.within(time.Minute, "in the end all that is wanted runs, and nothing else", func() bool {
		for i := range 4 {
			name := fmt.Sprintf("come-%d", i)
			if wanted[name] != r.running(name) || (!wanted[name] && r.task(name).ID != "") {
				return false
			}
		}
		return true
	})
	known := map[string]bool{}
	for _, task := range r.tasks() {
		for _, c := range task.Containers {
			known[c.RuntimeID] = task.LastStatus == api.StatusRunning
		}
	}
	for _, c := range r.containers() {
		if c.Alive() && !known[c.ID] {
			t.Errorf("container %s runs and no task knows it", c.Name)
		}
	}
	if g := r.gpu(0); g.MPS.ServerPID != servers[0] && servers[0] != 0 {
		t.Errorf("GPU 0's server is %d, was %d", g.MPS.ServerPID, servers[0])
	}
}
