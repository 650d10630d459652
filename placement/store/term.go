package store

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"
)

// ErrDeposed is that of a leader who leads no more. It changed nothing since.
var ErrDeposed = errors.New("another server leads, or this one was cut off from the store for too long")

// leaseSeconds is how long a leader that vanished still counts as one.
const leaseSeconds = 5

// Term is one leadership.
//
//	Campaign ──> leads ──> Resign, lease run out, key gone, store closed ──> lost
type Term struct {
	store   *Store
	session *concurrency.Session
	key     string
	number  int64

	// The token of the leader's last write that is known to be stored, and how many
	// were made. One that is not known to be stored may turn up later.
	token  string
	writes int

	lost     chan struct{}
	loseOnce sync.Once
}

// Campaign waits until this process leads, or for ctx. who is what Leader says
// meanwhile and then. The store is this berth's, or it is an error.
func (s *Store) Campaign(ctx context.Context, who string) (*Term, error) {
	for wait := time.Duration(0); ; wait = min(max(2*wait, 100*time.Millisecond), 5*time.Second) {
		if err := sleep(ctx, s.ctx, wait); err != nil {
			return nil, fmt.Errorf("store: waiting to lead: %w", err)
		}
		t, err := s.campaign(ctx, who)
		switch {
		case err == nil:
			return t, nil
		case ctx.Err() != nil || s.ctx.Err() != nil || errors.Is(err, ErrNewer):
			return nil, fmt.Errorf("store: waiting to lead: %w", err)
		}
		s.log.Warn("cannot campaign to lead, retrying", zap.Error(err))
	}
}

func (s *Store) campaign(ctx context.Context, who string) (*Term, error) {
	// The lease lives as long as the store, not as this call.
	try, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	lease, err := s.client.Grant(try, leaseSeconds)
	if err != nil {
		return nil, err
	}
	session, err := concurrency.NewSession(s.client, concurrency.WithLease(lease.ID), concurrency.WithContext(s.ctx))
	if err != nil {
		return nil, err
	}
	t := &Term{store: s, session: session, lost: make(chan struct{})}
	if err := t.win(ctx, who); err != nil {
		again, cancel := context.WithTimeout(s.ctx, time.Second)
		defer cancel()
		t.end(again)
		return nil, err
	}
	s.wg.Go(func() {
		<-session.Done()
		t.lose()
	})
	return t, nil
}

// win waits for the older candidates to be gone and readies the store.
func (t *Term) win(ctx context.Context, who string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(t.session.Ctx(), cancel)()

	e := concurrency.NewElection(t.session, leaderPrefix)
	if err := e.Campaign(ctx, who); err != nil {
		return err
	}
	t.key, t.number = e.Key(), e.Rev()

	// Nobody else writes now. What the leader before us may still have on its way
	// fails at its fence.
	token, err := t.store.get(ctx, tokenKey)
	if err != nil {
		return err
	}
	if len(token.Kvs) > 0 {
		t.token = string(token.Kvs[0].Value)
	}
	format, err := t.store.format(ctx)
	if err != nil {
		return err
	}
	var writes []write
	if format == 0 {
		writes = []write{{key: formatKey, value: []byte(encodedFormat())}}
	}
	return t.write(ctx, writes)
}

// Leader names who leads; "" for nobody.
func (s *Store) Leader(ctx context.Context) (who string, err error) {
	resp, err := s.get(ctx, leaderPrefix+"/", clientv3.WithFirstCreate()...)
	if err != nil {
		return "", fmt.Errorf("store: %w", err)
	}
	if len(resp.Kvs) == 0 {
		return "", nil
	}
	return string(resp.Kvs[0].Value), nil
}

// Number grows with every leadership over this store, for ever.
func (t *Term) Number() uint64 { return uint64(t.number) }

// Lost is closed when this process does not lead any more, or cannot know it.
func (t *Term) Lost() <-chan struct{} { return t.lost }

func (t *Term) lose() { t.loseOnce.Do(func() { close(t.lost) }) }

// Resign lets the next one lead at once.
func (t *Term) Resign(ctx context.Context) error {
	t.lose()
	if err := t.end(ctx); err != nil {
		return fmt.Errorf("store: resigning: %w", err)
	}
	return nil
}

func (t *Term) end(ctx context.Context) error {
	t.session.Orphan()
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	_, err := t.store.client.Revoke(ctx, t.session.Lease())
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return nil
	}
	return err
}

// Commit stores the groups, in their order. Nil means that all are stored; after
// an error the first of them may be. It goes on trying while etcd does not answer or
// is full, until ctx ends or another one leads.
func (t *Term) Commit(ctx context.Context, groups []Group) error {
	encoded := make([][]write, len(groups))
	for i, g := range groups {
		var err error
		if encoded[i], err = encode(g); err != nil {
			return fmt.Errorf("store: %w", err)
		}
	}
	transactions, err := pack(encoded)
	if err != nil {
		return fmt.Errorf("store: %w", err)
	}
	for _, writes := range transactions {
		if err := t.write(ctx, writes); err != nil {
			return fmt.Errorf("store: %w", err)
		}
	}
	return nil
}

// write stores one transaction, once, however often it has to be tried.
//
// A try without an answer may be stored, or be on its way still, and come in after
// later writes. So each write compares the token of the one before it and leaves its
// own: a late one finds another token and changes nothing.
func (t *Term) write(ctx context.Context, writes []write) error {
	t.writes++
	mine := fmt.Sprintf("%d/%d", t.number, t.writes)
	ops := []clientv3.Op{clientv3.OpPut(tokenKey, mine)}
	for _, w := range writes {
		if w.delete {
			ops = append(ops, clientv3.OpDelete(w.key))
		} else {
			ops = append(ops, clientv3.OpPut(w.key, string(w.value)))
		}
	}
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		select {
		case <-t.lost:
			return ErrDeposed
		default:
		}
		leads, found, err := t.try(ctx, ops, mine)
		switch {
		case err == nil && !leads:
			t.lose()
			return ErrDeposed
		case err == nil && found == mine:
			t.token = mine
			return nil
		case err == nil && found != t.token && strings.HasPrefix(found, fmt.Sprintf("%d/", t.number)):
			t.token = found // an earlier write of ours, given up, that was stored after all
			continue
		case err == nil:
			return fmt.Errorf("%s: the leader's token is %q, and not %q: something else writes to %s", t.store.name, found, t.token, tokenKey)
		case errors.Is(err, rpctypes.ErrNoSpace):
			t.store.full()
		case forGood(err):
			return fmt.Errorf("%s: %w", t.store.name, err)
		}
		if stop := sleep(ctx, t.store.ctx, wait); stop != nil {
			return fmt.Errorf("%s: %w; the last try: %w", t.store.name, stop, err)
		}
	}
}

// try is one transaction: whether we still lead, and the token it found or left.
func (t *Term) try(ctx context.Context, ops []clientv3.Op, mine string) (leads bool, found string, err error) {
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	before := clientv3.Compare(clientv3.Value(tokenKey), "=", t.token)
	if t.token == "" {
		before = clientv3.Compare(clientv3.Version(tokenKey), "=", 0)
	}
	resp, err := t.store.client.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(t.key), "=", t.number), before).
		Then(ops...).
		Else(clientv3.OpGet(t.key), clientv3.OpGet(tokenKey)).
		Commit()
	if err != nil {
		return false, "", err
	}
	if resp.Succeeded {
		return true, mine, nil
	}
	for _, kv := range resp.Responses[0].GetResponseRange().Kvs {
		leads = kv.CreateRevision == t.number
	}
	for _, kv := range resp.Responses[1].GetResponseRange().Kvs {
		found = string(kv.Value)
	}
	return leads, found, nil
}

// forGood says whether to try the same again is of no use.
func forGood(err error) bool {
	for _, no := range []error{rpctypes.ErrRequestTooLarge, rpctypes.ErrTooManyOps, rpctypes.ErrDuplicateKey, rpctypes.ErrPermissionDenied,
		rpctypes.ErrUserEmpty, rpctypes.ErrInvalidAuthToken, rpctypes.ErrAuthFailed, rpctypes.ErrEmptyKey} {
		if errors.Is(err, no) {
			return true
		}
	}
	return false
}

// sleep waits, and says why it did not wait to the end.
func sleep(ctx, store context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-store.Done():
		return errors.New("the store was closed")
	case <-timer.C:
		return nil
	}
}
