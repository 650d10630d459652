package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/berth-gpu/berth/api"
)

// How long berth waits for an answer. Doctor has the most to do: the agent tries
// each precondition, and a hung one costs its own time limit.
const (
	dialTimeout   = 2 * time.Second
	answerTimeout = 10 * time.Second
	doctorTimeout = 60 * time.Second
)

// resendFor bounds how long a request whose reply was lost is sent again: a server
// restarts within it.
const resendFor = 30 * time.Second

// maxUnixPath is the longest path that fits sockaddr_un.sun_path with its NUL.
const maxUnixPath = 107

// maxAnswer bounds what is read into memory of one answer.
const maxAnswer = 64 << 20

// client speaks to one agent or one server.
type client struct {
	socket string
	http   *http.Client
	pause  time.Duration // before a request goes out again
}

func (a *app) client() *client { return a.clientAt(a.socket) }

func (a *app) clientAt(socket string) *client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		d := net.Dialer{Timeout: dialTimeout}
		return d.DialContext(ctx, "unix", socket)
	}
	// No ResponseHeaderTimeout: the request's context bounds it, and a log that is
	// followed may stay silent for as long as its container does.
	return &client{socket: socket, pause: a.poll, http: &http.Client{Transport: &http.Transport{DialContext: dial, DisableCompression: true}}}
}

// who is what listens at the socket, as far as its name tells.
func (c *client) who() string {
	switch filepath.Base(c.socket) {
	case "agent.sock":
		return "agent"
	case "server.sock":
		return "server"
	}
	return "agent or server"
}

// unanswered is a request without an answer.
type unanswered struct {
	says  string
	taken bool // it may have been acted on: somebody listened
}

func (u *unanswered) Error() string { return u.says }

// refusal is an answer that is not 2xx.
type refusal struct {
	status int
	says   string
}

func (r *refusal) Error() string { return r.says }

// get fetches path within limit, decodes its JSON into v and returns it as it came.
func (c *client) get(ctx context.Context, limit time.Duration, path string, query url.Values, v any) (json.RawMessage, error) {
	return c.once(ctx, limit, http.MethodGet, path, query, nil, v)
}

// once is one request and its answer, decoded into v and as it came.
func (c *client) once(ctx context.Context, limit time.Duration, method, path string, query url.Values, body []byte, v any) (json.RawMessage, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	answer, err := c.open(ctx, method, path, query, body)
	if err != nil {
		return nil, err
	}
	defer answer.Close()
	raw, err := io.ReadAll(io.LimitReader(answer, maxAnswer))
	if err != nil {
		return nil, c.explain(err)
	}
	if v == nil || method != http.MethodGet && len(raw) == 0 {
		return raw, nil
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return nil, fmt.Errorf("the %s at %s answered %s %s with something that is not its API: %v", c.who(), c.socket, method, path, err)
	}
	return raw, nil
}

// send asks for an act. A request whose reply was lost goes out again, the same to the
// byte: each of the API's acts, asked for twice, is done once.
func (c *client) send(ctx context.Context, method, path string, query url.Values, in, v any) (json.RawMessage, error) {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return nil, err
		}
	}
	giveUp := time.NewTimer(resendFor)
	defer giveUp.Stop()
	for lost := false; ; {
		raw, err := c.once(ctx, answerTimeout, method, path, query, body, v)
		var u *unanswered
		var r *refusal
		switch {
		case errors.As(err, &u) && (u.taken || lost):
			lost = true
		case errors.As(err, &r) && lost && r.status == http.StatusServiceUnavailable: // it starts
		case errors.As(err, &r) && lost && r.status == http.StatusNotFound && method == http.MethodDelete:
			return raw, nil // gone, as was asked
		default:
			return raw, err
		}
		select {
		case <-ctx.Done():
			return nil, c.explain(ctx.Err())
		case <-giveUp.C:
			return nil, &coded{exitUnreachable, fmt.Errorf("%w. The reply to what was asked first is lost: it may have been done. Look before you ask again (berth ps -a, berth service ls)", err)}
		case <-time.After(c.pause):
		}
	}
}

// open sends one request and returns the body of a 2xx answer; any other answer,
// and no answer, is an error that says what to do.
func (c *client) open(ctx context.Context, method, path string, query url.Values, body []byte) (io.ReadCloser, error) {
	if len(c.socket) > maxUnixPath {
		return nil, usageError("--socket: %q has %d bytes; a unix socket's path has at most %d", c.socket, len(c.socket), maxUnixPath)
	}
	u := url.URL{Scheme: "http", Host: "berth", Path: path, RawQuery: query.Encode()}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if len(body) > 0 {
		req.Header.Set("Content-Type", "application/json")
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
	switch {
	case json.Unmarshal(raw, &e) == nil && e.Message != "":
		return nil, &refusal{resp.StatusCode, e.Message}
	case resp.StatusCode == http.StatusNotFound || resp.StatusCode == http.StatusMethodNotAllowed:
		return nil, &refusal{resp.StatusCode, fmt.Sprintf("an agent listens at %s, and this needs a placement server, which knows all machines. Name its socket with --socket or BERTH_SOCKET (berth server's is %s)",
			c.socket, serverSocket)}
	}
	return nil, &refusal{resp.StatusCode, fmt.Sprintf("the %s answered %s %s with %s: %s", c.who(), method, path, resp.Status, strings.TrimSpace(string(raw)))}
}

// explain makes a failed connection into a sentence that says what to do.
func (c *client) explain(err error) error {
	if errors.Is(err, context.Canceled) {
		return &coded{exitInterrupted, errors.New("interrupted")}
	}
	start := map[string]string{
		"agent":  "Start the agent (berth-agent run --config FILE, or make run)",
		"server": "Start the server (berth server --data-dir DIR)",
	}[c.who()]
	if start == "" {
		start = "Start the agent (berth-agent run --config FILE, or make run) or the server (berth server --data-dir DIR)"
	}
	taken := false
	var says string
	switch {
	case errors.Is(err, fs.ErrNotExist):
		says = "there is no such socket. " + start + ", or name its socket with --socket or BERTH_SOCKET"
	case errors.Is(err, fs.ErrPermission):
		says = "permission denied: only root can open it. Run berth with sudo"
	case errors.Is(err, syscall.ECONNREFUSED):
		says = fmt.Sprintf("nobody listens there: the %s that made this socket has ended. Its log says why. %s", c.who(), start)
	case errors.Is(err, syscall.ENOTSOCK):
		says = "that is not a socket. Name the right one with --socket or BERTH_SOCKET"
	case errors.Is(err, context.DeadlineExceeded), isTimeout(err):
		taken = true
		says = fmt.Sprintf("the %s did not answer in time. It may be stopped (SIGSTOP) or starved; its log and /proc/PID/stat say more", c.who())
	default:
		taken = true
		var u *url.Error
		if errors.As(err, &u) {
			err = u.Err
		}
		says = "the connection broke: " + err.Error()
	}
	return &coded{exitUnreachable, &unanswered{fmt.Sprintf("cannot reach the %s at %s: %s", c.who(), c.socket, says), taken}}
}

func isTimeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}

// pathOf fills the one {name} or {id} of an API path.
func pathOf(path, name string) string {
	before, rest, _ := strings.Cut(path, "{")
	_, after, _ := strings.Cut(rest, "}")
	return before + name + after
}
