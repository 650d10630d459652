package store_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"github.com/berth-gpu/berth/placement/store"
)

// folder is one whose path is short enough for a socket in it.
func folder(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "berth-store-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func limit(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func logger(t testing.TB) *zap.Logger {
	return zaptest.NewLogger(t, zaptest.Level(zap.WarnLevel))
}

// open opens a store that lives as long as the test, unless it is closed before.
func open(t testing.TB, o store.Options) *store.Store {
	t.Helper()
	o.Log = logger(t)
	s, err := store.Open(limit(t, 30*time.Second), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func lead(t testing.TB, s *store.Store, who string) *store.Term {
	t.Helper()
	term, err := s.Campaign(limit(t, 30*time.Second), who)
	if err != nil {
		t.Fatal(err)
	}
	return term
}

// socket is where the embedded etcd of dir listens: an outside one for others.
func socket(dir string) string { return "unix://" + filepath.Join(dir, "etcd", "client.sock") }

// outside is an embedded etcd that several stores use as an outside one, and a
// client to look at it.
func outside(t testing.TB) (endpoint string, etcd *clientv3.Client) {
	t.Helper()
	dir := folder(t)
	open(t, store.Options{Dir: dir})
	return socket(dir), client(t, socket(dir))
}

func client(t testing.TB, endpoint string) *clientv3.Client {
	t.Helper()
	etcd, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { etcd.Close() })
	return etcd
}

func put(t testing.TB, etcd *clientv3.Client, key, value string) {
	t.Helper()
	if _, err := etcd.Put(limit(t, 10*time.Second), key, value); err != nil {
		t.Fatal(err)
	}
}

// value is what etcd has at a key, and how often it was written since it was there.
func value(t testing.TB, etcd *clientv3.Client, key string) (string, int64) {
	t.Helper()
	resp, err := etcd.Get(limit(t, 10*time.Second), key)
	if err != nil {
		t.Fatal(err)
	}
	if len(resp.Kvs) == 0 {
		return "", 0
	}
	return string(resp.Kvs[0].Value), resp.Kvs[0].Version
}

func one(key string, v any) []store.Group { return []store.Group{{{Kind: "task", Key: key, Value: v}}} }

// TestRoundTrip: what was committed is there after a restart, and nothing else.
func TestRoundTrip(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	ctx := limit(t, time.Minute)
	s := open(t, store.Options{Dir: dir})
	first := lead(t, s, "one")
	if who, err := s.Leader(ctx); err != nil || who != "one" {
		t.Fatal(who, err)
	}
	var groups []store.Group
	for i := range 1200 {
		groups = append(groups, store.Group{{Kind: "task", Key: fmt.Sprintf("t%04d", i), Value: map[string]int{"n": i}}})
	}
	// A group of as many operations, and one of as many bytes, as one may have.
	full := store.Group{}
	for i := range 127 {
		full = append(full, store.Op{Kind: "event", Key: fmt.Sprint(i), Value: i})
	}
	large := store.Op{Kind: "definition", Key: "large", Value: strings.Repeat("x", 1<<20-32-len(`berth/record/definition/large{"v":1,"d":""}`))}
	if err := first.Commit(ctx, append(groups, full, store.Group{large})); err != nil {
		t.Fatal(err)
	}
	if err := first.Commit(ctx, []store.Group{{{Kind: "task", Key: "t0000"}, {Kind: "task", Key: "t0001", Value: "b"}}}); err != nil {
		t.Fatal(err)
	}
	if err := first.Commit(ctx, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-first.Lost():
	default:
		t.Error("leads after its store was closed")
	}
	if err := first.Commit(ctx, one("t", 1)); !errors.Is(err, store.ErrDeposed) {
		t.Error(err)
	}

	s = open(t, store.Options{Dir: dir})
	if who, err := s.Leader(ctx); err != nil || who != "" {
		t.Error("the dead leader was left:", who, err)
	}
	second := lead(t, s, "two")
	if second.Number() <= first.Number() {
		t.Errorf("term %d after %d", second.Number(), first.Number())
	}
	records, aside, err := second.Load(ctx)
	if err != nil || len(aside) > 0 || len(records) != 1199+127+1 {
		t.Fatal(len(records), aside, err)
	}
	if records[0].Kind != "definition" || len(records[0].Data) < 1<<20-100 {
		t.Error(records[0].Kind, len(records[0].Data))
	}
	tasks := records[128:]
	if tasks[0].Key != "t0001" || string(tasks[0].Data) != `"b"` || tasks[0].ModRevision <= tasks[1].ModRevision {
		t.Errorf("%+v", tasks[0])
	}
	var v struct{ N int }
	if err := json.Unmarshal(tasks[1198].Data, &v); err != nil || v.N != 1199 {
		t.Error(v, err)
	}
}

// TestRefused: a group that cannot be stored is refused before anything is.
func TestRefused(t *testing.T) {
	t.Parallel()
	s := open(t, store.Options{Dir: folder(t)})
	term := lead(t, s, "one")
	ctx := limit(t, time.Minute)
	many := store.Group{}
	for i := range 128 {
		many = append(many, store.Op{Kind: "task", Key: fmt.Sprint(i), Value: i})
	}
	for _, bad := range []store.Group{many, {{Kind: "task", Key: "large", Value: strings.Repeat("x", 1<<20)}}, {{Kind: "task"}}} {
		err := term.Commit(ctx, append(one("good", 1), bad))
		if err == nil || !strings.HasPrefix(err.Error(), "store: ") {
			t.Error(err)
		}
	}
	if records, _, err := term.Load(ctx); err != nil || len(records) > 0 {
		t.Error(records, err)
	}
}

// TestDeposed: who leads no more changes nothing, and the next one leads.
func TestDeposed(t *testing.T) {
	t.Parallel()
	endpoint, etcd := outside(t)
	ctx := limit(t, time.Minute)
	a, b := open(t, store.Options{Endpoints: []string{endpoint}}), open(t, store.Options{Endpoints: []string{endpoint}})
	first := lead(t, a, "a")
	if err := first.Commit(ctx, one("x", 1)); err != nil {
		t.Fatal(err)
	}

	next := make(chan *store.Term)
	go func() {
		term, err := b.Campaign(ctx, "b")
		if err != nil {
			t.Error(err)
		}
		next <- term
	}()
	for n := int64(0); n < 2; {
		resp, err := etcd.Get(ctx, "berth/leader/", clientv3.WithPrefix(), clientv3.WithCountOnly())
		if err != nil {
			t.Fatal(err)
		}
		n = resp.Count
	}
	if who, err := b.Leader(ctx); err != nil || who != "a" {
		t.Error(who, err)
	}
	select {
	case <-next:
		t.Fatal("two lead")
	default:
	}

	// As if its lease had run out while it did not look.
	resp, err := etcd.Get(ctx, "berth/leader/", clientv3.WithFirstCreate()...)
	if err != nil || len(resp.Kvs) == 0 {
		t.Fatal(err)
	}
	if _, err := etcd.Delete(ctx, string(resp.Kvs[0].Key)); err != nil {
		t.Fatal(err)
	}
	second := <-next
	if second == nil {
		t.FailNow()
	}
	if second.Number() <= first.Number() {
		t.Errorf("term %d after %d", second.Number(), first.Number())
	}
	if err := second.Commit(ctx, one("x", 2)); err != nil {
		t.Fatal(err)
	}
	if err := first.Commit(ctx, []store.Group{{{Kind: "task", Key: "x", Value: 3}, {Kind: "task", Key: "y", Value: 3}}}); !errors.Is(err, store.ErrDeposed) {
		t.Error(err)
	}
	select {
	case <-first.Lost():
	default:
		t.Error("it was not told")
	}
	records, _, err := second.Load(ctx)
	if err != nil || len(records) != 1 || string(records[0].Data) != "2" {
		t.Error(records, err)
	}
	if who, err := a.Leader(ctx); err != nil || who != "b" {
		t.Error(who, err)
	}

	// Who was deposed may lead again, later.
	if err := second.Resign(ctx); err != nil {
		t.Fatal(err)
	}
	third := lead(t, a, "a")
	if third.Number() <= second.Number() {
		t.Errorf("term %d after %d", third.Number(), second.Number())
	}
	if err := second.Commit(ctx, one("x", 4)); !errors.Is(err, store.ErrDeposed) {
		t.Error(err)
	}
	if err := third.Commit(ctx, one("x", 5)); err != nil {
		t.Error(err)
	}
}

// TestLeaseGone: a leader whose lease is gone is told so.
func TestLeaseGone(t *testing.T) {
	t.Parallel()
	endpoint, etcd := outside(t)
	ctx := limit(t, time.Minute)
	s := open(t, store.Options{Endpoints: []string{endpoint}})
	term := lead(t, s, "a")
	leases, err := etcd.Leases(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range leases.Leases {
		if _, err := etcd.Revoke(ctx, l.ID); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-term.Lost():
	case <-ctx.Done():
		t.Fatal("it was not told")
	}
	if again := lead(t, s, "a"); again.Number() <= term.Number() {
		t.Errorf("term %d after %d", again.Number(), term.Number())
	}
}

// TestCampaignEnds: one that waits to lead stops with its context, and leaves
// nothing that others would wait for.
func TestCampaignEnds(t *testing.T) {
	t.Parallel()
	endpoint, etcd := outside(t)
	a, b := open(t, store.Options{Endpoints: []string{endpoint}}), open(t, store.Options{Endpoints: []string{endpoint}})
	term := lead(t, a, "a")
	if _, err := b.Campaign(limit(t, 200*time.Millisecond), "b"); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	ctx := limit(t, time.Minute)
	resp, err := etcd.Get(ctx, "berth/leader/", clientv3.WithPrefix())
	if err != nil || len(resp.Kvs) != 1 || string(resp.Kvs[0].Value) != "a" {
		t.Error(resp, err)
	}
	leases, err := etcd.Leases(ctx)
	if err != nil || len(leases.Leases) != 1 {
		t.Error(leases, err)
	}
	if err := term.Commit(ctx, one("x", 1)); err != nil {
		t.Error(err)
	}
}

// TestAside: a damaged record stops nothing, and is kept.
func TestAside(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	s := open(t, store.Options{Dir: dir})
	term := lead(t, s, "one")
	ctx := limit(t, time.Minute)
	if err := term.Commit(ctx, []store.Group{{{Kind: "task", Key: "a", Value: "fine"}, {Kind: "task", Key: "odd", Value: "odd"}}}); err != nil {
		t.Fatal(err)
	}
	etcd := client(t, socket(dir))
	put(t, etcd, "berth/record/task/b", `{"v":1,"d":{"id`)
	put(t, etcd, "berth/record/task/c", "\x00\xff\n")
	put(t, etcd, "berth/record/stray", `{"v":1,"d":1}`)
	put(t, etcd, "berth/record/stray/", `{"v":1,"d":1}`)
	put(t, etcd, "elsewhere", "not ours")
	records, aside, err := term.Load(ctx)
	if err != nil || len(records) != 2 || string(records[0].Data) != `"fine"` {
		t.Fatal(records, err)
	}
	if err := term.SetAside(ctx, records[1], "no such\nword"); err != nil {
		t.Fatal(err)
	}
	if len(aside) != 4 {
		t.Errorf("%+v", aside)
	}
	records, aside, err = term.Load(ctx)
	want := []store.Aside{
		{Kind: "stray", Reason: "not a record: its key is not a kind and a name"},
		{Kind: "stray", Reason: "not a record: its key is not a kind and a name"},
		{Kind: "task", Key: "b", Reason: "not a record: unexpected end of JSON input"},
		{Kind: "task", Key: "c", Reason: `not a record: invalid character '\x00' looking for beginning of value`},
		{Kind: "task", Key: "odd", Reason: "no such word"},
	}
	if err != nil || len(records) != 1 || fmt.Sprint(aside) != fmt.Sprint(want) {
		t.Errorf("%v %+v %v", records, aside, err)
	}
	if kept, _ := value(t, etcd, "berth/aside/task/c"); !strings.HasSuffix(kept, "\n\x00\xff\n") {
		t.Errorf("%q", kept)
	}
}

// TestNewer: what a newer berth wrote is refused, and left as it is.
func TestNewer(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	endpoint := socket(dir)
	s := open(t, store.Options{Dir: dir})
	etcd := client(t, endpoint)
	term := lead(t, s, "one")
	ctx := limit(t, time.Minute)
	put(t, etcd, "berth/record/task/a", `{"v":1,"d"`)
	put(t, etcd, "berth/record/task/b", `{"v":2,"e":"later"}`)
	_, _, err := term.Load(ctx)
	if want := "store: loading: the embedded etcd in " + dir + ": task b: version 2, and this berth knows 1: a newer berth wrote it; upgrade this one"; err == nil || err.Error() != want || !errors.Is(err, store.ErrNewer) {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	if v, _ := value(t, etcd, "berth/record/task/a"); v != `{"v":1,"d"` {
		t.Error("a newer store was changed")
	}

	put(t, etcd, "berth/format", `{"v":2}`)
	_, err = store.Open(ctx, store.Options{Endpoints: []string{endpoint}})
	if want := "store: etcd at " + endpoint + ": key berth/format: version 2, and this berth knows 1: a newer berth wrote it; upgrade this one"; err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	if err := term.Resign(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Campaign(ctx, "one"); !errors.Is(err, store.ErrNewer) {
		t.Error(err)
	}
	put(t, etcd, "berth/format", `?`)
	if _, err := store.Open(ctx, store.Options{Endpoints: []string{endpoint}}); err == nil || !strings.Contains(err.Error(), `"?" is no version of a store; want {"v":1}`) {
		t.Error(err)
	}
}

// TestOneProcess: a second server of a folder is told who has it, and the first
// goes on.
func TestOneProcess(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	ctx := limit(t, time.Minute)
	s := open(t, store.Options{Dir: dir})
	_, err := store.Open(ctx, store.Options{Dir: dir})
	want := fmt.Sprintf("store: another server, process %d, has %s/etcd; stop it, or give this one another data folder", os.Getpid(), dir)
	if err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	if err := lead(t, s, "one").Commit(ctx, one("x", 1)); err != nil {
		t.Error(err)
	}
	if says := s.Problem(); says != "" {
		t.Error(says)
	}
}

// TestCannotOpen: each error says where, and what to do.
func TestCannotOpen(t *testing.T) {
	t.Parallel()
	long := folder(t) + "/" + strings.Repeat("long/", 20)
	file := filepath.Join(folder(t), "file")
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name    string
		options store.Options
		want    string
	}{
		{"too long a path", store.Options{Dir: long}, `store: .*/client.sock takes 1\d\d bytes; a socket's address takes 107: give a data folder with a shorter path`},
		{"no folder", store.Options{Dir: file}, `store: mkdir .*/file: not a directory`},
		{"nobody there", store.Options{Endpoints: []string{"unix://" + file}}, `store: etcd at unix://.*/file: reading berth/format: .*`},
		{"no file of authorities", store.Options{Endpoints: []string{"https://127.0.0.1:1"}, CA: "/nowhere"}, `store: open /nowhere: no such file or directory`},
		{"no certificate", store.Options{Endpoints: []string{"https://127.0.0.1:1"}, CA: file}, `store: .*/file: no certificate in it; want PEM`},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := store.Open(limit(t, time.Second), test.options)
			if err == nil || !regexp.MustCompile("^"+test.want+"$").MatchString(err.Error()) {
				t.Errorf("%v", err)
			}
		})
	}
}

// TestNoSpace: a full etcd is a problem that is said, and Commit waits for its end.
func TestNoSpace(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	full(t, dir)

	// The next start has room again, by forgetting what was overwritten.
	s := open(t, store.Options{Dir: dir})
	term := lead(t, s, "two")
	ctx := limit(t, time.Minute)
	if err := term.Commit(ctx, one("x", "after")); err != nil {
		t.Fatal(err)
	}
	if says := s.Problem(); says != "" {
		t.Error(says)
	}
}

// full fills an etcd with a small quota until it takes no more, in the place where an
// embedded one would be.
func full(t *testing.T, dir string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(dir, "etcd"), 0o700); err != nil {
		t.Fatal(err)
	}
	here := url.URL{Scheme: "unix", Path: filepath.Join(dir, "etcd", "client.sock")}
	cfg := embed.NewConfig()
	cfg.Name, cfg.Dir = "berth", filepath.Join(dir, "etcd", "data")
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{here}, []url.URL{here}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{}, []url.URL{{Scheme: "unix", Host: "berth"}}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	cfg.QuotaBackendBytes = 4 << 20
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	etcd, err := embed.StartEtcd(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer etcd.Close()

	s := open(t, store.Options{Endpoints: []string{socket(dir)}})
	term := lead(t, s, "one")
	ctx, cancel := context.WithCancel(limit(t, 30*time.Second))
	go func() {
		for s.Problem() == "" && ctx.Err() == nil {
			time.Sleep(10 * time.Millisecond)
		}
		cancel()
	}()
	for i := 0; err == nil; i++ {
		err = term.Commit(ctx, one("x", strings.Repeat(fmt.Sprint(i%10), 1<<19)))
	}
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "database space exceeded") {
		t.Fatal(err)
	}
	want := "etcd at " + socket(dir) + " is full (NOSPACE): nothing can be changed; compact and defragment it, then run etcdctl alarm disarm"
	if says := s.Problem(); says != want {
		t.Errorf("got  %s\nwant %s", says, want)
	}
	// It still leads and reads.
	if records, _, err := term.Load(limit(t, 10*time.Second)); err != nil || len(records) != 1 {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
