package nvmlsim

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// Spec is all that a simulated machine's steer file says. Order of GPUs is
// NVML's index.
type Spec struct {
	Driver string // nvmlSystemGetDriverVersion, "580.159.03"
	NVML   string // nvmlSystemGetNVMLVersion, "13.580.159.03"
	CUDA   int    // nvmlSystemGetCudaDriverVersion, 13000 is 13.0

	GPUs     []GPU
	Faults   []Fault
	Variants []string // names from Behaviours
	Xids     []Xid    // ascending Seq; an event set sees those after its registration
}

// GPU is one simulated device.
type GPU struct {
	UUID          string // "GPU-" and 36 characters
	Minor         int    // of /dev/nvidia<minor>
	Name          string
	TotalBytes    int64
	ReservedBytes int64 // memory v2's reserved; v1 counts it as used
	Architecture  int   // NVML_DEVICE_ARCH_*, 9 is Hopper
	ComputeMajor  int
	ComputeMinor  int
	PCIBusID      string // "00000000:18:00.0"
	PCIDevice     uint32 // device id << 16 | vendor id
	NUMANode      int    // -1: NVML knows none
	PCIeSwitch    int    // GPUs with the same number are behind one switch

	MIG            int // -1: not supported, 0: off, 1: on
	Virtualization int // NVML_GPU_VIRTUALIZATION_MODE_*; -1: the call is not supported
	ECC            int // -1: not supported, 0: off, 1: on

	GPUPercent    int // utilisation while a process holds the GPU
	MemoryPercent int

	Lost  bool // fell off the bus
	Links []Link
}

// Link is one NVLink of a GPU, in order of its number.
type Link struct {
	Remote string // PCI bus id of the other end
	Switch bool   // the other end is an NVSwitch
	Down   bool
}

// Fault makes one NVML call misbehave.
type Fault struct {
	Call  string // one of Calls: "DeviceGetComputeMode"; "*" is every call
	UUID  string // "": on every device
	Hang  bool   // the call does not return until the fault is gone from the file
	Error string // "GPU_IS_LOST", "UNKNOWN": NVML_ERROR_ and this; not used by a hang
}

// Xid is one critical event of a GPU.
type Xid struct {
	Seq  uint64 // increases by one with each event of the machine
	UUID string
	Code uint64
}

// GPU returns the device with a UUID, or nil.
func (s *Spec) GPU(uuid string) *GPU {
	for i := range s.GPUs {
		if s.GPUs[i].UUID == uuid {
			return &s.GPUs[i]
		}
	}
	return nil
}

// Variant says whether a behaviour's second variant is in force.
func (s *Spec) Variant(name string) bool {
	for _, v := range s.Variants {
		if v == name {
			return true
		}
	}
	return false
}

// ReadSpec reads the steer file of the machine in dir.
func ReadSpec(dir string) (Spec, error) {
	f, err := os.Open(filepath.Join(dir, "sim", "machine"))
	if err != nil {
		return Spec{}, err
	}
	defer f.Close()
	return Parse(f)
}

// Parse reads a steer file. The format is in the package documentation.
func Parse(r io.Reader) (Spec, error) {
	var s Spec
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		key, value, _ := strings.Cut(strings.TrimSpace(lines.Text()), " ")
		value = strings.TrimSpace(value)
		if key == "" || strings.HasPrefix(key, "#") {
			continue
		}
		if err := s.set(key, value); err != nil {
			return Spec{}, fmt.Errorf("line %d: %s %q: %w", n, key, value, err)
		}
	}
	if err := lines.Err(); err != nil {
		return Spec{}, err
	}
	return s, s.validate()
}

func (s *Spec) set(key, value string) error {
	switch key {
	case "driver":
		s.Driver = value
	case "nvml":
		s.NVML = value
	case "cuda":
		return parseInt(value, &s.CUDA)
	case "variant":
		s.Variants = append(s.Variants, value)
	case "hang":
		f := Fault{Hang: true}
		words := strings.Fields(value)
		if len(words) < 1 || len(words) > 2 {
			return errors.New("want: call [uuid]")
		}
		f.Call = words[0]
		if len(words) == 2 {
			f.UUID = words[1]
		}
		s.Faults = append(s.Faults, f)
	case "fail":
		words := strings.Fields(value)
		if len(words) < 2 || len(words) > 3 {
			return errors.New("want: call error [uuid]")
		}
		f := Fault{Call: words[0], Error: words[1]}
		if len(words) == 3 {
			f.UUID = words[2]
		}
		s.Faults = append(s.Faults, f)
	case "xid":
		var x Xid
		if _, err := fmt.Sscanf(value, "%d %s %d", &x.Seq, &x.UUID, &x.Code); err != nil {
			return errors.New("want: sequence uuid code")
		}
		s.Xids = append(s.Xids, x)
	case "gpu":
		s.GPUs = append(s.GPUs, GPU{UUID: value, NUMANode: -1, MIG: -1, ECC: -1})
	default:
		if len(s.GPUs) == 0 {
			return errors.New("not a key of the machine, and no gpu line came before it")
		}
		return s.GPUs[len(s.GPUs)-1].set(key, value)
	}
	return nil
}

func (g *GPU) set(key, value string) error {
	switch key {
	case "minor":
		return parseInt(value, &g.Minor)
	case "name":
		g.Name = value
	case "total":
		return parseInt(value, &g.TotalBytes)
	case "reserved":
		return parseInt(value, &g.ReservedBytes)
	case "arch":
		return parseInt(value, &g.Architecture)
	case "cc":
		if _, err := fmt.Sscanf(value, "%d.%d", &g.ComputeMajor, &g.ComputeMinor); err != nil {
			return errors.New("want: major.minor")
		}
	case "pci":
		g.PCIBusID = value
	case "pcidevice":
		n, err := strconv.ParseUint(value, 0, 32)
		if err != nil {
			return err
		}
		g.PCIDevice = uint32(n)
	case "numa":
		return parseInt(value, &g.NUMANode)
	case "pcieswitch":
		return parseInt(value, &g.PCIeSwitch)
	case "mig":
		return parseInt(value, &g.MIG)
	case "virtualization":
		return parseInt(value, &g.Virtualization)
	case "ecc":
		return parseInt(value, &g.ECC)
	case "util":
		if _, err := fmt.Sscanf(value, "%d %d", &g.GPUPercent, &g.MemoryPercent); err != nil {
			return errors.New("want: gpu percent, memory percent")
		}
	case "lost":
		g.Lost = value == "1"
	case "nvlink":
		words := strings.Fields(value)
		if len(words) != 3 {
			return errors.New("want: remote bus id, gpu|switch, up|down")
		}
		g.Links = append(g.Links, Link{Remote: words[0], Switch: words[1] == "switch", Down: words[2] == "down"})
	default:
		return errors.New("not a key of a gpu")
	}
	return nil
}

func parseInt[T int | int64](value string, to *T) error {
	n, err := strconv.ParseInt(value, 10, 64)
	if err != nil {
		return errors.New("not a whole number")
	}
	*to = T(n)
	return nil
}

// Format writes s as a steer file. Parse(Format(s)) is s.
func (s Spec) Format() []byte {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("driver %s", s.Driver)
	line("nvml %s", s.NVML)
	line("cuda %d", s.CUDA)
	for _, v := range s.Variants {
		line("variant %s", v)
	}
	for _, f := range s.Faults {
		if f.Hang {
			line("%s", strings.TrimSpace("hang "+f.Call+" "+f.UUID))
		} else {
			line("%s", strings.TrimSpace("fail "+f.Call+" "+f.Error+" "+f.UUID))
		}
	}
	for _, x := range s.Xids {
		line("xid %d %s %d", x.Seq, x.UUID, x.Code)
	}
	for _, g := range s.GPUs {
		line("gpu %s", g.UUID)
		line("minor %d", g.Minor)
		line("name %s", g.Name)
		line("total %d", g.TotalBytes)
		line("reserved %d", g.ReservedBytes)
		line("arch %d", g.Architecture)
		line("cc %d.%d", g.ComputeMajor, g.ComputeMinor)
		line("pci %s", g.PCIBusID)
		line("pcidevice 0x%08x", g.PCIDevice)
		line("numa %d", g.NUMANode)
		line("pcieswitch %d", g.PCIeSwitch)
		line("mig %d", g.MIG)
		line("virtualization %d", g.Virtualization)
		line("ecc %d", g.ECC)
		line("util %d %d", g.GPUPercent, g.MemoryPercent)
		if g.Lost {
			line("lost 1")
		}
		for _, l := range g.Links {
			kind, state := "gpu", "up"
			if l.Switch {
				kind = "switch"
			}
			if l.Down {
				state = "down"
			}
			line("nvlink %s %s %s", l.Remote, kind, state)
		}
	}
	return []byte(b.String())
}

// Limits of the library's tables; lib/nvmlsim.h has the same numbers.
const (
	maxGPUs     = 64
	maxLinks    = 18 // NVML_NVLINK_MAX_LINKS of the links that a GPU of today has
	maxFaults   = 64
	maxXids     = 256
	maxVariants = 32
)

var (
	uuidForm  = regexp.MustCompile(`^GPU-[0-9a-f-]{36}$`)
	errorForm = regexp.MustCompile(`^[A-Z_]+$`)
	pciForm   = regexp.MustCompile(`^[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-7]$`)
)

func (s *Spec) validate() error {
	if len(s.GPUs) > maxGPUs || len(s.Faults) > maxFaults || len(s.Xids) > maxXids || len(s.Variants) > maxVariants {
		return fmt.Errorf("more than %d gpus, %d faults, %d xids or %d variants", maxGPUs, maxFaults, maxXids, maxVariants)
	}
	for _, v := range s.Variants {
		if !knownVariant(v) {
			return fmt.Errorf("variant %q: not in Behaviours", v)
		}
	}
	for _, f := range s.Faults {
		if f.Call != "*" && !knownCall(f.Call) {
			return fmt.Errorf("call %q: not one that the library has; see Calls", f.Call)
		}
		if !f.Hang && !errorForm.MatchString(f.Error) {
			return fmt.Errorf("call %s: error %q: want the rest of an NVML_ERROR_ name", f.Call, f.Error)
		}
	}
	seen := map[string]bool{}
	for i, g := range s.GPUs {
		at := func(format string, args ...any) error {
			return fmt.Errorf("gpu %d: "+format, append([]any{i}, args...)...)
		}
		switch {
		case !uuidForm.MatchString(g.UUID):
			return at("uuid %q: want GPU- and 36 of 0-9a-f-", g.UUID)
		case seen[g.UUID]:
			return at("uuid %s: another gpu has it", g.UUID)
		case g.Name == "" || len(g.Name) > 95:
			return at("name %q: want 1 to 95 bytes", g.Name)
		case !pciForm.MatchString(g.PCIBusID):
			return at("pci %q: want 00000000:18:00.0, upper case", g.PCIBusID)
		case g.TotalBytes <= 0 || g.ReservedBytes < 0 || g.ReservedBytes > g.TotalBytes:
			return at("total %d, reserved %d bytes: want 0 <= reserved <= total", g.TotalBytes, g.ReservedBytes)
		case len(g.Links) > maxLinks:
			return at("%d nvlinks: at most %d", len(g.Links), maxLinks)
		}
		seen[g.UUID] = true
	}
	for i := range s.Xids {
		if i > 0 && s.Xids[i].Seq <= s.Xids[i-1].Seq {
			return fmt.Errorf("xid %d: sequence %d does not increase", i, s.Xids[i].Seq)
		}
	}
	return nil
}
