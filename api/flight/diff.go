package flight

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Difference is one place where two JSON values are not the same.
type Difference struct {
	Path     string `json:"path"`     // state.fault.reason, actions[1].Do.job; "" is the whole
	Recorded string `json:"recorded"` // JSON; "" where there is nothing
	Now      string `json:"now"`
}

// Diff compares what was recorded with what comes out now, in the order of the
// paths. Two times of the same instant are the same, whatever their zones: a
// replay may run in another zone than the machine did.
func Diff(recorded, now json.RawMessage) ([]Difference, error) {
	if bytes.Equal(recorded, now) {
		return nil, nil
	}
	a, err := decode(recorded)
	if err != nil {
		return nil, fmt.Errorf("what was recorded is no JSON: %w", err)
	}
	b, err := decode(now)
	if err != nil {
		return nil, fmt.Errorf("what comes out is no JSON: %w", err)
	}
	var d differ
	d.compare("", a, b)
	return d.found, nil
}

// decode keeps numbers as they are written: a float64 would change the large ones.
func decode(raw json.RawMessage) (v any, err error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	err = dec.Decode(&v)
	return v, err
}

type differ struct{ found []Difference }

// nothing stands for what one of the two does not have.
type nothing struct{}

func (d *differ) compare(path string, a, b any) {
	switch x := a.(type) {
	case map[string]any:
		if y, ok := b.(map[string]any); ok {
			d.objects(path, x, y)
			return
		}
	case []any:
		if y, ok := b.([]any); ok {
			for i := range max(len(x), len(y)) {
				d.compare(fmt.Sprintf("%s[%d]", path, i), at(x, i), at(y, i))
			}
			return
		}
	case string:
		if y, ok := b.(string); ok && (x == y || sameInstant(x, y)) {
			return
		}
	default: // null, true, false, a number, nothing
		switch b.(type) {
		case map[string]any, []any:
		default:
			if a == b {
				return
			}
		}
	}
	d.found = append(d.found, Difference{path, show(a), show(b)})
}

func (d *differ) objects(path string, x, y map[string]any) {
	keys := make([]string, 0, len(x))
	for k := range x {
		keys = append(keys, k)
	}
	for k := range y {
		if _, both := x[k]; !both {
			keys = append(keys, k)
		}
	}
	slices.Sort(keys)
	for _, k := range keys {
		member := func(m map[string]any) any {
			if v, ok := m[k]; ok {
				return v
			}
			return nothing{}
		}
		d.compare(strings.TrimPrefix(path+"."+k, "."), member(x), member(y))
	}
}

func at(list []any, i int) any {
	if i < len(list) {
		return list[i]
	}
	return nothing{}
}

func sameInstant(x, y string) bool {
	t, err := time.Parse(time.RFC3339Nano, x)
	if err != nil {
		return false
	}
	u, err := time.Parse(time.RFC3339Nano, y)
	return err == nil && t.Equal(u)
}

func show(v any) string {
	if v == (nothing{}) {
		return ""
	}
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return fmt.Sprint(v)
	}
	return strings.TrimRight(text.String(), "\n")
}
