package engine_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/berth-gpu/berth/agent/engine"
)

// registry is an image registry on loopback that holds one image, and can be
// made to fail. Docker trusts 127.0.0.0/8 without TLS.
type registry struct {
	*httptest.Server
	id      string // of the image: the digest of its configuration
	asked   atomic.Int32
	failing atomic.Bool
}

func newRegistry(t *testing.T) *registry {
	t.Helper()
	var layer, zipped bytes.Buffer
	w := tar.NewWriter(&layer)
	content := []byte(rand.Text()) // so that no layer of another run is taken for it
	if err := w.WriteHeader(&tar.Header{Name: "file", Mode: 0o644, Size: int64(len(content))}); err != nil {
		t.Fatal(err)
	}
	w.Write(content)
	w.Close()
	z := gzip.NewWriter(&zipped)
	z.Write(layer.Bytes())
	z.Close()
	digest := func(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }
	config, err := json.Marshal(map[string]any{
		"architecture": "amd64", "os": "linux", "config": map[string]any{"Cmd": []string{"/file"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{digest(layer.Bytes())}},
	})
	if err != nil {
		t.Fatal(err)
	}
	blob := func(kind string, b []byte) map[string]any {
		return map[string]any{"mediaType": kind, "size": len(b), "digest": digest(b)}
	}
	const manifestType = "application/vnd.docker.distribution.manifest.v2+json"
	manifest, err := json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": manifestType,
		"config": blob("application/vnd.docker.container.image.v1+json", config),
		"layers": []any{blob("application/vnd.docker.image.rootfs.diff.tar.gzip", zipped.Bytes())},
	})
	if err != nil {
		t.Fatal(err)
	}
	blobs := map[string][]byte{digest(config): config, digest(zipped.Bytes()): zipped.Bytes()}
	r := &registry{id: digest(config)}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		name, rest, _ := strings.Cut(strings.TrimPrefix(req.URL.Path, "/v2/model/"), "/")
		switch {
		case req.URL.Path == "/v2/":
			r.asked.Add(1)
		case r.failing.Load():
			http.Error(w, `{"errors":[{"code":"DENIED","message":"the registry is closed"}]}`, http.StatusForbidden)
		case name == "manifests" && (rest == "1" || rest == digest(manifest)):
			w.Header().Set("Content-Type", manifestType)
			w.Header().Set("Docker-Content-Digest", digest(manifest))
			w.Write(manifest)
		case name == "blobs" && blobs[rest] != nil:
			w.Write(blobs[rest])
		default:
			http.NotFound(w, req)
		}
	}))
	t.Cleanup(r.Close)
	return r
}

func (r *registry) ref(tag string) string {
	return strings.TrimPrefix(r.URL, "http://") + "/model:" + tag
}

func TestPullBehaviours(t *testing.T) {
	all := []engine.Pull{engine.PullDefault, engine.PullAlways, engine.PullOnce, engine.PullPreferCached}
	for _, when := range all {
		t.Run(string(when), func(t *testing.T) {
			p, r := docker(t), newRegistry(t)
			ref := r.ref("1")
			defer p.RemoveImage(p.ctx, ref)
			var lines []string
			id, err := p.EnsureImage(p.ctx, ref, when, func(line string) { lines = append(lines, line) })
			if err != nil || id != r.id {
				t.Fatalf("not here: %s, %v; want %s", id, err, r.id)
			}
			if len(lines) == 0 {
				t.Error("no progress was told")
			}

			asked := r.asked.Load()
			if id, err := p.EnsureImage(p.ctx, ref, when, nil); err != nil || id != r.id {
				t.Errorf("again: %s, %v", id, err)
			}
			want := when == engine.PullDefault || when == engine.PullAlways
			if again := r.asked.Load() > asked; again != want {
				t.Errorf("asked the registry again: %v, want %v", again, want)
			}

			r.failing.Store(true)
			id, err = p.EnsureImage(p.ctx, ref, when, nil)
			if when == engine.PullAlways {
				if !errors.Is(err, engine.ErrCannotPull) || !strings.Contains(err.Error(), ref) {
					t.Errorf("with a closed registry: %s, %v", id, err)
				}
			} else if err != nil || id != r.id {
				t.Errorf("with a closed registry: %s, %v", id, err)
			}

			if _, err := p.EnsureImage(p.ctx, r.ref("2"), when, nil); !errors.Is(err, engine.ErrCannotPull) {
				t.Errorf("an image that is nowhere: %v", err)
			}
		})
	}
}

func TestAMissingImageIsNamedAtCreate(t *testing.T) {
	p := docker(t)
	r := p.request(nil, "wait")
	r.Container.Image = ptr("berth-test/none:1")
	if _, err := p.Create(p.ctx, r); !errors.Is(err, engine.ErrCannotCreate) || !strings.Contains(err.Error(), "berth-test/none:1") {
		t.Errorf("got %v", err)
	}
	if id, err := p.ImageID(p.ctx, "berth-test/none:1"); err != nil || id != "" {
		t.Errorf("its id: %q, %v", id, err)
	}
	if id, err := p.ImageID(p.ctx, image); err != nil || id == "" {
		t.Errorf("the probe's id: %q, %v", id, err)
	}
}
