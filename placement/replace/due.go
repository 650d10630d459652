package replace

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// alike is how many newcomers in a row have to fail, within alikeWithin of each other,
// for the policy to stop: an image or a driver is broken then, and every machine that is
// replaced by another such one is capacity lost.
const (
	alike       = 3
	alikeWithin = time.Hour
)

// Begin is one replacement that is to begin.
type Begin struct {
	Instance string `json:"instance"`
	Reason   string `json:"reason"`
}

// DueIn and DueOut are Due's arguments and results, for the flight recorder.
type (
	DueIn struct {
		Policy       Policy        `json:"policy"`
		Machines     []Machine     `json:"machines"`
		Replacements []Replacement `json:"replacements,omitempty"`
		Now          time.Time     `json:"now"`
	}
	DueOut struct {
		Begin []Begin `json:"begin,omitempty"`
		Held  string  `json:"held,omitempty"`
	}
)

// Do is Due.
func (in DueIn) Do() (out DueOut) {
	out.Begin, out.Held = Due(in.Policy, in.Machines, in.Replacements, in.Now)
	return out
}

// Due names the machines whose replacement begins now, and says, where one that is due
// has to wait, why. It never names a machine that is being replaced, that is the
// newcomer of a replacement under way, or whose last replacement failed: that one an
// operator begins again, or all of them with Resume. What an operator begins is not
// asked here, and counts against the limits all the same.
func Due(p Policy, machines []Machine, all []Replacement, now time.Time) (begin []Begin, held string) {
	now = stored(now)
	var due []Machine
	for _, m := range machines {
		if Wants(p, m) == "" || underWay(m.ID, all) {
			continue
		}
		if r := failure(m.ID, all); r != nil {
			held = fmt.Sprintf("%s is due (%s), and its last replacement failed: berth replace %s begins another", m.ID, Wants(p, m), m.ID)
			continue
		}
		due = append(due, m)
	}
	if why := failAlike(p, machines, all, now); why != "" {
		return nil, why
	}
	// What is certain before what is suspected, the worst first.
	slices.SortFunc(due, func(a, b Machine) int {
		if a.Lost != b.Lost {
			if b.Lost {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(a.Usable*b.GPUs, b.Usable*a.GPUs), cmp.Compare(a.ID, b.ID))
	})
	size, open, recent := guard(machines, all, now)
	atOnce := max(1, size*p.AtOncePercent/100)
	for _, m := range due {
		switch {
		case open >= atOnce:
			return begin, fmt.Sprintf("%s, and the next waits: at most %d at a time in a fleet of %d (%d %%)", count(open, "replacement")+" under way", atOnce, size, p.AtOncePercent)
		case recent >= p.PerHour:
			return begin, fmt.Sprintf("%s began within the last hour, and the next waits: at most %d in an hour", count(recent, "replacement"), p.PerHour)
		}
		begin = append(begin, Begin{Instance: m.ID, Reason: Wants(p, m)})
		open, recent = open+1, recent+1
	}
	return begin, held
}

// guard counts the fleet, in which a machine and the newcomer that is to take its place
// are one, the replacements under way, and those that began within the last hour.
func guard(machines []Machine, all []Replacement, now time.Time) (size, open, recent int) {
	there := map[string]bool{}
	for _, m := range machines {
		there[m.ID] = true
	}
	size = len(machines)
	for _, r := range all {
		if now.Sub(r.StartedAt) < time.Hour {
			recent++
		}
		if r.Over() {
			continue
		}
		open++
		old := there[r.Instance]
		for _, n := range r.Newcomers {
			if there[n.ID] && old {
				size--
			}
			old = old || there[n.ID]
		}
	}
	return size, open, recent
}

// underWay says whether a machine is the old or the new one of a replacement that is not over.
func underWay(instance string, all []Replacement) bool {
	return slices.ContainsFunc(all, func(r Replacement) bool {
		return !r.Over() && (r.Instance == instance || slices.ContainsFunc(r.Newcomers, func(n Newcomer) bool { return n.ID == instance }))
	})
}

// failure is a machine's replacement that failed and that nobody has excused, if its
// last one did.
func failure(instance string, all []Replacement) (last *Replacement) {
	for i, r := range all {
		if r.Instance == instance && (last == nil || r.StartedAt.After(last.StartedAt)) {
			last = &all[i]
		}
	}
	if last == nil || last.State != Failed || last.Excused {
		return nil
	}
	return last
}

// failAlike says so when the last newcomers failed: never joined, joined IMPAIRED, or
// had to be replaced themselves within the hour. It stays so until one that came later
// does well, or Resume.
func failAlike(p Policy, machines []Machine, all []Replacement, now time.Time) string {
	type outcome struct {
		at      time.Time
		id, why string
	}
	var known []outcome
	for _, r := range all {
		for _, n := range r.Newcomers {
			switch {
			case n.Excused:
			case n.Failed != "":
				known = append(known, outcome{n.FailedAt, n.ID, n.Failed})
			case !n.JoinedAt.IsZero():
				known = append(known, outcome{n.JoinedAt, n.ID, brokeSoon(p, n, machines, all, now)})
			}
		}
	}
	slices.SortFunc(known, func(a, b outcome) int { return cmp.Or(a.at.Compare(b.at), cmp.Compare(a.id, b.id)) })
	if len(known) < alike {
		return ""
	}
	last := known[len(known)-alike:]
	var each []string
	for _, o := range last {
		if o.why == "" {
			return ""
		}
		each = append(each, o.id+" "+o.why)
	}
	if last[alike-1].at.Sub(last[0].at) > alikeWithin {
		return ""
	}
	return fmt.Sprintf("stopped: the last %d newcomers failed (%s). Mend what they have in common (image, driver), then: berth replace --resume", alike, strings.Join(each, "; "))
}

// brokeSoon says why a newcomer that had joined had to be replaced itself soon after.
func brokeSoon(p Policy, n Newcomer, machines []Machine, all []Replacement, now time.Time) string {
	for _, r := range all {
		if r.Instance == n.ID && !r.Operator && r.StartedAt.Sub(n.JoinedAt) < alikeWithin {
			return "broke after it had joined: " + r.Reason
		}
	}
	for _, m := range machines {
		if why := Wants(p, m); m.ID == n.ID && why != "" && now.Sub(n.JoinedAt) < alikeWithin {
			return "broke after it had joined: " + why
		}
	}
	return ""
}

// Resume is an operator's word that the policy may go on: no failure until now counts
// any more. It returns the replacements that it changes.
func Resume(all []Replacement) (changed []Replacement) {
	for _, r := range all {
		before := r
		r.Newcomers = slices.Clone(r.Newcomers)
		for i := range r.Newcomers {
			if n := &r.Newcomers[i]; n.Failed != "" || !n.JoinedAt.IsZero() {
				n.Excused = true
			}
		}
		r.Excused = r.State == Failed
		if r.Excused != before.Excused || !slices.Equal(r.Newcomers, before.Newcomers) {
			changed = append(changed, r)
		}
	}
	return changed
}
