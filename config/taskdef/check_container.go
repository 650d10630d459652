package taskdef

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
	"github.com/berth-gpu/berth/mps"
)

// A tag's 255 characters are the whole image's, a digest's those before the @ [SDK].
var imageText = regexp.MustCompile(`^[a-zA-Z0-9_./#:-]{1,255}(@sha256:[a-fA-F0-9]{64})?$`)

var userText = regexp.MustCompile(`^[^\s:]+(:[^\s:]+)?$`)

func (c *checker) container(at string, d *types.ContainerDefinition) {
	c.name(at+".name", d.Name)
	if c.required(at+".image", d.Image) && !imageText.MatchString(*d.Image) {
		c.quoted(at+".image", *d.Image, "want repository, repository:tag or repository@sha256:digest")
	}
	if d.User != nil && !userText.MatchString(*d.User) {
		c.quoted(at+".user", *d.User, "want a user or user:group")
	}
	if d.WorkingDirectory != nil && !path.IsAbs(*d.WorkingDirectory) {
		c.quoted(at+".workingDirectory", *d.WorkingDirectory, "want an absolute path")
	}
	c.atLeast(at+".startTimeout", d.StartTimeout, 1)
	c.atLeast(at+".stopTimeout", d.StopTimeout, 1)
	c.environment(at, d)
	c.labels(at+".dockerLabels", d.DockerLabels)
	c.healthCheck(at+".healthCheck", d.HealthCheck)
	c.restartPolicy(at+".restartPolicy", d.RestartPolicy)
	c.log(at+".logConfiguration", d.LogConfiguration)
	c.isolation(at, d)
	c.mounts(at, d)
	c.linux(at+".linuxParameters", d)
	c.ulimits(at, d)
	c.network(at, d)
	c.systemControls(at, d)
	c.securityOptions(at, d)
}

func (c *checker) environment(at string, d *types.ContainerDefinition) {
	seen := map[string]string{}
	for i, kv := range d.Environment {
		below := fmt.Sprintf("%s.environment[%d]", at, i)
		if strings.ContainsRune(value(kv.Value), 0) {
			c.report(below+".value", "", "holds a NUL")
		}
		if !c.required(below+".name", kv.Name) {
			continue
		}
		switch name := *kv.Name; {
		case strings.ContainsAny(name, "=\x00"):
			c.quoted(below+".name", name, "want a name without = or NUL")
		case mps.Reserved(name):
			c.quoted(below+".name", name, "berth sets this variable; a definition may not")
		default:
			c.unique(seen, below+".name", name)
		}
	}
}

// labels are a map, so they are walked by name.
func (c *checker) labels(at string, labels map[string]string) {
	for name := range labels {
		below := at + "." + name
		if !nameText.MatchString(name) {
			below = fmt.Sprintf("%s[%q]", at, name)
		}
		switch {
		case name == "":
			c.report(below, "", "want a name")
		case strings.HasPrefix(name, "berth."), strings.HasPrefix(name, "com.amazonaws.ecs."):
			c.report(below, "", "labels that begin with berth. or com.amazonaws.ecs. are berth's own")
		}
	}
}

func (c *checker) healthCheck(at string, h *types.HealthCheck) {
	if h == nil {
		return
	}
	switch {
	case h.Command == nil:
		c.report(at+".command", "", "required")
	case len(h.Command) < 2 || h.Command[0] != "CMD" && h.Command[0] != "CMD-SHELL":
		c.report(at+".command", "", "want CMD and arguments, or CMD-SHELL and a line for the shell")
	}
	c.between(at+".interval", h.Interval, 5, 300)
	c.between(at+".timeout", h.Timeout, 2, 60)
	c.between(at+".retries", h.Retries, 1, 10)
	c.between(at+".startPeriod", h.StartPeriod, 0, 300)
}

func (c *checker) restartPolicy(at string, p *types.ContainerRestartPolicy) {
	if p == nil {
		return
	}
	if p.Enabled == nil {
		c.report(at+".enabled", "", "required")
	}
	if n := len(p.IgnoredExitCodes); n > 50 {
		c.report(at+".ignoredExitCodes", "", "%d exit codes; want at most 50", n)
	}
	for i, code := range p.IgnoredExitCodes {
		c.between(fmt.Sprintf("%s.ignoredExitCodes[%d]", at, i), &code, 0, 255)
	}
	c.between(at+".restartAttemptPeriod", p.RestartAttemptPeriod, 60, 1800)
}

func (c *checker) log(at string, l *types.LogConfiguration) {
	if l == nil {
		return
	}
	switch l.LogDriver {
	case "":
		c.report(at+".logDriver", "", "required")
	case types.LogDriverAwslogs, types.LogDriverAwsfirelens:
		c.quoted(at+".logDriver", string(l.LogDriver), "needs the ECS agent, which names its streams; want json-file, syslog, journald, gelf, fluentd or splunk")
	}
}

// capabilities are those of the ECS API, without BPF and its like.
var capabilities = strings.Fields(`ALL AUDIT_CONTROL AUDIT_WRITE BLOCK_SUSPEND CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER
	FSETID IPC_LOCK IPC_OWNER KILL LEASE LINUX_IMMUTABLE MAC_ADMIN MAC_OVERRIDE MKNOD NET_ADMIN NET_BIND_SERVICE
	NET_BROADCAST NET_RAW SETFCAP SETGID SETPCAP SETUID SYS_ADMIN SYS_BOOT SYS_CHROOT SYS_MODULE SYS_NICE SYS_PACCT
	SYS_PTRACE SYS_RAWIO SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG SYSLOG WAKE_ALARM`)

func (c *checker) linux(at string, d *types.ContainerDefinition) {
	p := d.LinuxParameters
	if p == nil {
		return
	}
	if p.Capabilities != nil {
		c.capabilities(at+".capabilities.add", p.Capabilities.Add)
		c.capabilities(at+".capabilities.drop", p.Capabilities.Drop)
	}
	for i, device := range p.Devices {
		below := fmt.Sprintf("%s.devices[%d]", at, i)
		if c.absolute(below+".hostPath", device.HostPath) {
			switch clean := path.Clean(*device.HostPath); {
			case !inside(clean, "/dev"):
				c.quoted(below+".hostPath", *device.HostPath, "want a path below /dev")
			case strings.HasPrefix(clean, "/dev/nvidia"):
				c.quoted(below+".hostPath", *device.HostPath, "GPUs are asked for in resourceRequirements")
			}
		}
		if device.ContainerPath != nil {
			c.absolute(below+".containerPath", device.ContainerPath)
		}
	}
	c.atLeast(at+".sharedMemorySize", p.SharedMemorySize, 1)
	c.atLeast(at+".maxSwap", p.MaxSwap, 0)
	if p.MaxSwap != nil && d.Memory == nil {
		c.report(at+".maxSwap", fmt.Sprint(*p.MaxSwap), "needs the container's memory, on top of which it comes")
	}
	c.between(at+".swappiness", p.Swappiness, 0, 100)
	if p.Swappiness != nil && p.MaxSwap == nil && !c.unread.Touch(at+".maxSwap") {
		c.report(at+".swappiness", fmt.Sprint(*p.Swappiness), "needs maxSwap")
	}
}

func (c *checker) capabilities(at string, names []string) {
	for i, name := range names {
		if !slices.Contains(capabilities, name) {
			c.quoted(fmt.Sprintf("%s[%d]", at, i), name, "not a capability that ECS takes (they are written without CAP_)")
		}
	}
}

func (c *checker) ulimits(at string, d *types.ContainerDefinition) {
	seen := map[string]string{}
	for i, u := range d.Ulimits {
		below := fmt.Sprintf("%s.ulimits[%d]", at, i)
		if u.Name == "" {
			c.report(below+".name", "", "required")
		}
		c.unique(seen, below+".name", string(u.Name))
		c.atLeast(below+".softLimit", &u.SoftLimit, -1)
		c.atLeast(below+".hardLimit", &u.HardLimit, -1)
		if u.HardLimit >= 0 && (u.SoftLimit > u.HardLimit || u.SoftLimit == -1) {
			c.report(below+".softLimit", fmt.Sprint(u.SoftLimit), "more than the hard limit, %d", u.HardLimit)
		}
	}
}

var hostnameText = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9.-]{0,61}[a-zA-Z0-9])?$`)

func (c *checker) network(at string, d *types.ContainerDefinition) {
	if d.Hostname != nil && !hostnameText.MatchString(*d.Hostname) {
		c.quoted(at+".hostname", *d.Hostname, "want 1 to 63 letters, digits, - and .")
	}
	for i, s := range d.DnsServers {
		if !isAddress(s) {
			c.quoted(fmt.Sprintf("%s.dnsServers[%d]", at, i), s, "want an IP address")
		}
	}
	for i, h := range d.ExtraHosts {
		below := fmt.Sprintf("%s.extraHosts[%d]", at, i)
		c.required(below+".hostname", h.Hostname)
		if c.required(below+".ipAddress", h.IpAddress) && !isAddress(*h.IpAddress) {
			c.quoted(below+".ipAddress", *h.IpAddress, "want an IP address")
		}
	}
}

// The sysctls that Linux keeps by namespace, as the ECS API lists them.
var ipcControls = strings.Fields(`kernel.msgmax kernel.msgmnb kernel.msgmni kernel.sem kernel.shmall kernel.shmmax
	kernel.shmmni kernel.shm_rmid_forced`)

func (c *checker) systemControls(at string, d *types.ContainerDefinition) {
	seen := map[string]string{}
	for i, s := range d.SystemControls {
		below := fmt.Sprintf("%s.systemControls[%d]", at, i)
		c.required(below+".value", s.Value)
		if !c.required(below+".namespace", s.Namespace) {
			continue
		}
		name := *s.Namespace
		c.unique(seen, below+".namespace", name)
		net := strings.HasPrefix(name, "net.")
		switch {
		case !net && !strings.HasPrefix(name, "fs.mqueue.") && !slices.Contains(ipcControls, name):
			c.quoted(below+".namespace", name, "not a sysctl of a container; want net.*, fs.mqueue.* or one of System V IPC")
		case net && c.def.NetworkMode == types.NetworkModeHost:
			c.quoted(below+".namespace", name, "would be the machine's in networkMode host")
		case !net && c.def.IpcMode == types.IpcModeHost:
			c.quoted(below+".namespace", name, "would be the machine's in ipcMode host")
		}
	}
}

// securityOptions are those of the ECS API that are not of Windows.
func (c *checker) securityOptions(at string, d *types.ContainerDefinition) {
	for i, o := range d.DockerSecurityOptions {
		kind, rest, found := strings.Cut(o, ":")
		if o != "no-new-privileges" && (!found || rest == "" || kind != "apparmor" && kind != "label") {
			c.quoted(fmt.Sprintf("%s.dockerSecurityOptions[%d]", at, i), o, "want no-new-privileges, apparmor:PROFILE or label:VALUE")
		}
	}
}
