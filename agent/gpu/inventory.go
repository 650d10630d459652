package gpu

import (
	"context"
	"errors"
	"math/bits"
	"slices"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// maxNUMANodes is how many nodes are asked about: the kernel's MAX_NUMNODES is 1024 on large builds, machines have few.
const maxNUMANodes = 64

// Inventory is what Devices gives, and what it cannot name.
type Inventory struct {
	Devices    []Device     // by index; a GPU once seen stays listed, with Err while it does not answer
	Unreadable []Unreadable // GPUs that have not told their UUID since NVML was opened
}

// Unreadable is a GPU that NVML counts and cannot read.
type Unreadable struct {
	Index int
	Err   error
}

// Devices lists the GPUs in order of index, with all that does not change by itself. A GPU that is lost or
// hangs is listed with its Err, and takes none of the others with it; an error means that NVML could not say which there are.
func (n *NVML) Devices(ctx context.Context) ([]Device, error) {
	inv, err := n.Inventory(ctx)
	return inv.Devices, err
}

// machineFacts are the same for all its GPUs.
type machineFacts struct {
	count  int
	driver string
	branch int
	cuda   int
}

// seen is a GPU that answered to its index.
type seen struct {
	index  int
	uuid   string
	handle nvml.Device
}

// Inventory reads which GPUs there are:
//
//  1. NVML is initialised anew when a GPU was missing the last time, for NVML may see one that came back only then.
//  2. How many are there?
//  3. Each index: which GPU is it?
//  4. Each GPU: what is it, and how near are the others?
//  5. Those known from before that did not answer are added.
func (n *NVML) Inventory(ctx context.Context) (Inventory, error) {
	if n.closing.Err() != nil {
		return Inventory{}, ErrClosed
	}
	if err := n.lookAgain(ctx); err != nil {
		return Inventory{}, err
	}
	m, err := run(ctx, n.system, &n.inUse, "", "DeviceGetCount", n.options.CallTimeout, n.machine)
	if err != nil {
		n.noteMissing(err)
		return Inventory{}, err
	}
	found, failed := n.list(ctx, m.count)
	devices := make([]Device, len(found))
	var wait sync.WaitGroup
	for i, f := range found {
		wait.Go(func() { devices[i] = n.read(ctx, m, f, found) })
	}
	wait.Wait()
	return n.remember(devices, failed), ctx.Err()
}

func (n *NVML) machine() (machineFacts, error) {
	count, ret := n.lib.DeviceGetCount()
	if err := callError("DeviceGetCount", "", ret); err != nil {
		return machineFacts{}, err
	}
	m := machineFacts{count: count}
	driver, ret := n.lib.SystemGetDriverVersion()
	if err := callError("SystemGetDriverVersion", "", ret); err != nil {
		return machineFacts{}, err
	}
	m.driver = driver
	m.branch, _ = Branch(driver) // 0 is "unknown", and shown as such
	if n.has["nvmlSystemGetCudaDriverVersion"] {
		if cuda, ret := n.lib.SystemGetCudaDriverVersion(); ret == nvml.SUCCESS {
			m.cuda = cuda
		}
	}
	return m, nil
}

// list asks each index for its GPU, all at once, each in its lane.
func (n *NVML) list(ctx context.Context, count int) (found []seen, failed []Unreadable) {
	n.mu.Lock()
	for len(n.listing) < count {
		n.listing = append(n.listing, newLane())
	}
	lanes := n.listing[:count:count]
	n.mu.Unlock()
	all := make([]seen, count)
	errs := make([]error, count)
	var wait sync.WaitGroup
	for i, l := range lanes {
		wait.Go(func() {
			all[i], errs[i] = run(ctx, l, &n.inUse, "", "DeviceGetHandleByIndex", n.options.CallTimeout, func() (seen, error) {
				handle, ret := n.lib.DeviceGetHandleByIndex(i)
				if err := callError("DeviceGetHandleByIndex", "", ret); err != nil {
					return seen{}, err
				}
				uuid, ret := handle.GetUUID()
				return seen{i, uuid, handle}, callError("DeviceGetUUID", "", ret)
			})
		})
	}
	wait.Wait()
	for i, err := range errs {
		if err != nil {
			failed = append(failed, Unreadable{i, err})
		} else {
			found = append(found, all[i])
		}
	}
	return found, failed
}

// read reads one GPU in its lane.
func (n *NVML) read(ctx context.Context, m machineFacts, f seen, all []seen) Device {
	n.device(f.uuid)
	d, err := onDevice(ctx, n, f.uuid, "DeviceGet facts", func(handle nvml.Device) (Device, error) {
		d := Device{UUID: f.uuid, Index: f.index, DriverVersion: m.driver, DriverBranch: m.branch, CUDAVersion: m.cuda}
		err := n.facts(handle, &d)
		if err == nil {
			d.NVLinks = n.links(handle)
			d.Peers = n.peers(handle, d, all)
		}
		return d, err
	})
	if err != nil {
		return Device{UUID: f.uuid, Index: f.index, Err: err}
	}
	return d
}

// facts reads what must be known, and what may be missing.
func (n *NVML) facts(handle nvml.Device, d *Device) error {
	var ret nvml.Return
	if d.Name, ret = handle.GetName(); ret != nvml.SUCCESS {
		return callError("DeviceGetName", d.UUID, ret)
	}
	total, reserved, _, err := n.memory(handle, d.UUID)
	if err != nil {
		return err
	}
	d.TotalMiB, d.ReservedMiB = int64(total/mib), mibUp(reserved)
	if d.ComputeMajor, d.ComputeMinor, ret = handle.GetCudaComputeCapability(); ret != nvml.SUCCESS {
		return callError("DeviceGetCudaComputeCapability", d.UUID, ret)
	}
	pci, ret := handle.GetPciInfo()
	if ret != nvml.SUCCESS {
		return callError("DeviceGetPciInfo", d.UUID, ret)
	}
	d.PCIBusID = cString(pci.BusId[:])
	if d.Minor, ret = handle.GetMinorNumber(); ret != nvml.SUCCESS {
		d.Minor = -1
	}
	d.NUMANode = n.numaNode(handle)
	if n.has["nvmlDeviceGetArchitecture"] {
		if arch, ret := handle.GetArchitecture(); ret == nvml.SUCCESS {
			d.Architecture = architectures[arch]
		}
	}
	if n.has["nvmlDeviceGetMigMode"] {
		current, _, ret := handle.GetMigMode()
		d.MIG = ret == nvml.SUCCESS && current == nvml.DEVICE_MIG_ENABLE
	}
	if n.has["nvmlDeviceGetVirtualizationMode"] {
		mode, ret := handle.GetVirtualizationMode()
		d.VGPU = ret == nvml.SUCCESS && mode == nvml.GPU_VIRTUALIZATION_MODE_VGPU
	}
	ecc, _, ret := handle.GetEccMode()
	d.ECC = ret == nvml.SUCCESS && ecc == nvml.FEATURE_ENABLED
	return nil
}

var architectures = map[nvml.DeviceArchitecture]string{
	nvml.DEVICE_ARCH_KEPLER: "Kepler", nvml.DEVICE_ARCH_MAXWELL: "Maxwell", nvml.DEVICE_ARCH_PASCAL: "Pascal",
	nvml.DEVICE_ARCH_VOLTA: "Volta", nvml.DEVICE_ARCH_TURING: "Turing", nvml.DEVICE_ARCH_AMPERE: "Ampere",
	nvml.DEVICE_ARCH_ADA: "Ada", nvml.DEVICE_ARCH_HOPPER: "Hopper", nvml.DEVICE_ARCH_BLACKWELL: "Blackwell",
	nvml.DEVICE_ARCH_RUBIN: "Rubin",
}

// numaNode is the host's node nearest to the GPU. nvmlDeviceGetNumaNodeId is not that: it is the node that
// the GPU's own memory is, where it is one.
func (n *NVML) numaNode(handle nvml.Device) int {
	if !n.has["nvmlDeviceGetMemoryAffinity"] {
		return -1
	}
	nodes, ret := handle.GetMemoryAffinity(maxNUMANodes, nvml.AFFINITY_SCOPE_NODE)
	if ret != nvml.SUCCESS {
		return -1
	}
	node := -1
	for i, word := range nodes {
		switch {
		case word == 0:
		case node >= 0 || bits.OnesCount(word) > 1:
			return -1
		default:
			node = i*bits.UintSize + bits.TrailingZeros(word)
		}
	}
	return node
}

func (n *NVML) links(handle nvml.Device) []NVLink {
	var links []NVLink
	for l := range nvml.NVLINK_MAX_LINKS {
		state, ret := handle.GetNvLinkState(l)
		if ret != nvml.SUCCESS { // not supported, or past the GPU's last link
			break
		}
		link := NVLink{Link: l, Up: state == nvml.FEATURE_ENABLED}
		if link.Up {
			if pci, ret := handle.GetNvLinkRemotePciInfo(l); ret == nvml.SUCCESS {
				link.RemotePCIBusID = cString(pci.BusId[:])
			}
			if n.has["nvmlDeviceGetNvLinkRemoteDeviceType"] {
				if kind, ret := handle.GetNvLinkRemoteDeviceType(l); ret == nvml.SUCCESS {
					link.RemoteType = linkTypes[kind]
				}
			}
		}
		links = append(links, link)
	}
	return links
}

var linkTypes = map[nvml.IntNvLinkDeviceType]string{
	nvml.NVLINK_DEVICE_TYPE_GPU: "GPU", nvml.NVLINK_DEVICE_TYPE_IBMNPU: "CPU", nvml.NVLINK_DEVICE_TYPE_SWITCH: "SWITCH",
}

var paths = map[nvml.GpuTopologyLevel]Path{
	nvml.TOPOLOGY_INTERNAL: PathInternal, nvml.TOPOLOGY_SINGLE: PathSingle, nvml.TOPOLOGY_MULTIPLE: PathMultiple,
	nvml.TOPOLOGY_HOSTBRIDGE: PathHostBridge, nvml.TOPOLOGY_NODE: PathNode, nvml.TOPOLOGY_SYSTEM: PathSystem,
}

// peers leaves out a GPU that does not answer.
func (n *NVML) peers(handle nvml.Device, d Device, all []seen) []Peer {
	var peers []Peer
	for _, other := range all {
		if other.uuid == d.UUID || !n.has["nvmlDeviceGetTopologyCommonAncestor"] {
			continue
		}
		level, ret := handle.GetTopologyCommonAncestor(other.handle)
		if ret != nvml.SUCCESS {
			continue
		}
		peer := Peer{UUID: other.uuid, Path: paths[level]}
		if pci, ret := other.handle.GetPciInfo(); ret == nvml.SUCCESS {
			bus := cString(pci.BusId[:])
			for _, l := range d.NVLinks {
				if l.RemotePCIBusID == bus {
					peer.NVLinks++
				}
			}
		}
		peers = append(peers, peer)
	}
	return peers
}

func cString(chars []int8) string {
	var text []byte
	for _, c := range chars {
		if c == 0 {
			break
		}
		text = append(text, byte(c))
	}
	return string(text)
}

// remember keeps what was read, and lists the GPUs known from before that did not answer as they were then.
func (n *NVML) remember(devices []Device, failed []Unreadable) Inventory {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.missing = false
	inv := Inventory{}
	answered := map[string]bool{}
	for _, d := range devices {
		known := n.devices[d.UUID]
		answered[d.UUID] = true
		if d.Err != nil {
			n.missing = n.missing || errors.Is(d.Err, ErrLost)
			d = withErr(known.last, d)
		}
		known.last = d
		inv.Devices = append(inv.Devices, d)
	}
	silent := map[int]bool{}
	for _, known := range n.devices {
		d := known.last
		if d.UUID == "" || answered[d.UUID] {
			continue
		}
		n.missing = true
		d.Err = &LostError{UUID: d.UUID, Call: "DeviceGetCount"}
		for _, f := range failed {
			if f.Index == d.Index {
				d.Err = named(f.Err, d.UUID)
				silent[f.Index] = true
			}
		}
		known.last = d
		inv.Devices = append(inv.Devices, d)
	}
	for _, f := range failed {
		n.missing = true
		if !silent[f.Index] {
			inv.Unreadable = append(inv.Unreadable, f)
		}
	}
	slices.SortFunc(inv.Devices, func(a, b Device) int { return a.Index - b.Index })
	return inv
}

// withErr is what was last known of a GPU, with why it does not answer now.
func withErr(last, now Device) Device {
	if last.UUID == "" {
		last = now
	}
	last.Index, last.Err = now.Index, now.Err
	return last
}

// named puts the UUID into an error of a call that knew only the index.
func named(err error, uuid string) error {
	var lost *LostError
	var hung *HungError
	switch {
	case errors.As(err, &lost):
		return &LostError{UUID: uuid, Call: lost.Call}
	case errors.As(err, &hung):
		return &HungError{UUID: uuid, Call: hung.Call, Since: hung.Since}
	}
	return err
}

func (n *NVML) noteMissing(err error) {
	if errors.Is(err, ErrHung) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return
	}
	n.mu.Lock()
	n.missing = true
	n.mu.Unlock()
}

// lookAgain initialises NVML anew while a GPU is missing, but not while a call hangs, and not often: it wakes GPUs.
func (n *NVML) lookAgain(ctx context.Context) error {
	n.mu.Lock()
	due := n.needsInit || n.missing && time.Since(n.lastInit) >= n.options.ReinitEvery
	n.mu.Unlock()
	if !due || len(n.Hung()) > 0 {
		return nil
	}
	var own sync.RWMutex // exclusively takes inUse itself
	_, err := run(ctx, initLane, &own, "", "Init", n.options.InitTimeout, func() (struct{}, error) {
		return struct{}{}, n.exclusively(eventWait+time.Second, n.initAnew)
	})
	if err != nil && !errors.Is(err, errInUse) {
		return err
	}
	return nil // in use all the time: the next look will try again
}

// initAnew is called while no call is inside NVML.
func (n *NVML) initAnew() error {
	n.mu.Lock()
	down := n.needsInit
	n.needsInit, n.lastInit = true, time.Now()
	n.mu.Unlock()
	if !down {
		if ret := n.lib.Shutdown(); ret != nvml.SUCCESS {
			return callError("Shutdown", "", ret)
		}
	}
	if ret := n.lib.Init(); ret != nvml.SUCCESS {
		return initError(n.options.LibraryPath, ret)
	}
	n.epoch.Add(1) // handles of before are void
	n.mu.Lock()
	n.needsInit = false
	n.mu.Unlock()
	return nil
}
