package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// Version is that of the records and of the store as a whole.
const Version = 1

// Keys, as doc.go draws them.
const (
	formatKey    = "berth/format"
	leaderPrefix = "berth/leader"
	tokenKey     = "berth/token"
	recordPrefix = "berth/record/"
	asidePrefix  = "berth/aside/"
)

// envelope is how a record lies in etcd.
type envelope[D any] struct {
	V int `json:"v"`
	D D   `json:"d"`
}

// Record is one record as it is stored.
type Record struct {
	Kind, Key   string
	Data        json.RawMessage
	ModRevision int64 // grows with every write
}

// Aside is a damaged record, kept where nothing reads it.
type Aside struct{ Kind, Key, Reason string }

// ErrNewer is that of a store, or of a record, that a newer berth wrote.
var ErrNewer = errors.New("a newer berth wrote it; upgrade this one")

// decode reads a record. A newer one is ErrNewer, any other error means that it is
// damaged.
func decode(value []byte) (json.RawMessage, error) {
	var e envelope[json.RawMessage]
	if err := json.Unmarshal(value, &e); err != nil {
		return nil, fmt.Errorf("not a record: %w", err)
	}
	switch {
	case e.V > Version:
		return nil, fmt.Errorf("version %d, and this berth knows %d: %w", e.V, Version, ErrNewer)
	case e.V < 1:
		return nil, errors.New("not a record: no version")
	case len(e.D) == 0 || string(e.D) == "null":
		return nil, errors.New("not a record: nothing in it")
	}
	return e.D, nil
}

// split takes a record's key apart, as far as it has parts.
func split(key, prefix string) (kind, name string) {
	kind, name, _ = strings.Cut(strings.TrimPrefix(key, prefix), "/")
	return kind, name
}

// encodedFormat is what the format key holds.
func encodedFormat() string { return fmt.Sprintf(`{"v":%d}`, Version) }

func decodeFormat(value []byte) (int, error) {
	var e envelope[json.RawMessage]
	if err := json.Unmarshal(value, &e); err != nil || e.V < 1 {
		return 0, fmt.Errorf(`%q is no version of a store; want {"v":%d}`, value, Version)
	}
	if e.V > Version {
		return 0, fmt.Errorf("version %d, and this berth knows %d: %w", e.V, Version, ErrNewer)
	}
	return e.V, nil
}
