package flight

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
)

// Damage is a line that is no entry: the last of a file, which was being written
// when whoever wrote ended or is written now, or one that the disk has spoilt.
// Reading goes on behind it.
type Damage struct {
	File string
	Line int
	Torn bool // it has no end
	Err  error
}

func (d *Damage) Error() string {
	if d.Torn {
		return fmt.Sprintf("%s:%d: the last line is not finished; skipped", d.File, d.Line)
	}
	return fmt.Sprintf("%s:%d: no entry, skipped: %v", d.File, d.Line, d.Err)
}

func (d *Damage) Unwrap() error { return d.Err }

// Read goes through the entries of a ring, or of one of its files, oldest first.
// Behind an error that is a [*Damage] it goes on; any other is the last.
func Read(path string) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		info, err := os.Stat(path)
		if err != nil {
			yield(Entry{}, err)
			return
		}
		if !info.IsDir() {
			readFile(path, yield)
			return
		}
		files, err := listSegments(path)
		if err == nil && len(files) == 0 {
			err = fmt.Errorf("%s: no flight recorder's folder: it has no file NUMBER%s", path, suffix)
		}
		if err != nil {
			yield(Entry{}, err)
			return
		}
		for _, file := range files {
			if !readFile(file.path, yield) {
				return
			}
		}
	}
}

// readFile says whether to go on with the next file.
func readFile(path string, yield func(Entry, error) bool) bool {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return true // the oldest, gone since the folder was listed
	} else if err != nil {
		yield(Entry{}, err)
		return false
	}
	defer f.Close()
	lines := bufio.NewReaderSize(f, 1<<16)
	for n := 1; ; n++ {
		line, err := lines.ReadBytes('\n')
		switch {
		case err == io.EOF && len(line) == 0:
			return true
		case err == io.EOF:
			return yield(Entry{}, &Damage{File: path, Line: n, Torn: true, Err: io.ErrUnexpectedEOF})
		case err != nil:
			yield(Entry{}, err)
			return false
		}
		var e Entry
		err = json.Unmarshal(line, &e)
		if err == nil && (e.Seq == 0 || e.Machine == "") {
			err = errors.New("it has no seq or no machine")
		}
		if err != nil {
			if !yield(Entry{}, &Damage{File: path, Line: n, Err: err}) {
				return false
			}
			continue
		}
		if !yield(e, nil) {
			return false
		}
	}
}
