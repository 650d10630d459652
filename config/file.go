package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// yaml.v3 writes the line into its message.
var yamlLine = regexp.MustCompile(`^yaml: line (\d+): (.*)$`)

// file sets what a YAML file says. The tree is walked by hand, not decoded: the
// library's strict decoding stops at names, says them without their path, and
// lets a name be given twice.
func (l *loader) file(path string, data []byte) {
	d := yaml.NewDecoder(bytes.NewReader(data))
	var root, more yaml.Node
	err := d.Decode(&root)
	if errors.Is(err, io.EOF) {
		return // empty, or nothing but comments
	}
	if err == nil {
		if err = d.Decode(&more); errors.Is(err, io.EOF) {
			for _, n := range root.Content {
				l.section(path, "", n)
			}
			return
		}
		if err == nil {
			l.report(fmt.Sprintf("%s:%d", path, more.Line), "", "", "a second document; want one")
			return
		}
	}
	where, rule := path, strings.TrimPrefix(err.Error(), "yaml: ")
	if m := yamlLine.FindStringSubmatch(err.Error()); m != nil {
		where, rule = path+":"+m[1], m[2]
	}
	l.report(where, "", "", "not YAML: %s", rule)
}

// section sets what a mapping says; prefix is "" for the whole file.
func (l *loader) section(path, prefix string, n *yaml.Node) {
	at := func(n *yaml.Node) string { return fmt.Sprintf("%s:%d", path, n.Line) }
	if n.Tag == "!!null" {
		return // a section whose settings are all commented out
	}
	if n.Kind != yaml.MappingNode {
		l.report(at(n), prefix, shown(n), "want settings, as key: value")
		return
	}
	lines := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		name, value := n.Content[i], n.Content[i+1]
		key := strings.TrimPrefix(prefix+"."+name.Value, ".")
		if name.Kind != yaml.ScalarNode {
			l.report(at(name), prefix, "", "want a setting's name")
			continue
		}
		if first, ok := lines[name.Value]; ok {
			l.report(at(name), key, "", "given twice, first on line %d", first)
			continue
		}
		lines[name.Value] = name.Line
		f, known := l.fields[key]
		switch {
		case known:
			l.fromFile(at(name), key, f, value)
		case l.table.isSection(key):
			l.section(path, key, value)
		default:
			l.report(at(name), key, "", "unknown setting%s", didYouMean(key, l.table.keysAndSections()))
		}
	}
}

func (l *loader) fromFile(where, key string, f field, n *yaml.Node) {
	text, ok := plain(n, f.tag)
	if !ok || !f.set(text) {
		l.report(where, key, shown(n), "want %s", f.want)
		return
	}
	l.from[key] = source{where, key}
}

// plain is a value as a field's set takes it, where it is of the field's kind:
// a number is not taken for text, nor text for a number.
func plain(n *yaml.Node, tag string) (string, bool) {
	switch {
	case n.ShortTag() != tag:
		return "", false
	case n.Kind == yaml.ScalarNode:
		return n.Value, true
	case n.Kind == yaml.SequenceNode:
		words := make([]string, len(n.Content))
		for i, item := range n.Content {
			switch item.ShortTag() {
			case tagNumber:
				words[i] = item.Value
			case tagText:
				words[i] = jsonText(item.Value)
			default:
				return "", false
			}
		}
		return "[" + strings.Join(words, ", ") + "]", true
	case n.Kind == yaml.MappingNode:
		m := map[string]string{}
		for i := 0; i+1 < len(n.Content); i += 2 {
			name, value := n.Content[i], n.Content[i+1]
			if _, twice := m[name.Value]; twice || name.ShortTag() != tagText || value.ShortTag() != tagText {
				return "", false
			}
			m[name.Value] = value.Value
		}
		b, err := json.Marshal(m)
		return string(b), err == nil
	}
	return "", false
}

func shown(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.AliasNode:
		return "*" + n.Value
	case n.Kind != yaml.ScalarNode:
		text, _ := plain(n, n.ShortTag())
		return text
	case n.ShortTag() == "!!null":
		return "nothing"
	case n.ShortTag() == tagText:
		return strconv.Quote(n.Value)
	}
	return n.Value
}
