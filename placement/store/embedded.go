package store

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"
)

// embedded is an etcd of one member in this process. It listens on one unix socket,
// in a folder that only its owner enters.
//
//	<dir>/etcd/           0700
//	    lock              flocked by the process that has the folder; its pid
//	    client.sock
//	    data/             etcd's own
type embedded struct {
	etcd   *embed.Etcd
	lock   *os.File
	socket string
	hush   *atomic.Bool // while etcd stops
}

const (
	longestSocket = 107     // bytes of a unix socket's address
	quota         = 4 << 30 // bytes of etcd's database
	history       = "5m"    // how long what was overwritten is kept
	readyTimeout  = 20 * time.Second
)

func startEmbedded(ctx context.Context, dir string, log *zap.Logger) (*embedded, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	dir = filepath.Join(dir, "etcd")
	b := &embedded{socket: filepath.Join(dir, "client.sock"), hush: new(atomic.Bool)}
	if n := len(b.socket); n > longestSocket {
		return nil, fmt.Errorf("%s takes %d bytes; a socket's address takes %d: give a data folder with a shorter path", b.socket, n, longestSocket)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return nil, err
	}
	if b.lock, err = takeLock(filepath.Join(dir, "lock")); err != nil {
		return nil, err
	}
	// Over some damage etcd panics where nobody can catch it. A start after such a
	// one says so.
	dying := filepath.Join(dir, "starting")
	if _, err := os.Stat(dying); err == nil {
		log.Warn("the last start died while etcd read its files; if this one does too, they are damaged: put back a copy of the folder, or move it away to begin with an empty store", zap.String("folder", dir))
	}
	if err := errors.Join(os.WriteFile(dying, nil, 0o600), checkDatabase(filepath.Join(dir, "data", "member", "snap", "db"))); err != nil {
		b.lock.Close()
		return nil, err
	}
	defer os.Remove(dying)
	if b.etcd, err = startEtcd(ctx, dir, b.socket, b.logger(log)); err != nil {
		b.lock.Close()
		return nil, fmt.Errorf("the embedded etcd cannot start over %s: %w; if its files are damaged, put back a copy of the folder, or move it away to begin with an empty store", dir, err)
	}
	return b, nil
}

// takeLock keeps two servers apart. etcd's own locks would make the second wait in
// silence, after it took the first one's socket away. The kernel drops the lock with
// its process, whatever ends that.
func takeLock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		pid := make([]byte, 20)
		n, _ := f.ReadAt(pid, 0)
		f.Close()
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("locking %s: %w", path, err)
		}
		return nil, fmt.Errorf("another server, process %s, has %s; stop it, or give this one another data folder", strings.TrimSpace(string(pid[:n])), filepath.Dir(path))
	}
	if err := errors.Join(f.Truncate(0), writeAt(f, fmt.Sprintln(os.Getpid()))); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func writeAt(f *os.File, text string) error { _, err := f.WriteAt([]byte(text), 0); return err }

func startEtcd(ctx context.Context, dir, socket string, log *zap.Logger) (*embed.Etcd, error) {
	client := url.URL{Scheme: "unix", Path: socket}
	peer := url.URL{Scheme: "unix", Host: "berth"} // a name; a single member hears no peers

	cfg := embed.NewConfig()
	cfg.Name = "berth"
	cfg.Dir = filepath.Join(dir, "data")
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{}, []url.URL{peer}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	cfg.EnableGRPCGateway = false
	cfg.AutoCompactionMode, cfg.AutoCompactionRetention = embed.CompactorModePeriodic, history
	cfg.QuotaBackendBytes = quota

	// etcd ends the process, or panics, over files it cannot read. While it starts,
	// that becomes an error; later, when its log cannot be written, the process ends:
	// what it acknowledged is on disk, and the next start finds it.
	died := &lastWord{says: make(chan error, 1)}
	died.starting.Store(true)
	defer died.starting.Store(false)
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(log.WithOptions(
		zap.WithFatalHook(died), zap.WithPanicHook(died)))

	type result struct {
		etcd *embed.Etcd
		err  error
	}
	started := make(chan result, 1)
	go func() {
		debug.SetPanicOnFault(true) // a database shorter than it says is read through a map
		defer func() {
			if p := recover(); p != nil {
				started <- result{err: fmt.Errorf("%v", p)}
			}
		}()
		etcd, err := embed.StartEtcd(cfg)
		started <- result{etcd, err}
	}()
	var r result
	select {
	case r = <-started:
	case err := <-died.says:
		return nil, err
	case <-ctx.Done():
		go func() { // etcd cannot be interrupted before it stands
			if r := <-started; r.etcd != nil {
				r.etcd.Close()
			}
		}()
		return nil, ctx.Err()
	}
	if r.err != nil {
		return nil, r.err
	}
	var err error
	select {
	case <-r.etcd.Server.ReadyNotify():
		return r.etcd, nil
	case err = <-r.etcd.Err():
	case err = <-died.says:
	case <-r.etcd.Server.StopNotify():
		err = errors.New("it stopped")
	case <-time.After(readyTimeout):
		// A log that ends before the database does: every new entry counts as one
		// that was applied long ago.
		err = fmt.Errorf("it was not ready within %v; its log, data/member/wal, may be older than its database", readyTimeout)
	case <-ctx.Done():
		err = ctx.Err()
	}
	go r.etcd.Close() // one that does not work does not stop either; the process will end
	return nil, err
}

// checkDatabase finds a database that is shorter than it was, which etcd would read
// through a map, and die of. bbolt's file begins with two pages that each say, in the
// machine's byte order, how many pages there are; the younger one counts.
func checkDatabase(path string) error {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	const magic, head, size = 0xED0CDAED, 16, 64
	pageSize := int64(os.Getpagesize())
	var want, youngest uint64
	for _, at := range []int64{0, pageSize} {
		page := make([]byte, head+size)
		if _, err := f.ReadAt(page, at); err != nil {
			continue // etcd says what is wrong with so short a one
		}
		order, meta := binary.NativeEndian, page[head:]
		if txn := order.Uint64(meta[48:]); order.Uint32(meta) == magic && txn >= youngest {
			youngest, want = txn, order.Uint64(meta[40:])*uint64(order.Uint32(meta[8:]))
		}
	}
	if uint64(info.Size()) < want {
		return fmt.Errorf("%s is damaged: it has %d bytes of %d; put back a copy of the store's folder, %s, or move it away to begin with an empty store",
			path, info.Size(), want, filepath.Dir(filepath.Dir(filepath.Dir(filepath.Dir(path)))))
	}
	return nil
}

// logger lets warnings and worse through, but for those that say nothing here.
func (b *embedded) logger(log *zap.Logger) *zap.Logger {
	return log.Named("etcd").WithOptions(zap.WrapCore(func(core zapcore.Core) zapcore.Core { return &quiet{core, b.hush} }))
}

type quiet struct {
	zapcore.Core
	hush *atomic.Bool
}

func (q *quiet) Enabled(l zapcore.Level) bool {
	return l >= zap.WarnLevel && (l > zap.ErrorLevel || !q.hush.Load()) && q.Core.Enabled(l)
}

func (q *quiet) With(fields []zapcore.Field) zapcore.Core { return &quiet{q.Core.With(fields), q.hush} }

func (q *quiet) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	switch e.Message {
	case "Running http and grpc server on single port. This is not recommended for production.",
		"simple token is not cryptographically signed": // nobody logs in
		return ce
	}
	if !q.Enabled(e.Level) {
		return ce
	}
	return q.Core.Check(e, ce)
}

// lastWord hears what etcd would end the process with.
type lastWord struct {
	starting atomic.Bool
	says     chan error
}

func (l *lastWord) OnWrite(e *zapcore.CheckedEntry, fields []zapcore.Field) {
	if !l.starting.Load() {
		if e.Level == zap.PanicLevel {
			panic(e.Message)
		}
		os.Exit(1)
	}
	values := zapcore.NewMapObjectEncoder()
	for _, f := range fields {
		f.AddTo(values)
	}
	text := e.Message
	if err, ok := values.Fields["error"]; ok {
		text += fmt.Sprint(": ", err)
	}
	select {
	case l.says <- errors.New(text):
	default:
	}
	runtime.Goexit()
}

func (b *embedded) close() error {
	defer b.lock.Close()
	b.hush.Store(true) // it reports each of its closed sockets as an error
	done := make(chan struct{})
	go func() { b.etcd.Close(); close(done) }()
	select {
	case <-done:
		return nil
	case <-time.After(closeTimeout):
		return fmt.Errorf("the embedded etcd did not stop within %v", closeTimeout)
	}
}

// tidy removes what a dead process left in the embedded etcd: its leadership, for
// whose lease the next leader would wait, and an alarm about space, where there is
// space again.
func (s *Store) tidy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	alarms, err := s.client.AlarmList(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	for _, a := range alarms.Alarms {
		if a.Alarm == etcdserverpb.AlarmType_NOSPACE {
			if err := s.makeSpace(ctx); err != nil {
				return fmt.Errorf("%s is full, and making space in it failed: %w", s.name, err)
			}
		}
	}
	if _, err := s.client.Delete(ctx, leaderPrefix+"/", clientv3.WithPrefix()); err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	return nil
}

// makeSpace forgets history, shrinks the file and, if that helped, ends the alarm.
func (s *Store) makeSpace(ctx context.Context) error {
	endpoint := s.client.Endpoints()[0]
	status, err := s.client.Status(ctx, endpoint)
	if err != nil {
		return err
	}
	// An error here says that this revision was compacted already.
	_, _ = s.client.Compact(ctx, status.Header.Revision, clientv3.WithCompactPhysical())
	if _, err := s.client.Defragment(ctx, endpoint); err != nil {
		return err
	}
	if status, err = s.client.Status(ctx, endpoint); err != nil {
		return err
	}
	if status.DbSize > quota/10*9 {
		return nil // it is full of records: the alarm stays
	}
	s.log.Warn("the store was full; its history is forgotten and it is open again", zap.Int64("bytes", status.DbSize))
	_, err = s.client.AlarmDisarm(ctx, &clientv3.AlarmMember{})
	return err
}
