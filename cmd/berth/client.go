package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/berth-gpu/berth/api"
)

// How long berth waits for the agent. Doctor has the most to do: the agent tries
// each precondition, and a hung one costs its own time limit.
const (
	dialTimeout   = 2 * time.Second
	answerTimeout = 10 * time.Second
	doctorTimeout = 60 * time.Second
)

// maxUnixPath is the longest path that fits sockaddr_un.sun_path with its NUL.
const maxUnixPath = 107

// maxAnswer bounds what is read into memory of one answer.
const maxAnswer = 64 << 20

// client speaks to one agent.
type client struct {
	socket string
	http   *http.Client
}

func (a *app) client() *client {
	socket := a.socket
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		d := net.Dialer{Timeout: dialTimeout}
		return d.DialContext(ctx, "unix", socket)
	}
	// No ResponseHeaderTimeout: the request's context bounds it, and a log that is
	// followed may stay silent for as long as its container does.
	return &client{socket: socket, http: &http.Client{Transport: &http.Transport{DialContext: dial, DisableCompression: true}}}
}

// get fetches path within limit, decodes its JSON into v and returns it as it came.
func (c *client) get(ctx context.Context, limit time.Duration, path string, v any) (json.RawMessage, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	body, err := c.open(ctx, http.MethodGet, path, nil)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	raw, err := io.ReadAll(io.LimitReader(body, maxAnswer))
	if err != nil {
		return nil, c.explain(err)
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return nil, fmt.Errorf("the agent at %s answered GET %s with something that is not its API: %v", c.socket, path, err)
	}
	return raw, nil
}

// post asks for an act that answers with nothing of interest.
func (c *client) post(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	body, err := c.open(ctx, http.MethodPost, path, nil)
	if err != nil {
		return err
	}
	return body.Close()
}

// open sends one request and returns the body of a 2xx answer; any other answer,
// and no answer, is an error that says what to do.
func (c *client) open(ctx context.Context, method, path string, query url.Values) (io.ReadCloser, error) {
	if len(c.socket) > maxUnixPath {
		return nil, &coded{exitUsage, fmt.Errorf("--socket: %q has %d bytes; a unix socket's path has at most %d", c.socket, len(c.socket), maxUnixPath)}
	}
	u := url.URL{Scheme: "http", Host: "agent", Path: path, RawQuery: query.Encode()}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), nil)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.explain(err)
	}
	if resp.StatusCode/100 == 2 {
		return resp.Body, nil
	}
	defer resp.Body.Close()
	raw, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	var e api.Error
	if json.Unmarshal(raw, &e) == nil && e.Message != "" {
		return nil, errors.New(e.Message)
	}
	return nil, fmt.Errorf("the agent answered %s %s with %s: %s", method, path, resp.Status, strings.TrimSpace(string(raw)))
}

// explain makes a failed connection into a sentence that says what to do.
func (c *client) explain(err error) error {
	if errors.Is(err, context.Canceled) {
		return &coded{exitFailed, errors.New("interrupted")}
	}
	var says string
	switch {
	case errors.Is(err, fs.ErrNotExist):
		says = "there is no such socket. Start the agent (berth-agent run --config FILE, or make run), or name its socket with --socket or BERTH_SOCKET"
	case errors.Is(err, fs.ErrPermission):
		says = "permission denied: only root can open it. Run berth with sudo"
	case errors.Is(err, syscall.ECONNREFUSED):
		says = "nobody listens there: the agent that made this socket has ended. Its log says why; start it again with berth-agent run --config FILE"
	case errors.Is(err, syscall.ENOTSOCK):
		says = "that is not a socket. Name the agent's with --socket or BERTH_SOCKET"
	case errors.Is(err, context.DeadlineExceeded), isTimeout(err):
		says = "the agent did not answer in time. It may be stopped (SIGSTOP) or starved; its log and /proc/PID/stat say more"
	default:
		var u *url.Error
		if errors.As(err, &u) {
			err = u.Err
		}
		says = err.Error()
	}
	return &coded{exitUnreachable, fmt.Errorf("cannot reach the agent at %s: %s", c.socket, says)}
}

func isTimeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}

func (c *client) instance(ctx context.Context) (inst api.Instance, raw json.RawMessage, err error) {
	var all []api.Instance
	if raw, err = c.get(ctx, answerTimeout, api.PathInstances, &all); err == nil && len(all) > 0 {
		inst = all[0]
	}
	return inst, raw, err
}

func (c *client) tasks(ctx context.Context) (tasks []api.Task, raw json.RawMessage, err error) {
	raw, err = c.get(ctx, answerTimeout, api.PathTasks, &tasks)
	return tasks, raw, err
}

// task finds the one task that ref means: an id, the start of one, or the name of
// a wanted task, whose newest task it then is (the API lists the newest first).
func (c *client) task(ctx context.Context, ref string) (api.Task, error) {
	if ref == "" {
		return api.Task{}, usageError("TASK is empty; berth ps -a lists the tasks")
	}
	tasks, _, err := c.tasks(ctx)
	if err != nil {
		return api.Task{}, err
	}
	var found []api.Task
	for _, t := range tasks {
		if t.ID == ref {
			return t, nil
		}
		if strings.HasPrefix(t.ID, ref) {
			found = append(found, t)
		}
	}
	for _, t := range tasks {
		if len(found) == 0 && t.Name == ref {
			return t, nil
		}
	}
	switch len(found) {
	case 0:
		return api.Task{}, fmt.Errorf("no task %q; berth ps -a lists the tasks", ref)
	case 1:
		return found[0], nil
	}
	var ids []string
	for _, t := range found {
		ids = append(ids, t.ID+" ("+t.Name+")")
	}
	return api.Task{}, fmt.Errorf("%q fits %d tasks, give more of the id: %s", ref, len(found), strings.Join(ids, ", "))
}

// taskPath fills the id into one of the API's paths.
func taskPath(path, id string) string { return strings.Replace(path, "{id}", id, 1) }
