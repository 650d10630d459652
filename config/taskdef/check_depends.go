package taskdef

import (
	"fmt"
	"slices"
	"strings"

	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
	"github.com/berth-gpu/berth/api/ecsjson"
)

// dependencies must name containers that can come to the condition, and lead to
// no circle.
func (c *checker) dependencies() {
	index := map[string]int{}
	for i, d := range c.def.ContainerDefinitions {
		if name := value(d.Name); name != "" {
			if _, ok := index[name]; !ok {
				index[name] = i
			}
		}
	}
	for i, d := range c.def.ContainerDefinitions {
		for j, dep := range d.DependsOn {
			at := fmt.Sprintf("%s.dependsOn[%d]", container(i), j)
			if dep.Condition == "" {
				c.report(at+".condition", "", "required")
			}
			if !c.required(at+".containerName", dep.ContainerName) {
				continue
			}
			on, ok := index[*dep.ContainerName]
			switch {
			case ok && on == i:
				c.quoted(at+".containerName", *dep.ContainerName, "is this container itself")
			case ok:
				c.condition(at+".condition", dep.Condition, *dep.ContainerName, on)
			case !c.doubt(".name"):
				c.quoted(at+".containerName", *dep.ContainerName, "no container of this name")
			}
		}
	}
	if circle := circleOf(c.def.ContainerDefinitions, index); circle != nil {
		c.report(container(circle[0])+".dependsOn", "", "goes in a circle: %s", c.names(circle))
	}
}

func (c *checker) condition(at string, condition types.ContainerCondition, name string, on int) {
	target := &c.def.ContainerDefinitions[on]
	switch condition {
	case types.ContainerConditionHealthy:
		if target.HealthCheck == nil && !c.unread.Touch(container(on)+".healthCheck") {
			c.quoted(at, string(condition), "container %s has no healthCheck", ecsjson.Quote(name))
		}
	case types.ContainerConditionComplete, types.ContainerConditionSuccess:
		if essential(target) && !c.unread.Touch(container(on)+".essential") {
			c.quoted(at, string(condition), "container %s is essential, so the task ends with it", ecsjson.Quote(name))
		}
	}
}

func (c *checker) names(circle []int) string {
	words := make([]string, 0, len(circle)+1)
	for _, i := range append(circle, circle[0]) {
		words = append(words, value(c.def.ContainerDefinitions[i].Name))
	}
	return strings.Join(words, " -> ")
}

// circleOf returns the containers of a circle of dependencies, the one that is
// defined first in front; nil where there is none. A container that depends on
// itself has been reported.
func circleOf(defs []types.ContainerDefinition, index map[string]int) []int {
	done := make([]bool, len(defs))
	var trail []int
	var visit func(i int) []int
	visit = func(i int) []int {
		if k := slices.Index(trail, i); k >= 0 {
			return slices.Clone(trail[k:])
		}
		if done[i] {
			return nil
		}
		trail = append(trail, i)
		for _, dep := range defs[i].DependsOn {
			if on, ok := index[value(dep.ContainerName)]; ok && on != i {
				if circle := visit(on); circle != nil {
					return circle
				}
			}
		}
		trail = trail[:len(trail)-1]
		done[i] = true
		return nil
	}
	for i := range defs {
		if circle := visit(i); circle != nil {
			k := slices.Index(circle, slices.Min(circle))
			return append(circle[k:], circle[:k]...)
		}
	}
	return nil
}
