package ecsjson

import (
	"encoding/base64"
	"encoding/json"
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

// Encode writes a shape as compact JSON: structure members in the order of the
// generated code, keys of maps sorted, so that equal values give equal text.
func Encode(v smithy.Serializable) []byte {
	e := &encoder{}
	v.Serialize(e)
	return e.Bytes()
}

// encoder builds a tree as the generated code writes. Where a value goes
// depends on what is open: into a structure under its schema's member name, into
// a map under the key written before it, at the end of a list.
type encoder struct {
	root *Node
	open []*building
}

type building struct {
	node  *Node
	isMap bool
	key   string
}

var _ smithy.ShapeSerializer = (*encoder)(nil)

// Bytes implements smithy.ShapeSerializer.
func (e *encoder) Bytes() []byte {
	if e.root == nil {
		return []byte("{}")
	}
	return e.root.append(nil)
}

func (e *encoder) put(s *smithy.Schema, n *Node) {
	if len(e.open) == 0 {
		e.root = n
		return
	}
	switch top := e.open[len(e.open)-1]; {
	case top.node.Kind == Array:
		top.node.Items = append(top.node.Items, n)
	case top.isMap:
		top.node.Members = append(top.node.Members, Member{top.key, n})
	default:
		top.node.Members = append(top.node.Members, Member{s.MemberName(), n})
	}
}

func (e *encoder) begin(s *smithy.Schema, kind Kind, isMap bool) {
	n := &Node{Kind: kind}
	e.put(s, n)
	e.open = append(e.open, &building{node: n, isMap: isMap})
}

func (e *encoder) end() { e.open = e.open[:len(e.open)-1] }

func (e *encoder) number(s *smithy.Schema, text string) { e.put(s, &Node{Kind: Number, Text: text}) }

// WriteStruct and its siblings implement smithy.ShapeSerializer.
func (e *encoder) WriteStruct(s *smithy.Schema) { e.begin(s, Object, false) }

// CloseStruct implements smithy.ShapeSerializer.
func (e *encoder) CloseStruct() { e.end() }

// WriteUnion implements smithy.ShapeSerializer; the member is written next.
func (e *encoder) WriteUnion(s, _ *smithy.Schema) { e.begin(s, Object, false) }

// CloseUnion implements smithy.ShapeSerializer.
func (e *encoder) CloseUnion() { e.end() }

// WriteList implements smithy.ShapeSerializer.
func (e *encoder) WriteList(s *smithy.Schema) { e.begin(s, Array, false) }

// CloseList implements smithy.ShapeSerializer.
func (e *encoder) CloseList() { e.end() }

// WriteMap implements smithy.ShapeSerializer.
func (e *encoder) WriteMap(s *smithy.Schema) { e.begin(s, Object, true) }

// WriteKey implements smithy.ShapeSerializer.
func (e *encoder) WriteKey(_ *smithy.Schema, key string) { e.open[len(e.open)-1].key = key }

// CloseMap implements smithy.ShapeSerializer. The generated code walks Go maps,
// in no order at all.
func (e *encoder) CloseMap() {
	n := e.open[len(e.open)-1].node
	slices.SortFunc(n.Members, func(a, b Member) int { return strings.Compare(a.Name, b.Name) })
	e.end()
}

// WriteNil implements smithy.ShapeSerializer.
func (e *encoder) WriteNil(s *smithy.Schema) { e.put(s, &Node{Kind: Null}) }

// WriteString implements smithy.ShapeSerializer.
func (e *encoder) WriteString(s *smithy.Schema, v string) { e.put(s, &Node{Kind: String, Text: v}) }

// WriteBool implements smithy.ShapeSerializer.
func (e *encoder) WriteBool(s *smithy.Schema, v bool) {
	e.put(s, &Node{Kind: Bool, Text: strconv.FormatBool(v)})
}

// WriteInt8 implements smithy.ShapeSerializer.
func (e *encoder) WriteInt8(s *smithy.Schema, v int8) { e.WriteInt64(s, int64(v)) }

// WriteInt16 implements smithy.ShapeSerializer.
func (e *encoder) WriteInt16(s *smithy.Schema, v int16) { e.WriteInt64(s, int64(v)) }

// WriteInt32 implements smithy.ShapeSerializer.
func (e *encoder) WriteInt32(s *smithy.Schema, v int32) { e.WriteInt64(s, int64(v)) }

// WriteInt64 implements smithy.ShapeSerializer.
func (e *encoder) WriteInt64(s *smithy.Schema, v int64) { e.number(s, strconv.FormatInt(v, 10)) }

// WriteFloat32 implements smithy.ShapeSerializer.
func (e *encoder) WriteFloat32(s *smithy.Schema, v float32) { e.float(s, float64(v), 32) }

// WriteFloat64 implements smithy.ShapeSerializer.
func (e *encoder) WriteFloat64(s *smithy.Schema, v float64) { e.float(s, v, 64) }

func (e *encoder) float(s *smithy.Schema, v float64, bits int) {
	switch {
	case math.IsNaN(v):
		e.WriteString(s, "NaN")
	case math.IsInf(v, 0):
		e.WriteString(s, strings.TrimPrefix(strconv.FormatFloat(v, 'f', -1, bits), "+")+"inity")
	default:
		e.number(s, strconv.FormatFloat(v, 'f', -1, bits))
	}
}

// WriteBigInt implements smithy.ShapeSerializer.
func (e *encoder) WriteBigInt(s *smithy.Schema, v *big.Int) { e.number(s, v.String()) }

// WriteBigFloat implements smithy.ShapeSerializer.
func (e *encoder) WriteBigFloat(s *smithy.Schema, v *big.Float) { e.number(s, v.Text('g', -1)) }

// WriteBlob implements smithy.ShapeSerializer.
func (e *encoder) WriteBlob(s *smithy.Schema, v []byte) {
	e.WriteString(s, base64.StdEncoding.EncodeToString(v))
}

// WriteTime implements smithy.ShapeSerializer.
func (e *encoder) WriteTime(s *smithy.Schema, v time.Time) {
	format := ""
	if t, ok := smithy.SchemaTrait[*traits.TimestampFormat](s); ok {
		format = t.Format
	}
	switch format {
	case "date-time":
		e.WriteString(s, smithytime.FormatDateTime(v))
	case "http-date":
		e.WriteString(s, smithytime.FormatHTTPDate(v))
	default:
		e.float(s, smithytime.FormatEpochSeconds(v), 64)
	}
}

// WriteDocument implements smithy.ShapeSerializer.
func (e *encoder) WriteDocument(s *smithy.Schema, v document.Value) { e.put(s, fromDocument(v)) }

// plain is the tree in encoding/json's types, as a document of ecs/types holds it.
func (n *Node) plain() any {
	switch n.Kind {
	case Null:
		return nil
	case Bool:
		return n.Text == "true"
	case Number:
		return json.Number(n.Text)
	case String:
		return n.Text
	case Array:
		list := make([]any, len(n.Items))
		for i, item := range n.Items {
			list[i] = item.plain()
		}
		return list
	}
	m := make(map[string]any, len(n.Members))
	for _, member := range n.Members {
		m[member.Name] = member.Value.plain()
	}
	return m
}

// fromDocument takes the kind of document that ecs/types writes: any Go value,
// or the service's own document type, in an Opaque.
func fromDocument(v document.Value) *Node {
	switch v := v.(type) {
	case document.Opaque:
		return fromOpaque(v.Value)
	case *document.Opaque:
		return fromOpaque(v.Value)
	}
	return &Node{Kind: Null}
}

func fromOpaque(v any) *Node {
	marshal := func() ([]byte, error) { return json.Marshal(v) }
	if m, ok := v.(document.Marshaler); ok {
		marshal = m.MarshalSmithyDocument
	}
	text, err := marshal()
	if err != nil {
		return &Node{Kind: Null}
	}
	n, problems := Parse(text)
	if len(problems) > 0 {
		return &Node{Kind: Null}
	}
	return n
}
