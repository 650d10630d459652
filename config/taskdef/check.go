package taskdef

import (
	"fmt"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
	"github.com/berth-gpu/berth/api/ecsjson"
)

// checker collects what breaks a rule. Each method is a chapter of the rules and
// goes through the definition in its own order; the problems are sorted after.
type checker struct {
	Rules
	def    *Definition
	shared bool     // some container of the task shares a GPU
	unread Problems // found in reading; what hangs on them is not judged
	found  Problems
}

func (r Rules) check(d *Definition, unread Problems) Problems {
	c := &checker{Rules: r, def: d, unread: unread}
	for i := range d.ContainerDefinitions {
		_, _, shared := Share(&d.ContainerDefinitions[i])
		c.shared = c.shared || shared
	}
	c.task()
	c.sizes()
	c.gpus()
	c.dependencies()
	c.hostPorts()
	for i := range d.Volumes {
		c.volume(fmt.Sprintf("volumes[%d]", i), &d.Volumes[i])
	}
	for i := range d.ContainerDefinitions {
		c.container(container(i), &d.ContainerDefinitions[i])
	}
	return c.found
}

func container(i int) string { return fmt.Sprintf("containerDefinitions[%d]", i) }

func (c *checker) add(path, shown, rule string, args ...any) {
	c.found = append(c.found, Problem{Path: path, Value: shown, Rule: fmt.Sprintf(rule, args...)})
}

// report adds a problem, unless what it is about could not be read. shown is ""
// where the value says nothing.
func (c *checker) report(path, shown, rule string, args ...any) {
	if !c.unread.Touch(path) {
		c.add(path, shown, rule, args...)
	}
}

// doubt says whether a field of any container could not be read.
func (c *checker) doubt(field string) bool {
	for i := range max(1, len(c.def.ContainerDefinitions)) {
		if c.unread.Touch(container(i) + field) {
			return true
		}
	}
	return false
}

// quoted reports about a string.
func (c *checker) quoted(path, s, rule string, args ...any) {
	c.report(path, ecsjson.Quote(s), rule, args...)
}

// required reports a string that is missing or empty, and says whether it is there.
func (c *checker) required(path string, s *string) bool {
	switch {
	case s == nil:
		c.report(path, "", "required")
	case *s == "":
		c.quoted(path, "", "want a value")
	}
	return value(s) != ""
}

// between reports a number outside its bounds.
func (c *checker) between(path string, n *int32, lowest, highest int32) {
	if n != nil && (*n < lowest || *n > highest) {
		c.report(path, fmt.Sprint(*n), "want %d to %d", lowest, highest)
	}
}

func (c *checker) atLeast(path string, n *int32, lowest int32) {
	if n != nil && *n < lowest {
		c.report(path, fmt.Sprint(*n), "want at least %d", lowest)
	}
}

// unique reports the second of two equal names.
func (c *checker) unique(seen map[string]string, path, name string) {
	if name == "" {
		return
	}
	if first, ok := seen[name]; ok {
		c.quoted(path, name, "already at %s", first)
		return
	}
	seen[name] = path
}

// absolute reports a path that does not begin at the root or that Docker
// cannot be told of, and says whether it may be judged further.
func (c *checker) absolute(at string, p *string) bool {
	switch {
	case !c.required(at, p):
		return false
	case !path.IsAbs(*p):
		c.quoted(at, *p, "want an absolute path")
		return false
	case strings.ContainsAny(*p, ":\x00"):
		c.quoted(at, *p, "want a path without a colon or NUL")
		return false
	}
	return true
}

const namePattern = "want 1 to 255 letters, digits, - and _"

var nameText = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,255}$`)

func (c *checker) name(path string, name *string) {
	if name == nil {
		c.report(path, "", "required")
	} else if !nameText.MatchString(*name) {
		c.quoted(path, *name, namePattern)
	}
}

// ECS's quotas [service quotas of Amazon ECS].
const (
	maxContainers = 10
	maxTags       = 50
)

// task is what is said of the task as a whole.
func (c *checker) task() {
	d := c.def
	c.name("family", d.Family)
	switch n := len(d.ContainerDefinitions); {
	case d.ContainerDefinitions == nil:
		c.report("containerDefinitions", "", "required")
	case n == 0 || n > maxContainers:
		c.add("containerDefinitions", "", "%d containers; want 1 to %d", n, maxContainers)
	case !slices.ContainsFunc(d.ContainerDefinitions, func(d types.ContainerDefinition) bool { return essential(&d) }) && !c.doubt(".essential"):
		c.add("containerDefinitions", "", "no container is essential; want at least one")
	}
	names := map[string]string{}
	for i, d := range d.ContainerDefinitions {
		c.unique(names, container(i)+".name", value(d.Name))
	}
	volumes := map[string]string{}
	for i, v := range d.Volumes {
		c.unique(volumes, fmt.Sprintf("volumes[%d].name", i), value(v.Name))
	}
	if d.NetworkMode == types.NetworkModeAwsvpc {
		c.quoted("networkMode", "awsvpc", "berth has no elastic network interfaces; want bridge, host or none")
	}
	switch {
	case d.PidMode == types.PidModeTask:
		c.quoted("pidMode", "task", "want host, or none at all for a namespace of each container's own")
	case d.PidMode == types.PidModeHost && c.shared:
		c.quoted("pidMode", "host", "a task on a shared GPU may not see the machine's processes")
	}
	switch {
	case d.IpcMode == types.IpcModeTask:
		c.quoted("ipcMode", "task", "want host or none")
	case d.IpcMode == types.IpcModeHost && c.shared:
		c.quoted("ipcMode", "host", "a task on a shared GPU may not share the machine's memory segments")
	}
	if p := d.RuntimePlatform; p != nil && p.OperatingSystemFamily != "" && p.OperatingSystemFamily != types.OSFamilyLinux {
		c.quoted("runtimePlatform.operatingSystemFamily", string(p.OperatingSystemFamily), "want LINUX")
	}
	c.tags()
}

func (c *checker) tags() {
	if n := len(c.def.Tags); n > maxTags {
		c.report("tags", "", "%d tags; want at most %d", n, maxTags)
	}
	seen := map[string]string{}
	for i, t := range c.def.Tags {
		at := fmt.Sprintf("tags[%d]", i)
		key, val := value(t.Key), value(t.Value)
		if c.required(at+".key", t.Key) {
			switch {
			case len([]rune(key)) > 128:
				c.quoted(at+".key", key, "want at most 128 characters")
			case strings.HasPrefix(strings.ToLower(key), "aws:"):
				c.quoted(at+".key", key, "aws: is Amazon's prefix")
			}
			c.unique(seen, at+".key", key)
		}
		if len([]rune(val)) > 256 {
			c.quoted(at+".value", val, "want at most 256 characters")
		}
	}
}

func essential(d *types.ContainerDefinition) bool { return d.Essential == nil || *d.Essential }

// sizes are CPU and memory, of the task and of its containers together.
func (c *checker) sizes() {
	d := c.def
	cpu, haveCPU := TaskCPU(&d.TaskDefinition)
	if d.Cpu != nil && (!haveCPU || cpu < minTaskCPU || cpu > maxTaskCPU) {
		haveCPU = false
		c.quoted("cpu", *d.Cpu, `want units or vCPU, as "512" or "0.5 vCPU", from %d to %d units`, minTaskCPU, maxTaskCPU)
	}
	memory, haveMemory := TaskMemory(&d.TaskDefinition)
	if d.Memory != nil && (!haveMemory || memory < minMemoryMiB) {
		haveMemory = false
		c.quoted("memory", *d.Memory, `want MiB or GB, as "1024" or "1 GB", of at least %d MiB`, minMemoryMiB)
	}
	var sumCPU, sumMemory int64
	for i := range d.ContainerDefinitions {
		def := &d.ContainerDefinitions[i]
		at := container(i)
		if def.Cpu < 0 || def.Cpu > maxTaskCPU {
			c.report(at+".cpu", fmt.Sprint(def.Cpu), "want 0 to %d", maxTaskCPU)
		}
		c.atLeast(at+".memory", def.Memory, minMemoryMiB)
		c.atLeast(at+".memoryReservation", def.MemoryReservation, minMemoryMiB)
		hard, soft := value(def.Memory), value(def.MemoryReservation)
		switch {
		case d.Memory == nil && def.Memory == nil && def.MemoryReservation == nil && !c.unread.Touch(at+".memoryReservation") && !c.unread.Touch("memory"):
			c.report(at+".memory", "", "required, or memoryReservation, where the task has no memory")
		case def.Memory != nil && soft > hard:
			c.report(at+".memoryReservation", fmt.Sprint(soft), "more than memory, %d", hard)
		case haveMemory && int64(max(hard, soft)) > memory:
			field := ".memory"
			if soft > hard {
				field = ".memoryReservation"
			}
			c.report(at+field, fmt.Sprint(max(hard, soft)), "more than the task's memory, %d MiB", memory)
			continue // counted once
		}
		sumCPU += int64(def.Cpu)
		sumMemory += reservedMiB(def)
	}
	if haveCPU && sumCPU > cpu {
		c.quoted("cpu", *d.Cpu, "the containers' cpu comes to %d units, more than the task's %d", sumCPU, cpu)
	}
	if haveMemory && sumMemory > memory && !c.doubt(".memoryReservation") {
		c.quoted("memory", *d.Memory, "the containers' memory comes to %d MiB, more than the task's %d", sumMemory, memory)
	}
}

// hostPorts are the machine's, of which each is taken once in a task.
func (c *checker) hostPorts() {
	taken := map[Port]string{}
	for i := range c.def.ContainerDefinitions {
		for j, p := range c.def.ContainerDefinitions[i].PortMappings {
			at := fmt.Sprintf("%s.portMappings[%d]", container(i), j)
			c.portMapping(at, p)
			port := Port{hostPort(c.def.NetworkMode, p), protocol(p)}
			if port.Host <= 0 {
				continue
			}
			if first, ok := taken[port]; ok {
				c.report(at, fmt.Sprintf("%d/%s", port.Host, port.Protocol), "the machine's port is already taken at %s", first)
				continue
			}
			taken[port] = at
		}
	}
}

func (c *checker) portMapping(at string, p types.PortMapping) {
	mode, inside, outside := c.def.NetworkMode, p.ContainerPort, p.HostPort
	if inside == nil {
		c.report(at+".containerPort", "", "required")
	}
	c.between(at+".containerPort", inside, 1, 65535)
	c.between(at+".hostPort", outside, 0, 65535)
	switch {
	case mode == types.NetworkModeNone:
		c.report(at, "", "networkMode none has no ports")
	case mode == types.NetworkModeHost && value(outside) != 0 && inside != nil && *outside != *inside:
		c.report(at+".hostPort", fmt.Sprint(*outside), "want none or the containerPort, %d, in networkMode host", *inside)
	}
}

func isAddress(s string) bool {
	_, err := netip.ParseAddr(s)
	return err == nil
}
