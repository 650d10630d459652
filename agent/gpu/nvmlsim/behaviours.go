package nvmlsim

import (
	"io/fs"
	"regexp"
	"slices"
	"sync"
)

// Behaviour is something the library does, with how we know that NVML does it.
type Behaviour struct {
	Does     string
	Evidence string // see below
	Variant  string // of an inferred one: the name that switches to the other way; "" where there is no other
	Other    string // what it does then
}

// Evidence.
const (
	documented = "[D]" // nvml.h says so
	relied     = "[C]" // NVIDIA's own clients (go-nvml, k8s-device-plugin) rely on it
	field      = "[F]" // reported from machines with GPUs
	inferred   = "inferred"
)

// Behaviours is the evidence for what the library does beyond returning what the steer file says. Nothing here has
// been compared with a real NVML yet; docs/gpu-verified.md will say when it has.
var Behaviours = []Behaviour{
	{Does: "NVML is thread safe; Init is counted, and calls before it give UNINITIALIZED", Evidence: documented},
	{Does: "a list call with too small a buffer gives INSUFFICIENT_SIZE and the number needed; with count 0 the buffer may be NULL", Evidence: documented},
	{Does: "memory v1's used includes reserved; v2 has reserved apart, and its used does not include it", Evidence: documented},
	{Does: "memory v2 wants the structure's version, else ARGUMENT_VERSION_MISMATCH", Evidence: documented},
	{Does: "memory v2 is there", Evidence: relied, Variant: "memory-v2-not-supported", Other: "it gives NOT_SUPPORTED, as a driver before R510 has no such call"},
	{Does: "the compute mode holds until it is set again, whoever set it, across processes", Evidence: documented},
	{Does: "setting the compute mode needs root, else NO_PERMISSION; EXCLUSIVE_THREAD is an invalid argument", Evidence: documented},
	{Does: "a compute mode that was set is read back", Evidence: inferred, Variant: "compute-mode-does-not-stick", Other: "Set succeeds and changes nothing"},
	{Does: "with MIG on, the parent has neither compute mode nor utilisation: NOT_SUPPORTED", Evidence: documented},
	{Does: "the index of a GPU may be another after the set of GPUs changed; the UUID stays", Evidence: documented},
	{Does: "an MPS server is in the compute list, as a process without MPS is", Evidence: field},
	{Does: "MPS clients are in the MPS list alone", Evidence: inferred, Variant: "mps-clients-in-compute-list", Other: "they are in both, as nvidia-smi's M+C suggests"},
	{Does: "MPS clients are in the MPS list", Evidence: inferred, Variant: "mps-clients-only-in-compute-list", Other: "they are in the compute list alone, not to be told from processes that skip MPS"},
	{Does: "a process's memory is known", Evidence: documented, Variant: "process-memory-not-available", Other: "it is NVML_VALUE_NOT_AVAILABLE, as in some virtual machines"},
	{Does: "the MPS list is NOT_SUPPORTED before Volta", Evidence: documented},
	{Does: "what a process held is given back the moment it is dead, and in state Z it is dead", Evidence: inferred},
	{Does: "process lists and memory are at most 50 ms old", Evidence: inferred},
	{Does: "used memory is the sum over the listed processes", Evidence: inferred},
	{Does: "utilisation is a fixed figure while a process holds the GPU and 0 otherwise", Evidence: inferred},
	{Does: "every call on a lost GPU gives GPU_IS_LOST, handles of it included", Evidence: documented, Variant: "lost-gpu-hangs", Other: "every call on it hangs"},
	{Does: "a handle of a lost GPU cannot be had", Evidence: documented, Variant: "lost-gpu-keeps-handle", Other: "it can, and the next call on it gives GPU_IS_LOST"},
	{Does: "a lost GPU is counted and keeps its index", Evidence: inferred, Variant: "lost-gpu-not-counted", Other: "the count is one less, and the GPUs after it move down"},
	{Does: "a GPU that was added or removed shows in the count at once", Evidence: inferred, Variant: "count-fixed-at-init", Other: "only after Shutdown and Init"},
	{Does: "a handle stays good when its GPU comes back", Evidence: inferred},
	{Does: "an event set gives, oldest first, the events since a device was registered, and none from before", Evidence: documented},
	{Does: "waiting gives TIMEOUT when nothing came, though a GPU of the set is lost", Evidence: inferred, Variant: "event-wait-fails-when-lost", Other: "it gives GPU_IS_LOST at once, as nvml.h allows"},
	{Does: "devices can be registered with a set that is in use already", Evidence: inferred},
	{Does: "NUMA affinity comes from GetMemoryAffinity; GetNumaNodeId is NOT_SUPPORTED, being for GPUs that are nodes themselves", Evidence: documented},
	{Does: "GPUs on one NUMA node behind one switch are PIX, on one node NODE, else SYS", Evidence: inferred},
	{Does: "an NVLink past a GPU's last is an invalid argument, and a GPU without any gives NOT_SUPPORTED", Evidence: relied},
	{Does: "the virtualization mode is NOT_SUPPORTED where the steer file says -1", Evidence: relied},
	{Does: "without a steer file, Init gives DRIVER_NOT_LOADED", Evidence: inferred},
}

func knownVariant(name string) bool {
	for _, b := range Behaviours {
		if b.Variant == name && name != "" {
			return true
		}
	}
	return false
}

// Calls are the names by which NVML's functions are steered: without the prefix nvml, all versions of one
// together but for DeviceGetMemoryInfo and DeviceGetMemoryInfo_v2.
var Calls = sync.OnceValue(func() []string {
	entry := regexp.MustCompile(`\b(?:ENTER|enter|system_text|list_processes|wait_and_look)\("(\w+)"`)
	var calls []string
	files, _ := fs.Glob(source, "lib/*.c")
	for _, name := range files {
		text, _ := source.ReadFile(name)
		for _, m := range entry.FindAllSubmatch(text, -1) {
			calls = append(calls, string(m[1]))
		}
	}
	slices.Sort(calls)
	return slices.Compact(calls)
})

func knownCall(name string) bool { return slices.Contains(Calls(), name) }
