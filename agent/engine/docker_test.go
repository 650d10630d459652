package engine_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
	"github.com/berth-gpu/berth/agent/cgroup"
	"github.com/berth-gpu/berth/agent/engine"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"
)

// These tests run in the Docker engine of this machine, in an image that holds
// testdata/probe and nothing else. Each has an instance of its own, by which its
// containers, volumes and groups are removed.

var image = "berth-test/probe:" + strings.ToLower(rand.Text()[:12])

func TestMain(m *testing.M) {
	code := m.Run()
	if e, err := connect(); err == nil {
		if err := e.RemoveImage(context.Background(), image); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		e.Close()
	}
	os.Exit(code)
}

func connect() (*engine.Engine, error) {
	return engine.Open(context.Background(), os.Getenv("DOCKER_HOST"), zap.NewNop())
}

// loaded builds the probe and makes the image, once.
var loaded = sync.OnceValue(func() error {
	dir, err := os.MkdirTemp("", "berth-probe-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	build := exec.Command("go", "build", "-o", filepath.Join(dir, "probe"), "./testdata/probe")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	binary, err := os.ReadFile(filepath.Join(dir, "probe"))
	if err != nil {
		return err
	}
	var rootfs bytes.Buffer
	w := tar.NewWriter(&rootfs)
	if err := w.WriteHeader(&tar.Header{Name: "probe", Mode: 0o755, Size: int64(len(binary))}); err != nil {
		return err
	}
	w.Write(binary)
	if err := w.Close(); err != nil {
		return err
	}
	e, err := connect()
	if err != nil {
		return err
	}
	defer e.Close()
	id, err := e.LoadImage(context.Background(), image, &rootfs, []string{`ENTRYPOINT ["/probe"]`, "ENV NVIDIA_VISIBLE_DEVICES=all FROM_IMAGE=yes"})
	if err != nil {
		return err
	}
	if found, err := e.ImageID(context.Background(), image); err != nil || found != id {
		return fmt.Errorf("loaded as %q, and found as %q, %v", id, found, err)
	}
	return nil
})

// place is where a test's containers live.
type place struct {
	*testing.T
	*engine.Engine
	ctx      context.Context
	instance string
	groups   *cgroup.Tree
}

func docker(t *testing.T) *place {
	t.Helper()
	e, err := engine.Open(t.Context(), os.Getenv("DOCKER_HOST"), zaptest.NewLogger(t))
	if err != nil {
		t.Fatalf("these tests run real containers, and need a Docker engine: %v", err)
	}
	if err := loaded(); err != nil {
		t.Fatalf("the image of the probe: %v", err)
	}
	info, err := e.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	driver, err := cgroup.ParseDriver(info.CgroupDriver, info.CgroupVersion)
	if err != nil {
		t.Fatal(err)
	}
	p := &place{T: t, Engine: e, ctx: t.Context(), instance: "test-" + strings.ToLower(rand.Text()[:10])}
	if p.groups, err = cgroup.Open(driver, p.instance); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		list, err := e.List(ctx, p.instance)
		errs := []error{err}
		for _, c := range list {
			errs = append(errs, e.Kill(ctx, c.ID))
			if _, err := e.Wait(ctx, c.ID); err != nil {
				errs = append(errs, err)
			}
			errs = append(errs, e.Remove(ctx, c.ID), e.RemoveVolumes(ctx, p.instance, c.Labels.Task))
		}
		errs = append(errs, p.groups.RemoveAll(ctx), e.Close())
		if err := errors.Join(errs...); err != nil {
			t.Errorf("cleaning up: %v", err)
		}
	})
	return p
}

// request is a container "main" of a task "task" that runs the probe with args.
// change fills in what the test is about.
func (p *place) request(change func(*types.TaskDefinition, *types.ContainerDefinition, *engine.Request), args ...string) engine.Request {
	name := "main"
	task := &types.TaskDefinition{ContainerDefinitions: []types.ContainerDefinition{{Name: &name, Image: &image, Command: args}}}
	r := engine.Request{
		Task: task, Container: &task.ContainerDefinitions[0],
		Labels: engine.Labels{Instance: p.instance, Task: "task", Generation: 1, Container: name, Family: "family", Revision: 3, Cluster: "here"},
	}
	if change != nil {
		change(task, r.Container, &r)
	}
	return r
}

// start makes and starts the container.
func (p *place) start(r engine.Request) string {
	p.Helper()
	id, err := p.Create(p.ctx, r)
	if err != nil {
		p.Fatal(err)
	}
	if err := p.Start(p.ctx, id); err != nil {
		p.Fatal(err)
	}
	return id
}

// output runs the container to its end, which must be with 0, and returns what it wrote.
func (p *place) output(r engine.Request) string {
	p.Helper()
	id := p.start(r)
	c, err := p.wait(id)
	if err != nil {
		p.Fatal(err)
	}
	text := p.logs(id)
	if c.ExitCode != 0 {
		p.Fatalf("probe %v ended with %d: %s%s", r.Container.Command, c.ExitCode, text, c.Error)
	}
	return text
}

func (p *place) wait(id string) (engine.Container, error) {
	ctx, cancel := context.WithTimeout(p.ctx, time.Minute)
	defer cancel()
	return p.Wait(ctx, id)
}

func (p *place) logs(id string) string {
	p.Helper()
	r, err := p.Logs(p.ctx, id, engine.LogOptions{})
	if err != nil {
		p.Fatal(err)
	}
	defer r.Close()
	text, err := io.ReadAll(r)
	if err != nil {
		p.Fatal(err)
	}
	return string(text)
}

func (p *place) inspect(id string) engine.Container {
	p.Helper()
	c, err := p.Inspect(p.ctx, id)
	if err != nil {
		p.Fatal(err)
	}
	return c
}

// eventually waits for what must come true.
func (p *place) eventually(what string, ok func() bool) {
	p.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(time.Minute)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			p.Fatalf("still not so after a minute: %s", what)
		}
	}
}

// saying waits until the container has written text: then it is ready.
func (p *place) saying(id, text string) {
	p.Helper()
	p.eventually("the container says "+text, func() bool { return strings.Contains(p.logs(id), text) })
}

func ptr[T any](v T) *T { return &v }

// hasLines reports the lines of want that text lacks.
func hasLines(t *testing.T, text string, want ...string) {
	t.Helper()
	lines := strings.Split(text, "\n")
	for _, w := range want {
		found := false
		for _, l := range lines {
			found = found || l == w
		}
		if !found {
			t.Errorf("no line %q in:\n%s", w, text)
		}
	}
}
