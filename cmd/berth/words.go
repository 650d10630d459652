package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/berth-gpu/berth/api"
)

// shortIDLength is what tables show of a task's id: enough to tell the tasks of
// one machine apart, and accepted wherever an id is.
const shortIDLength = 8

func shortID(id string) string {
	if len(id) > shortIDLength {
		return id[:shortIDLength]
	}
	return id
}

// age says how long ago t was, in its two largest units.
func age(now, t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	d := max(now.Sub(t), 0).Truncate(time.Second)
	s := int64(d / time.Second)
	switch {
	case s < 60:
		return fmt.Sprintf("%ds", s)
	case s < 3600:
		return fmt.Sprintf("%dm%02ds", s/60, s%60)
	case s < 48*3600:
		return fmt.Sprintf("%dh%02dm", s/3600, s/60%60)
	}
	return fmt.Sprintf("%dd%02dh", s/86400, s/3600%24)
}

// gib is an amount of MiB as GiB with one decimal, rounded to nearest.
func gib(mib int64) string {
	tenths := (mib*10 + 512) / 1024
	return fmt.Sprintf("%d.%d", tenths/10, tenths%10)
}

// vcpu is an amount of ECS CPU units as vCPUs with two decimals at most.
func vcpu(units int64) string {
	return strings.TrimSuffix(strings.TrimRight(strconv.FormatFloat(float64(units)/1024, 'f', 2, 64), "0"), ".")
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func plural(n int, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %ss", n, one)
}

// isID says whether s is a task's id: 32 hex digits.
func isID(s string) bool {
	return len(s) == 32 && strings.Trim(s, "0123456789abcdef") == ""
}

// nameOf is what a table calls a task: its service's, its file's or its family's name;
// at an agent, a task that a server wants has the server's id beside it.
func nameOf(t api.Task) string {
	switch {
	case serviceOf(t) != "":
		return serviceOf(t)
	case isID(t.Name) && t.Name != t.ID: // at an agent: the server's task
		return t.Family + " (" + shortID(t.Name) + ")"
	case t.Name != "" && t.Name != t.ID:
		return t.Name
	}
	return t.Family
}

// gpuNames maps each GPU's id to what an operator calls it on its machine.
func gpuNames(insts []api.Instance) map[string]string {
	names := make(map[string]string)
	for _, inst := range insts {
		for _, g := range inst.GPUs {
			names[g.ID] = strconv.Itoa(g.Index)
		}
	}
	return names
}

// waitingLines is what a person must know besides what runs: each wanted task that
// waits, with its reasons, and each file that was refused, with its problems. Where
// there are several machines, the machine's name comes first.
func waitingLines(insts ...api.Instance) []string {
	var lines []string
	for _, inst := range insts {
		where := ""
		if len(insts) > 1 {
			where = inst.Name + ": "
		}
		for _, w := range inst.Waiting {
			lines = append(lines, fmt.Sprintf("waiting  %s%s (%s)", where, w.Name, w.Family))
			for _, r := range w.Reasons {
				lines = append(lines, "         "+r)
			}
		}
		for _, p := range inst.Problems {
			lines = append(lines, fmt.Sprintf("refused  %s%s", where, p.Name))
			for _, s := range p.Problems {
				lines = append(lines, "         "+s)
			}
		}
	}
	return lines
}
