package replace_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/placement/replace"
)

func TestParseWhen(t *testing.T) {
	for text, want := range map[string]string{"never": "never 0", "any": "any 0", "all": "all 0", "50%": "below 50", "100%": "below 100", "0%": "", "101%": "", "some": "", "": "", "5": ""} {
		when, below, err := replace.ParseWhen(text)
		got := fmt.Sprint(when, " ", below)
		if err != nil {
			got = ""
		}
		if got != want {
			t.Errorf("%q is %q, not %q (%v)", text, got, want, err)
		}
	}
}

func TestWants(t *testing.T) {
	for _, c := range []struct {
		when  string
		below int
		m     replace.Machine
		want  string
	}{
		{"any", 0, replace.Machine{GPUs: 8, Usable: 8}, ""},
		{"any", 0, replace.Machine{GPUs: 8, Usable: 7}, "1 of 8 GPUs failed"},
		{"all", 0, replace.Machine{GPUs: 8, Usable: 1}, ""},
		{"all", 0, replace.Machine{GPUs: 8}, "8 of 8 GPUs failed"},
		{"all", 0, replace.Machine{GPUs: 1}, "1 of 1 GPU failed"},
		{"below", 50, replace.Machine{GPUs: 8, Usable: 4}, ""},
		{"below", 50, replace.Machine{GPUs: 8, Usable: 3}, "5 of 8 GPUs failed"},
		{"below", 100, replace.Machine{GPUs: 8, Usable: 8}, ""},
		{"any", 0, replace.Machine{}, ""},
		{"all", 0, replace.Machine{}, ""},
		{"all", 0, replace.Machine{GPUs: 2, Usable: 2, Lost: true}, "nothing is heard of its agent"},
		{"never", 0, replace.Machine{GPUs: 2, Lost: true}, ""},
	} {
		if got := replace.Wants(replace.Policy{When: c.when, BelowPercent: c.below}, c.m); got != c.want {
			t.Errorf("%s %d %+v: %q, not %q", c.when, c.below, c.m, got, c.want)
		}
	}
}

// made is a replacement at some point.
func made(instance string, minute int, change func(*replace.Replacement)) replace.Replacement {
	r := replace.New("r-"+instance, instance, "1 of 2 GPUs failed", false, epoch.Add(time.Duration(minute)*time.Minute))
	change(&r)
	return r
}

func over(r *replace.Replacement) { r.State = replace.Done }

func failedNewcomer(minute int) func(*replace.Replacement) {
	return func(r *replace.Replacement) {
		r.State, r.Why = replace.Failed, "no newcomer"
		r.Newcomers[0] = replace.Newcomer{Token: r.ID, ID: "new-" + r.Instance, FailedAt: epoch.Add(time.Duration(minute) * time.Minute), Failed: "did not join within 10m0s"}
	}
}

func joinedNewcomer(minute int) func(*replace.Replacement) {
	return func(r *replace.Replacement) {
		r.State = replace.Done
		r.Newcomers[0] = replace.Newcomer{Token: r.ID, ID: "new-" + r.Instance, JoinedAt: epoch.Add(time.Duration(minute) * time.Minute)}
	}
}

func TestDue(t *testing.T) {
	fleet := func(n int, failed ...int) (all []replace.Machine) {
		for i := range n {
			all = append(all, replace.Machine{ID: fmt.Sprintf("m%02d", i), GPUs: 2, Usable: 2})
		}
		for _, i := range failed {
			all[i].Usable = 1
		}
		return all
	}
	p := replace.Default()
	now := epoch.Add(2 * time.Hour)
	for _, c := range []struct {
		name     string
		machines []replace.Machine
		all      []replace.Replacement
		begin    string
		held     string // is in it
	}{
		{"nothing is due", fleet(3), nil, "", ""},
		{"one at a time in a small fleet", fleet(3, 1, 2), nil, "m01", "1 replacement under way, and the next waits: at most 1 at a time in a fleet of 3 (10 %)"},
		{"a tenth of a large one", fleet(25, 4, 5, 6), nil, "m04 m05", "at most 2 at a time"},
		{"a newcomer and the old one are one machine", append(fleet(19, 4, 5), replace.Machine{ID: "new", GPUs: 2, Usable: 2}),
			[]replace.Replacement{made("m04", 0, func(r *replace.Replacement) { r.State, r.Newcomers[0].ID = replace.Move, "new" })}, "", "fleet of 19"},
		{"none twice", fleet(3, 1), []replace.Replacement{made("m01", 0, func(*replace.Replacement) {})}, "", ""},
		{"no newcomer under way", fleet(30, 1), []replace.Replacement{made("m09", 0, func(r *replace.Replacement) { r.State, r.Newcomers[0].ID = replace.Join, "m01" })}, "", ""},
		{"a failed one waits for an operator", fleet(30, 1, 2), []replace.Replacement{made("m01", 0, func(r *replace.Replacement) { r.State = replace.Failed })}, "m02",
			"m01 is due (1 of 2 GPUs failed), and its last replacement failed: berth replace m01 begins another"},
		{"or for its word", fleet(30, 1), []replace.Replacement{made("m01", 0, func(r *replace.Replacement) { r.State, r.Excused = replace.Failed, true })}, "m01", ""},
		{"what failed before what is lost", append([]replace.Machine{{ID: "a", GPUs: 2, Usable: 2, Lost: true}}, append(fleet(2, 1), replace.Machine{ID: "z", GPUs: 2})...), nil, "z", "at most 1"},
		{"so many in an hour", fleet(99, 7, 8), []replace.Replacement{made("a", 90, over), made("b", 91, over), made("c", 92, over), made("d", 93, over), made("e", 94, over), made("f", 30, over)},
			"m07", "6 replacements began within the last hour"},
		{"three newcomers that failed", fleet(99, 7), []replace.Replacement{made("a", 0, failedNewcomer(60)), made("b", 0, failedNewcomer(80)), made("c", 0, failedNewcomer(110))},
			"", "stopped: the last 3 newcomers failed (new-a did not join within 10m0s; new-b"},
		{"even with nothing due", fleet(99), []replace.Replacement{made("a", 0, failedNewcomer(60)), made("b", 0, failedNewcomer(80)), made("c", 0, failedNewcomer(110))},
			"", "berth replace --resume"},
		{"not over a long time", fleet(99, 7), []replace.Replacement{made("a", 0, failedNewcomer(40)), made("b", 0, failedNewcomer(80)), made("c", 0, failedNewcomer(110))}, "m07", ""},
		{"a success goes on", fleet(99, 7), []replace.Replacement{made("a", 0, failedNewcomer(60)), made("b", 0, failedNewcomer(80)), made("c", 0, failedNewcomer(90)),
			made("d", 0, joinedNewcomer(115))}, "m07", ""},
		{"one that broke at once is none", append(fleet(99, 7), replace.Machine{ID: "new-d", GPUs: 2, Usable: 1}), []replace.Replacement{made("a", 0, failedNewcomer(60)),
			made("b", 0, failedNewcomer(80)), made("c", 0, failedNewcomer(90)), made("d", 0, joinedNewcomer(115))}, "", "new-d broke after it had joined: 1 of 2 GPUs failed"},
		{"nor one that was replaced at once", fleet(99, 7), []replace.Replacement{made("a", 0, failedNewcomer(60)), made("b", 0, failedNewcomer(80)), made("c", 0, joinedNewcomer(90)),
			made("new-c", 110, over)}, "", "new-c broke after it had joined"},
	} {
		t.Run(c.name, func(t *testing.T) {
			begin, held := replace.Due(p, c.machines, c.all, now)
			var ids []string
			for _, b := range begin {
				ids = append(ids, b.Instance)
			}
			if got := strings.Join(ids, " "); got != c.begin || !strings.Contains(held, c.held) || c.held == "" && held != "" {
				t.Errorf("begins %q, held %q; not %q, %q", got, held, c.begin, c.held)
			}
			if strings.HasPrefix(held, "stopped") {
				all := append([]replace.Replacement(nil), c.all...)
				for _, changed := range replace.Resume(all) {
					for i := range all {
						if all[i].ID == changed.ID {
							all[i] = changed
						}
					}
				}
				if _, held := replace.Due(p, c.machines, all, now); strings.HasPrefix(held, "stopped") {
					t.Errorf("resumed, and held: %s", held)
				}
			}
		})
	}
}
