package replace_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/placement/replace"
)

var update = flag.Bool("update", false, "write the stories' output anew")

var epoch = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

// TestStories runs testdata/*.txt: each line that begins with "> " is done, and what
// stands below it is what the replacement is then.
func TestStories(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no stories", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var got bytes.Buffer
			s := &story{t: t, p: replace.Default(), o: replace.Observation{Standing: api.InstanceActive, TasksLeft: 2, Movable: 2, NotEnding: 2}, now: epoch}
			begun := false
			for line := range strings.Lines(string(want)) {
				line = strings.TrimSpace(line)
				switch {
				case strings.HasPrefix(line, "> "):
					begun = true
					fmt.Fprintf(&got, "\n%s\n", line)
					s.do(strings.Fields(line[2:]), &got)
				case !begun && line != "":
					fmt.Fprintln(&got, line)
				}
			}
			if *update {
				if err := os.WriteFile(file, got.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if got.String() != string(want) {
				t.Errorf("%s differs (go test -update writes it anew); now:\n%s", file, got.String())
			}
		})
	}
}

type story struct {
	t   *testing.T
	p   replace.Policy
	r   replace.Replacement
	o   replace.Observation
	now time.Time
}

func (s *story) do(words []string, out *bytes.Buffer) {
	rest := strings.Join(words[1:], " ")
	switch words[0] {
	case "begin": // [by operator:] reason
		reason, operator := strings.CutPrefix(rest, "by operator: ")
		s.r = replace.New("r1", "gpu-1", reason, operator, s.now)
	case "see": // a JSON object of observations
		if err := json.Unmarshal([]byte(rest), &s.o); err != nil {
			s.t.Fatalf("%s: %v", rest, err)
		}
	case "policy":
		if err := json.Unmarshal([]byte(rest), &s.p); err != nil {
			s.t.Fatalf("%s: %v", rest, err)
		}
	case "after":
		d, err := time.ParseDuration(words[1])
		if err != nil {
			s.t.Fatal(err)
		}
		s.now = s.now.Add(d)
	case "reply": // launched ID, found ID, found nothing, terminated, error TEXT
		s.o.InFlight = false
		s.o.Result = &replace.Result{Call: s.r.Call}
		switch {
		case words[1] == "error":
			s.o.Result.Err = strings.Join(words[2:], " ")
		case words[1] == "launched", words[1] == "found" && words[2] != "nothing":
			s.o.Result.ID, s.o.Result.Found = words[2], words[1] == "found"
		}
	case "restart": // of the server: nobody waits for a reply any more
		s.o.InFlight, s.o.LeaderSince = false, s.now
		s.r = reread(s.t, s.r)
	default:
		s.t.Fatalf("no command %q", words[0])
	}
	if s.r.ID == "" {
		return
	}
	// As the server does: until nothing changes.
	for range 10 {
		before := s.r
		next, actions := replace.Step(s.r, s.o, s.now, s.p)
		s.r, s.o.Result = next, nil
		for _, a := range actions {
			fmt.Fprintf(out, "  %s", a.Kind)
			for _, word := range []string{a.Instance, a.Token} {
				if word != "" {
					fmt.Fprintf(out, " %s", word)
				}
			}
			fmt.Fprintln(out)
			switch a.Kind {
			case replace.DoCordon:
				s.set(a.Instance, api.InstanceDraining)
			case replace.DoUncordon:
				s.set(a.Instance, api.InstanceActive)
			case replace.DoForget:
				s.set(a.Instance, "")
			case replace.DoEndTasks:
				s.o.NotEnding = 0
			case replace.DoRetire:
			default:
				s.o.InFlight = true
			}
		}
		if len(actions) == 0 && reflect.DeepEqual(before, next) {
			break
		}
	}
	fmt.Fprintf(out, "%s %s: %s\n", s.now.Format(time.TimeOnly), s.r.State, s.r.Says)
}

func (s *story) set(instance, standing string) {
	if instance == s.r.Instance {
		s.o.Standing = standing
	} else {
		s.o.NewcomerStanding = standing
	}
}

// reread is a replacement as the store gives it back.
func reread(t interface{ Fatal(...any) }, r replace.Replacement) (again replace.Replacement) {
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &again); err != nil {
		t.Fatal(err)
	}
	return again
}
