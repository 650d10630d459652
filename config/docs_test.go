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

var update = flag.Bool("update", false, "rewrite docs/settings.md and config/berth-agent.yaml from the table")

// TestGenerated: the page and the shipped example say what the table says.
func TestGenerated(t *testing.T) {
	for path, want := range map[string]string{"../docs/settings.md": page(), "berth-agent.yaml": example()} {
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
	a := defaults(theHost)
	var b strings.Builder
	b.WriteString(`# Settings of berth-agent

Generated from the table in config/settings.go by ` + "`go test ./config -update`" + `.

The agent reads a YAML file and its environment. What the environment says under berth's names goes before what it says
under ECS's, that before the file, and the file before the defaults. Unknown keys and unknown ` + "`BERTH_`" + ` names are errors;
every problem is reported at once, each with its file and line. config/berth-agent.yaml is an example with every setting.

| setting | environment | ECS's name | default | takes | |
|---|---|---|---|---|---|
`)
	for _, s := range settings {
		f := s.at(a)
		shown := "`" + f.show() + "`"
		switch f.show() {
		case "":
			shown = "empty"
		case theHost:
			shown = "the host name"
		}
		ecs := ""
		if s.ecs != "" {
			ecs = "`" + s.ecs + "`"
		}
		fmt.Fprintf(&b, "| `%s` | `%s` | %s | %s | %s | %s |\n", s.key, s.env(), ecs, shown, strings.ReplaceAll(f.want, "|", "\\|"), s.say)
	}
	b.WriteString("\nIn the environment, lists and maps are JSON: `BERTH_RESERVED_PORTS='[22, 2375]'`, `ECS_INSTANCE_ATTRIBUTES='{\"rack\": \"b4\"}'`.\n" +
		"`ECS_LOGLEVEL=crit` is taken for error.\n\n## Names of the ECS agent that berth does not honour\n\n" +
		"The agent warns of each that is set, and of any other `ECS_` name.\n\n| name | why |\n|---|---|\n")
	for _, name := range slices.Sorted(maps.Keys(notHonoured)) {
		fmt.Fprintf(&b, "| `%s` | %s |\n", name, notHonoured[name])
	}
	return b.String()
}

// example is every setting at its default, commented out with one #.
func example() string {
	a := defaults(theHost)
	var b strings.Builder
	b.WriteString("## Settings of berth-agent; docs/settings.md says more. Each line with one # is a\n" +
		"## setting at its default: take the # away, and that of its section, to change it.\n")
	open := []string{}
	for _, s := range settings {
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
		f := s.at(a)
		shown := f.show()
		if f.tag == tagText && (shown == "" || strings.ContainsAny(shown, ":#")) {
			shown = fmt.Sprintf("%q", shown)
		}
		b.WriteString(wrap(s.say+" Takes "+f.want+".", indent+"## "))
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

// TestEverySetting: each field of an Agent has a row, and no two rows the same
// field or name.
func TestEverySetting(t *testing.T) {
	a := defaults(theHost)
	names := map[string]string{}
	for _, s := range settings {
		for _, name := range []string{s.key, s.env(), s.ecs} {
			if other, ok := names[name]; ok && name != "" {
				t.Errorf("%s: a name of %s too", name, other)
			}
			names[name] = s.key
		}
		if f := s.at(a); !f.set(f.show()) {
			t.Errorf("%s: its default, %s, is against its rule", s.key, f.show())
		}
		if s.ecs != "" && notHonoured[s.ecs] != "" {
			t.Errorf("%s: honoured and not", s.ecs)
		}
	}
	if n := leaves(reflect.TypeFor[Agent]()); n != len(settings) {
		t.Errorf("%d fields and %d settings", n, len(settings))
	}
	if !reflect.DeepEqual(a, defaults(theHost)) {
		t.Errorf("setting the defaults changed them: %+v", a)
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
