package mps

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// What a control command can meet. The utility's exit status tells nothing of it:
// it is 0 whenever the daemon was reached, also for a command that was refused or
// that does not exist [B].
var (
	ErrNotRunning     = errors.New("no MPS control daemon answers on this folder")
	ErrWedged         = errors.New("the MPS control daemon does not answer")
	ErrUnknownCommand = errors.New("the MPS control daemon does not know the command")
	ErrNoServer       = errors.New("no such MPS server")
	ErrPrivilege      = errors.New("the MPS control daemon refused for want of privilege")
	ErrReply          = errors.New("reply of the MPS control daemon not understood")
)

const (
	// canary goes after each command. Its reply proves that the daemon took all of
	// them: some commands say nothing when they succeed and nothing when they fail.
	canary = "get_default_active_thread_percentage"
	// maxReplyBytes bounds what is kept of a reply.
	maxReplyBytes = 256 << 10
	// drainTime is how long output is awaited after the utility has ended or was
	// killed: a grandchild may hold its pipe open.
	drainTime = 200 * time.Millisecond
)

// Control speaks to one control daemon through the nvidia-cuda-mps-control
// utility, a command a line on its stdin. Commands are issued one at a time: an
// unanswered one may block those after it [B]. Methods may be called from any
// goroutine; each returns within the timeout after its turn has come.
type Control struct {
	binary  string
	client  string // folder for everything but quit
	pipe    string // quit is taken through control_privileged alone [B]
	env     []string
	timeout time.Duration
	turn    chan struct{}
}

// NewControl makes the Control of one GPU's daemon. env is the utility's whole
// environment but for the folder.
func NewControl(binary string, dirs Dirs, env []string, timeout time.Duration) *Control {
	return &Control{
		binary: binary, client: dirs.Client(), pipe: dirs.Pipe(),
		env: env, timeout: timeout, turn: make(chan struct{}, 1),
	}
}

// Probe asks the cheapest question: does the daemon answer through client/?
func (c *Control) Probe(ctx context.Context) error {
	_, err := c.ask(ctx)
	return err
}

// Servers lists the servers' pids: also one that is starting, and one that just
// failed until it is reaped [B].
func (c *Control) Servers(ctx context.Context) ([]int, error) {
	lines, err := c.ask(ctx, "get_server_list")
	if err != nil {
		return nil, err
	}
	return pids(lines)
}

// ServerStatus is the daemon's word for a server: INITIALIZING, ACTIVE or FAULT.
// R535 has no such command and answers ErrUnknownCommand.
func (c *Control) ServerStatus(ctx context.Context, server int) (string, error) {
	lines, err := c.ask(ctx, "get_server_status "+strconv.Itoa(server))
	if err != nil {
		return "", err
	}
	return word(lines)
}

// StartServer asks for a server for the user. It is made after the reply, if at
// all: whether it came up is to be seen in the server list and the log.
func (c *Control) StartServer(ctx context.Context, uid int) error {
	return c.silent(c.ask(ctx, "start_server -uid "+strconv.Itoa(uid)))
}

// ShutdownServer ends a server: when its clients have left, or with force at once.
func (c *Control) ShutdownServer(ctx context.Context, server int, force bool) error {
	command := "shutdown_server " + strconv.Itoa(server)
	if force {
		command += " -f"
	}
	return c.silent(c.ask(ctx, command))
}

// Clients lists the pids of a server's clients, in the host's pid namespace.
func (c *Control) Clients(ctx context.Context, server int) ([]int, error) {
	lines, err := c.ask(ctx, "get_client_list "+strconv.Itoa(server))
	if err != nil {
		return nil, err
	}
	return pids(lines)
}

// ClientProcess is one row of ps.
type ClientProcess struct {
	PID, Server int
	Device      string // the beginning of the GPU's UUID
	Command     string
}

// Processes lists the clients of all servers.
func (c *Control) Processes(ctx context.Context) ([]ClientProcess, error) {
	lines, err := c.ask(ctx, "ps")
	if errors.Is(err, ErrNoServer) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return parsePS(lines)
}

// TerminateClient ends the contexts of a client; the process lives on. The daemon
// answers when the server has finished.
func (c *Control) TerminateClient(ctx context.Context, server, client int) error {
	lines, err := c.ask(ctx, fmt.Sprintf("terminate_client %d %d", server, client))
	if err != nil {
		return err
	}
	if last := lines[max(0, len(lines)-1):]; len(last) == 0 || last[0] != "0" {
		return fmt.Errorf("terminate_client: %w: %q", ErrReply, strings.Join(lines, "; "))
	}
	return nil
}

// MemoryLimit is the default limit, as the daemon shows it, of the servers to
// come: "512M", "2G", "" for none. The daemon cuts what it shows to whole G from
// 1024M on [B].
func (c *Control) MemoryLimit(ctx context.Context) (string, error) {
	lines, err := c.ask(ctx, "get_default_device_pinned_mem_limit 0")
	if err != nil || len(lines) == 0 {
		return "", err
	}
	return word(lines)
}

// SetMemoryLimit sets the default limit of the servers to come and reads it back,
// which is the only sign that it was taken. 0 lifts it.
func (c *Control) SetMemoryLimit(ctx context.Context, mib int64) error {
	if mib < 0 {
		return fmt.Errorf("memory limit: %d MiB is negative", mib)
	}
	lines, err := c.ask(ctx,
		"set_default_device_pinned_mem_limit 0 "+mebibytes(mib),
		"get_default_device_pinned_mem_limit 0")
	if err != nil {
		return err
	}
	if got, want := strings.Join(lines, "; "), shownLimit(mib); got != want {
		return fmt.Errorf("memory limit: set to %s, and the daemon says %q: %w", mebibytes(mib), got, ErrReply)
	}
	return nil
}

// shownLimit is how the daemon shows a limit [B].
func shownLimit(mib int64) string {
	switch {
	case mib == 0:
		return ""
	case mib >= 1024:
		return strconv.FormatInt(mib/1024, 10) + "G"
	default:
		return mebibytes(mib)
	}
}

// ThreadPercent is the default percentage of the servers to come.
func (c *Control) ThreadPercent(ctx context.Context) (float64, error) {
	lines, err := c.ask(ctx, "get_default_active_thread_percentage")
	if err != nil {
		return 0, err
	}
	text, err := word(lines)
	if err != nil {
		return 0, err
	}
	return parsePercent(text)
}

// SetThreadPercent sets the default percentage of the servers to come and reads
// it back: the daemon ignores a value it does not like and shows the old one [B].
func (c *Control) SetThreadPercent(ctx context.Context, percent int) error {
	if percent < 1 || percent > 100 {
		return fmt.Errorf("active thread percentage: %d is not between 1 and 100", percent)
	}
	lines, err := c.ask(ctx,
		"set_default_active_thread_percentage "+strconv.Itoa(percent),
		"get_default_active_thread_percentage")
	if err != nil {
		return err
	}
	if len(lines) != 2 {
		return fmt.Errorf("active thread percentage: %w: %q", ErrReply, lines)
	}
	if got, err := parsePercent(lines[1]); err != nil || got != float64(percent) {
		return fmt.Errorf("active thread percentage: set to %d, and the daemon says %q: %w", percent, lines[1], ErrReply)
	}
	return nil
}

// setNormalPriority sets the default priority of the clients to come.
func (c *Control) setNormalPriority(ctx context.Context) error {
	lines, err := c.ask(ctx, "set_default_client_priority 0", "get_default_client_priority")
	if errors.Is(err, ErrUnknownCommand) {
		return nil
	}
	if err == nil && (len(lines) != 1 || lines[0] != "0") {
		err = fmt.Errorf("client priority: set to 0, and the daemon says %q: %w", strings.Join(lines, "; "), ErrReply)
	}
	return err
}

// Quit stops the daemon; servers that are not gone after the seconds are forced.
// Without -t it would wait for clients and servers without limit [B].
func (c *Control) Quit(ctx context.Context, seconds int) error {
	limit := time.Duration(seconds)*time.Second + c.timeout
	var lines []string
	err := errBrokeOff
	for attempt := 0; attempt < attempts && errors.Is(err, errBrokeOff); attempt++ {
		lines, err = c.run(ctx, c.pipe, limit, nil, "quit -t "+strconv.Itoa(seconds))
	}
	if err != nil {
		return err
	}
	return c.silent(lines, replyError(lines))
}

// survey is everything a periodic probe wants to know, from one process.
type survey struct {
	priority     string // "0" is normal
	memoryLimit  string // "" is none
	percent      float64
	servers      []int
	serverStatus string // of the recorded server; "" when unknown to this daemon or not asked
}

// survey asks for the defaults, the servers and the state of one server (0: none).
// began, if not nil, is called when the command's turn has come.
func (c *Control) survey(ctx context.Context, server int, began func()) (survey, error) {
	commands := []string{
		"get_default_client_priority",
		"get_default_device_pinned_mem_limit 0",
		"get_default_active_thread_percentage", // ends what may be empty before it
		"get_server_list",
	}
	if server != 0 {
		commands = append(commands, "get_server_status "+strconv.Itoa(server))
	}
	lines, err := c.exchange(ctx, began, commands...)
	if err != nil {
		return survey{}, err
	}
	return parseSurvey(lines)
}

func parseSurvey(lines []string) (survey, error) {
	var s survey
	odd := func() (survey, error) {
		return survey{}, fmt.Errorf("%w: %q", ErrReply, strings.Join(lines, "; "))
	}
	rest := lines
	if len(rest) > 0 && (rest[0] == "0" || rest[0] == "1") {
		s.priority, rest = rest[0], rest[1:]
	}
	if len(rest) > 0 && isLimit(rest[0]) {
		s.memoryLimit, rest = rest[0], rest[1:]
	}
	if len(rest) == 0 {
		return odd()
	}
	percent, err := parsePercent(rest[0])
	if err != nil {
		return odd()
	}
	s.percent = percent
	for _, line := range rest[1:] {
		pid, err := strconv.Atoi(line)
		switch {
		case err == nil:
			s.servers = append(s.servers, pid)
		case strings.HasPrefix(line, "Unknown command"):
			// R535 has no word for a server's state.
		case strings.HasPrefix(line, "Server ") && strings.HasSuffix(line, " not found"):
			// The server list, which has it or has it not, says the same.
		case line == "ACTIVE" || line == "INITIALIZING" || line == "FAULT":
			s.serverStatus = line
		default:
			return odd()
		}
	}
	return s, nil
}

// ask issues commands through client/ and returns their reply's lines.
func (c *Control) ask(ctx context.Context, commands ...string) ([]string, error) {
	lines, err := c.exchange(ctx, nil, commands...)
	if err != nil {
		return nil, err
	}
	return lines, replyError(lines)
}

// attempts is how often commands are issued whose reply broke off: the daemon
// drops connections, without a word, at the moment a server's start fails (17 of
// 100 times), and serves one utility at a time [B]. Every command berth issues may
// be issued again.
const attempts = 4

// exchange issues commands and the canary, again if need be, and returns the
// reply without the canary's.
func (c *Control) exchange(ctx context.Context, began func(), commands ...string) (lines []string, err error) {
	commands = append(commands, canary)
	for attempt := range attempts {
		if attempt > 0 {
			select {
			case <-time.After(time.Duration(attempt) * pollEvery):
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		if lines, err = c.run(ctx, c.client, c.timeout, began, commands...); err == nil {
			if lines, err = cutCanary(lines); err == nil {
				return lines, nil
			}
		}
		if !errors.Is(err, errBrokeOff) {
			return nil, err
		}
		began = nil
	}
	return nil, err
}

var errBrokeOff = fmt.Errorf("%w: it broke off", ErrReply)

func cutCanary(lines []string) ([]string, error) {
	last := len(lines) - 1
	if last < 0 {
		return nil, errBrokeOff
	}
	if _, err := parsePercent(lines[last]); err != nil {
		return nil, fmt.Errorf("%w: %q", errBrokeOff, strings.Join(lines, "; "))
	}
	return lines[:last], nil
}

// run makes one utility process, whatever happens gone or given up after limit.
func (c *Control) run(ctx context.Context, folder string, limit time.Duration, began func(), commands ...string) ([]string, error) {
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if began != nil {
		began()
	}
	ours, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var stdout, stderr capped
	cmd := exec.CommandContext(ours, c.binary)
	cmd.Env = append(c.env[:len(c.env):len(c.env)], envPipe+"="+folder)
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = drainTime
	stdin, err := filled(strings.Join(commands, "\n") + "\n")
	if err != nil {
		return nil, fmt.Errorf("run %s: %w", c.binary, err)
	}
	cmd.Stdin = stdin
	err = cmd.Start()
	stdin.Close()
	if err != nil {
		return nil, fmt.Errorf("run %s: %w", c.binary, err)
	}
	ended := make(chan struct{})
	// Waited for below, but for a utility that SIGKILL does not end (state D): it
	// is left to the kernel, with this goroutine.
	go func() { cmd.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-ours.Done():
		select {
		case <-ended:
		case <-time.After(2 * drainTime):
			return nil, fmt.Errorf("%w: the control utility, pid %d, does not end after SIGKILL", ErrWedged, cmd.Process.Pid)
		}
	}
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case ours.Err() != nil:
		return nil, fmt.Errorf("%w within %v", ErrWedged, limit)
	case strings.Contains(stderr.String(), "Cannot find MPS control daemon process"):
		return nil, ErrNotRunning
	case strings.Contains(stderr.String(), "Cannot send command"):
		return nil, fmt.Errorf("%w: the daemon serves another utility", errBrokeOff)
	}
	return replyLines(stdout.String()), nil
}

// filled is a pipe that holds the text and then ends; a pipe takes 64 KiB.
func filled(text string) (*os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	_, err = w.WriteString(text)
	if err = errors.Join(err, w.Close()); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// capped keeps the beginning of what is written to it. The buffer is not embedded:
// its ReadFrom would go round the cap.
type capped struct{ kept bytes.Buffer }

func (c *capped) Write(b []byte) (int, error) {
	if room := maxReplyBytes - c.kept.Len(); room > 0 {
		c.kept.Write(b[:min(room, len(b))])
	}
	return len(b), nil
}

func (c *capped) String() string { return c.kept.String() }

func (c *Control) silent(lines []string, err error) error {
	if err == nil && len(lines) > 0 {
		err = fmt.Errorf("%w: %q", ErrReply, strings.Join(lines, "; "))
	}
	return err
}
