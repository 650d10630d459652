package rig

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
	"path/filepath"
	"strings"
	"time"
)

const docker = "/var/run/docker.sock"

func over(path string) *http.Client {
	return &http.Client{Timeout: 60 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", path)
		}}}
}

func getFrom(ctx context.Context, socket, path string, v any) error {
	answer, err := ask(ctx, http.MethodGet, socket, path, nil)
	if err != nil {
		return err
	}
	return json.Unmarshal(answer, v)
}

// ask sends one request over a unix socket; any answer but 2xx is an error.
func ask(ctx context.Context, method, socket, path string, body []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://socket"+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := over(socket).Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode/100 != 2 {
		err = fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, answer)
	}
	return answer, err
}

type inspected struct {
	Created time.Time
	State   struct {
		Running   bool
		StartedAt time.Time
	}
	Config struct{ Env []string }
}

func inspect(ctx context.Context, id string) (i inspected, err error) {
	return i, getFrom(ctx, docker, "/containers/"+id+"/json", &i)
}

// Runs says whether Docker's container with this id runs.
func Runs(ctx context.Context, id string) (bool, error) {
	i, err := inspect(ctx, id)
	return i.State.Running, err
}

// Times are when Docker was asked to create a container and when it had started it, by
// Docker's clock, which is the machine's.
func Times(ctx context.Context, id string) (created, started time.Time, err error) {
	i, err := inspect(ctx, id)
	return i.Created, i.State.StartedAt, err
}

// Environment is a container's.
func Environment(ctx context.Context, id string) (map[string]string, error) {
	i, err := inspect(ctx, id)
	env := map[string]string{}
	for _, kv := range i.Config.Env {
		name, value, _ := strings.Cut(kv, "=")
		env[name] = value
	}
	return env, err
}

// DockerVersion is the engine's.
func DockerVersion(ctx context.Context) (string, error) {
	var v struct{ Version string }
	return v.Version, getFrom(ctx, docker, "/version", &v)
}

// PlainStart creates and starts a container as docker run does, and removes it. It
// returns the time from its creation to its start, and from the request for it.
func PlainStart(ctx context.Context, image string, command []string) (own, whole time.Duration, err error) {
	asked := time.Now()
	body, err := json.Marshal(map[string]any{"Image": image, "Entrypoint": command, "HostConfig": map[string]any{"NetworkMode": "bridge"}})
	if err != nil {
		return 0, 0, err
	}
	answer, err := ask(ctx, http.MethodPost, docker, "/containers/create", body)
	if err != nil {
		return 0, 0, err
	}
	var made struct{ Id string }
	if err := json.Unmarshal(answer, &made); err != nil {
		return 0, 0, err
	}
	defer func() {
		_, rm := ask(ctx, http.MethodDelete, docker, "/containers/"+made.Id+"?force=1", nil)
		err = errors.Join(err, rm)
	}()
	if _, err := ask(ctx, http.MethodPost, docker, "/containers/"+made.Id+"/start", nil); err != nil {
		return 0, 0, err
	}
	created, started, err := Times(ctx, made.Id)
	return started.Sub(created), started.Sub(asked), err
}

// RemoveTasks empties the task folder.
func (r *Rig) RemoveTasks() error {
	files, err := filepath.Glob(r.Task("*"))
	if err != nil {
		return err
	}
	for _, f := range files {
		err = errors.Join(err, os.Remove(f))
	}
	return err
}
