package engine

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/volume"
	"github.com/docker/go-connections/nat"
	"github.com/docker/go-units"
)

// visibleDevices is read by NVIDIA's container runtime, also out of the image's
// own environment (CUDA images set it to "all"), so every container gets one.
const (
	visibleDevices = "NVIDIA_VISIBLE_DEVICES"
	noDevices      = "void"
)

// What the kernel takes as CPU shares; ECS's agent clamps to it.
const (
	minShares = 2
	maxShares = 262144
)

const mib = 1 << 20

// translation is what Docker is asked for.
type translation struct {
	config  *container.Config
	host    *container.HostConfig
	network *network.NetworkingConfig
	volumes []wantedVolume
}

// wantedVolume is a Docker volume that must exist before the container.
type wantedVolume struct {
	path      string // of the definition, for errors
	options   volume.CreateOptions
	provision bool // made where there is none
}

// translate makes Docker's configuration of a container, and decides nothing
// else: the same request gives the same answer on the same machine m. What it
// cannot honour it refuses; it never leaves anything out in silence.
func translate(r Request, m machine) (translation, error) {
	c := r.Container
	if err := refused(r); err != nil {
		return translation{}, err
	}
	env, err := environment(r)
	if err != nil {
		return translation{}, err
	}
	t := translation{
		config: &container.Config{
			Image:           value(c.Image),
			Cmd:             c.Command,
			Entrypoint:      c.EntryPoint,
			Env:             env,
			User:            value(c.User),
			WorkingDir:      value(c.WorkingDirectory),
			Hostname:        value(c.Hostname),
			Labels:          labels(r),
			OpenStdin:       value(c.Interactive),
			Tty:             value(c.PseudoTerminal),
			NetworkDisabled: value(c.DisableNetworking),
			StopTimeout:     stopSeconds(r),
		},
		host: &container.HostConfig{
			RestartPolicy:  container.RestartPolicy{Name: container.RestartPolicyDisabled},
			NetworkMode:    container.NetworkMode(networkMode(r)),
			IpcMode:        container.IpcMode(r.Task.IpcMode),
			PidMode:        container.PidMode(r.Task.PidMode),
			Privileged:     value(c.Privileged),
			ReadonlyRootfs: value(c.ReadonlyRootFilesystem),
			DNS:            c.DnsServers,
			DNSSearch:      c.DnsSearchDomains,
			Runtime:        r.Grant.Runtime,
			LogConfig:      logConfig(r),
		},
		network: &network.NetworkingConfig{},
	}
	for _, step := range []func(*translation, Request, machine) error{
		(*translation).resources,
		(*translation).linux,
		(*translation).devices,
		(*translation).mounts,
		(*translation).ports,
		(*translation).health,
		(*translation).rest,
	} {
		if err := step(&t, r, m); err != nil {
			return translation{}, err
		}
	}
	return t, nil
}

// environment is the definition's, then the grant's. A name comes once: libc's
// getenv takes the first of two, so a second one would not override.
func environment(r Request) ([]string, error) {
	granted := []string{visibleDevices + "=" + or(r.Grant.VisibleDevices, noDevices)}
	granted = append(granted, r.Grant.Env...)
	taken := map[string]bool{}
	for _, kv := range granted {
		name, _, _ := strings.Cut(kv, "=")
		taken[name] = true
	}
	last := map[string]int{}
	for i, kv := range r.Container.Environment {
		name := value(kv.Name)
		if name == "" || strings.ContainsAny(name, "=\x00") {
			return nil, r.errorf("environment[%d].name: %q; a name is not empty and holds no '='", i, name)
		}
		last[name] = i
	}
	var env []string
	for i, kv := range r.Container.Environment {
		if name := value(kv.Name); !taken[name] && last[name] == i {
			env = append(env, name+"="+value(kv.Value))
		}
	}
	return append(env, granted...), nil
}

// labels puts ours last: a definition cannot say that its container is another's.
func labels(r Request) map[string]string {
	m := map[string]string{}
	for k, v := range r.Container.DockerLabels {
		if !strings.HasPrefix(k, "berth.") && !strings.HasPrefix(k, "com.amazonaws.ecs.") {
			m[k] = v
		}
	}
	for k, v := range r.Labels.Map() {
		m[k] = v
	}
	return m
}

// stopSeconds is for `docker stop` by hand; the agent counts for itself.
func stopSeconds(r Request) *int {
	s := int(r.Settings.stopTimeout() / time.Second)
	if r.Container.StopTimeout != nil {
		s = int(*r.Container.StopTimeout)
	}
	return &s
}

func networkMode(r Request) string { return or(string(r.Task.NetworkMode), "bridge") }

func logConfig(r Request) container.LogConfig {
	if l := r.Container.LogConfiguration; l != nil {
		return container.LogConfig{Type: string(l.LogDriver), Config: l.Options}
	}
	return container.LogConfig{Type: r.Settings.LogDriver, Config: r.Settings.LogOptions}
}

func (t *translation) resources(r Request, _ machine) error {
	c, h := r.Container, t.host
	h.CgroupParent = r.CgroupParent
	h.CPUShares = min(max(int64(c.Cpu), minShares), maxShares)
	h.Memory = int64(value(c.Memory)) * mib
	h.MemoryReservation = int64(value(c.MemoryReservation)) * mib
	if h.Memory > 0 && h.MemoryReservation > h.Memory {
		return r.errorf("memoryReservation: %d MiB is more than memory, %d MiB", *c.MemoryReservation, *c.Memory)
	}
	for i, u := range c.Ulimits {
		if u.SoftLimit > u.HardLimit && u.HardLimit >= 0 {
			return r.errorf("ulimits[%d].softLimit: %d is more than hardLimit, %d", i, u.SoftLimit, u.HardLimit)
		}
		h.Ulimits = append(h.Ulimits, &units.Ulimit{Name: string(u.Name), Soft: int64(u.SoftLimit), Hard: int64(u.HardLimit)})
	}
	return nil
}

func (t *translation) linux(r Request, _ machine) error {
	p, h := r.Container.LinuxParameters, t.host
	if p == nil {
		return nil
	}
	h.Init = p.InitProcessEnabled
	h.ShmSize = int64(value(p.SharedMemorySize)) * mib
	if p.Capabilities != nil {
		h.CapAdd, h.CapDrop = p.Capabilities.Add, p.Capabilities.Drop
	}
	if p.MaxSwap != nil {
		if h.Memory == 0 {
			return r.errorf("linuxParameters.maxSwap: %d without memory; the limit is the sum of both, so give memory", *p.MaxSwap)
		}
		// Docker's MemorySwap is memory and swap together.
		h.MemorySwap = h.Memory + int64(*p.MaxSwap)*mib
		if p.Swappiness != nil { // ECS ignores it without maxSwap
			s := int64(*p.Swappiness)
			h.MemorySwappiness = &s
		}
	}
	for i, fs := range p.Tmpfs {
		field := fmt.Sprintf("linuxParameters.tmpfs[%d]", i)
		target, err := r.target(field+".containerPath", value(fs.ContainerPath))
		if err != nil {
			return err
		}
		if fs.Size <= 0 {
			return r.errorf("%s.size: %d MiB; at least 1", field, fs.Size)
		}
		if h.Tmpfs == nil {
			h.Tmpfs = map[string]string{}
		}
		h.Tmpfs[target] = strings.Join(append(slices.Clone(fs.MountOptions), fmt.Sprintf("size=%dm", fs.Size)), ",")
	}
	return nil
}

func (t *translation) devices(r Request, m machine) error {
	if p := r.Container.LinuxParameters; p != nil {
		for i, d := range p.Devices {
			host := value(d.HostPath)
			if err := guardDevice(r, fmt.Sprintf("linuxParameters.devices[%d].hostPath", i), host, m); err != nil {
				return err
			}
			permissions := ""
			for _, p := range d.Permissions {
				permissions += string(p)[:1] // read, write, mknod
			}
			t.host.Devices = append(t.host.Devices, container.DeviceMapping{
				PathOnHost: host, PathInContainer: or(value(d.ContainerPath), host), CgroupPermissions: or(permissions, "rwm")})
		}
	}
	for _, d := range r.Grant.Devices {
		t.host.Devices = append(t.host.Devices, container.DeviceMapping{PathOnHost: d.Host, PathInContainer: d.Container, CgroupPermissions: "rw"})
	}
	if len(r.Grant.CDI) > 0 {
		t.host.DeviceRequests = []container.DeviceRequest{{Driver: "cdi", DeviceIDs: r.Grant.CDI}}
	}
	return nil
}

func (t *translation) mounts(r Request, m machine) error {
	used := map[string]int{}
	for i, p := range r.Container.MountPoints {
		field := fmt.Sprintf("mountPoints[%d]", i)
		target, err := r.target(field+".containerPath", value(p.ContainerPath))
		if err != nil {
			return err
		}
		name := value(p.SourceVolume)
		v := slices.IndexFunc(r.Task.Volumes, func(v types.Volume) bool { return value(v.Name) == name })
		if v < 0 {
			return r.errorf("%s.sourceVolume: %q is none of the task's volumes", field, name)
		}
		source := r.Task.Volumes[v]
		at := fmt.Sprintf("volumes[%d]", v)
		if h := source.Host; h != nil && value(h.SourcePath) != "" {
			real, err := guardPath(at+".host.sourcePath", *h.SourcePath, r.Grant.Shared, r.Settings, m)
			if err != nil {
				return err
			}
			if strings.Contains(real, ":") || strings.Contains(target, ":") {
				return r.errorf("%s: a path with ':' (%q, %q) cannot be mounted", field, real, target)
			}
			bind := real + ":" + target // a bind, since Docker makes a folder that is not there, as ECS says
			if value(p.ReadOnly) {
				bind += ":ro"
			}
			t.host.Binds = append(t.host.Binds, bind)
			continue
		}
		w, err := dockerVolume(r, at, source)
		if err != nil {
			return err
		}
		if err := guardDriver(at+".dockerVolumeConfiguration.driverOpts", w.options.Driver, w.options.DriverOpts, r.Grant.Shared, r.Settings, m); err != nil {
			return err
		}
		if used[w.options.Name]++; used[w.options.Name] == 1 {
			t.volumes = append(t.volumes, w)
		}
		t.host.Mounts = append(t.host.Mounts, mount.Mount{
			Type: mount.TypeVolume, Source: w.options.Name, Target: target, ReadOnly: value(p.ReadOnly)})
	}
	for _, g := range r.Grant.Mounts {
		t.host.Mounts = append(t.host.Mounts, mount.Mount{
			Type: mount.TypeBind, Source: g.Source, Target: g.Target, ReadOnly: g.ReadOnly})
	}
	return nil
}

// dockerVolume is the Docker volume behind a volume without a folder of the
// machine: of the task, and gone with it, or shared and kept.
func dockerVolume(r Request, at string, v types.Volume) (wantedVolume, error) {
	if v.EfsVolumeConfiguration != nil || v.FsxWindowsFileServerVolumeConfiguration != nil || v.S3filesVolumeConfiguration != nil || value(v.ConfiguredAtLaunch) {
		return wantedVolume{}, fmt.Errorf("%s: %q is neither a host nor a docker volume; mount the file system on the machine and give host.sourcePath", at, value(v.Name))
	}
	w := wantedVolume{path: at, provision: true}
	d := v.DockerVolumeConfiguration
	if d == nil {
		d = &types.DockerVolumeConfiguration{}
	}
	w.options = volume.CreateOptions{Driver: or(value(d.Driver), "local"), DriverOpts: d.DriverOpts, Labels: map[string]string{}}
	for k, l := range d.Labels {
		if !strings.HasPrefix(k, "berth.") {
			w.options.Labels[k] = l
		}
	}
	if d.Scope == types.ScopeShared {
		w.options.Name, w.provision = value(v.Name), value(d.Autoprovision)
		return w, nil
	}
	w.options.Name = r.Labels.volumeName(value(v.Name))
	w.options.Labels[LabelInstance] = r.Labels.Instance
	w.options.Labels[LabelTask] = r.Labels.Task
	w.options.Labels[LabelGeneration] = strconv.FormatUint(r.Labels.Generation, 10)
	return w, nil
}

func (t *translation) ports(r Request, _ machine) error {
	mode := networkMode(r)
	for i, p := range r.Container.PortMappings {
		field := fmt.Sprintf("portMappings[%d]", i)
		port, host := value(p.ContainerPort), value(p.HostPort)
		switch {
		case p.ContainerPortRange != nil:
			return r.errorf("%s.containerPortRange: %q; give single ports", field, *p.ContainerPortRange)
		case port < 1 || port > 65535:
			return r.errorf("%s.containerPort: %d; 1 to 65535", field, port)
		case host < 0 || host > 65535:
			return r.errorf("%s.hostPort: %d; 0 (any) to 65535", field, host)
		case mode == "host" && host != 0 && host != port:
			return r.errorf("%s.hostPort: %d is not containerPort, %d; in network mode host both are one", field, host, port)
		case mode == "none":
			return r.errorf("%s.containerPort: %d; network mode none has no ports", field, port)
		}
		if mode == "host" {
			continue
		}
		key, err := nat.NewPort(or(string(p.Protocol), "tcp"), strconv.Itoa(int(port)))
		if err != nil {
			return r.errorf("%s.protocol: %q; tcp or udp", field, p.Protocol)
		}
		if t.config.ExposedPorts == nil {
			t.config.ExposedPorts, t.host.PortBindings = nat.PortSet{}, nat.PortMap{}
		}
		t.config.ExposedPorts[key] = struct{}{}
		t.host.PortBindings[key] = append(t.host.PortBindings[key], nat.PortBinding{HostPort: strconv.Itoa(int(host))}) // "0": Docker picks one
	}
	return nil
}

func (t *translation) health(r Request, _ machine) error {
	h := r.Container.HealthCheck
	if h == nil {
		return nil
	}
	if len(h.Command) < 2 || h.Command[0] != "CMD" && h.Command[0] != "CMD-SHELL" {
		return r.errorf(`healthCheck.command: %q; it begins with "CMD" or "CMD-SHELL", and a command follows`, h.Command)
	}
	seconds := func(v *int32, without int32) time.Duration {
		if v != nil {
			without = *v
		}
		return time.Duration(without) * time.Second
	}
	// ECS's defaults; Docker's differ (its timeout is 30 s).
	t.config.Healthcheck = &container.HealthConfig{
		Test:        h.Command,
		Interval:    seconds(h.Interval, 30),
		Timeout:     seconds(h.Timeout, 5),
		StartPeriod: seconds(h.StartPeriod, 0),
		Retries:     3,
	}
	if h.Retries != nil {
		t.config.Healthcheck.Retries = int(*h.Retries)
	}
	return nil
}

func (t *translation) rest(r Request, _ machine) error {
	for i, h := range r.Container.ExtraHosts {
		if value(h.Hostname) == "" || value(h.IpAddress) == "" {
			return r.errorf("extraHosts[%d]: hostname %q, ipAddress %q; give both", i, value(h.Hostname), value(h.IpAddress))
		}
		t.host.ExtraHosts = append(t.host.ExtraHosts, *h.Hostname+":"+*h.IpAddress)
	}
	for i, s := range r.Container.SystemControls {
		if value(s.Namespace) == "" {
			return r.errorf("systemControls[%d].namespace: %q; give a sysctl's name", i, "")
		}
		if t.host.Sysctls == nil {
			t.host.Sysctls = map[string]string{}
		}
		t.host.Sysctls[*s.Namespace] = value(s.Value)
	}
	for _, o := range r.Container.DockerSecurityOptions {
		// ECS writes apparmor:PROFILE, Docker apparmor=PROFILE.
		if kind, rest, ok := strings.Cut(o, ":"); ok && !strings.Contains(kind, "=") {
			o = kind + "=" + rest
		}
		t.host.SecurityOpt = append(t.host.SecurityOpt, o)
	}
	return nil
}

// target checks a path inside the container. Nothing of the definition lies at
// or under what the agent mounts: it would hide the GPU's client folder.
func (r Request) target(field, target string) (string, error) {
	if !path.IsAbs(target) || path.Clean(target) == "/" {
		return "", r.errorf("%s: %q; an absolute path, and not the root", field, target)
	}
	target = path.Clean(target)
	for _, g := range r.Grant.Mounts {
		if within(target, g.Target) {
			return "", r.errorf("%s: %q lies in %s, which berth mounts", field, target, g.Target)
		}
	}
	return target, nil
}

// errorf names the container definition's field.
func (r Request) errorf(format string, args ...any) error {
	i := slices.IndexFunc(r.Task.ContainerDefinitions, func(c types.ContainerDefinition) bool { return value(c.Name) == value(r.Container.Name) })
	return fmt.Errorf("containerDefinitions[%d].%w", max(i, 0), fmt.Errorf(format, args...))
}

func value[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}

func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}
