package mpssim

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
)

// SampleImage is the root file system of an image made FROM scratch around the
// program, as a tar for `docker import`: /bin/cuda-client, and the control utility
// under its name, as NVIDIA's container toolkit puts it into GPU containers.
func SampleImage(ctx context.Context, binary string) (io.Reader, error) {
	program, err := os.ReadFile(binary)
	if err != nil {
		return nil, err
	}
	t := newImage()
	t.folder("bin", 0o755)
	t.folder("etc", 0o755)
	t.folder("run", 0o755)
	t.folder("tmp", 0o1777)
	t.file("etc/passwd", 0o644, []byte("root:x:0:0:root:/:/bin/cuda-client\nnobody:x:65534:65534:nobody:/:/bin/cuda-client\n"))
	t.file("etc/group", 0o644, []byte("root:x:0:\nnogroup:x:65534:\n"))
	t.file("bin/"+ClientName, 0o755, program)
	t.hardlink("bin/"+ControlName, "bin/"+ClientName)
	return t.reader(ctx)
}

// image writes a tar of a root file system.
type image struct {
	buf  bytes.Buffer
	tar  *tar.Writer
	seen map[string]bool
	err  error
}

func newImage() *image {
	t := &image{seen: map[string]bool{}}
	t.tar = tar.NewWriter(&t.buf)
	return t
}

func (t *image) header(h *tar.Header, content []byte) {
	if t.err != nil || t.seen[h.Name] {
		return
	}
	t.seen[h.Name] = true
	if t.err = t.tar.WriteHeader(h); t.err == nil {
		_, t.err = t.tar.Write(content)
	}
}

func (t *image) folder(name string, mode int64) {
	t.header(&tar.Header{Typeflag: tar.TypeDir, Name: strings.TrimSuffix(name, "/") + "/", Mode: mode}, nil)
}

// folders makes all folders that lead to a file.
func (t *image) folders(name string) {
	parts := strings.Split(path.Dir(name), "/")
	for i := range parts {
		t.folder(strings.Join(parts[:i+1], "/"), 0o755)
	}
}

func (t *image) file(name string, mode int64, content []byte) {
	t.header(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(content))}, content)
}

func (t *image) hardlink(name, to string) {
	t.header(&tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: to, Mode: 0o755}, nil)
}

func (t *image) reader(ctx context.Context) (io.Reader, error) {
	if t.err == nil {
		t.err = t.tar.Close()
	}
	if t.err != nil {
		return nil, fmt.Errorf("image tar: %w", t.err)
	}
	return &t.buf, ctx.Err()
}
