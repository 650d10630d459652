package store

import (
	"encoding/json"
	"fmt"
	"strings"
)

// Op puts one record, or deletes it where Value is nil.
type Op struct {
	Kind, Key string
	Value     any // as encoding/json writes it
}

// Group is stored whole or not at all. Of two operations on one record the later
// counts.
type Group []Op

// What an outside etcd takes by default is 128 operations and 1.5 MiB a
// transaction. One operation is the token's.
const (
	maxOps   = 127
	maxBytes = 1 << 20
	overhead = 32 // bytes of an operation beside key and value, at most
)

// write is an operation as etcd sees it.
type write struct {
	key    string
	value  []byte
	delete bool
}

func (w write) size() int { return len(w.key) + len(w.value) + overhead }

// encode makes a group's writes, one a key.
func encode(group Group) ([]write, error) {
	var writes []write
	at := map[string]int{}
	for _, op := range group {
		if op.Kind == "" || op.Key == "" || strings.Contains(op.Kind, "/") {
			return nil, fmt.Errorf("record %q of kind %q: want a key, and a kind without /", op.Key, op.Kind)
		}
		w := write{key: recordPrefix + op.Kind + "/" + op.Key, delete: op.Value == nil}
		if !w.delete {
			var err error
			if w.value, err = json.Marshal(envelope[any]{Version, op.Value}); err != nil {
				return nil, fmt.Errorf("record %s of kind %s: %w", op.Key, op.Kind, err)
			}
		}
		if i, ok := at[w.key]; ok {
			writes[i] = w
			continue
		}
		at[w.key] = len(writes)
		writes = append(writes, w)
	}
	return writes, nil
}

// pack lays groups, in their order and each in one piece, into as few transactions
// as their limits allow. Two writes of one key come into two transactions.
func pack(groups [][]write) ([][]write, error) {
	var transactions [][]write
	var now []write
	size, keys := 0, map[string]bool{}
	for _, group := range groups {
		more, again := 0, false
		for _, w := range group {
			more += w.size()
			again = again || keys[w.key]
		}
		if len(group) > maxOps || more > maxBytes {
			return nil, fmt.Errorf("a group of %d operations and %d bytes, the first on %s: want at most %d and %d, which one transaction takes",
				len(group), more, strings.TrimPrefix(group[0].key, recordPrefix), maxOps, maxBytes)
		}
		if again || len(now)+len(group) > maxOps || size+more > maxBytes {
			transactions = append(transactions, now)
			now, size = nil, 0
			clear(keys)
		}
		for _, w := range group {
			keys[w.key] = true
		}
		now = append(now, group...)
		size += more
	}
	if len(now) > 0 {
		transactions = append(transactions, now)
	}
	return transactions, nil
}
