package flight

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A ring's folder:
//
//	00000000000000004711.jsonl   named by the sequence number it begins with
//	00000000000000006021.jsonl
//	00000000000000007400.jsonl   written to; cut at its last whole line by the next open
//
// A file is full at a quarter of the limit; before the next is made the oldest goes.
const (
	segments   = 4
	leastLimit = 4 << 10
	suffix     = ".jsonl"
)

// ring is the folder, for the one who writes.
type ring struct {
	dir   string
	most  int64 // bytes of one file
	files []segment
	f     *os.File // the newest; nil until it can be made
	size  int64    // of it, whole lines
	next  uint64   // sequence number
}

type segment struct {
	path  string
	first uint64
	size  int64
}

// listSegments finds a ring's files, oldest first.
func listSegments(dir string) ([]segment, error) {
	names, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var list []segment
	for _, name := range names {
		digits, ok := strings.CutSuffix(name.Name(), suffix)
		first, err := strconv.ParseUint(digits, 10, 64)
		if !ok || err != nil || !name.Type().IsRegular() {
			continue
		}
		info, err := name.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // the oldest, and a newer one was made just now
		} else if err != nil {
			return nil, err
		}
		list = append(list, segment{filepath.Join(dir, name.Name()), first, info.Size()})
	}
	slices.SortFunc(list, func(a, b segment) int {
		if a.first < b.first {
			return -1
		}
		return 1
	})
	return list, nil
}

// open finds where to go on, and cuts off what was being written when whoever
// wrote ended; torn says that there was something.
func (r *ring) open() (torn bool, err error) {
	if err := os.MkdirAll(r.dir, 0o700); err != nil {
		return false, err
	}
	if r.files, err = listSegments(r.dir); err != nil {
		return false, err
	}
	total := int64(0)
	for _, s := range r.files {
		total += s.size
	}
	for len(r.files) > 0 && (len(r.files) > segments || total > r.most*segments) { // the limit was larger once
		if err := os.Remove(r.files[0].path); err != nil {
			return false, err
		}
		total -= r.files[0].size
		r.files = r.files[1:]
	}
	r.next = 1
	if len(r.files) == 0 {
		return false, nil
	}
	newest := r.files[len(r.files)-1]
	text, err := os.ReadFile(newest.path)
	if err != nil {
		return false, err
	}
	whole := text[:bytes.LastIndexByte(text, '\n')+1]
	r.next, r.size = max(newest.first, lastSeq(whole)+1), int64(len(whole))
	if r.f, err = os.OpenFile(newest.path, os.O_WRONLY|os.O_APPEND, 0); err != nil {
		return false, err
	}
	if len(whole) == len(text) {
		return false, nil
	}
	if err := r.f.Truncate(r.size); err != nil {
		r.close()
		return false, err
	}
	return true, nil
}

// lastSeq is the sequence number of the last line that has one; 0 where none has.
func lastSeq(text []byte) uint64 {
	for len(text) > 0 {
		begin := bytes.LastIndexByte(text[:len(text)-1], '\n') + 1
		var e Entry
		if json.Unmarshal(text[begin:], &e) == nil && e.Seq > 0 {
			return e.Seq
		}
		text = text[:begin]
	}
	return 0
}

// add writes the queue in order. After an error, missing says how many decisions of
// it are not in the ring.
func (r *ring) add(queue []waiting) (missing int, err error) {
	var lines []byte
	done, next := 0, r.next // what is written, and the number that follows
	flush := func(upTo int) error {
		if len(lines) == 0 {
			return nil
		}
		if err := r.append(lines); err != nil {
			return err
		}
		lines, done, r.next = lines[:0], upTo, next
		return nil
	}
	for i, w := range queue {
		line := w.line(next)
		if r.f == nil || r.size+int64(len(lines)+len(line)) > r.most {
			if err = flush(i); err != nil {
				break
			}
			if err = r.turn(); err != nil {
				break
			}
		}
		lines = append(lines, line...)
		next++
	}
	if err == nil {
		err = flush(len(queue))
	}
	if err != nil {
		for _, w := range queue[done:] {
			missing += max(1, w.missing.Dropped)
		}
	}
	return missing, err
}

// line is the entry as it stands in the file.
func (w waiting) line(seq uint64) []byte {
	if w.missing.Dropped > 0 {
		w.machine = Gap
		w.in, _ = json.Marshal(w.missing)
		w.out = nil
	}
	line := fmt.Appendf(nil, `{"seq":%d,"at":"%s","machine":%s,"key":%s,"in":%s`, seq, w.at.Format(time.RFC3339Nano), quoted(w.machine), quoted(w.key), w.in)
	if w.out != nil {
		line = append(append(line, `,"out":`...), w.out...)
	}
	return append(line, "}\n"...)
}

func quoted(s string) []byte {
	b, _ := json.Marshal(s) // a string always can be
	return b
}

// append writes whole lines, all of them or none.
func (r *ring) append(lines []byte) error {
	n, err := r.f.Write(lines)
	if err == nil {
		r.size += int64(n)
		return nil
	}
	if n > 0 && r.f.Truncate(r.size) != nil {
		r.close() // it ends in a piece of a line: the next entry begins another file
	}
	return err
}

// turn begins another file, and drops the oldest for it.
func (r *ring) turn() error {
	r.close()
	if err := os.MkdirAll(r.dir, 0o700); err != nil {
		return err
	}
	for len(r.files) >= segments {
		if err := os.Remove(r.files[0].path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		r.files = r.files[1:]
	}
	path := filepath.Join(r.dir, fmt.Sprintf("%020d%s", r.next, suffix))
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	r.f, r.size = f, 0
	if n := len(r.files); n == 0 || r.files[n-1].first != r.next {
		r.files = append(r.files, segment{path: path, first: r.next})
	}
	return nil
}

func (r *ring) close() {
	if r.f != nil {
		r.f.Close() // nothing is buffered; what was written is written
		r.f = nil
	}
}
