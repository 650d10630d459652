package taskdef

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/service/ecs/schemas"
	"github.com/aws/smithy-go"
	"github.com/berth-gpu/berth/mps"
)

var update = flag.Bool("update", false, "rewrite docs/task-definition.md from the table")

// members walks the schemas of the SDK and returns the path of every member.
func members(prefix string, s *smithy.Schema) []string {
	var all []string
	switch s.Type() {
	case smithy.ShapeTypeStructure, smithy.ShapeTypeUnion:
		for _, name := range slices.Sorted(maps.Keys(s.Members())) {
			path := strings.TrimPrefix(prefix+"."+name, ".")
			all = append(append(all, path), members(path, s.Member(name))...)
		}
	case smithy.ShapeTypeList:
		return members(prefix+"[]", s.ListMember())
	case smithy.ShapeTypeMap:
		return members(prefix+"{}", s.MapValue())
	}
	return all
}

// rowFor finds the row that speaks for a member: its own, or that of what
// holds it, where that is not honoured.
func rowFor(path string) (field, bool) {
	if f, ok := byPath[path]; ok {
		return f, true
	}
	for cut := strings.LastIndexByte(path, '.'); cut >= 0; cut = strings.LastIndexByte(path, '.') {
		path = strings.TrimSuffix(strings.TrimSuffix(path[:cut], "[]"), "{}")
		if f, ok := byPath[path]; ok {
			return f, f.standing != honoured
		}
	}
	return field{}, false
}

// TestEveryField: each member of RegisterTaskDefinition's input, however deep,
// has a row, and each row a member. A newer SDK with a new member fails here.
func TestEveryField(t *testing.T) {
	input := members("", schemas.RegisterTaskDefinitionRequest)
	for _, path := range input {
		if _, ok := rowFor(path); !ok {
			t.Errorf("%s: no row in fields.go", path)
		}
	}
	seen := map[string]bool{}
	for _, f := range fields {
		if seen[f.path] {
			t.Errorf("%s: two rows", f.path)
		}
		seen[f.path] = true
		answered := schemas.TaskDefinition.Member(f.path) != nil && f.says == describeOnly
		if !slices.Contains(input, f.path) && !answered {
			t.Errorf("%s: no such member", f.path)
		}
		if f.standing == refused && f.says == "" {
			t.Errorf("%s: refused without a sentence", f.path)
		}
	}
	// What DescribeTaskDefinition answers and nobody may ask for.
	for name := range schemas.TaskDefinition.Members() {
		if schemas.RegisterTaskDefinitionRequest.Member(name) == nil && !seen[name] {
			t.Errorf("%s: no row in fields.go", name)
		}
	}
	// Deserialize reads each member of the input as TaskDefinition's of the same name.
	for name, m := range schemas.RegisterTaskDefinitionRequest.Members() {
		if same := schemas.TaskDefinition.Member(name); name != "tags" && (same == nil || same.TargetID() != m.TargetID()) {
			t.Errorf("%s: another shape in TaskDefinition", name)
		}
	}
}

func TestPage(t *testing.T) {
	const path = "../../docs/task-definition.md"
	want := page()
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("%s is not what the table says; run: go test ./config/taskdef -run Page -update", path)
	}
}

func page() string {
	var b strings.Builder
	b.WriteString(`# Task definitions

Generated from the table in config/taskdef/fields.go by ` + "`go test ./config/taskdef -run Page -update`" + `.

A task definition is the JSON that RegisterTaskDefinition of the Amazon ECS API takes: what ` + "`aws ecs register-task-definition\n--cli-input-json`" + ` reads. One that asks for 20 GiB of a GPU that it shares, and for at most 40 % of its compute:

` + "```json" + `
{
  "family": "chat",
  "containerDefinitions": [
    {
      "name": "model",
      "image": "registry.example/chat:7",
      "memory": 4096,
      "resourceRequirements": [
        {"type": "GPU", "sharingStrategy": {"nvidiaMps": {"memory": 20480, "maxComputePercent": 40}}}
      ]
    }
  ]
}
` + "```" + `

It is read strictly. Names are case-sensitive, numbers are numbers, and a member that is unknown, given twice or refused below is
an error; so is text after the end, more than 64 KiB, or nesting deeper than 32. Every problem is reported at once, with its path, the
value and the rule:

    containerDefinitions[0].memory: "4096": want a whole number, not a string
    containerDefinitions[0].resourceRequirements[0]: GPU has both value and sharingStrategy; give one

Rules of sharing:

- A GPU requirement has exactly one of value (whole GPUs) and sharingStrategy (part of one). A container has at most one requirement, and
  the containers of a task that have one all ask in the same way.
- The MPS containers of a task share one GPU, and their memory is summed. The cap holds for each process: a container that runs two CUDA
  processes can take twice its memory, and wants a whole GPU.
- maxComputePercent is a ceiling, not a reservation; placement does not count it.
- A definition may not set the variables that berth sets: ` + variables() + `.
- In a task on a shared GPU no container is privileged, sees the machine's processes or memory segments, has raw devices or capabilities
  that lead out of it, or mounts a folder of the machine that contains or lies in /dev, /proc, /sys or the sockets of Docker and
  containerd. The run folder is mounted by no task at all.

A field is **honoured** (berth does what it says), **shown** (accepted, kept and shown, and changes nothing) or **refused** (a definition
with it is not taken, unless it asks for nothing: null, false or an empty list).

| field | standing | what it takes |
|---|---|---|
`)
	for _, path := range inOrder(members("", schemas.RegisterTaskDefinitionRequest)) {
		f, _ := rowFor(path)
		says := f.says
		if f.path != path {
			says = "as `" + f.path + "`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", path, f.standing, says)
	}
	b.WriteString("\n## What DescribeTaskDefinition adds\n\nRefused, because each " + describeOnly + ": ")
	var names []string
	for _, f := range fields {
		if f.says == describeOnly {
			names = append(names, "`"+f.path+"`")
		}
	}
	b.WriteString(strings.Join(names, ", ") + ".\n")
	return b.String()
}

// variables are those that a definition may not set, by package mps.
func variables() string {
	const family = "CUDA_MPS_"
	names := []string{"those that begin with " + family}
	for _, name := range mps.ReservedVariables {
		if !strings.HasPrefix(name, family) {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// inOrder puts members into the order of the table, and those without a row of
// their own after the one that speaks for them.
func inOrder(paths []string) []string {
	place := func(path string) int {
		f, _ := rowFor(path)
		return slices.IndexFunc(fields, func(g field) bool { return g.path == f.path })
	}
	slices.SortStableFunc(paths, func(a, b string) int { return place(a) - place(b) })
	return paths
}
