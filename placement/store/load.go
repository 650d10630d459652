package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// page is how many records one request reads.
const page = 1000

// Load reads every record, in order of kind and key. One that is damaged is set
// aside, and all that are aside are returned, those of earlier loads too. A record
// that a newer berth wrote fails it, and changes nothing.
func (t *Term) Load(ctx context.Context) ([]Record, []Aside, error) {
	records, damaged, err := t.load(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("store: loading: %w", err)
	}
	for _, d := range damaged {
		if err := t.setAside(ctx, d.path, d.value, d.reason); err != nil {
			return nil, nil, fmt.Errorf("store: setting aside %s: %w", d.path, err)
		}
	}
	aside, err := t.asides(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("store: loading: %w", err)
	}
	return records, aside, nil
}

// SetAside does for a loaded record, whose data its reader does not understand, what
// Load does for one that is damaged.
func (t *Term) SetAside(ctx context.Context, r Record, reason string) error {
	value, err := encode(Group{{r.Kind, r.Key, r.Data}})
	if err == nil {
		err = t.setAside(ctx, r.Kind+"/"+r.Key, value[0].value, reason)
	}
	if err != nil {
		return fmt.Errorf("store: setting aside %s %s: %w", r.Kind, r.Key, err)
	}
	return nil
}

type damage struct {
	path   string // kind/key, where it is well formed
	value  []byte
	reason string
}

func (t *Term) load(ctx context.Context) (records []Record, damaged []damage, err error) {
	err = t.store.each(ctx, recordPrefix, func(key string, value []byte, revision int64) error {
		kind, name := split(key, recordPrefix)
		data, err := decode(value)
		if err == nil && (kind == "" || name == "") {
			err = errors.New("not a record: its key is not a kind and a name")
		}
		switch {
		case errors.Is(err, ErrNewer):
			return fmt.Errorf("%s: %s %s: %w", t.store.name, kind, name, err)
		case err != nil:
			damaged = append(damaged, damage{strings.TrimPrefix(key, recordPrefix), value, err.Error()})
		default:
			records = append(records, Record{kind, name, data, revision})
		}
		return nil
	})
	return records, damaged, err
}

// setAside moves a record out of the way, value and all.
func (t *Term) setAside(ctx context.Context, path string, value []byte, reason string) error {
	t.store.log.Error("a stored record is damaged and was set aside",
		zap.String("record", path), zap.String("reason", reason), zap.String("kept", asidePrefix+path))
	reason = strings.ReplaceAll(reason, "\n", " ")
	return t.write(ctx, []write{
		{key: asidePrefix + path, value: append([]byte(reason+"\n"), value...)},
		{key: recordPrefix + path, delete: true},
	})
}

func (t *Term) asides(ctx context.Context) (aside []Aside, err error) {
	err = t.store.each(ctx, asidePrefix, func(key string, value []byte, _ int64) error {
		kind, name := split(key, asidePrefix)
		reason, _, _ := bytes.Cut(value, []byte("\n"))
		aside = append(aside, Aside{kind, name, string(reason)})
		return nil
	})
	return aside, err
}

// each goes through the keys under prefix as they are at one revision.
func (s *Store) each(ctx context.Context, prefix string, do func(key string, value []byte, revision int64) error) error {
	end, from := clientv3.GetPrefixRangeEnd(prefix), prefix
	for revision := int64(0); ; {
		resp, err := s.get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(page), clientv3.WithRev(revision))
		if err != nil {
			return err
		}
		if revision == 0 {
			revision = resp.Header.Revision
		}
		for _, kv := range resp.Kvs {
			if err := do(string(kv.Key), kv.Value, kv.ModRevision); err != nil {
				return err
			}
			from = string(kv.Key) + "\x00"
		}
		if !resp.More {
			return nil
		}
	}
}
