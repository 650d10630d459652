package nvmlsim_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/berth-gpu/berth/agent/gpu/nvmlsim"
	"golang.org/x/sys/unix"
)

func create(t *testing.T, spec nvmlsim.Spec) *nvmlsim.Machine {
	t.Helper()
	library, err := nvmlsim.BuildCached(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	m, err := nvmlsim.Create(filepath.Join(t.TempDir(), "machine"), library, spec)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestSteerFileIsReadAsItWasWritten(t *testing.T) {
	spec := nvmlsim.Uniform(8, nvmlsim.H100)
	for i := range spec.GPUs {
		g := &spec.GPUs[i]
		g.UUID = fmt.Sprintf("GPU-00000000-0000-4000-8000-%012x", i)
		g.PCIBusID = fmt.Sprintf("00000000:%02X:00.0", i+1)
		g.Minor = 1000 + i
	}
	spec.GPUs[3].Lost = true
	spec.GPUs[4].Links[2].Down = true
	spec.GPUs[5].NUMANode, spec.GPUs[5].MIG = -1, 1
	spec.Driver, spec.NVML, spec.CUDA = "550.163.01", "12.550.163.01", 12040
	spec.Variants = []string{"mps-clients-in-compute-list"}
	spec.Faults = []nvmlsim.Fault{{Call: "*", UUID: spec.GPUs[0].UUID, Hang: true}, {Call: "Init", Error: "UNKNOWN"}}
	spec.Xids = []nvmlsim.Xid{{Seq: 4, UUID: spec.GPUs[0].UUID, Code: 79}}
	got, err := nvmlsim.Parse(strings.NewReader(string(spec.Format())))
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, spec) {
		t.Errorf("read\n%+v\nwritten\n%+v", got, spec)
	}
}

func TestBadSteerFiles(t *testing.T) {
	gpu := "gpu GPU-6f3c1a52-0d5e-4b7e-9a53-2f4c1f0e8d11\n"
	good := gpu + "name X\ntotal 10\nreserved 1\npci 00000000:18:00.0\n"
	for _, c := range []struct{ name, file, err string }{
		{"unknown key", "colour red", `line 1: colour "red": not a key of the machine, and no gpu line came before it`},
		{"unknown key of a gpu", gpu + "colour red", `line 2: colour "red": not a key of a gpu`},
		{"not a number", gpu + "total 1.5", `line 2: total "1.5": not a whole number`},
		{"fault without a call", "hang", `line 1: hang "": want: call [uuid]`},
		{"fault of an unknown call", "hang DeviceGetComputMode", `call "DeviceGetComputMode": not one that the library has; see Calls`},
		{"fault without an error", "fail Init", `line 1: fail "Init": want: call error [uuid]`},
		{"unknown variant", "variant x", `variant "x": not in Behaviours`},
		{"uuid", "gpu GPU-1", `gpu 0: uuid "GPU-1": want GPU- and 36 of 0-9a-f-`},
		{"two of one uuid", good + good, `gpu 1: uuid GPU-6f3c1a52-0d5e-4b7e-9a53-2f4c1f0e8d11: another gpu has it`},
		{"no name", gpu, `gpu 0: name "": want 1 to 95 bytes`},
		{"pci", gpu + "name X\npci 18:00.0", `gpu 0: pci "18:00.0": want 00000000:18:00.0, upper case`},
		{"all reserved", good + "reserved 11", `gpu 0: total 10, reserved 11 bytes: want 0 <= reserved <= total`},
		{"xids out of order", "xid 2 a 1\nxid 2 a 1", `xid 1: sequence 2 does not increase`},
		{"xid", "xid 2 a", `line 1: xid "2 a": want: sequence uuid code`},
		{"nvlink", gpu + "nvlink a b", `line 2: nvlink "a b": want: remote bus id, gpu|switch, up|down`},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := nvmlsim.Parse(strings.NewReader(c.file))
			if err == nil || err.Error() != c.err {
				t.Errorf("got  %v\nwant %s", err, c.err)
			}
		})
	}
}

func TestCreateMakesNodesOfItsOwn(t *testing.T) {
	a, b := create(t, nvmlsim.Uniform(2, nvmlsim.H200)), create(t, nvmlsim.Uniform(2, nvmlsim.H200))
	minors, uuids := map[int]bool{}, map[string]bool{}
	for _, m := range []*nvmlsim.Machine{a, b} {
		spec, err := m.Spec()
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range spec.GPUs {
			minors[g.Minor], uuids[g.UUID] = true, true
			node(t, filepath.Join(m.Dev(), fmt.Sprintf("nvidia%d", g.Minor)), 195, g.Minor)
			if g.Minor < 256 {
				t.Errorf("minor %d: a real driver's device can have it", g.Minor)
			}
		}
		node(t, filepath.Join(m.Dev(), "nvidiactl"), 195, 255)
	}
	if len(uuids) != 4 || len(minors) != 4 {
		t.Errorf("4 GPUs of two machines have %d UUIDs and %d minors", len(uuids), len(minors))
	}
	if _, err := nvmlsim.Create(a.Dir, a.Library(), nvmlsim.Spec{}); err == nil {
		t.Error("a machine was made over another one")
	}
	if err := a.Remove(); err != nil {
		t.Error(err)
	}
	if _, err := nvmlsim.Open(a.Dir); !os.IsNotExist(err) {
		t.Errorf("open of a removed machine: %v", err)
	}
}

func node(t *testing.T, path string, major, minor int) {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Error(err)
		return
	}
	dev := info.Sys().(*syscall.Stat_t).Rdev
	if info.Mode()&(fs.ModeCharDevice|fs.ModePerm) != fs.ModeCharDevice|0o666 || int(unix.Major(dev)) != major || int(unix.Minor(dev)) != minor {
		t.Errorf("%s: %v %d:%d, want a character node %d:%d open to all", path, info.Mode(), unix.Major(dev), unix.Minor(dev), major, minor)
	}
}

func TestUpdatesFollowOneAnother(t *testing.T) {
	m := create(t, nvmlsim.Uniform(1, nvmlsim.T4))
	spec, err := m.Spec()
	if err != nil {
		t.Fatal(err)
	}
	var wait sync.WaitGroup
	for i := range 20 {
		wait.Go(func() {
			other, err := nvmlsim.Open(m.Dir)
			if err != nil {
				t.Error(err)
				return
			}
			if err := other.Xid(spec.GPUs[0].UUID, uint64(i)); err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	spec, err = m.Spec()
	if err != nil || len(spec.Xids) != 20 || spec.Xids[19].Seq != 20 {
		t.Errorf("after 20 events: %v %v", spec.Xids, err)
	}
}

func TestSteeringWhatIsNotThere(t *testing.T) {
	m := create(t, nvmlsim.Uniform(1, nvmlsim.T4))
	const stranger = "GPU-00000000-0000-0000-0000-000000000000"
	for name, err := range map[string]error{
		"lose":    m.Lose(stranger, true),
		"xid":     m.Xid(stranger, 31),
		"vgpu":    m.SetVGPU(stranger, true),
		"variant": m.SetVariant("nonsense", true),
		"hang":    m.Hang("Nonsense", true),
	} {
		if err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	before, _ := m.Spec()
	if err := m.Hang("DeviceGetName", true); err != nil {
		t.Error(err)
	}
	if err := m.Fail("DeviceGetName", before.GPUs[0].UUID, "UNKNOWN"); err != nil {
		t.Error(err)
	}
	if err := m.Hang("DeviceGetName", false); err != nil {
		t.Error(err)
	}
	if err := m.Fail("DeviceGetName", before.GPUs[0].UUID, ""); err != nil {
		t.Error(err)
	}
	if after, _ := m.Spec(); len(after.Faults) != 0 {
		t.Errorf("faults left: %+v", after.Faults)
	}
}

func TestEveryInferredBehaviourSaysSo(t *testing.T) {
	variants := map[string]bool{}
	for _, b := range nvmlsim.Behaviours {
		if b.Does == "" || b.Evidence == "" || (b.Variant == "") != (b.Other == "") {
			t.Errorf("%+v: incomplete", b)
		}
		if b.Variant != "" && variants[b.Variant] {
			t.Errorf("variant %s: twice", b.Variant)
		}
		variants[b.Variant] = true
	}
	if len(nvmlsim.Calls()) < 30 {
		t.Errorf("calls: %v", nvmlsim.Calls())
	}
}
