package mpssim

import (
	"reflect"
	"testing"
	"time"
)

// The same values against the real daemon: TestDifferentialCommands.
func TestValues(t *testing.T) {
	for _, tc := range []struct {
		text  string
		shown string // "" is no limit
	}{
		{"2G", "2G"}, {"2GiB", "2G"}, {"512M", "512M"}, {"1024", "1G"}, {"1.5G", "1M"}, {"1000K", "1000M"}, {"5T", "5M"}, {"0", ""}, {"G", ""}, {"0x10G", ""},
		{"-1G", "17179869183G"}, {"1025M", "1G"}, {"18446744073709551615", "17179869183G"}, {"", ""},
	} {
		shown := ""
		if bytes := limitBytes(tc.text); bytes > 0 {
			shown = showLimit(bytes)
		}
		if shown != tc.shown {
			t.Errorf("limit %q shows as %q, want %q", tc.text, shown, tc.shown)
		}
	}
	for _, tc := range []struct {
		text string
		n    int
	}{{"12", 12}, {"-1", -1}, {"abc", 0}, {"99999999999", 1215752191}, {"5x", 5}, {"", 0}} {
		if n := atoi(tc.text); n != tc.n {
			t.Errorf("atoi(%q) = %d, want %d", tc.text, n, tc.n)
		}
	}
	for _, tc := range []struct {
		text  string
		shown string
	}{{"50", "50.0"}, {"1e1", "10.0"}, {"0x20", "32.0"}, {"50%", "50.0"}, {"99.99", "100.0"}, {"0", ""}, {"100.1", ""}, {"nan", ""}, {"", ""}, {"1_0", "1.0"}} {
		shown := ""
		if p, ok := percent(tc.text); ok {
			shown = showPercent(p)
		}
		if shown != tc.shown {
			t.Errorf("percentage %q shows as %q, want %q", tc.text, shown, tc.shown)
		}
	}
}

func TestMemoryLimitsOfAClient(t *testing.T) {
	const gpuA, gpuB = "GPU-aaaaaaaa-0000-0000-0000-000000000001", "GPU-bbbbbbbb-0000-0000-0000-000000000002"
	devices := []string{gpuA, gpuB}
	for _, tc := range []struct {
		env  string
		want map[int]uint64
	}{
		{"0=1G,1=512MB", map[int]uint64{0: 1 << 30, 1: 512 << 20}},
		{"0=20480M", map[int]uint64{0: 20 << 30}},
		{gpuB + "=2G", map[int]uint64{1: 2 << 30}},
		{"GPU-bbbb=2G", map[int]uint64{1: 2 << 30}},
		{"2=1G", map[int]uint64{}}, {"5G", map[int]uint64{}}, {"0=", map[int]uint64{}}, {"", map[int]uint64{}}, {"=1G", map[int]uint64{}},
	} {
		if got := memLimits(tc.env, devices, true); !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%q: %v, want %v", tc.env, got, tc.want)
		}
	}
}

func TestSteerFile(t *testing.T) {
	full := Steer{
		Branch: 535, StartDelay: 200 * time.Millisecond, ServerStart: StartFails, Reason: "unknown error", DaemonHang: true, DaemonFails: true,
		FaultSeq: 3, FaultCode: 719, Variants: []string{"uuid-limit-ignored"},
	}
	got, err := ParseSteer(full.Format())
	if err != nil || !reflect.DeepEqual(got, full) {
		t.Errorf("read back: %+v, %v", got, err)
	}
	for _, tc := range []struct{ text, want string }{
		{"branch", "line 1: branch: no value"},
		{"# all is well\nserver-start maybe", `line 2: server-start: "maybe": want ok, hang or fail`},
		{"daemon sleeps", `line 1: daemon: "sleeps": want hang or fail`},
		{"variant nothing", `line 1: variant: "nothing": not in mpssim.Behaviours`},
		{"colour red", "line 1: colour: not a key of the steer file"},
	} {
		if _, err := ParseSteer([]byte(tc.text)); err == nil || err.Error() != tc.want {
			t.Errorf("%q: %v, want %s", tc.text, err, tc.want)
		}
	}
}

func TestQuitStatus(t *testing.T) {
	for _, tc := range []struct {
		name   string
		waited bool
		ended  int
		last   int
		want   int
	}{
		{"no server", false, 0, 0, 0},
		{"no server left, the last one had failed", false, 1, 1, 0},
		{"the first server ends well", true, 0, 0, 0},
		{"the first server fails", true, 0, 3, 3},
		{"a second server ends well", true, 1, 0, 1},
		{"a second server fails", true, 1, 3, 1},
	} {
		if got := quitStatus(tc.waited, tc.ended, tc.last); got != tc.want {
			t.Errorf("%s: %d, want %d", tc.name, got, tc.want)
		}
	}
}

func TestControlUse(t *testing.T) {
	for _, tc := range []struct {
		args      []string
		branch    int
		use       string
		multiuser bool
	}{
		{[]string{"-f"}, 535, "-f", false},
		{[]string{"-f", "-multiuser-server"}, 535, "", false},
		{[]string{"-f", "-multiuser-server"}, 580, "-f", true},
		{[]string{"-M", "-d"}, 580, "-d", true},
		{[]string{"-f", "-d"}, 580, "", false},
		{[]string{"-v"}, 535, "", false},
		{[]string{"-v"}, 580, "-v", false},
		{[]string{"get_server_list"}, 580, "", false},
		{nil, 580, "", false},
	} {
		if use, multiuser := controlUse(tc.args, tc.branch); use != tc.use || multiuser != tc.multiuser {
			t.Errorf("%q on R%d: %q %v", tc.args, tc.branch, use, multiuser)
		}
	}
}

func TestAfterExit(t *testing.T) {
	client := &pendingClient{}
	for _, tc := range []struct {
		name  string
		queue []request
		ready bool
		left  int
		gone  bool // the client was given up
	}{
		{"start_server has one attempt", []request{{uid: 0}}, false, 0, false},
		{"a client's first", []request{{uid: 0, client: client}}, false, 1, false},
		{"a client's sixth", []request{{uid: 0, client: client, failed: 5}}, false, 0, true},
		{"another user's does not count", []request{{uid: 1}, {uid: 1, client: client, failed: 5}}, false, 2, false},
		{"a server that served and ended does not count", []request{{uid: 0, client: client, failed: 5}}, true, 1, false},
	} {
		gone := false
		left := afterExit(tc.queue, 0, tc.ready, func(*pendingClient) { gone = true })
		if len(left) != tc.left || gone != tc.gone {
			t.Errorf("%s: %d left, given up %v", tc.name, len(left), gone)
		}
	}
}
