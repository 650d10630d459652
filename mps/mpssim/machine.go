package mpssim

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/berth-gpu/berth/agent/gpu/nvmlsim"
)

// NVML's number of the compute mode in which one process at a time may hold a GPU.
const exclusiveProcess = 3

// machine is the simulated machine as a process sees it: its sim folder, read anew
// whenever something depends on it. "" is a machine without a GPU.
type machine struct{ sim string }

// machineOf finds the machine of a control daemon or a server: <dir of exe>/../sim.
func machineOf(exe string) machine {
	sim := filepath.Join(filepath.Dir(filepath.Dir(exe)), "sim")
	if fi, err := os.Stat(sim); err == nil && fi.IsDir() {
		return machine{sim}
	}
	return machine{}
}

// ownMachine is machineOf this program.
func ownMachine() machine {
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return machine{}
	}
	return machineOf(exe)
}

// clientMachine finds the machine of a CUDA client, which mostly lives in a
// container and sees none: NVMLSIM_DIR, /run/nvmlsim, else as a daemon does.
func clientMachine() machine {
	for _, dir := range []string{os.Getenv("NVMLSIM_DIR"), "/run/nvmlsim"} {
		if dir == "" {
			continue
		}
		for _, sim := range []string{dir, filepath.Join(dir, "sim")} {
			if _, err := os.Stat(filepath.Join(sim, "machine")); err == nil {
				return machine{sim}
			}
		}
	}
	return ownMachine()
}

func (m machine) spec() nvmlsim.Spec {
	if m.sim == "" {
		return nvmlsim.Spec{}
	}
	f, err := os.Open(filepath.Join(m.sim, "machine"))
	if err != nil {
		return nvmlsim.Spec{} // no devices: a driver that is not loaded
	}
	defer f.Close()
	spec, err := nvmlsim.Parse(f)
	if err != nil {
		return nvmlsim.Spec{}
	}
	return spec
}

// visible is the devices that CUDA_VISIBLE_DEVICES leaves, in its order: ordinals,
// or UUIDs of which a beginning is enough. As in CUDA, the first entry that names no
// device ends the list. Lost devices are no devices.
func (m machine) visible(value string, set bool) []nvmlsim.GPU {
	var all []nvmlsim.GPU
	for _, g := range m.spec().GPUs {
		if !g.Lost {
			all = append(all, g)
		}
	}
	if !set {
		return all
	}
	var seen []nvmlsim.GPU
	for _, name := range strings.Split(value, ",") {
		g, ok := pick(all, strings.TrimSpace(name))
		if !ok {
			break
		}
		seen = append(seen, g)
	}
	return seen
}

func pick(all []nvmlsim.GPU, name string) (nvmlsim.GPU, bool) {
	if n, err := strconv.Atoi(name); err == nil {
		if n >= 0 && n < len(all) {
			return all[n], true
		}
		return nvmlsim.GPU{}, false
	}
	for _, g := range all {
		if strings.HasPrefix(name, "GPU-") && strings.HasPrefix(g.UUID, name) {
			return g, true
		}
	}
	return nvmlsim.GPU{}, false
}

func (m machine) exclusive(uuid string) bool {
	if m.sim == "" {
		return false
	}
	text, err := os.ReadFile(filepath.Join(m.sim, "mode."+uuid))
	if err != nil {
		return false
	}
	return strings.TrimSpace(string(text)) == strconv.Itoa(exclusiveProcess)
}

// steerKey is the GPU whose steer file a daemon and its servers follow: the one
// that CUDA_VISIBLE_DEVICES names first, also when the machine no longer has it.
func (m machine) steerKey() string {
	value, set := os.LookupEnv("CUDA_VISIBLE_DEVICES")
	if !set {
		return ""
	}
	if gpus := m.visible(value, set); len(gpus) > 0 {
		return gpus[0].UUID
	}
	first, _, _ := strings.Cut(value, ",")
	if strings.HasPrefix(first, "GPU-") && !strings.ContainsAny(first, "/.") {
		return first
	}
	return ""
}

func (m machine) steer() Steer { return readSteer(m.sim, m.steerKey()) }

// branch is the driver branch to behave as.
func (m machine) branch(s Steer) int {
	if s.Branch != 0 {
		return s.Branch
	}
	major, _, _ := strings.Cut(m.spec().Driver, ".")
	if n, err := strconv.Atoi(major); err == nil && n > 0 {
		return n
	}
	return DefaultBranch
}
