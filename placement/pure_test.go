package placement_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/berth-gpu/berth/placement"
	"github.com/berth-gpu/berth/placement/fleet"
	"github.com/berth-gpu/berth/placement/replace"
	"github.com/berth-gpu/berth/placement/store"
)

// TestGroups: a replacement is stored in one piece with its machines, and last.
func TestGroups(t *testing.T) {
	begun := &replace.Replacement{ID: "r2", Instance: "m4", State: replace.Cordon}
	stepped := &replace.Replacement{ID: "r1", Instance: "m1", State: replace.Discard, Newcomers: []replace.Newcomer{{ID: "m2"}, {Token: "r1-2"}}}
	got := placement.Groups([]fleet.Change{
		{Kind: fleet.KindInstance, Key: "m1", Value: 1}, {Kind: fleet.KindTask, Key: "m1", Value: 1}, {Kind: fleet.KindInstance, Key: "m3", Value: 1},
		{Kind: fleet.KindInstance, Key: "m2"}, {Kind: fleet.KindTask, Key: "t", Value: 1},
	}, []store.Op{{Kind: fleet.KindReplacement, Key: "r1", Value: stepped}, {Kind: fleet.KindReplacement, Key: "r2", Value: begun}, {Kind: fleet.KindReplacement, Key: "old"}})
	text := ""
	for _, g := range got {
		for _, op := range g {
			text += fmt.Sprintf("%s/%s ", op.Kind, op.Key)
		}
		text += "| "
	}
	want := "task/m1 | instance/m3 | task/t | instance/m1 instance/m2 replacement/r1 | replacement/r2 | replacement/old | "
	if text != want {
		t.Errorf("stored as %s, want %s", text, want)
	}
}

// TestNewcomer: which machine takes no tasks until it has proved itself.
func TestNewcomer(t *testing.T) {
	for name, tt := range map[string]struct {
		r    replace.Replacement
		want string
	}{
		"being made":       {replace.Replacement{State: replace.Launch, Newcomers: []replace.Newcomer{{Token: "abc"}}}, "dev-abc"},
		"made":             {replace.Replacement{State: replace.Join, Newcomers: []replace.Newcomer{{Token: "abc", ID: "dev-abc"}}}, "dev-abc"},
		"the second":       {replace.Replacement{State: replace.Launch, Newcomers: []replace.Newcomer{{Token: "abc", ID: "dev-abc"}, {Token: "abc-2"}}}, "dev-abc-2"},
		"never made":       {replace.Replacement{State: replace.Failed, Newcomers: []replace.Newcomer{{Token: "abc"}}}, ""},
		"from before that": {replace.Replacement{State: replace.Launch}, ""},
	} {
		if got := placement.Newcomer(&tt.r); got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}

// TestWithin: an agent's clock is believed between what the server saw itself.
func TestWithin(t *testing.T) {
	noon := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
	placed, now := noon.Add(-time.Minute), noon
	for name, tt := range map[string]struct{ said, want time.Time }{
		"a good clock":       {noon.Add(-30*time.Second + time.Microsecond), noon.Add(-30 * time.Second)},
		"one that is behind": {noon.Add(-time.Hour), placed},
		"one that is ahead":  {noon.Add(time.Hour), now},
	} {
		if got := placement.Within(tt.said, placed, now); !got.Equal(tt.want) {
			t.Errorf("%s: %s, want %s", name, got, tt.want)
		}
	}
	if got := placement.Within(noon, noon.Add(time.Hour), now); !got.Equal(now) {
		t.Errorf("the server's own clock was set back: %s", got)
	}
}
