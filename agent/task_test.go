package agent

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/ecs/types"

	"github.com/berth-gpu/berth/agent/state"
	"github.com/berth-gpu/berth/api"
)

var noon = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

// story runs step over a task of an app that waits for an init container and a
// sidecar, and writes what it does, so that a reader sees the whole life.
type story struct {
	t    *testing.T
	l    look
	said []string
}

func newStory(t *testing.T, edit func(*types.TaskDefinition)) *story {
	def := &types.TaskDefinition{ContainerDefinitions: []types.ContainerDefinition{
		{Name: aws.String("init"), Essential: aws.Bool(false)},
		{Name: aws.String("side"), Essential: aws.Bool(false), StartTimeout: aws.Int32(30)},
		{Name: aws.String("app"), DependsOn: []types.ContainerDependency{
			{ContainerName: aws.String("init"), Condition: types.ContainerConditionSuccess},
			{ContainerName: aws.String("side"), Condition: types.ContainerConditionHealthy},
		}},
	}}
	if edit != nil {
		edit(def)
	}
	rec := state.Task{ID: "t", Desired: api.StatusRunning, Accepted: noon}
	for _, c := range def.ContainerDefinitions {
		rec.Containers = append(rec.Containers, state.Container{Name: *c.Name})
	}
	return &story{t: t, l: look{rec: rec, def: def, seen: map[string]seen{}, busy: map[string]verb{}, now: noon,
		cleanup: 3 * time.Hour, startMax: 3 * time.Minute}}
}

func (s *story) step() *story {
	rec, acts := step(s.l)
	s.l.rec = rec
	var words []string
	for _, a := range acts {
		words = append(words, strings.TrimSpace(fmt.Sprint(a.verb, " ", a.container)))
		if a.verb != verbForget {
			s.l.busy[a.container] = a.verb
		}
	}
	line := strings.TrimSuffix(status(&rec)+": "+strings.Join(words, ", "), " ")
	if rec.StopCode != "" && !strings.Contains(strings.Join(s.said, ""), rec.StoppedReason) {
		line += " [" + rec.StopCode + ": " + rec.StoppedReason + "]"
	}
	s.said = append(s.said, strings.TrimSuffix(line, ":"))
	return s
}

func (s *story) after(d time.Duration) *story { s.l.now = s.l.now.Add(d); return s }

func (s *story) up(name, health string) *story {
	delete(s.l.busy, name)
	s.l.seen[name] = seen{ID: "id-" + name, Running: true, Started: s.l.now, Health: health}
	return s
}

func (s *story) exit(name string, code int) *story {
	delete(s.l.busy, name)
	was := s.l.seen[name]
	s.l.seen[name] = seen{ID: was.ID, ExitCode: code, Started: was.Started, Finished: s.l.now}
	return s
}

func (s *story) failed(name, reason string) *story {
	delete(s.l.busy, name)
	c := &s.l.rec.Containers[containerIndex(&s.l.rec, name)]
	c.Done, c.Reason = true, reason
	return s
}

func TestStories(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*types.TaskDefinition)
		tell func(s *story)
		want []string
	}{
		{"the app waits for init's success and the sidecar's health", nil, func(s *story) {
			s.step()
			s.up("init", "").up("side", "UNKNOWN").step()
			s.exit("init", 0).step()
			s.up("side", "HEALTHY").step()
			s.up("app", "").step()
			s.exit("app", 3).step()
			s.exit("side", 143).step()
			s.after(3 * time.Hour).step()
		}, []string{
			"PENDING: launch init, launch side",
			"PENDING",
			"PENDING",
			"PENDING: launch app",
			"RUNNING",
			"DEACTIVATING: stop side [EssentialContainerExited: Essential container in task exited]",
			"STOPPED",
			"STOPPED: forget",
		}},
		{"init fails, the app never starts", nil, func(s *story) {
			s.step()
			s.up("init", "").up("side", "HEALTHY").step()
			s.exit("init", 1).step()
			s.exit("side", 0).step()
		}, []string{
			"PENDING: launch init, launch side",
			"PENDING",
			"DEACTIVATING: stop side [TaskFailedToStart: TaskDependencyError: container app waits for init: it ended with exit code 1, condition is SUCCESS]",
			"STOPPED",
		}},
		{"the sidecar is not healthy in its start timeout", nil, func(s *story) {
			s.step()
			s.up("init", "").up("side", "UNKNOWN").exit("init", 0).step()
			s.after(29 * time.Second).step()
			s.after(time.Second).step()
		}, []string{
			"PENDING: launch init, launch side",
			"PENDING",
			"PENDING",
			"DEACTIVATING: stop side [TaskFailedToStart: TaskDependencyError: container app waits for side: it was not HEALTHY within its start timeout of 30s]",
		}},
		{"an essential container that cannot start ends the task", one, func(s *story) {
			s.step()
			s.failed("app", "CannotPullContainerError: no such image").step()
		}, []string{
			"PENDING: launch app",
			"STOPPED: [TaskFailedToStart: CannotPullContainerError: no such image]",
		}},
		{"the restart policy starts it again after its period, not before", restarting, func(s *story) {
			s.step()
			s.up("app", "").step()
			s.after(time.Minute).exit("app", 1).step()
			s.up("app", "").step()
			s.after(59*time.Second).exit("app", 1).step()
		}, []string{
			"PENDING: launch app",
			"RUNNING",
			"RUNNING: launch app",
			"RUNNING",
			"STOPPED: [EssentialContainerExited: Essential container in task exited]",
		}},
		{"an ignored exit code is not restarted", restarting, func(s *story) {
			s.step()
			s.up("app", "").step()
			s.after(time.Hour).exit("app", 42).step()
		}, []string{
			"PENDING: launch app",
			"RUNNING",
			"STOPPED: [EssentialContainerExited: Essential container in task exited]",
		}},
		{"a container that Docker lost", one, func(s *story) {
			s.step()
			s.up("app", "").step()
			delete(s.l.seen, "app")
			s.step()
		}, []string{
			"PENDING: launch app",
			"RUNNING",
			"STOPPED: [EssentialContainerExited: Essential container in task exited]",
		}},
		{"stopped while it is launched: the launch ends first", one, func(s *story) {
			s.step()
			end(&s.l.rec, s.l.now, "UserInitiated", "stopped by berth stop")
			s.step()
			s.up("app", "").step()
			s.exit("app", 137).step()
		}, []string{
			"PENDING: launch app",
			"DEACTIVATING: [UserInitiated: stopped by berth stop]",
			"DEACTIVATING: stop app",
			"STOPPED",
		}},
		{"dependents stop first", nil, func(s *story) {
			s.step()
			s.up("init", "").up("side", "HEALTHY").exit("init", 0).step()
			s.up("app", "").step()
			end(&s.l.rec, s.l.now, "UserInitiated", "stopped by berth stop")
			s.step()
			s.exit("app", 0).step()
			s.exit("side", 0).step()
		}, []string{
			"PENDING: launch init, launch side",
			"PENDING: launch app",
			"RUNNING",
			"DEACTIVATING: stop app [UserInitiated: stopped by berth stop]",
			"DEACTIVATING: stop side",
			"STOPPED",
		}},
		{"nothing is launched while held back", one, func(s *story) {
			s.l.hold = true
			s.step()
			s.l.hold = false
			s.step()
		}, []string{"PENDING", "PENDING: launch app"}},
		{"adopted running: nothing to do", one, func(s *story) { s.up("app", "").step() }, []string{"RUNNING"}},
		{"adopted between create and start: launched", one, func(s *story) {
			s.l.seen["app"] = seen{ID: "id", Created: true}
			s.step()
		}, []string{"PENDING: launch app"}},
		{"stopped between create and start: removed, since Docker may have been asked to start it", one, func(s *story) {
			s.l.seen["app"] = seen{ID: "id", Created: true}
			end(&s.l.rec, s.l.now, "UserInitiated", "stopped by berth stop")
			s.step()
			delete(s.l.busy, "app")
			delete(s.l.seen, "app")
			s.step()
		}, []string{"DEACTIVATING: stop app [UserInitiated: stopped by berth stop]", "STOPPED"}},
		{"started by Docker though its task was stopped meanwhile", one, func(s *story) {
			s.l.seen["app"] = seen{ID: "id", Created: true}
			end(&s.l.rec, s.l.now, "UserInitiated", "stopped by berth stop")
			s.step()
			s.up("app", "").step()
			s.exit("app", 143).step()
		}, []string{"DEACTIVATING: stop app [UserInitiated: stopped by berth stop]", "DEACTIVATING: stop app", "STOPPED"}},
		{"what could not start stays to be looked at", one, func(s *story) {
			s.l.seen["app"] = seen{ID: "id", Created: true}
			s.failed("app", "CannotStartContainerError: no such program").step()
		}, []string{"STOPPED: [TaskFailedToStart: CannotStartContainerError: no such program]"}},
		{"started by hand after its end", one, func(s *story) {
			s.step()
			s.up("app", "").exit("app", 0).step()
			s.up("app", "").step()
			s.exit("app", 137).step()
		}, []string{
			"PENDING: launch app",
			"STOPPED: [EssentialContainerExited: Essential container in task exited]",
			"STOPPED: stop app",
			"STOPPED",
		}},
		{"while a server has yet to learn of its end it is not forgotten", one, func(s *story) {
			s.step()
			s.up("app", "").exit("app", 0).step()
			s.l.awaited = true
			s.after(30 * 24 * time.Hour).step()
			s.l.awaited = false
			s.step()
		}, []string{
			"PENDING: launch app",
			"STOPPED: [EssentialContainerExited: Essential container in task exited]",
			"STOPPED",
			"STOPPED: forget",
		}},
		{"let go after its end: forgotten at once", one, func(s *story) {
			s.step()
			s.up("app", "").exit("app", 0).step()
			s.l.rec.Released = true
			s.step()
		}, []string{
			"PENDING: launch app",
			"STOPPED: [EssentialContainerExited: Essential container in task exited]",
			"STOPPED: forget",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newStory(t, tt.edit)
			tt.tell(s)
			if !slices.Equal(s.said, tt.want) {
				t.Errorf("got:\n  %s\nwant:\n  %s", strings.Join(s.said, "\n  "), strings.Join(tt.want, "\n  "))
			}
		})
	}
}

func one(d *types.TaskDefinition) {
	d.ContainerDefinitions = []types.ContainerDefinition{{Name: aws.String("app")}}
}

func restarting(d *types.TaskDefinition) {
	one(d)
	d.ContainerDefinitions[0].RestartPolicy = &types.ContainerRestartPolicy{Enabled: aws.Bool(true),
		IgnoredExitCodes: []int32{42}, RestartAttemptPeriod: aws.Int32(60)}
}
