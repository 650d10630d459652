package taskdef

import (
	"fmt"

	"github.com/aws/aws-sdk-go-v2/service/ecs/schemas"
	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
	"github.com/aws/smithy-go"
	"github.com/berth-gpu/berth/api/ecsjson"
)

// Definition is a task definition that has passed every rule.
type Definition struct {
	types.TaskDefinition
	Tags []types.Tag
}

// Problem and Problems are what Parse finds wrong: path, value and rule of each.
type (
	Problem  = ecsjson.Problem
	Problems = ecsjson.Problems
)

// Rules are what a machine adds to the rules that hold everywhere.
type Rules struct {
	RunDir            string   // the agent's run folder, with the pipe folders in it
	Protected         []string // further host paths that a task on a shared GPU may not mount
	DisablePrivileged bool     // no privileged container at all
}

// MaxBytes is ECS's limit for a task definition.
const MaxBytes = 64 << 10

// Parse reads a task definition under the rules of a machine with default
// settings. The error is Problems: every one there is.
func Parse(data []byte) (*Definition, error) {
	return Rules{RunDir: "/run/berth", DisablePrivileged: true}.Parse(data)
}

// Parse reads a task definition as RegisterTaskDefinition takes it. A rule
// about a value that could not be read is not judged: it would only repeat that.
func (r Rules) Parse(data []byte) (*Definition, error) {
	if len(data) > MaxBytes {
		return nil, Problems{{Rule: fmt.Sprintf("%d bytes; want at most %d", len(data), MaxBytes)}}
	}
	tree, problems := ecsjson.Parse(data)
	if tree == nil {
		return nil, problems
	}
	d := new(Definition)
	problems = append(problems, ecsjson.Decode(tree, d, refusal)...)
	problems = append(problems, r.check(d, problems)...)
	if len(problems) > 0 {
		return nil, problems.Sorted()
	}
	return d, nil
}

// Encode writes a definition as RegisterTaskDefinition takes it.
func (d *Definition) Encode() []byte { return ecsjson.Encode(d) }

// Serialize implements smithy.Serializable. The members of a TaskDefinition
// and of RegisterTaskDefinition's input have the same names and shapes; tags are
// the input's alone.
func (d *Definition) Serialize(s smithy.ShapeSerializer) {
	s.WriteStruct(schemas.RegisterTaskDefinitionRequest)
	d.TaskDefinition.SerializeMembers(s)
	if d.Tags != nil {
		s.WriteList(schemas.RegisterTaskDefinitionRequest_tags)
		for i := range d.Tags {
			d.Tags[i].Serialize(s)
		}
		s.CloseList()
	}
	s.CloseStruct()
}

// Deserialize implements smithy.Deserializable.
func (d *Definition) Deserialize(r smithy.ShapeDeserializer) error {
	return smithy.ReadStruct(r, schemas.RegisterTaskDefinitionRequest, func(m *smithy.Schema) error {
		if m == schemas.RegisterTaskDefinitionRequest_tags {
			d.Tags = []types.Tag{}
			return smithy.ReadList(r, m, func() error { return d.readTag(r, m) })
		}
		member := schemas.TaskDefinition.Member(m.MemberName())
		return d.TaskDefinition.Deserialize(&oneMember{ShapeDeserializer: r, member: member})
	})
}

func (d *Definition) readTag(r smithy.ShapeDeserializer, list *smithy.Schema) error {
	if isNil, err := r.ReadNil(list.ListMember()); isNil || err != nil {
		return err
	}
	var t types.Tag
	err := t.Deserialize(r)
	d.Tags = append(d.Tags, t)
	return err
}

// oneMember lets TaskDefinition.Deserialize read one member of an object that
// is already open: it sees a structure of that member alone. What is nested in the
// member goes through untouched.
type oneMember struct {
	smithy.ShapeDeserializer
	member *smithy.Schema
	nested int
}

// ReadStruct implements smithy.ShapeDeserializer.
func (o *oneMember) ReadStruct(s *smithy.Schema) error {
	if s == schemas.TaskDefinition {
		return nil
	}
	o.nested++
	return o.ShapeDeserializer.ReadStruct(s)
}

// ReadStructMember implements smithy.ShapeDeserializer.
func (o *oneMember) ReadStructMember() (*smithy.Schema, error) {
	if o.nested == 0 {
		m := o.member
		o.member = nil
		return m, nil
	}
	m, err := o.ShapeDeserializer.ReadStructMember()
	if m == nil {
		o.nested--
	}
	return m, err
}
