package engine

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/volume"
)

var update = flag.Bool("update", false, "write testdata/translate/*.golden.json")

// fakeMachine is a file system in a table: links, and device nodes with their
// majors.
func fakeMachine() machine {
	links := map[string]string{"/home/me/run": "/run", "/var/run": "/run", "/home/me/sock": "/run/docker.sock", "/dev/gpu": "/dev/nvidia0", "/mnt/berth": "/run/berth/mps"}
	majors := map[string]uint32{"/dev/fuse": 10, "/dev/nvidia0": 195, "/dev/nvidia-uvm": 511, "/dev/vda": 254}
	return machine{
		socket: "/var/run/docker.sock",
		resolve: func(p string) (string, error) {
			p = filepath.Clean(p)
			if p == "/dangling" {
				return "", errors.New(`"/dangling" is a link to nothing`)
			}
			for from, to := range links {
				if within(p, from) {
					return to + strings.TrimPrefix(p, from), nil
				}
			}
			return p, nil
		},
		device: func(p string) (uint32, error) {
			if major, ok := majors[p]; ok {
				return major, nil
			}
			return 0, errors.New("it is no device node")
		},
	}
}

// story is a testdata/translate/*.json: what comes in. ECS's members are spelt
// as in its API; encoding/json does not mind the case.
type story struct {
	About        string
	Task         types.TaskDefinition
	Labels       Labels
	CgroupParent string
	Grant        Grant
	Settings     Settings
}

func TestTranslate(t *testing.T) {
	files, err := filepath.Glob("testdata/translate/*.json")
	if err != nil || len(files) == 0 {
		t.Fatal("no stories", err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, ".golden.json") {
			continue
		}
		t.Run(strings.TrimSuffix(filepath.Base(file), ".json"), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var s story
			decoder := json.NewDecoder(strings.NewReader(string(data)))
			decoder.DisallowUnknownFields()
			if err := decoder.Decode(&s); err != nil {
				t.Fatal(err)
			}
			r := Request{Task: &s.Task, Container: &s.Task.ContainerDefinitions[0], Labels: s.Labels, CgroupParent: s.CgroupParent, Grant: s.Grant, Settings: s.Settings}
			got, err := translate(r, fakeMachine())
			if err != nil {
				t.Fatal(err)
			}
			type wanted struct {
				Options   volume.CreateOptions
				Provision bool
			}
			out := struct {
				Name    string
				Config  *container.Config
				Host    *container.HostConfig
				Volumes []wanted `json:",omitempty"`
			}{Name: r.Labels.Name(), Config: got.config, Host: got.host}
			for _, v := range got.volumes {
				out.Volumes = append(out.Volumes, wanted{v.options, v.provision})
			}
			text := said(t, out)
			golden := strings.TrimSuffix(file, ".json") + ".golden.json"
			if *update {
				if err := os.WriteFile(golden, text, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if string(text) != string(want) {
				t.Errorf("%s: not as in %s (-update writes it):\n%s", s.About, golden, text)
			}
		})
	}
}

// said is v as JSON without what is empty, which Docker's types are full of.
func said(t *testing.T, v any) []byte {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	var tree any
	if err := json.Unmarshal(text, &tree); err != nil {
		t.Fatal(err)
	}
	if text, err = json.MarshalIndent(prune(tree), "", "  "); err != nil {
		t.Fatal(err)
	}
	return append(text, '\n')
}

func prune(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, child := range v {
			if child = prune(child); child == nil {
				delete(v, k)
			} else {
				v[k] = child
			}
		}
		if len(v) == 0 {
			return nil
		}
	case []any:
		for i := range v {
			v[i] = prune(v[i])
		}
		if len(v) == 0 || !slices.ContainsFunc(v, func(e any) bool { return e != nil }) {
			return nil
		}
	case string, float64, bool:
		if v == "" || v == 0.0 || v == false {
			return nil
		}
	}
	return v
}

func p[T any](v T) *T { return &v }

func TestRefused(t *testing.T) {
	host := func(path string) func(*Request) {
		return func(r *Request) {
			r.Task.Volumes = []types.Volume{{Name: p("v"), Host: &types.HostVolumeProperties{SourcePath: &path}}}
			r.Container.MountPoints = []types.MountPoint{{SourceVolume: p("v"), ContainerPath: p("/data")}}
		}
	}
	driver := func(options map[string]string) func(*Request) {
		return func(r *Request) {
			r.Task.Volumes = []types.Volume{{Name: p("v"), DockerVolumeConfiguration: &types.DockerVolumeConfiguration{Scope: types.ScopeShared, DriverOpts: options}}}
			r.Container.MountPoints = []types.MountPoint{{SourceVolume: p("v"), ContainerPath: p("/data")}}
		}
	}
	linux := func(l types.LinuxParameters) func(*Request) {
		return func(r *Request) { r.Container.LinuxParameters = &l }
	}
	device := func(path string) func(*Request) {
		return linux(types.LinuxParameters{Devices: []types.Device{{HostPath: &path}}})
	}
	capability := func(name string) func(*Request) {
		return linux(types.LinuxParameters{Capabilities: &types.KernelCapabilities{Add: []string{"SYS_PTRACE", name}}})
	}
	const alone, shared, either = "alone", "shared", "either" // where the rule holds
	for _, test := range []struct {
		name   string
		on     string
		change func(*Request)
		want   string
	}{
		{"privileged", shared, func(r *Request) { r.Container.Privileged, r.Settings.AllowPrivileged = p(true), true },
			`containerDefinitions[1].privileged: true; a privileged container on a shared GPU could stop its MPS daemon`},
		{"privileged, where settings do not allow it", alone, func(r *Request) { r.Container.Privileged = p(true) },
			`containerDefinitions[1].privileged: true; a privileged container can open every GPU of the machine, so this machine's settings refuse it`},
		{"host pid", shared, func(r *Request) { r.Task.PidMode = types.PidModeHost },
			`pidMode: "host"; a container on a shared GPU may not see the machine's processes, the MPS daemon's among them`},
		{"pid mode task", either, func(r *Request) { r.Task.PidMode = types.PidModeTask },
			`pidMode: "task"; berth runs each container in its own, or all in the host's`},
		{"ipc mode task", either, func(r *Request) { r.Task.IpcMode = types.IpcModeTask }, `ipcMode: "task"; give host or none`},
		{"awsvpc", either, func(r *Request) { r.Task.NetworkMode = types.NetworkModeAwsvpc }, `networkMode: "awsvpc"; give bridge, host or none`},
		{"raw device", shared, device("/dev/fuse"), `containerDefinitions[1].linuxParameters.devices[0].hostPath: "/dev/fuse"; a container on a shared GPU gets no device nodes but its GPU's`},
		{"a GPU as a raw device", alone, device("/dev/nvidia0"), `containerDefinitions[1].linuxParameters.devices[0].hostPath: "/dev/nvidia0" is a GPU's; ask for GPUs with resourceRequirements`},
		{"a GPU through a link", alone, device("/dev/gpu"), `containerDefinitions[1].linuxParameters.devices[0].hostPath: "/dev/gpu" is a GPU's; ask for GPUs with resourceRequirements`},
		{"unified memory as a raw device", alone, device("/dev/nvidia-uvm"), `containerDefinitions[1].linuxParameters.devices[0].hostPath: "/dev/nvidia-uvm" is a GPU's; ask for GPUs with resourceRequirements`},
		{"a folder of devices", alone, device("/dev"), `containerDefinitions[1].linuxParameters.devices[0].hostPath: "/dev": it is no device node`},
		{"every capability", shared, capability("ALL"), `containerDefinitions[1].linuxParameters.capabilities.add[1]: "ALL"; on a shared GPU it would let the container reach the MPS daemon (refused are ALL, SYS_ADMIN, SYS_MODULE, SYS_RAWIO, DAC_READ_SEARCH, BPF)`},
		{"a capability spelt otherwise", shared, capability("cap_sys_admin"), `containerDefinitions[1].linuxParameters.capabilities.add[1]: "cap_sys_admin"; on a shared GPU it would let the container reach the MPS daemon (refused are ALL, SYS_ADMIN, SYS_MODULE, SYS_RAWIO, DAC_READ_SEARCH, BPF)`},

		{"the run folder", either, host("/run/berth"), `volumes[0].host.sourcePath: "/run/berth" is /run/berth, which no container may mount`},
		{"in the run folder", either, host("/run/berth/mps/GPU-1/pipe"), `volumes[0].host.sourcePath: "/run/berth/mps/GPU-1/pipe" lies in /run/berth, which no container may mount`},
		{"around the run folder", either, host("/run/"), `volumes[0].host.sourcePath: "/run/" contains /run/berth, which no container may mount`},
		{"the root", either, host("/"), `volumes[0].host.sourcePath: "/" contains /run/berth, which no container may mount`},
		{"the run folder through dots", either, host("/srv/../run/berth"), `volumes[0].host.sourcePath: "/srv/../run/berth" is /run/berth, which no container may mount`},
		{"around the run folder through a link", either, host("/home/me/run"), `volumes[0].host.sourcePath: "/home/me/run" (/run) contains /run/berth, which no container may mount`},
		{"in the run folder through a link", either, host("/mnt/berth/GPU-1"), `volumes[0].host.sourcePath: "/mnt/berth/GPU-1" (/run/berth/mps/GPU-1) lies in /run/berth, which no container may mount`},
		{"another run folder", either, func(r *Request) { r.Settings.RunDir = "/tmp/b/run"; host("/tmp")(r) }, `volumes[0].host.sourcePath: "/tmp" contains /tmp/b/run, which no container may mount`},
		{"/dev", shared, host("/dev/shm"), `volumes[0].host.sourcePath: "/dev/shm" lies in /dev, which no container on a shared GPU may mount`},
		{"/proc", shared, host("/proc"), `volumes[0].host.sourcePath: "/proc" is /proc, which no container on a shared GPU may mount`},
		{"/sys", shared, host("/sys/fs/cgroup"), `volumes[0].host.sourcePath: "/sys/fs/cgroup" lies in /sys, which no container on a shared GPU may mount`},
		{"the Docker socket", shared, host("/run/docker.sock"), `volumes[0].host.sourcePath: "/run/docker.sock" is /var/run/docker.sock, which no container on a shared GPU may mount`},
		{"the Docker socket through a link", shared, host("/home/me/sock"), `volumes[0].host.sourcePath: "/home/me/sock" (/run/docker.sock) is /var/run/docker.sock, which no container on a shared GPU may mount`},
		{"Docker's containerd", shared, host("/run/containerd/containerd.sock"), `volumes[0].host.sourcePath: "/run/containerd/containerd.sock" lies in /run/containerd, which no container on a shared GPU may mount`},
		{"a link to nothing", either, host("/dangling"), `volumes[0].host.sourcePath: "/dangling" is a link to nothing`},
		{"a relative folder", either, host("run/berth"), `volumes[0].host.sourcePath: "run/berth"; an absolute path`},
		{"a bind by driver options", either, driver(map[string]string{"type": "none", "o": "rw,bind", "device": "/run"}), `volumes[0].dockerVolumeConfiguration.driverOpts.device: "/run" contains /run/berth, which no container may mount`},
		{"a bind of /dev by driver options", shared, driver(map[string]string{"o": "rbind", "device": "/dev"}), `volumes[0].dockerVolumeConfiguration.driverOpts.device: "/dev" is /dev, which no container on a shared GPU may mount`},
		{"cgroup files by driver options", shared, driver(map[string]string{"type": "cgroup", "o": "devices", "device": "cgroup"}), `volumes[0].dockerVolumeConfiguration.driverOpts.type: "cgroup"; a container on a shared GPU may mount tmpfs, nfs, cifs, or bind a folder`},
		{"a disk by driver options", shared, driver(map[string]string{"type": "ext4", "device": "/dev/vda"}), `volumes[0].dockerVolumeConfiguration.driverOpts.type: "ext4"; a container on a shared GPU may mount tmpfs, nfs, cifs, or bind a folder`},

		{"a mount over the client folder", either, func(r *Request) {
			host("/srv")(r)
			r.Container.MountPoints[0].ContainerPath = p("/run/berth/mps/")
		}, `containerDefinitions[1].mountPoints[0].containerPath: "/run/berth/mps" lies in /run/berth/mps, which berth mounts`},
		{"a tmpfs in the client folder", either, linux(types.LinuxParameters{Tmpfs: []types.Tmpfs{{ContainerPath: p("/run/berth/mps/x"), Size: 1}}}),
			`containerDefinitions[1].linuxParameters.tmpfs[0].containerPath: "/run/berth/mps/x" lies in /run/berth/mps, which berth mounts`},
		{"a mount at the root", either, func(r *Request) { host("/srv")(r); r.Container.MountPoints[0].ContainerPath = p("/..") },
			`containerDefinitions[1].mountPoints[0].containerPath: "/.."; an absolute path, and not the root`},
		{"a volume that is not there", either, func(r *Request) { host("/srv")(r); r.Container.MountPoints[0].SourceVolume = p("w") },
			`containerDefinitions[1].mountPoints[0].sourceVolume: "w" is none of the task's volumes`},
		{"a path with a colon", either, host("/srv/a:b"), `containerDefinitions[1].mountPoints[0]: a path with ':' ("/srv/a:b", "/data") cannot be mounted`},
		{"EFS", either, func(r *Request) {
			host("")(r)
			r.Task.Volumes[0] = types.Volume{Name: p("v"), EfsVolumeConfiguration: &types.EFSVolumeConfiguration{}}
		}, `volumes[0]: "v" is neither a host nor a docker volume; mount the file system on the machine and give host.sourcePath`},

		{"a name with a value in it", either, func(r *Request) {
			r.Container.Environment = []types.KeyValuePair{{Name: p("NVIDIA_VISIBLE_DEVICES=all")}}
		}, `containerDefinitions[1].environment[0].name: "NVIDIA_VISIBLE_DEVICES=all"; a name is not empty and holds no '='`},
		{"a reservation over the limit", either, func(r *Request) { r.Container.Memory, r.Container.MemoryReservation = p[int32](10), p[int32](11) },
			`containerDefinitions[1].memoryReservation: 11 MiB is more than memory, 10 MiB`},
		{"swap without memory", either, linux(types.LinuxParameters{MaxSwap: p[int32](1)}), `containerDefinitions[1].linuxParameters.maxSwap: 1 without memory; the limit is the sum of both, so give memory`},
		{"an empty tmpfs", either, linux(types.LinuxParameters{Tmpfs: []types.Tmpfs{{ContainerPath: p("/t")}}}), `containerDefinitions[1].linuxParameters.tmpfs[0].size: 0 MiB; at least 1`},
		{"a ulimit upside down", either, func(r *Request) {
			r.Container.Ulimits = []types.Ulimit{{Name: types.UlimitNameCore, SoftLimit: 2, HardLimit: 1}}
		},
			`containerDefinitions[1].ulimits[0].softLimit: 2 is more than hardLimit, 1`},
		{"a port out of range", either, func(r *Request) { r.Container.PortMappings = []types.PortMapping{{ContainerPort: p[int32](70000)}} },
			`containerDefinitions[1].portMappings[0].containerPort: 70000; 1 to 65535`},
		{"two ports in network mode host", either, func(r *Request) {
			r.Task.NetworkMode = types.NetworkModeHost
			r.Container.PortMappings = []types.PortMapping{{ContainerPort: p[int32](80), HostPort: p[int32](8080)}}
		}, `containerDefinitions[1].portMappings[0].hostPort: 8080 is not containerPort, 80; in network mode host both are one`},
		{"a port without a network", either, func(r *Request) {
			r.Task.NetworkMode = types.NetworkModeNone
			r.Container.PortMappings = []types.PortMapping{{ContainerPort: p[int32](80)}}
		}, `containerDefinitions[1].portMappings[0].containerPort: 80; network mode none has no ports`},
		{"a range of ports", either, func(r *Request) { r.Container.PortMappings = []types.PortMapping{{ContainerPortRange: p("80-90")}} },
			`containerDefinitions[1].portMappings[0].containerPortRange: "80-90"; give single ports`},
		{"a health check that is no command", either, func(r *Request) { r.Container.HealthCheck = &types.HealthCheck{Command: []string{"curl"}} },
			`containerDefinitions[1].healthCheck.command: ["curl"]; it begins with "CMD" or "CMD-SHELL", and a command follows`},
		{"a security option", either, func(r *Request) { r.Container.DockerSecurityOptions = []string{"seccomp:unconfined"} },
			`containerDefinitions[1].dockerSecurityOptions[0]: "seccomp:unconfined"; give no-new-privileges, apparmor:PROFILE or label:VALUE`},
		{"volumes from another container", either, func(r *Request) { r.Container.VolumesFrom = []types.VolumeFrom{{SourceContainer: p("other")}} },
			`containerDefinitions[1].volumesFrom[0]: "other"; mount the same volume in both containers instead`},
		{"links", either, func(r *Request) { r.Container.Links = []string{"other"} }, `containerDefinitions[1].links[0]: "other"; publish a port and use it instead`},
		{"a secret", either, func(r *Request) { r.Container.Secrets = []types.Secret{{Name: p("KEY")}} }, `containerDefinitions[1].secrets[0]: "KEY"; berth reads no secrets`},
		{"a file of variables", either, func(r *Request) {
			r.Container.EnvironmentFiles = []types.EnvironmentFile{{Value: p("arn:aws:s3:::b/vars.env")}}
		}, `containerDefinitions[1].environmentFiles[0]: "arn:aws:s3:::b/vars.env"; give environment`},
		{"a credential spec", either, func(r *Request) { r.Container.CredentialSpecs = []string{"credentialspec:x"} },
			`containerDefinitions[1].credentialSpecs[0]: "credentialspec:x"; they are for Windows`},
		{"FireLens", either, func(r *Request) {
			r.Container.FirelensConfiguration = &types.FirelensConfiguration{Type: types.FirelensConfigurationTypeFluentbit}
		}, `containerDefinitions[1].firelensConfiguration.type: "fluentbit"; give a logConfiguration that Docker has`},
		{"credentials of a registry", either, func(r *Request) {
			r.Container.RepositoryCredentials = &types.RepositoryCredentials{CredentialsParameter: p("arn:x")}
		}, `containerDefinitions[1].repositoryCredentials.credentialsParameter: "arn:x"; berth reads no secrets`},
		{"a secret for the log driver", either, func(r *Request) {
			r.Container.LogConfiguration = &types.LogConfiguration{SecretOptions: []types.Secret{{Name: p("token")}}}
		}, `containerDefinitions[1].logConfiguration.secretOptions[0]: "token"; berth reads no secrets`},
		{"half a host entry", either, func(r *Request) { r.Container.ExtraHosts = []types.HostEntry{{Hostname: p("db")}} },
			`containerDefinitions[1].extraHosts[0]: hostname "db", ipAddress ""; give both`},
		{"a system control without a name", either, func(r *Request) { r.Container.SystemControls = []types.SystemControl{{Value: p("1")}} },
			`containerDefinitions[1].systemControls[0].namespace: ""; give a sysctl's name`},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, isShared := range []bool{false, true} {
				task := &types.TaskDefinition{ContainerDefinitions: []types.ContainerDefinition{{Name: p("first")}, {Name: p("main"), Image: p("image")}}}
				r := Request{Task: task, Container: &task.ContainerDefinitions[1], Labels: Labels{Instance: "i", Task: "t", Container: "main"},
					Grant: Grant{Shared: isShared, Mounts: []Mount{{Source: "/c", Target: "/run/berth/mps", ReadOnly: true}}}}
				test.change(&r)
				_, err := translate(r, fakeMachine())
				switch holds := test.on == either || (test.on == shared) == isShared; {
				case holds && (err == nil || err.Error() != test.want):
					t.Errorf("shared %v:\n got %v\nwant %s", isShared, err, test.want)
				case !holds && err != nil && err.Error() == test.want:
					t.Errorf("shared %v: refused with the other's sentence: %v", isShared, err)
				}
			}
		})
	}
}

func TestAllowedWithoutASharedGPU(t *testing.T) {
	for _, source := range []string{"/dev/shm", "/proc", "/var/run/docker.sock", "/srv", "/runner"} {
		task := &types.TaskDefinition{
			PidMode:              types.PidModeHost,
			Volumes:              []types.Volume{{Name: p("v"), Host: &types.HostVolumeProperties{SourcePath: &source}}},
			ContainerDefinitions: []types.ContainerDefinition{{Name: p("m"), MountPoints: []types.MountPoint{{SourceVolume: p("v"), ContainerPath: p("/data")}}}},
		}
		if _, err := translate(Request{Task: task, Container: &task.ContainerDefinitions[0]}, fakeMachine()); err != nil {
			t.Errorf("%s: %v", source, err)
		}
	}
}

func TestResolveFollowsLinksWhoseEndsDoNotExist(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/run", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(dir, "missing"), filepath.Join(dir, "dangling")); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		dir + "/not/here":             dir + "/not/here",
		dir + "/link/berth-none/pipe": "/run/berth-none/pipe",
		"/":                           "/",
	} {
		if got, err := resolve(path); err != nil || got != want {
			t.Errorf("%s: %q, %v; want %q", path, got, err, want)
		}
	}
	for _, path := range []string{dir + "/dangling", dir + "/dangling/below"} {
		if got, err := resolve(path); err == nil {
			t.Errorf("%s: %q, and no error", path, got)
		}
	}
}

func TestNames(t *testing.T) {
	for _, test := range []struct {
		name   string
		labels Labels
		want   string
	}{
		{"plain", Labels{Instance: "node-1", Task: "3f2a", Generation: 7, Container: "train"}, "berth-node-1-3f2a-g7-train"},
		{"what Docker refuses", Labels{Instance: "node", Task: "a/b", Generation: 1, Container: "c"}, "berth-node-a_b-g1-c-"},
		{"long", Labels{Instance: strings.Repeat("i", 100), Task: strings.Repeat("t", 100), Container: "c"}, "berth-" + strings.Repeat("i", 100) + "-"},
	} {
		got := test.labels.Name()
		if got != test.want && !(strings.HasPrefix(got, test.want) && strings.HasSuffix(test.want, "-")) || len(got) > maxName {
			t.Errorf("%s: %s", test.name, got)
		}
		if got != test.labels.Name() {
			t.Errorf("%s: not the same twice", test.name)
		}
	}
	if a, b := (Labels{Task: "a/b"}).Name(), (Labels{Task: "a:b"}).Name(); a == b {
		t.Errorf("two tasks share %s", a)
	}
	l := Labels{Instance: "i", Task: "t", Generation: 9, Container: "c", Family: "f", Revision: 2, Cluster: "k"}
	if back, err := labelsOf(l.Map()); err != nil || back != l {
		t.Errorf("labels: %+v, %v", back, err)
	}
	if _, err := labelsOf(map[string]string{LabelInstance: "i"}); err == nil {
		t.Error("labels without a generation were taken")
	}
}
