package ecsjson_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/ecs/schemas"
	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
	"github.com/aws/smithy-go"
	smithyhttp "github.com/aws/smithy-go/transport/http"
	"github.com/aws/smithy-go/transport/http/protocol/awsjson"
	"github.com/berth-gpu/berth/api/ecsjson"
	"pgregory.net/rapid"
)

func parse(t testing.TB, text string) *ecsjson.Node {
	t.Helper()
	n, problems := ecsjson.Parse([]byte(text))
	if len(problems) > 0 {
		t.Fatalf("Parse(%s): %v", text, problems)
	}
	return n
}

// TestText is about what is no JSON, or JSON that two readers could take for two
// different things.
func TestText(t *testing.T) {
	deep := strings.Repeat("[", ecsjson.MaxDepth+1) + strings.Repeat("]", ecsjson.MaxDepth+1)
	for _, test := range []struct{ name, text, want string }{
		{"nothing", "", "empty; want a JSON object"},
		{"white space", " \n ", "empty; want a JSON object"},
		{"cut off", `{"a": `, "line 1, column 7: unexpected end of JSON input"},
		{"a comma too many", "{\n  \"a\": 1,\n}", "line 3, column 1: invalid character '}' looking for beginning of object key string"},
		{"a comment", "{} // done", "line 1, column 4: invalid character '/' after top-level value"},
		{"a second value", "{}\n{}", "line 2, column 1: invalid character '{' after top-level value"},
		{"single quotes", "{'a': 1}", "line 1, column 2: invalid character '\\'' looking for beginning of object key string"},
		{"NaN", `{"a": NaN}`, "line 1, column 7: invalid character 'N' looking for beginning of value"},
		{"a leading zero", `{"a": 012}`, "line 1, column 8: invalid character '1' after object key:value pair"},
		{"not UTF-8", "{\"\xe9\": 1}", "line 1, column 3: not UTF-8"},
		{"half a surrogate pair", `{"a": ["\uD800"]}`, `a[0]: half a surrogate pair in a \u escape`},
		{"too deep", deep, strings.Repeat("[0]", ecsjson.MaxDepth) + ": nested deeper than 32"},
		{"too long", strings.Repeat(" ", ecsjson.MaxBytes+1), "1048577 bytes; want at most 1048576"},
		{"twice", `{"a": 1, "b": {"c": 1, "c": 2}, "a": 3}`, "b.c: given twice\na: given twice"},
		{"twice, one escaped", `{"a": 1, "\u0061": 2}`, "a: given twice"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, problems := ecsjson.Parse([]byte(test.text))
			if got := problems.Error(); got != test.want {
				t.Errorf("got:  %s\nwant: %s", got, test.want)
			}
		})
	}
}

// TestShapes is about JSON that is not the shape that was asked for.
func TestShapes(t *testing.T) {
	refuse := func(shape string) string {
		return map[string]string{"secrets": "not taken", "environment[].value": "not taken either", "Revision": "not yours"}[shape]
	}
	for _, test := range []struct{ name, text, want string }{
		{"a list", `[]`, "want an object, not a list"},
		{"a string", `"x"`, `"x": want an object, not a string`},
		{"another case", `{"Image": "x", "NAME": "y"}`, "Image: unknown member; did you mean image?\nNAME: unknown member; did you mean name?"},
		{"a letter wrong", `{"imgae": "x", "memmory": 1}`, "imgae: unknown member; did you mean image?\nmemmory: unknown member; did you mean memory?"},
		{"unknown", `{"replicas": 3, "": 1}`, "[\"\"]: unknown member\nreplicas: unknown member"},
		{"a name of many letters", `{"` + strings.Repeat("x", 99) + `": 1}`, strings.Repeat("x", 60) + "...: unknown member"},
		{"a number in a string", `{"memory": "512"}`, `memory: "512": want a whole number, not a string`},
		{"a string in a number", `{"image": 5}`, `image: 5: want a string, not a number; write "5"`},
		{"a fraction", `{"memory": 1.5, "cpu": 2.0, "stopTimeout": 1e3}`, "cpu: 2.0: want a whole number\nmemory: 1.5: want a whole number\nstopTimeout: 1e3: want a whole number"},
		{"too large", `{"memory": 2147483648, "cpu": -2147483649, "stopTimeout": 99999999999999999999}`,
			"cpu: -2147483649: want a whole number of -2147483648 to 2147483647\n" +
				"memory: 2147483648: want a whole number of -2147483648 to 2147483647\n" +
				"stopTimeout: 99999999999999999999: want a whole number of -2147483648 to 2147483647"},
		{"a boolean in a string", `{"essential": "true", "interactive": 1}`, "essential: \"true\": want true or false, not a string\ninteractive: 1: want true or false, not a number"},
		{"a list that is none", `{"command": "sleep", "dependsOn": {}}`, "command: \"sleep\": want a list, not a string\ndependsOn: want a list, not an object"},
		{"null in lists and maps", `{"command": ["a", null], "dockerLabels": {"x": null}, "dependsOn": [null]}`,
			"command[1]: null: want a value\ndependsOn[0]: null: want a value\ndockerLabels.x: null: want a value"},
		{"null members are not there", `{"image": null, "memory": null, "healthCheck": null, "resourceRequirements": null}`, ""},
		{"an enum", `{"dependsOn": [{"condition": "healthy"}], "ulimits": [{"name": 3}]}`,
			"dependsOn[0].condition: \"healthy\": want one of START, COMPLETE, SUCCESS, HEALTHY\nulimits[0].name: 3: want a string, not a number; write \"3\""},
		{"a union of nothing", `{"resourceRequirements": [{"sharingStrategy": {}}]}`, "resourceRequirements[0].sharingStrategy: empty; want nvidiaMps"},
		{"a union of null", `{"resourceRequirements": [{"sharingStrategy": {"nvidiaMps": null}}]}`, "resourceRequirements[0].sharingStrategy: empty; want nvidiaMps"},
		{"a union of the unknown", `{"resourceRequirements": [{"sharingStrategy": {"timeSlicing": {"replicas": 2}}}]}`,
			"resourceRequirements[0].sharingStrategy.timeSlicing: unknown member; want nvidiaMps"},
		{"a union of both", `{"resourceRequirements": [{"sharingStrategy": {"nvidiaMps": {"memory": 1}, "nvidiaMPS": {}}}]}`,
			"resourceRequirements[0].sharingStrategy.nvidiaMPS: unknown member; did you mean nvidiaMps?"},
		{"a union in a string", `{"resourceRequirements": [{"sharingStrategy": "nvidiaMps"}]}`, `resourceRequirements[0].sharingStrategy: "nvidiaMps": want an object, not a string`},
		{"what follows a bad value is read", `{"command": 1, "healthCheck": [], "image": "x", "portMappings": [7, {"hostPort": "a"}]}`,
			"command: 1: want a list, not a number\nhealthCheck: want an object, not a list\nportMappings[0]: 7: want an object, not a number\nportMappings[1].hostPort: \"a\": want a whole number, not a string"},
		{"indexes count as numbers", `{"command": ["a", 1, "c", "d", "e", "f", "g", "h", "i", "j", 10]}`,
			"command[1]: 1: want a string, not a number; write \"1\"\ncommand[10]: 10: want a string, not a number; write \"10\""},
		{"keys that are no words", `{"dockerLabels": {"a.b": 1, "": 2, "\n": 3}}`,
			"dockerLabels[\"\"]: 2: want a string, not a number; write \"2\"\ndockerLabels[\"\\n\"]: 3: want a string, not a number; write \"3\"\ndockerLabels[\"a.b\"]: 1: want a string, not a number; write \"1\""},
		{"a long value is clipped", `{"memory": "` + strings.Repeat("é", 99) + `"}`, `memory: "` + strings.Repeat("é", 29) + `...: want a whole number, not a string`},
		{"refused", `{"secrets": [{"name": "a"}], "environment": [{"value": "b"}], "Revision": 1}`,
			"Revision: not yours\nenvironment[0].value: not taken either\nsecrets: not taken"},
		{"refused, and asking for nothing", `{"secrets": []}`, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			var into types.ContainerDefinition
			problems := ecsjson.Decode(parse(t, test.text), &into, refuse)
			if got := problems.Error(); got != test.want {
				t.Errorf("got:  %s\nwant: %s", got, test.want)
			}
		})
	}
}

// TestOtherShapes reads what a task definition has none of.
func TestOtherShapes(t *testing.T) {
	var task types.Task
	problems := ecsjson.Decode(parse(t, `{"createdAt": 946684800.5, "startedAt": "now", "stoppedAt": 1e300}`), &task, nil)
	want := "startedAt: \"now\": want a number, not a string\nstoppedAt: 1e300: want seconds since 1970"
	if problems.Error() != want || !task.CreatedAt.Equal(time.Unix(946684800, 5e8)) {
		t.Errorf("got:  %s, %v\nwant: %s", problems, task.CreatedAt, want)
	}
	var hook types.DeploymentLifecycleHook
	text := `{"hookDetails":{"a":[1,2.50,null,true],"b":"c"},"roleArn":"r"}`
	if problems := ecsjson.Decode(parse(t, text), &hook, nil); len(problems) > 0 {
		t.Fatal(problems)
	}
	if got := string(ecsjson.Encode(&hook)); got != text {
		t.Errorf("got:  %s\nwant: %s", got, text)
	}
}

// TestTouch shows which rules are silenced by a value that could not be read.
func TestTouch(t *testing.T) {
	var into types.ContainerDefinition
	problems := ecsjson.Decode(parse(t, `{"Image": "x", "environment": [{"name": 1}], "portMappings": 3}`), &into, nil)
	for path, want := range map[string]bool{
		"Image": true, "image": true, "environment": true, "environment[0]": true, "environment[0].name": true,
		"portMappings[0].hostPort": true, "environment[0].value": false, "environment[1]": false, "name": false, "env": false, "imageX": false,
	} {
		if got := problems.Touch(path); got != want {
			t.Errorf("Touch(%s) = %v", path, got)
		}
	}
}

// shuffled writes a tree as JSON with the members of each object in a random order.
func shuffled(v any, r *rand.Rand) []byte {
	switch v := v.(type) {
	case map[string]any:
		names := make([]string, 0, len(v))
		for name := range v {
			names = append(names, name)
		}
		slices.Sort(names)
		r.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		var parts [][]byte
		for _, name := range names {
			key, _ := json.Marshal(name)
			parts = append(parts, append(append(key, ':'), shuffled(v[name], r)...))
		}
		return append(append([]byte{'{'}, bytes.Join(parts, []byte{','})...), '}')
	case []any:
		var parts [][]byte
		for _, item := range v {
			parts = append(parts, shuffled(item, r))
		}
		return append(append([]byte{'['}, bytes.Join(parts, []byte{','})...), ']')
	}
	b, _ := json.Marshal(v)
	return b
}

// TestFixedOrder: the problems of a document do not depend on the order of its
// members.
func TestFixedOrder(t *testing.T) {
	text := `{"image": 1, "Name": 2, "memory": "3", "dockerLabels": {"c": 4, "a": 5, "b": 6}, "zzz": {}, "healthCheck": {"interval": "x", "Retries": 1}}`
	var v any
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatal(err)
	}
	var first string
	for seed := range uint64(50) {
		var into types.ContainerDefinition
		got := ecsjson.Decode(parse(t, string(shuffled(v, rand.New(rand.NewPCG(seed, 0))))), &into, nil).Error()
		if first == "" {
			first = got
		}
		if got != first || strings.Count(got, "\n") != 8 {
			t.Fatalf("seed %d got:\n%s\nseed 0 got:\n%s", seed, got, first)
		}
	}
}

// TestRoundTrip: any task definition of the right shapes comes back as it was,
// whatever its values.
func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text, _ := json.Marshal(anyShape(schemas.TaskDefinition, 0).Draw(t, "json"))
		var once, twice types.TaskDefinition
		n, problems := ecsjson.Parse(text)
		if problems = append(problems, ecsjson.Decode(n, &once, nil)...); len(problems) > 0 {
			t.Fatalf("%s\n%s", text, problems)
		}
		written := ecsjson.Encode(&once)
		n, problems = ecsjson.Parse(written)
		if problems = append(problems, ecsjson.Decode(n, &twice, nil)...); len(problems) > 0 {
			t.Fatalf("%s\n%s", written, problems)
		}
		if !reflect.DeepEqual(once, twice) {
			t.Fatalf("%s\nbecame %s", text, written)
		}
		if again := ecsjson.Encode(&twice); !bytes.Equal(written, again) {
			t.Fatalf("%s\nthen %s", written, again)
		}
	})
}

// anyShape draws a JSON value that a schema takes.
func anyShape(s *smithy.Schema, depth int) *rapid.Generator[any] {
	list := func(member *smithy.Schema) *rapid.Generator[any] {
		return rapid.Custom(func(t *rapid.T) any { return rapid.SliceOfN(anyShape(member, depth+1), 0, 2).Draw(t, "list") })
	}
	switch s.Type() {
	case smithy.ShapeTypeStructure, smithy.ShapeTypeUnion:
		return rapid.Custom(func(t *rapid.T) any {
			names := make([]string, 0, len(s.Members()))
			for name := range s.Members() {
				names = append(names, name)
			}
			slices.Sort(names)
			least := 0
			if s.Type() == smithy.ShapeTypeUnion {
				least = 1
				names = []string{rapid.SampledFrom(names).Draw(t, "variant")}
			}
			m := map[string]any{}
			for _, name := range names {
				if len(m) < least || rapid.IntRange(0, 2).Draw(t, name) == 0 {
					m[name] = anyShape(s.Member(name), depth+1).Draw(t, name)
				}
			}
			return m
		})
	case smithy.ShapeTypeList:
		return list(s.ListMember())
	case smithy.ShapeTypeMap:
		return rapid.Custom(func(t *rapid.T) any {
			return rapid.MapOfN(rapid.StringN(0, 8, -1), anyShape(s.MapValue(), depth+1), 0, 3).Draw(t, "map")
		})
	case smithy.ShapeTypeEnum:
		return rapid.Custom(func(t *rapid.T) any {
			return rapid.SampledFrom(ecsjson.EnumValues(s)).Draw(t, "enum")
		})
	case smithy.ShapeTypeString:
		return rapid.Custom(func(t *rapid.T) any { return rapid.StringN(0, 12, -1).Draw(t, "string") })
	case smithy.ShapeTypeBoolean:
		return rapid.Custom(func(t *rapid.T) any { return rapid.Bool().Draw(t, "bool") })
	case smithy.ShapeTypeInteger:
		return rapid.Custom(func(t *rapid.T) any { return rapid.Int32().Draw(t, "int") })
	case smithy.ShapeTypeTimestamp:
		return rapid.Custom(func(t *rapid.T) any { return rapid.Int32Range(0, 1<<30).Draw(t, "time") })
	}
	panic("a task definition has no " + s.ID().String())
}

func samples(t testing.TB) map[string][]byte {
	paths, err := filepath.Glob("../../testdata/taskdefs/*.json")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no samples: %v", err)
	}
	out := map[string][]byte{}
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		out[filepath.Base(path)] = data
	}
	return out
}

// TestAgainstTheSDK holds both directions against smithy-go's own awsJson 1.1,
// which every Go program that calls ECS uses.
func TestAgainstTheSDK(t *testing.T) {
	service := smithy.NewServiceSchema(smithy.NewSchema(smithy.ShapeID{Namespace: "com.amazonaws.ecs", Name: "AmazonEC2ContainerServiceV20141113"}, smithy.ShapeTypeService, 0), "2014-11-13")
	protocol := awsjson.New11(service)
	operation := smithy.NewOperationSchema(schemas.RegisterTaskDefinition, schemas.TaskDefinition, schemas.TaskDefinition)
	for name, data := range samples(t) {
		t.Run(name, func(t *testing.T) {
			var ours, theirs types.TaskDefinition
			n := parse(t, string(data))
			ecsjson.Decode(n, &ours, func(shape string) string { return map[string]string{"tags": "the request's"}[shape] })
			response := &smithyhttp.Response{Response: &http.Response{StatusCode: 200, Body: io.NopCloser(bytes.NewReader(data))}}
			if err := protocol.DeserializeResponse(context.Background(), operation, nil, response, &theirs); err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(ours, theirs) {
				t.Errorf("read:\nours:   %s\ntheirs: %s", ecsjson.Encode(&ours), ecsjson.Encode(&theirs))
			}
			request := smithyhttp.NewStackRequest().(*smithyhttp.Request)
			if err := protocol.SerializeRequest(context.Background(), operation, &ours, request); err != nil {
				t.Fatal(err)
			}
			written, err := io.ReadAll(request.GetStream())
			if err != nil {
				t.Fatal(err)
			}
			var a, b any
			if json.Unmarshal(written, &a) != nil || json.Unmarshal(ecsjson.Encode(&ours), &b) != nil || !reflect.DeepEqual(a, b) {
				t.Errorf("written:\nours:   %s\ntheirs: %s", ecsjson.Encode(&ours), written)
			}
		})
	}
}

// TestEnums: each enum shape of the SDK's schemas has its values. There is no
// list of shapes to walk, so the source is read.
func TestEnums(t *testing.T) {
	dir, err := exec.Command("go", "list", "-f", "{{.Dir}}", "github.com/aws/aws-sdk-go-v2/service/ecs/schemas").Output()
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "schemas.go"))
	if err != nil {
		t.Fatal(err)
	}
	shapes := regexp.MustCompile(`Name:\s+"(\w+)",\s+\}, smithy\.ShapeTypeEnum, (\d+)`).FindAllSubmatch(source, -1)
	if len(shapes) < 100 {
		t.Fatalf("%d enum shapes found in schemas.go; it is written otherwise now", len(shapes))
	}
	for _, m := range shapes {
		s := smithy.NewSchema(smithy.ShapeID{Name: string(m[1])}, smithy.ShapeTypeEnum, 0)
		if len(ecsjson.EnumValues(s)) == 0 {
			t.Errorf("%s: no values; add it to enums.go", m[1])
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, data := range samples(f) {
		f.Add(data)
	}
	f.Add([]byte(`{"containerDefinitions": [{"resourceRequirements": [{"sharingStrategy": {"nvidiaMps": {}, "x": null}}]}], "volumes": {}, "a": "\ud800"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		n, problems := ecsjson.Parse(data)
		if n == nil {
			if len(problems) == 0 {
				t.Fatal("neither a tree nor a problem")
			}
			return
		}
		if !json.Valid(data) {
			t.Fatal("a tree of what is no JSON")
		}
		var d types.TaskDefinition
		if len(ecsjson.Decode(n, &d, nil))+len(problems) > 0 {
			return
		}
		again, problems := ecsjson.Parse(ecsjson.Encode(&d))
		if len(problems) > 0 {
			t.Fatal(problems)
		}
		var e types.TaskDefinition
		if problems := ecsjson.Decode(again, &e, nil); len(problems) > 0 || !reflect.DeepEqual(d, e) {
			t.Fatalf("%s\n%s\n%s", data, ecsjson.Encode(&d), problems)
		}
	})
}
