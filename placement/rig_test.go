package placement_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/config"
	"github.com/berth-gpu/berth/placement"
	"github.com/berth-gpu/berth/placement/replace/dev"
)

// TestMain is also the program that a test kills: a server by itself.
func TestMain(m *testing.M) {
	if text := os.Getenv("BERTH_TEST_SERVER"); text != "" {
		var settings config.Server
		if err := json.Unmarshal([]byte(text), &settings); err != nil {
			panic(err)
		}
		s, err := placement.Open(context.Background(), &settings, nil, "test", logger())
		if err == nil {
			err = s.Run(context.Background())
		}
		fmt.Fprintln(os.Stderr, "ended:", err)
		os.Exit(1)
	}
	code := m.Run()
	if used.Load() {
		dir, _ := built()
		os.RemoveAll(dir)
	}
	os.Exit(code)
}

// logger writes to stderr where BERTH_TEST_LOG is set.
func logger() *zap.Logger {
	if os.Getenv("BERTH_TEST_LOG") == "" {
		return zap.NewNop()
	}
	l, err := zap.NewDevelopment()
	if err != nil {
		panic(err)
	}
	return l
}

// patience is how long a test waits for what comes by itself, on a busy machine.
const patience = 40 * time.Second

// folder is one whose path is short enough for the sockets in it.
func folder(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "bp-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// settings of a server without an agent's lease that a busy machine could miss.
func settings(t testing.TB) *config.Server {
	dir := folder(t)
	return &config.Server{Cluster: "test", DataDir: filepath.Join(dir, "data"), Socket: filepath.Join(dir, "s.sock"), LogLevel: "info",
		Agents:  config.Agents{Listen: "unix:" + filepath.Join(dir, "a.sock"), Lease: 20 * time.Second, Grace: time.Minute},
		Replace: config.Replace{When: config.ReplaceNever, AtOnce: 10, PerHour: 10, DrainDeadline: time.Hour, JoinTimeout: 5 * time.Minute}, Provider: config.ProviderNone}
}

// running is a server that runs, in this process or as a child of it.
type running struct {
	client
	settings *config.Server
	server   *placement.Server // nil: a child
	child    *exec.Cmd
	cancel   context.CancelFunc
	ended    chan struct{}
	err      error // of Run, once ended
}

// serve runs a server until the test ends or it is stopped, and waits until it leads.
func serve(t testing.TB, s *config.Server) *running {
	t.Helper()
	r := follow(t, s)
	r.leads(t)
	return r
}

// follow is serve, without waiting.
func follow(t testing.TB, s *config.Server) *running {
	t.Helper()
	return followOn(t, s, nil)
}

// serveOn is serve, with a provider of machines.
func serveOn(t testing.TB, s *config.Server, machines *dev.Provider) *running {
	t.Helper()
	r := followOn(t, s, machines)
	r.leads(t)
	return r
}

func followOn(t testing.TB, s *config.Server, machines *dev.Provider) *running {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	opening, stop := context.WithTimeout(ctx, patience)
	defer stop()
	server, err := placement.Open(opening, s, machines, "test", logger())
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	r := &running{client: reach(s.Socket), settings: s, server: server, cancel: cancel, ended: make(chan struct{})}
	go func() {
		defer close(r.ended)
		r.err = server.Run(ctx)
	}()
	t.Cleanup(func() { r.stop(t) })
	return r
}

// stop ends a server as SIGTERM does.
func (r *running) stop(t testing.TB) {
	t.Helper()
	if r.child != nil {
		r.kill()
		return
	}
	r.cancel()
	select {
	case <-r.ended:
	case <-time.After(patience):
		t.Fatal("the server does not end")
	}
	if r.err != nil {
		t.Errorf("the server ended with: %v", r.err)
	}
}

// spawn runs a server as a process of its own.
func spawn(t testing.TB, s *config.Server) *running {
	t.Helper()
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	r := &running{client: reach(s.Socket), settings: s, child: exec.Command(os.Args[0]), ended: make(chan struct{})}
	r.child.Env = append(os.Environ(), "BERTH_TEST_SERVER="+string(text))
	r.child.Stderr = os.Stderr
	if err := r.child.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(r.ended)
		r.err = r.child.Wait()
	}()
	t.Cleanup(r.kill)
	return r
}

// kill ends a child at once, wherever it is.
func (r *running) kill() {
	r.child.Process.Kill()
	<-r.ended
}

func (r *running) leads(t testing.TB) {
	t.Helper()
	until(t, "the server leads", func() bool {
		var about api.Server
		return r.try("GET", api.PathServer, nil, &about) == nil && about.Leader
	})
}

// until polls for what comes by itself.
func until(t testing.TB, what string, is func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !is() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", patience, what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// client speaks the operators' API.
type client struct{ http *http.Client }

func reach(socket string) client {
	return client{&http.Client{Timeout: patience, Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}}}}
}

// failed is an answer that is not 2xx.
type failed struct {
	status int
	says   string
}

func (f *failed) Error() string { return fmt.Sprintf("%d: %s", f.status, f.says) }

// try is one request. In and out may be nil; a string is sent as it is.
func (c client) try(method, path string, in, out any) error {
	var body io.Reader
	if text, ok := in.(string); ok {
		body = strings.NewReader(text)
	} else if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(data)
	}
	r, err := http.NewRequest(method, "http://berth"+path, body)
	if err != nil {
		return err
	}
	res, err := c.http.Do(r)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	if err != nil {
		return err
	}
	if res.StatusCode/100 != 2 {
		var no api.Error
		if err := json.Unmarshal(data, &no); err != nil {
			return fmt.Errorf("%d with %q, which is no api.Error", res.StatusCode, data)
		}
		return &failed{res.StatusCode, no.Message}
	}
	switch out := out.(type) {
	case nil:
		return nil
	case *string:
		*out = string(data)
		return nil
	default:
		return json.Unmarshal(data, out)
	}
}

// ask is a request that has to succeed.
func ask[O any](t testing.TB, c client, method, path string, in any) O {
	t.Helper()
	var out O
	if err := c.try(method, path, in, &out); err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	return out
}

// refused is a request that has to fail.
func refused(t testing.TB, c client, method, path string, in any) *failed {
	t.Helper()
	var no *failed
	if err := c.try(method, path, in, nil); !errors.As(err, &no) {
		t.Fatalf("%s %s: %v, want a refusal", method, path, err)
	}
	return no
}

func at(path string, names ...string) string {
	for _, name := range names {
		from, to := strings.Index(path, "{"), strings.Index(path, "}")
		path = path[:from] + name + path[to+1:]
	}
	return path
}

func tasks(t testing.TB, c client) []api.Task {
	t.Helper()
	return ask[[]api.Task](t, c, "GET", api.PathTasks, nil)
}

// task is one of them; the zero one where there is none.
func task(t testing.TB, c client, id string) api.Task {
	t.Helper()
	for _, v := range tasks(t, c) {
		if v.ID == id {
			return v
		}
	}
	return api.Task{}
}

// run starts standalone tasks.
func run(t testing.TB, c client, in api.RunTask) []string {
	t.Helper()
	var ids []string
	for _, v := range ask[api.RunTaskAnswer](t, c, "POST", api.PathTasks, in).Tasks {
		ids = append(ids, v.ID)
	}
	return ids
}

// reaches waits for a task's status.
func reaches(t testing.TB, c client, id, status string) api.Task {
	t.Helper()
	var last api.Task
	defer func() {
		if t.Failed() {
			t.Logf("it is %+v", last)
		}
	}()
	until(t, "task "+id+" is "+status, func() bool {
		last = task(t, c, id)
		return last.LastStatus == status
	})
	return last
}

func service(t testing.TB, c client, name string) api.Service {
	t.Helper()
	all := ask[[]api.Service](t, c, "GET", api.PathServices, nil)
	if i := slices.IndexFunc(all, func(s api.Service) bool { return s.Name == name }); i >= 0 {
		return all[i]
	}
	return api.Service{}
}

// live are a service's tasks that are to run.
func live(t testing.TB, c client, name string) []api.Task {
	t.Helper()
	return slices.DeleteFunc(tasks(t, c), func(v api.Task) bool {
		return v.Group != "service:"+name || v.DesiredStatus != api.StatusRunning
	})
}

func instance(t testing.TB, c client, name string) api.Instance {
	t.Helper()
	all := ask[[]api.Instance](t, c, "GET", api.PathInstances, nil)
	if i := slices.IndexFunc(all, func(in api.Instance) bool { return in.Name == name }); i >= 0 {
		return all[i]
	}
	return api.Instance{}
}

// successor is the task that was started in another one's place, or the zero one.
func successor(t testing.TB, c client, id string) api.Task {
	t.Helper()
	for _, v := range tasks(t, c) {
		if v.Replaces == id {
			return v
		}
	}
	return api.Task{}
}

func connectivity(in api.Instance) string {
	for _, d := range in.Health.Details {
		if d.Type == api.AgentConnectivity {
			return d.Status
		}
	}
	return ""
}

func events(t testing.TB, c client) []api.Event {
	t.Helper()
	var out []api.Event
	for line := range strings.Lines(ask[string](t, c, "GET", api.PathEvents, nil)) {
		var e api.Event
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatal(err)
		}
		out = append(out, e)
	}
	return out
}

// sound is what holds at every moment, on the server's side.
func sound(t testing.TB, r *running) {
	t.Helper()
	if r.server == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	got, err := r.server.Contradictions(ctx)
	if err != nil || len(got) > 0 {
		t.Errorf("the fleet contradicts itself: %q %v", got, err)
	}
}

// shared is a definition of one container with a cap on a GPU's memory; 0: without GPU.
func shared(family string, mib int) json.RawMessage {
	gpu := ""
	if mib > 0 {
		gpu = fmt.Sprintf(`, "resourceRequirements": [{"type": "GPU", "sharingStrategy": {"nvidiaMps": {"memory": %d}}}]`, mib)
	}
	return fmt.Appendf(nil, `{"family": %q, "containerDefinitions": [{"name": "main", "image": "i", "cpu": 128, "memory": 64, "stopTimeout": 2%s}]}`, family, gpu)
}
