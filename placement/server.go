// Package placement is the control plane: it holds the fleet, places tasks on GPUs
// across machines, and drains and replaces a machine whose GPUs or agent fail.
//
// One process leads at a time. While it leads, one goroutine owns the fleet and turns
// in rounds: take what has happened, decide, store every change, and only then act on
// it and answer for it. So the process may be killed at any line: the next leader
// reads the store and goes on, and agents keep their containers running meanwhile.
// Everything that takes time (the streams, the provider, HTTP) is done by goroutines
// that Run starts, and waits for.
package placement

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/api/flight"
	"github.com/berth-gpu/berth/config"
	"github.com/berth-gpu/berth/placement/agentapi"
	"github.com/berth-gpu/berth/placement/replace"
	"github.com/berth-gpu/berth/placement/replace/dev"
	"github.com/berth-gpu/berth/placement/store"
)

// Server is one placement server.
type Server struct {
	settings *config.Server
	version  string
	log      *zap.Logger
	store    *store.Store
	streams  *agentapi.Server
	machines *dev.Provider // nil: machines are not replaced
	policy   replace.Policy
	flight   *flight.Recorder

	leader atomic.Pointer[leader]
	term   atomic.Uint64
}

// Open opens the store and the flight recorder. It serves nothing yet.
func Open(ctx context.Context, settings *config.Server, machines *dev.Provider, version string, log *zap.Logger) (*Server, error) {
	s := &Server{settings: settings, version: version, log: log, machines: machines}
	when, below, err := replace.ParseWhen(settings.Replace.When)
	if err != nil {
		return nil, err
	}
	s.policy = policy(settings, when, below)
	if err := os.MkdirAll(settings.DataDir, 0o700); err != nil {
		return nil, err
	}
	tlsConfig, err := agentsTLS(settings)
	if err != nil {
		return nil, err
	}
	s.store, err = store.Open(ctx, store.Options{Dir: settings.DataDir, Endpoints: settings.Etcd.Endpoints,
		CA: settings.Etcd.CA, Cert: settings.Etcd.Cert, Key: settings.Etcd.Key, Log: log})
	if err != nil {
		return nil, err
	}
	if s.flight, err = flight.Open(filepath.Join(settings.DataDir, "flight"), flightBytes, log); err != nil {
		s.store.Close()
		return nil, err
	}
	s.streams = agentapi.New(agentapi.Options{Version: version, Cluster: settings.Cluster, Pulse: settings.Agents.Lease / 4,
		Lease: settings.Agents.Lease, Log: log, TLS: tlsConfig, Hello: s.hello, Report: s.report, Gone: s.gone})
	return s, nil
}

const (
	flightBytes = 64 << 20
	tickEvery   = 250 * time.Millisecond
)

// Run serves and, when it is this process's turn, leads, until ctx ends. It leaves
// every agent and task as it is.
func (s *Server) Run(ctx context.Context) (err error) {
	defer func() {
		s.flight.Close()
		err = errors.Join(err, s.store.Close())
	}()
	outer := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	var owned sync.WaitGroup
	defer owned.Wait()
	defer cancel(nil) // before the wait

	people, err := listenPeople(s.settings.Socket)
	if err != nil {
		return err
	}
	agents, err := listenAgents(s.settings.Agents.Listen)
	if err != nil {
		people.Close()
		return err
	}
	owned.Go(func() {
		if err := s.servePeople(ctx, people); err != nil {
			cancel(fmt.Errorf("socket: %w", err))
		}
	})
	owned.Go(func() {
		if err := s.streams.Serve(ctx, agents); err != nil && ctx.Err() == nil {
			cancel(fmt.Errorf("agents.listen: %w", err))
		}
	})
	who := s.settings.Socket
	if host, err := os.Hostname(); err == nil {
		who = host + ":" + who
	}
	for ctx.Err() == nil {
		term, err := s.store.Campaign(ctx, who)
		if errors.Is(err, store.ErrNewer) {
			return err
		}
		if err != nil {
			if ctx.Err() == nil {
				s.log.Error("cannot campaign for the leadership, retrying: agents keep their tasks running", zap.Error(err))
				pause(ctx, time.Second)
			}
			continue
		}
		troubled := false
		if err := s.lead(ctx, term); err != nil && ctx.Err() == nil {
			var fatal *fatalError
			if errors.As(err, &fatal) {
				return fatal.error
			}
			s.log.Error("leads no longer", zap.Uint64("term", term.Number()), zap.Error(err))
			troubled = true
		}
		resign, done := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		if err := term.Resign(resign); err != nil {
			s.log.Warn("cannot resign: the next leader waits for the lease", zap.Error(err))
		}
		done()
		if troubled { // others first
			pause(ctx, time.Second)
		}
	}
	if outer.Err() == nil {
		return context.Cause(ctx) // a listener broke
	}
	return nil
}

// fatalError is one that no retry mends: a store that is damaged or of a newer version.
type fatalError struct{ error }

// pause waits for d or the end of ctx.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// call runs f in the loop and answers once what it changed is stored.
func call[T any](ctx context.Context, s *Server, f func(*leader) (T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	var none T
	l := s.leader.Load()
	if l == nil {
		return none, errNotLeading
	}
	done := make(chan result, 1)
	select {
	case l.inbox <- func() {
		v, err := f(l)
		l.after = append(l.after, func() { done <- result{v, err} })
	}:
	case <-l.ended:
		return none, errNotLeading
	case <-ctx.Done():
		return none, ctx.Err()
	}
	select {
	case r := <-done:
		return r.v, r.err
	case <-l.ended:
		return none, errNotLeading
	case <-ctx.Done():
		return none, ctx.Err()
	}
}

var errNotLeading = errors.New("this server does not lead now: ask again in a few seconds, or ask the one that does")

// listenPeople opens the socket of the operators' API, which only root can open.
func listenPeople(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	l, err := listenUnix(path)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	return l, nil
}

func listenAgents(addr string) (net.Listener, error) {
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		l, err := listenUnix(path)
		if err != nil {
			return nil, fmt.Errorf("agents.listen: %w", err)
		}
		return l, nil
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("agents.listen: %w", err)
	}
	return l, nil
}

// listenUnix listens on a socket of mode 0600, in place of one that was left by a server
// that was killed. One that another server answers at is refused.
func listenUnix(path string) (net.Listener, error) {
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		c.Close()
		return nil, fmt.Errorf("%s: another server answers there; stop it, or give this one a path of its own", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// agentsTLS is nil where agents come over a unix socket or loopback alone.
func agentsTLS(s *config.Server) (*tls.Config, error) {
	if s.Agents.Cert == "" {
		return nil, nil
	}
	cert, err := tls.LoadX509KeyPair(s.Agents.Cert, s.Agents.Key)
	if err != nil {
		return nil, fmt.Errorf("agents.cert: %w", err)
	}
	ca, err := readCA(s.Agents.ClientCA)
	if err != nil {
		return nil, fmt.Errorf("agents.clientCA: %w", err)
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}, ClientCAs: ca, ClientAuth: tls.RequireAndVerifyClientCert}, nil
}

// servePeople answers operators until ctx ends, or the listener breaks.
func (s *Server) servePeople(ctx context.Context, l net.Listener) error {
	h := &http.Server{Handler: s.routes(), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute,
		BaseContext: func(net.Listener) context.Context { return ctx }}
	served := make(chan error, 1)
	go func() { served <- h.Serve(l) }()
	select {
	case <-ctx.Done():
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if h.Shutdown(stop) != nil {
			h.Close()
		}
		<-served
		return nil
	case err := <-served:
		return err
	}
}

// about is GET /v1/server.
func (s *Server) about() api.Server {
	return api.Server{Version: s.version, Cluster: s.settings.Cluster, Leader: s.leader.Load() != nil, Term: s.term.Load(), Dir: s.settings.DataDir}
}
