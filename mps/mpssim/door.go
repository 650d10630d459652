package mpssim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// programPackage is what Build builds.
const programPackage = "github.com/berth-gpu/berth/mps/mpssim/program"

// Build builds the program to out, for callers inside this module, such as tests. The
// build is kept in the user's cache folder, so that a second one only copies.
func Build(ctx context.Context, out string) error {
	cache, err := os.UserCacheDir()
	if err != nil {
		return err
	}
	dir := filepath.Join(cache, "berth", "mpssim")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	built := filepath.Join(dir, "program")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", built, programPackage)
	// GOFLAGS of a test under the race detector would ask for cgo.
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build mpssim: %w\n%s", err, output)
	}
	return copyFile(built, out)
}

// Install puts the program in a simulated machine's bin folder under its three names.
// They are copies: a process finds its machine by its executable's path, and its name is
// the file's. It replaces each by rename, so running ones are not touched.
func Install(ctx context.Context, machineDir, binary string) error {
	bin := filepath.Join(machineDir, "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return err
	}
	for _, name := range []string{ControlName, ServerName, ClientName} {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := copyFile(binary, filepath.Join(bin, name)); err != nil {
			return fmt.Errorf("install %s: %w", name, err)
		}
	}
	return nil
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	return replace(to, 0o755, in)
}

// replace puts a file in place by rename.
func replace(path string, mode os.FileMode, content io.Reader) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = io.Copy(f, content)
	if err = errors.Join(err, f.Chmod(mode), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
