package config

import (
	"regexp"
	"slices"
	"strings"
)

// setting is one row of the table of an S: everything that is to say about it.
type setting[S any] struct {
	key string // mps.drainDeadline
	ecs string // ECS_CONTAINER_STOP_TIMEOUT, where ECS operators have a name for it
	say string // one sentence
	at  func(*S) field
}

// row is a setting bound to the value that it sets.
type row struct {
	key, env, ecs, say string
	field
}

// table is every setting of one value, in the order in which they are documented.
type table []row

// bind makes s settable. prefix begins the names in the environment.
func bind[S any](prefix string, settings []setting[S], s *S) table {
	t := make(table, len(settings))
	for i, row := range settings {
		t[i].key, t[i].env, t[i].ecs, t[i].say, t[i].field = row.key, envName(prefix, row.key), row.ecs, row.say, row.at(s)
	}
	return t
}

// envName is a setting's own name in the environment: BERTH_MPS_DRAIN_DEADLINE.
func envName(prefix, key string) string {
	words := humps.ReplaceAllString(strings.ReplaceAll(key, ".", "_"), "${1}_${2}")
	return prefix + strings.ToUpper(words)
}

var humps = regexp.MustCompile(`([a-z])([A-Z])`)

func (t table) isSection(key string) bool {
	return slices.ContainsFunc(t, func(r row) bool { return strings.HasPrefix(r.key, key+".") })
}

func (t table) keysAndSections() []string {
	var all []string
	for _, s := range t {
		for i, r := range s.key {
			if r == '.' && !slices.Contains(all, s.key[:i]) {
				all = append(all, s.key[:i])
			}
		}
		all = append(all, s.key)
	}
	return all
}
