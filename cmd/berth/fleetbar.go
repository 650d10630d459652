package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/berth-gpu/berth/api"
)

// picture is what top shows: machines, and the tasks that wait for a place on any.
type picture struct {
	insts   []api.Instance
	pending []api.Task
}

// fleetBarWidth is the most cells that a GPU's bar has where there are several machines.
const fleetBarWidth = 48

// pendingShown is how many tasks without a place top names before it counts the rest.
const pendingShown = 5

// drawFleet is several machines: what waits first, then a line per machine and a bar per
// GPU. What a slice is, `berth top INSTANCE` says.
func (st style) drawFleet(insts []api.Instance, pending []api.Task, now time.Time) []string {
	usable, gpus, slices := 0, 0, 0
	for _, inst := range insts {
		n, _, _ := capacity(inst)
		usable += n
		gpus += len(inst.GPUs)
		for _, g := range inst.GPUs {
			slices += len(g.Slices)
		}
	}
	lines := []string{strings.Join([]string{plural(len(insts), "machine"), fmt.Sprintf("%d of %s open", usable, plural(gpus, "GPU")),
		plural(slices, "slice"), fmt.Sprintf("%d waiting", len(pending)), now.Format("15:04:05")}, "  ")}
	lines = append(lines, st.drawPending(pending, now)...)
	for _, inst := range insts {
		lines = append(lines, "", st.drawHead(inst))
		for _, g := range inst.GPUs {
			lines = append(lines, st.drawRow(g))
		}
		for _, line := range append(unhealthy(inst, now), waitingLines(inst)...) {
			lines = append(lines, st.wrap([]string{"  " + line})...)
		}
	}
	if len(insts) == 0 {
		lines = append(lines, "", "no machine has joined; an agent joins with server.address set to this server's")
	}
	return lines
}

// drawPending names the first tasks without a place, each with what it lacks.
func (st style) drawPending(pending []api.Task, now time.Time) []string {
	if len(pending) == 0 {
		return nil
	}
	lines := []string{""}
	for i, t := range pending {
		if i == pendingShown {
			lines = append(lines, fmt.Sprintf("pending  and %d more; berth ps lists them", len(pending)-i))
			break
		}
		line := fmt.Sprintf("pending  %s %s for %s", shortID(t.ID), nameOf(t), age(now, t.CreatedAt))
		if t.Reason != "" {
			line += ": " + t.Reason
		}
		lines = append(lines, st.wrap([]string{line})...)
	}
	return lines
}

func (st style) drawHead(inst api.Instance) string {
	status := inst.Status
	if status != api.InstanceActive {
		status = st.sgr("33", status)
	}
	health := "health " + inst.Health.OverallStatus
	if inst.Health.OverallStatus == api.HealthImpaired {
		health = st.sgr("31", health)
	}
	agent := "agent " + connection(inst)
	if !inst.Connected {
		agent = st.sgr("31", agent)
	}
	return strings.Join([]string{inst.Name, status, agent, health, vcpu(inst.Remaining.CPU) + " vCPU and " + gib(inst.Remaining.MemoryMiB) + " GiB free"}, "  ")
}

// drawRow is one GPU in one line.
func (st style) drawRow(g api.GPU) string {
	var capped int64
	for _, s := range g.Slices {
		capped += s.MemoryInMiB
	}
	word := st.holding(g)
	if g.Standing != "" && g.Standing != api.GPUOpen {
		word = st.sgr("31", g.Standing)
	} else if g.SharingMode != api.ModeNvidiaMPS {
		word = g.SharingMode
	}
	before := fmt.Sprintf("  %-2d ", g.Index)
	after := fmt.Sprintf(" %5s of %5s GiB  util %3d%%  %s", gib(capped), gib(g.TotalMemoryInMiB), g.UtilizationPct, word)
	width := fleetBarWidth
	if st.width > 0 {
		width = max(min(width, st.width-visible(before)-visible(after)-2), 8)
	}
	return before + st.drawBar(barCells(g.Slices, g.TotalMemoryInMiB, width)) + after
}
