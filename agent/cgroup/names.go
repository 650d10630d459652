package cgroup

import (
	"fmt"
	"path"
	"strconv"
	"strings"
)

const (
	top   = "berth"
	slice = ".slice"
)

// encode makes a name that both a folder and a part of a systemd slice can
// bear. In a slice's name '-' stands for a level, so it is written _2d; '_'
// itself is _5f, so that two names never meet.
func encode(name string) string {
	var b strings.Builder
	for i := range len(name) {
		c := name[i]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' && i > 0 {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "_%02x", c)
		}
	}
	return b.String()
}

// decode is encode's inverse; false for what encode never makes.
func decode(s string) (string, bool) {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '_' {
			b.WriteByte(s[i])
			continue
		}
		if i+3 > len(s) {
			return "", false
		}
		c, err := strconv.ParseUint(s[i+1:i+3], 16, 8)
		if err != nil {
			return "", false
		}
		b.WriteByte(byte(c))
		i += 2
	}
	return b.String(), encode(b.String()) == s
}

// place is where a task's group is, in the words of one driver.
type place struct {
	parent string // what Docker is told: --cgroup-parent
	dir    string // its folder below a hierarchy's root, beginning with '/'
	unit   string // its systemd unit; empty with cgroupfs
}

// of is the place of a task, or of the whole instance where task is empty.
func (d Driver) of(instance, task string) place {
	if !d.Systemd {
		dir := path.Join("/", top, encode(instance), encode(task))
		return place{parent: dir, dir: dir}
	}
	unit := top + "-" + encode(instance)
	dir := path.Join("/", top+slice, unit+slice)
	if task != "" {
		unit += "-" + encode(task)
		dir = path.Join(dir, unit+slice)
	}
	return place{parent: unit + slice, dir: dir, unit: unit + slice}
}

// taskOf is the task whose group has this folder name in the instance's.
func (d Driver) taskOf(instance, folder string) (string, bool) {
	if d.Systemd {
		rest, ok := strings.CutPrefix(folder, top+"-"+encode(instance)+"-")
		if !ok {
			return "", false
		}
		if folder, ok = strings.CutSuffix(rest, slice); !ok {
			return "", false
		}
	}
	return decode(folder)
}
