package mpssim

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// The parts of the simulator speak to each other in text packets over
// AF_UNIX SOCK_SEQPACKET: a verb, a space and words, or a verb, a newline and
// text. The real protocol is NVIDIA's own; only the sockets' type, names, modes
// and who connects when are as in life.

const maxPacket = 128 << 10 // bytes; a command line longer than this is cut

// conn is one packet connection.
type conn struct{ *net.UnixConn }

func dial(path string) (conn, error) {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	return conn{c}, err
}

// fromFile takes over an open socket.
func fromFile(fd int) (conn, error) {
	f := os.NewFile(uintptr(fd), "socket")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return conn{}, err
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return conn{}, errors.New("not a unix socket")
	}
	return conn{u}, nil
}

// send writes one packet, with descriptors that the other side gets copies of.
func (c conn) send(verb, rest string, fds ...int) error {
	msg := verb
	if rest != "" {
		sep := " "
		if verb == wireOutput {
			sep = "\n"
		}
		msg += sep + rest
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	_, _, err := c.WriteMsgUnix([]byte(msg), rights, nil)
	return err
}

// receive reads one packet: its verb, what follows it, and descriptors.
func (c conn) receive() (verb, rest string, fds []int, err error) {
	buf, oob := make([]byte, maxPacket), make([]byte, 128)
	n, oobn, _, _, err := c.ReadMsgUnix(buf, oob)
	if err != nil {
		return "", "", nil, err
	}
	if oobn > 0 {
		messages, err := unix.ParseSocketControlMessage(oob[:oobn])
		if err != nil {
			return "", "", nil, err
		}
		for _, m := range messages {
			got, err := unix.ParseUnixRights(&m)
			if err != nil {
				return "", "", nil, err
			}
			fds = append(fds, got...)
		}
	}
	verb, rest = string(buf[:n]), ""
	if i := strings.IndexAny(verb, " \n"); i >= 0 {
		verb, rest = verb[:i], verb[i+1:]
	}
	return verb, rest, fds, nil
}

// ended says whether the other side has gone and everything it said was read.
func (c conn) ended() bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return true
	}
	gone := false
	err = raw.Control(func(fd uintptr) {
		n, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		gone = n == 0 && err == nil
	})
	return gone || err != nil
}

// peer is who is on the other side, as the kernel says: the pid in this process's
// pid namespace (0 when it is not in it), the uid in this user namespace.
func (c conn) peer() (pid, uid int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, 0, err
	}
	var cred *unix.Ucred
	var sockErr error
	err = raw.Control(func(fd uintptr) {
		cred, sockErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err = errors.Join(err, sockErr); err != nil {
		return 0, 0, fmt.Errorf("SO_PEERCRED: %w", err)
	}
	return int(cred.Pid), int(cred.Uid), nil
}

// Verbs. The first packet of a connection says who speaks.
const (
	wireUI     = "UI"     // a command utility; then one packet per command line
	wireClient = "CLIENT" // a CUDA process that wants a server
	wireServer = "SERVER" // a server that has just started

	wireOutput = "OUTPUT" // daemon to UI: what a command prints
	wireExit   = "EXIT"   // daemon to UI: it ends with this status

	wireBusy = "BUSY" // daemon to UI: another one is being served

	wireOK    = "OK"
	wireError = "ERROR" // a CUDA error number

	wireDefaults = "DEFAULTS" // daemon to server: what was set when it was spawned
	wireReady    = "READY"    // server to daemon
	wireFatal    = "FATAL"    // server to daemon: it is about to fail
	wireAttach   = "ATTACH"   // daemon to server: pid, uid, and the client's socket
	wireShutdown = "SHUTDOWN" // daemon to server: exit after the last client
	wireAsk      = "ASK"      // daemon to server: a question; it answers with OUTPUT

	wireHello = "HELLO" // client to server: what its environment asks for
	wireAlloc = "ALLOC" // client to server: device, bytes, inode of its memfd
	wireFree  = "FREE"  // client to server: device, bytes
	wireFault = "FAULT" // server to client: a sticky error
)
