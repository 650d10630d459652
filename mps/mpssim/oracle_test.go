package mpssim

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// The differential test: the simulator and the real control daemon (R535, from
// Debian's nvidia-cuda-mps, fetched by scripts/setup, never part of this
// repository) are driven in the same way, and what can be seen of them is compared.

// oracleDir is the folder with the unpacked packages; the test is skipped without it.
func oracleDir(t *testing.T) string {
	t.Helper()
	dir := OracleDir()
	if _, err := os.Stat(filepath.Join(dir, "usr/bin", ControlName)); err != nil {
		t.Skipf("the real MPS control daemon is not in %s; `make test` fetches it where it can be had", dir)
	}
	return dir
}

// rig is one daemon under test, real or simulated, with its folders and environment.
type rig struct {
	t      *testing.T
	name   string
	dir    string // of pipe and log
	bin    string // of the control binary
	env    []string
	client []string // a CUDA program that calls cuInit
}

// rigs makes one of each. fakeServer, if not empty, is a shell script that stands in
// for the server of both.
func rigs(t *testing.T, fakeServer string) [2]*rig {
	t.Helper()
	oracle := oracleDir(t)
	real := &rig{t: t, name: "real", dir: tempDir(t)}
	real.bin = filepath.Join(real.dir, "bin") // a copy: other users cannot reach the cache
	mustRun(t, "cp", "-r", filepath.Join(oracle, "usr/bin"), real.bin)
	mustRun(t, "cp", "-r", filepath.Join(oracle, "usr/sbin"), filepath.Join(real.dir, "sbin"))
	mustRun(t, "cp", "-r", cudaLibraries(oracle), filepath.Join(real.dir, "lib"))
	path := filepath.Join(real.dir, "sbin")

	sim := &rig{t: t, name: "sim", dir: tempDir(t)}
	sim.bin = filepath.Join(sim.dir, "bin")
	if err := os.Mkdir(filepath.Join(sim.dir, "sim"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(sim.dir, "sim", "mps"), []byte("branch 535\nstart-delay 10ms\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := Install(t.Context(), sim.dir, binary); err != nil {
		t.Fatal(err)
	}
	simPath := sim.bin

	if fakeServer != "" {
		fake := tempDir(t)
		if err := os.WriteFile(filepath.Join(fake, ServerName), []byte("#!/bin/sh\n"+fakeServer+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		path, simPath = fake, fake
	}
	common := func(r *rig, path string) {
		r.env = []string{
			"PATH=" + path + ":/usr/bin:/bin", "CUDA_MPS_PIPE_DIRECTORY=" + r.dir + "/p", "CUDA_MPS_LOG_DIRECTORY=" + r.dir + "/l",
			"LD_LIBRARY_PATH=" + filepath.Join(real.dir, "lib"), raceEnv,
		}
		t.Cleanup(func() { killUnder(r) })
	}
	common(real, path)
	common(sim, simPath)
	real.client = []string{cudaProbe(t)}
	sim.client = []string{filepath.Join(sim.bin, ClientName), "run", "--for", "20s"}
	return [2]*rig{real, sim}
}

func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "b")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func mustRun(t *testing.T, argv ...string) {
	t.Helper()
	if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", argv, err, out)
	}
}

// cudaProbe builds the small C program that calls the real cuInit.
func cudaProbe(t *testing.T) string {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("gcc is not there to build the program that calls the real libcuda")
	}
	out := filepath.Join(tempDir(t), "cudaprobe")
	if err := BuildCudaProbe(t.Context(), out); err != nil {
		t.Fatal(err)
	}
	return out
}

// killUnder ends the daemon and servers that use a rig's pipe folder.
func killUnder(r *rig) {
	for _, e := range glob("/proc/[0-9]*/environ") {
		env, err := os.ReadFile(e)
		if err != nil || !strings.Contains(string(env), "CUDA_MPS_PIPE_DIRECTORY="+r.dir+"/p") {
			continue
		}
		var pid int
		if n, _ := fmt.Sscanf(e, "/proc/%d/", &pid); n == 1 && pid != os.Getpid() {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

func glob(pattern string) []string {
	found, _ := filepath.Glob(pattern)
	return found
}

// start runs the daemon in the background.
func (r *rig) start() {
	r.t.Helper()
	if out, errs, code := run(r.t, r.env, 0, "", filepath.Join(r.bin, ControlName), "-d"); out+errs != "" || code != 0 {
		r.t.Fatalf("%s -d: %q %q %d", r.name, out, errs, code)
	}
}

// command gives stdin to the control utility and says what can be seen of it.
func (r *rig) command(uid uint32, stdin string) string {
	r.t.Helper()
	out, errs, code := run(r.t, r.env, uid, stdin, filepath.Join(r.bin, ControlName))
	return r.normal(fmt.Sprintf("stdout %q stderr %q status %d", out, errs, code))
}

// log is the lines of a log file whose texts contain none of the words, without
// time, with pids numbered in order of appearance.
func (r *rig) log(file string, without ...string) string {
	text, err := os.ReadFile(filepath.Join(r.dir, "l", file))
	if err != nil {
		return err.Error()
	}
	var lines []string
next:
	for _, l := range strings.Split(r.normal(string(text)), "\n") {
		for _, w := range without {
			if strings.Contains(l, w) {
				continue next
			}
		}
		lines = append(lines, l)
	}
	return strings.Join(lines, "\n")
}

var (
	logTime    = regexp.MustCompile(`(?m)^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (Control|Other|Server) +\d+\]`)
	anyPid     = regexp.MustCompile(`(server|Server|SERVER|CLIENT) (\d{3,})`)
	anyNumber  = regexp.MustCompile(`\b\d{4,}\b`)
	startedNew = regexp.MustCompile(`Starting new server (\d+)`)
)

// normal takes out what differs between any two runs.
func (r *rig) normal(s string) string {
	s = strings.ReplaceAll(s, r.dir, "DIR")
	s = logTime.ReplaceAllString(s, "[$1]")
	return anyPid.ReplaceAllString(s, "$1 PID")
}

// files lists a folder's entries and their modes.
func (r *rig) files(name string) string {
	entries, err := os.ReadDir(filepath.Join(r.dir, name))
	if err != nil {
		return r.normal(err.Error())
	}
	var lines []string
	for _, e := range entries {
		fi, err := e.Info()
		if err != nil {
			r.t.Fatal(err)
		}
		lines = append(lines, fi.Mode().String()+" "+e.Name())
	}
	fi, err := os.Stat(filepath.Join(r.dir, name))
	if err != nil {
		r.t.Fatal(err)
	}
	return fi.Mode().String() + " .\n" + strings.Join(lines, "\n")
}

// waitLog waits until control.log has said something n times.
func (r *rig) waitLog(text string, n int) {
	r.t.Helper()
	eventually(r.t, fmt.Sprintf("%s: %q %d times in control.log", r.name, text, n), func() bool {
		return strings.Count(r.log("control.log"), text) >= n
	}, func() string { return r.log("control.log") })
}

// same runs both and compares.
func same(t *testing.T, rigs [2]*rig, what string, see func(r *rig) string) {
	t.Helper()
	real, sim := see(rigs[0]), see(rigs[1])
	if real != sim {
		t.Errorf("%s\n%s", what, difference(real, sim))
	}
}

// startedPid is the pid of the last server that the log says was started.
func (r *rig) startedPid() string {
	r.t.Helper()
	text, err := os.ReadFile(filepath.Join(r.dir, "l", "control.log"))
	if err != nil {
		r.t.Fatal(err)
	}
	all := startedNew.FindAllStringSubmatch(string(text), -1)
	if len(all) == 0 {
		r.t.Fatalf("%s: no server was started", r.name)
	}
	return all[len(all)-1][1]
}

// difference shows both texts from two lines before the first line that differs.
func difference(real, sim string) string {
	a, b := strings.Split(real, "\n"), strings.Split(sim, "\n")
	from := 0
	for from < len(a) && from < len(b) && a[from] == b[from] {
		from++
	}
	show := func(lines []string) string {
		return strings.Join(lines[max(0, min(from-2, len(lines))):min(from+12, len(lines))], "\n")
	}
	return fmt.Sprintf("from line %d\nreal:\n%s\nsimulated:\n%s", from+1, show(a), show(b))
}

// gone waits until the daemon has ended: the utility that said quit may return before.
func (r *rig) gone() {
	r.t.Helper()
	r.waitLog("Exit with status", 1)
	eventually(r.t, r.name+": the daemon's end", func() bool {
		lock, err := os.Open(filepath.Join(r.dir, "p", "control_lock"))
		if err != nil {
			return true
		}
		defer lock.Close()
		l := unix.Flock_t{Type: unix.F_WRLCK}
		return unix.FcntlFlock(lock.Fd(), unix.F_GETLK, &l) == nil && l.Type == unix.F_UNLCK
	})
}
