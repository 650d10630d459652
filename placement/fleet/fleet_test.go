package fleet_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/api"
	"github.com/berth-gpu/berth/config/taskdef"
	"github.com/berth-gpu/berth/placement/fit"
	"github.com/berth-gpu/berth/placement/fleet"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// shared is a definition of one container with a cap, or without GPU where mib is 0.
func shared(family string, mib int, more string) []byte {
	gpu := ""
	if mib > 0 {
		gpu = fmt.Sprintf(`, "resourceRequirements": [{"type": "GPU", "sharingStrategy": {"nvidiaMps": {"memory": %d}}}]`, mib)
	}
	return fmt.Appendf(nil, `{"family": %q, "containerDefinitions": [{"name": "main", "image": "i", "cpu": 128, "memory": 64%s%s}]}`, family, gpu, more)
}

func whole(family string, n int) []byte {
	return fmt.Appendf(nil, `{"family": %q, "containerDefinitions": [{"name": "main", "image": "i", "memory": 64, "resourceRequirements": [{"type": "GPU", "value": "%d"}]}]}`, family, n)
}

func register(t testing.TB, f *fleet.Fleet, json []byte) string {
	t.Helper()
	d, err := f.Register(json, start)
	if err != nil {
		t.Fatal(err)
	}
	return d.Key()
}

func instance(id string, gpus int, mib int64) *fleet.Instance {
	i := &fleet.Instance{ID: id, Status: api.InstanceActive, CPU: 8192, MemoryMiB: 65536}
	for n := range gpus {
		i.GPUs = append(i.GPUs, fleet.GPU{ID: fmt.Sprintf("%s-%d", id, n), Index: n, TotalMiB: mib, MaxClients: 48, Standing: api.GPUOpen})
	}
	return i
}

func join(f *fleet.Fleet, i *fleet.Instance) {
	f.PutInstance(i)
	f.SetPresence(i.ID, true)
}

func pending(id, definition string, age int) *fleet.Task {
	return &fleet.Task{ID: id, Definition: definition, Desired: api.StatusRunning, LastStatus: api.StatusPending, CreatedAt: start.Add(time.Duration(age) * time.Second)}
}

func TestRegister(t *testing.T) {
	f := fleet.New("")
	web1 := register(t, f, shared("web", 1000, ""))
	again, err := f.Register([]byte(" "+strings.ReplaceAll(string(shared("web", 1000, "")), ", ", ",\n")), start.Add(time.Hour))
	if err != nil || again.Key() != web1 || !again.RegisteredAt.Equal(start) {
		t.Fatalf("the same content in other words is %+v (%v), not %s", again, err, web1)
	}
	web2 := register(t, f, shared("web", 2000, ""))
	web3 := register(t, f, shared("web", 1000, ""))
	if web1 != "web:1" || web2 != "web:2" || web3 != "web:3" || f.Newest("web").Key() != "web:3" || f.Newest("none") != nil {
		t.Errorf("revisions %s %s %s, newest %v", web1, web2, web3, f.Newest("web"))
	}
	if d, ok := f.Demand("web:2"); !ok || d.GPUMemoryMiB != 2000 || d.Clients != 1 || d.CPU != 128 || d.MemoryMiB != 64 {
		t.Errorf("demand of web:2: %+v %v", d, ok)
	}
	var problems taskdef.Problems
	if _, err := f.Register([]byte(`{"family": "x"}`), start); !errors.As(err, &problems) {
		t.Errorf("a definition without containers: %v", err)
	}
	changed := *f.Definition("web:1")
	changed.JSON, changed.Hash = f.Definition("web:2").JSON, f.Definition("web:2").Hash
	if err := f.PutDefinition(&changed); err == nil {
		t.Error("a revision took another content")
	}
}

func TestChanges(t *testing.T) {
	f := fleet.New("")
	key := register(t, f, shared("web", 1000, ""))
	f.PutService(&fleet.Service{Name: "s", Definition: key})
	first := pending("a", key, 0)
	f.PutTask(first)
	f.PutService(&fleet.Service{Name: "s", Definition: key, Desired: 2})
	f.SetPresence("nobody", true)
	join(f, instance("m", 1, 4000))
	if n := len(f.PlacePending(start)); n != 1 {
		t.Fatalf("%d placed", n)
	}
	f.DeleteService("s")
	f.DeleteService("never there")
	var got []string
	for _, c := range f.Changes() {
		data, _ := json.Marshal(c.Value)
		got = append(got, fmt.Sprintf("%s %s %.20s", c.Kind, c.Key, data))
	}
	want := "definition web:1 {\"family\":\"web\",\"rev\n" +
		"service s null\n" +
		"task a {\"id\":\"a\",\"definitio\n" +
		"instance m {\"id\":\"m\",\"agentId\":\n" +
		"counter generation {\"value\":1}"
	if s := strings.Join(got, "\n"); s != want {
		t.Errorf("got:\n%s\nwant:\n%s", s, want)
	}
	if first.Instance != "" || f.Task("a").Instance != "m" || f.Task("a").Generation != 1 {
		t.Errorf("the record that was put: %+v, the fleet's: %+v", first, f.Task("a"))
	}
	same := *f.Task("a")
	f.PutTask(&same)
	f.PutInstance(instance("m", 1, 4000))
	f.SetPresence("m", false)
	if c := f.Changes(); len(c) != 0 {
		t.Errorf("nothing changed, and changes are %v", c)
	}
}

func TestLoadRefuses(t *testing.T) {
	for _, tt := range []struct{ kind, key, data, want string }{
		{"replacement", "r", `{}`, `record replacement/r: the fleet holds no records of kind "replacement"`},
		{"task", "a", `{"id":"b"}`, `record task/a: it names itself "b", want the key it is stored under`},
		{"task", "a", `{"id":`, `record task/a: unexpected end of JSON input`},
		{"definition", "web:1", `{"family":"web","revision":1,"json":{"family":"web"}}`, `record definition/web:1: containerDefinitions`},
	} {
		f := fleet.New("")
		if err := f.Load(tt.kind, tt.key, json.RawMessage(tt.data)); err == nil || !strings.HasPrefix(err.Error(), tt.want) {
			t.Errorf("%s/%s %s: %v, want %s", tt.kind, tt.key, tt.data, err, tt.want)
		}
		if len(f.Tasks())+len(f.Definitions()) > 0 {
			t.Errorf("%s/%s was kept", tt.kind, tt.key)
		}
	}
}

// TestMachine: what a task holds, from its placing until its agent says STOPPED.
func TestMachine(t *testing.T) {
	f := fleet.New("")
	share, dedicated := register(t, f, shared("share", 1000, `, "portMappings": [{"containerPort": 80, "hostPort": 8080}]`)), register(t, f, whole("whole", 1))
	m := instance("m", 2, 4000)
	m.Ports = []api.Port{{Number: 22, Protocol: "tcp"}}
	join(f, m)
	f.PutTask(pending("a", share, 0))
	f.PutTask(pending("b", dedicated, 1))
	f.PutTask(pending("c", dedicated, 2))
	f.PutTask(pending("d", share, 3)) // its port is taken
	if n := len(f.PlacePending(start)); n != 2 {
		t.Fatalf("%d placed", n)
	}
	draw := func() string {
		m := f.Machine("m")
		var b strings.Builder
		fmt.Fprintf(&b, "cpu %d memory %d ports %d", m.CPU, m.MemoryMiB, len(m.Ports))
		for _, g := range m.GPUs {
			fmt.Fprintf(&b, ", %s %d/%d %d", g.Mode, g.AllocatedMiB, g.TotalMiB, g.Clients)
			if g.Closed != "" {
				fmt.Fprintf(&b, " closed (%s)", g.Closed)
			}
		}
		return b.String()
	}
	set := func(id string, change func(*fleet.Task)) {
		next := *f.Task(id)
		change(&next)
		f.PutTask(&next)
	}
	expect := func(when, want string) {
		t.Helper()
		if got := draw(); got != want {
			t.Errorf("%s: %s, want %s", when, got, want)
		}
	}
	held := "cpu 8064 memory 65408 ports 2, NVIDIA_MPS 1000/4000 1, DEDICATED 4000/4000 1"
	expect("placed", held)
	set("a", func(t *fleet.Task) {
		t.Desired, t.LastStatus, t.Gone = api.StatusStopped, api.StatusDeactivating, true
	})
	expect("gone and stopping", held)
	set("a", func(t *fleet.Task) { t.LastStatus = api.StatusStopped })
	expect("stopped", "cpu 8192 memory 65472 ports 1, IDLE 0/4000 0, DEDICATED 4000/4000 1")
	closed := *m
	closed.GPUs = append([]fleet.GPU(nil), m.GPUs...)
	closed.GPUs[0].Standing, closed.GPUs[0].StandingReason = api.GPUDraining, "the daemon died"
	f.PutInstance(&closed)
	expect("draining", "cpu 8192 memory 65472 ports 1, IDLE 0/4000 0 closed (DRAINING: the daemon died), DEDICATED 4000/4000 1")
	if n := len(f.PlacePending(start)); n != 0 {
		t.Errorf("%d placed on a closed GPU", n)
	}
	f.DeleteTask("b")
	expect("forgotten", "cpu 8192 memory 65536 ports 1, IDLE 0/4000 0 closed (DRAINING: the daemon died), IDLE 0/4000 0")
}

func TestUnschedulable(t *testing.T) {
	f := fleet.New("")
	m := *instance("m", 1, 4000)
	f.PutInstance(&m)
	code := func() fit.Code {
		if r := f.Unschedulable("m"); r != nil {
			return r.Code
		}
		return ""
	}
	if code() != fit.Disconnected || f.Unschedulable("other").Code != fit.Disconnected {
		t.Errorf("before its stream: %s", code())
	}
	f.SetPresence("m", true)
	if code() != "" || !f.Connected("m") {
		t.Errorf("with a stream: %s", code())
	}
	for want, change := range map[fit.Code]func(*fleet.Instance){
		fit.Draining:     func(i *fleet.Instance) { i.Status = api.InstanceDraining },
		fit.Disconnected: func(i *fleet.Instance) { i.Cutoff = start },
		fit.Lost:         func(i *fleet.Instance) { i.Cutoff, i.Lost = start, true },
	} {
		next := m
		change(&next)
		f.PutInstance(&next)
		if code() != want || f.Candidates()[0].Barred == nil {
			t.Errorf("%s, want %s", code(), want)
		}
	}
}

// TestContradictions: a GPU that shrank under its tasks is none, a placing beyond what
// there is or beside a whole-GPU task is one.
func TestContradictions(t *testing.T) {
	f := fleet.New("")
	share, dedicated := register(t, f, shared("share", 3000, "")), register(t, f, whole("whole", 1))
	join(f, instance("m", 1, 4000))
	f.PutTask(pending("a", share, 0))
	f.PlacePending(start)
	expect := func(when, want string) {
		t.Helper()
		if got := strings.Join(f.Contradictions(), "; "); got != want {
			t.Errorf("%s: %q, want %q", when, got, want)
		}
	}
	expect("placed", "")
	f.PutInstance(instance("m", 1, 2000))
	expect("shrunk", "")
	if r := f.Machine("m").GPUs[0]; r.AllocatedMiB != 3000 || r.TotalMiB != 2000 {
		t.Errorf("shrunk: %+v", r)
	}

	reload := fleet.New("")
	for _, c := range f.Changes() {
		data, _ := json.Marshal(c.Value)
		if err := reload.Load(c.Kind, c.Key, data); err != nil {
			t.Fatal(err)
		}
	}
	if c := reload.Contradictions(); len(c) > 0 {
		t.Errorf("read again: %v", c)
	}

	f.PutInstance(instance("m", 1, 4000))
	second := pending("b", share, 1)
	second.Instance, second.GPUs = "m", []string{"m-0"}
	f.PutTask(second)
	expect("over", "GPU 0 (m-0) of m: 6000 MiB in caps and 2 clients on it, it gives 4000 MiB and 48 clients")
	f.DeleteTask("b")
	third := pending("c", dedicated, 1)
	third.Instance, third.GPUs = "m", []string{"m-0"}
	f.PutTask(third)
	expect("mixed", "GPU 0 (m-0) of m: shared by 1 tasks and used whole by 1")
	f.DeleteTask("c")
	fourth := pending("d", "never:1", 1)
	fourth.Instance, fourth.GPUs = "m", []string{"m-0"}
	f.DeleteTask("a")
	f.PutTask(fourth)
	expect("unknown", "task d on m: its definition never:1 is not known")
	if g := f.Machine("m").GPUs[0]; g.Mode != fit.Dedicated {
		t.Errorf("what an unknown task holds: %+v", g)
	}
}

func TestPendingIsFirstComeFirstServedWithoutBlocking(t *testing.T) {
	f := fleet.New("")
	large, small := register(t, f, shared("large", 9000, "")), register(t, f, shared("small", 1500, ""))
	join(f, instance("m", 1, 4000))
	for i, id := range []string{"e", "d", "c", "b", "a"} {
		key := small
		if i == 0 {
			key = large
		}
		f.PutTask(pending(id, key, i))
	}
	var got []string
	for _, p := range f.PlacePending(start) {
		got = append(got, p.Task.ID)
	}
	if s := strings.Join(got, ""); s != "dc" || f.Pending()[0].ID != "e" || len(f.Pending()) != 3 {
		t.Errorf("placed %s, %d wait", s, len(f.Pending()))
	}
	if e, ok := f.Explain(f.Pending()[0]); !ok || len(e.RuledOut) != 1 || e.RuledOut[0].Code != fit.LargerThanGPU {
		t.Errorf("explain: %+v", e)
	}
	if c := f.Count(""); c != (fleet.Counts{Pending: 5}) {
		t.Errorf("counts %+v", c)
	}
}

// big is a fleet of 1,000 machines of 8 GPUs with 20,000 tasks, as what a store is
// told of it.
func big(tb testing.TB) (*fleet.Fleet, []fleet.Change) {
	f := fleet.New("")
	key := register(tb, f, shared("web", 20000, ""))
	for i := range 1000 {
		join(f, instance(fmt.Sprintf("m%04d", i), 8, 81920))
	}
	for i := range 20000 {
		t := pending(fmt.Sprintf("%032x", i), key, i)
		t.Service = fmt.Sprintf("s%d", i%100)
		t.Containers = []api.Container{{Name: "main", Image: "registry/model:1", LastStatus: api.StatusRunning, RuntimeID: strings.Repeat("a", 64), GPUIDs: []string{"g"}, MemoryInMiB: 20000}}
		f.PutTask(t)
	}
	if n := len(f.PlacePending(start)); n != 20000 {
		tb.Fatalf("%d placed", n)
	}
	return f, f.Changes()
}

func BenchmarkLoad(b *testing.B) {
	_, changes := big(b)
	var data []json.RawMessage
	for _, c := range changes {
		d, err := json.Marshal(c.Value)
		if err != nil {
			b.Fatal(err)
		}
		data = append(data, d)
	}
	for b.Loop() {
		f := fleet.New("")
		for i, c := range changes {
			if err := f.Load(c.Kind, c.Key, data[i]); err != nil {
				b.Fatal(err)
			}
		}
		f.Candidates()
	}
	b.ReportMetric(float64(len(changes)), "records")
}

// A task comes, is placed, and goes.
func BenchmarkPlaceOne(b *testing.B) {
	f, _ := big(b)
	key := f.Newest("web").Key()
	for b.Loop() {
		f.PutTask(pending("new", key, 1<<20))
		if len(f.PlacePending(start)) != 1 {
			b.Fatal("not placed")
		}
		f.DeleteTask("new")
		f.Changes()
	}
}

// 20,000 tasks find their places in an empty fleet, its making included.
func BenchmarkPlaceAll(b *testing.B) {
	for b.Loop() {
		big(b)
	}
}

func TestTrustDomains(t *testing.T) {
	team := func(family, team string) string {
		tags := ""
		if team != "" {
			tags = fmt.Sprintf(`,"tags":[{"key":"team","value":%q}]`, team)
		}
		return fmt.Sprintf(`{"family":%q,"containerDefinitions":[{"name":"c","image":"i","memory":64,"resourceRequirements":[{"type":"GPU","sharingStrategy":{"nvidiaMps":{"memory":1024}}}]}]%s}`, family, tags)
	}
	for _, c := range []struct{ rule, family, tag, want string }{
		{"", "a", "red", ""},
		{"cluster", "a", "red", ""},
		{"family", "a", "red", "family:a"},
		{"tag:team", "a", "red", "tag:team=red"},
		{"tag:team", "b", "red", "tag:team=red"},
		{"tag:team", "b", "", "family:b"},
		{"tag:owner", "b", "red", "family:b"},
	} {
		f := fleet.New(c.rule)
		d, err := f.Register([]byte(team(c.family, c.tag)), time.Unix(0, 0))
		if err != nil {
			t.Fatal(err)
		}
		if got, _ := f.Demand(d.Key()); got.Trust != c.want {
			t.Errorf("rule %q, family %s, team %q: domain %q, want %q", c.rule, c.family, c.tag, got.Trust, c.want)
		}
	}
}

func TestOfToken(t *testing.T) {
	f := fleet.New("")
	key := register(t, f, shared("web", 1000, ""))
	for i, token := range []string{"a", "b", "a", ""} {
		task := pending(fmt.Sprint(i), key, i)
		task.ClientToken = token
		f.PutTask(task)
	}
	moved := *f.Task("1")
	moved.Instance = "m"
	f.PutTask(&moved)
	f.DeleteTask("0")
	for token, want := range map[string]string{"a": "2", "b": "1", "": "", "c": ""} {
		got := ""
		for _, task := range f.OfToken(token) {
			got += task.ID
		}
		if got != want {
			t.Errorf("of token %q: %q, want %q", token, got, want)
		}
	}
}

func TestPendingOfEqualDefinitions(t *testing.T) {
	f := fleet.New("")
	join(f, instance("m", 1, 4000))
	for i, family := range []string{"a", "b", "c"} {
		f.PutTask(pending(family, register(t, f, shared(family, 4000+500*(i/2), "")), i))
	}
	place := func() (placed string) {
		for _, p := range f.PlacePending(start) {
			placed += p.Task.ID
		}
		return placed
	}
	if got := place(); got != "a" {
		t.Errorf("placed %q, want a", got)
	}
	join(f, instance("n", 1, 4000))
	if got := place(); got != "b" {
		t.Errorf("placed %q, want b", got)
	}
	join(f, instance("o", 1, 5000))
	if got := place(); got != "c" {
		t.Errorf("placed %q, want c", got)
	}
}
