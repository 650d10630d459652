package mpssim

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// commandLines is what the utility is given, one run each. None of them brings a
// server; those are in TestDifferentialServers.
func commandLines() []string {
	lines := []string{
		"", "\n", "\n\n", "foo", "foo\nbar\n", "foo bar", "a\rb", "\tfoo", "foo\r", "foo\r\n", "help", "version", "quit_", "QUIT", `"`, `a"b`, "%s%d",
		"get_server_list", "get_server_list\n", "get_server_list extra", "  get_server_list  ", "GET_SERVER_LIST", "get_server_list;quit", "get_server_list\tx",
		"get_server_status", "get_server_status 5", "device_query", "device_query 5 --csv", "sm_partition add x 1", "lspart",
		"get_default_active_thread_percentage", "get_default_active_thread_percentage 3",
		"get_default_active_thread_percentage\nget_default_active_thread_percentage", "get_default_active_thread_percentage\r\n",
		"start_server", "start_server 5", "start_server -uid", "start_server -uid abc", "start_server -u 0", "start_server 0 -uid",
		"ps", "ps 5", "ps -x", "ps -p", "ps -p 5", "ps -p bad", "ps -p 5 6", "shutdown_server 5 -f", "shutdown_server -f",
		"terminate_client", "terminate_client 5", "terminate_client 5 6", "terminate_client abc def",
		strings.Repeat("x", 1000), "get_server_list " + strings.Repeat("x ", 500),
	}
	for _, v := range []string{
		"", "50", "33.3", "0.01", "1e1", "50%", "010", "abc", "-5", "0", "101", "100.0001", "99.99", "99.94", "99.95", "0x20", "0x1p3", "inf", "nan", "NAN", "infinity",
		"+7", "1_0", "5.", ".5", "1e", "1e+", "100", "100 20", "  40 ", "0.05", "0.25", "0.35", "12.345678", "1e-50", "1e400",
	} {
		lines = append(lines, "set_default_active_thread_percentage "+v)
	}
	for _, v := range []string{
		"2G", "2g", "2GB", "2GiB", "512M", "3m", "1024", "1.5G", "1 G", "1000K", "5T", "0", "0G", "G", "=1G", "0x10G", "-1G", "99999999G", "1025M", "1023M",
		"1M", "1", "", "10MB", "1k", "1GG", "1MG", "-1", "-5M", "1e3", "+2G", "007", " 3G", "18446744073709551615", "18446744073709551616G", "4294967296G", "0.5G",
		"--1G", "+-1G", "- 1G", "17179869184G", "-0G",
	} {
		lines = append(lines, "set_default_device_pinned_mem_limit 0 "+v+"\nget_default_device_pinned_mem_limit 0")
	}
	for _, dev := range []string{"0", "1", "31", "32", "-1", "abc", "GPU-x", "99999999999", "", "1.5", "01", "2x", "0x1", "+3", "--1", "4294967296", "4294967297", "99999999999999999999"} {
		lines = append(lines, "set_default_device_pinned_mem_limit "+dev+" 7G", "get_default_device_pinned_mem_limit "+dev)
	}
	for _, v := range []string{"1", "0", "2", "abc", "", "-1", "1x", "4294967297"} {
		lines = append(lines, "set_default_client_priority "+v+"\nget_default_client_priority")
	}
	for _, name := range []string{
		"get_client_list", "shutdown_server", "get_device_client_list", "set_active_thread_percentage", "get_active_thread_percentage",
		"set_device_pinned_mem_limit", "get_device_pinned_mem_limit", "get_server_status",
	} {
		for _, args := range []string{"", " 5", " abc", " 5 0 7G", " 99999999999", " -1", " 5x"} {
			lines = append(lines, name+args)
		}
	}
	return lines
}

func TestDifferentialCommands(t *testing.T) {
	both := rigs(t, "")
	both[0].start()
	both[1].start()
	lines := commandLines()
	for _, l := range lines {
		same(t, both, fmt.Sprintf("command %q", l), func(r *rig) string { return r.command(0, l) })
	}
	t.Logf("%d command lines compared", len(lines))
	same(t, both, "control.log", func(r *rig) string {
		r.waitLog("UI closed", len(lines))
		// The end of one connection and the beginning of the next come in any order.
		log := r.log("control.log")
		return fmt.Sprint(strings.Count(log, "Accepting connection..."), strings.Count(log, "UI closed"), "\n", r.log("control.log", "Accepting", "UI closed"))
	})
	same(t, both, "pipe folder", func(r *rig) string { return r.files("p") })
	same(t, both, "log folder", func(r *rig) string { return r.files("l") })
	same(t, both, "quit", func(r *rig) string { return r.command(0, "quit") })
	same(t, both, "after quit", func(r *rig) string {
		r.gone()
		return r.command(0, "foo") + r.files("p") + r.log("control.log", "Accepting", "UI closed")
	})
}

func TestDifferentialOtherUsers(t *testing.T) {
	needRoot(t)
	both := rigs(t, "exec sleep 1000")
	for _, r := range both {
		r.start()
	}
	lines := []string{
		"quit", "quit -t 1", "foo\nquit\nbar", "start_server -uid 0", "start_server -uid 65533", "start_server -uid -1", "shutdown_server 5", "shutdown_server 5 -f",
		"terminate_client 1 2", "set_default_active_thread_percentage 25", "set_default_device_pinned_mem_limit 0 1M\nget_default_device_pinned_mem_limit 0",
		"set_default_client_priority 1\nget_default_client_priority", "get_server_list", "ps",
	}
	for _, l := range lines {
		same(t, both, fmt.Sprintf("uid 65534: %q", l), func(r *rig) string { return r.command(65534, l) })
	}
	for _, r := range both {
		r.command(0, "start_server -uid 0")
		r.waitLog("Starting new server", 1)
	}
	for _, l := range []string{"shutdown_server PID", "shutdown_server PID -f", "start_server -uid 0", "start_server -uid 65534", "terminate_client PID 5", "set_active_thread_percentage PID 5"} {
		same(t, both, fmt.Sprintf("uid 65534, a server runs: %q", l), func(r *rig) string {
			return r.command(65534, strings.ReplaceAll(l, "PID", r.serverPid()))
		})
	}
	same(t, both, "control.log", func(r *rig) string {
		r.waitLog("Cmd:set_active_thread_percentage", 1)
		return anyNumber.ReplaceAllString(r.log("control.log", "UI closed", "Accepting"), "PID")
	})
	// control alone, as berth shows it to containers: no quit, also for root.
	for _, r := range both {
		if err := os.Mkdir(r.dir+"/c", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Link(r.dir+"/p/control", r.dir+"/c/control"); err != nil {
			t.Fatal(err)
		}
	}
	for _, l := range []string{"quit", "quit -t 0", "get_default_active_thread_percentage", "start_server -uid 0", "set_default_active_thread_percentage 100"} {
		same(t, both, fmt.Sprintf("over control alone: %q", l), func(r *rig) string {
			out, errs, code := run(t, append(r.env, "CUDA_MPS_PIPE_DIRECTORY="+r.dir+"/c"), 0, l, r.bin+"/"+ControlName)
			return fmt.Sprint(out, errs, code)
		})
	}
}

// serverPid is the first server of get_server_list.
func (r *rig) serverPid() string {
	r.t.Helper()
	out, _, _ := run(r.t, r.env, 0, "get_server_list", filepath.Join(r.bin, ControlName))
	pid, _, _ := strings.Cut(out, "\n")
	if pid == "" {
		r.t.Fatalf("%s: no server", r.name)
	}
	return pid
}

func TestDifferentialStart(t *testing.T) {
	both := rigs(t, "")
	control := func(r *rig, env []string, args ...string) string {
		out, errs, code := run(t, append(r.env, env...), 0, "", append([]string{filepath.Join(r.bin, ControlName)}, args...)...)
		return r.normal(fmt.Sprintf("stdout %q stderr %q status %d", out, errs, code))
	}
	for _, args := range [][]string{
		{}, {"-h"}, {"--help"}, {"-v"}, {"-V"}, {"-x"}, {"foo"}, {"-d", "-f"}, {"-f", "-d"}, {"-multiuser-server"}, {"-M"}, {"-d", "-x"}, {"-f", "-multiuser-server"},
		{"-x", "-d"}, {"-h", "-d"}, {"-d", "-h"}, {"--", "-d"}, {"-fd"}, {"-D"},
	} {
		same(t, both, fmt.Sprintf("arguments %q without a daemon", args), func(r *rig) string { return control(r, nil, args...) + r.files("p") })
	}
	for _, tc := range []struct {
		name string
		env  func(r *rig) []string
	}{
		{"missing parents", func(r *rig) []string {
			return []string{"CUDA_MPS_PIPE_DIRECTORY=" + r.dir + "/a/b", "CUDA_MPS_LOG_DIRECTORY=" + r.dir + "/c/d"}
		}},
		{"missing parent of the logs", func(r *rig) []string {
			return []string{"CUDA_MPS_PIPE_DIRECTORY=" + r.dir + "/p1", "CUDA_MPS_LOG_DIRECTORY=" + r.dir + "/c/d"}
		}},
		{"logs in a file", func(r *rig) []string {
			_ = os.WriteFile(r.dir+"/file", nil, 0o644)
			return []string{"CUDA_MPS_PIPE_DIRECTORY=" + r.dir + "/p2", "CUDA_MPS_LOG_DIRECTORY=" + r.dir + "/file"}
		}},
		{"pipe folder is a file", func(r *rig) []string {
			_ = os.WriteFile(r.dir+"/file", nil, 0o644)
			return []string{"CUDA_MPS_PIPE_DIRECTORY=" + r.dir + "/file", "CUDA_MPS_LOG_DIRECTORY=" + r.dir + "/l3"}
		}},
		{"a path of 87 bytes", func(r *rig) []string { return []string{"CUDA_MPS_PIPE_DIRECTORY=" + pathOf(r.dir, 87)} }},
		{"a path of 88 bytes", func(r *rig) []string { return []string{"CUDA_MPS_PIPE_DIRECTORY=" + pathOf(r.dir, 88)} }},
		{"a path of 120 bytes", func(r *rig) []string { return []string{"CUDA_MPS_PIPE_DIRECTORY=" + pathOf(r.dir, 120)} }},
		{"percentage and priority in the environment", func(r *rig) []string {
			return []string{"CUDA_MPS_PIPE_DIRECTORY=" + r.dir + "/p4", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50.5", "CUDA_MPS_CLIENT_PRIORITY=1", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2G"}
		}},
		{"bad ones", func(r *rig) []string {
			return []string{"CUDA_MPS_PIPE_DIRECTORY=" + r.dir + "/p5", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=abc", "CUDA_MPS_CLIENT_PRIORITY=7"}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			same(t, both, "start", func(r *rig) string {
				env := tc.env(r)
				text := control(r, env, "-d")
				pipe := strings.TrimPrefix(env[0], "CUDA_MPS_PIPE_DIRECTORY="+r.dir+"/")
				text += "\n" + r.files(pipe) + "\n" + r.files("l")
				for _, cmd := range []string{"get_default_active_thread_percentage\nget_default_client_priority\nget_default_device_pinned_mem_limit 0", "quit"} {
					out, errs, code := run(t, append(r.env, env...), 0, cmd, filepath.Join(r.bin, ControlName))
					text += fmt.Sprintf("\nstdout %q stderr %q status %d", out, errs, code)
				}
				return text
			})
		})
	}
	t.Run("a second instance", func(t *testing.T) {
		for _, r := range both {
			r.start()
		}
		for _, flag := range []string{"-d", "-f", "-h", "-x"} {
			same(t, both, flag, func(r *rig) string { return control(r, nil, flag) })
		}
		same(t, both, "arguments are ignored", func(r *rig) string { return control(r, nil, "quit") + control(r, nil, "get_server_list", "foo") })
		same(t, both, "files", func(r *rig) string { return r.files("p") })
	})
	t.Run("killed and started over stale files", func(t *testing.T) {
		for _, r := range both {
			killUnder(r)
			eventually(t, "the end", func() bool { return strings.Contains(r.command(0, "x"), "Cannot find") })
		}
		same(t, both, "files", func(r *rig) string { return r.files("p") })
		for _, r := range both {
			r.start()
		}
		same(t, both, "quit", func(r *rig) string {
			text := r.command(0, "get_server_list\nquit -t 1")
			r.gone()
			return text + r.files("p")
		})
	})
}

// pathOf is a path under dir with n bytes.
func pathOf(dir string, n int) string { return dir + "/" + strings.Repeat("x", n-len(dir)-1) }

func TestDifferentialForeground(t *testing.T) {
	both := rigs(t, "")
	for _, sig := range []syscall.Signal{0, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGUSR1} {
		same(t, both, "-f, then "+sig.String(), func(r *rig) string {
			os.RemoveAll(r.dir + "/l")
			p := startProcess(t, exec.Command(filepath.Join(r.bin, ControlName), "-f"), r.env, r.bin)
			p.says("To connect CUDA")
			r.command(0, "start_server -uid 0")
			p.says("Removed Shm file")
			if sig == 0 {
				r.command(0, "quit")
			} else {
				_ = p.cmd.Process.Signal(sig)
			}
			code := p.ends()
			return fmt.Sprintf("status %d\n%s\n%s\n%s", code, sorted(r.normal(p.output()), "Accepting", "UI closed"), r.files("p"), r.files("l"))
		})
	}
}

// sorted takes lines apart by their tag, since a server's come through a fifo and may
// be late.
func sorted(text string, without ...string) string {
	var control, server []string
next:
	for _, l := range strings.Split(text, "\n") {
		for _, w := range without {
			if strings.Contains(l, w) {
				continue next
			}
		}
		if strings.HasPrefix(l, "[Control]") {
			control = append(control, l)
		} else {
			server = append(server, l)
		}
	}
	return strings.Join(control, "\n") + "\n" + strings.Join(server, "\n")
}

// TestDifferentialServers has real servers, which fail without a GPU.
func TestDifferentialServers(t *testing.T) {
	both := rigs(t, "")
	same(t, both, "a client without a daemon", func(r *rig) string { return r.cuInit() })
	for _, r := range both {
		r.start()
	}
	for _, r := range both {
		r.command(0, "start_server -uid 0")
		r.waitLog("Removed Shm file", 1)
		if got := r.cuInit(); got != "805" {
			t.Errorf("%s: a client got %s", r.name, got)
		}
		r.waitLog("Removed Shm file", 2)
		r.command(0, "get_server_list")
		r.waitLog("UI closed", 2)
	}
	same(t, both, "control.log", func(r *rig) string { return r.log("control.log", "Accepting", "UI closed") })
	same(t, both, "server.log", func(r *rig) string { return r.log("server.log") })
	same(t, both, "quit with no server left", func(r *rig) string {
		out := r.command(0, "quit")
		r.gone()
		// After a failure the real utility ends with 0, and now and then with 1.
		return strings.TrimRight(out, "01") + r.log("control.log", "Accepting", "UI closed")
	})
	same(t, both, "a client over stale sockets", func(r *rig) string { return r.cuInit() })
}

// cuInit is the CUDA error that a program gets.
func (r *rig) cuInit() string {
	r.t.Helper()
	out, errs, _ := run(r.t, r.env, 0, "", r.client...)
	if r.name == "real" {
		return strings.TrimSpace(out) + errs
	}
	_, rest, _ := strings.Cut(out, "(")
	number, _, _ := strings.Cut(rest, ")")
	return number + errs
}

// untilGo has a server wait for a file that the test makes.
const untilGo = "while [ ! -e $CUDA_MPS_LOG_DIRECTORY/go ]; do sleep 0.02; done; "

// TestDifferentialHungServer has a server that never gets ready.
func TestDifferentialHungServer(t *testing.T) {
	for _, tc := range []struct {
		name, server string
		steps        []string // commands; PID is the server
	}{
		{"busy", "exec sleep 1000", []string{
			"start_server -uid 0", "get_server_list", "get_client_list PID", "get_device_client_list", "get_device_client_list PID", "ps", "ps -p PID", "terminate_client PID 5",
			"set_active_thread_percentage PID 50", "get_active_thread_percentage PID", "set_active_thread_percentage PID abc", "set_device_pinned_mem_limit PID 0 1G",
			"get_device_pinned_mem_limit PID 0", "set_device_pinned_mem_limit PID 77 1G", "start_server -uid 0", "shutdown_server PID", "get_server_list", "shutdown_server PID x",
			"shutdown_server PID -f", "quit",
		}},
		{"another user waits", "exec sleep 1000", []string{"start_server -uid 0", "start_server -uid 1", "start_server -uid 0", "get_server_list", "shutdown_server PID -f", "WAIT 2", "quit -t 0"}},
		{"quit by force", "exec sleep 1000", []string{"start_server -uid 0", "quit -t 0"}},
		{"quit by force later", "exec sleep 1000", []string{"start_server -uid 0", "quit -t 1"}},
		{"quit by force with a queue", "exec sleep 1000", []string{"start_server -uid 0", "start_server -uid 1", "quit -t 0"}},
		{"quit waits for the end: 0", untilGo + "exit 0", []string{"start_server -uid 0", "BACKGROUND quit", "GO"}},
		{"quit waits for the end: 3", untilGo + "exit 3", []string{"start_server -uid 0", "BACKGROUND quit", "GO"}},
		{"SIGINT is ignored", "trap '' INT; echo > $CUDA_MPS_LOG_DIRECTORY/x; " + untilGo + "exit 0",
			[]string{"start_server -uid 0", "FILE", "shutdown_server PID -f", "get_server_list", "BACKGROUND quit -t 0", "GO"}},
		{"killed", "exec sleep 1000", []string{"start_server -uid 0", "KILL", "start_server -uid 0", "KILL", "quit"}},
		{"failed, then good", "[ -e $CUDA_MPS_LOG_DIRECTORY/x ] || { : > $CUDA_MPS_LOG_DIRECTORY/x; exit 5; }; " + untilGo + "exit 0",
			[]string{"start_server -uid 0", "GONE", "start_server -uid 0", "BACKGROUND quit", "GO"}},
		{"no arguments, the daemon's environment", `echo "$# $(basename $0) $BERTH_MPS_ID $CUDA_MPS_PIPE_DIRECTORY $(id -u)" > $CUDA_MPS_LOG_DIRECTORY/x; exec sleep 1000`,
			[]string{"start_server -uid 0", "FILE", "quit -t 0"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			needRoot(t)
			both := rigs(t, tc.server)
			same(t, both, "steps", func(r *rig) string {
				r.env = append(r.env, "BERTH_MPS_ID=x")
				r.start()
				var text []string
				starts, gone := 0, 0
				pid := ""
				var background *process
				for _, step := range tc.steps {
					later, isLater := strings.CutPrefix(step, "BACKGROUND ")
					switch {
					case isLater:
						cmd := exec.Command(filepath.Join(r.bin, ControlName))
						cmd.Stdin = strings.NewReader(later)
						background = startProcess(t, cmd, r.env, r.bin)
						r.waitLog("Cmd:"+later, 1)
					case step == "GO":
						if err := os.WriteFile(r.dir+"/l/go", nil, 0o644); err != nil {
							t.Fatal(err)
						}
						text = append(text, fmt.Sprintf("in the background: status %d %s", background.ends(), background.output()))
					case step == "KILL":
						var n int
						_, _ = fmt.Sscan(pid, &n)
						_ = syscall.Kill(n, syscall.SIGKILL)
						gone++
						r.waitLog("exited with status", gone)
					case step == "GONE":
						gone++
						r.waitLog("exited with status", gone)
					case step == "WAIT 2":
						r.waitLog("Starting new server", 2)
					case step == "FILE":
						eventually(t, "the server's file", func() bool {
							b, _ := os.ReadFile(r.dir + "/l/x")
							return len(b) > 0
						})
						b, _ := os.ReadFile(r.dir + "/l/x")
						text = append(text, r.normal(string(b)))
						continue
					default:
						out := r.command(0, strings.ReplaceAll(step, "PID", pid))
						if pid != "" {
							out = strings.ReplaceAll(out, pid, "PID")
						}
						if step == "get_server_list" {
							out = anyNumber.ReplaceAllString(out, "PID")
						}
						text = append(text, step+": "+out)
					}
					if step == "start_server -uid 0" && (starts == 0 || gone >= starts) {
						starts++
						r.waitLog("Starting new server", starts)
						if tc.server != "" && !strings.Contains(tc.name, "failed") {
							pid = r.startedPid()
						}
					}
				}
				r.gone()
				log := r.log("control.log", "Accepting", "UI closed")
				if pid != "" {
					log = strings.ReplaceAll(log, pid, "PID")
				}
				return strings.Join(append(text, anyNumber.ReplaceAllString(log, "PID")), "\n")
			})
		})
	}
}

// TestDifferentialOneAtATime has a utility that sits there, and a connection that says
// nothing.
func TestDifferentialOneAtATime(t *testing.T) {
	both := rigs(t, "")
	for _, r := range both {
		r.start()
		in, stdin, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(filepath.Join(r.bin, ControlName))
		cmd.Stdin = in
		idle := startProcess(t, cmd, r.env, r.bin)
		in.Close()
		r.waitLog("NEW UI", 1)
		// The real one at times ends without a word, or even with 0; it is never served.
		if out, errs, _ := run(t, r.env, 0, "get_default_active_thread_percentage", filepath.Join(r.bin, ControlName)); out != "" ||
			errs != "" && errs != "Cannot send command to MPS control daemon process\n" {
			t.Errorf("%s beside an idle utility: %q %q", r.name, out, errs)
		}
		stdin.Close()
		if code := idle.ends(); code != 0 {
			t.Errorf("%s: the idle utility ended with %d", r.name, code)
		}
		r.waitLog("UI closed", 1)

		silent, err := dial(r.dir + "/p/control")
		if err != nil {
			t.Fatal(err)
		}
		accepted := strings.Count(r.log("control.log"), "Accepting")
		eventually(t, r.name+": the silent one accepted", func() bool {
			text := r.log("control.log")
			accepted = strings.Count(text, "Accepting")
			return accepted == 3
		}, func() string { return r.log("control.log") })
		cmd = exec.Command(filepath.Join(r.bin, ControlName))
		cmd.Stdin = strings.NewReader("get_default_active_thread_percentage")
		waits := startProcess(t, cmd, r.env, r.bin)
		silent.Close()
		waits.says("100.0")
	}
	same(t, both, "control.log", func(r *rig) string {
		r.waitLog("UI closed", 2)
		return r.log("control.log")
	})
}
