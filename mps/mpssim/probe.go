package mpssim

import (
	"context"
	"debug/elf"
	_ "embed"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// OracleDir is the folder with the real nvidia-cuda-mps and libcuda1 of R535, unpacked
// from Debian's packages: BERTH_MPS_ORACLE, or mps-oracle in berth's cache folder. It
// need not be there.
func OracleDir() string {
	if dir := os.Getenv("BERTH_MPS_ORACLE"); dir != "" {
		return dir
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	return filepath.Join(cache, "berth", "mps-oracle")
}

// cudaLibraries is the oracle's folder with libcuda.so.1.
func cudaLibraries(oracle string) string {
	return filepath.Join(oracle, "usr/lib/x86_64-linux-gnu/nvidia/current")
}

//go:embed cudaprobe/cudaprobe.c
var cudaProbeSource string

// BuildCudaProbe compiles the program that calls cuInit of the libcuda.so.1 it finds
// and prints the number it gets; see cudaprobe/cudaprobe.c. It needs gcc.
func BuildCudaProbe(ctx context.Context, out string) error {
	cmd := exec.CommandContext(ctx, "gcc", "-O1", "-Wall", "-Werror", "-x", "c", "-", "-o", out, "-ldl")
	cmd.Stdin = strings.NewReader(cudaProbeSource)
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build cudaprobe: %w\n%s", err, output)
	}
	return nil
}

// CudaProbeImage is the root file system, as a tar, of an image made FROM scratch in
// which /bin/cudaprobe runs the oracle's real libcuda: the probe, libcuda, and what they
// are linked with, taken from this machine. `cudaprobe` prints the number of cuInit and
// ends; run it again (docker exec) as often as wanted.
func CudaProbeImage(ctx context.Context, oracle string) (io.Reader, error) {
	dir, err := os.MkdirTemp("", "berth-cudaprobe")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	probe := filepath.Join(dir, "cudaprobe")
	if err := BuildCudaProbe(ctx, probe); err != nil {
		return nil, err
	}
	t := newImage()
	for _, name := range []string{"run", "etc"} {
		t.folder(name, 0o755)
	}
	t.folder("tmp", 0o1777)
	t.file("etc/passwd", 0o644, []byte("root:x:0:0:root:/:/bin/cudaprobe\n"))
	program, err := os.ReadFile(probe)
	if err != nil {
		return nil, err
	}
	t.folders("bin/cudaprobe")
	t.file("bin/cudaprobe", 0o755, program)

	loader, err := interpreter(probe)
	if err != nil {
		return nil, err
	}
	libcuda := filepath.Join(cudaLibraries(oracle), "libcuda.so.1")
	needed, err := closure(probe, libcuda)
	if err != nil {
		return nil, err
	}
	needed[strings.TrimPrefix(loader, "/")] = loader
	needed["usr/lib/x86_64-linux-gnu/libcuda.so.1"] = libcuda
	for name, from := range needed {
		content, err := os.ReadFile(from)
		if err != nil {
			return nil, err
		}
		t.folders(name)
		t.file(name, 0o755, content)
	}
	return t.reader(ctx)
}

// interpreter is the dynamic loader a program names.
func interpreter(path string) (string, error) {
	f, err := elf.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	section := f.Section(".interp")
	if section == nil {
		return "", fmt.Errorf("%s names no dynamic loader", path)
	}
	data, err := section.Data()
	return strings.TrimRight(string(data), "\x00"), err
}

// libraryDirs is where a shared library of this machine's C library is looked for.
var libraryDirs = []string{"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/usr/lib"}

// closure is all libraries that objects are linked with, to the places in an image where
// the loader finds them.
func closure(objects ...string) (map[string]string, error) {
	found := map[string]string{}
	for len(objects) > 0 {
		f, err := elf.Open(objects[0])
		if err != nil {
			return nil, err
		}
		names, err := f.ImportedLibraries()
		f.Close()
		if err != nil {
			return nil, err
		}
		objects = objects[1:]
		for _, name := range names {
			place := "usr/lib/x86_64-linux-gnu/" + name
			if found[place] != "" {
				continue
			}
			path, err := library(name)
			if err != nil {
				return nil, err
			}
			found[place] = path
			objects = append(objects, path)
		}
	}
	return found, nil
}

func library(name string) (string, error) {
	for _, dir := range libraryDirs {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("library %s: %w (looked in %s)", name, os.ErrNotExist, strings.Join(libraryDirs, ", "))
}
