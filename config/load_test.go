package config_test

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/berth-gpu/berth/config"
)

// write puts a settings file into a folder of its own and goes there, so that
// its path in a problem is its name alone.
func write(t *testing.T, text string) string {
	t.Helper()
	t.Chdir(t.TempDir())
	if err := os.WriteFile("berth-agent.yaml", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return "berth-agent.yaml"
}

// TestBad is a file or an environment for every rule, with all that is said of it.
func TestBad(t *testing.T) {
	for _, test := range []struct {
		name, file string
		environ    []string
		want       string
	}{
		{name: "an unknown key", file: "cluster: a\nreplicas: 3\n", want: `berth-agent.yaml:2: replicas: unknown setting`},
		{name: "a misspelt key", file: "mps:\n  drainDeadlin: 3s\n", want: `berth-agent.yaml:2: mps.drainDeadlin: unknown setting; did you mean mps.drainDeadline?`},
		{name: "another case", file: "rundir: /run/berth\nMPS:\n  path: /bin\n",
			want: "berth-agent.yaml:1: rundir: unknown setting; did you mean runDir?\nberth-agent.yaml:2: MPS: unknown setting; did you mean mps?"},
		{name: "an unknown section", file: "mps:\n  budgets:\n    failures: 3\n", want: `berth-agent.yaml:2: mps.budgets: unknown setting; did you mean mps.budget?`},
		{name: "ECS's name in the file", file: "ECS_CLUSTER: a\n", want: `berth-agent.yaml:1: ECS_CLUSTER: unknown setting`},
		{name: "twice", file: "cluster: a\nlogLevel: info\ncluster: b\n", want: `berth-agent.yaml:3: cluster: given twice, first on line 1`},
		{name: "a section twice", file: "mps: {path: /bin}\nmps: {probeEvery: 1s}\n", want: `berth-agent.yaml:2: mps: given twice, first on line 1`},
		{name: "a section that is a value", file: "mps: drain\n", want: `berth-agent.yaml:1: mps: "drain": want settings, as key: value`},
		{name: "a value that is a section", file: "cluster:\n  name: a\n", want: `berth-agent.yaml:1: cluster: {"name":"a"}: want 1 to 255 letters, digits and any of "-_"`},
		{name: "a list of settings", file: "- cluster: a\n", want: `berth-agent.yaml:1: want settings, as key: value`},
		{name: "nothing", file: "cluster:\n", want: `berth-agent.yaml:1: cluster: nothing: want 1 to 255 letters, digits and any of "-_"`},
		{name: "an alias", file: "cluster: &c a\ninstance: *c\n", want: `berth-agent.yaml:2: instance: *c: want 1 to 63 letters, digits and any of "-_."`},
		{name: "a second document", file: "cluster: a\n---\ncluster: b\n", want: `berth-agent.yaml:2: a second document; want one`},
		{name: "no YAML", file: "cluster: a\nmps: {path: /bin\n", want: `berth-agent.yaml:1: not YAML: did not find expected ',' or '}'`},
		{name: "a tab", file: "mps:\n\tpath: /bin\n", want: `berth-agent.yaml:2: not YAML: found character that cannot start any token`},
		{name: "too large a file", file: "# " + strings.Repeat("x", 1<<20), want: `berth-agent.yaml: more than 1048576 bytes`},
		{name: "a number without a unit", file: "docker:\n  stopTimeout: 30\n", want: `berth-agent.yaml:2: docker.stopTimeout: 30: want a duration of at least 1s, as "30s"`},
		{name: "no duration", file: "mps: {probeEvery: fast}\n", want: `berth-agent.yaml:1: mps.probeEvery: "fast": want a duration of at least 100ms, as "10s"`},
		{name: "a duration below nothing", file: "mps: {drainDeadline: -3s}\n", want: `berth-agent.yaml:1: mps.drainDeadline: "-3s": want a duration of at least 100ms, as "15m"`},
		{name: "a stop timeout of nothing", file: "docker: {stopTimeout: 0s}\n", want: `berth-agent.yaml:1: docker.stopTimeout: "0s": want a duration of at least 1s, as "30s"`},
		{name: "a period the kernel refuses", file: "task: {cpuPeriod: 2s}\n", want: `berth-agent.yaml:1: task.cpuPeriod: "2s": want a duration from 1ms to 1s, as "100ms"`},
		{name: "a budget of nothing", file: "mps: {budget: {failures: 0}}\n", want: `berth-agent.yaml:1: mps.budget.failures: 0: want a whole number from 1 to 1000000`},
		{name: "half a failure", file: "mps: {budget: {failures: 1.5}}\n", want: `berth-agent.yaml:1: mps.budget.failures: 1.5: want a whole number from 1 to 1000000`},
		{name: "a number in quotes", file: "gpu: {reserve: \"512\"}\n", want: `berth-agent.yaml:1: gpu.reserve: "512": want a whole number of MiB from 0 to 1048576`},
		{name: "memory below nothing", file: "reserved: {memory: -1, cpu: -1}\n",
			want: "berth-agent.yaml:1: reserved.memory: -1: want a whole number of MiB from 0 to 1073741824\nberth-agent.yaml:1: reserved.cpu: -1: want a whole number of CPU units from 0 to 1073741824"},
		{name: "an unknown word", file: "mps: {onDaemonLoss: reboot}\ndocker: {runtime: podman, pullBehavior: never}\nlogLevel: loud\ntrustDomain: family\n",
			want: "berth-agent.yaml:1: mps.onDaemonLoss: \"reboot\": want drain or restart\n" +
				"berth-agent.yaml:2: docker.runtime: \"podman\": want auto, nvidia, cdi or plain\n" +
				"berth-agent.yaml:2: docker.pullBehavior: \"never\": want default, always, once or prefer-cached\n" +
				"berth-agent.yaml:3: logLevel: \"loud\": want debug, info, warn or error\n" +
				"berth-agent.yaml:4: trustDomain: \"family\": want cluster"},
		{name: "yes and no", file: "docker: {disablePrivileged: yes}\n", want: `berth-agent.yaml:1: docker.disablePrivileged: "yes": want true or false`},
		{name: "paths", file: "runDir: run\nstateDir: /\nlogDir: ''\ngpu: {nvmlLibrary: libnvidia-ml.so}\nmps: {controlBinary: bin/control, path: '/bin::/sbin', libraryPath: lib}\n",
			want: "berth-agent.yaml:1: runDir: \"run\": want an absolute path\n" +
				"berth-agent.yaml:2: stateDir: \"/\": want an absolute path\n" +
				"berth-agent.yaml:3: logDir: \"\": want an absolute path\n" +
				"berth-agent.yaml:4: gpu.nvmlLibrary: \"libnvidia-ml.so\": want an absolute path, or empty\n" +
				"berth-agent.yaml:5: mps.controlBinary: \"bin/control\": want a name or an absolute path\n" +
				"berth-agent.yaml:5: mps.path: \"/bin::/sbin\": want absolute folders with : between them\n" +
				"berth-agent.yaml:5: mps.libraryPath: \"lib\": want absolute folders with : between them, or empty"},
		{name: "a run folder too long for sockets", file: "runDir: /var/lib/somewhere/far/too/long/for/a/socket\n",
			want: `berth-agent.yaml:1: runDir: "/var/lib/somewhere/far/too/long/for/a/socket": its pipe folders' paths take 94 bytes; MPS can have 87, so want at most 37 here`},
		{name: "state that a reboot empties", file: "stateDir: /run/berth/state\n", want: `berth-agent.yaml:1: stateDir: "/run/berth/state": lies in runDir, /run/berth, which a reboot empties`},
		{name: "metrics for all the world", file: "metricsAddress: 0.0.0.0:9464\n", want: `berth-agent.yaml:1: metricsAddress: "0.0.0.0:9464": want host:port on loopback, or empty for none`},
		{name: "metrics without a host", file: "metricsAddress: ':9464'\n", want: `berth-agent.yaml:1: metricsAddress: ":9464": want host:port on loopback, or empty for none`},
		{name: "docker over the net", file: "docker: {host: 'tcp://10.0.0.1:2375'}\n", want: `berth-agent.yaml:1: docker.host: "tcp://10.0.0.1:2375": want unix:// and an absolute path`},
		{name: "ports", file: "reserved:\n  ports: [22, 70000]\n  udpPorts: 53\n",
			want: "berth-agent.yaml:2: reserved.ports: [22, 70000]: want a list of ports from 1 to 65535, each once\nberth-agent.yaml:3: reserved.udpPorts: 53: want a list of ports from 1 to 65535, each once"},
		{name: "a port twice", file: "reserved: {ports: [22, 80, 22]}\n", want: `berth-agent.yaml:1: reserved.ports: [22, 80, 22]: want a list of ports from 1 to 65535, each once`},
		{name: "a server without a port", file: "server: {address: [gpu-server]}\n", want: `berth-agent.yaml:1: server.address: ["gpu-server"]: want a list of host:port, or unix: and an absolute path, each once`},
		{name: "a server that is no list", file: "server: {address: 'a:1'}\n", want: `berth-agent.yaml:1: server.address: "a:1": want a list of host:port, or unix: and an absolute path, each once`},
		{name: "a server over a network in plain text", file: "server: {address: ['127.0.0.1:1', 'a:9465'], ca: /c}\n",
			want: `berth-agent.yaml:1: server.address: ["127.0.0.1:1", "a:9465"]: a:9465 is reached over a network, where both sides must prove who they are; set server.ca, server.cert and server.key, or name a unix: socket or a loopback address`},
		{name: "a certificate without its key", file: "server: {cert: /c}\n", want: `berth-agent.yaml:1: server.cert: "/c": server.key is ""; give both or neither`},
		{name: "attributes", file: "attributes: {rack: 4}\n", want: `berth-agent.yaml:1: attributes: want names and values of 1 to 128 letters, digits and any of "-_./:@"`},
		{name: "an instance's name", file: "instance: GPU machine 1\n", want: `berth-agent.yaml:1: instance: "GPU machine 1": want 1 to 63 letters, digits and any of "-_."`},
		{name: "a probe longer than its turn", file: "mps:\n  probeEvery: 1s\n  probeTimeout: 2s\n", want: `berth-agent.yaml:3: mps.probeTimeout: "2s": longer than mps.probeEvery, 1s`},
		{name: "a default that no longer fits", file: "mps: {probeEvery: 1s}\n", want: `default: mps.probeTimeout: "2s": longer than mps.probeEvery, 1s`},

		{name: "an unknown name of ours", environ: []string{"BERTH_MPS_DRAIN_DEADLNE=3s", "BERTH_X=1", "PATH=/bin"},
			want: "environment: BERTH_MPS_DRAIN_DEADLNE: unknown setting; did you mean BERTH_MPS_DRAIN_DEADLINE?\nenvironment: BERTH_X: unknown setting"},
		{name: "our name with a bad value", environ: []string{"BERTH_MPS_BUDGET_FAILURES=many"}, want: `environment: BERTH_MPS_BUDGET_FAILURES: "many": want a whole number from 1 to 1000000`},
		{name: "our name with nothing", environ: []string{"BERTH_CLUSTER="}, want: `environment: BERTH_CLUSTER: "": want 1 to 255 letters, digits and any of "-_"`},
		{name: "ECS's names with bad values", environ: []string{"ECS_CONTAINER_STOP_TIMEOUT=30", "ECS_RESERVED_PORTS=22,80", "ECS_DISABLE_PRIVILEGED=yes", "ECS_INSTANCE_ATTRIBUTES={", "ECS_LOGLEVEL=none"},
			want: "environment: ECS_INSTANCE_ATTRIBUTES: \"{\": want names and values of 1 to 128 letters, digits and any of \"-_./:@\"\n" +
				"environment: ECS_LOGLEVEL: \"none\": want debug, info, warn or error\n" +
				"environment: ECS_CONTAINER_STOP_TIMEOUT: \"30\": want a duration of at least 1s, as \"30s\"\n" +
				"environment: ECS_DISABLE_PRIVILEGED: \"yes\": want true or false\n" +
				"environment: ECS_RESERVED_PORTS: \"22,80\": want a list of ports from 1 to 65535, each once"},
		{name: "a bad value that another covers", file: "cluster: a b\n", environ: []string{"BERTH_CLUSTER=c"}, want: `berth-agent.yaml:1: cluster: "a b": want 1 to 255 letters, digits and any of "-_"`},
		{name: "everywhere at once", file: "x: 1\nstateDir: /run/berth\n", environ: []string{"BERTH_Y=1", "BERTH_MPS_PROBE_TIMEOUT=12s"},
			want: "berth-agent.yaml:1: x: unknown setting\nenvironment: BERTH_Y: unknown setting\n" +
				"environment: BERTH_MPS_PROBE_TIMEOUT: \"12s\": longer than mps.probeEvery, 10s\n" +
				"berth-agent.yaml:2: stateDir: \"/run/berth\": lies in runDir, /run/berth, which a reboot empties"},
	} {
		t.Run(test.name, func(t *testing.T) {
			a, _, err := config.Load(write(t, test.file), test.environ)
			var problems config.Problems
			if a != nil || !errors.As(err, &problems) || err.Error() != test.want {
				t.Errorf("got:\n%v\nwant:\n%s", err, test.want)
			}
		})
	}
}

func load(t *testing.T, file string, environ ...string) (*config.Agent, []config.Warning) {
	t.Helper()
	a, warnings, err := config.Load(write(t, file), environ)
	if err != nil {
		t.Fatal(err)
	}
	return a, warnings
}

// TestPrecedence: berth's names over ECS's over the file over the defaults.
func TestPrecedence(t *testing.T) {
	file := "cluster: file\nlogLevel: warn\ndocker: {stopTimeout: 5s}\nreserved:\n  ports: [80]\n"
	a, warnings := load(t, file, "BERTH_CLUSTER=berth", "ECS_CLUSTER=ecs", "ECS_LOGLEVEL=crit", "ECS_RESERVED_PORTS=[443, 22]", "ECS_DATADIR=", "BERTH_SOCKET=/x", "OTHER=1")
	if a.Cluster != "berth" || a.LogLevel != "error" || a.Docker.StopTimeout != 5*time.Second ||
		!reflect.DeepEqual(a.Reserved.Ports, []uint16{22, 443}) || a.StateDir != "/var/lib/berth" || len(warnings) > 0 {
		t.Errorf("%+v, %v", a, warnings)
	}
}

// TestNoFile: without a file, everything is at its default.
func TestNoFile(t *testing.T) {
	a, warnings, err := config.Load("", nil)
	if err != nil || len(warnings) > 0 {
		t.Fatal(err, warnings)
	}
	host, _ := os.Hostname()
	if a.Instance != host || a.Socket() != "/run/berth/agent.sock" || a.StateFile() != "/var/lib/berth/agent.db" || a.GPU.ReserveMiB != 512 || a.MPS.Budget.Failures != 5 {
		t.Errorf("%+v", a)
	}
	if _, _, err := config.Load("/nowhere/berth-agent.yaml", nil); err == nil || err.Error() != "settings: open /nowhere/berth-agent.yaml: no such file or directory" {
		t.Errorf("%v", err)
	}
}

// TestWarnings: a name that berth does not honour is said, and stops nothing.
func TestWarnings(t *testing.T) {
	_, warnings := load(t, "", "ECS_ENABLE_TASK_ENI=true", "ECS_FUTURE=1", "ECS_CLUSTER=a", "ECS_LOGFILE=")
	var got []string
	for _, w := range warnings {
		got = append(got, w.String())
	}
	want := "ECS_ENABLE_TASK_ENI: not honoured: berth has no awsvpc networking\nECS_FUTURE: not honoured: berth does not know it"
	if strings.Join(got, "\n") != want {
		t.Errorf("got:\n%s\nwant:\n%s", strings.Join(got, "\n"), want)
	}
}

// TestExample: the shipped file is the defaults, as it is and with every
// setting in it uncommented.
func TestExample(t *testing.T) {
	data, err := os.ReadFile("berth-agent.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want, _, err := config.Load("", []string{"BERTH_INSTANCE=HOSTNAME"})
	if err != nil {
		t.Fatal(err)
	}
	open := regexp.MustCompile(`(?m)^#([^#])`).ReplaceAllString(string(data), "$1")
	for name, text := range map[string]string{"as shipped": string(data), "uncommented": open} {
		path := filepath.Join(t.TempDir(), "berth-agent.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, warnings, err := config.Load(path, nil)
		if err != nil || len(warnings) > 0 {
			t.Fatalf("%s: %v %v", name, err, warnings)
		}
		if name == "as shipped" {
			got.Instance = "HOSTNAME"
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s:\ngot  %+v\nwant %+v", name, got, want)
		}
	}
	if strings.Count(open, "\n  ") < 30 {
		t.Error("the example was not uncommented; is it written otherwise now?")
	}
}

// FuzzFile: no file makes Load panic, and what it takes keeps every rule when it
// is read again.
func FuzzFile(f *testing.F) {
	f.Add([]byte("mps:\n  budget: {failures: 3}\nreserved: {ports: [1, 2]}\nattributes: {a: b}\n"))
	f.Add([]byte("a: &a [*a]\n? {}\n: 1\n<<: {}\n---\n"))
	f.Add([]byte("---\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(t.TempDir(), "f")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		a, _, err := config.Load(path, nil)
		if (a == nil) == (err == nil) {
			t.Fatalf("%v %v", a, err)
		}
	})
}
