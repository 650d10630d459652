package mpssim

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// ui is one connection of the command utility.
type ui struct {
	conn       conn
	uid        int
	privileged bool          // came over control_privileged
	done       chan struct{} // closed when it is no longer served
}

// serveUI runs commands until the utility goes away.
func (d *daemon) serveUI(u *ui) {
	for {
		_, line, _, err := u.conn.receive()
		if err != nil {
			d.log.line(tagControl, "UI closed")
			return
		}
		d.hang()
		d.log.line(tagControl, "Cmd:%s", line)
		lines, answered := d.run(u, strings.Fields(line))
		for _, l := range lines {
			if l != "" {
				d.log.line(tagControl, "%s", l)
			}
		}
		// While the daemon is quitting a command is carried out and logged, and its
		// utility waits for an answer that never comes. [B]
		d.mu.Lock()
		answered = answered && !d.quitting
		d.mu.Unlock()
		if !answered {
			continue
		}
		text := ""
		for _, l := range lines {
			text += l + "\n"
		}
		if u.conn.send(wireOutput, text) != nil {
			d.log.line(tagControl, "UI closed")
			return
		}
	}
}

// command is one of the daemon's: what it prints.
type command func(d *daemon, u *ui, args []string) []string

var commands = map[string]command{
	"get_server_list":                      getServerList,
	"get_server_status":                    getServerStatus,
	"start_server":                         startServer,
	"shutdown_server":                      shutdownServer,
	"get_client_list":                      getClientList,
	"get_device_client_list":               getDeviceClientList,
	"ps":                                   ps,
	"terminate_client":                     terminateClient,
	"set_default_active_thread_percentage": setDefaultPercent,
	"get_default_active_thread_percentage": getDefaultPercent,
	"set_active_thread_percentage":         setPercent,
	"get_active_thread_percentage":         getPercent,
	"set_default_device_pinned_mem_limit":  setDefaultLimit,
	"get_default_device_pinned_mem_limit":  getDefaultLimit,
	"set_device_pinned_mem_limit":          setLimit,
	"get_device_pinned_mem_limit":          getLimit,
	"set_default_client_priority":          setDefaultPriority,
	"get_default_client_priority":          getDefaultPriority,
}

// run carries out one command line; answered is false when nothing is to be sent
// back, because quit has taken over.
func (d *daemon) run(u *ui, words []string) (lines []string, answered bool) {
	name := ""
	if len(words) > 0 {
		name, words = words[0], words[1:]
	}
	if name == "quit" {
		return d.quit(u, words)
	}
	run, ok := commands[name]
	if !ok || name == "get_server_status" && !hasServerStatus(d.branch) {
		return []string{fmt.Sprintf(`Unknown command "%s"`, name)}, true
	}
	return run(d, u, words), true
}

func arg(args []string, i int) string {
	if i < len(args) {
		return args[i]
	}
	return ""
}

// find is the server with a pid, and what to print when there is none.
func (d *daemon) find(word string) (*serverProc, []string) {
	pid := atoi(word)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.server == nil || d.server.pid != pid {
		return nil, []string{fmt.Sprintf("Server %d not found", pid)}
	}
	return d.server, nil
}

// busy says, to the log alone, that a server cannot be asked anything yet.
func (d *daemon) busy(s *serverProc) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s.ready {
		return false
	}
	d.log.line(tagControl, "Server %d is <busy>", s.pid)
	return true
}

// askOf asks the server with a pid.
func (d *daemon) askOf(word, question string) []string {
	s, missing := d.find(word)
	if s == nil {
		return missing
	}
	if d.busy(s) {
		return nil
	}
	return d.ask(s, question)
}

func getServerList(d *daemon, _ *ui, _ []string) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.server == nil {
		return nil
	}
	return []string{strconv.Itoa(d.server.pid)}
}

func getServerStatus(d *daemon, _ *ui, args []string) []string {
	s, missing := d.find(arg(args, 0))
	if s == nil {
		return missing
	}
	d.mu.Lock()
	ready := s.ready
	d.mu.Unlock()
	if !ready {
		return []string{"INITIALIZING"}
	}
	return d.ask(s, "status")
}

func startServer(d *daemon, u *ui, args []string) []string {
	_, _, ok := leadingInt(arg(args, 1))
	uid := atoi(arg(args, 1))
	if arg(args, 0) != "-uid" || !ok {
		return []string{"A user id (UID) is required to start a new server"}
	}
	if u.uid != 0 && uid != u.uid {
		return []string{fmt.Sprintf("Insufficient privileges for UID %d", u.uid)}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.quitting {
		d.request(request{uid: d.serverUser(uid)})
	}
	return nil
}

// shutdownServer ends a server: after its last client, or with -f at once, by
// SIGINT. A server that does not mind SIGINT, or one that is still starting and
// is told without -f, stays. [B]
func shutdownServer(d *daemon, u *ui, args []string) []string {
	s, missing := d.find(arg(args, 0))
	if s == nil {
		return missing
	}
	if u.uid != 0 {
		return []string{fmt.Sprintf("Insufficient privileges for UID %d", u.uid)}
	}
	if arg(args, 1) == "-f" {
		_ = s.cmd.Process.Signal(syscall.SIGINT)
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if s.ready {
		s.stopping = true
		_ = s.conn.send(wireShutdown, "")
	}
	return nil
}

func getClientList(d *daemon, _ *ui, args []string) []string {
	s, missing := d.find(arg(args, 0))
	if s == nil {
		return missing
	}
	d.mu.Lock()
	ready := s.ready
	d.mu.Unlock()
	if !ready {
		return nil // the one command that does not log <busy> [B]
	}
	return d.ask(s, "clients")
}

func getDeviceClientList(d *daemon, _ *ui, args []string) []string {
	if atoi(arg(args, 0)) > 0 || atoi(arg(args, 0)) < 0 {
		return d.askOf(args[0], "device_clients")
	}
	d.mu.Lock()
	s := d.server
	d.mu.Unlock()
	if s == nil || d.busy(s) {
		return nil
	}
	return d.ask(s, "device_clients")
}

// psHeader is in NVIDIA's documentation, as are the rows.
const psHeader = "PID       ID    SERVER    DEVICE             NAMESPACE    COMMAND"

func ps(d *daemon, _ *ui, args []string) []string {
	if arg(args, 0) == "-p" {
		s, missing := d.find(arg(args, 1))
		switch {
		case s == nil:
			return []string{missing[0], missing[0], ""} // twice, and an empty line [B]
		case d.busy(s):
			return []string{fmt.Sprintf("Server %d not found", s.pid), ""}
		}
		return append([]string{psHeader}, d.ask(s, "ps")...)
	}
	d.mu.Lock()
	s := d.server
	d.mu.Unlock()
	if s == nil || d.busy(s) {
		return []string{"Server not found"}
	}
	return append([]string{psHeader}, d.ask(s, "ps")...)
}

func terminateClient(d *daemon, _ *ui, args []string) []string {
	s, missing := d.find(arg(args, 0))
	if s == nil {
		return []string{missing[0], missing[0] + "!", "1"}
	}
	if d.busy(s) {
		return []string{fmt.Sprintf("Server %d not found!", s.pid), "1"}
	}
	return d.ask(s, "terminate "+strconv.Itoa(atoi(arg(args, 1))))
}

func setDefaultPercent(d *daemon, _ *ui, args []string) []string {
	p, ok := percent(arg(args, 0))
	d.mu.Lock()
	defer d.mu.Unlock()
	if ok {
		d.defaults.percent = p
	} else {
		d.log.line(tagControl, "Invalid percentage, expected between (0.0, 100.0]")
	}
	return []string{showPercent(d.defaults.percent)}
}

func getDefaultPercent(d *daemon, _ *ui, _ []string) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return []string{showPercent(d.defaults.percent)}
}

func setPercent(d *daemon, _ *ui, args []string) []string {
	return d.askOf(arg(args, 0), "set_percent "+arg(args, 1))
}

func getPercent(d *daemon, _ *ui, args []string) []string {
	return d.askOf(arg(args, 0), "get_percent")
}

func setDefaultLimit(d *daemon, _ *ui, args []string) []string {
	bytes := limitBytes(arg(args, 1))
	d.mu.Lock()
	defer d.mu.Unlock()
	n, isOrdinal := ordinal(arg(args, 0))
	switch {
	case !isOrdinal:
		d.defaults.byUUID[arg(args, 0)] = bytes
	case n < 0 || n > maxOrdinal:
		d.log.line(tagControl, "Invalid device ordinal!")
	case bytes == 0:
		delete(d.defaults.limits, int(n))
	default:
		d.defaults.limits[int(n)] = bytes
	}
	return nil
}

func getDefaultLimit(d *daemon, _ *ui, args []string) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var bytes uint64
	n, isOrdinal := ordinal(arg(args, 0))
	switch {
	case isOrdinal && (n < 0 || n > maxOrdinal):
		d.log.line(tagControl, "Invalid device ordinal!")
		return nil
	case isOrdinal:
		bytes = d.defaults.limits[int(n)]
	case readsUUIDKeys(d.branch):
		bytes = d.defaults.byUUID[arg(args, 0)]
	}
	if bytes == 0 {
		d.log.line(tagControl, "No default pinned memory limit set for the device!")
		return nil
	}
	return []string{showLimit(bytes)}
}

func setLimit(d *daemon, _ *ui, args []string) []string {
	return d.askOf(arg(args, 0), "set_limit "+arg(args, 1)+" "+arg(args, 2))
}

func getLimit(d *daemon, _ *ui, args []string) []string {
	return d.askOf(arg(args, 0), "get_limit "+arg(args, 1))
}

func setDefaultPriority(d *daemon, _ *ui, args []string) []string {
	p := atoi(arg(args, 0))
	if p != 0 && p != 1 {
		return []string{"Invalid priority value - must be 0 or 1!"}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.defaults.priority = p
	return nil
}

func getDefaultPriority(d *daemon, _ *ui, _ []string) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return []string{strconv.Itoa(d.defaults.priority)}
}

// quit ends the daemon once its server has gone: without limit, or after -t
// seconds by force. It needs the privileged socket, also from root. [B]
func (d *daemon) quit(u *ui, args []string) ([]string, bool) {
	if !u.privileged || u.uid != 0 && u.uid != d.uid {
		return []string{"Not enough privilege to execute quit command"}, true
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	first := !d.quitting
	d.quitting = true
	if n, _, ok := leadingInt(arg(args, 1)); arg(args, 0) == "-t" && ok {
		d.log.line(tagControl, "quit command issued with timeout of %d", n)
		time.AfterFunc(time.Duration(n)*time.Second, d.force)
	}
	for _, r := range d.queue {
		if d.server == nil || r.uid != d.server.uid {
			d.log.line(tagControl, "Removed Shm file at ")
		}
		if r.client != nil {
			r.client.conn.Close()
		}
	}
	d.queue = nil
	d.waiters = append(d.waiters, waiter{conn: u.conn, server: d.server, ended: d.ended})
	switch s := d.server; {
	case s == nil && first:
		d.finish()
	case s != nil && s.ready && !s.stopping:
		s.stopping = true
		_ = s.conn.send(wireShutdown, "")
	}
	return nil, false
}

// force is what quit -t does when its time is up.
func (d *daemon) force() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.server != nil {
		_ = d.server.cmd.Process.Signal(syscall.SIGINT)
	}
}

// finish ends the daemon. Called with mu held.
func (d *daemon) finish() {
	select {
	case d.done <- d.sticky:
	default:
	}
}
