package ecsjson

import (
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/aws/smithy-go"
	"github.com/aws/smithy-go/document"
	smithytime "github.com/aws/smithy-go/time"
	"github.com/aws/smithy-go/traits"
)

// Refusal gives the sentence for a member that is not taken, or "". shape is
// the member's path without indexes: containerDefinitions[].secrets. It is asked
// about unknown names too.
type Refusal func(shape string) string

// Decode fills into from a tree. Every problem is returned, sorted; what could
// not be read is left at its zero value. refuse may be nil.
func Decode(n *Node, into smithy.Deserializable, refuse Refusal) Problems {
	d := &decoder{cur: n, fresh: true, refuse: refuse}
	if err := into.Deserialize(d); err != nil {
		d.problems = append(d.problems, Problem{Path: d.path, Rule: err.Error()})
	}
	return d.problems.Sorted()
}

// decoder walks a tree as the generated code asks. It never returns an error:
// a value that does not fit becomes a problem and the walk goes on beside it.
//
//	ReadStruct ─> ReadStructMember ─> (Read of the member) ─> ReadStructMember ... nil
//	ReadUnion  ─> (Read of the one member) ─> ReadUnion = nil
//	ReadList   ─> ReadListItem ─> ReadNil ─> (Read of the item) ─> ReadListItem ... false
//	ReadMap    ─> ReadMapKey ─> ReadNil ─> (Read of the value) ─> ReadMapKey ... false
type decoder struct {
	cur         *Node  // what the next Read takes
	fresh       bool   // and has not yet taken
	path, shape string // of cur
	stack       []frame
	refuse      Refusal
	problems    Problems
}

// frame is an open object or list.
type frame struct {
	schema      *smithy.Schema
	union       bool
	path, shape string
	members     []Member // by name, of an object
	items       []*Node  // of a list
	next        int
}

var _ smithy.ShapeDeserializer = (*decoder)(nil)

func (d *decoder) report(path, value, rule string) {
	d.problems = append(d.problems, Problem{Path: path, Value: value, Rule: rule})
}

// take uses up the current value; nil, with a problem, where it is of another kind.
func (d *decoder) take(want Kind, wanted string) *Node {
	d.fresh = false
	if d.cur.Kind == want {
		return d.cur
	}
	rule := fmt.Sprintf("want %s, not %s", wanted, d.cur.Kind)
	if want == String && d.cur.Kind == Number {
		rule += fmt.Sprintf("; write %q", d.cur.Text)
	}
	d.report(d.path, d.cur.shown(), rule)
	return nil
}

func (d *decoder) open(f frame) {
	f.path, f.shape = d.path, d.shape
	d.stack = append(d.stack, f)
}

func (d *decoder) top() *frame { return &d.stack[len(d.stack)-1] }

func (d *decoder) pop() { d.stack = d.stack[:len(d.stack)-1] }

func (d *decoder) enter(n *Node, path, shape string) {
	d.cur, d.fresh, d.path, d.shape = n, true, path, shape
}

// ReadStruct implements smithy.ShapeDeserializer.
func (d *decoder) ReadStruct(s *smithy.Schema) error {
	f := frame{schema: s}
	if n := d.take(Object, "an object"); n != nil {
		f.members = n.sorted()
	}
	d.open(f)
	return nil
}

// ReadStructMember implements smithy.ShapeDeserializer. A null member is one
// that was not given, as in the protocol.
func (d *decoder) ReadStructMember() (*smithy.Schema, error) {
	f := d.top()
	for f.next < len(f.members) {
		m := f.members[f.next]
		f.next++
		if schema := d.member(f, m); schema != nil && m.Value.Kind != Null {
			d.enter(m.Value, join(f.path, m.Name), joinShape(f.shape, m.Name))
			return schema, nil
		}
	}
	d.pop()
	return nil, nil
}

// member finds a name's schema, or reports why it is not taken. A member that
// is refused is let through where it asks for nothing, because the console and
// DescribeTaskDefinition write every empty list.
func (d *decoder) member(f *frame, m Member) *smithy.Schema {
	path := join(f.path, m.Name)
	schema := f.schema.Member(m.Name)
	if d.refuse != nil && (schema == nil || !asksNothing(m.Value)) {
		if sentence := d.refuse(joinShape(f.shape, m.Name)); sentence != "" {
			d.report(path, "", sentence)
			return nil
		}
	}
	if schema != nil {
		return schema
	}
	known := names(f.schema)
	meant, ok := Suggest(m.Name, known)
	switch {
	case ok:
		rule := "unknown member; did you mean " + meant + "?"
		d.problems = append(d.problems, Problem{Path: path, Rule: rule, meant: join(f.path, meant)})
	case f.union:
		d.report(path, "", "unknown member; want "+anyOf(known))
	default:
		d.report(path, "", "unknown member")
	}
	return nil
}

func asksNothing(n *Node) bool {
	return n.Kind == Null || n.Kind == Bool && n.Text == "false" || n.Kind == Array && len(n.Items) == 0
}

func joinShape(shape, name string) string {
	if shape == "" {
		return name
	}
	return shape + "." + name
}

func names(s *smithy.Schema) []string {
	out := make([]string, 0, len(s.Members()))
	for name := range s.Members() {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

func anyOf(words []string) string {
	if len(words) == 1 {
		return words[0]
	}
	return "one of " + strings.Join(words, ", ")
}

// ReadUnion implements smithy.ShapeDeserializer: called once to open the
// union, and once more after its member to close it.
func (d *decoder) ReadUnion(s *smithy.Schema) (*smithy.Schema, error) {
	if !d.fresh {
		if len(d.stack) > 0 && d.top().union && d.top().schema == s {
			d.pop()
		}
		return nil, nil
	}
	n := d.take(Object, "an object")
	if n == nil {
		return nil, nil
	}
	f := frame{schema: s, union: true, path: d.path, shape: d.shape}
	var given []Member
	unknown := false
	for _, m := range n.sorted() {
		schema := d.member(&f, m)
		unknown = unknown || schema == nil
		if schema != nil && m.Value.Kind != Null {
			given = append(given, m)
		}
	}
	switch {
	case len(given) == 0 && unknown:
		return nil, nil
	case len(given) == 0:
		d.report(d.path, "", "empty; want "+anyOf(names(s)))
		return nil, nil
	case len(given) > 1:
		d.report(d.path, "", fmt.Sprintf("has both %s and %s; give one", given[0].Name, given[1].Name))
		return nil, nil
	}
	d.open(f)
	d.enter(given[0].Value, join(f.path, given[0].Name), joinShape(f.shape, given[0].Name))
	return s.Member(given[0].Name), nil
}

// ReadList implements smithy.ShapeDeserializer.
func (d *decoder) ReadList(s *smithy.Schema) error {
	f := frame{schema: s}
	if n := d.take(Array, "a list"); n != nil {
		f.items = n.Items
	}
	d.open(f)
	return nil
}

// ReadListItem implements smithy.ShapeDeserializer.
func (d *decoder) ReadListItem(*smithy.Schema) (bool, error) {
	f := d.top()
	if f.next == len(f.items) {
		d.pop()
		return false, nil
	}
	d.enter(f.items[f.next], fmt.Sprintf("%s[%d]", f.path, f.next), f.shape+"[]")
	f.next++
	return true, nil
}

// ReadMap implements smithy.ShapeDeserializer.
func (d *decoder) ReadMap(s *smithy.Schema) error {
	f := frame{schema: s}
	if n := d.take(Object, "an object"); n != nil {
		f.members = n.sorted()
	}
	d.open(f)
	return nil
}

// ReadMapKey implements smithy.ShapeDeserializer.
func (d *decoder) ReadMapKey(*smithy.Schema) (string, bool, error) {
	f := d.top()
	if f.next == len(f.members) {
		d.pop()
		return "", false, nil
	}
	m := f.members[f.next]
	f.next++
	d.enter(m.Value, join(f.path, m.Name), f.shape+"{}")
	return m.Name, true, nil
}

// ReadNil implements smithy.ShapeDeserializer. The generated code asks before
// each item of a list and value of a map, where null has no meaning.
func (d *decoder) ReadNil(*smithy.Schema) (bool, error) {
	if d.cur.Kind != Null {
		return false, nil
	}
	d.fresh = false
	d.report(d.path, "null", "want a value")
	return true, nil
}

// ReadString implements smithy.ShapeDeserializer; an enum's value must be one
// that the SDK knows.
func (d *decoder) ReadString(s *smithy.Schema, v *string) error {
	n := d.take(String, "a string")
	if n == nil {
		*v = ""
		return nil
	}
	*v = n.Text
	if s != nil && s.Type() == smithy.ShapeTypeEnum {
		if values := EnumValues(s); !slices.Contains(values, n.Text) {
			d.report(d.path, n.shown(), "want "+anyOf(values))
			*v = ""
		}
	}
	return nil
}

// ReadBool implements smithy.ShapeDeserializer.
func (d *decoder) ReadBool(_ *smithy.Schema, v *bool) error {
	n := d.take(Bool, "true or false")
	*v = n != nil && n.Text == "true"
	return nil
}

// ReadInt8 implements smithy.ShapeDeserializer.
func (d *decoder) ReadInt8(_ *smithy.Schema, v *int8) error {
	*v = int8(d.readInt(math.MinInt8, math.MaxInt8))
	return nil
}

// ReadInt16 implements smithy.ShapeDeserializer.
func (d *decoder) ReadInt16(_ *smithy.Schema, v *int16) error {
	*v = int16(d.readInt(math.MinInt16, math.MaxInt16))
	return nil
}

// ReadInt32 implements smithy.ShapeDeserializer.
func (d *decoder) ReadInt32(_ *smithy.Schema, v *int32) error {
	*v = int32(d.readInt(math.MinInt32, math.MaxInt32))
	return nil
}

// ReadInt64 implements smithy.ShapeDeserializer.
func (d *decoder) ReadInt64(_ *smithy.Schema, v *int64) error {
	*v = d.readInt(math.MinInt64, math.MaxInt64)
	return nil
}

// readInt takes a number written as a whole one: 1.5, 2.0 and 1e3 are refused.
func (d *decoder) readInt(lowest, highest int64) int64 {
	n := d.take(Number, "a whole number")
	if n == nil {
		return 0
	}
	v, err := strconv.ParseInt(n.Text, 10, 64)
	switch {
	case errors.Is(err, strconv.ErrSyntax):
		d.report(d.path, n.shown(), "want a whole number")
		return 0
	case err != nil || v < lowest || v > highest:
		d.report(d.path, n.shown(), fmt.Sprintf("want a whole number of %d to %d", lowest, highest))
		return 0
	}
	return v
}

// ReadFloat32 implements smithy.ShapeDeserializer.
func (d *decoder) ReadFloat32(_ *smithy.Schema, v *float32) error {
	*v = float32(d.readFloat(32))
	return nil
}

// ReadFloat64 implements smithy.ShapeDeserializer.
func (d *decoder) ReadFloat64(_ *smithy.Schema, v *float64) error {
	*v = d.readFloat(64)
	return nil
}

// readFloat takes a number, or one of the three strings that the protocol
// gives to the doubles JSON cannot write.
func (d *decoder) readFloat(bits int) float64 {
	if d.cur.Kind == String {
		switch d.cur.Text {
		case "NaN", "Infinity", "-Infinity":
			d.fresh = false
			v, _ := strconv.ParseFloat(d.cur.Text, bits)
			return v
		}
	}
	n := d.take(Number, "a number")
	if n == nil {
		return 0
	}
	v, err := strconv.ParseFloat(n.Text, bits)
	if err != nil {
		d.report(d.path, n.shown(), "too large a number")
		return 0
	}
	return v
}

// ReadTime implements smithy.ShapeDeserializer: seconds since 1970 unless the
// shape says otherwise.
func (d *decoder) ReadTime(s *smithy.Schema, v *time.Time) error {
	*v = time.Time{}
	format, parse := "", smithytime.ParseDateTime
	if t, ok := smithy.SchemaTrait[*traits.TimestampFormat](s); ok {
		format = t.Format
	}
	switch format {
	case "", "epoch-seconds":
		before := len(d.problems)
		// Year 9999, the last that RFC 3339 can write.
		seconds := d.readFloat(64)
		if len(d.problems) == before && !(math.Abs(seconds) <= 253402300799) {
			d.report(d.path, d.cur.shown(), "want seconds since 1970")
			return nil
		}
		*v = smithytime.ParseEpochSeconds(seconds)
		return nil
	case "http-date":
		parse = smithytime.ParseHTTPDate
	}
	if n := d.take(String, "a time in a string"); n != nil {
		t, err := parse(n.Text)
		if err != nil {
			d.report(d.path, n.shown(), "want a time as "+format)
		}
		*v = t
	}
	return nil
}

// ReadBlob implements smithy.ShapeDeserializer.
func (d *decoder) ReadBlob(_ *smithy.Schema, v *[]byte) error {
	*v = nil
	if n := d.take(String, "base64 in a string"); n != nil {
		b, err := base64.StdEncoding.DecodeString(n.Text)
		if err != nil {
			d.report(d.path, n.shown(), "want base64")
		}
		*v = b
	}
	return nil
}

// ReadBigInt implements smithy.ShapeDeserializer.
func (d *decoder) ReadBigInt(_ *smithy.Schema, v *big.Int) error {
	if n := d.take(Number, "a whole number"); n != nil {
		if _, ok := v.SetString(n.Text, 10); !ok {
			d.report(d.path, n.shown(), "want a whole number")
		}
	}
	return nil
}

// ReadBigFloat implements smithy.ShapeDeserializer.
func (d *decoder) ReadBigFloat(_ *smithy.Schema, v *big.Float) error {
	if n := d.take(Number, "a number"); n != nil {
		if _, ok := v.SetString(n.Text); !ok {
			d.report(d.path, n.shown(), "too large a number")
		}
	}
	return nil
}

// ReadDocument implements smithy.ShapeDeserializer: any JSON at all.
func (d *decoder) ReadDocument(_ *smithy.Schema, v *document.Value) error {
	d.fresh = false
	*v = document.Opaque{Value: d.cur.plain()}
	return nil
}
