package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"

	"github.com/berth-gpu/berth/agent/engine"
	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/healthcheck"
)

// listener is one address that the agent serves.
type listener struct {
	net.Listener
	handler http.Handler
}

// listen opens the local socket (0600) and the loopback port of the metrics.
func (a *Agent) listen() ([]listener, error) {
	metrics := a.metrics()
	path := a.settings.Socket()
	// The store is open: no other agent uses this instance's socket, so what is
	// there was left by one that was killed.
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	unix, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		unix.Close()
		return nil, err
	}
	out := []listener{{unix, a.routes(metrics)}}
	if addr := a.settings.MetricsAddress; addr != "" {
		tcp, err := net.Listen("tcp", addr)
		if err != nil {
			unix.Close()
			return nil, fmt.Errorf("metricsAddress: %w", err)
		}
		mux := http.NewServeMux()
		mux.Handle("GET "+api.PathMetrics, metrics)
		out = append(out, listener{tcp, mux})
	}
	return out, nil
}

func (a *Agent) metrics() http.Handler {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		healthcheck.NewCollector(func() (api.Instance, []api.Task) {
			v := a.View()
			return v.Instance, v.Tasks
		}))
	return promhttp.HandlerFor(r, promhttp.HandlerOpts{})
}

// serve answers on one address until ctx ends, then gives open answers a second.
func (a *Agent) serve(ctx context.Context, l listener) {
	s := &http.Server{Handler: l.handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute,
		BaseContext: func(net.Listener) context.Context { return ctx }}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	select {
	case <-ctx.Done():
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if s.Shutdown(stop) != nil {
			s.Close()
		}
		<-served
	case err := <-served:
		a.log.Error("the local API ended", zap.String("address", l.Addr().String()), zap.Error(err))
	}
}

func (a *Agent) routes(metrics http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+api.PathInstances, func(w http.ResponseWriter, r *http.Request) { answer(w, []api.Instance{a.View().Instance}) })
	mux.HandleFunc("GET "+api.PathTasks, func(w http.ResponseWriter, r *http.Request) { answer(w, a.View().Tasks) })
	mux.HandleFunc("GET "+api.PathDoctor, func(w http.ResponseWriter, r *http.Request) { answer(w, a.Doctor(r.Context())) })
	mux.HandleFunc("POST "+api.PathStop, func(w http.ResponseWriter, r *http.Request) {
		if err := a.Stop(r.Context(), r.PathValue("id"), "stopped by an operator"); err != nil {
			refuse(w, http.StatusNotFound, err)
			return
		}
		answer(w, struct{}{})
	})
	mux.HandleFunc("GET "+api.PathLogs, a.serveLogs)
	mux.Handle("GET "+api.PathMetrics, metrics)
	return mux
}

func (a *Agent) serveLogs(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	tail := 0
	if s := q.Get("tail"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 {
			refuse(w, http.StatusBadRequest, fmt.Errorf("tail: %q is not a number of lines from 1 up", s))
			return
		}
		tail = n
	}
	id, err := call(r.Context(), a, func() (string, error) {
		t, err := a.find(r.PathValue("id"))
		if err != nil {
			return "", err
		}
		return t.logsOf(q.Get("container"))
	})
	if err != nil {
		refuse(w, http.StatusNotFound, err)
		return
	}
	logs, err := a.docker.Logs(r.Context(), id, engine.LogOptions{Follow: q.Get("follow") == "1", Tail: tail})
	if err != nil {
		refuse(w, http.StatusBadGateway, err)
		return
	}
	defer logs.Close()
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	io.Copy(flushing{w, http.NewResponseController(w)}, logs) // ends with either side
}

// logsOf is the Docker id of the container whose output is asked for.
func (t *task) logsOf(name string) (string, error) {
	if name == "" && len(t.rec.Containers) > 1 {
		return "", fmt.Errorf("task %s has %d containers; name one: TASK/CONTAINER", shortID(t.rec.ID), len(t.rec.Containers))
	}
	for _, c := range t.rec.Containers {
		if name != "" && c.Name != name {
			continue
		}
		if c.DockerID == "" {
			return "", fmt.Errorf("container %s of task %s has not been made yet: it has no output", c.Name, shortID(t.rec.ID))
		}
		return c.DockerID, nil
	}
	return "", fmt.Errorf("task %s has no container %q", shortID(t.rec.ID), name)
}

// flushing hands each line on at once, for `logs -f`.
type flushing struct {
	io.Writer
	c *http.ResponseController
}

func (f flushing) Write(p []byte) (int, error) {
	n, err := f.Writer.Write(p)
	if err == nil {
		err = f.c.Flush()
	}
	return n, err
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(v)
}

func refuse(w http.ResponseWriter, code int, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(api.Error{Message: err.Error()})
}
