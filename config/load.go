package config

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/berth-gpu/berth/api/ecsjson"
)

// Warning is something in the environment that berth does not honour and that
// an operator may believe it does.
type Warning struct {
	Name string // ECS_ENABLE_TASK_ENI
	Says string
}

func (w Warning) String() string { return w.Name + ": not honoured: " + w.Says }

// Problem is one thing that is wrong with the settings.
type Problem struct {
	Where string // berth-agent.yaml:12, or environment
	Key   string // mps.drainDeadline, or BERTH_MPS_DRAIN_DEADLINE
	Value string // as given, quoted where it is text; "" where it says nothing
	Rule  string
}

func (p Problem) String() string {
	parts := slices.DeleteFunc([]string{p.Where, p.Key, p.Value, p.Rule}, func(s string) bool { return s == "" })
	return strings.Join(parts, ": ")
}

// Problems is everything that is wrong with the settings, as one error of one
// line each.
type Problems []Problem

func (ps Problems) Error() string {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

// Load reads the settings of an agent: environ's BERTH_ names over its ECS_
// names over the file at path over the defaults. An empty path reads no file.
// The error is Problems, where the file could be read at all: every one there is.
func Load(path string, environ []string) (*Agent, []Warning, error) {
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	a := defaults(host)
	l := newLoader(bind("BERTH_", settings, a))
	if err := l.read(path); err != nil {
		return nil, nil, err
	}
	given := l.environment(environ, func(name string) bool {
		return strings.HasPrefix(name, "BERTH_") && !strings.HasPrefix(name, serverPrefix) && !slices.Contains(notSettings, name)
	})
	for _, name := range slices.Sorted(maps.Keys(given)) {
		if strings.HasPrefix(name, "ECS_") && given[name] != "" && !honoured(name) {
			l.warnings = append(l.warnings, Warning{name, cmp.Or(notHonoured[name], "berth does not know it")})
		}
	}
	l.agentTogether(a)
	if len(l.problems) > 0 {
		return nil, l.warnings, l.problems
	}
	return a, l.warnings, nil
}

const maxFile = 1 << 20

// loader sets one Agent or Server from several sources, the weakest first.
type loader struct {
	table    table
	fields   map[string]field  // by key
	from     map[string]source // by key: what set it last
	problems Problems
	warnings []Warning
}

// source is who set a value, for a problem that shows only later.
type source struct{ where, key string }

func newLoader(t table) *loader {
	l := &loader{table: t, fields: map[string]field{}, from: map[string]source{}}
	for _, s := range t {
		l.fields[s.key] = s.field
	}
	return l
}

// read sets what the file at path says, if there is a path. An error is about
// the file as a whole.
func (l *loader) read(path string) error {
	if path == "" {
		return nil
	}
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("settings: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return fmt.Errorf("settings: %w", err)
	}
	if len(data) > maxFile {
		return Problems{{Where: path, Rule: fmt.Sprintf("more than %d bytes", maxFile)}}
	}
	l.file(path, data)
	return nil
}

func (l *loader) report(where, key, value, rule string, args ...any) {
	l.problems = append(l.problems, Problem{where, key, value, fmt.Sprintf(rule, args...)})
}

// environment sets ECS's names first, so that berth's own prevail. A name that is
// ours must be a setting's. It returns all that is given, by name.
func (l *loader) environment(environ []string, ours func(name string) bool) map[string]string {
	given := map[string]string{}
	for _, kv := range environ {
		if name, value, ok := strings.Cut(kv, "="); ok {
			given[name] = value
		}
	}
	known := []string{}
	for _, s := range l.table {
		known = append(known, s.env)
		// ECS reads an empty variable as one that is not there.
		if value := given[s.ecs]; s.ecs != "" && value != "" {
			l.fromEnvironment(s.key, s.ecs, cmp.Or(ecsSays[s.ecs][value], value), value)
		}
	}
	for _, s := range l.table {
		if value, ok := given[s.env]; ok {
			l.fromEnvironment(s.key, s.env, value, value)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		if ours(name) && !slices.Contains(known, name) {
			l.report("environment", name, "", "unknown setting%s", didYouMean(name, known))
		}
	}
	return given
}

func (l *loader) fromEnvironment(key, name, text, shown string) {
	if !l.fields[key].set(text) {
		l.report("environment", name, strconv.Quote(shown), "want %s", l.fields[key].want)
		return
	}
	l.from[key] = source{"environment", name}
}

// notSettings are names of berth that are for others than the agent: its
// command, and its tests of MPS.
var notSettings = []string{"BERTH_SOCKET", "BERTH_MPS_ORACLE"}

func honoured(name string) bool {
	return slices.ContainsFunc(settings, func(s setting[Agent]) bool { return s.ecs == name })
}

func didYouMean(name string, known []string) string {
	if meant, ok := ecsjson.Suggest(name, known); ok {
		return "; did you mean " + meant + "?"
	}
	return ""
}

// longestPipe is what a pipe folder's path may measure, so that the names of
// MPS's sockets in it fit into the 107 bytes of a socket's address.
const longestPipe = 87

// agentTogether are the rules over more than one setting.
func (l *loader) agentTogether(a *Agent) {
	pipe := a.RunDir + "/mps/GPU-00000000-0000-0000-0000-000000000000/pipe"
	if n := len(pipe); n > longestPipe {
		l.late("runDir", "its pipe folders' paths take %d bytes; MPS can have %d, so want at most %d here", n, longestPipe, longestPipe-(n-len(a.RunDir)))
	}
	if a.MPS.ProbeTimeout > a.MPS.ProbeEvery {
		l.late("mps.probeTimeout", "longer than mps.probeEvery, %s", shortDuration(a.MPS.ProbeEvery))
	}
	if strings.HasPrefix(a.StateDir+"/", a.RunDir+"/") {
		l.late("stateDir", "lies in runDir, %s, which a reboot empties", a.RunDir)
	}
	if s := a.Server; (s.Cert == "") != (s.Key == "") {
		l.late("server.cert", "server.key is %q; give both or neither", s.Key)
	} else if i := slices.IndexFunc(s.Address, func(at string) bool { return !isLocal(at) }); i >= 0 && (s.CA == "" || s.Cert == "") {
		l.late("server.address", "%s is reached over a network, where both sides must prove who they are; set server.ca, server.cert and server.key, or name a unix: socket or a loopback address", s.Address[i])
	}
}

// late reports about a value that was right by itself.
func (l *loader) late(key, rule string, args ...any) {
	from, ok := l.from[key]
	if !ok {
		from = source{"default", key}
	}
	value := l.fields[key].show()
	if l.fields[key].tag == tagText {
		value = strconv.Quote(value)
	}
	l.report(from.where, from.key, value, rule, args...)
}
