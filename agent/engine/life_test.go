package engine_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
	"github.com/berth-gpu/berth/agent/cgroup"
	"github.com/berth-gpu/berth/agent/engine"
	dockercontainer "github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"
	"go.uber.org/zap"
)

func TestOpenSaysWhatToDoWhereNoEngineAnswers(t *testing.T) {
	_, err := engine.Open(t.Context(), "unix:///nowhere/docker.sock", zap.NewNop())
	if err == nil || !strings.Contains(err.Error(), "unix:///nowhere/docker.sock") || !strings.Contains(err.Error(), "systemctl start docker") {
		t.Errorf("got %v", err)
	}
}

func TestInfo(t *testing.T) {
	p := docker(t)
	info, err := p.Info(p.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if info.Version == "" || info.API == "" || info.RootDir == "" || !slices.Contains(info.Runtimes, info.DefaultRuntime) {
		t.Errorf("got %+v", info)
	}
	if info.CDI && len(info.CDISpecDirs) == 0 {
		t.Errorf("CDI without folders: %+v", info)
	}
}

func TestCreateTwiceMakesOneContainer(t *testing.T) {
	p := docker(t)
	r := p.request(nil, "wait")
	first := p.start(r)
	again, err := p.Create(p.ctx, r)
	if err != nil || again != first {
		t.Fatalf("second create: %s, %v; first: %s", again, err, first)
	}
	if c := p.inspect(first); c.Name != r.Labels.Name() || c.Labels != r.Labels || !c.Alive() {
		t.Errorf("got %+v", c)
	}
	r.Labels.Generation = 2
	second, err := p.Create(p.ctx, r)
	if err != nil || second == first {
		t.Fatalf("next generation: %s, %v", second, err)
	}
	list, err := p.List(p.ctx, p.instance)
	if err != nil || len(list) != 2 || list[0].ID != first || list[1].ID != second || list[1].State != engine.Created {
		t.Fatalf("list: %+v, %v", list, err)
	}
	if list, err := p.List(p.ctx, "another-"+p.instance); err != nil || len(list) != 0 {
		t.Errorf("another instance's list: %+v, %v", list, err)
	}
}

func TestAStrangersContainerOfTheSameNameIsLeftAlone(t *testing.T) {
	p := docker(t)
	r := p.request(nil, "wait")
	raw, err := client.NewClientWithOpts(client.WithHost(p.Host()), client.WithAPIVersionNegotiation())
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	made, err := raw.ContainerCreate(p.ctx, &dockercontainer.Config{Image: image, Labels: map[string]string{engine.LabelInstance: "stranger"}}, nil, nil, nil, r.Labels.Name())
	if err != nil {
		t.Fatal(err)
	}
	stranger := made.ID
	defer p.Remove(p.ctx, stranger)
	_, err = p.Create(p.ctx, r)
	if !errors.Is(err, engine.ErrCannotCreate) || !strings.Contains(err.Error(), stranger[:12]) || !strings.Contains(err.Error(), r.Labels.Name()) {
		t.Errorf("create: %v", err)
	}
	if c := p.inspect(stranger); c.State != engine.Created {
		t.Errorf("the stranger's is %s", c.State)
	}
}

func TestStopTerminatesThenKills(t *testing.T) {
	for _, test := range []struct {
		name, command string
		timeout       time.Duration
		exit          int
	}{
		{"one that ends at TERM", "wait", time.Minute, 0},
		{"one that ignores TERM", "stubborn", 200 * time.Millisecond, 137},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := docker(t)
			id := p.start(p.request(nil, test.command))
			p.saying(id, map[string]string{"wait": "waiting", "stubborn": "ready"}[test.command])
			c, err := p.Stop(p.ctx, id, test.timeout)
			if err != nil || c.State != engine.Exited || c.ExitCode != test.exit || c.Reason() != "" {
				t.Errorf("stopped: %+v, %v", c, err)
			}
			if c.StartedAt.IsZero() || c.FinishedAt.Before(c.StartedAt) {
				t.Errorf("times: %v to %v", c.StartedAt, c.FinishedAt)
			}
			if _, err := p.Stop(p.ctx, id, time.Second); err != nil {
				t.Errorf("stopping it again: %v", err)
			}
			if err := p.Remove(p.ctx, id); err != nil {
				t.Error(err)
			}
			if err := p.Remove(p.ctx, id); err != nil {
				t.Errorf("removing it again: %v", err)
			}
			for name, err := range map[string]error{
				"inspect": second(p.Inspect(p.ctx, id)), "start": p.Start(p.ctx, id), "kill": p.Kill(p.ctx, id), "wait": second(p.Wait(p.ctx, id)),
			} {
				if !errors.Is(err, engine.ErrVanished) {
					t.Errorf("%s of a removed one: %v", name, err)
				}
			}
		})
	}
}

func second[T any](_ T, err error) error { return err }

func TestRemoveLeavesARunningContainer(t *testing.T) {
	p := docker(t)
	id := p.start(p.request(nil, "wait"))
	if err := p.Remove(p.ctx, id); !errors.Is(err, engine.ErrCannotRemove) {
		t.Errorf("got %v", err)
	}
	if c := p.inspect(id); c.State != engine.Running {
		t.Errorf("it is %s", c.State)
	}
}

func TestAKilledProcessIsAnExitAndStaysOne(t *testing.T) {
	p := docker(t)
	id := p.start(p.request(nil, "wait"))
	pid := p.inspect(id).PID
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c, err := p.wait(id)
	if err != nil || c.State != engine.Exited || c.ExitCode != 137 || c.OOMKilled || c.RestartCount != 0 || c.Reason() != "" {
		t.Errorf("killed: %+v, %v", c, err)
	}
}

func TestExitCodeAndStartError(t *testing.T) {
	p := docker(t)
	id := p.start(p.request(nil, "exit", "7"))
	if c, err := p.wait(id); err != nil || c.ExitCode != 7 || c.Reason() != "" {
		t.Errorf("exit 7: %+v, %v", c, err)
	}
	id, err := p.Create(p.ctx, p.request(func(_ *types.TaskDefinition, c *types.ContainerDefinition, r *engine.Request) {
		c.EntryPoint, r.Labels.Generation = []string{"/missing"}, 2
	}))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Start(p.ctx, id); !errors.Is(err, engine.ErrCannotStart) {
		t.Errorf("start of a missing program: %v", err)
	}
	if c := p.inspect(id); !strings.HasPrefix(c.Reason(), "CannotStartContainerError: ") || c.Started() {
		t.Errorf("it says %q: %+v", c.Reason(), c)
	}
}

func TestOutOfMemoryIsNamed(t *testing.T) {
	p := docker(t)
	id := p.start(p.request(func(_ *types.TaskDefinition, c *types.ContainerDefinition, _ *engine.Request) {
		c.Memory = ptr[int32](32)
		c.LinuxParameters = &types.LinuxParameters{MaxSwap: ptr[int32](0)}
	}, "eat", "64"))
	c, err := p.wait(id)
	if err != nil || !c.OOMKilled || c.ExitCode != 137 || c.Reason() != "OutOfMemoryError: Container killed due to memory usage" {
		t.Errorf("got %+v, %v", c, err)
	}
}

func TestHealthCheckStates(t *testing.T) {
	p := docker(t)
	id := p.start(p.request(func(_ *types.TaskDefinition, c *types.ContainerDefinition, _ *engine.Request) {
		c.HealthCheck = &types.HealthCheck{Command: []string{"CMD", "/probe", "exists", "/healthy"}, Interval: ptr[int32](1), Timeout: ptr[int32](5), Retries: ptr[int32](1), StartPeriod: ptr[int32](0)}
	}, "touch-at-usr1", "/healthy"))
	if h := p.inspect(id).Health; h != "UNKNOWN" {
		t.Errorf("at the start: %q", h)
	}
	p.saying(id, "ready")
	for _, step := range []struct{ signal, health string }{{"USR1", "HEALTHY"}, {"USR2", "UNHEALTHY"}} {
		if err := p.Signal(p.ctx, id, step.signal); err != nil {
			t.Fatal(err)
		}
		p.eventually("health is "+step.health, func() bool { return p.inspect(id).Health == step.health })
	}
}

func TestProcessesOfAContainer(t *testing.T) {
	p := docker(t)
	id := p.start(p.request(func(_ *types.TaskDefinition, c *types.ContainerDefinition, _ *engine.Request) {
		c.LinuxParameters = &types.LinuxParameters{InitProcessEnabled: ptr(true)}
	}, "wait"))
	p.saying(id, "waiting")
	pids, err := p.PIDs(p.ctx, id)
	if err != nil || len(pids) != 2 || !slices.Contains(pids, p.inspect(id).PID) {
		t.Fatalf("init and probe are %v, %v; first is %d", pids, err, p.inspect(id).PID)
	}
	for _, pid := range pids {
		if owner, err := cgroup.ContainerID(pid); err != nil || owner != id {
			t.Errorf("process %d is of %q, %v; want %s", pid, owner, err, id)
		}
	}
	if _, err := p.Stop(p.ctx, id, time.Minute); err != nil {
		t.Fatal(err)
	}
	if pids, err := p.PIDs(p.ctx, id); err != nil || len(pids) != 0 {
		t.Errorf("after its end: %v, %v", pids, err)
	}
}

func TestLogs(t *testing.T) {
	p := docker(t)
	id := p.start(p.request(nil, "wait"))
	p.saying(id, "on stderr")
	if err := p.Signal(p.ctx, id, ""); err != nil {
		t.Fatal(err)
	}
	if _, err := p.wait(id); err != nil {
		t.Fatal(err)
	}
	hasLines(t, p.logs(id), "waiting", "and on stderr", "terminated")
	r, err := p.Logs(p.ctx, id, engine.LogOptions{Tail: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if text, err := io.ReadAll(r); err != nil || string(text) != "terminated\n" {
		t.Errorf("the last line: %q, %v", text, err)
	}
}

func TestLogsFollowToTheEnd(t *testing.T) {
	for _, tty := range []bool{false, true} {
		t.Run(map[bool]string{false: "plain", true: "terminal"}[tty], func(t *testing.T) {
			p := docker(t)
			id := p.start(p.request(func(_ *types.TaskDefinition, c *types.ContainerDefinition, _ *engine.Request) {
				c.PseudoTerminal = &tty
			}, "wait"))
			r, err := p.Logs(p.ctx, id, engine.LogOptions{Follow: true})
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			lines := bufio.NewScanner(r)
			var got []string
			for lines.Scan() {
				got = append(got, strings.TrimSpace(lines.Text()))
				if len(got) == 2 {
					if err := p.Signal(p.ctx, id, "TERM"); err != nil {
						t.Fatal(err)
					}
				}
			}
			if err := lines.Err(); err != nil || len(got) != 3 || got[2] != "terminated" {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}

func TestClosingFollowedLogsEndsThem(t *testing.T) {
	p := docker(t)
	id := p.start(p.request(nil, "wait"))
	p.saying(id, "waiting")
	r, err := p.Logs(p.ctx, id, engine.LogOptions{Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, r)
		ended <- err
	}()
	r.Close()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("the reader still waits")
	}
}

func TestACallEndsWithItsContext(t *testing.T) {
	p := docker(t)
	id := p.start(p.request(nil, "wait"))
	ctx, cancel := context.WithCancel(p.ctx)
	cancel()
	if _, err := p.Inspect(ctx, id); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	ctx, cancel = context.WithTimeout(p.ctx, time.Nanosecond)
	defer cancel()
	_, err := p.Create(ctx, p.request(func(_ *types.TaskDefinition, _ *types.ContainerDefinition, r *engine.Request) {
		r.Labels.Generation = 2
	}, "wait"))
	if !errors.Is(err, engine.ErrTimeout) || !strings.Contains(err.Error(), "DockerTimeoutError: Could not transition to created; timed out after waiting") {
		t.Errorf("timed out: %v", err)
	}
	ctx, cancel = context.WithTimeout(p.ctx, 50*time.Millisecond)
	defer cancel()
	if _, err := p.Wait(ctx, id); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("wait: %v", err)
	}
}
