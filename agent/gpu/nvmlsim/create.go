package nvmlsim

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// The driver's character nodes.
const (
	nvidiaMajor   = 195
	nvidiactlNode = 255 // minor of nvidiactl
	minorBlock    = 128 // a machine's: up to 64 GPUs, then nvidia-uvm
)

// Create makes a machine in dir, which must not exist or be empty. library is a
// built libnvidia-ml.so.1 (see Build), which is copied. GPUs of the spec with Minor 0
// get minors of their own, and those with no UUID or PCI bus id random ones.
func Create(dir, library string, spec Spec) (*Machine, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if err := spec.complete(); err != nil {
		return nil, err
	}
	if old, err := os.ReadDir(dir); err == nil && len(old) > 0 {
		return nil, fmt.Errorf("%s: not empty; remove it, or use Open for a machine that is there", dir)
	}
	m := &Machine{Dir: dir}
	for _, d := range []string{m.LibraryPath(), m.Bin(), m.Dev(), m.Sim()} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return nil, err
		}
	}
	if err := m.fill(library, spec); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return m, nil
}

func (m *Machine) fill(library string, spec Spec) error {
	if err := copyFile(library, m.Library()); err != nil {
		return err
	}
	if err := replace(filepath.Join(m.Sim(), "machine"), spec.Format()); err != nil {
		return err
	}
	if err := node(filepath.Join(m.Dev(), "nvidiactl"), nvidiaMajor, nvidiactlNode); err != nil {
		return err
	}
	uvm := minorBlock - 1
	if len(spec.GPUs) > 0 {
		uvm = spec.GPUs[0].Minor + maxGPUs
	}
	// The real nvidia-uvm has a dynamic major. No number of that range is safe to hand to containers: it may be
	// another driver's here.
	if err := node(filepath.Join(m.Dev(), "nvidia-uvm"), nvidiaMajor, uvm); err != nil {
		return err
	}
	for _, g := range spec.GPUs {
		if err := node(filepath.Join(m.Dev(), fmt.Sprintf("nvidia%d", g.Minor)), nvidiaMajor, g.Minor); err != nil {
			return err
		}
	}
	return nil
}

// complete fills in what the caller left to us.
func (s *Spec) complete() error {
	if s.Driver == "" {
		s.Driver, s.NVML, s.CUDA = "580.159.03", "13.580.159.03", 13000
	}
	first, err := firstMinor()
	if err != nil {
		return err
	}
	for i := range s.GPUs {
		g := &s.GPUs[i]
		if g.Minor == 0 {
			g.Minor = first + i
		}
		if g.UUID == "" {
			if g.UUID, err = randomUUID(); err != nil {
				return err
			}
		}
		if g.PCIBusID == "" {
			g.PCIBusID = fmt.Sprintf("00000000:%02X:00.0", 0x10+8*i%0xe0+8*i/0xe0)
		}
	}
	return s.validate()
}

// firstMinor picks a block of minors at random among 8190, above the 256 that a
// real driver can have. Nothing is written down outside the machine's folder: two machines of a host share a
// block once in 8190, and then a container's right to one GPU also reaches the other machine's node,
// which opens nothing (ENXIO).
func firstMinor() (int, error) {
	blocks := int64((1<<20 - 256) / minorBlock)
	n, err := rand.Int(rand.Reader, big.NewInt(blocks))
	if err != nil {
		return 0, err
	}
	return 256 + int(n.Int64())*minorBlock, nil
}

func randomUUID() (string, error) {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		return "", err
	}
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80 // RFC 9562, version 4
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:]), nil
}

func node(path string, major, minor int) error {
	if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(uint32(major), uint32(minor)))); err != nil {
		return fmt.Errorf("mknod %s c %d %d: %w (a simulated machine is made as root)", path, major, minor, err)
	}
	return os.Chmod(path, 0o666) // the driver's nodes are open to all; mknod obeyed the umask
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// The library's source travels in the package, so that a test builds what it was compiled with.
//
//go:embed lib
var source embed.FS

// Build compiles the library to out. header is the folder of nvml.h: pkg/nvml of the go-nvml module.
func Build(ctx context.Context, header, out string) error {
	if _, err := os.Stat(filepath.Join(header, "nvml.h")); err != nil {
		return fmt.Errorf("nvml.h: %w", err)
	}
	src, err := os.MkdirTemp("", "nvmlsim-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(src)
	if err := os.CopyFS(src, source); err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(src, "lib", "*.c"))
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return err
	}
	tmp := fmt.Sprintf("%s.%d", out, os.Getpid())
	defer os.Remove(tmp)
	args := append([]string{"-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-fvisibility=hidden",
		"-Wl,-soname,libnvidia-ml.so.1", "-I" + header, "-o", tmp}, files...)
	if text, err := exec.CommandContext(ctx, "gcc", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("gcc: %w\n%s", err, text)
	}
	return os.Rename(tmp, out)
}

// BuildCached builds the library into the user's cache folder, once for each content of
// its source, and returns the path. It asks the go command where nvml.h is, so it is for tests; `make` and
// berth use a library that was built before.
func BuildCached(ctx context.Context) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	err = fs.WalkDir(source, "lib", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := source.ReadFile(path)
		fmt.Fprintf(sum, "%s %d\n%s", path, len(text), text)
		return err
	})
	if err != nil {
		return "", err
	}
	out := filepath.Join(cache, "berth", "nvmlsim-"+hex.EncodeToString(sum.Sum(nil)[:8]), "libnvidia-ml.so.1")
	if _, err := os.Stat(out); err == nil {
		return out, nil
	}
	header, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		return "", fmt.Errorf("go list -m github.com/NVIDIA/go-nvml: %w", err)
	}
	dir := string(header[:max(len(header)-1, 0)])
	return out, Build(ctx, filepath.Join(dir, "pkg", "nvml"), out)
}
