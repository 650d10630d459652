package mpssim

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
)

// attach takes in a client that the daemon hands over: "pid uid", and its socket.
func (s *server) attach(who string, fd int) {
	c, err := fromFile(fd)
	if err != nil {
		return
	}
	cl := &client{conn: c, bytes: map[int]int64{}, inodes: map[uint64]int{}, limits: map[int]uint64{}}
	_, _ = fmt.Sscan(who, &cl.pid, &cl.uid)
	go s.serveClient(cl)
}

// serveClient judges one client until it is gone.
func (s *server) serveClient(c *client) {
	defer c.conn.Close()
	_, rest, _, err := c.conn.receive()
	if err != nil {
		return
	}
	var hello helloForm
	hello.parse(rest)
	if code := s.admit(c, hello); code != 0 {
		_ = c.conn.send(wireError, strconv.Itoa(code))
		return
	}
	defer s.leave(c)
	if c.conn.send(wireOK, s.welcome(c, hello)) != nil {
		return
	}
	for {
		verb, rest, _, err := c.conn.receive()
		if err != nil {
			return
		}
		var device int
		var bytes int64
		var inode uint64
		_, _ = fmt.Sscan(rest, &device, &bytes, &inode)
		code := 0
		switch verb {
		case wireAlloc:
			code = s.allocate(c, device, bytes, inode)
		case wireFree:
			s.mu.Lock()
			c.bytes[device] -= min(bytes, c.bytes[device])
			s.mu.Unlock()
		}
		if code != 0 {
			err = c.conn.send(wireError, strconv.Itoa(code))
		} else {
			err = c.conn.send(wireOK, "")
		}
		if err != nil {
			return
		}
	}
}

// admit says with which error a new client is refused; 0: it is in.
func (s *server) admit(c *client, hello helloForm) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log.line(tagServer, "Received new client request for {PID: %d, Context ID: %d}", c.pid, s.nextID)
	switch {
	case len(s.affected) > 0:
		return errMPSServerNotReady
	case len(s.clients) >= maxContexts(s.branch):
		return errMPSMaxClients
	}
	c.id = s.nextID
	s.nextID++
	for i := range s.devices {
		c.limits[i] = lower(s.limits[i], hello.limits(s)[i])
	}
	s.clients = append(s.clients, c)
	s.log.line(tagServer, "Client {PID: %d, Context ID: %d} connected", c.pid, c.id)
	return 0
}

// lower is the smaller of two limits of which 0 is none.
func lower(a, b uint64) uint64 {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// allocate decides one allocation: within the client's cap, and within what the GPU
// has left. CUDA_ERROR_OUT_OF_MEMORY is the client's alone.
func (s *server) allocate(c *client, device int, bytes int64, inode uint64) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case c.failed:
		return errMPSClientTerminated
	case device < 0 || device >= len(s.devices) || bytes < 0:
		return errNoDevice
	}
	c.inodes[inode] = device
	g := s.devices[device]
	if limit := c.limits[device]; limit > 0 && uint64(c.bytes[device])+uint64(bytes) > limit {
		return errOutOfMemory
	}
	if s.used(device, s.clients)+ServerBytes+bytes > g.TotalBytes-g.ReservedBytes {
		return errOutOfMemory
	}
	c.bytes[device] += bytes
	return 0
}

// used is what a GPU's memory is taken by, without this server's own: what the
// clients were granted, whether they have taken it yet or not, and what others hold.
func (s *server) used(device int, clients []*client) int64 {
	var sum int64
	known := map[uint64]bool{}
	for _, c := range clients {
		sum += c.bytes[device]
		for inode := range c.inodes {
			known[inode] = true
		}
	}
	for _, h := range holders(s.devices[device].UUID) {
		if !known[h.inode] {
			sum += h.bytes
		}
	}
	return sum
}

// leave forgets a client that has gone, and with the last one affected by a fault
// the fault.
func (s *server) leave(c *client) {
	s.mu.Lock()
	s.clients = slices.DeleteFunc(s.clients, func(o *client) bool { return o == c })
	s.log.line(tagServer, "Client {PID: %d, Context ID: %d} disconnected", c.pid, c.id)
	if s.affected[c] {
		delete(s.affected, c)
		if len(s.affected) == 0 {
			s.log.line(tagServer, "All clients affected by the fault have exited. Server status is ACTIVE")
		}
	}
	s.mu.Unlock()
	if s.stop() {
		os.Exit(0)
	}
}

// watchFaults raises the fatal fault that the steer file tells of, each time the
// server is signalled.
func (s *server) watchFaults(signals <-chan os.Signal) {
	for range signals {
		steer := readSteer(s.machine.sim, s.key)
		s.mu.Lock()
		if steer.FaultSeq <= s.faultSeq {
			s.mu.Unlock()
			continue
		}
		s.faultSeq = steer.FaultSeq
		s.fault(steer)
		s.mu.Unlock()
	}
}

// fault fails every client of the server's GPUs. Called with mu held.
func (s *server) fault(steer Steer) {
	code := steer.FaultCode
	if code == 0 {
		code = errIllegalAddress
	}
	for _, g := range s.devices {
		s.log.line(tagServer, "Client caused a fatal fault on device %s: %s. Server status is FAULT", g.UUID, Error(code))
	}
	for _, c := range s.clients {
		s.log.line(tagServer, "Client {PID: %d, Context ID: %d} status is INACTIVE", c.pid, c.id)
		s.affected[c] = true
		s.failClient(c, code)
	}
}

func (s *server) failAll(code int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.clients {
		s.failClient(c, code)
	}
}

// failClient gives a client a sticky error and takes back its memory: its contexts
// are destroyed, its process is not.
func (s *server) failClient(c *client, code int) {
	c.failed = true
	_ = c.conn.send(wireFault, strconv.Itoa(code))
	for device, g := range s.devices {
		for _, h := range holders(g.UUID) {
			if d, ok := c.inodes[h.inode]; ok && d == device {
				_ = os.Truncate(h.link, 0)
			}
		}
		c.bytes[device] = 0
	}
}

// terminate is terminate_client: 0, or a CUDA error. Called with mu held.
func (s *server) terminate(pid int) []string {
	found := false
	for _, c := range s.clients {
		if c.pid == pid && pid != 0 {
			found = true
			s.log.line(tagServer, "Terminating client {PID: %d, Context ID: %d}", c.pid, c.id)
			s.failClient(c, errMPSClientTerminated)
		}
	}
	if !found {
		return []string{"1"}
	}
	return []string{"0"}
}

// helloForm is what a client's environment asks for.
type helloForm struct {
	memory  string // CUDA_MPS_PINNED_DEVICE_MEM_LIMIT
	percent string // CUDA_MPS_ACTIVE_THREAD_PERCENTAGE

}

// format and parse put it in one packet; neither value can hold a newline that means
// anything.
func (h helloForm) format() string {
	return strings.Join([]string{strings.ReplaceAll(h.memory, "\n", " "), strings.ReplaceAll(h.percent, "\n", " ")}, "\n")
}

func (h *helloForm) parse(text string) {
	h.memory, h.percent, _ = strings.Cut(text, "\n")
}

func (h helloForm) limits(s *server) map[int]uint64 {
	uuids := make([]string, len(s.devices))
	for i, g := range s.devices {
		uuids[i] = g.UUID
	}
	return memLimits(h.memory, uuids, !readSteer(s.machine.sim, s.key).Variant("uuid-limit-ignored"))
}

// welcome tells a client what it got: per line, percentage, then a device each with
// uuid, limit and name.
func (s *server) welcome(c *client, hello helloForm) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.percent
	if own, ok := percent(hello.percent); ok && own < p {
		p = own
	}
	lines := []string{showPercent(p)}
	for i, g := range s.devices {
		lines = append(lines, fmt.Sprintf("%s %d %s", g.UUID, c.limits[i], g.Name))
	}
	return strings.Join(lines, "\n")
}
