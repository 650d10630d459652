package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/berth-gpu/berth/api"
)

// operator speaks the server's API over connections that stay open, so that what is
// measured is the request.
type operator struct{ http *http.Client }

func reach(socket string) operator {
	return operator{&http.Client{Timeout: time.Minute, Transport: &http.Transport{MaxIdleConnsPerHost: 64,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}}}}
}

// do is one request; in and out may be nil.
func (o operator) do(ctx context.Context, method, path string, in, out any) (bytesRead int, err error) {
	var body io.Reader
	if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return 0, err
		}
		body = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://berth"+path, body)
	if err != nil {
		return 0, err
	}
	res, err := o.http.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	if err != nil {
		return 0, err
	}
	if res.StatusCode/100 != 2 {
		return 0, fmt.Errorf("%s %s: %s: %s", method, path, res.Status, data)
	}
	if out == nil {
		return len(data), nil
	}
	return len(data), json.Unmarshal(data, out)
}

// run starts one standalone task.
func (o operator) run(ctx context.Context, definition string) (id string, err error) {
	var got api.RunTaskAnswer
	if _, err := o.do(ctx, http.MethodPost, api.PathTasks, api.RunTask{Definition: []byte(definition)}, &got); err != nil {
		return "", err
	}
	return got.Tasks[0].ID, nil
}

func (o operator) stop(ctx context.Context, id string) error {
	_, err := o.do(ctx, http.MethodPost, api.PathTasks+"/"+id+"/stop", nil, nil)
	return err
}

// task is one task as the server shows it.
func (o operator) task(ctx context.Context, id string) (t api.Task, err error) {
	var all []api.Task
	if _, err := o.do(ctx, http.MethodGet, api.PathTasks+"?ref="+id, nil, &all); err != nil {
		return t, err
	}
	if len(all) != 1 {
		return t, fmt.Errorf("the server shows %d tasks of id %s", len(all), id)
	}
	return all[0], nil
}

// leads says whether the server leads.
func (o operator) leads(ctx context.Context) bool {
	var s api.Server
	_, err := o.do(ctx, http.MethodGet, api.PathServer, nil, &s)
	return err == nil && s.Leader
}

// until polls until something is so.
func until(ctx context.Context, limit, every time.Duration, what string, is func() bool) error {
	deadline := time.Now().Add(limit)
	for !is() {
		if time.Now().After(deadline) {
			return fmt.Errorf("within %s, not seen: %s", limit, what)
		}
		if err := pause(ctx, every); err != nil {
			return err
		}
	}
	return nil
}
