package gpu_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/agent/gpu"
	"github.com/berth-gpu/berth/agent/gpu/nvmlsim"
)

// sim is the machine of this test process, which can load one library: all tests steer it, one after another.
var sim *nvmlsim.Machine

func TestMain(m *testing.M) {
	switch {
	case os.Getenv("GPU_TEST_HOLD") != "":
		hold(os.Getenv("GPU_TEST_HOLD"))
	case os.Getenv("GPU_TEST_OPEN") != "":
		_, err := gpu.Open(os.Getenv("GPU_TEST_OPEN"))
		fmt.Println(err)
	default:
		os.Exit(withMachine(m))
	}
}

func withMachine(m *testing.M) int {
	dir, err := os.MkdirTemp("", "gpu-test-*")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	library, err := nvmlsim.BuildCached(context.Background())
	if err != nil {
		panic(err)
	}
	if sim, err = nvmlsim.Create(filepath.Join(dir, "machine"), library, nvmlsim.Uniform(2, nvmlsim.H200)); err != nil {
		panic(err)
	}
	return m.Run()
}

// steer sets the machine up for a test, and as it was after it.
func steer(t testing.TB, change func(*nvmlsim.Spec)) nvmlsim.Spec {
	t.Helper()
	before, err := sim.Spec()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sim.Update(func(s *nvmlsim.Spec) { *s = before }); err != nil {
			t.Error(err)
		}
	})
	if err := sim.Update(change); err != nil {
		t.Fatal(err)
	}
	now, err := sim.Spec()
	if err != nil {
		t.Fatal(err)
	}
	return now
}

const soon = 300 * time.Millisecond // a call's deadline where a test waits for it to pass

// open opens NVML on the machine, with the limit of one call.
func open(t testing.TB, limit time.Duration) *gpu.NVML {
	t.Helper()
	n, err := gpu.OpenWith(gpu.Options{LibraryPath: sim.Library(), CallTimeout: limit, ReinitEvery: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// until polls for what happens elsewhere.
func until(t testing.TB, what string, happened func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(10 * time.Second); !happened(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("not within 10 s: %s", what)
		}
	}
}

// client is a process that holds memory of GPUs: this test binary under the name that the library looks for.
type client struct {
	pid  int
	kill func()
}

type holding struct {
	uuid string
	kind rune
	mib  int64
}

func start(t testing.TB, comm string, holdings ...holding) client {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), comm) // comm is the name of the file that was executed
	if err := os.Symlink(self, name); err != nil {
		t.Fatal(err)
	}
	var words []string
	for _, h := range holdings {
		words = append(words, fmt.Sprintf("%s %c %d", h.uuid, h.kind, h.mib<<20))
	}
	cmd := exec.Command(name)
	cmd.Env = append(os.Environ(), "GPU_TEST_HOLD="+strings.Join(append(words, ""), "\n"))
	in, err := cmd.StdinPipe() // its end ends the process, should this one die
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "holding\n" {
		t.Fatalf("client said %q: %v", line, err)
	}
	killed := false
	c := client{cmd.Process.Pid, func() {
		if !killed {
			killed = true
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			in.Close()
		}
	}}
	t.Cleanup(c.kill)
	return c
}

func hold(what string) {
	for line := range strings.Lines(what) {
		var uuid string
		var kind rune
		var bytes int64
		if _, err := fmt.Sscanf(line, "%s %c %d", &uuid, &kind, &bytes); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		if _, err := nvmlsim.Hold(uuid, kind, bytes); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	fmt.Println("holding")
	_, _ = os.Stdin.Read(make([]byte, 1))
}
