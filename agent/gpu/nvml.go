package gpu

import (
	"context"
	"errors"
	"time"
)

// Options of Open. Zero durations take the defaults.
type Options struct {
	LibraryPath string        // "": libnvidia-ml.so.1 by the loader's path
	CallTimeout time.Duration // of one call; default 5 s
	InitTimeout time.Duration // of NVML's initialisation, which wakes GPUs without persistence mode; default 60 s
}

// NVML is the loaded library.
type NVML struct{}

// Open loads and initialises NVML. libraryPath "" is the system's.
func Open(libraryPath string) (*NVML, error) { return OpenWith(Options{LibraryPath: libraryPath}) }

// OpenWith is Open with deadlines. A process can load one library only.
func OpenWith(o Options) (*NVML, error) { return nil, errors.ErrUnsupported }

// Devices lists the GPUs in order of index, with all that does not change by itself.
func (n *NVML) Devices(ctx context.Context) ([]Device, error) { return nil, errors.ErrUnsupported }

// Sample reads all that changes on one GPU.
func (n *NVML) Sample(ctx context.Context, uuid string) (Sample, error) {
	return Sample{}, errors.ErrUnsupported
}

// ComputeMode reads one GPU's compute mode.
func (n *NVML) ComputeMode(ctx context.Context, uuid string) (ComputeMode, error) {
	return 0, errors.ErrUnsupported
}

// SetComputeMode sets one GPU's compute mode and reads it back. It needs root.
func (n *NVML) SetComputeMode(ctx context.Context, uuid string, mode ComputeMode) error {
	return errors.ErrUnsupported
}

// Processes lists who holds memory of one GPU.
func (n *NVML) Processes(ctx context.Context, uuid string) ([]Process, error) {
	return nil, errors.ErrUnsupported
}

// Usage reads one GPU's memory and utilisation.
func (n *NVML) Usage(ctx context.Context, uuid string) (Usage, error) {
	return Usage{}, errors.ErrUnsupported
}

// Xids listens for critical events of all GPUs until ctx ends, and then closes the channel.
func (n *NVML) Xids(ctx context.Context) (<-chan Xid, error) { return nil, errors.ErrUnsupported }

// Hung lists the calls that NVML has not come back from.
func (n *NVML) Hung() []*HungError { return nil }

// Close lets go of NVML. A call that hangs is left behind.
func (n *NVML) Close() error { return nil }
