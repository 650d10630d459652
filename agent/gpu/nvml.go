package gpu

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Options of OpenWith. Zero durations take the defaults.
type Options struct {
	LibraryPath string        // "": libnvidia-ml.so.1 by the loader's path
	CallTimeout time.Duration // of one call; default 5 s
	InitTimeout time.Duration // of NVML's initialisation, which wakes GPUs without persistence mode; default 60 s
	ReinitEvery time.Duration // how often at most NVML is initialised anew while a GPU is missing; default 60 s
}

func (o Options) withDefaults() Options {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&o.CallTimeout, 5*time.Second)
	def(&o.InitTimeout, 60*time.Second)
	def(&o.ReinitEvery, 60*time.Second)
	return o
}

// NVML is the loaded library.
type NVML struct {
	lib     nvml.Interface
	options Options
	has     map[string]bool // symbols that not every driver's library has

	// inUse is held for reading by every call inside NVML. It is locked by TryLock alone, so that a call that
	// hangs never makes another one wait.
	inUse  sync.RWMutex
	system *lane
	events *lane

	mu        sync.Mutex
	devices   map[string]*device // by UUID; never shrinks
	listing   []*lane            // by index
	lastInit  time.Time
	missing   bool // a GPU was, at the last look
	needsInit bool // NVML was shut down and not started again

	reinit    atomic.Bool // Devices wants NVML for itself: the listener lets go
	epoch     atomic.Int64
	listening atomic.Bool
	closed    atomic.Bool
	closing   context.Context
	close     context.CancelFunc
	listeners sync.WaitGroup
}

// device is one GPU and its lane. handle is used in the lane alone.
type device struct {
	*lane
	uuid   string
	handle nvml.Device
	epoch  int64

	last Device // under NVML.mu
}

// A process binds NVML's symbols to the first library that it loads, and go-nvml keeps them in package variables:
// so one library in a process, and one user at a time.
var process struct {
	sync.Mutex
	path string
	open bool
}

// errInUse: a call is inside NVML, and will be for a while.
var errInUse = errors.New("NVML is in use")

var initLane = newLane()

// Open loads and initialises NVML. libraryPath "" is the system's.
func Open(libraryPath string) (*NVML, error) { return OpenWith(Options{LibraryPath: libraryPath}) }

// OpenWith is Open with deadlines.
func OpenWith(o Options) (*NVML, error) {
	o = o.withDefaults()
	if o.LibraryPath == "" {
		o.LibraryPath = "libnvidia-ml.so.1"
	}
	path := o.LibraryPath
	process.Lock()
	defer process.Unlock()
	if process.open {
		return nil, fmt.Errorf("NVML library %s: open already in this process, which can have one", process.path)
	}
	if process.path != "" && process.path != path {
		return nil, fmt.Errorf("NVML library %s: this process has loaded %s before, and can load one only", path, process.path)
	}
	n := &NVML{lib: nvml.New(nvml.WithLibraryPath(path)), options: o, system: newLane(), events: newLane(),
		devices: map[string]*device{}, lastInit: time.Now()}
	n.closing, n.close = context.WithCancel(context.Background())
	// Init may come back when nobody waits for it any more: then it is undone.
	var waited atomic.Bool
	waited.Store(true)
	has, err := run(n.closing, initLane, &n.inUse, "", "Init", o.InitTimeout, func() (map[string]bool, error) {
		if ret := n.lib.Init(); ret != nvml.SUCCESS {
			return nil, initError(path, ret)
		}
		has := n.symbols()
		if !waited.Load() {
			n.lib.Shutdown()
		}
		return has, nil
	})
	if err != nil {
		waited.Store(false)
		n.close()
		return nil, err
	}
	n.has = has
	process.path, process.open = path, true
	return n, nil
}

func initError(path string, ret nvml.Return) error {
	switch ret {
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return fmt.Errorf("%w: %s cannot be loaded; install the NVIDIA driver on this machine, or name its libnvidia-ml.so.1 in gpu.nvmlLibrary", ErrNoLibrary, path)
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return fmt.Errorf("%w: load it (modprobe nvidia) or install the driver for this kernel", ErrNoDriver)
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return fmt.Errorf("NVML library %s: its version is not the loaded kernel driver's; reboot or reload the driver", path)
	}
	return fmt.Errorf("NVML library %s: Init: %s", path, ret.Error())
}

// optional are the symbols that libraries of drivers still in use lack. go-nvml binds lazily: a call of
// one that is not there would end the process.
var optional = []string{"nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMPSComputeRunningProcesses", "nvmlDeviceGetMemoryAffinity",
	"nvmlDeviceGetArchitecture", "nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetMigMode", "nvmlDeviceGetVirtualizationMode",
	"nvmlDeviceGetTopologyCommonAncestor", "nvmlSystemGetCudaDriverVersion"}

func (n *NVML) symbols() map[string]bool {
	has := map[string]bool{}
	for _, name := range optional {
		has[name] = n.lib.Extensions().LookupSymbol(name) == nil
	}
	return has
}

// callError makes an error of what a call returned. It is called inside a lane: the text comes from the library.
func callError(call, uuid string, ret nvml.Return) error {
	var class error
	switch ret {
	case nvml.SUCCESS:
		return nil
	case nvml.ERROR_GPU_IS_LOST, nvml.ERROR_RESET_REQUIRED:
		return &LostError{UUID: uuid, Call: call}
	case nvml.ERROR_NOT_FOUND:
		class = ErrUnknownGPU
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND:
		class = ErrNotSupported
	case nvml.ERROR_NO_PERMISSION:
		class = ErrNoPermission
	case nvml.ERROR_DRIVER_NOT_LOADED, nvml.ERROR_UNINITIALIZED:
		class = ErrNoDriver
	default:
		class = errors.New(ret.Error())
	}
	if uuid == "" {
		return fmt.Errorf("%s: %w", call, class)
	}
	return fmt.Errorf("%s of GPU %s: %w", call, uuid, class)
}

// onDevice makes a call on one GPU, in its lane, with a handle that is looked up when there is none.
func onDevice[T any](ctx context.Context, n *NVML, uuid, name string, call func(nvml.Device) (T, error)) (T, error) {
	if n.closing.Err() != nil {
		var none T
		return none, ErrClosed
	}
	d := n.device(uuid)
	return run(ctx, d.lane, &n.inUse, uuid, name, n.options.CallTimeout, func() (T, error) {
		var none T
		if epoch := n.epoch.Load(); d.handle == nil || d.epoch != epoch {
			handle, ret := n.lib.DeviceGetHandleByUUID(uuid)
			if err := callError("DeviceGetHandleByUUID", uuid, ret); err != nil {
				return none, err
			}
			d.handle, d.epoch = handle, epoch
		}
		v, err := call(d.handle)
		if err != nil {
			d.handle = nil // the device may have gone; a look-up tells, and costs little
		}
		return v, err
	})
}

func (n *NVML) device(uuid string) *device {
	n.mu.Lock()
	defer n.mu.Unlock()
	d := n.devices[uuid]
	if d == nil {
		d = &device{lane: newLane(), uuid: uuid}
		n.devices[uuid] = d
	}
	return d
}

// Hung lists the calls that NVML has not come back from.
func (n *NVML) Hung() []*HungError {
	n.mu.Lock()
	lanes := append([]*lane{n.system, n.events}, n.listing...)
	for _, d := range n.devices {
		lanes = append(lanes, d.lane)
	}
	n.mu.Unlock()
	var hung []*HungError
	for _, l := range lanes {
		if h := l.hung(); h != nil {
			hung = append(hung, h)
		}
	}
	return hung
}

// exclusively runs f while no call is inside NVML, or gives up after wait.
func (n *NVML) exclusively(wait time.Duration, f func() error) error {
	n.reinit.Store(true)
	defer n.reinit.Store(false)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(wait); !n.inUse.TryLock(); <-tick.C {
		if time.Now().After(end) {
			return errInUse
		}
	}
	defer n.inUse.Unlock()
	return f()
}

// Close lets go of NVML, after the listener has ended. While a call hangs NVML cannot be shut down: it is left
// as it is, with the thread that is inside.
func (n *NVML) Close() error {
	if n.closed.Swap(true) {
		return nil
	}
	n.close()
	n.listeners.Wait()
	process.Lock()
	defer process.Unlock()
	process.open = false
	if h := n.Hung(); len(h) > 0 {
		return fmt.Errorf("NVML is not shut down: %w", h[0])
	}
	return n.exclusively(eventWait+n.options.CallTimeout, func() error {
		if ret := n.lib.Shutdown(); ret != nvml.SUCCESS {
			return fmt.Errorf("NVML: Shutdown: %s", ret.Error())
		}
		return nil
	})
}
