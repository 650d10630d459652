package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/berth-gpu/berth/api"
)

// barWidth is the number of cells of a GPU's bar: with brackets and indent it fits
// a terminal of 80 columns.
const barWidth = 72

// style says how a screen is drawn.
type style struct {
	width  int // columns; 0: as many as it takes
	colour bool
}

// cell is what one cell of a bar shows: a slice (-1: free memory), and whether the
// slice's processes use it by now.
type cell struct {
	slice int
	used  bool
}

// barCells divides width cells among the slices in proportion to their caps.
// Edges are rounded, not sizes, so the bar's length is exact; a slice too small for
// a cell gets one all the same while there is room.
func barCells(slices []api.Slice, totalMiB int64, width int) []cell {
	cells := make([]cell, width)
	for i := range cells {
		cells[i].slice = -1
	}
	var sum int64
	for _, s := range slices {
		sum += s.MemoryInMiB
	}
	totalMiB = max(totalMiB, sum, 1) // a GPU that shrank may be over
	edge := func(mib int64) int { return int((mib*int64(width)*2 + totalMiB) / (2 * totalMiB)) }
	var before int64
	at := 0
	for i, s := range slices {
		before += s.MemoryInMiB
		end := min(max(edge(before), at+1), width)
		used := 0
		if s.MemoryInMiB > 0 && s.UsedMemoryInMiB > 0 {
			share := min(s.UsedMemoryInMiB, s.MemoryInMiB)
			used = max(1, int(share*int64(end-at)/s.MemoryInMiB))
		}
		for c := at; c < end; c++ {
			cells[c] = cell{slice: i, used: c-at < used}
		}
		at = end
	}
	return cells
}

// letter names a slice within its GPU: A to Z, then from A again.
func letter(slice int) string { return string(rune('A' + slice%26)) }

// palette are background colours (of the 256) on which black is read well;
// neighbours differ.
var palette = []int{114, 180, 111, 176, 80, 216, 150, 183, 222, 117}

func (st style) paint(slice int, used bool, text string) string {
	if !st.colour || slice < 0 {
		return text
	}
	bg := palette[slice%len(palette)]
	if used {
		return fmt.Sprintf("\x1b[30;48;5;%dm%s\x1b[0m", bg, text)
	}
	return fmt.Sprintf("\x1b[38;5;%dm%s\x1b[0m", bg, text)
}

// sgr wraps text in one attribute; without colour it stays as it is.
func (st style) sgr(code, text string) string {
	if !st.colour {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// drawBar draws cells: an upper-case letter is memory in use, a lower-case one what
// the slice may still take, a dot is free.
func (st style) drawBar(cells []cell) string {
	var b strings.Builder
	b.WriteByte('[')
	for i := 0; i < len(cells); {
		end := i
		for end < len(cells) && cells[end] == cells[i] {
			end++
		}
		text := "."
		if s := cells[i].slice; s >= 0 {
			if text = letter(s); !cells[i].used {
				text = strings.ToLower(text)
			}
		}
		b.WriteString(st.paint(cells[i].slice, cells[i].used, strings.Repeat(text, end-i)))
		i = end
	}
	b.WriteByte(']')
	return b.String()
}

// drawTop is the whole screen of `berth top`, a string per line, none longer than
// the style's width.
func drawTop(p picture, now time.Time, st style) []string {
	var lines []string
	if len(p.insts) == 1 {
		lines = st.drawMachine(p.insts[0], p.pending, now)
	} else {
		lines = st.drawFleet(p.insts, p.pending, now)
	}
	for i := range lines {
		if st.width > 0 {
			lines[i] = clip(lines[i], st.width)
		}
	}
	return lines
}

// drawMachine is one machine in full.
func (st style) drawMachine(inst api.Instance, pending []api.Task, now time.Time) []string {
	running := 0
	for _, g := range inst.GPUs {
		running += len(g.Slices)
	}
	head := []string{inst.Name + " in " + inst.Cluster, inst.Status, "health " + inst.Health.OverallStatus, plural(running, "slice"),
		fmt.Sprintf("%d waiting", len(inst.Waiting)+len(pending)), now.Format("15:04:05")}
	if inst.DriverVersion != "" {
		head = append(head, "driver "+inst.DriverVersion)
	}
	lines := []string{strings.Join(head, "  ")}
	lines = append(lines, st.drawPending(pending, now)...)
	for _, g := range inst.GPUs {
		lines = append(lines, "")
		lines = append(lines, st.drawGPU(g, now)...)
	}
	if len(inst.GPUs) == 0 {
		lines = append(lines, "", "no GPU; berth doctor says what the agent looked for")
	}
	if more := waitingLines(inst); len(more) > 0 {
		lines = append(append(lines, ""), st.wrap(more)...)
	}
	if more := unhealthy(inst, now); len(more) > 0 {
		lines = append(append(lines, ""), st.wrap(more)...)
	}
	return lines
}

// wrap breaks sentences between words, each under its own indent; what is drawn
// (bars, columns) is cut instead.
func (st style) wrap(lines []string) []string {
	if st.width <= 0 {
		return lines
	}
	var out []string
	for _, line := range lines {
		indent := strings.Repeat(" ", min(len(line)-len(strings.TrimLeft(line, " "))+2, st.width/2))
		for visible(line) > st.width {
			at := strings.LastIndex(clip(line, st.width+1), " ")
			if at <= len(indent) {
				break // one long word
			}
			out = append(out, line[:at])
			line = indent + strings.TrimLeft(line[at:], " ")
		}
		out = append(out, line)
	}
	return out
}

func unhealthy(inst api.Instance, now time.Time) (lines []string) {
	for _, d := range inst.Health.Details {
		if d.Status != api.HealthOK {
			lines = append(lines, fmt.Sprintf("health   %s %s for %s: %s", d.Type, d.Status, age(now, d.LastStatusChange), dash(d.StatusReason)))
		}
	}
	return lines
}

// drawGPU is one GPU: a header line, why it is not held if so, its bar, and a
// legend line per slice.
func (st style) drawGPU(g api.GPU, now time.Time) []string {
	var capped int64
	for _, s := range g.Slices {
		capped += s.MemoryInMiB
	}
	first := fmt.Sprintf("GPU %d  %s  %s  %s", g.Index, g.Name, g.SharingMode, st.holding(g))
	second := fmt.Sprintf("%s used  %s allocated  %s GiB  util %d%%  %s", gib(g.UsedMemoryInMiB), gib(capped), gib(g.TotalMemoryInMiB),
		g.UtilizationPct, plural(g.MPS.Restarts, "restart"))
	var lines []string
	if header := first + "  " + second; st.width == 0 || visible(header) <= st.width {
		lines = append(lines, header)
	} else {
		lines = append(lines, first, "  "+second)
	}
	if why := whyNotHeld(g); why != "" {
		what := "not held for " + age(now, g.Since)
		if g.Held {
			what = g.Standing + " towards placement"
		}
		lines = append(lines, st.wrap([]string{fmt.Sprintf("  %s: %s", what, why)})...)
	}
	width := barWidth
	if st.width > 0 {
		width = max(min(width, st.width-4), 8)
	}
	lines = append(lines, "  "+st.drawBar(barCells(g.Slices, g.TotalMemoryInMiB, width)))
	return append(lines, st.legend(g)...)
}

func (st style) holding(g api.GPU) string {
	word := holding(g)
	if g.Held {
		return st.sgr("32", word)
	}
	if g.SharingMode == api.ModeNvidiaMPS {
		return st.sgr("31", word)
	}
	return word
}

// legend is a line per slice, in columns of their own per GPU.
func (st style) legend(g api.GPU) []string {
	name := func(s api.Slice) string { return s.Family + "/" + s.Container }
	longest := 0
	for _, s := range g.Slices {
		longest = max(longest, len(name(s)))
	}
	var lines []string
	for i, s := range g.Slices {
		percent := "     "
		if s.MaxComputePct > 0 {
			percent = fmt.Sprintf("%4d%%", s.MaxComputePct)
		}
		lines = append(lines, strings.TrimRight(fmt.Sprintf("  %s  %-*s  %s  %7d MiB  %s  %7d MiB used  %s", st.paint(i, true, letter(i)),
			longest, name(s), shortID(s.TaskID), s.MemoryInMiB, percent, s.UsedMemoryInMiB, s.LastStatus), " "))
	}
	return lines
}

// visible is the number of columns that text takes: escape sequences take none.
// What berth draws has no wide characters.
func visible(text string) int {
	n, escape := 0, false
	for _, r := range text {
		switch {
		case escape:
			escape = r != 'm'
		case r == '\x1b':
			escape = true
		default:
			n++
		}
	}
	return n
}

// clip cuts text after width columns and ends its colour.
func clip(text string, width int) string {
	if visible(text) <= width {
		return text
	}
	n, escape := 0, false
	for i, r := range text {
		switch {
		case escape:
			escape = r != 'm'
		case r == '\x1b':
			escape = true
		case n == width:
			if strings.Contains(text[:i], "\x1b") {
				return text[:i] + "\x1b[0m"
			}
			return text[:i]
		default:
			n++
		}
	}
	return text
}
