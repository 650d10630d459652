package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"strings"

	"github.com/berth-gpu/berth/api"
)

// kept is an answer, or one element of it, with its JSON as it came: what goes out
// with -o json has all its members, those that this berth does not know too.
type kept[T any] struct {
	is  T
	raw json.RawMessage
}

func (k *kept[T]) UnmarshalJSON(raw []byte) error {
	k.raw = append(json.RawMessage(nil), raw...)
	return json.Unmarshal(raw, &k.is)
}

func (k kept[T]) MarshalJSON() ([]byte, error) {
	if k.raw == nil {
		return json.Marshal(k.is)
	}
	return k.raw, nil
}

// list fetches a list and keeps what want takes.
func list[T any](ctx context.Context, c *client, path string, query url.Values, want func(T) bool) ([]kept[T], error) {
	var all []kept[T]
	if _, err := c.get(ctx, answerTimeout, path, query, &all); err != nil {
		return nil, err
	}
	some := make([]kept[T], 0, len(all)) // never nil: JSON has a list
	for _, k := range all {
		if want == nil || want(k.is) {
			some = append(some, k)
		}
	}
	return some, nil
}

// bare is a list without the JSON that it came in.
func bare[T any](all []kept[T]) []T {
	out := make([]T, len(all))
	for i, k := range all {
		out[i] = k.is
	}
	return out
}

func (c *client) instances(ctx context.Context) ([]kept[api.Instance], error) {
	return list[api.Instance](ctx, c, api.PathInstances, nil, nil)
}

// instance is the machine of that name, as a list of one.
func (c *client) instance(ctx context.Context, name string) ([]kept[api.Instance], error) {
	all, err := c.instances(ctx)
	if err != nil {
		return nil, err
	}
	for i, k := range all {
		if k.is.Name == name {
			return all[i : i+1], nil
		}
	}
	return nil, fmt.Errorf("no instance %q; berth instances lists them", name)
}

// taskFilter says which tasks are asked for; the zero value, all.
type taskFilter struct {
	service, instance string
	lines             []string // ids: these tasks, and those that took their place
	unplaced          bool
}

func (f taskFilter) query() url.Values {
	q := url.Values{}
	for name, value := range map[string]string{"service": f.service, "instance": f.instance} {
		if value != "" {
			q.Set(name, value)
		}
	}
	if len(f.lines) > 0 {
		q["line"] = f.lines
	}
	if f.unplaced {
		q.Set("unplaced", "1")
	}
	return q
}

// takes says whether t is asked for; of lines, which need all tasks, it says nothing.
func (f taskFilter) takes(t api.Task) bool {
	return (f.service == "" || serviceOf(t) == f.service) &&
		(f.instance == "" || t.Instance == f.instance || t.Instance == "" && !unplaced(t)) && // an agent's own
		(!f.unplaced || unplaced(t))
}

func (c *client) tasks(ctx context.Context, f taskFilter) ([]kept[api.Task], error) {
	return list(ctx, c, api.PathTasks, f.query(), f.takes)
}

// serviceOf is the service that keeps t, or "".
func serviceOf(t api.Task) string {
	service, ok := strings.CutPrefix(t.Group, "service:")
	if !ok {
		return ""
	}
	return service
}

// unplaced says whether t waits for a place. A generation is given with the place.
func unplaced(t api.Task) bool {
	return t.LastStatus == api.StatusPending && t.Instance == "" && t.Generation == 0
}

// task finds the one task that ref means: an id, the start of one, or the name of
// a wanted task, whose newest task it then is (the API lists the newest first).
func (c *client) task(ctx context.Context, ref string) (kept[api.Task], error) {
	var none kept[api.Task]
	if ref == "" {
		return none, usageError("TASK is empty; berth ps -a lists the tasks")
	}
	tasks, err := list[api.Task](ctx, c, api.PathTasks, url.Values{"ref": {ref}}, nil)
	if err != nil {
		return none, err
	}
	var found []kept[api.Task]
	for _, t := range tasks {
		if t.is.ID == ref {
			return t, nil
		}
		if strings.HasPrefix(t.is.ID, ref) {
			found = append(found, t)
		}
	}
	for _, t := range tasks {
		if len(found) == 0 && t.is.Name == ref {
			return t, nil
		}
	}
	switch len(found) {
	case 0:
		return none, fmt.Errorf("no task %q; berth ps -a lists the tasks", ref)
	case 1:
		return found[0], nil
	}
	var ids []string
	for _, t := range found {
		ids = append(ids, t.is.ID+" ("+nameOf(t.is)+")")
	}
	return none, fmt.Errorf("%q fits %d tasks, give more of the id: %s", ref, len(found), some(ids, 8))
}

// some is a list in words, cut after n.
func some(words []string, n int) string {
	if len(words) > n {
		words = append(words[:n:n], fmt.Sprintf("and %d more", len(words)-n))
	}
	return strings.Join(words, ", ")
}
