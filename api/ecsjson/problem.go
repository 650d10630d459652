package ecsjson

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Problem is one thing that is wrong with a document.
type Problem struct {
	Path  string // containerDefinitions[0].memory; "" is the document itself
	Value string // as written, clipped; "" where it says nothing or may be a secret
	Rule  string // what was wanted

	meant string // the path that an unknown one was probably meant to be
}

func (p Problem) String() string {
	parts := make([]string, 0, 3)
	for _, s := range []string{p.Path, p.Value, p.Rule} {
		if s != "" {
			parts = append(parts, s)
		}
	}
	return strings.Join(parts, ": ")
}

// Problems is every problem of a document, as one error of one line each.
type Problems []Problem

func (ps Problems) Error() string {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

// Touch says whether a problem is known at path, below it, or at something
// that holds it: whether what stands there is in doubt, so that a rule about it
// should stay silent.
func (ps Problems) Touch(path string) bool {
	return slices.ContainsFunc(ps, func(p Problem) bool {
		return within(p.Path, path) || within(path, p.Path) || p.meant != "" && within(p.meant, path)
	})
}

// within says whether path is root or below it.
func within(path, root string) bool {
	rest, ok := strings.CutPrefix(path, root)
	return ok && (root == "" || rest == "" || rest[0] == '.' || rest[0] == '[')
}

// Sorted returns the problems by path: names by letter, indexes by number. Two
// texts that differ only in the order of members have the same list.
func (ps Problems) Sorted() Problems {
	out := slices.Clone(ps)
	slices.SortStableFunc(out, func(a, b Problem) int {
		return slices.CompareFunc(pathSteps(a.Path), pathSteps(b.Path), compareSteps)
	})
	return out
}

func pathSteps(path string) []string {
	return strings.FieldsFunc(path, func(r rune) bool { return r == '.' || r == '[' || r == ']' })
}

func compareSteps(a, b string) int {
	i, errA := strconv.Atoi(a)
	j, errB := strconv.Atoi(b)
	if errA == nil && errB == nil {
		return cmp.Compare(i, j)
	}
	return cmp.Compare(a, b)
}

// maxShown is how many bytes of a value a problem shows.
const maxShown = 60

// Quote shows a string in a problem, as JSON would write it.
func Quote(s string) string { return clip(string(appendString(nil, s))) }

func clip(s string) string {
	if len(s) <= maxShown {
		return s
	}
	cut := maxShown
	for !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "..."
}

// Suggest finds the name that a mistyped one was probably meant to be: the
// same letters in another case, or at most two slips off.
func Suggest(name string, known []string) (string, bool) {
	best, distance := "", 3
	for _, k := range known {
		if strings.EqualFold(k, name) {
			return k, true
		}
		if d := edits(name, k); d < distance && d < len(k)/2 {
			best, distance = k, d
		}
	}
	return best, best != ""
}

// edits counts the letters put in, left out, changed or swapped with the next
// between two names, cut short where they are so different in length that it
// cannot matter.
func edits(a, b string) int {
	if len(a)-len(b) > 2 || len(b)-len(a) > 2 {
		return 3
	}
	before, row, next := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		next[0] = i + 1
		for j := range len(b) {
			cost := row[j]
			if a[i] != b[j] {
				cost = 1 + min(row[j], next[j], row[j+1])
				if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
					cost = min(cost, 1+before[j-1])
				}
			}
			next[j+1] = cost
		}
		before, row, next = row, next, before
	}
	return row[len(b)]
}
