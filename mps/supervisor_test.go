package mps_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/mps"
)

var update = flag.Bool("update", false, "rewrite the outputs in testdata")

// TestSupervisorStories plays the scripts in testdata/supervisor. A line is an
// event; the indented lines after it are what the supervisor makes of it.
//
//	want USE | clients N | tick [TIME] | forgive | doubt
//	ok                 the job in flight ends as it should
//	fail [for good] REASON
//	found [daemon] [server] [orphan] [starting] [frozen] [stranger] [exclusive]
//	inspected [KEY=VALUE]...
//	daemon exits | daemon stops | server exits | server stops | orphan exits
//	log LINE           the daemon's log says so
//	store breaks | store works
//	agent restarts     with what was stored
//	host reboots
func TestSupervisorStories(t *testing.T) {
	files, err := filepath.Glob("testdata/supervisor/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no stories: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			told := play(t, string(b))
			if *update {
				if err := os.WriteFile(file, []byte(told), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if told != string(b) {
				t.Errorf("another story than %s; see what changed with -update and git diff. It is now:\n%s", file, told)
			}
		})
	}
}

// story is a world that is told.
type story struct {
	world
	canSave bool
}

func play(t *testing.T, script string) string {
	t.Helper()
	s := &story{world: newWorld(mps.Record{}, ""), canSave: true}
	s.world.s.Budget.Failures = 3
	s.replayed = true
	var out strings.Builder
	for line := range strings.Lines(script) {
		line = strings.TrimRight(line, "\n")
		if strings.HasPrefix(line, " ") {
			continue
		}
		out.WriteString(line + "\n")
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if err := s.tell(line, &out); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
	}
	return out.String()
}

func (s *story) tell(line string, out *strings.Builder) error {
	e, err := s.event(line)
	if err != nil || e == nil {
		return err
	}
	before := s.s
	actions, err := s.step(e, s.canSave)
	if err != nil {
		return err
	}
	now := s.s
	if now.Phase != before.Phase || now.Reason != before.Reason {
		fmt.Fprintf(out, "  %s", now.Phase)
		if now.Reason != "" {
			fmt.Fprintf(out, ": %s", now.Reason)
		}
		out.WriteString("\n")
	}
	if now.Notice != before.Notice {
		fmt.Fprintf(out, "  notice: %s\n", now.Notice)
	}
	if fmt.Sprint(now.Saved) != fmt.Sprint(before.Saved) {
		fmt.Fprintf(out, "  stored: %s\n", stored(now.Saved))
	}
	for _, a := range actions {
		switch a := a.(type) {
		case mps.Cancel:
			fmt.Fprintf(out, "  cancel: %s\n", a.Job)
		case mps.Do:
			fmt.Fprintf(out, "  do: %s", a.Job)
			for _, p := range a.Kill {
				fmt.Fprintf(out, ", %v", p)
			}
			if a.Force {
				out.WriteString(", by force")
			}
			out.WriteString("\n")
		}
	}
	if wait := now.Until.Sub(s.now); now.Phase == mps.PhaseBackoff && before.Phase != mps.PhaseBackoff {
		fmt.Fprintf(out, "  next try in %v, of which a fifth at most is jitter\n", wait.Round(100*time.Millisecond))
	}
	return nil
}

func stored(r mps.Record) string {
	var words []string
	add := func(is bool, format string, args ...any) {
		if is {
			words = append(words, fmt.Sprintf(format, args...))
		}
	}
	add(r.ID != "", "id %.4s", r.ID)
	add(r.Daemon.PID != 0, "daemon %d", r.Daemon.PID)
	add(r.Server.PID != 0, "server %d", r.Server.PID)
	add(len(r.Orphans) > 0, "orphans %v", r.Orphans)
	add(r.Exclusive, "intent EXCLUSIVE_PROCESS")
	add(len(r.Failures) > 0, "%d failures", len(r.Failures))
	add(r.Fault != nil, "closed")
	add(r.Ending != "", "about to %s", r.Ending)
	add(r.Quarantine != "", "quarantined")
	add(true, "use %s", r.Use)
	return strings.Join(words, ", ")
}

func (s *story) event(line string) (mps.Event, error) {
	verb, rest, _ := strings.Cut(line, " ")
	switch verb {
	case "want":
		return mps.Want{Use: mps.Use(rest)}, nil
	case "clients":
		n, err := strconv.Atoi(rest)
		return mps.ClientsAre{N: n}, err
	case "tick":
		d := time.Second
		if rest != "" {
			var err error
			if d, err = time.ParseDuration(rest); err != nil {
				return nil, err
			}
		}
		s.now = s.now.Add(d)
		return mps.Tick{}, nil
	case "forgive":
		return mps.Forgive{}, nil
	case "doubt":
		return mps.Doubt{}, nil
	case "ok":
		if e := goesWell(&s.world); e != nil {
			return e, nil
		}
		return nil, fmt.Errorf("no job is in flight, in %s", s.s.Phase)
	case "fail":
		reason, permanent := strings.CutPrefix(rest, "for good ")
		return mps.Failed{Job: s.s.Job, Reason: reason, Permanent: permanent, Cancelled: s.s.Cancelled}, nil
	case "found":
		return s.found(rest)
	case "inspected":
		return s.inspected(rest)
	case "log":
		return mps.Faulted{Line: rest}, nil
	case "daemon", "server", "orphan":
		p := map[string]mps.Process{"daemon": s.s.Daemon, "server": s.s.Server}[verb]
		if verb == "orphan" {
			p = s.s.Orphans[0]
		}
		if rest == "stops" {
			return mps.Stopped{Process: p}, nil
		}
		return mps.Exited{Process: p}, nil
	case "store":
		s.canSave = rest == "works"
		return nil, nil
	case "agent":
		s.s = mps.NewState(s.s.Saved, "", "boot", s.s.Budget, s.s.ProbeEvery, uint64(s.nextPID), s.now)
		return mps.Tick{}, nil
	case "host":
		s.exclusive = false
		s.s = mps.NewState(s.s.Saved, "", "another boot", s.s.Budget, s.s.ProbeEvery, uint64(s.nextPID), s.now)
		return mps.Tick{}, nil
	}
	return nil, fmt.Errorf("no such event")
}

func (s *story) found(words string) (mps.Event, error) {
	f := mps.Found{Exclusive: s.exclusive}
	for _, word := range strings.Fields(words) {
		switch word {
		case "daemon":
			if f.Daemon = s.s.Daemon; f.Daemon.PID == 0 {
				f.Daemon = s.process()
			}
		case "server":
			if f.Server = s.s.Server; f.Server.PID == 0 {
				f.Server = s.process()
			}
		case "orphan":
			f.Orphans = append(s.s.Orphans, s.process())
		case "starting":
			f.Starting = true
		case "frozen":
			f.Problem = fmt.Sprintf("the MPS control daemon (%v) is stopped, by SIGSTOP or a debugger", f.Daemon)
		case "stranger":
			f.Stranger = "the pipe folder is held by pid 9 (nvidia-cuda-mps), which berth has no record of; stop it, berth does not"
		case "exclusive":
			f.Exclusive = true
		default:
			return nil, fmt.Errorf("found %s?", word)
		}
	}
	return f, nil
}

func (s *story) inspected(words string) (mps.Event, error) {
	i := mps.Inspected{Exclusive: s.exclusive}
	if s.s.Server.PID != 0 {
		i.Servers, i.ServerStatus = []int{s.s.Server.PID}, "ACTIVE"
	}
	for _, word := range strings.Fields(words) {
		key, value, _ := strings.Cut(word, "=")
		switch key {
		case "split":
			i.Split = "client/control is not the daemon's socket: its files were replaced"
		case "gone":
			i.Gone = true
		case "unanswered":
			i.Unanswered = "the MPS control daemon does not answer within 2s"
		case "server":
			i.Servers = nil
			if value != "none" {
				pid, err := strconv.Atoi(value)
				if err != nil {
					return nil, err
				}
				i.Servers = []int{pid}
			}
		case "status":
			i.ServerStatus = strings.Trim(value, "-")
		case "tampered":
			i.Tampered = "the default memory limit of MPS servers was changed by somebody else, to 1M"
		case "exclusive":
			i.Exclusive = value == "true"
			s.exclusive = i.Exclusive
		default:
			return nil, fmt.Errorf("inspected %s?", word)
		}
	}
	return i, nil
}
