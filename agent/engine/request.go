package engine

import (
	"time"

	"github.com/aws/aws-sdk-go-v2/service/ecs/types"
)

// Request is one container to make.
type Request struct {
	Task         *types.TaskDefinition
	Container    *types.ContainerDefinition // one of Task's
	Labels       Labels
	CgroupParent string // the task's cgroup, from cgroup.Tree.Ensure; empty: Docker's own
	Grant        Grant
	Settings     Settings
}

// Grant is what the agent gives a container besides its definition: its GPUs,
// or that it has none. The zero Grant is a container without a GPU.
type Grant struct {
	Env            []string // NAME=value; placed last and instead of the definition's
	Mounts         []Mount
	Devices        []Device // device nodes, opened through Docker's device cgroup
	Runtime        string   // "nvidia", or empty for Docker's default
	CDI            []string // CDI device names, for an engine with Info.CDI; leave VisibleDevices empty then
	VisibleDevices string   // NVIDIA_VISIBLE_DEVICES, always set; empty: "void", with which the nvidia runtime adds nothing
	Shared         bool     // the GPU is shared: the rules of guard.go hold
}

// Mount is a folder of the machine inside the container. It must exist.
type Mount struct {
	Source, Target string
	ReadOnly       bool
}

// Device is a device node of the machine inside the container.
type Device struct {
	Host, Container string
}

// Settings are the machine's defaults and rules.
type Settings struct {
	RunDir          string            // never mounted into a container; default /run/berth
	StopTimeout     time.Duration     // where the definition has none; default 30 s, as ECS
	LogDriver       string            // where the definition has no logConfiguration; empty: Docker's default
	LogOptions      map[string]string // of LogDriver
	AllowPrivileged bool              // a privileged container can open every GPU of the machine
}

func (s Settings) runDir() string {
	if s.RunDir == "" {
		return "/run/berth"
	}
	return s.RunDir
}

func (s Settings) stopTimeout() time.Duration {
	if s.StopTimeout <= 0 {
		return 30 * time.Second
	}
	return s.StopTimeout
}
