package config

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// field is one place in an Agent or a Server, with the rule for what may stand there.
type field struct {
	want string                 // the rule, in words: "a duration of at least 1s"
	tag  string                 // of a YAML scalar: !!str, !!int, !!bool; a list or map has its own
	set  func(text string) bool // false: the rule is broken and nothing is set
	show func() string          // as set takes it
}

// YAML's own tags, for what a field takes.
const (
	tagText   = "!!str"
	tagNumber = "!!int"
	tagBool   = "!!bool"
	tagList   = "!!seq"
	tagMap    = "!!map"
)

func text(at *string, want string, ok func(string) bool) field {
	return field{want: want, tag: tagText, show: func() string { return *at }, set: func(s string) bool {
		if !ok(s) {
			return false
		}
		*at = s
		return true
	}}
}

// matching is text that a pattern describes as a whole.
func matching(at *string, want, pattern string) field {
	return text(at, want, regexp.MustCompile("^(?:"+pattern+")$").MatchString)
}

func word(at *string, words ...string) field {
	want := words[0]
	if last := len(words) - 1; last > 0 {
		want = strings.Join(words[:last], ", ") + " or " + words[last]
	}
	return text(at, want, func(s string) bool { return slices.Contains(words, s) })
}

// folder is an absolute path, kept clean.
func folder(at *string) field {
	f := text(at, "an absolute path", isPath)
	return field{f.want, f.tag, func(s string) bool { return f.set(s) && f.set(filepath.Clean(s)) }, f.show}
}

func isPath(s string) bool {
	return filepath.IsAbs(s) && !strings.ContainsAny(s, "\x00\n") && filepath.Clean(s) != "/"
}

func optionalPath(at *string) field {
	return text(at, "an absolute path, or empty", func(s string) bool { return s == "" || isPath(s) })
}

// searchPath is folders with colons between them, as in PATH.
func searchPath(at *string, mayBeEmpty bool) field {
	want := "absolute folders with : between them"
	if mayBeEmpty {
		want += ", or empty"
	}
	return text(at, want, func(s string) bool {
		if s == "" {
			return mayBeEmpty
		}
		return !slices.ContainsFunc(strings.Split(s, ":"), func(p string) bool { return !isPath(p) })
	})
}

// loopback is a host:port that other machines cannot reach, or nothing.
func loopback(at *string) field {
	return text(at, "host:port on loopback, or empty for none", func(s string) bool {
		if s == "" {
			return true
		}
		if port, ok := strings.CutPrefix(s, "localhost:"); ok {
			s = "127.0.0.1:" + port
		}
		a, err := netip.ParseAddrPort(s)
		return err == nil && a.Addr().IsLoopback()
	})
}

func duration(at *time.Duration, lowest, highest time.Duration) field {
	return field{
		want: "a duration " + bounds(shortDuration(lowest), shortDuration(highest), highest == 0) + `, as "` + shortDuration(*at) + `"`,
		tag:  tagText,
		show: func() string { return shortDuration(*at) },
		set: func(s string) bool {
			d, err := time.ParseDuration(s)
			if err != nil || d < lowest || highest > 0 && d > highest {
				return false
			}
			*at = d
			return true
		},
	}
}

func number[N int | int64](at *N, unit string, lowest, highest N) field {
	if unit != "" {
		unit = " of " + unit
	}
	return field{
		want: "a whole number" + unit + " " + bounds(fmt.Sprint(lowest), fmt.Sprint(highest), highest == 0),
		tag:  tagNumber,
		show: func() string { return fmt.Sprint(*at) },
		set: func(s string) bool {
			n, err := strconv.ParseInt(s, 10, 64)
			if err != nil || n < int64(lowest) || highest > 0 && n > int64(highest) || int64(N(n)) != n {
				return false
			}
			*at = N(n)
			return true
		},
	}
}

func bounds(lowest, highest string, open bool) string {
	if open {
		return "of at least " + lowest
	}
	return "from " + lowest + " to " + highest
}

func yesNo(at *bool) field {
	return field{
		want: "true or false",
		tag:  tagBool,
		show: func() string { return strconv.FormatBool(*at) },
		set: func(s string) bool {
			*at = s == "true"
			return s == "true" || s == "false"
		},
	}
}

// ports are a list in YAML, and in the environment what ECS writes: [22, 80].
func ports(at *[]uint16) field {
	return field{
		want: "a list of ports from 1 to 65535, each once",
		tag:  tagList,
		show: func() string {
			words := make([]string, len(*at))
			for i, p := range *at {
				words[i] = strconv.Itoa(int(p))
			}
			return "[" + strings.Join(words, ", ") + "]"
		},
		set: func(s string) bool {
			var list []uint16
			if json.Unmarshal([]byte(s), &list) != nil || list == nil || slices.Contains(list, 0) {
				return false
			}
			slices.Sort(list)
			if len(slices.Compact(slices.Clone(list))) < len(list) {
				return false
			}
			*at = list
			return true
		},
	}
}

// texts are a list of text in YAML, and in the environment: ["a", "b"].
func texts(at *[]string, want string, ok func(string) bool) field {
	return field{
		want: "a list of " + want + ", each once",
		tag:  tagList,
		show: func() string {
			words := make([]string, len(*at))
			for i, s := range *at {
				words[i] = jsonText(s)
			}
			return "[" + strings.Join(words, ", ") + "]"
		},
		set: func(s string) bool {
			var list []string
			if json.Unmarshal([]byte(s), &list) != nil || list == nil {
				return false
			}
			for i, item := range list {
				if !ok(item) || slices.Contains(list[:i], item) {
					return false
				}
			}
			*at = list
			return true
		},
	}
}

func jsonText(s string) string { b, _ := json.Marshal(s); return string(b) }

// ECS's rule for attributes of a container instance.
var attributeText = regexp.MustCompile(`^[a-zA-Z0-9_./:@-]([a-zA-Z0-9_./:@ -]{0,126}[a-zA-Z0-9_./:@-])?$`)

// attributes are a map in YAML, and in the environment what ECS writes: {"rack": "b4"}.
func attributes(at *map[string]string) field {
	return field{
		want: `names and values of 1 to 128 letters, digits and any of "-_./:@"`,
		tag:  tagMap,
		show: func() string { b, _ := json.Marshal(*at); return string(b) },
		set: func(s string) bool {
			var m map[string]string
			d := json.NewDecoder(bytes.NewReader([]byte(s)))
			if d.Decode(&m) != nil || m == nil || d.More() {
				return false
			}
			for name, value := range m {
				if !attributeText.MatchString(name) || !attributeText.MatchString(value) {
					return false
				}
			}
			*at = m
			return true
		},
	}
}

// shortDuration is a duration as people write it: 15m, not 15m0s.
func shortDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return cmp.Or(s, "0s")
}
