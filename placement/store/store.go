package store

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// Options say where the store is.
type Options struct {
	Dir           string   // the embedded etcd lives in its folder etcd
	Endpoints     []string // of an outside cluster; empty for the embedded one
	CA, Cert, Key string   // files, for an outside cluster
	Log           *zap.Logger
}

// Store is a connection to etcd, and the embedded etcd where there is one.
type Store struct {
	client   *clientv3.Client
	embedded *embedded // nil with an outside cluster
	name     string    // what errors call it
	log      *zap.Logger

	ctx  context.Context // ends when the store is closed
	stop context.CancelFunc
	wg   sync.WaitGroup

	closing sync.Once
	closed  error

	mu      sync.Mutex
	problem string
}

// Time limits. Nothing waits for etcd without one.
const (
	tryTimeout   = 10 * time.Second // of one request; etcd gives up by itself after 7 s
	watchEvery   = 5 * time.Second
	watchTimeout = 4 * time.Second
	closeTimeout = 10 * time.Second
)

// Open starts the embedded etcd, or connects to the outside one, and returns when
// it answers, or with ctx. It refuses a store that a newer berth wrote.
func Open(ctx context.Context, o Options) (*Store, error) {
	s := &Store{log: o.Log, name: "etcd at " + strings.Join(o.Endpoints, ", ")}
	if s.log == nil {
		s.log = zap.NewNop()
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	if err := s.open(ctx, o); err != nil {
		return nil, errors.Join(fmt.Errorf("store: %w", err), s.Close())
	}
	s.wg.Go(s.watch)
	return s, nil
}

func (s *Store) open(ctx context.Context, o Options) error {
	cfg := clientv3.Config{
		Context:   s.ctx,
		Endpoints: o.Endpoints,
		Logger:    s.log.Named("etcd").WithOptions(zap.IncreaseLevel(zap.ErrorLevel)),
		// A member that hangs is left for another one.
		DialKeepAliveTime:    5 * time.Second,
		DialKeepAliveTimeout: 3 * time.Second,
	}
	var err error
	if len(o.Endpoints) == 0 {
		s.name = "the embedded etcd in " + o.Dir
		if s.embedded, err = startEmbedded(ctx, o.Dir, s.log); err != nil {
			return err
		}
		cfg.Endpoints = []string{"unix://" + s.embedded.socket}
	} else if cfg.TLS, err = clientTLS(o); err != nil {
		return err
	}
	if s.client, err = clientv3.New(cfg); err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	if s.embedded != nil {
		if err := s.tidy(ctx); err != nil {
			return err
		}
	}
	_, err = s.format(ctx)
	return err
}

func clientTLS(o Options) (*tls.Config, error) {
	if o.CA == "" && o.Cert == "" {
		return nil, nil // https:// endpoints are checked against the system's authorities
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if o.CA != "" {
		pem, err := os.ReadFile(o.CA)
		if err != nil {
			return nil, err
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s: no certificate in it; want PEM", o.CA)
		}
	}
	if o.Cert != "" {
		pair, err := tls.LoadX509KeyPair(o.Cert, o.Key)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", o.Cert, err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return cfg, nil
}

// Close ends every Term and stops the embedded etcd. A leader resigns first, so
// that the next one need not wait for its lease to run out.
func (s *Store) Close() error {
	s.closing.Do(func() { s.closed = s.close() })
	return s.closed
}

func (s *Store) close() error {
	s.stop()
	s.wg.Wait()
	var errs []error
	if s.client != nil {
		if err := s.client.Close(); err != nil && !errors.Is(err, context.Canceled) {
			errs = append(errs, err)
		}
	}
	if s.embedded != nil {
		errs = append(errs, s.embedded.close())
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("store: closing: %w", err)
	}
	return nil
}

// Problem says what is wrong with the store and what to do; "" when it is well.
func (s *Store) Problem() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.problem
}

func (s *Store) setProblem(says string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if says != s.problem && says != "" {
		s.log.Error("the store has a problem", zap.String("problem", says))
	}
	s.problem = says
}

// watch keeps Problem up to date.
func (s *Store) watch() {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		s.look()
		select {
		case <-s.ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (s *Store) look() {
	ctx, cancel := context.WithTimeout(s.ctx, watchTimeout)
	defer cancel()
	resp, err := s.client.AlarmList(ctx)
	switch {
	case s.ctx.Err() != nil:
	case err != nil:
		s.setProblem(fmt.Sprintf("%s does not answer (%v): nothing can be changed until it does", s.name, err))
	default:
		for _, a := range resp.Alarms {
			switch a.Alarm {
			case etcdserverpb.AlarmType_NOSPACE:
				s.full()
				return
			case etcdserverpb.AlarmType_CORRUPT:
				s.setProblem(s.name + " found that its members differ (CORRUPT): stop the one that is wrong, remove it from the cluster and add it again")
				return
			}
		}
		s.setProblem("")
	}
}

func (s *Store) full() {
	todo := "compact and defragment it, then run etcdctl alarm disarm"
	if s.embedded != nil {
		todo = "restart the server, which compacts it"
	}
	s.setProblem(s.name + " is full (NOSPACE): nothing can be changed; " + todo)
}

// format is the store's version; 0 where nothing was written yet.
func (s *Store) format(ctx context.Context) (int, error) {
	resp, err := s.get(ctx, formatKey)
	if err != nil {
		return 0, err
	}
	if len(resp.Kvs) == 0 {
		return 0, nil
	}
	e, err := decodeFormat(resp.Kvs[0].Value)
	if err != nil {
		return 0, fmt.Errorf("%s: key %s: %w", s.name, formatKey, err)
	}
	return e, nil
}

// get reads with a limit on the time it takes.
func (s *Store) get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	resp, err := s.client.Get(ctx, key, opts...)
	if err != nil {
		return nil, fmt.Errorf("%s: reading %s: %w", s.name, key, err)
	}
	return resp, nil
}
