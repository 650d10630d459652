package mpssim

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Steer is what one GPU's daemon, its servers and its clients are told to do: the
// file <machine>/sim/mps.<GPU uuid>, one `key value` per line, read at the moments
// that matter. A missing file is the zero Steer. For a daemon without
// CUDA_VISIBLE_DEVICES the file is <machine>/sim/mps.
type Steer struct {
	Branch      int           // driver branch to behave as; 0: the machine's driver, or 580
	StartDelay  time.Duration // from a server's start until it is ready; 0: DefaultStartDelay
	ServerStart ServerStart   // what the next server's start comes to
	Reason      string        // with StartFails: what the server writes to its log
	DaemonHang  bool          // accepts connections and never answers, until it is taken back
	DaemonFails bool          // a daemon exits with 1 at once, without a word
	FaultSeq    int           // a fatal fault of a client: raised, then the server is told by a signal
	FaultCode   int           // the CUDA error every client gets; 0: 700
	Variants    []string      // names from Behaviours
}

// ServerStart is what a server's start comes to.
type ServerStart string

// Ways of a server's start.
const (
	StartWorks ServerStart = ""
	StartHangs ServerStart = "hang" // it never gets ready and never ends
	StartFails ServerStart = "fail" // it ends with status 1
)

// DefaultStartDelay is shorter than life (0.28 s seen with R580 on a T4), so that
// tests need not wait.
const DefaultStartDelay = 30 * time.Millisecond

// DefaultBranch is the driver branch of the default personality.
const DefaultBranch = 580

// Variant says whether an inferred behaviour's second variant is in force.
func (s Steer) Variant(name string) bool { return slices.Contains(s.Variants, name) }

// Format writes s as a steer file.
func (s Steer) Format() []byte {
	var b bytes.Buffer
	if s.Branch != 0 {
		fmt.Fprintf(&b, "branch %d\n", s.Branch)
	}
	if s.StartDelay != 0 {
		fmt.Fprintf(&b, "start-delay %s\n", s.StartDelay)
	}
	if s.ServerStart != StartWorks {
		fmt.Fprintln(&b, strings.TrimSpace(fmt.Sprintf("server-start %s %s", s.ServerStart, s.Reason)))
	}
	if s.DaemonHang {
		fmt.Fprintln(&b, "daemon hang")
	}
	if s.DaemonFails {
		fmt.Fprintln(&b, "daemon fail")
	}
	if s.FaultSeq != 0 {
		fmt.Fprintf(&b, "fault %d %d\n", s.FaultSeq, s.FaultCode)
	}
	for _, v := range s.Variants {
		fmt.Fprintf(&b, "variant %s\n", v)
	}
	return b.Bytes()
}

// ParseSteer reads a steer file.
func ParseSteer(text []byte) (Steer, error) {
	var s Steer
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		words := strings.Fields(lines.Text())
		if len(words) == 0 || strings.HasPrefix(words[0], "#") {
			continue
		}
		if err := s.set(words[0], words[1:]); err != nil {
			return Steer{}, fmt.Errorf("line %d: %s: %w", n, words[0], err)
		}
	}
	return s, lines.Err()
}

func (s *Steer) set(key string, args []string) (err error) {
	if len(args) == 0 {
		return errors.New("no value")
	}
	switch key {
	case "branch":
		s.Branch, err = strconv.Atoi(args[0])
	case "start-delay":
		s.StartDelay, err = time.ParseDuration(args[0])
	case "server-start":
		s.ServerStart, s.Reason = ServerStart(args[0]), strings.Join(args[1:], " ")
		switch s.ServerStart {
		case StartHangs, StartFails:
		case "ok":
			s.ServerStart = StartWorks
		default:
			return fmt.Errorf("%q: want ok, hang or fail", args[0])
		}
	case "daemon":
		switch args[0] {
		case "hang":
			s.DaemonHang = true
		case "fail":
			s.DaemonFails = true
		default:
			return fmt.Errorf("%q: want hang or fail", args[0])
		}
	case "fault":
		if s.FaultSeq, err = strconv.Atoi(args[0]); err == nil && len(args) > 1 {
			s.FaultCode, err = strconv.Atoi(args[1])
		}
	case "variant":
		if !knownVariant(args[0]) {
			return fmt.Errorf("%q: not in mpssim.Behaviours", args[0])
		}
		s.Variants = append(s.Variants, args[0])
	default:
		return errors.New("not a key of the steer file")
	}
	return err
}

func steerPath(simDir, uuid string) string {
	if uuid == "" {
		return filepath.Join(simDir, "mps")
	}
	return filepath.Join(simDir, "mps."+uuid)
}

// readSteer reads a GPU's steer file. One that cannot be understood is a mistake in
// a test; the program says so and stops, since whatever it did would mislead.
func readSteer(simDir, uuid string) Steer {
	if simDir == "" {
		return Steer{}
	}
	text, err := os.ReadFile(steerPath(simDir, uuid))
	if errors.Is(err, os.ErrNotExist) {
		return Steer{}
	}
	if err == nil {
		var s Steer
		if s, err = ParseSteer(text); err == nil {
			return s
		}
	}
	fmt.Fprintf(os.Stderr, "mpssim: %s: %v\n", steerPath(simDir, uuid), err)
	os.Exit(3)
	return Steer{}
}
