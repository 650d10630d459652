package main_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/mps/mpssim"
)

// BenchmarkContainerStart is the time from a task's acceptance to its container
// running, beside `docker run -d` of the same image with the same limits, turn
// about in one run.
func BenchmarkContainerStart(b *testing.B) {
	r := newRig(b, 80*gib)
	r.want("keeps-held", shared(1*gib, 0, "sleep", "1h"))
	r.start()
	r.until("held", func() bool { return r.running("keeps-held") && r.gpu(0).Held })
	var ours, plainRun []time.Duration
	for i := 0; b.Loop(); i++ {
		name := fmt.Sprintf("n%d", i)
		r.want(name, shared(1*gib, 0, "sleep", "1h"))
		r.until("it runs", func() bool { return r.running(name) })
		task := r.task(name)
		ours = append(ours, r.container(name).StartedAt.Sub(task.CreatedAt))
		r.drop(name)
		r.until("it is gone", func() bool { return r.task(name).ID == "" })

		begun := time.Now()
		out, err := exec.Command("docker", "run", "-d", "--memory", "64m", "--label", "berth.instance="+r.instance+"-plain", "--entrypoint", "/bin/cuda-client", sampleImage, "sleep", "1h").CombinedOutput()
		if err != nil {
			b.Fatalf("%v: %s", err, out)
		}
		id := strings.TrimSpace(string(out))
		plainRun = append(plainRun, r.inspect(id).StartedAt.Sub(begun))
		exec.Command("docker", "rm", "-f", id).Run()
	}
	b.ReportMetric(median(ours).Seconds()*1000, "berth-ms")
	b.ReportMetric(median(plainRun).Seconds()*1000, "docker-run-ms")
	b.ReportMetric(float64(median(ours))/float64(median(plainRun)), "ratio")
}

// BenchmarkDeadDaemon is the time from kill -9 of a daemon to the agent's local
// API saying that the GPU is closed, each kill on a GPU without tasks.
func BenchmarkDeadDaemon(b *testing.B) {
	r := newRig(b, 80*gib)
	r.set("mps.budget.failures", 1000000)
	r.start()
	var took []time.Duration
	for b.Loop() {
		r.until("up", func() bool { return r.gpu(0).MPS.State == "IDLE" && r.gpu(0).MPS.DaemonPID != 0 })
		failures := r.gpu(0).MPS.Failures
		if _, err := mpssim.KillDaemon(r.machine.Dir, r.gpus[0]); err != nil {
			b.Fatal(err)
		}
		killed := time.Now()
		for r.gpu(0).MPS.Failures == failures { // each look takes about a millisecond
		}
		took = append(took, time.Since(killed))
	}
	slices.Sort(took)
	b.ReportMetric(float64(median(took).Microseconds())/1000, "median-ms")
	b.ReportMetric(float64(took[len(took)-1].Microseconds())/1000, "worst-ms")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkIdle is what the agent costs with 8 GPUs and 48 tasks that do nothing.
func BenchmarkIdle(b *testing.B) {
	memory := make([]int64, 8)
	for i := range memory {
		memory[i] = 80 * gib
	}
	r := newRig(b, memory...)
	// The defaults of a real machine, not the rig's haste.
	r.set("gpu.sampleEvery", "5s")
	r.set("mps.probeEvery", "5s")
	r.set("logLevel", "info")
	for i := range 48 {
		r.want(fmt.Sprintf("t%02d", i), shared(13*gib, 0, "run", "--memory", "1GiB", "--tick", "1h"))
	}
	r.start()
	r.within(5*time.Minute, "all 48 run", func() bool {
		n := 0
		for _, t := range r.tasks() {
			if t.LastStatus == api.StatusRunning {
				n++
			}
		}
		return n == 48
	})
	pid := r.agent.Process.Pid
	const window = 30 * time.Second
	for b.Loop() {
		settle := time.After(10 * time.Second)
		<-settle
		before, children := cpuTime(b, pid)
		<-time.After(window)
		after, childrenAfter := cpuTime(b, pid)
		b.ReportMetric(100*(after-before).Seconds()/window.Seconds(), "cpu-%")
		b.ReportMetric(100*(childrenAfter-children).Seconds()/window.Seconds(), "probes-cpu-%")
		b.ReportMetric(float64(rssKiB(b, pid))/1024, "rss-MiB")
	}
	b.ReportMetric(0, "ns/op")
}

// cpuTime is the agent's CPU time, and that of the control commands it has run.
func cpuTime(b *testing.B, pid int) (own, children time.Duration) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		b.Fatal(err)
	}
	f := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+2:]))
	ticks := func(i int) time.Duration {
		n, _ := strconv.ParseInt(f[i], 10, 64)
		return time.Duration(n) * time.Second / 100
	}
	return ticks(11) + ticks(12), ticks(13) + ticks(14)
}

func rssKiB(b *testing.B, pid int) int64 {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		b.Fatal(err)
	}
	for _, line := range strings.Split(string(text), "\n") {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(rest, "kB")), 10, 64)
			return n
		}
	}
	b.Fatal("no VmRSS")
	return 0
}

func median(d []time.Duration) time.Duration {
	s := slices.Sorted(slices.Values(d))
	return s[len(s)/2]
}
