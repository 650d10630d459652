package main

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/scripts/rig"
)

// interval is the pause between two samples.
const interval = 50 * time.Millisecond

// sample is how many of the service's tasks ran at a moment; -1: nobody answered.
type sample struct {
	server, docker int
	away           bool // the server was not to be there
}

// watcher samples the service until it is stopped.
type watcher struct {
	end  context.CancelFunc
	done chan struct{}

	mu      sync.Mutex
	gone    bool
	samples []sample
}

func watch(s *rig.System) *watcher {
	ctx, cancel := context.WithCancel(context.Background())
	w := &watcher{end: cancel, done: make(chan struct{})}
	go func() {
		defer close(w.done)
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for {
			w.mu.Lock()
			away := w.gone
			w.mu.Unlock()
			got := sample{server: byServer(ctx, s), docker: byDocker(ctx, s)}
			w.mu.Lock()
			got.away = away || w.gone
			if ctx.Err() == nil {
				w.samples = append(w.samples, got)
			}
			w.mu.Unlock()
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	}()
	return w
}

func byServer(ctx context.Context, s *rig.System) int {
	var tasks []rig.Task
	if s.Get(ctx, api.PathTasks+"?service="+service, &tasks) != nil {
		return -1
	}
	n := 0
	for _, t := range tasks {
		if t.Name == service && t.LastStatus == api.StatusRunning {
			n++
		}
	}
	return n
}

// byDocker counts the containers of the service's task definition on the system's machines.
func byDocker(ctx context.Context, s *rig.System) int {
	all, err := rig.Containers(ctx, "com.amazonaws.ecs.task-definition-family=chat")
	if err != nil {
		return -1
	}
	ours := s.Names()
	n := 0
	for _, c := range all {
		if c.State == "running" && slices.Contains(ours, c.Labels["berth.instance"]) {
			n++
		}
	}
	return n
}

// away tells the watcher whether the server is not to be there.
func (w *watcher) away(gone bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gone = gone
}

// stop ends the sampling; also of a watcher that is none.
func (w *watcher) stop() {
	if w == nil {
		return
	}
	w.end()
	<-w.done
}

// alone are Docker's counts of the samples that no server answered.
func (w *watcher) alone() (counts []int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.samples {
		if s.away && s.server < 0 && s.docker >= 0 {
			counts = append(counts, s.docker)
		}
	}
	return counts
}

func least(counts []int) int {
	if len(counts) == 0 {
		return -1
	}
	return slices.Min(counts)
}
