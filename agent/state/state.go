// Package state keeps what must survive a crash of the agent: its tasks, the
// generations it has seen, one record per GPU, and what stands between it and a
// placement server.
//
// Every Put is on disk when it returns (bbolt syncs each transaction), so the
// agent stores a change before it acts on it and may be killed between any two
// lines. One process opens the file at a time; a second one is refused. A
// record that cannot be read is moved aside with its reason and never stops
// the others; a file written by a newer version is refused whole.
package state

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"time"

	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
)

// Version is the layout that this code writes and reads.
const Version = 1

var (
	bucketMeta        = []byte("meta")
	bucketTasks       = []byte("tasks")
	bucketGPUs        = []byte("gpus")
	bucketGenerations = []byte("generations")
	bucketAside       = []byte("aside")

	keyVersion    = []byte("version")
	keyBootID     = []byte("boot")
	keyInstance   = []byte("instance")
	keyGeneration = []byte("generation")
)

// Task is one task that the agent accepted, with all that it needs after a
// restart. Observations (is the container running?) are not here: Docker's
// list is the truth.
type Task struct {
	ID         string          `json:"id"`
	Name       string          `json:"name"` // the wanted task that it serves
	Hash       string          `json:"hash"` // of the definition as it was given
	Generation uint64          `json:"generation"`
	Definition json.RawMessage `json:"definition"`
	GPUs       []string        `json:"gpus,omitempty"`
	Fleet      bool            `json:"fleet,omitempty"`     // a placement server's: the name is this start's alone, the generation the fleet's
	StopAfter  time.Duration   `json:"stopAfter,omitempty"` // the server not heard for this long: the agent ends it; 0: never

	Desired        string    `json:"desired"` // RUNNING or STOPPED
	StopCode       string    `json:"stopCode,omitempty"`
	StoppedReason  string    `json:"stoppedReason,omitempty"`
	StoppedByAgent bool      `json:"stoppedByAgent,omitempty"` // berth itself had to stop it: its source may start it again
	Released       bool      `json:"released,omitempty"`       // its source no longer wants it
	Accepted       time.Time `json:"accepted"`
	Started        time.Time `json:"started,omitzero"`
	StopAsked      time.Time `json:"stopAsked,omitzero"`
	Stopped        time.Time `json:"stopped,omitzero"`

	Containers []Container `json:"containers"` // in the definition's order
}

// Container is what is stored of one container.
type Container struct {
	Name     string    `json:"name"`
	DockerID string    `json:"dockerId,omitempty"`
	Started  time.Time `json:"started,omitzero"`
	Finished time.Time `json:"finished,omitzero"`
	ExitCode *int      `json:"exitCode,omitempty"`
	Reason   string    `json:"reason,omitempty"`
	Restarts int       `json:"restarts,omitempty"`
	Done     bool      `json:"done,omitempty"` // ended, and not to be started again
}

// Aside is a record that could not be read.
type Aside struct {
	Kind, Key, Reason string
}

// Store is the open file.
type Store struct {
	db   *bbolt.DB
	path string
}

// Open opens or makes the file in dir (0700). It fails within a second when
// another process has it open, and at once on a file of a newer version.
func Open(dir string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("state folder: %w", err)
	}
	path := filepath.Join(dir, "agent.db")
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: time.Second})
	if errors.Is(err, bolterrors.ErrTimeout) {
		return nil, fmt.Errorf("%s is in use: another berth-agent runs with this state folder; stop it first, or give this one its own stateDir", path)
	}
	if err != nil {
		return nil, fmt.Errorf("%s cannot be read (%w): move it away to start afresh; containers labelled with this instance are then removed and their tasks started again", path, err)
	}
	s := &Store{db: db, path: path}
	if err := s.prepare(); err != nil {
		db.Close()
		return nil, err
	}
	return s, nil
}

func (s *Store) prepare() error {
	return s.db.Update(func(tx *bbolt.Tx) error {
		for _, b := range [][]byte{bucketMeta, bucketTasks, bucketGPUs, bucketGenerations, bucketAside} {
			if _, err := tx.CreateBucketIfNotExists(b); err != nil {
				return err
			}
		}
		meta := tx.Bucket(bucketMeta)
		v := meta.Get(keyVersion)
		if v == nil {
			return meta.Put(keyVersion, number(Version))
		}
		if len(v) != 8 {
			return fmt.Errorf("%s: its version record is damaged (%d bytes, want 8)", s.path, len(v))
		}
		if got := binary.BigEndian.Uint64(v); got > Version {
			return fmt.Errorf("%s was written by a newer berth-agent (layout %d, this one reads up to %d): install that version again, or purge", s.path, got, Version)
		}
		return nil
	})
}

// Close closes the file.
func (s *Store) Close() error { return s.db.Close() }

// Begin ties the file to an instance name and a boot. It reports whether the
// host has booted since the last Begin: every pid and container state stored
// before is then void. A file of another instance is refused.
func (s *Store) Begin(instance, bootID string) (rebooted bool, err error) {
	err = s.db.Update(func(tx *bbolt.Tx) error {
		meta := tx.Bucket(bucketMeta)
		if old := string(meta.Get(keyInstance)); old != "" && old != instance {
			return fmt.Errorf("%s belongs to instance %q, not %q: give each agent its own stateDir", s.path, old, instance)
		}
		old := string(meta.Get(keyBootID))
		rebooted = old != "" && old != bootID
		if rebooted {
			if err := meta.Delete(keyHeard); err != nil { // it counts from the boot
				return err
			}
		}
		if err := meta.Put(keyInstance, []byte(instance)); err != nil {
			return err
		}
		return meta.Put(keyBootID, []byte(bootID))
	})
	return rebooted, err
}

// NextGeneration returns a number larger than any it returned before.
func (s *Store) NextGeneration() (uint64, error) {
	var g uint64
	err := s.db.Update(func(tx *bbolt.Tx) error {
		meta := tx.Bucket(bucketMeta)
		if v := meta.Get(keyGeneration); len(v) == 8 {
			g = binary.BigEndian.Uint64(v)
		}
		g++
		return meta.Put(keyGeneration, number(g))
	})
	return g, err
}

// LastGeneration is the highest generation that was ever accepted for a name.
func (s *Store) LastGeneration(name string) (uint64, error) {
	var g uint64
	err := s.db.View(func(tx *bbolt.Tx) error {
		if v := tx.Bucket(bucketGenerations).Get([]byte(name)); len(v) == 8 {
			g = binary.BigEndian.Uint64(v)
		}
		return nil
	})
	return g, err
}

// PutTasks stores the tasks, all or none, and raises each name's generation.
func (s *Store) PutTasks(tasks ...*Task) error {
	if len(tasks) == 0 {
		return nil
	}
	return s.db.Update(func(tx *bbolt.Tx) error {
		b, gens := tx.Bucket(bucketTasks), tx.Bucket(bucketGenerations)
		for _, t := range tasks {
			v, err := json.Marshal(t)
			if err != nil {
				return fmt.Errorf("task %s: %w", t.ID, err)
			}
			if err := b.Put([]byte(t.ID), v); err != nil {
				return err
			}
			key := []byte(t.Name)
			if old := gens.Get(key); len(old) == 8 && binary.BigEndian.Uint64(old) >= t.Generation {
				continue
			}
			if err := gens.Put(key, number(t.Generation)); err != nil {
				return err
			}
		}
		return nil
	})
}

// Forget removes a task's record. Of a folder's task the name's generation stays; a
// placement server's names never come again, so one number stands for all of them:
// see [Store.Floor].
func (s *Store) Forget(t *Task) error {
	return s.db.Update(func(tx *bbolt.Tx) error {
		if err := tx.Bucket(bucketTasks).Delete([]byte(t.ID)); err != nil || !t.Fleet {
			return err
		}
		if err := tx.Bucket(bucketGenerations).Delete([]byte(t.Name)); err != nil {
			return err
		}
		return raise(tx, keyFloor, t.Generation)
	})
}

// Tasks returns every task, oldest generation first, and what had to be moved
// aside because it could not be read.
func (s *Store) Tasks() ([]*Task, []Aside, error) {
	var tasks []*Task
	aside, err := s.read(bucketTasks, func(key string, v []byte) error {
		t := new(Task)
		if err := json.Unmarshal(v, t); err != nil {
			return err
		}
		switch {
		case t.ID != key:
			return fmt.Errorf("the record names task %q", t.ID)
		case t.Generation == 0:
			return errors.New("the record has no generation")
		case len(t.Containers) == 0:
			return errors.New("the record has no containers")
		}
		tasks = append(tasks, t)
		return nil
	})
	sort.Slice(tasks, func(i, j int) bool { return tasks[i].Generation < tasks[j].Generation })
	return tasks, aside, err
}

// UpdateGPU replaces a GPU's record, any JSON, by what change makes of it, in
// one transaction. old is nil for a GPU without a record.
func (s *Store) UpdateGPU(uuid string, change func(old json.RawMessage) (any, error)) error {
	return s.db.Update(func(tx *bbolt.Tx) error {
		b := tx.Bucket(bucketGPUs)
		record, err := change(b.Get([]byte(uuid)))
		if err != nil {
			return fmt.Errorf("record of %s: %w", uuid, err)
		}
		v, err := json.Marshal(record)
		if err != nil {
			return fmt.Errorf("record of %s: %w", uuid, err)
		}
		return b.Put([]byte(uuid), v)
	})
}

// GPUs decodes each GPU's record into what make returns for its uuid.
func (s *Store) GPUs(make func(uuid string) any) ([]Aside, error) {
	return s.read(bucketGPUs, func(key string, v []byte) error {
		return json.Unmarshal(v, make(key))
	})
}

// read walks a bucket; a record that fails is moved aside.
func (s *Store) read(bucket []byte, each func(key string, v []byte) error) ([]Aside, error) {
	var aside []Aside
	err := s.db.Update(func(tx *bbolt.Tx) error {
		b := tx.Bucket(bucket)
		var bad [][]byte
		err := b.ForEach(func(k, v []byte) error {
			if err := each(string(k), v); err != nil {
				aside = append(aside, Aside{Kind: string(bucket), Key: string(k), Reason: err.Error()})
				bad = append(bad, append([]byte(nil), k...))
			}
			return nil
		})
		if err != nil {
			return err
		}
		for _, k := range bad {
			name := append([]byte(string(bucket)+"/"), k...)
			if err := tx.Bucket(bucketAside).Put(name, b.Get(k)); err != nil {
				return err
			}
			if err := b.Delete(k); err != nil {
				return err
			}
		}
		return nil
	})
	return aside, err
}

func number(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }
