package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/berth-gpu/berth/"

// house is the architecture's arrows: what each package imports of this module.
// Test files may import more. A package that is not here, and an arrow that is not,
// fails the test: draw it here first, and say why if it is a new one. A row of a
// package that is gone fails too.
var house = map[string][]string{
	// What the parts say to each other, and what they write down of their decisions.
	"api":         {},
	"api/ecsjson": {},
	"api/agentpb": {},
	"api/flight":  {},

	// What operators write.
	"config":         {"api/ecsjson"},
	"config/taskdef": {"api/ecsjson", "mps"},

	// MPS, NVML, Docker and cgroups: adapters that do not know each other, but for
	// engine, which finds a container's processes through its cgroup.
	"mps":                {},
	"mps/mpssim":         {"agent/gpu/nvmlsim"},
	"mps/mpssim/program": {"mps/mpssim"},
	"agent/gpu":          {},
	"agent/gpu/nvmlsim":  {},
	"agent/engine":       {"agent/cgroup"},
	"agent/cgroup":       {},
	"agent/state":        {},

	// One machine: its decisions, the loop around them, and the stream to the server.
	"healthcheck": {"api", "mps"},
	"agent": {"agent/cgroup", "agent/engine", "agent/gpu", "agent/state", "api", "api/flight", "config", "config/taskdef",
		"healthcheck", "mps"},
	"agent/stream": {"agent", "api", "api/agentpb", "config"},

	// The fleet: decisions, adapters that do not know each other, and the loop around
	// them all. Provider dev runs programs: it knows no agent.
	"placement/fit":                   {},
	"placement/fleet":                 {"api", "config", "config/taskdef", "placement/fit"},
	"placement/service":               {"api", "placement/fleet"},
	"placement/replace":               {"api"},
	"placement/replace/dev":           {},
	"placement/store":                 {},
	"placement/agentapi":              {"api/agentpb"},
	"placement/agentapi/agentapitest": {"api/agentpb"},
	"placement": {"api", "api/agentpb", "api/flight", "config", "placement/agentapi", "placement/fit", "placement/fleet", "placement/replace",
		"placement/replace/dev", "placement/service", "placement/store"},

	// Flags, wiring, printing. berth replays what the pure machines decided.
	"cmd/berth": {"agent/gpu/nvmlsim", "api", "api/flight", "config", "healthcheck", "mps", "mps/mpssim", "placement", "placement/fit",
		"placement/replace", "placement/replace/dev", "placement/service"},
	"cmd/berth-agent": {"agent", "agent/engine", "agent/stream", "api", "config", "config/taskdef", "placement/fit"},

	// What make runs.
	"scripts":         {}, // tests of the shell scripts
	"scripts/rig":     {"api"},
	"scripts/story":   {"api", "scripts/rig"},
	"scripts/measure": {"api", "api/agentpb", "placement/agentapi/agentapitest", "scripts/rig"}, // it plays a thousand agents
	"scripts/testlog": {},
}

// sole names, for a package of others, the only packages of ours that import it. A
// name ending in /... is a whole module.
var sole = map[string][]string{
	"github.com/NVIDIA/go-nvml/...":                        {"agent/gpu"},
	"github.com/docker/docker/...":                         {"agent/engine"},
	"github.com/docker/go-connections/...":                 {"agent/engine"},
	"github.com/containerd/cgroups/v3/...":                 {"agent/cgroup"},
	"go.etcd.io/bbolt/...":                                 {"agent/state"},
	"go.yaml.in/yaml/v3/...":                               {"config"},
	"github.com/spf13/cobra/...":                           {"cmd/berth", "cmd/berth-agent"},
	"golang.org/x/term/...":                                {"cmd/berth"},
	"github.com/aws/aws-sdk-go-v2/feature/ec2/imds/...":    {"agent"},
	"github.com/prometheus/client_golang/prometheus/...":   {"agent", "healthcheck"},
	"github.com/aws/aws-sdk-go-v2/service/ecs/schemas/...": {"api/ecsjson", "config/taskdef"},
	"go.etcd.io/etcd/...":                                  {"placement/store"},
	"google.golang.org/grpc/...":                           {"api/agentpb", "agent/stream", "placement/agentapi", "placement/agentapi/agentapitest"},
}

// never names what each binary is built without, with all that it is built from.
var never = map[string][]string{
	// berth runs anywhere: pure Go, no driver's library, and no agent's hands.
	"cmd/berth": {"github.com/NVIDIA/go-nvml/...", "github.com/docker/docker/...", module + "agent", module + "agent/gpu", module + "agent/state",
		module + "agent/engine", module + "agent/cgroup", module + "agent/stream"},
	// berth-agent is small and speaks to no control plane but berth's. The types and
	// schemas of ECS are its words; the ECS client is not.
	"cmd/berth-agent": {"go.etcd.io/etcd/...", "k8s.io/...",
		"github.com/aws/aws-sdk-go-v2/service/ecs", "github.com/aws/aws-sdk-go-v2/service/ec2/...", "github.com/aws/aws-sdk-go-v2/service/autoscaling/...",
		module + "placement", module + "placement/fleet/...", module + "placement/service/...", module + "placement/replace/...", module + "placement/store/...", module + "placement/agentapi/..."},
}

// pure names packages, and files of packages, that decide and do nothing: no IO, no
// goroutine, time and randomness only as arguments.
var pure = []string{
	"placement/fit", "placement/fleet", "placement/service", "placement/replace",
	"placement/store/pack.go", "placement/store/record.go",
	"placement/agentapi/outbox.go", "placement/agentapi/pace.go", "placement/agentapi/refuse.go",
	"api", "api/ecsjson", "config/taskdef",
	"api/flight/diff.go", "api/flight/entry.go", "mps/replay.go", "mps/state.go", "mps/events.go", "mps/learn.go", "config/server_settings.go",
	"mps/supervisor.go", "mps/decide.go", "mps/limits.go", "mps/reply.go", "mps/support.go", "mps/phase.go",
	"healthcheck/gate.go", "healthcheck/machine.go",
	"agent/task.go", "agent/ledger.go", "agent/cutoff.go", "agent/stream/retry.go", "agent/stream/report.go",
}

var (
	impureImports = []string{"os", "os/exec", "os/signal", "io/fs", "net", "net/http", "syscall", "golang.org/x/sys/unix", "math/rand", "math/rand/v2",
		"crypto/rand", "context", "go.uber.org/zap"}
	impureCalls = []string{"time.Now", "time.Sleep", "time.Since", "time.Until", "time.After", "time.AfterFunc", "time.NewTimer", "time.NewTicker", "time.Tick"}
)

// listed is what go list says of one package.
type listed struct {
	ImportPath string
	Dir        string
	Standard   bool
	Imports    []string
	Deps       []string
	CgoFiles   []string
}

func listPackages(t *testing.T) (ours []string, all map[string]listed) {
	t.Helper()
	cmd := exec.Command("go", "list", "-deps", "-json=ImportPath,Dir,Standard,Imports,Deps,CgoFiles", "./...")
	cmd.Dir = filepath.Join("..", "..")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, errs.Bytes())
	}
	all = map[string]listed{}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		all[p.ImportPath] = p
		if name, ok := strings.CutPrefix(p.ImportPath, module); ok {
			ours = append(ours, name)
		}
	}
	return ours, all
}

// within says whether path is what a rule names: a package, or a tree (/...).
func within(path, rule string) bool {
	tree, ok := strings.CutSuffix(rule, "/...")
	return path == rule || ok && (path == tree || strings.HasPrefix(path, tree+"/"))
}

func TestHouse(t *testing.T) {
	ours, all := listPackages(t)
	for _, name := range ours {
		allowed, known := house[name]
		if !known {
			t.Errorf("%s has no row in house; say there what it may import of this module", name)
			continue
		}
		for _, imported := range all[module+name].Imports {
			if inner, ok := strings.CutPrefix(imported, module); ok && !slices.Contains(allowed, inner) {
				t.Errorf("%s imports %s, which its row in house does not allow", name, inner)
			}
			for rule, only := range sole {
				if within(imported, rule) && !slices.Contains(only, name) {
					t.Errorf("%s imports %s, which only %s may", name, imported, strings.Join(only, ", "))
				}
			}
		}
	}
	for name := range house {
		if !slices.Contains(ours, name) {
			t.Errorf("house has a row for %s, and there is no such package", name)
		}
	}
}

// agent and placement share api and config, never each other, however far the way.
func TestAgentAndPlacementAreApart(t *testing.T) {
	ours, all := listPackages(t)
	for _, name := range ours {
		for _, dep := range all[module+name].Deps {
			dep, ok := strings.CutPrefix(dep, module)
			if !ok {
				continue
			}
			if within(name, "agent/...") && within(dep, "placement/...") || within(name, "placement/...") && within(dep, "agent/...") {
				t.Errorf("%s depends on %s", name, dep)
			}
		}
	}
}

func TestBinaries(t *testing.T) {
	_, all := listPackages(t)
	for name, rules := range never {
		p, ok := all[module+name]
		if !ok {
			t.Errorf("no package %s", name)
		}
		for _, dep := range p.Deps {
			for _, rule := range rules {
				if within(dep, rule) {
					t.Errorf("%s is built from %s", name, dep)
				}
			}
			if name == "cmd/berth" && len(all[dep].CgoFiles) > 0 && !all[dep].Standard {
				t.Errorf("%s is built from %s, which needs cgo", name, dep)
			}
		}
	}
}

func TestPure(t *testing.T) {
	root := filepath.Join("..", "..")
	for _, name := range pure {
		files := []string{filepath.Join(root, name)}
		if !strings.HasSuffix(name, ".go") {
			var err error
			if files, err = filepath.Glob(filepath.Join(root, name, "*.go")); err != nil {
				t.Fatal(err)
			}
		}
		checked := 0
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			checked++
			for _, why := range impurities(t, file) {
				t.Errorf("%s: %s", strings.TrimPrefix(file, root+"/"), why)
			}
		}
		if checked == 0 {
			t.Errorf("pure names %s, and there is no such thing", name)
		}
	}
}

func impurities(t *testing.T, file string) (why []string) {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if errors.Is(err, fs.ErrNotExist) {
		return []string{"pure names it, and there is no such file"}
	} else if err != nil {
		t.Fatal(err)
	}
	for _, imp := range parsed.Imports {
		if path := strings.Trim(imp.Path.Value, `"`); slices.Contains(impureImports, path) {
			why = append(why, "imports "+path)
		}
	}
	ast.Inspect(parsed, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			why = append(why, "starts a goroutine")
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && slices.Contains(impureCalls, x.Name+"."+n.Sel.Name) {
				why = append(why, "calls "+x.Name+"."+n.Sel.Name)
			}
		}
		return true
	})
	return why
}
