package config

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite docs/settings.md and the examples from the tables")

// TestGenerated: the page and the shipped examples say what the tables say.
func TestGenerated(t *testing.T) {
	for path, want := range map[string]string{
		"../docs/settings.md": page(),
		"berth-agent.yaml":    example("berth-agent", bind("BERTH_", settings, defaults(theHost))),
		"berth-server.yaml":   example("berth server", bind(serverPrefix, serverSettings, serverDefaults())),
	} {
		if *update {
			if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != want {
			t.Errorf("%s is not what the table says; run: go test ./config -update", path)
		}
	}
}

// theHost stands in the page where the host's name would be.
const theHost = "HOSTNAME"

func page() string {
	var b strings.Builder
	b.WriteString(`# Settings

Generated from the tables in config/settings.go and config/server_settings.go by ` + "`go test ./config -update`" + `.

## berth-agent

The agent reads a YAML file and its environment. What the environment says under berth's names goes before what it says
under ECS's, that before the file, and the file before the defaults. Unknown keys and unknown ` + "`BERTH_`" + ` names are errors;
every problem is reported at once, each with its file and line. config/berth-agent.yaml is an example with every setting.

| setting | environment | ECS's name | default | takes | |
|---|---|---|---|---|---|
`)
	for _, s := range bind("BERTH_", settings, defaults(theHost)) {
		ecs := ""
		if s.ecs != "" {
			ecs = "`" + s.ecs + "`"
		}
		fmt.Fprintf(&b, "| `%s` | `%s` | %s | %s | %s | %s |\n", s.key, s.env, ecs, shownDefault(s), strings.ReplaceAll(s.want, "|", "\\|"), s.say)
	}
	b.WriteString("\nIn the environment, lists and maps are JSON: `BERTH_RESERVED_PORTS='[22, 2375]'`, `ECS_INSTANCE_ATTRIBUTES='{\"rack\": \"b4\"}'`.\n" +
		"`ECS_LOGLEVEL=crit` is taken for error.\n\n### Names of the ECS agent that berth does not honour\n\n" +
		"The agent warns of each that is set, and of any other `ECS_` name.\n\n| name | why |\n|---|---|\n")
	for _, name := range slices.Sorted(maps.Keys(notHonoured)) {
		fmt.Fprintf(&b, "| `%s` | %s |\n", name, notHonoured[name])
	}
	b.WriteString(`
## berth server

The placement server reads a YAML file of its own, and names in its environment that begin with ` + "`" + serverPrefix + "`" + `, so that
one environment serves an agent and a server on the same machine. The same rules hold; config/berth-server.yaml is an
example with every setting.

| setting | environment | default | takes | |
|---|---|---|---|---|
`)
	for _, s := range bind(serverPrefix, serverSettings, serverDefaults()) {
		fmt.Fprintf(&b, "| `%s` | `%s` | %s | %s | %s |\n", s.key, s.env, shownDefault(s), strings.ReplaceAll(s.want, "|", "\\|"), s.say)
	}
	return b.String()
}

func shownDefault(r row) string {
	switch r.show() {
	case "":
		return "empty"
	case theHost:
		return "the host name"
	}
	return "`" + r.show() + "`"
}

// example is every setting at its default, commented out with one #.
func example(program string, t table) string {
	var b strings.Builder
	b.WriteString("## Settings of " + program + "; docs/settings.md says more. Each line with one # is a\n" +
		"## setting at its default: take the # away, and that of its section, to change it.\n")
	open := []string{}
	for _, s := range t {
		steps := strings.Split(s.key, ".")
		sections := steps[:len(steps)-1]
		b.WriteString("\n")
		for i, name := range sections {
			if i >= len(open) || open[i] != name {
				fmt.Fprintf(&b, "#%s%s:\n", strings.Repeat("  ", i), name)
			}
		}
		open = sections
		indent := strings.Repeat("  ", len(sections))
		shown := s.show()
		if s.tag == tagText && (shown == "" || strings.ContainsAny(shown, ":#")) {
			shown = fmt.Sprintf("%q", shown)
		}
		b.WriteString(wrap(s.say+" Takes "+s.want+".", indent+"## "))
		fmt.Fprintf(&b, "#%s%s: %s\n", indent, steps[len(steps)-1], shown)
	}
	return b.String()
}

// wrap breaks text into lines of at most 100 characters, each with the prefix.
func wrap(text, prefix string) string {
	var b strings.Builder
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && len(prefix)+len(line)+1+len(word) > 100 {
			b.WriteString(prefix + line + "\n")
			line = ""
		}
		line = strings.TrimPrefix(line+" "+word, " ")
	}
	return b.String() + prefix + line + "\n"
}

// TestEverySetting: each field has a row, and no two rows the same field or name.
func TestEverySetting(t *testing.T) {
	a, s := defaults(theHost), serverDefaults()
	for _, test := range []struct {
		name      string
		table     table
		of        reflect.Type
		got, want any
	}{
		{"agent", bind("BERTH_", settings, a), reflect.TypeFor[Agent](), a, defaults(theHost)},
		{"server", bind(serverPrefix, serverSettings, s), reflect.TypeFor[Server](), s, serverDefaults()},
	} {
		names := map[string]string{}
		for _, s := range test.table {
			for _, name := range []string{s.key, s.env, s.ecs} {
				if other, ok := names[name]; ok && name != "" {
					t.Errorf("%s: %s: a name of %s too", test.name, name, other)
				}
				names[name] = s.key
			}
			if !s.set(s.show()) {
				t.Errorf("%s: %s: its default, %s, is against its rule", test.name, s.key, s.show())
			}
			if s.ecs != "" && notHonoured[s.ecs] != "" {
				t.Errorf("%s: %s: honoured and not", test.name, s.ecs)
			}
			if test.name == "agent" && strings.HasPrefix(s.env, serverPrefix) {
				t.Errorf("%s: the server reads %s too", s.key, s.env)
			}
		}
		if n := leaves(test.of); n != len(test.table) {
			t.Errorf("%s: %d fields and %d settings", test.name, n, len(test.table))
		}
		if !reflect.DeepEqual(test.got, test.want) {
			t.Errorf("%s: setting the defaults changed them: %+v", test.name, test.got)
		}
	}
}

func leaves(t reflect.Type) int {
	if t.Kind() != reflect.Struct {
		return 1
	}
	n := 0
	for i := range t.NumField() {
		n += leaves(t.Field(i).Type)
	}
	return n
}
