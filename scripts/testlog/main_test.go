package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSummary(t *testing.T) {
	const good = `{"Action":"output","Package":"x/a","Test":"TestOne","Output":"=== RUN   TestOne\n"}
{"Action":"pass","Package":"x/a","Test":"TestOne"}
{"Action":"output","Package":"x/a","Test":"TestTwo","Output":"    a_test.go:7: no oracle: \u003cnot here\u003e\n"}
{"Action":"output","Package":"x/a","Test":"TestTwo","Output":"--- SKIP: TestTwo (0.00s)\n"}
{"Action":"skip","Package":"x/a","Test":"TestTwo"}
{"Action":"output","Package":"x/a","Output":"PASS\n"}
{"Action":"output","Package":"x/a","Output":"ok  \tx/a\t0.01s\n"}
{"Action":"pass","Package":"x/a"}
`
	const bad = `{"Action":"output","Package":"x/b","Test":"TestBad","Output":"    b_test.go:3: got 1\n"}
{"Action":"fail","Package":"x/b","Test":"TestBad"}
{"Action":"output","Package":"x/b","Output":"FAIL\tx/b\t0.02s\n"}
{"Action":"fail","Package":"x/b"}
`
	const broken = `{"ImportPath":"x/c","Action":"build-output","Output":"c.go:1:1: syntax error\n"}
{"ImportPath":"x/c","Action":"build-fail"}
{"Action":"output","Package":"x/c","Output":"FAIL\tx/c [build failed]\n"}
{"Action":"fail","Package":"x/c"}
`
	for _, tc := range []struct {
		name, events, skips string
		strict, ok          bool
		says                []string
	}{
		{"good", good, "", false, true, []string{"skipped: x/a TestTwo: no oracle: <not here>\n", "\nok  \tx/a\t0.01s\n", "1 passed, 0 failed, 1 skipped\n"}},
		{"a skip that the list does not name", good, "x/a TestThree because", true, false, []string{"SKIPPED, not in the list: x/a TestTwo: no oracle"}},
		{"a skip that it names", good, "# a comment\nx/a TestTwo its oracle is not everywhere", true, true, []string{"skipped: x/a TestTwo"}},
		{"a failure", good + bad, "", false, false, []string{"    b_test.go:3: got 1\n", "FAIL\tx/b\t0.02s\n", "failed: x/b TestBad\n", "1 passed, 1 failed, 1 skipped\n"}},
		{"a package that does not build", broken, "", false, false, []string{"c.go:1:1: syntax error\n", "FAIL\tx/c [build failed]\n"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "skips")
			if err := os.WriteFile(file, []byte(tc.skips), 0o644); err != nil {
				t.Fatal(err)
			}
			list, err := readSkips(file)
			if err != nil {
				t.Fatal(err)
			}
			s := &summary{output: map[name][]string{}, builds: map[string][]string{}, skipped: map[name]string{}}
			var out, all strings.Builder
			if err := s.read(strings.NewReader(tc.events), &out, &all); err != nil {
				t.Fatal(err)
			}
			if ok := s.print(&out, list, tc.strict); ok != tc.ok {
				t.Errorf("ok %v, want %v", ok, tc.ok)
			}
			for _, want := range tc.says {
				if !strings.Contains(out.String(), want) {
					t.Errorf("no %q in\n%s", want, out.String())
				}
			}
		})
	}
}

func TestSkipsWithoutAReason(t *testing.T) {
	file := filepath.Join(t.TempDir(), "skips")
	if err := os.WriteFile(file, []byte("\nx/a TestTwo\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := readSkips(file); err == nil || err.Error() != file+`:2: "x/a TestTwo": give a package, a test and the reason` {
		t.Errorf("got %v", err)
	}
}
