package main

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
)

func TestBar(t *testing.T) {
	slice := func(mib, used int64) api.Slice { return api.Slice{MemoryInMiB: mib, UsedMemoryInMiB: used} }
	for _, tc := range []struct {
		name   string
		total  int64
		width  int
		slices []api.Slice
		want   string
	}{
		{"nothing on it", 100, 10, nil, ".........."},
		{"halves", 100, 10, []api.Slice{slice(50, 50), slice(50, 0)}, "AAAAAbbbbb"},
		{"thirds fill it to the last cell", 99, 10, []api.Slice{slice(33, 33), slice(33, 33), slice(33, 33)}, "AAABBBBCCC"},
		{"used in part", 100, 20, []api.Slice{slice(50, 25)}, "AAAAAaaaaa.........."},
		{"used a little shows", 1000, 10, []api.Slice{slice(500, 1)}, "Aaaaa....."},
		{"over its cap stays within it", 100, 10, []api.Slice{slice(50, 80)}, "AAAAA....."},
		{"a small slice has a cell", 80000, 10, []api.Slice{slice(1, 0), slice(40000, 0)}, "abbbb....."},
		{"more slices than cells", 100, 4, []api.Slice{slice(20, 0), slice(20, 0), slice(20, 0), slice(20, 0), slice(20, 0)}, "abcd"},
		{"over after the GPU shrank", 50, 10, []api.Slice{slice(50, 0), slice(50, 0)}, "aaaaabbbbb"},
		{"a GPU without memory", 0, 4, nil, "...."},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := style{}.drawBar(barCells(tc.slices, tc.total, tc.width))
			if got != "["+tc.want+"]" {
				t.Errorf("got  %s\nwant [%s]", got, tc.want)
			}
		})
	}
}

var escapes = regexp.MustCompile("\x1b\\[[0-9;]*m")

// No line of the screen is longer than the terminal, and colour takes no columns.
func TestTopFitsTheTerminal(t *testing.T) {
	for _, width := range []int{10, 20, 40, 80, 100, 200} {
		plain := drawTop(picture{insts: []api.Instance{twoGPUs()}}, noon, style{width: width})
		colour := drawTop(picture{insts: []api.Instance{twoGPUs()}}, noon, style{width: width, colour: true})
		if len(plain) != len(colour) {
			t.Errorf("width %d: %d lines without colour, %d with", width, len(plain), len(colour))
		}
		for i, line := range colour {
			if visible(line) > width {
				t.Errorf("width %d: %d columns in %q", width, visible(line), line)
			}
			if i := strings.LastIndex(line, "\x1b["); i >= 0 && !strings.HasPrefix(line[i:], "\x1b[0m") {
				t.Errorf("width %d: a colour does not end in %q", width, line)
			}
			if bare := escapes.ReplaceAllString(line, ""); bare != plain[i] {
				t.Errorf("width %d: colour changes the text: %q, %q", width, bare, plain[i])
			}
		}
	}
	golden(t, "top-80.txt", strings.Join(drawTop(picture{insts: []api.Instance{twoGPUs()}}, noon, style{width: 80}), "\n")+"\n")
	golden(t, "top-colour.txt", strings.Join(drawTop(picture{insts: []api.Instance{twoGPUs()}}, noon, style{width: 100, colour: true}), "\n")+"\n")
}

func TestWords(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 0: "0s", 59 * time.Second: "59s", 61 * time.Second: "1m01s", 3 * time.Hour: "3h00m",
		47*time.Hour + 59*time.Minute: "47h59m", 49 * time.Hour: "2d01h",
	} {
		if got := age(noon, noon.Add(-d)); got != want {
			t.Errorf("%s: got %s, want %s", d, got, want)
		}
	}
	for mib, want := range map[int64]string{0: "0.0", 20480: "20.0", 80896: "79.0", 1023: "1.0", 51: "0.0", 52: "0.1"} {
		if got := gib(mib); got != want {
			t.Errorf("%d MiB: got %s, want %s GiB", mib, got, want)
		}
	}
	for units, want := range map[int64]string{1024: "1", 512: "0.5", 14080: "13.75", 10240: "10", 0: "0"} {
		if got := vcpu(units); got != want {
			t.Errorf("%d units: got %s, want %s", units, got, want)
		}
	}
}
