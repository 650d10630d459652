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

// TestServerBad is a file or an environment for every rule of the server's own,
// with all that is said of it. The rules that are the agent's too are in TestBad.
func TestServerBad(t *testing.T) {
	const tls = "agents.cert, agents.key and agents.clientCA"
	for _, test := range []struct {
		name, file string
		environ    []string
		want       string
	}{
		{name: "an unknown key", file: "replace:\n  atonce: 3\n", want: `berth-agent.yaml:2: replace.atonce: unknown setting; did you mean replace.atOnce?`},
		{name: "the agent's key", file: "runDir: /run/berth\n", want: `berth-agent.yaml:1: runDir: unknown setting`},
		{name: "when to replace", file: "replace: {when: 0%}\n", want: `berth-agent.yaml:1: replace.when: "0%": want never, any, all, or a share from 1% to 100%, as "50%"`},
		{name: "when to replace, a number", file: "replace: {when: 50}\n", want: `berth-agent.yaml:1: replace.when: 50: want never, any, all, or a share from 1% to 100%, as "50%"`},
		{name: "more than all at once", file: "replace: {atOnce: 101, perHour: 0}\n",
			want: "berth-agent.yaml:1: replace.atOnce: 101: want a whole number of percent from 1 to 100\nberth-agent.yaml:1: replace.perHour: 0: want a whole number from 1 to 1000000"},
		{name: "an unknown provider", file: "provider: asg\n", want: `berth-agent.yaml:1: provider: "asg": want none or dev`},
		{name: "endpoints that are text", file: "etcd: {endpoints: 'http://a:1'}\n", want: `berth-agent.yaml:1: etcd.endpoints: "http://a:1": want a list of https://host:port, http://host:port or unix:///path, each once`},
		{name: "an endpoint without a scheme", file: "etcd: {endpoints: [a:2379]}\n", want: `berth-agent.yaml:1: etcd.endpoints: ["a:2379"]: want a list of https://host:port, http://host:port or unix:///path, each once`},
		{name: "an endpoint without a port", file: "etcd: {endpoints: [http://a]}\n", want: `berth-agent.yaml:1: etcd.endpoints: ["http://a"]: want a list of https://host:port, http://host:port or unix:///path, each once`},
		{name: "an endpoint twice", file: "etcd: {endpoints: [http://a:1, http://a:1]}\n", want: `berth-agent.yaml:1: etcd.endpoints: ["http://a:1", "http://a:1"]: want a list of https://host:port, http://host:port or unix:///path, each once`},
		{name: "endpoints that are numbers", file: "etcd: {endpoints: [1]}\n", want: `berth-agent.yaml:1: etcd.endpoints: [1]: want a list of https://host:port, http://host:port or unix:///path, each once`},
		{name: "half a key pair", file: "etcd: {endpoints: ['https://a:1'], cert: /c}\n", want: `berth-agent.yaml:1: etcd.cert: "/c": give etcd.cert and etcd.key, or neither`},
		{name: "authorities of nobody", file: "etcd: {endpoints: ['http://a:1'], ca: /ca}\n", want: `berth-agent.yaml:1: etcd.endpoints: ["http://a:1"]: want https:// with etcd.ca or etcd.cert`},
		{name: "no address", file: "agents: {listen: '9465'}\n", want: `berth-agent.yaml:1: agents.listen: "9465": want host:port, or unix: and an absolute path`},
		{name: "no port", file: "agents: {listen: '127.0.0.1:70000'}\n", want: `berth-agent.yaml:1: agents.listen: "127.0.0.1:70000": want host:port, or unix: and an absolute path`},
		{name: "a socket somewhere", file: "agents: {listen: 'unix:agents.sock'}\n", want: `berth-agent.yaml:1: agents.listen: "unix:agents.sock": want host:port, or unix: and an absolute path`},
		{name: "open to the world", file: "agents: {listen: '0.0.0.0:9465'}\n", want: `berth-agent.yaml:1: agents.listen: "0.0.0.0:9465": other machines can reach it; give ` + tls + `, or listen on loopback`},
		{name: "open to the world, shortly", file: "agents: {listen: ':9465'}\n", want: `berth-agent.yaml:1: agents.listen: ":9465": other machines can reach it; give ` + tls + `, or listen on loopback`},
		{name: "half of TLS", file: "agents: {listen: '[::]:9465', cert: /c, key: /k}\n", want: `berth-agent.yaml:1: agents.cert: "/c": give ` + tls + `, or none of them`},
		{name: "no lease", file: "agents: {lease: 10ms, grace: 0s}\n",
			want: "berth-agent.yaml:1: agents.lease: \"10ms\": want a duration of at least 1s, as \"10s\"\nberth-agent.yaml:1: agents.grace: \"0s\": want a duration of at least 1s, as \"1m\""},
		{name: "too long a folder for sockets", file: "dataDir: /" + strings.Repeat("x", 90) + "\n", want: `berth-agent.yaml:1: dataDir: "/` + strings.Repeat("x", 90) + `": takes 91 bytes; want at most 90, so that the store's socket fits`},
		{name: "dev without a place", file: "provider: dev\n", want: `default: dev.dir: "": provider dev needs a folder for its machines`},

		{name: "an unknown name of ours", environ: []string{"BERTH_PLACEMENT_REPLACE_WEN=any", "BERTH_X=1"}, want: "environment: BERTH_PLACEMENT_REPLACE_WEN: unknown setting; did you mean BERTH_PLACEMENT_REPLACE_WHEN?"},
		{name: "our name with a bad value", environ: []string{"BERTH_PLACEMENT_ETCD_ENDPOINTS=http://a:1"},
			want: `environment: BERTH_PLACEMENT_ETCD_ENDPOINTS: "http://a:1": want a list of https://host:port, http://host:port or unix:///path, each once`},
	} {
		t.Run(test.name, func(t *testing.T) {
			s, _, err := config.LoadServer(write(t, test.file), test.environ)
			var problems config.Problems
			if s != nil || !errors.As(err, &problems) || err.Error() != test.want {
				t.Errorf("got:\n%v\nwant:\n%s", err, test.want)
			}
		})
	}
}

// TestServerGood: what an operator of each kind writes.
func TestServerGood(t *testing.T) {
	path := write(t, `
cluster: prod
etcd: {endpoints: [https://a.example:2379, "https://[::1]:2379"], ca: /ca, cert: /c, key: /k}
agents: {listen: "gpu-placement.example:9465", cert: /c, key: /k, clientCA: /ca, lease: 5s}
replace: {when: 100%, atOnce: 25}
`)
	s, warnings, err := config.LoadServer(path, []string{"BERTH_PLACEMENT_CLUSTER=env", "BERTH_CLUSTER=agent", "BERTH_SOCKET=/x", "BERTH_RUN_DIR=/x", "ECS_CLUSTER=c",
		`BERTH_PLACEMENT_AGENTS_CLIENT_CA=/other`})
	if err != nil {
		t.Fatal(err)
	}
	if s.Cluster != "env" || !reflect.DeepEqual(s.Etcd, config.Etcd{Endpoints: []string{"https://a.example:2379", "https://[::1]:2379"}, CA: "/ca", Cert: "/c", Key: "/k"}) ||
		s.Agents.ClientCA != "/other" || s.Agents.Lease != 5*time.Second || s.Agents.Grace != time.Minute || s.Replace.When != "100%" || s.Replace.AtOnce != 25 {
		t.Errorf("%+v", s)
	}
	if len(warnings) != 1 || warnings[0].String() != "BERTH_CLUSTER: not honoured: it is for agents; the server reads BERTH_PLACEMENT_CLUSTER" {
		t.Error(warnings)
	}
	for _, listen := range []string{"unix:/run/berth/agents.sock", "localhost:1", "127.1.2.3:65535", "[::1]:9465"} {
		if _, _, err := config.LoadServer("", []string{"BERTH_PLACEMENT_AGENTS_LISTEN=" + listen}); err != nil {
			t.Error(err)
		}
	}
	if _, _, err := config.Load("", []string{"BERTH_PLACEMENT_CLUSTER=x", "BERTH_PLACEMENT_X=y"}); err != nil {
		t.Error("the agent minds the server's names:", err)
	}
}

// TestServerExample: the shipped file is the defaults, as it is and with every
// setting in it uncommented.
func TestServerExample(t *testing.T) {
	data, err := os.ReadFile("berth-server.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want, _, err := config.LoadServer("", nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"as shipped": string(data), "uncommented": regexp.MustCompile(`(?m)^#([^#])`).ReplaceAllString(string(data), "$1")} {
		path := filepath.Join(t.TempDir(), "berth-server.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, warnings, err := config.LoadServer(path, nil)
		if err != nil || len(warnings) > 0 || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v %v\ngot  %+v\nwant %+v", name, err, warnings, got, want)
		}
	}
}

// FuzzServerFile: no file makes LoadServer panic.
func FuzzServerFile(f *testing.F) {
	f.Add([]byte("etcd: {endpoints: ['http://a:1', \"\\0\"]}\nagents: {listen: ':1'}\nreplace: {when: 7%}\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(t.TempDir(), "f")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		s, _, err := config.LoadServer(path, nil)
		if (s == nil) == (err == nil) {
			t.Fatalf("%v %v", s, err)
		}
	})
}
