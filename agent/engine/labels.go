package engine

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

// Labels of every container that an agent makes. The com.amazonaws.ecs names are
// those that ECS's agent sets, so that tools that read them go on working.
const (
	LabelInstance   = "berth.instance"
	LabelTask       = "berth.task"
	LabelGeneration = "berth.generation"
	LabelContainer  = "berth.container"

	labelECSTask      = "com.amazonaws.ecs.task-arn"
	labelECSContainer = "com.amazonaws.ecs.container-name"
	labelECSFamily    = "com.amazonaws.ecs.task-definition-family"
	labelECSRevision  = "com.amazonaws.ecs.task-definition-version"
	labelECSCluster   = "com.amazonaws.ecs.cluster"
)

// Labels say whose container this is. Instance, Task, Generation and Container
// together name one container for ever: a task that starts again does so under
// a new generation.
type Labels struct {
	Instance   string
	Task       string
	Generation uint64
	Container  string // its name in the task definition

	Family   string
	Revision int32
	Cluster  string
}

// Same says that both name one container; family, revision and cluster are
// only shown.
func (l Labels) Same(o Labels) bool {
	return l.Instance == o.Instance && l.Task == o.Task && l.Generation == o.Generation && l.Container == o.Container
}

// Map is the labels as Docker holds them.
func (l Labels) Map() map[string]string {
	m := map[string]string{
		LabelInstance:     l.Instance,
		LabelTask:         l.Task,
		LabelGeneration:   strconv.FormatUint(l.Generation, 10),
		LabelContainer:    l.Container,
		labelECSTask:      l.Task,
		labelECSContainer: l.Container,
		labelECSFamily:    l.Family,
		labelECSCluster:   l.Cluster,
	}
	if l.Revision > 0 {
		m[labelECSRevision] = strconv.Itoa(int(l.Revision))
	}
	return m
}

// labelsOf reads them back. A container without a readable generation is not
// one of ours.
func labelsOf(m map[string]string) (Labels, error) {
	generation, err := strconv.ParseUint(m[LabelGeneration], 10, 64)
	if err != nil {
		return Labels{}, fmt.Errorf("label %s: %q is not a generation", LabelGeneration, m[LabelGeneration])
	}
	revision, _ := strconv.ParseInt(m[labelECSRevision], 10, 32)
	return Labels{
		Instance:   m[LabelInstance],
		Task:       m[LabelTask],
		Generation: generation,
		Container:  m[LabelContainer],
		Family:     m[labelECSFamily],
		Revision:   int32(revision),
		Cluster:    m[labelECSCluster],
	}, nil
}

// maxName bounds a container's name, so that names stay readable in
// `docker ps`; Docker itself takes far longer ones.
const maxName = 128

// Name is the container's name in Docker, the same for the same labels:
// berth-<instance>-<task>-g<generation>-<container>. Where a part holds a
// character that Docker refuses, or the whole is longer than 128 characters,
// the name is shortened and ends with a hash of the labels, so that two
// containers never share one.
func (l Labels) Name() string {
	return l.name("g" + strconv.FormatUint(l.Generation, 10) + "-" + l.Container)
}

// volumeName is the name of a Docker volume that lives as long as the task.
func (l Labels) volumeName(volume string) string {
	return l.name("g" + strconv.FormatUint(l.Generation, 10) + "-volume-" + volume)
}

func (l Labels) name(rest string) string {
	exact := "berth-" + l.Instance + "-" + l.Task + "-" + rest
	clean := strings.Map(func(r rune) rune {
		// Docker: [a-zA-Z0-9][a-zA-Z0-9_.-]+
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' || r == '.' || r == '-' {
			return r
		}
		return '_'
	}, exact)
	if clean == exact && len(clean) <= maxName {
		return clean
	}
	sum := sha256.Sum256([]byte(l.Instance + "\x00" + l.Task + "\x00" + rest))
	suffix := "-" + hex.EncodeToString(sum[:6])
	return clean[:min(len(clean), maxName-len(suffix))] + suffix
}
