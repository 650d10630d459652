package placement

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/api/agentpb"
)

// maxRequest bounds what is read of one request: a definition has at most 64 KiB.
const maxRequest = 1 << 20

// refusal is an error with the HTTP status that tells a client what kind it is.
type refusal struct {
	status int
	error
}

func refuse(status int, format string, args ...any) error {
	return &refusal{status, fmt.Errorf(format, args...)}
}

func notFound(what, name string) error {
	return refuse(http.StatusNotFound, "%s %q: there is none of that name", what, name)
}

// routes is the operators' API: that of an agent, for all machines, and the server's own.
func (s *Server) routes() http.Handler {
	mux := http.NewServeMux()
	get := func(path string, f func(context.Context, *http.Request) (any, error)) {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			v, err := f(r.Context(), r)
			answer(w, v, err)
		})
	}
	loop := func(path string, f func(*leader, *http.Request) (any, error)) {
		get(path, func(ctx context.Context, r *http.Request) (any, error) {
			return call(ctx, s, func(l *leader) (any, error) { return f(l, r) })
		})
	}
	get("GET "+api.PathServer, func(context.Context, *http.Request) (any, error) { return s.about(), nil })
	get("GET "+api.PathDoctor, func(ctx context.Context, _ *http.Request) (any, error) { return s.doctor(ctx), nil })
	loop("GET "+api.PathInstances, func(l *leader, _ *http.Request) (any, error) { return l.showInstances(), nil })
	loop("GET "+api.PathTasks, func(l *leader, r *http.Request) (any, error) { return l.showTasks(r.URL.Query()), nil })
	get("POST "+api.PathTasks, func(ctx context.Context, r *http.Request) (any, error) {
		return body(ctx, s, r, func(l *leader, in api.RunTask) (any, error) { return l.runTask(in) })
	})
	loop("POST "+api.PathStop, func(l *leader, r *http.Request) (any, error) { return struct{}{}, l.stopByOperator(r.PathValue("id")) })
	loop("GET "+api.PathExplain, func(l *leader, r *http.Request) (any, error) { return l.explain(r.PathValue("id")) })
	mux.HandleFunc("GET "+api.PathLogs, s.logs)
	loop("GET "+api.PathServices, func(l *leader, _ *http.Request) (any, error) { return l.showServices(), nil })
	get("POST "+api.PathServices, func(ctx context.Context, r *http.Request) (any, error) {
		return body(ctx, s, r, func(l *leader, in api.Service) (any, error) { return l.createService(in) })
	})
	get("POST "+api.PathService, func(ctx context.Context, r *http.Request) (any, error) {
		return body(ctx, s, r, func(l *leader, in api.ServiceUpdate) (any, error) { return l.updateService(r.PathValue("name"), in) })
	})
	loop("DELETE "+api.PathService, func(l *leader, r *http.Request) (any, error) { return l.deleteService(r.PathValue("name")) })
	loop("DELETE "+api.PathInstance, func(l *leader, r *http.Request) (any, error) {
		return struct{}{}, l.deregister(r.PathValue("name"), r.URL.Query().Get("force") == "1")
	})
	loop("POST "+api.PathDrain, func(l *leader, r *http.Request) (any, error) {
		q := r.URL.Query()
		return l.drain(r.PathValue("name"), q.Get("dryRun") == "1", q.Get("undo") == "1")
	})
	loop("POST "+api.PathReplace, func(l *leader, r *http.Request) (any, error) { return l.replaceByOperator(r.PathValue("name")) })
	loop("GET "+api.PathReplacements, func(l *leader, _ *http.Request) (any, error) { return l.showReplacements(), nil })
	loop("POST "+api.PathResume, func(l *leader, _ *http.Request) (any, error) { return l.resume(), nil })
	mux.HandleFunc("GET "+api.PathEvents, s.serveEvents)
	return http.MaxBytesHandler(mux, maxRequest)
}

// body decodes a request strictly and hands it to the loop.
func body[I any](ctx context.Context, s *Server, r *http.Request, f func(*leader, I) (any, error)) (any, error) {
	var in I
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	if err := d.Decode(&in); err != nil {
		return nil, refuse(http.StatusBadRequest, "the request's body cannot be read: %v", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, refuse(http.StatusBadRequest, "the request's body cannot be read: something follows the request")
	}
	return call(ctx, s, func(l *leader) (any, error) { return f(l, in) })
}

func answer(w http.ResponseWriter, v any, err error) {
	w.Header().Set("Content-Type", "application/json")
	var no *refusal
	switch {
	case err == nil:
		json.NewEncoder(w).Encode(v)
		return
	case errors.As(err, &no):
		w.WriteHeader(no.status)
	case errors.Is(err, errNotLeading), errors.Is(err, context.Canceled):
		err = errNotLeading // or the server ends, or nobody reads this any more
		w.WriteHeader(http.StatusServiceUnavailable)
	default:
		w.WriteHeader(http.StatusInternalServerError)
	}
	json.NewEncoder(w).Encode(api.Error{Message: err.Error()})
}

// logs answers with a container's output, which comes through its agent's stream.
func (s *Server) logs(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	tail := 0
	if text := q.Get("tail"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			answer(w, nil, refuse(http.StatusBadRequest, "tail: %q is not a number of lines from 1 up", text))
			return
		}
		tail = n
	}
	where, err := call(r.Context(), s, func(l *leader) ([2]string, error) {
		t, err := l.findTask(r.PathValue("id"))
		if err != nil {
			return [2]string{}, err
		}
		if t.Instance == "" {
			return [2]string{}, refuse(http.StatusConflict, "task %s has not been placed yet: it has no output; berth explain %.12s says why", t.ID, t.ID)
		}
		if c := l.agents[t.Instance]; c == nil || c.session == 0 {
			return [2]string{}, refuse(http.StatusServiceUnavailable, "task %s is on %s, whose agent is not connected now: its output is there", t.ID, t.Instance)
		}
		return [2]string{t.Instance, t.ID}, nil
	})
	if err != nil {
		answer(w, nil, err)
		return
	}
	out, err := s.streams.Logs(r.Context(), where[0], &agentpb.LogRequest{Task: where[1], Container: q.Get("container"), Follow: q.Get("follow") == "1", Tail: uint32(tail)})
	if err != nil {
		answer(w, nil, refuse(http.StatusBadGateway, "%w", err))
		return
	}
	defer out.Close()
	// What is wrong with the request shows before the first byte.
	first := make([]byte, 32<<10)
	n, err := out.Read(first)
	if err != nil && err != io.EOF && n == 0 {
		answer(w, nil, refuse(http.StatusBadGateway, "%w", err))
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	flush := http.NewResponseController(w)
	for {
		if n > 0 {
			if _, err := w.Write(first[:n]); err != nil {
				return
			}
			flush.Flush()
		}
		if err != nil {
			if err != io.EOF {
				panic(http.ErrAbortHandler) // cut the answer, so that it does not look whole
			}
			return
		}
		n, err = out.Read(first)
	}
}

// serveEvents writes events, one JSON object a line, and with follow=1 goes on.
func (s *Server) serveEvents(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	var seq uint64
	if text := q.Get("after"); text != "" {
		var err error
		if seq, err = strconv.ParseUint(text, 10, 64); err != nil {
			answer(w, nil, refuse(http.StatusBadRequest, "after: %q is not the number of an event", text))
			return
		}
	}
	type page struct {
		events []api.Event
		more   <-chan struct{}
		ended  <-chan struct{} // of the term that more is of
	}
	started, follow := false, q.Get("follow") == "1"
	for {
		p, err := call(r.Context(), s, func(l *leader) (page, error) {
			p := page{events: l.events.after(seq), ended: l.ended}
			if follow {
				p.more = l.events.more()
			}
			return p, nil
		})
		if err != nil {
			if !started {
				answer(w, nil, err)
			}
			return
		}
		if !started {
			started = true
			w.Header().Set("Content-Type", "application/x-ndjson")
		}
		enc := json.NewEncoder(w)
		for _, e := range p.events {
			if enc.Encode(e) != nil {
				return
			}
			seq = e.Seq
		}
		if !follow {
			return
		}
		http.NewResponseController(w).Flush()
		select {
		case <-p.more:
		case <-p.ended:
			return
		case <-r.Context().Done():
			return
		}
	}
}

func readCA(path string) (*x509.CertPool, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(data) {
		return nil, fmt.Errorf("%s: no PEM certificate in it", path)
	}
	return pool, nil
}
