package cgroup

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/cgroups/v3"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

func TestParseDriver(t *testing.T) {
	for _, test := range []struct {
		driver, version string
		want            Driver
		err             string
	}{
		{"cgroupfs", "1", Driver{Version: 1}, ""},
		{"systemd", "2", Driver{Version: 2, Systemd: true}, ""},
		{"none", "2", Driver{}, `docker's cgroup driver: "none"; berth needs cgroupfs or systemd (a rootless Docker has none)`},
		{"cgroupfs", "", Driver{}, `docker's cgroup version: ""; 1 or 2`},
	} {
		got, err := ParseDriver(test.driver, test.version)
		if test.err != "" {
			if err == nil || err.Error() != test.err {
				t.Errorf("%s, %s: %v", test.driver, test.version, err)
			}
			continue
		}
		if err != nil || got != test.want {
			t.Errorf("%s, %s: %+v, %v", test.driver, test.version, got, err)
		}
	}
}

func TestPlaces(t *testing.T) {
	for _, test := range []struct {
		driver         Driver
		instance, task string
		want           place
	}{
		{Driver{Version: 1}, "gpu-1", "8c1e", place{parent: "/berth/gpu_2d1/8c1e", dir: "/berth/gpu_2d1/8c1e"}},
		{Driver{Version: 2}, "gpu-1", "", place{parent: "/berth/gpu_2d1", dir: "/berth/gpu_2d1"}},
		{Driver{Version: 2, Systemd: true}, "gpu-1", "8c1e", place{
			parent: "berth-gpu_2d1-8c1e.slice", unit: "berth-gpu_2d1-8c1e.slice",
			dir: "/berth.slice/berth-gpu_2d1.slice/berth-gpu_2d1-8c1e.slice"}},
		{Driver{Version: 1, Systemd: true}, "gpu", "", place{parent: "berth-gpu.slice", unit: "berth-gpu.slice", dir: "/berth.slice/berth-gpu.slice"}},
		{Driver{Version: 1}, "..", "../..", place{parent: "/berth/_2e./_2e._2f..", dir: "/berth/_2e./_2e._2f.."}},
	} {
		if got := test.driver.of(test.instance, test.task); got != test.want {
			t.Errorf("%v, %q, %q:\n got %+v\nwant %+v", test.driver, test.instance, test.task, got, test.want)
		}
	}
}

func TestNamesComeBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name, instance := rapid.StringN(1, -1, 40).Draw(t, "task"), rapid.StringN(1, -1, 40).Draw(t, "instance")
		if back, ok := decode(encode(name)); !ok || back != name {
			t.Fatalf("%q became %q, %v", name, back, ok)
		}
		for _, d := range []Driver{{Version: 1}, {Version: 2, Systemd: true}} {
			dir := d.of(instance, name).dir
			if back, ok := d.taskOf(instance, filepath.Base(dir)); !ok || back != name {
				t.Fatalf("%v: folder %s is of %q, %v; want %q", d, dir, back, ok, name)
			}
			if filepath.Clean(dir) != dir || strings.Count(dir, "/") != strings.Count(d.of("i", "t").dir, "/") {
				t.Fatalf("%v: folder %s", d, dir)
			}
		}
	})
	for _, folder := range []string{"a-b", "_", "_2", "_zz", "_61", "."} {
		if name, ok := decode(folder); ok {
			t.Errorf("%q, which encode never makes, is of %q", folder, name)
		}
	}
}

func TestLimitsAreChecked(t *testing.T) {
	tree := &Tree{driver: Driver{Version: 2}, instance: "i"}
	for _, test := range []struct {
		limits Limits
		want   string
	}{
		{Limits{CPUUnits: -1}, "task cpu: -1 units; 0 (no limit) to 8388608"},
		{Limits{Shares: 1}, "task cpu shares: 1; 0 (the kernel's 1024) or 2 to 262144"},
		{Limits{PeriodUS: 999}, "task cpu period: 999 us; 1000 to 1000000"},
		{Limits{MemoryBytes: -1}, "task memory: -1 bytes; 0 (no limit) or more"},
		{Limits{SwapBytes: -2}, "task swap: -2 bytes; -1 (no limit), 0 (none) or more"},
		{Limits{PIDs: -1}, "task pids: -1; 0 (no limit) or more"},
	} {
		if _, err := tree.Ensure(t.Context(), "t", test.limits); err == nil || err.Error() != test.want {
			t.Errorf("%+v: %v", test.limits, err)
		}
	}
	if _, err := tree.Ensure(t.Context(), "", Limits{}); err == nil {
		t.Error("a task without a name was taken")
	}
	if err := tree.Remove(t.Context(), ""); err == nil {
		t.Error("a task without a name was removed")
	}
}

func TestQuotaComesBackAsUnits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := Limits{CPUUnits: rapid.Int64Range(128, 1024*512).Draw(t, "units"), PeriodUS: rapid.Int64Range(8000, 1_000_000).Draw(t, "period")}
		if back := units(l.quotaUS(), l.period()); back != l.CPUUnits {
			t.Fatalf("%d units are %d us of %d us, and that is %d units", l.CPUUnits, l.quotaUS(), l.PeriodUS, back)
		}
	})
	for _, test := range []struct {
		limits Limits
		want   int64
	}{
		{Limits{}, 0},
		{Limits{CPUUnits: 1024}, 100_000},
		{Limits{CPUUnits: 2560, PeriodUS: 20_000}, 50_000},
		{Limits{CPUUnits: 1}, 1000}, // the kernel's least
	} {
		if got := test.limits.quotaUS(); got != test.want {
			t.Errorf("%+v: %d us, want %d", test.limits, got, test.want)
		}
	}
}

func TestContainerOf(t *testing.T) {
	id := strings.Repeat("3f", 32)
	for dir, want := range map[string]string{
		"/berth/i/t/" + id: id,
		"/berth.slice/berth-i.slice/berth-i-t.slice/docker-" + id + ".scope":                id,
		"/berth.slice/berth-i.slice/berth-i-t.slice/docker-" + id + ".scope/system.slice/x": id,
		"/system.slice/ssh.service": "",
		"/docker/" + id[:12]:        "",
		"/":                         "",
	} {
		if got := containerOf(dir); got != want {
			t.Errorf("%s: %q, want %q", dir, got, want)
		}
	}
}

func TestAProcessInNoContainer(t *testing.T) {
	if id, err := ContainerID(os.Getpid()); err != nil || id != "" {
		t.Errorf("this test runs in container %q, %v", id, err)
	}
	if _, err := ContainerID(1 << 30); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a process that is not there: %v", err)
	}
}

// v1 needs root and the v1 hierarchies, which half of the machines have.
func openHere(t *testing.T) *Tree {
	t.Helper()
	if mode := cgroups.Mode(); mode == cgroups.Unified {
		t.Skip("this machine has cgroup v2 only")
	}
	tree, err := Open(Driver{Version: 1}, "test-"+strings.ToLower(rand.Text()[:8]))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tree.RemoveAll(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return tree
}

func TestV1(t *testing.T) {
	tree := openHere(t)
	file := func(controller, name string) string {
		data, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", controller, tree.Parent("a-b"), name))
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(data))
	}
	_, memsw := os.Stat("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes")
	for _, step := range []struct {
		name   string
		limits Limits
		quota  string
		memory string
		memsw  string
		pids   string
	}{
		{"made", Limits{CPUUnits: 512, Shares: 512, MemoryBytes: 64 << 20, PIDs: 100}, "50000", "67108864", "67108864", "100"},
		{"the same again", Limits{CPUUnits: 512, Shares: 512, MemoryBytes: 64 << 20, PIDs: 100}, "50000", "67108864", "67108864", "100"},
		{"more, with swap", Limits{CPUUnits: 2048, Shares: 2048, MemoryBytes: 128 << 20, SwapBytes: 32 << 20, PIDs: 200}, "200000", "134217728", "167772160", "200"},
		{"less", Limits{CPUUnits: 128, PeriodUS: 50_000, Shares: 2, MemoryBytes: 32 << 20, PIDs: 10}, "6250", "33554432", "33554432", "10"},
		{"swap without limit", Limits{CPUUnits: 128, Shares: 2, MemoryBytes: 32 << 20, SwapBytes: -1, PIDs: 10}, "12500", "33554432", "9223372036854771712", "10"},
		{"no limits", Limits{}, "-1", "9223372036854771712", "9223372036854771712", "max"},
	} {
		t.Run(step.name, func(t *testing.T) {
			parent, err := tree.Ensure(t.Context(), "a-b", step.limits)
			if err != nil || parent != tree.Parent("a-b") {
				t.Fatalf("%s, %v", parent, err)
			}
			for name, got := range map[string][2]string{
				"quota": {file("cpu", "cpu.cfs_quota_us"), step.quota}, "memory": {file("memory", "memory.limit_in_bytes"), step.memory}, "pids": {file("pids", "pids.max"), step.pids},
			} {
				if got[0] != got[1] {
					t.Errorf("%s is %s, want %s", name, got[0], got[1])
				}
			}
			if memsw == nil {
				if got := file("memory", "memory.memsw.limit_in_bytes"); got != step.memsw {
					t.Errorf("memory and swap is %s, want %s", got, step.memsw)
				}
			}
			want := step.limits
			want.PeriodUS = want.period()
			if want.Shares == 0 {
				want.Shares = 1024
			}
			if memsw != nil && want.MemoryBytes > 0 {
				want.SwapBytes = -1
			}
			if got, err := tree.Read("a-b"); err != nil || got != want {
				t.Errorf("read back %+v, %v; want %+v", got, err, want)
			}
		})
	}
	if tasks, err := tree.List(); err != nil || !slices.Equal(tasks, []string{"a-b"}) {
		t.Errorf("list: %q, %v", tasks, err)
	}
}

func TestV1RemovesOnlyWhatIsEmpty(t *testing.T) {
	tree := openHere(t)
	parent, err := tree.Ensure(t.Context(), "task", Limits{PIDs: 10})
	if err != nil {
		t.Fatal(err)
	}
	// As Docker does: a group of the container's own below the task's.
	inner := filepath.Join("/sys/fs/cgroup/pids", parent, "container")
	if err := os.Mkdir(inner, 0o755); err != nil {
		t.Fatal(err)
	}
	member := exec.Command("cat")
	stdin, err := member.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.Open(inner)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := member.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { stdin.Close(); member.Wait() }()
	pid := member.Process.Pid
	if err := os.WriteFile(filepath.Join(inner, "cgroup.procs"), []byte(fmt.Sprint(pid)), 0); err != nil {
		t.Fatal(err)
	}

	var busy *BusyError
	if err := tree.Remove(t.Context(), "task"); !errors.As(err, &busy) || !slices.Equal(busy.PIDs, []int{pid}) {
		t.Errorf("with a process: %v", err)
	}
	if err := tree.RemoveAll(t.Context()); !errors.As(err, &busy) {
		t.Errorf("all, with a process: %v", err)
	}
	if pids, err := tree.Processes("task"); err != nil || !slices.Equal(pids, []int{pid}) {
		t.Errorf("processes: %v, %v", pids, err)
	}
	if pids, err := Members(pid); err != nil || !slices.Equal(pids, []int{pid}) {
		t.Errorf("members: %v, %v", pids, err)
	}
	if got, err := tree.Read("task"); err != nil || got.PIDs != 10 {
		t.Errorf("after the refusal: %+v, %v", got, err)
	}
	stdin.Close()
	if err := member.Wait(); err != nil {
		t.Fatal(err)
	}
	for _, what := range []string{"empty", "gone"} {
		if err := tree.Remove(t.Context(), "task"); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, root := range tree.groups.roots() {
		if _, err := os.Stat(filepath.Join(root, parent)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("left behind in %s: %v", root, err)
		}
	}
	if _, err := tree.Read("task"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("read after the removal: %v", err)
	}
}

func TestTwoAgentsDoNotSeeEachOthersGroups(t *testing.T) {
	one, two := openHere(t), openHere(t)
	for _, tree := range []*Tree{one, two} {
		if _, err := tree.Ensure(t.Context(), "task", Limits{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := one.RemoveAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	if tasks, err := one.List(); err != nil || len(tasks) != 0 {
		t.Errorf("one: %q, %v", tasks, err)
	}
	if tasks, err := two.List(); err != nil || len(tasks) != 1 {
		t.Errorf("two: %q, %v", tasks, err)
	}
}

// A folder stands in for cgroup2's mount where this machine's kernel has given
// the controllers to v1: it shows what is written where, not that a kernel
// takes it.
func TestV2WritesInAFolder(t *testing.T) {
	root := t.TempDir()
	for _, dir := range []string{"", "/berth", "/berth/i"} {
		if err := os.MkdirAll(root+dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(root+dir+"/cgroup.subtree_control", nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := openV2(Driver{Version: 2}, root); err == nil {
		t.Error("a folder without cgroup.controllers was taken for cgroup v2")
	}
	if err := os.WriteFile(root+"/cgroup.controllers", []byte("cpuset cpu io memory hugetlb pids\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	groups, err := openV2(Driver{Version: 2}, root)
	if err != nil {
		t.Fatal(err)
	}
	tree := &Tree{driver: Driver{Version: 2}, instance: "i", groups: groups}
	dir := filepath.Join(root, "berth/i/t")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/memory.swap.max", []byte("max"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name   string
		limits Limits
		files  map[string]string
	}{
		{"limits", Limits{CPUUnits: 1536, Shares: 1024, MemoryBytes: 64 << 20, PIDs: 100},
			map[string]string{"cpu.max": "150000 100000", "cpu.weight": "100", "memory.max": "67108864", "memory.swap.max": "0", "pids.max": "100"}},
		{"swap", Limits{CPUUnits: 512, PeriodUS: 50_000, Shares: 2, MemoryBytes: 64 << 20, SwapBytes: 1 << 20, PIDs: 100},
			map[string]string{"cpu.max": "25000 50000", "cpu.weight": "1", "memory.max": "67108864", "memory.swap.max": "1048576", "pids.max": "100"}},
		// The kernel shows the largest number as "max".
		{"none", Limits{}, map[string]string{"cpu.max": "max 100000", "cpu.weight": "100", "memory.max": "9223372036854775807", "memory.swap.max": "9223372036854775807", "pids.max": "max"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if parent, err := tree.Ensure(t.Context(), "t", test.limits); err != nil || parent != "/berth/i/t" {
				t.Fatalf("%s, %v", parent, err)
			}
			for name, want := range test.files {
				if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != want {
					t.Errorf("%s: %q, %v; want %q", name, got, err, want)
				}
			}
			for _, above := range []string{"", "/berth", "/berth/i"} {
				if got, err := os.ReadFile(root + above + "/cgroup.subtree_control"); err != nil || string(got) != "+cpu +memory +pids" {
					t.Errorf("controllers switched on in %q: %q, %v", above, got, err)
				}
			}
			want := test.limits
			want.PeriodUS, want.Shares = want.period(), 0 // a weight is coarser than shares, and is not read back
			if got, err := tree.Read("t"); err != nil || got != want {
				t.Errorf("read back %+v, %v; want %+v", got, err, want)
			}
		})
	}
}

// What a real cgroup2 takes here even without controllers: groups, members,
// removal.
func TestV2InTheKernel(t *testing.T) {
	root := t.TempDir()
	if err := unix.Mount("none", root, "cgroup2", 0, ""); err != nil {
		t.Fatalf("mounting cgroup2 needs root: %v", err)
	}
	defer unix.Unmount(root, unix.MNT_DETACH)
	controllers, err := os.ReadFile(root + "/cgroup.controllers")
	if err != nil {
		t.Fatal(err)
	}
	have := strings.Fields(string(controllers))
	complete := slices.Contains(have, "cpu") && slices.Contains(have, "memory") && slices.Contains(have, "pids")
	groups, err := openV2(Driver{Version: 2}, root)
	if complete != (err == nil) {
		t.Fatalf("controllers %v: %v", have, err)
	}
	if !complete {
		if !strings.Contains(err.Error(), `has no controller "cpu"`) && !strings.Contains(err.Error(), `has no controller "memory"`) && !strings.Contains(err.Error(), `has no controller "pids"`) {
			t.Errorf("without controllers: %v", err)
		}
		groups = &v2{driver: Driver{Version: 2}, root: root}
	}
	tree := &Tree{driver: Driver{Version: 2}, instance: "test-" + strings.ToLower(rand.Text()[:8]), groups: groups}
	dir := filepath.Join(root, tree.Parent("task"))
	if complete {
		if _, err := tree.Ensure(t.Context(), "task", Limits{CPUUnits: 512, MemoryBytes: 64 << 20, PIDs: 10}); err != nil {
			t.Fatal(err)
		}
		if got, err := tree.Read("task"); err != nil || got.CPUUnits != 512 || got.MemoryBytes != 64<<20 || got.PIDs != 10 {
			t.Errorf("read back %+v, %v", got, err)
		}
	} else if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	inner := filepath.Join(dir, "container")
	if err := os.Mkdir(inner, 0o755); err != nil {
		t.Fatal(err)
	}
	folder, err := os.Open(inner)
	if err != nil {
		t.Fatal(err)
	}
	member := exec.Command("cat")
	member.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(folder.Fd())}
	stdin, err := member.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	err = member.Start()
	folder.Close()
	if err != nil {
		t.Fatal(err)
	}
	var busy *BusyError
	if err := tree.Remove(t.Context(), "task"); !errors.As(err, &busy) || !slices.Equal(busy.PIDs, []int{member.Process.Pid}) {
		t.Errorf("with a process: %v", err)
	}
	if tasks, err := tree.List(); err != nil || !slices.Equal(tasks, []string{"task"}) {
		t.Errorf("list: %q, %v", tasks, err)
	}
	stdin.Close()
	if err := member.Wait(); err != nil {
		t.Fatal(err)
	}
	if err := tree.RemoveAll(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Dir(dir)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("left behind: %v", err)
	}
}

func TestDetect(t *testing.T) {
	v2only := cgroups.Mode() == cgroups.Unified
	says, err := Detect(Driver{Version: 1})
	if v2only != (err != nil) || !v2only && !strings.HasPrefix(says, "cgroup v1, cgroupfs") {
		t.Errorf("v1: %q, %v", says, err)
	}
	says, err = Detect(Driver{Version: 2})
	if v2only != (err == nil) || err != nil && err.Error() != "docker uses cgroup v2, and /sys/fs/cgroup holds none: mount cgroup2 there" {
		t.Errorf("v2: %q, %v", says, err)
	}
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		if says, err := Detect(Driver{Version: 1, Systemd: true}); err == nil || !v2only && !strings.Contains(err.Error(), "systemd does not run") {
			t.Errorf("systemd where there is none: %q, %v", says, err)
		}
	}
}
