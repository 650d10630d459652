package service_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/placement/fleet"
)

var update = flag.Bool("update", false, "write what the stories show into testdata")

// TestStories plays each file of testdata: a line that is not indented is a command,
// what is indented below is what it shows.
//
//	machine ID GPUS MIB          service NAME MIB COUNT MIN% MAX%    scale NAME COUNT
//	update NAME MIB              limits NAME MIN% MAX%               delete NAME
//	run FAMILY MIB [reschedule]  gpu ID/N STANDING [REASON]          drain ID, undrain ID
//	lost ID, back ID             health TASK WORD                    wait DURATION
//	exit TASK, fail TASK (to start), refused TASK (by its machine), end TASK (by an operator)
//	round: the server decides and places; agents: they do as told; settle: both until nothing changes
//
// MIB is the memory of a shared GPU; -N is N whole ones.
func TestStories(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) < 10 {
		t.Fatalf("%d stories (%v)", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			was, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			w := newWorld()
			var b strings.Builder
			for line := range strings.Lines(string(was)) {
				if strings.HasPrefix(line, "  ") {
					continue
				}
				b.WriteString(line)
				if command := strings.TrimSpace(line); command != "" && command[0] != '#' {
					for shown := range strings.Lines(w.play(t, strings.Fields(command))) {
						b.WriteString("  " + shown)
					}
				}
				if c := w.f.Contradictions(); len(c) > 0 {
					t.Fatalf("after %s: %v", line, c)
				}
			}
			if *update {
				if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if b.String() != string(was) {
				t.Errorf("it shows now (-update writes it):\n%s", b.String())
			}
		})
	}
}

func (w *world) play(t *testing.T, words []string) string {
	arg := func(n int) string {
		if n < len(words) {
			return words[n]
		}
		t.Fatalf("%s: too few words", strings.Join(words, " "))
		return ""
	}
	number := func(n int) int {
		v, err := strconv.Atoi(arg(n))
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	w.said = nil
	switch words[0] {
	case "health", "exit", "fail", "refused", "end":
		if w.f.Task(arg(1)) == nil {
			t.Fatalf("%s: there is no such task:\n%s", strings.Join(words, " "), w.draw())
		}
	}
	switch words[0] {
	case "machine":
		w.join(arg(1), number(2), int64(number(3)))
	case "service":
		w.f.PutService(&fleet.Service{Name: arg(1), Definition: w.define(arg(1), number(2), ""), Desired: number(3), MinHealthyPercent: number(4), MaximumPercent: number(5), CreatedAt: w.now})
	case "update":
		key := w.define(arg(1), number(2), fmt.Sprint(len(w.f.Definitions())))
		w.service(arg(1), func(s *fleet.Service) { s.Definition, s.Failures, s.RetryAt = key, 0, time.Time{} })
	case "limits":
		w.service(arg(1), func(s *fleet.Service) { s.MinHealthyPercent, s.MaximumPercent = number(2), number(3) })
	case "scale":
		w.service(arg(1), func(s *fleet.Service) { s.Desired = number(2) })
	case "delete":
		w.service(arg(1), func(s *fleet.Service) { s.Deleted, s.Desired = true, 0 })
	case "run":
		w.start("", w.define(arg(1), number(2), ""), "", len(words) > 3)
	case "gpu":
		w.gpu(arg(1), arg(2), strings.Join(words[3:], " "))
	case "drain", "undrain":
		w.instance(arg(1), func(i *fleet.Instance) {
			i.Status, i.DrainReason = api.InstanceDraining, strings.Join(words[2:], " ")
			if words[0] == "undrain" {
				i.Status = api.InstanceActive
			}
		})
	case "lost":
		w.lost(arg(1))
	case "back":
		w.back(arg(1))
	case "health":
		w.health(arg(1), arg(2))
	case "exit":
		w.crash(arg(1), api.StopEssentialExited, false)
	case "fail":
		w.crash(arg(1), api.StopTaskFailedToStart, false)
	case "refused":
		w.crash(arg(1), api.StopTaskFailedToStart, true)
	case "end":
		w.end(arg(1), api.StopUserInitiated, "stopped by an operator", false)
	case "wait":
		d, err := time.ParseDuration(arg(1))
		if err != nil {
			t.Fatal(err)
		}
		w.now = w.now.Add(d)
	case "round":
		w.now = w.now.Add(100 * time.Millisecond)
		w.round()
		return strings.Join(append(w.said, w.draw()), "\n")
	case "agents":
		w.agents()
		return w.draw()
	case "settle":
		for n := 0; ; n++ {
			before := w.draw()
			w.now = w.now.Add(100 * time.Millisecond)
			w.round()
			w.agents()
			if w.draw() == before && n > 2 {
				break
			}
			if n > 100 {
				t.Fatalf("it does not settle:\n%s", w.draw())
			}
		}
		for _, s := range w.f.Services() {
			w.said = append(w.said[:0:0], fmt.Sprintf("%s: %s", s.Name, orSteady(s.Reason)))
		}
		return strings.Join(append(w.said, w.draw()), "\n")
	default:
		t.Fatalf("unknown command %q", words[0])
	}
	return ""
}
