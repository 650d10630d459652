package taskdef_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
	"github.com/berth-gpu/berth/config/taskdef"
)

func read(t testing.TB, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func glob(t testing.TB, pattern string, least int) []string {
	t.Helper()
	paths, err := filepath.Glob(pattern)
	if err != nil || len(paths) < least {
		t.Fatalf("%s: %d files, want at least %d (%v)", pattern, len(paths), least, err)
	}
	return paths
}

// TestBad: each malformed definition in testdata/bad gives exactly what stands
// in the .err file beside it.
func TestBad(t *testing.T) {
	for _, path := range glob(t, "../../testdata/bad/*.json", 40) {
		t.Run(filepath.Base(path), func(t *testing.T) {
			want := strings.TrimSuffix(string(read(t, strings.TrimSuffix(path, ".json")+".err")), "\n")
			d, err := taskdef.Parse(read(t, path))
			var problems taskdef.Problems
			if d != nil || !errors.As(err, &problems) || err.Error() != want {
				t.Errorf("got:\n%v\nwant:\n%s", err, want)
			}
		})
	}
}

// TestFixedOrder: what is said of a definition does not depend on the order of
// its members. json.Marshal sorts them, which the files do not.
func TestFixedOrder(t *testing.T) {
	tried := 0
	for _, path := range glob(t, "../../testdata/bad/*.json", 40) {
		d := json.NewDecoder(bytes.NewReader(read(t, path)))
		d.UseNumber()
		var v any
		if d.Decode(&v) != nil || d.More() || strings.HasPrefix(filepath.Base(path), "text-") {
			continue // not one JSON value, or about its very text
		}
		tried++
		text, _ := json.Marshal(v)
		_, want := taskdef.Parse(read(t, path))
		if _, got := taskdef.Parse(text); got == nil || got.Error() != want.Error() {
			t.Errorf("%s: got:\n%v\nwant:\n%v", path, got, want)
		}
	}
	if tried < 40 {
		t.Errorf("only %d tried", tried)
	}
}

// TestGood: each sample is taken, and comes back as it was when it is written
// and read again.
func TestGood(t *testing.T) {
	for _, path := range glob(t, "../../testdata/taskdefs/*.json", 8) {
		t.Run(filepath.Base(path), func(t *testing.T) {
			d, err := taskdef.Parse(read(t, path))
			if err != nil {
				t.Fatal(err)
			}
			again, err := taskdef.Parse(d.Encode())
			if err != nil || !reflect.DeepEqual(d, again) {
				t.Errorf("%v\n%s\nbecame\n%s", err, d.Encode(), again.Encode())
			}
		})
	}
}

func TestDemand(t *testing.T) {
	for file, want := range map[string]taskdef.Demand{
		"share-20gib-1.json": {CPU: 128, MemoryMiB: 64, GPUMemoryMiB: 20480, SharedContainers: 1},
		"share-30gib-1.json": {CPU: 128, MemoryMiB: 64, GPUMemoryMiB: 30720, SharedContainers: 1},
		"whole-gpu.json":     {CPU: 128, MemoryMiB: 64, WholeGPUs: 1},
		"all-gpus.json":      {CPU: 1024, MemoryMiB: 1024, AllGPUs: true},
		"no-gpu.json":        {CPU: 64, MemoryMiB: 32},
		"rich.json": {CPU: 512, MemoryMiB: 512, GPUMemoryMiB: 10240, SharedContainers: 2,
			Ports: []taskdef.Port{{Host: 19000, Protocol: "udp"}}},
	} {
		d, err := taskdef.Parse(read(t, "../../testdata/taskdefs/"+file))
		if err != nil {
			t.Fatal(file, err)
		}
		if got := d.Demand(); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: got %+v, want %+v", file, got, want)
		}
	}
	host, err := taskdef.Parse([]byte(`{"family": "f", "networkMode": "host", "containerDefinitions": [
		{"name": "a", "image": "x", "memory": 64, "cpu": 10, "portMappings": [{"containerPort": 80}], "resourceRequirements": [{"type": "GPU", "value": "2"}]},
		{"name": "b", "image": "x", "memory": 64, "memoryReservation": 32, "cpu": 5, "resourceRequirements": [{"type": "GPU", "value": "3"}]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	want := taskdef.Demand{CPU: 15, MemoryMiB: 96, WholeGPUs: 5, Ports: []taskdef.Port{{Host: 80, Protocol: "tcp"}}}
	if got := host.Demand(); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestShare(t *testing.T) {
	d, err := taskdef.Parse(read(t, "../../testdata/taskdefs/rich.json"))
	if err != nil {
		t.Fatal(err)
	}
	type share struct {
		memory  int64
		percent int32
		shared  bool
	}
	var got []share
	for i := range d.ContainerDefinitions {
		memory, percent, shared := taskdef.Share(&d.ContainerDefinitions[i])
		if n, all := taskdef.WholeGPUs(&d.ContainerDefinitions[i]); n != 0 || all {
			t.Errorf("container %d: %d whole GPUs, %v", i, n, all)
		}
		got = append(got, share{memory, percent, shared})
	}
	want := []share{{}, {8192, 40, true}, {2048, 0, true}, {}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// TestSize reads task sizes as people write them, without a float in between.
func TestSize(t *testing.T) {
	for text, want := range map[string]int64{"1024": 1024, "1 vCPU": 1024, "1vCPU": 1024, "1 vcpu": 1024, ".25 vCPU": 256, "0.125 vCPU": 128, "192 vCPU": 196608,
		"": -1, "-1": -1, "+1": -1, "1.5": -1, "vCPU": -1, ". vCPU": -1, "0.3 vCPU": -1, "1 VCPU": -1, "1  vCPU": -1, "9999999999": -1, "999999 vCPU": 1023998976, "9999999 vCPU": -1, "1 GB": -1} {
		got, ok := taskdef.TaskCPU(&types.TaskDefinition{Cpu: &text})
		if !ok {
			got = -1
		}
		if got != want {
			t.Errorf("cpu %q: got %d, want %d", text, got, want)
		}
	}
	for text, want := range map[string]int64{"512": 512, "1 GB": 1024, "1GB": 1024, "0.5 GB": 512, ".5GB": 512, "2.25 GB": 2304,
		"0.1 GB": -1, "1 GiB": -1, "1 MB": -1, "1gb": -1, "999999999 GB": -1, "0.1111111111 GB": -1} {
		got, ok := taskdef.TaskMemory(&types.TaskDefinition{Memory: &text})
		if !ok {
			got = -1
		}
		if got != want {
			t.Errorf("memory %q: got %d, want %d", text, got, want)
		}
	}
	if _, ok := taskdef.TaskCPU(&types.TaskDefinition{}); ok {
		t.Error("no cpu is none")
	}
	if _, ok := taskdef.TaskMemory(&types.TaskDefinition{}); ok {
		t.Error("no memory is none")
	}
}

// TestRules: what one machine takes, another may refuse.
func TestRules(t *testing.T) {
	text := []byte(`{"family": "f", "containerDefinitions": [{"name": "a", "image": "x", "memory": 64, "privileged": %s, "resourceRequirements": [%s]}],
		"volumes": [{"name": "v", "host": {"sourcePath": "/srv/berth/run"}}, {"name": "w", "host": {"sourcePath": "/var/lib"}}]}`)
	def := func(privileged, gpu string) []byte {
		return []byte(strings.Replace(strings.Replace(string(text), "%s", privileged, 1), "%s", gpu, 1))
	}
	shared := `{"type": "GPU", "sharingStrategy": {"nvidiaMps": {"memory": 1}}}`
	for _, test := range []struct {
		name  string
		rules taskdef.Rules
		text  []byte
		want  string
	}{
		{"another run folder", taskdef.Rules{RunDir: "/run/other"}, def("true", ""), ""},
		{"this run folder", taskdef.Rules{RunDir: "/srv/berth"}, def("true", ""), `volumes[0].host.sourcePath: "/srv/berth/run": lies in /srv/berth, which no container may mount`},
		{"protected, and nothing shared", taskdef.Rules{RunDir: "/run/berth", Protected: []string{"/var/lib/berth"}}, def("true", ""), ""},
		{"protected", taskdef.Rules{RunDir: "/run/berth", Protected: []string{"/var/lib/berth"}}, def("false", shared),
			`volumes[1].host.sourcePath: "/var/lib": contains /var/lib/berth, which a task on a shared GPU may not mount`},
		{"privileged and shared", taskdef.Rules{RunDir: "/run/berth"}, def("true", shared), `containerDefinitions[0].privileged: true: not on a shared GPU: a privileged container opens every device`},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := test.rules.Parse(test.text)
			if got := ""; err != nil && err.Error() != test.want || err == nil && test.want != got {
				t.Errorf("got:  %v\nwant: %s", err, test.want)
			}
		})
	}
}

// FuzzParse: no text makes Parse panic, and what it takes it takes again.
func FuzzParse(f *testing.F) {
	for _, pattern := range []string{"../../testdata/taskdefs/*.json", "../../testdata/bad/*.json"} {
		for _, path := range glob(f, pattern, 1) {
			f.Add(read(f, path))
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		d, err := taskdef.Parse(data)
		if (d == nil) == (err == nil) {
			t.Fatalf("%v, %v", d, err)
		}
		if d == nil {
			return
		}
		if demand := d.Demand(); demand.WholeGPUs < 0 || demand.GPUMemoryMiB < 0 || demand.CPU < 0 || demand.MemoryMiB < 0 ||
			demand.SharedContainers > 0 && (demand.AllGPUs || demand.WholeGPUs > 0) || demand.GPUMemoryMiB < int64(demand.SharedContainers) {
			t.Fatalf("%+v", demand)
		}
		again, err := taskdef.Parse(d.Encode())
		if err != nil || !reflect.DeepEqual(d, again) {
			t.Fatalf("%s\n%s\n%v", data, d.Encode(), err)
		}
	})
}
