package engine_test

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
	"github.com/berth-gpu/berth/agent/cgroup"
	"github.com/berth-gpu/berth/agent/engine"
	"golang.org/x/sys/unix"
)

type (
	task      = types.TaskDefinition
	container = types.ContainerDefinition
	request   = engine.Request
)

func TestEnvironmentInside(t *testing.T) {
	p := docker(t)
	t.Run("with a granted GPU", func(t *testing.T) {
		p.T = t
		out := p.output(p.request(func(_ *task, c *container, r *request) {
			c.Environment = []types.KeyValuePair{
				{Name: ptr("MODEL"), Value: ptr("a b=c")}, {Name: ptr("EMPTY")},
				{Name: ptr("CUDA_MPS_PIPE_DIRECTORY"), Value: ptr("/mine")},
			}
			r.Grant = engine.Grant{Env: []string{"CUDA_MPS_PIPE_DIRECTORY=/run/berth/mps"}, VisibleDevices: "GPU-1"}
		}, "env"))
		hasLines(t, out, "MODEL=a b=c", "EMPTY=", "CUDA_MPS_PIPE_DIRECTORY=/run/berth/mps", "NVIDIA_VISIBLE_DEVICES=GPU-1", "FROM_IMAGE=yes")
		if n := strings.Count(out, "CUDA_MPS_PIPE_DIRECTORY="); n != 1 {
			t.Errorf("CUDA_MPS_PIPE_DIRECTORY is there %d times", n)
		}
	})
	t.Run("without a GPU", func(t *testing.T) {
		p.T = t
		out := p.output(p.request(func(_ *task, _ *container, r *request) { r.Labels.Generation = 2 }, "env"))
		hasLines(t, out, "NVIDIA_VISIBLE_DEVICES=void") // the image says all
	})
}

func TestADeviceOpensOnlyWhereItIsGranted(t *testing.T) {
	p := docker(t)
	// Numbers that no driver on this machine has: then a node that may be opened
	// gives ENXIO, and one that may not EPERM.
	first := 200 + rand.IntN(25)*2
	node := func(minor int) string {
		path := filepath.Join(t.TempDir(), fmt.Sprint("nvidia", minor))
		if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(195, uint32(minor)))); err != nil {
			t.Fatalf("mknod needs root: %v", err)
		}
		return path
	}
	mine, other := node(first), node(first+1)
	for i, test := range []struct {
		name    string
		granted []engine.Device
		args    []string
		want    []string
	}{
		{"no GPU", nil, []string{"mknod", "195", fmt.Sprint(first)}, []string{"mknod ok", "open EPERM"}},
		{"another GPU", []engine.Device{{Host: other, Container: "/dev/nvidia0"}}, []string{"mknod", "195", fmt.Sprint(first)}, []string{"mknod ok", "open EPERM"}},
		{"this GPU", []engine.Device{{Host: mine, Container: "/dev/nvidia0"}}, []string{"open", "/dev/nvidia0", "/dev/nvidia1"}, []string{"/dev/nvidia0 ENXIO", "/dev/nvidia1 ENOENT"}},
		{"this GPU by another node", []engine.Device{{Host: mine, Container: "/dev/nvidia0"}}, []string{"mknod", "195", fmt.Sprint(first)}, []string{"mknod ok", "open ENXIO"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			p.T = t
			out := p.output(p.request(func(_ *task, _ *container, r *request) {
				r.Labels.Generation = uint64(i + 1)
				r.Grant.Devices = test.granted
			}, test.args...))
			hasLines(t, out, test.want...)
		})
	}
}

func TestTheClientFolderIsReadOnly(t *testing.T) {
	p := docker(t)
	client := t.TempDir()
	if err := os.WriteFile(filepath.Join(client, "control"), []byte("here\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	grant := func(generation uint64) func(*task, *container, *request) {
		return func(_ *task, _ *container, r *request) {
			r.Labels.Generation = generation
			r.Grant = engine.Grant{Mounts: []engine.Mount{{Source: client, Target: "/run/berth/mps", ReadOnly: true}}, Shared: true}
		}
	}
	if out := p.output(p.request(grant(1), "cat", "/run/berth/mps/control")); out != "here\n" {
		t.Errorf("reading: %q", out)
	}
	if out := p.output(p.request(grant(2), "write", "/run/berth/mps/control")); out != "EROFS\n" {
		t.Errorf("writing: %q", out)
	}
}

func TestVolumesInside(t *testing.T) {
	p := docker(t)
	dir := t.TempDir()
	made := filepath.Join(dir, "made", "by-docker")
	volumes := func(generation uint64, name string, readOnly bool) func(*task, *container, *request) {
		return func(d *task, c *container, r *request) {
			r.Labels.Generation = 1
			r.Labels.Container = fmt.Sprint("c", generation)
			d.Volumes = []types.Volume{{Name: ptr("folder"), Host: &types.HostVolumeProperties{SourcePath: &made}}, {Name: ptr("scratch")}}
			c.MountPoints = []types.MountPoint{{SourceVolume: &name, ContainerPath: ptr("/data"), ReadOnly: &readOnly}}
		}
	}
	for i, test := range []struct {
		name, volume string
		readOnly     bool
		args         []string
		want         string
	}{
		{"a folder of the machine that was not there", "folder", false, []string{"write", "/data/file"}, "ok\n"},
		{"the same folder, to read", "folder", true, []string{"write", "/data/file"}, "EROFS\n"},
		{"a volume of the task", "scratch", false, []string{"write", "/data/file"}, "ok\n"},
		{"the same volume in another container", "scratch", true, []string{"cat", "/data/file"}, "written\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p.T = t
			if out := p.output(p.request(volumes(uint64(i+1), test.volume, test.readOnly), test.args...)); out != test.want {
				t.Errorf("got %q, want %q", out, test.want)
			}
		})
	}
	p.T = t
	if data, err := os.ReadFile(filepath.Join(made, "file")); err != nil || string(data) != "written\n" {
		t.Errorf("on the machine: %q, %v", data, err)
	}
	if err := p.RemoveVolumes(p.ctx, p.instance, "task"); !errors.Is(err, engine.ErrCannotRemove) {
		t.Errorf("removing a volume in use: %v", err)
	}
	list, err := p.List(p.ctx, p.instance)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range list {
		if err := p.Remove(p.ctx, c.ID); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.RemoveVolumes(p.ctx, p.instance, "task"); err != nil {
		t.Errorf("removing the task's volumes: %v", err)
	}
}

func TestASharedVolumeMustExistOrBeProvisioned(t *testing.T) {
	p := docker(t)
	_, err := p.Create(p.ctx, p.request(func(d *task, c *container, _ *request) {
		d.Volumes = []types.Volume{{Name: ptr("none-" + p.instance), DockerVolumeConfiguration: &types.DockerVolumeConfiguration{Scope: types.ScopeShared}}}
		c.MountPoints = []types.MountPoint{{SourceVolume: ptr("none-" + p.instance), ContainerPath: ptr("/data")}}
	}, "wait"))
	if !errors.Is(err, engine.ErrCannotCreate) || !strings.Contains(err.Error(), "volumes[0]: no Docker volume \"none-"+p.instance+`"`) {
		t.Errorf("got %v", err)
	}
}

func TestTheContainerIsAsDefined(t *testing.T) {
	p := docker(t)
	out := p.output(p.request(func(_ *task, c *container, _ *request) {
		c.User, c.WorkingDirectory, c.Hostname = ptr("1234:99"), ptr("/scratch"), ptr("gpu-worker")
		c.Ulimits = []types.Ulimit{{Name: types.UlimitNameNofile, SoftLimit: 512, HardLimit: 1024}}
		c.SystemControls = []types.SystemControl{{Namespace: ptr("net.core.somaxconn"), Value: ptr("777")}}
		c.DockerSecurityOptions = []string{"no-new-privileges"}
		c.LinuxParameters = &types.LinuxParameters{
			SharedMemorySize:   ptr[int32](3),
			Tmpfs:              []types.Tmpfs{{ContainerPath: ptr("/scratch"), Size: 2, MountOptions: []string{"noexec"}}},
			InitProcessEnabled: ptr(true),
			Capabilities:       &types.KernelCapabilities{Add: []string{"SYS_NICE"}, Drop: []string{"ALL"}},
		}
	}, "self"))
	hasLines(t, out, "uid 1234", "hostname gpu-worker", "cwd /scratch", "nofile 512 1024", "somaxconn 777", "init docker-init",
		fmt.Sprint("/dev/shm ", 3<<20), fmt.Sprint("/scratch ", 2<<20), "NoNewPrivs: 1", "devices []")

	out = p.output(p.request(func(_ *task, c *container, r *request) {
		r.Labels.Generation = 2
		c.ReadonlyRootFilesystem = ptr(true)
	}, "write", "/file"))
	if out != "EROFS\n" {
		t.Errorf("read-only root: %q", out)
	}

	out = p.output(p.request(func(_ *task, c *container, r *request) {
		r.Labels.Generation = 3
		c.LinuxParameters = &types.LinuxParameters{Capabilities: &types.KernelCapabilities{Add: []string{"SYS_NICE"}, Drop: []string{"ALL"}}}
	}, "self"))
	hasLines(t, out, fmt.Sprintf("CapEff: %016x", 1<<unix.CAP_SYS_NICE), "init probe")
}

func TestPublishedPortsAnswer(t *testing.T) {
	p := docker(t)
	id := p.start(p.request(func(_ *task, c *container, _ *request) {
		c.PortMappings = []types.PortMapping{{ContainerPort: ptr[int32](8080)}}
	}, "serve", "8080"))
	ports := p.inspect(id).Ports
	if len(ports) != 1 || ports[0].Container != 8080 || ports[0].Host == 0 || ports[0].Protocol != "tcp" {
		t.Fatalf("got %v", ports)
	}
	p.eventually("the port answers", func() bool {
		answer, err := http.Get(fmt.Sprint("http://127.0.0.1:", ports[0].Host))
		if err != nil {
			return false
		}
		defer answer.Body.Close()
		body, err := io.ReadAll(answer.Body)
		return err == nil && string(body) == "hello\n"
	})
}

func TestTheTasksGroupHoldsItsContainers(t *testing.T) {
	p := docker(t)
	limits := cgroup.Limits{CPUUnits: 512, Shares: 512, MemoryBytes: 64 << 20, PIDs: 50}
	parent, err := p.groups.Ensure(p.ctx, "task", limits)
	if err != nil {
		t.Fatal(err)
	}
	id := p.start(p.request(func(_ *task, c *container, r *request) {
		r.CgroupParent, c.Cpu, c.Memory = parent, 256, ptr[int32](32)
	}, "wait"))
	pid := p.inspect(id).PID
	if groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid)); err != nil || strings.Count(string(groups), parent+"/") < 1 {
		t.Errorf("the container is in %s, %v; want below %s", groups, err, parent)
	}
	if pids, err := p.groups.Processes("task"); err != nil || !slices.Contains(pids, pid) {
		t.Errorf("the group's processes: %v, %v; want %d", pids, err, pid)
	}
	if got, err := p.groups.Read("task"); err != nil || got.CPUUnits != 512 || got.MemoryBytes != 64<<20 || got.PIDs != 50 || got.SwapBytes > 0 {
		t.Errorf("limits: %+v, %v", got, err)
	}
	if _, err := os.Stat("/sys/fs/cgroup/memory"); err == nil { // v1
		for file, want := range map[string]string{
			"cpu" + parent + "/cpu.cfs_quota_us":                    "50000",
			"cpu" + parent + "/cpu.cfs_period_us":                   "100000",
			"cpu" + parent + "/cpu.shares":                          "512",
			"cpu" + parent + "/" + id + "/cpu.shares":               "256",
			"memory" + parent + "/memory.limit_in_bytes":            "67108864",
			"memory" + parent + "/" + id + "/memory.limit_in_bytes": "33554432",
			"pids" + parent + "/pids.max":                           "50",
		} {
			if got, err := os.ReadFile("/sys/fs/cgroup/" + file); err != nil || strings.TrimSpace(string(got)) != want {
				t.Errorf("%s is %q, %v; want %s", file, got, err, want)
			}
		}
	}
	var busy *cgroup.BusyError
	if err := p.groups.Remove(p.ctx, "task"); !errors.As(err, &busy) || !slices.Contains(busy.PIDs, pid) {
		t.Errorf("removing a group in use: %v", err)
	}
	if _, err := p.Stop(p.ctx, id, time.Minute); err != nil {
		t.Fatal(err)
	}
	if err := p.groups.Remove(p.ctx, "task"); err != nil {
		t.Error(err)
	}
	if left, err := p.groups.List(); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestATaskOverItsMemoryIsOutOfMemory(t *testing.T) {
	p := docker(t)
	parent, err := p.groups.Ensure(p.ctx, "task", cgroup.Limits{MemoryBytes: 48 << 20})
	if err != nil {
		t.Fatal(err)
	}
	id := p.start(p.request(func(_ *task, _ *container, r *request) { r.CgroupParent = parent }, "eat", "96"))
	if c, err := p.wait(id); err != nil || c.ExitCode != 137 || c.Reason() != "OutOfMemoryError: Container killed due to memory usage" {
		t.Errorf("got %+v, %v", c, err)
	}
}

func TestWhatIsRefusedMakesNoContainer(t *testing.T) {
	p := docker(t)
	link := filepath.Join(t.TempDir(), "innocent")
	if err := os.Symlink("/var/run/docker.sock", link); err != nil {
		t.Fatal(err)
	}
	_, err := p.Create(p.ctx, p.request(func(d *task, c *container, r *request) {
		r.Grant.Shared = true
		d.Volumes = []types.Volume{{Name: ptr("v"), Host: &types.HostVolumeProperties{SourcePath: &link}}}
		c.MountPoints = []types.MountPoint{{SourceVolume: ptr("v"), ContainerPath: ptr("/data")}}
	}, "wait"))
	if !errors.Is(err, engine.ErrCannotCreate) || !strings.Contains(err.Error(), "volumes[0].host.sourcePath") {
		t.Errorf("got %v", err)
	}
	if list, err := p.List(p.ctx, p.instance); err != nil || len(list) != 0 {
		t.Errorf("made: %v, %v", list, err)
	}
}

func TestAFolderThatBecameALinkIsNotMounted(t *testing.T) {
	p := docker(t)
	dir := filepath.Join(t.TempDir(), "data")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	id, err := p.Create(p.ctx, p.request(func(d *task, c *container, _ *request) {
		d.Volumes = []types.Volume{{Name: ptr("v"), Host: &types.HostVolumeProperties{SourcePath: &dir}}}
		c.MountPoints = []types.MountPoint{{SourceVolume: ptr("v"), ContainerPath: ptr("/data")}}
	}, "wait"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc", dir); err != nil {
		t.Fatal(err)
	}
	if err := p.Start(p.ctx, id); !errors.Is(err, engine.ErrCannotStart) || !strings.Contains(err.Error(), `"`+dir+`" is a link`) {
		t.Errorf("start: %v", err)
	}
	if c := p.inspect(id); c.State != engine.Created {
		t.Errorf("it is %s", c.State)
	}
}

func TestLabelsOutside(t *testing.T) {
	p := docker(t)
	r := p.request(func(_ *task, c *container, _ *request) {
		c.DockerLabels = map[string]string{"team": "vision", engine.LabelInstance: "stolen", "com.amazonaws.ecs.cluster": "stolen"}
	}, "wait")
	id, err := p.Create(p.ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	if got := p.inspect(id).Labels; got != r.Labels {
		t.Errorf("got %+v, want %+v", got, r.Labels)
	}
}
