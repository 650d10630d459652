package ecsjson

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Kind is what a JSON value is.
type Kind uint8

// The kinds of JSON value, with the words that problems use for them.
const (
	Null Kind = iota
	Bool
	Number
	String
	Array
	Object
)

func (k Kind) String() string {
	return [...]string{"null", "a boolean", "a number", "a string", "a list", "an object"}[k]
}

// Node is a parsed JSON value. Members keep the order of the text.
type Node struct {
	Kind    Kind
	Text    string // a string's content, a number's digits, true or false
	Items   []*Node
	Members []Member
}

// Member is one name and value of an object.
type Member struct {
	Name  string
	Value *Node
}

// Member returns the value of a name, or nil.
func (n *Node) Member(name string) *Node {
	for _, m := range n.Members {
		if m.Name == name {
			return m.Value
		}
	}
	return nil
}

// sorted returns the members by name: the order in which they are read.
func (n *Node) sorted() []Member {
	ms := slices.Clone(n.Members)
	slices.SortFunc(ms, func(a, b Member) int { return strings.Compare(a.Name, b.Name) })
	return ms
}

// shown is the value as a problem shows it.
func (n *Node) shown() string {
	switch n.Kind {
	case Array, Object:
		return ""
	}
	return clip(string(n.append(nil)))
}

// append writes the value as compact JSON.
func (n *Node) append(b []byte) []byte {
	switch n.Kind {
	case Null:
		return append(b, "null"...)
	case Bool, Number:
		return append(b, n.Text...)
	case String:
		return appendString(b, n.Text)
	case Array:
		b = append(b, '[')
		for i, item := range n.Items {
			if i > 0 {
				b = append(b, ',')
			}
			b = item.append(b)
		}
		return append(b, ']')
	default:
		b = append(b, '{')
		for i, m := range n.Members {
			if i > 0 {
				b = append(b, ',')
			}
			b = append(appendString(b, m.Name), ':')
			b = m.Value.append(b)
		}
		return append(b, '}')
	}
}

func appendString(b []byte, s string) []byte {
	var buf bytes.Buffer
	e := json.NewEncoder(&buf)
	e.SetEscapeHTML(false)
	if err := e.Encode(s); err != nil {
		panic(err) // a string always encodes
	}
	return append(b, bytes.TrimSuffix(buf.Bytes(), []byte("\n"))...)
}

// Limits of a document. ECS itself takes a task definition of at most 64 KiB.
const (
	MaxBytes = 1 << 20
	MaxDepth = 32 // the deepest shape of the ECS API nests 11
)

// Parse reads one JSON value and nothing after it. The tree is nil where the
// text is not JSON at all; it is there, with the first of each, where the only
// problems are names given twice.
func Parse(data []byte) (*Node, Problems) {
	if len(data) > MaxBytes {
		return nil, Problems{{Rule: fmt.Sprintf("%d bytes; want at most %d", len(data), MaxBytes)}}
	}
	if i := invalidUTF8(data); i >= 0 {
		return nil, Problems{{Rule: position(data, i) + ": not UTF-8"}}
	}
	var raw json.RawMessage
	if err := json.Unmarshal(data, &raw); err != nil {
		if len(bytes.TrimSpace(data)) == 0 {
			return nil, Problems{{Rule: "empty; want a JSON object"}}
		}
		// Offset counts the bytes read, the wrong one among them; a text that only
		// ends too early is all read, and has no wrong one.
		offset := len(data)
		if se := (*json.SyntaxError)(nil); errors.As(err, &se) && !strings.HasPrefix(se.Error(), "unexpected end") {
			offset = max(int(se.Offset)-1, 0)
		}
		return nil, Problems{{Rule: position(data, offset) + ": " + err.Error()}}
	}
	p := parser{data: data, dec: json.NewDecoder(bytes.NewReader(data))}
	p.dec.UseNumber()
	n := p.value("", 1)
	if p.fatal != nil {
		return nil, Problems{*p.fatal}
	}
	return n, p.problems
}

// parser builds the tree from a text already known to be one JSON value.
type parser struct {
	data     []byte
	dec      *json.Decoder
	problems Problems
	fatal    *Problem
}

func (p *parser) value(path string, depth int) *Node {
	if depth > MaxDepth {
		p.fail(Problem{Path: path, Rule: fmt.Sprintf("nested deeper than %d", MaxDepth)})
	}
	token := p.token(path)
	switch t := token.(type) {
	case json.Delim:
		if t == '[' {
			return p.array(path, depth)
		}
		return p.object(path, depth)
	case string:
		return &Node{Kind: String, Text: t}
	case json.Number:
		return &Node{Kind: Number, Text: t.String()}
	case bool:
		return &Node{Kind: Bool, Text: strconv.FormatBool(t)}
	}
	return &Node{Kind: Null}
}

func (p *parser) array(path string, depth int) *Node {
	n := &Node{Kind: Array}
	for p.more() {
		n.Items = append(n.Items, p.value(fmt.Sprintf("%s[%d]", path, len(n.Items)), depth+1))
	}
	p.token(path)
	return n
}

func (p *parser) object(path string, depth int) *Node {
	n := &Node{Kind: Object}
	seen := map[string]bool{}
	for p.more() {
		name, _ := p.token(path).(string)
		at := join(path, name)
		value := p.value(at, depth+1)
		if seen[name] {
			p.problems = append(p.problems, Problem{Path: at, Rule: "given twice"})
			continue
		}
		seen[name] = true
		n.Members = append(n.Members, Member{name, value})
	}
	p.token(path)
	return n
}

func (p *parser) more() bool { return p.fatal == nil && p.dec.More() }

// token returns the next token. A \u escape of half a surrogate pair is a
// problem, because encoding/json would put U+FFFD in its place unseen.
func (p *parser) token(path string) json.Token {
	if p.fatal != nil {
		return nil
	}
	from := p.dec.InputOffset()
	token, err := p.dec.Token()
	if err != nil {
		p.fail(Problem{Path: path, Rule: err.Error()})
		return nil
	}
	if s, ok := token.(string); ok && strings.ContainsRune(s, utf8.RuneError) {
		raw := bytes.ToLower(p.data[from:p.dec.InputOffset()])
		if bytes.Contains(raw, []byte(`\ud`)) {
			p.fail(Problem{Path: path, Rule: "half a surrogate pair in a \\u escape"})
		}
	}
	return token
}

func (p *parser) fail(problem Problem) {
	if p.fatal == nil {
		p.fatal = &problem
	}
}

// join names a member of the value at path. A name that is not a plain word is
// quoted, as the keys of a map often are not.
func join(path, name string) string {
	plain := name != ""
	for _, r := range name {
		plain = plain && (r == '_' || r == '-' || '0' <= r && r <= '9' || 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z')
	}
	switch {
	case !plain:
		return path + "[" + clip(strconv.Quote(name)) + "]"
	case path == "":
		return clip(name)
	}
	return path + "." + clip(name)
}

// position says where an offset is, as an editor shows it.
func position(data []byte, offset int) string {
	before := data[:offset]
	line := bytes.Count(before, []byte("\n")) + 1
	column := utf8.RuneCount(before[bytes.LastIndexByte(before, '\n')+1:]) + 1
	return fmt.Sprintf("line %d, column %d", line, column)
}

func invalidUTF8(data []byte) int {
	for i := 0; i < len(data); {
		r, size := utf8.DecodeRune(data[i:])
		if r == utf8.RuneError && size == 1 {
			return i
		}
		i += size
	}
	return -1
}
