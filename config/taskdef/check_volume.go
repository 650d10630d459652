package taskdef

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
	"github.com/berth-gpu/berth/mps"
)

// keptOnShared are the machine's own paths that no container of a task on a
// shared GPU may mount: each leads to the devices or to root on the machine.
var keptOnShared = []string{"/dev", "/proc", "/sys", "/run/docker.sock", "/run/docker", "/run/containerd"}

func (c *checker) volume(at string, v *types.Volume) {
	c.name(at+".name", v.Name)
	if v.Host != nil && v.DockerVolumeConfiguration != nil {
		c.report(at, "", "has both host and dockerVolumeConfiguration; give one")
	}
	if v.Host != nil && v.Host.SourcePath != nil {
		c.hostPath(at+".host.sourcePath", v.Host.SourcePath)
	}
	if d := v.DockerVolumeConfiguration; d != nil {
		c.dockerVolume(at+".dockerVolumeConfiguration", d)
	}
}

// hostPath judges a folder of the machine by its name alone; the engine follows
// symbolic links and judges again when it creates the container.
func (c *checker) hostPath(at string, source *string) {
	if !c.absolute(at, source) {
		return
	}
	if rule := c.forbidden(*source); rule != "" {
		c.quoted(at, *source, "%s", rule)
	}
}

func (c *checker) forbidden(source string) string {
	clean := canonical(source)
	if verb := touches(clean, c.RunDir); verb != "" {
		return fmt.Sprintf("%s %s, which no container may mount", verb, c.RunDir)
	}
	if !c.shared {
		return ""
	}
	for _, kept := range slices.Concat(keptOnShared, c.Protected) {
		if verb := touches(clean, kept); verb != "" {
			return fmt.Sprintf("%s %s, which a task on a shared GPU may not mount", verb, kept)
		}
	}
	return ""
}

// canonical cleans a path, and takes the name /var/run for what it is a link to
// on every distribution with systemd.
func canonical(p string) string {
	p = path.Clean(p)
	if rest, ok := strings.CutPrefix(p, "/var/run"); ok && (rest == "" || rest[0] == '/') {
		return "/run" + rest
	}
	return p
}

// touches says how mounting p gives a container kept, or part of it.
func touches(p, kept string) string {
	kept = canonical(kept)
	switch {
	case p == kept:
		return "is"
	case inside(p, kept):
		return "lies in"
	case inside(kept, p):
		return "contains"
	}
	return ""
}

func inside(p, folder string) bool {
	return strings.HasPrefix(p, strings.TrimSuffix(folder, "/")+"/")
}

func (c *checker) dockerVolume(at string, d *types.DockerVolumeConfiguration) {
	if value(d.Autoprovision) && d.Scope != types.ScopeShared {
		c.report(at+".autoprovision", "true", "only for scope shared; a volume of the task is always made")
	}
	c.labels(at+".labels", d.Labels)
	if driver := value(d.Driver); driver != "" && driver != "local" || len(d.DriverOpts) == 0 {
		return
	}
	// Docker's local driver passes these to mount(2).
	kind, device := d.DriverOpts["type"], d.DriverOpts["device"]
	options := strings.Split(d.DriverOpts["o"], ",")
	switch {
	case kind == "none", kind == "bind", slices.Contains(options, "bind"), slices.Contains(options, "rbind"):
		if c.absolute(at+".driverOpts.device", &device) {
			if rule := c.forbidden(device); rule != "" {
				c.quoted(at+".driverOpts.device", device, "%s", rule)
			}
		}
	case c.shared && kind != "tmpfs" && kind != "cifs" && !strings.HasPrefix(kind, "nfs"):
		c.quoted(at+".driverOpts.type", kind, "want tmpfs, nfs, cifs or a bind on a shared GPU")
	}
}

func (c *checker) mounts(at string, d *types.ContainerDefinition) {
	_, _, capped := Share(d)
	targets := map[string]string{}
	for i, m := range d.MountPoints {
		below := fmt.Sprintf("%s.mountPoints[%d]", at, i)
		name := value(m.SourceVolume)
		if c.required(below+".sourceVolume", m.SourceVolume) && !c.knowsVolume(name) {
			c.quoted(below+".sourceVolume", name, "none of volumes")
		}
		c.target(below+".containerPath", m.ContainerPath, capped, targets)
	}
	if d.LinuxParameters == nil {
		return
	}
	for i, t := range d.LinuxParameters.Tmpfs {
		below := fmt.Sprintf("%s.linuxParameters.tmpfs[%d]", at, i)
		c.target(below+".containerPath", t.ContainerPath, capped, targets)
		c.atLeast(below+".size", &t.Size, 1)
		for j, o := range t.MountOptions {
			if name, _, _ := strings.Cut(o, "="); !slices.Contains(tmpfsOptions, name) {
				c.quoted(fmt.Sprintf("%s.mountOptions[%d]", below, j), o, "not a mount option of tmpfs that ECS takes")
			}
		}
	}
}

// knowsVolume gives the benefit of the doubt where a volume's name could not
// be read.
func (c *checker) knowsVolume(name string) bool {
	if c.unread.Touch("volumes[0].name") {
		return true
	}
	for i, v := range c.def.Volumes {
		if value(v.Name) == name || c.unread.Touch(fmt.Sprintf("volumes[%d].name", i)) {
			return true
		}
	}
	return false
}

// target judges a path in the container. On a capped one nothing may lie over
// the client folder: a CUDA process that meets no daemon runs uncapped.
func (c *checker) target(at string, p *string, capped bool, seen map[string]string) {
	if !c.absolute(at, p) {
		return
	}
	clean := path.Clean(*p)
	verb := touches(clean, mps.ContainerPipeDirectory)
	switch {
	case clean == "/":
		c.quoted(at, *p, "the root is the image's")
	case capped && (verb == "is" || verb == "lies in"):
		c.quoted(at, *p, "%s %s, where berth mounts the GPU's client folder", verb, mps.ContainerPipeDirectory)
	default:
		c.unique(seen, at, clean)
	}
}

// tmpfsOptions are those of the ECS API.
var tmpfsOptions = strings.Fields(`defaults ro rw suid nosuid dev nodev exec noexec sync async dirsync remount mand
	nomand atime noatime diratime nodiratime bind rbind unbindable runbindable private rprivate shared rshared slave
	rslave relatime norelatime strictatime nostrictatime mode uid gid nr_inodes nr_blocks mpol`)
