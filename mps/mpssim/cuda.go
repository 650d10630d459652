package mpssim

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/berth-gpu/berth/agent/gpu/nvmlsim"
)

// cudaContext is a CUDA process's side: what cuInit found, and what it holds.
type cudaContext struct {
	mps     bool
	percent string // active threads, of an MPS client
	devices []cudaDevice
	sticky  chan error // the one error that ends everything; buffered

	server  conn
	mu      sync.Mutex // one request at a time
	answers chan answer
	gone    chan struct{}
}

type answer struct {
	code int
	rest string
}

type cudaDevice struct {
	uuid, name string
	limit      int64 // bytes; 0: none
	total      int64 // bytes; 0: this process cannot know
	hold       *hold
	claim      *claim
}

// cuInit looks for a daemon as CUDA does: through CUDA_MPS_PIPE_DIRECTORY/control.
// Where nothing listens the process runs without MPS, and without a cap, and
// nothing tells it. [B]
func cuInit() (*cudaContext, error) {
	control := filepath.Join(pipeDirectory(), "control")
	first, err := dial(control)
	if err != nil {
		return withoutMPS()
	}
	first.Close()
	c, err := dial(control)
	if err != nil {
		return nil, Error(errMPSConnectionFailed)
	}
	defer c.Close()
	if c.send(wireClient, "") != nil {
		return nil, Error(errMPSConnectionFailed)
	}
	verb, rest, fds, err := c.receive() // as long as it takes, without limit [B]
	switch {
	case err != nil:
		return nil, Error(errMPSConnectionFailed)
	case verb == wireError:
		return nil, errorFrom(rest)
	case len(fds) != 1:
		return nil, Error(errMPSConnectionFailed)
	}
	server, err := fromFile(fds[0])
	if err != nil {
		return nil, Error(errMPSConnectionFailed)
	}
	return attachTo(server)
}

func errorFrom(text string) error {
	code, _ := strconv.Atoi(text)
	return Error(code)
}

func attachTo(server conn) (*cudaContext, error) {
	hello := helloForm{memory: os.Getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), percent: os.Getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")}
	if server.send(wireHello, hello.format()) != nil {
		return nil, Error(errMPSRPCFailure)
	}
	verb, rest, _, err := server.receive()
	switch {
	case err != nil:
		return nil, Error(errMPSRPCFailure)
	case verb == wireError:
		return nil, errorFrom(rest)
	}
	ctx := &cudaContext{mps: true, server: server, answers: make(chan answer), gone: make(chan struct{}), sticky: make(chan error, 1)}
	lines := strings.Split(rest, "\n")
	ctx.percent = lines[0]
	for _, l := range lines[1:] {
		var d cudaDevice
		var limit uint64
		words := strings.SplitN(l, " ", 3)
		if len(words) != 3 {
			return nil, Error(errMPSRPCFailure)
		}
		limit, _ = strconv.ParseUint(words[1], 10, 64)
		d.uuid, d.name, d.limit = words[0], words[2], int64(min(limit, 1<<62))
		ctx.devices = append(ctx.devices, d)
	}
	go ctx.listen()
	return ctx, nil
}

// listen sorts what the server sends: answers, and the sticky error. A server that
// dies is one too.
func (c *cudaContext) listen() {
	defer close(c.gone)
	for {
		verb, rest, _, err := c.server.receive()
		if err != nil {
			c.stick(Error(errMPSRPCFailure))
			return
		}
		if verb == wireFault {
			c.stick(errorFrom(rest))
			continue
		}
		a := answer{rest: rest}
		if verb == wireError {
			a.code, _ = strconv.Atoi(rest)
		}
		c.answers <- a
	}
}

func (c *cudaContext) stick(err error) {
	select {
	case c.sticky <- err:
	default:
	}
}

// withoutMPS finds the devices that NVIDIA's container runtime would have let in,
// and CUDA_VISIBLE_DEVICES left.
func withoutMPS() (*cudaContext, error) {
	m := clientMachine()
	gpus := grantedDevices(m)
	if value, set := os.LookupEnv("CUDA_VISIBLE_DEVICES"); set {
		var left []nvmlsim.GPU
		for _, name := range strings.Split(value, ",") {
			g, ok := pick(gpus, strings.TrimSpace(name))
			if !ok {
				break
			}
			left = append(left, g)
		}
		gpus = left
	}
	if len(gpus) == 0 {
		return nil, Error(errNoDevice)
	}
	ctx := &cudaContext{sticky: make(chan error, 1)}
	for _, g := range gpus {
		claim, ok := m.claimGPU(g.UUID)
		if !ok {
			return nil, Error(errDeviceUnavailable)
		}
		ctx.devices = append(ctx.devices, cudaDevice{uuid: g.UUID, name: g.Name, total: g.TotalBytes - g.ReservedBytes, claim: claim})
	}
	return ctx, nil
}

// grantedDevices is what NVIDIA_VISIBLE_DEVICES lets in. A machine that this process
// cannot see has the devices that the variable names by UUID.
func grantedDevices(m machine) []nvmlsim.GPU {
	all := m.visible("", false)
	value, set := os.LookupEnv("NVIDIA_VISIBLE_DEVICES")
	if !set || value == "all" {
		return all
	}
	var gpus []nvmlsim.GPU
	for _, name := range strings.Split(value, ",") {
		name = strings.TrimSpace(name)
		if g, ok := pick(all, name); ok {
			gpus = append(gpus, g)
		} else if len(all) == 0 && strings.HasPrefix(name, "GPU-") {
			gpus = append(gpus, nvmlsim.GPU{UUID: name, Name: "GPU", TotalBytes: 0})
		}
	}
	return gpus
}

// malloc takes bytes of a device. The first call is what creates the context, so a
// process that only asks for devices holds nothing.
func (c *cudaContext) malloc(device int, bytes int64) error {
	if device < 0 || device >= len(c.devices) {
		return Error(errNoDevice)
	}
	d := &c.devices[device]
	if d.hold == nil {
		kind := kindCompute
		if c.mps {
			kind = kindClient
		}
		h, err := newHold(d.uuid, kind, 0)
		if err != nil {
			return err
		}
		d.hold = h
	}
	if c.mps {
		if err := c.ask(wireAlloc, fmt.Sprintf("%d %d %d", device, bytes, d.hold.inode)); err != nil {
			return err
		}
	} else if d.total > 0 {
		used := d.hold.bytes
		for _, h := range holders(d.uuid) {
			used += h.bytes
		}
		if used+bytes > d.total {
			return Error(errOutOfMemory)
		}
	}
	return d.hold.resize(d.hold.bytes + bytes)
}

// free gives everything back.
func (c *cudaContext) free() {
	for i := range c.devices {
		d := &c.devices[i]
		if d.hold == nil || d.hold.bytes == 0 {
			continue
		}
		bytes := d.hold.bytes
		if d.hold.resize(0) == nil && c.mps {
			_ = c.ask(wireFree, fmt.Sprintf("%d %d", i, bytes))
		}
	}
}

// lose empties the holds after a sticky error: the contexts are gone, whatever the
// process does next.
func (c *cudaContext) lose() {
	for i := range c.devices {
		if h := c.devices[i].hold; h != nil {
			_ = h.resize(0)
		}
	}
}

func (c *cudaContext) ask(verb, rest string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.server.send(verb, rest) != nil {
		return Error(errMPSRPCFailure)
	}
	select {
	case a := <-c.answers:
		if a.code != 0 {
			return Error(a.code)
		}
		return nil
	case <-c.gone:
		return Error(errMPSRPCFailure)
	}
}

// held is how much a device's memory this process has, in bytes.
func (c *cudaContext) held(device int) int64 {
	if device >= len(c.devices) || c.devices[device].hold == nil {
		return 0
	}
	return c.devices[device].hold.bytes
}
