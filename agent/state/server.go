package state

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"time"

	"go.etcd.io/bbolt"
)

var (
	keyAgentID = []byte("agent")
	keyTerm    = []byte("term")
	keyFloor   = []byte("floor")
	keyHeard   = []byte("heard")
)

// AgentID is random, made once for this file: another file is another agent.
func (s *Store) AgentID() (string, error) {
	var id string
	err := s.db.Update(func(tx *bbolt.Tx) error {
		meta := tx.Bucket(bucketMeta)
		if id = string(meta.Get(keyAgentID)); id != "" {
			return nil
		}
		random := make([]byte, 16)
		rand.Read(random)
		id = hex.EncodeToString(random)
		return meta.Put(keyAgentID, []byte(id))
	})
	return id, err
}

// Term is the highest leadership term whose orders were obeyed; 0: none.
func (s *Store) Term() (uint64, error) { return s.number(keyTerm) }

// RaiseTerm stores a term; a lower one than is stored changes nothing.
func (s *Store) RaiseTerm(term uint64) error {
	return s.db.Update(func(tx *bbolt.Tx) error { return raise(tx, keyTerm, term) })
}

// Floor is the highest generation of a placement server's task that was ever
// forgotten. Whatever is not known and not above it has been here before.
func (s *Store) Floor() (uint64, error) { return s.number(keyFloor) }

// Heard is when the placement server was last known to be heard, since the boot; 0
// where none is stored for this boot.
func (s *Store) Heard() (time.Duration, error) {
	n, err := s.number(keyHeard)
	return time.Duration(n), err
}

// PutHeard stores it.
func (s *Store) PutHeard(sinceBoot time.Duration) error {
	return s.db.Update(func(tx *bbolt.Tx) error { return tx.Bucket(bucketMeta).Put(keyHeard, number(uint64(sinceBoot))) })
}

func (s *Store) number(key []byte) (uint64, error) {
	var n uint64
	err := s.db.View(func(tx *bbolt.Tx) error {
		n = get(tx, key)
		return nil
	})
	return n, err
}

func get(tx *bbolt.Tx, key []byte) uint64 {
	if v := tx.Bucket(bucketMeta).Get(key); len(v) == 8 {
		return binary.BigEndian.Uint64(v)
	}
	return 0
}

func raise(tx *bbolt.Tx, key []byte, to uint64) error {
	if get(tx, key) >= to {
		return nil
	}
	return tx.Bucket(bucketMeta).Put(key, number(to))
}
