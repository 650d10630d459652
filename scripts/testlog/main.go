// Command testlog reads `go test -json` and prints what a person wants of it: each
// package's closing line as it comes, the whole output of what failed, and at the end
// which tests were skipped and why. The full text of every test goes to a file.
//
// It ends with 1 when a test or a build failed, and with -strict also when a test was
// skipped that the list of allowed skips does not name.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// event is a line of `go test -json` (cmd/test2json).
type event struct {
	Action  string
	Package string
	Test    string
	Output  string
	// A package that does not build has its compiler's words under this instead.
	ImportPath string
}

type name struct{ pkg, test string }

// summary is what has been seen so far.
type summary struct {
	output  map[name][]string // of tests that have not ended
	builds  map[string][]string
	failed  []name
	skipped map[name]string // why
	closing []string        // "ok  	pkg	0.1s", as go test prints them
	counts  struct{ passed, failed, skipped int }
}

func main() {
	full := flag.String("full", "", "write everything that the tests printed to this file")
	allowed := flag.String("skips", "", "the list of tests that may be skipped: package, test and reason, one a line")
	strict := flag.Bool("strict", false, "a skipped test that the list does not name is a failure")
	flag.Parse()

	list, err := readSkips(*allowed)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testlog:", err)
		os.Exit(2)
	}
	all := io.Discard
	if *full != "" {
		f, err := os.Create(*full)
		if err != nil {
			fmt.Fprintln(os.Stderr, "testlog:", err)
			os.Exit(2)
		}
		defer f.Close()
		all = f
	}
	s := &summary{output: map[name][]string{}, builds: map[string][]string{}, skipped: map[name]string{}}
	if err := s.read(os.Stdin, os.Stdout, all); err != nil {
		fmt.Fprintln(os.Stderr, "testlog:", err)
		os.Exit(2)
	}
	if !s.print(os.Stdout, list, *strict) {
		os.Exit(1)
	}
}

// read takes events until the end, printing closing lines and failures as they come.
func (s *summary) read(events io.Reader, out, all io.Writer) error {
	lines := bufio.NewReader(events)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			var e event
			if json.Unmarshal([]byte(line), &e) != nil {
				fmt.Fprint(out, line) // go test's own words, such as a download's
			} else {
				s.take(e, out, all)
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (s *summary) take(e event, out, all io.Writer) {
	at := name{e.Package, e.Test}
	switch e.Action {
	case "build-output":
		s.builds[e.ImportPath] = append(s.builds[e.ImportPath], e.Output)
	case "build-fail":
		fmt.Fprint(out, strings.Join(s.builds[e.ImportPath], ""))
	case "output":
		fmt.Fprint(all, e.Output)
		s.output[at] = append(s.output[at], e.Output)
		if e.Test == "" && isClosing(e.Output) {
			s.closing = append(s.closing, e.Output)
			fmt.Fprint(out, e.Output)
		}
	case "pass":
		if e.Test != "" {
			s.counts.passed++
			delete(s.output, at)
		}
	case "skip":
		if e.Test != "" {
			s.counts.skipped++
			s.skipped[at] = reason(s.output[at])
			delete(s.output, at)
		}
	case "fail":
		s.failed = append(s.failed, at)
		if e.Test != "" {
			s.counts.failed++
		}
		for _, text := range s.output[at] {
			if !isClosing(text) {
				fmt.Fprint(out, text)
			}
		}
		delete(s.output, at)
	}
}

// isClosing says whether go test closes a package with this line.
func isClosing(line string) bool {
	return strings.HasPrefix(line, "ok  \t") || strings.HasPrefix(line, "FAIL\t") || strings.HasPrefix(line, "---\t")
}

// reason is what a skipped test said: the text of its last log line.
func reason(output []string) string {
	var why string
	for _, line := range output {
		if text, ok := strings.CutPrefix(line, "    "); ok {
			if _, said, ok := strings.Cut(text, ".go:"); ok {
				_, text, _ = strings.Cut(said, ": ")
			}
			why = strings.TrimSpace(text)
		}
	}
	return why
}

// print closes with the skips, the package lines and the counts, and says whether all
// is well.
func (s *summary) print(out io.Writer, allowed map[name]string, strict bool) (ok bool) {
	ok = len(s.failed) == 0
	var skips []name
	for at := range s.skipped {
		skips = append(skips, at)
	}
	slices.SortFunc(skips, func(a, b name) int { return strings.Compare(a.pkg+a.test, b.pkg+b.test) })
	fmt.Fprintln(out)
	for _, at := range skips {
		_, listed := allowed[at]
		word := "skipped"
		if strict && !listed {
			word, ok = "SKIPPED, not in the list", false
		}
		fmt.Fprintf(out, "%s: %s %s: %s\n", word, at.pkg, at.test, s.skipped[at])
	}
	if len(skips) == 0 {
		fmt.Fprintln(out, "no test was skipped")
	}
	fmt.Fprint(out, strings.Join(s.closing, ""))
	for _, at := range s.failed {
		if at.test != "" {
			fmt.Fprintf(out, "failed: %s %s\n", at.pkg, at.test)
		}
	}
	fmt.Fprintf(out, "%d passed, %d failed, %d skipped\n", s.counts.passed, s.counts.failed, s.counts.skipped)
	return ok
}

// readSkips reads the list: a package, a test, and why, one a line; # begins a comment.
func readSkips(path string) (map[name]string, error) {
	list := map[name]string{}
	if path == "" {
		return list, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	for n, line := range strings.Split(string(text), "\n") {
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		words := strings.Fields(line)
		if len(words) < 3 {
			return nil, fmt.Errorf("%s:%d: %q: give a package, a test and the reason", path, n+1, line)
		}
		list[name{words[0], words[1]}] = strings.Join(words[2:], " ")
	}
	return list, nil
}
