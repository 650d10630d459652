package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
)

// Each example of the page is what berth prints: a block of commands, run one after the
// other against a fleet of its own.
func TestPage(t *testing.T) {
	path, err := filepath.Abs(filepath.Join("..", "..", "docs", "commands.md"))
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir("testdata")
	var out strings.Builder
	var f *fleet // nil: outside a block
	for line := range strings.Lines(string(page)) {
		switch {
		case line == "```console\n":
			f = startFleet(t)
		case line == "```\n":
			f = nil
		case f != nil && !strings.HasPrefix(line, "$ berth "):
			continue // an output of before
		}
		out.WriteString(line)
		if command, ok := strings.CutPrefix(line, "$ berth "); ok && f != nil {
			out.WriteString(f.screen(t, strings.Fields(command)))
		}
	}
	if *update {
		if err := os.WriteFile(path, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if out.String() != string(page) {
		t.Errorf("docs/commands.md differs; run go test ./cmd/berth -run Page -update and read the diff\ngot:\n%s", out.String())
	}
}

// screen is what a person sees of one command: stdout and stderr as they come.
func (f *fleet) screen(t *testing.T, args []string) string {
	t.Helper()
	var out bytes.Buffer
	a := newApp(nil, &out, &out, func(name string) string { return map[string]string{"BERTH_SOCKET": f.socket}[name] })
	a.now = func() time.Time { return noon }
	a.poll = 5 * time.Millisecond
	if code := run(context.Background(), a, args); code != 0 {
		t.Errorf("berth %s: exit code %d", strings.Join(args, " "), code)
	}
	return out.String()
}

// No command is forgotten by the page.
func TestPageNamesEachCommand(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "commands.md"))
	if err != nil {
		t.Fatal(err)
	}
	root := newApp(nil, nil, nil, func(string) string { return "" }).root()
	for _, c := range allCommands(root) {
		for _, parent := range []string{"sim", "fault", "replace"} { // named as one
			if c.HasParent() && c.Parent().Name() == parent {
				c = &cobra.Command{Use: parent}
			}
		}
		path := strings.TrimPrefix(c.CommandPath(), "berth ")
		if path != "berth" && c.Name() != "version" && !strings.Contains(string(page), "berth "+path) && !strings.Contains(string(page), "`"+path) {
			t.Errorf("docs/commands.md does not name berth %s", path)
		}
	}
}
