package config

import (
	"strings"
	"time"
)

// defaults are the settings of an agent that is told nothing.
func defaults(instance string) *Agent {
	return &Agent{
		Instance:       instance,
		Cluster:        "default",
		RunDir:         "/run/berth",
		StateDir:       "/var/lib/berth",
		LogDir:         "/var/log/berth",
		TaskDir:        "/etc/berth/tasks",
		MetricsAddress: "127.0.0.1:9464",
		LogLevel:       "info",
		TrustDomain:    "cluster",
		Attributes:     map[string]string{},
		Server:         Upstream{Address: []string{}},
		Docker: Docker{
			Host:              "unix:///var/run/docker.sock",
			Runtime:           RuntimeAuto,
			NvidiaRuntime:     "nvidia",
			PullBehavior:      PullDefault,
			StopTimeout:       30 * time.Second,
			StartTimeout:      3 * time.Minute,
			CreateTimeout:     4 * time.Minute,
			PullTimeout:       2 * time.Hour,
			DisablePrivileged: true,
		},
		GPU: GPU{DevRoot: "/dev", ReserveMiB: 512, SampleEvery: 10 * time.Second},
		MPS: MPS{
			ControlBinary:      "nvidia-cuda-mps-control",
			Path:               "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
			ProbeEvery:         10 * time.Second,
			ProbeTimeout:       2 * time.Second,
			StartTimeout:       10 * time.Second,
			ServerStartTimeout: time.Minute,
			Budget:             Budget{Failures: 5, Window: 10 * time.Minute},
			OnDaemonLoss:       LossDrain,
			DrainDeadline:      15 * time.Minute,
		},
		Task: Task{CleanupAfter: 3 * time.Hour, CPUPeriod: 100 * time.Millisecond},
		// SSH, Docker's two, and the agent's metrics.
		Reserved: Reserved{Ports: []uint16{22, 2375, 2376, 9464}, UDPPorts: []uint16{}},
	}
}

const (
	second = time.Second
	tenth  = 100 * time.Millisecond // no loop of the agent turns faster
)

// settings is the table. Sections are together, and in this order they are
// documented.
var settings = []setting[Agent]{
	{"instance", "", "Name of this agent, unique on its machine; its containers carry it in the label berth.instance. The host name unless it says.", func(a *Agent) field {
		return matching(&a.Instance, `1 to 63 letters, digits and any of "-_."`, `[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}`)
	}},
	{"cluster", "ECS_CLUSTER", "The cluster this machine belongs to.", func(a *Agent) field {
		return matching(&a.Cluster, `1 to 255 letters, digits and any of "-_"`, `[a-zA-Z0-9_-]{1,255}`)
	}},
	{"attributes", "ECS_INSTANCE_ATTRIBUTES", "Kept for the placement server, which may choose this machine by them.", func(a *Agent) field { return attributes(&a.Attributes) }},
	{"runDir", "", "Sockets and the MPS pipe folders. It must survive a restart of the agent, and need not survive a reboot.", func(a *Agent) field { return folder(&a.RunDir) }},
	{"stateDir", "ECS_DATADIR", "What must survive a crash of the agent and a reboot.", func(a *Agent) field { return folder(&a.StateDir) }},
	{"logDir", "", "Logs of the agent and of the MPS daemons.", func(a *Agent) field { return folder(&a.LogDir) }},
	{"taskDir", "", "Task definitions wanted on this machine, one a file, read in order of their names.", func(a *Agent) field { return folder(&a.TaskDir) }},
	{"metricsAddress", "", "Where Prometheus reads /metrics; the local socket serves it too.", func(a *Agent) field { return loopback(&a.MetricsAddress) }},
	{"logLevel", "ECS_LOGLEVEL", "How much is logged.", func(a *Agent) field { return word(&a.LogLevel, "debug", "info", "warn", "error") }},
	{"trustDomain", "", "Which tasks may share a GPU: those of one cluster.", func(a *Agent) field { return word(&a.TrustDomain, "cluster") }},

	{"server.address", "", "The placement server to stream to: a list, tried in turn. Empty: there is none, and what is wanted here lies in taskDir, which is not read otherwise.", func(a *Agent) field {
		return texts(&a.Server.Address, "host:port, or unix: and an absolute path", isListen)
	}},
	{"server.ca", "", "File of the certificates (PEM) that the server's is checked against. An address that is not loopback or unix: needs it, with server.cert and server.key; without it nothing is encrypted.", func(a *Agent) field { return optionalPath(&a.Server.CA) }},
	{"server.cert", "", "File of the agent's own certificate, which it shows to the server.", func(a *Agent) field { return optionalPath(&a.Server.Cert) }},
	{"server.key", "", "File of that certificate's key.", func(a *Agent) field { return optionalPath(&a.Server.Key) }},

	{"docker.host", "", "Docker's socket.", func(a *Agent) field {
		return text(&a.Docker.Host, "unix:// and an absolute path", func(s string) bool {
			p, ok := strings.CutPrefix(s, "unix://")
			return ok && isPath(p)
		})
	}},
	{"docker.runtime", "", "How a container gets its GPU: through NVIDIA's runtime, CDI (Docker API 1.44 or newer), or plain device nodes; auto takes the first there is.", func(a *Agent) field {
		return word(&a.Docker.Runtime, RuntimeAuto, RuntimeNvidia, RuntimeCDI, RuntimePlain)
	}},
	{"docker.nvidiaRuntime", "ECS_NVIDIA_RUNTIME", "What Docker calls NVIDIA's runtime.", func(a *Agent) field {
		return matching(&a.Docker.NvidiaRuntime, `a name of letters, digits and any of "-_."`, `[a-zA-Z0-9_.-]+`)
	}},
	{"docker.pullBehavior", "ECS_IMAGE_PULL_BEHAVIOR", "When an image is pulled: default pulls and falls back to what is there, always pulls or fails, once pulls what is not there, prefer-cached pulls only what is missing.", func(a *Agent) field {
		return word(&a.Docker.PullBehavior, PullDefault, PullAlways, PullOnce, PullPreferCached)
	}},
	{"docker.stopTimeout", "ECS_CONTAINER_STOP_TIMEOUT", "Between TERM and KILL, for containers without a stopTimeout.", func(a *Agent) field { return duration(&a.Docker.StopTimeout, second, 0) }},
	{"docker.startTimeout", "ECS_CONTAINER_START_TIMEOUT", "How long Docker may take to start a container.", func(a *Agent) field { return duration(&a.Docker.StartTimeout, second, 0) }},
	{"docker.createTimeout", "ECS_CONTAINER_CREATE_TIMEOUT", "How long Docker may take to create a container.", func(a *Agent) field { return duration(&a.Docker.CreateTimeout, second, 0) }},
	{"docker.pullTimeout", "", "How long a pull may take.", func(a *Agent) field { return duration(&a.Docker.PullTimeout, second, 0) }},
	{"docker.disablePrivileged", "ECS_DISABLE_PRIVILEGED", "Whether task definitions with a privileged container are refused. Such a container opens every GPU; ECS's default is false.", func(a *Agent) field { return yesNo(&a.Docker.DisablePrivileged) }},

	{"gpu.devRoot", "", "Where the GPUs' device nodes are.", func(a *Agent) field { return folder(&a.GPU.DevRoot) }},
	{"gpu.nvmlLibrary", "", "NVIDIA's management library; empty finds the system's libnvidia-ml.so.1.", func(a *Agent) field { return optionalPath(&a.GPU.NVMLLibrary) }},
	{"gpu.reserve", "", "MiB of each GPU kept for its MPS server and given to no task.", func(a *Agent) field { return number(&a.GPU.ReserveMiB, "MiB", 0, 1<<20) }},
	{"gpu.sampleEvery", "", "How often use of the GPUs is read.", func(a *Agent) field { return duration(&a.GPU.SampleEvery, tenth, 0) }},

	{"mps.controlBinary", "", "NVIDIA's control program: a path, or a name found through mps.path.", func(a *Agent) field {
		return text(&a.MPS.ControlBinary, "a name or an absolute path", func(s string) bool {
			return s != "" && (isPath(s) || !strings.ContainsAny(s, "/\x00"))
		})
	}},
	{"mps.path", "", "PATH of the daemons, through which they find nvidia-cuda-mps-server.", func(a *Agent) field { return searchPath(&a.MPS.Path, false) }},
	{"mps.libraryPath", "", "LD_LIBRARY_PATH of the daemons, through which servers find libcuda.so.1.", func(a *Agent) field { return searchPath(&a.MPS.LibraryPath, true) }},
	{"mps.probeEvery", "", "How often each daemon is asked something.", func(a *Agent) field { return duration(&a.MPS.ProbeEvery, tenth, 0) }},
	{"mps.probeTimeout", "", "How long an answer may take before the daemon counts as wedged.", func(a *Agent) field { return duration(&a.MPS.ProbeTimeout, tenth, 0) }},
	{"mps.startTimeout", "", "How long a daemon may take to answer after its start.", func(a *Agent) field { return duration(&a.MPS.StartTimeout, tenth, 0) }},
	{"mps.serverStartTimeout", "", "How long an MPS server may take to be ready.", func(a *Agent) field { return duration(&a.MPS.ServerStartTimeout, tenth, 0) }},
	{"mps.budget.failures", "", "At how many failures of its daemon or server within the window a GPU is quarantined.", func(a *Agent) field { return number(&a.MPS.Budget.Failures, "", 1, 1_000_000) }},
	{"mps.budget.window", "", "The window in which failures count.", func(a *Agent) field { return duration(&a.MPS.Budget.Window, second, 0) }},
	{"mps.onDaemonLoss", "", "What becomes of a GPU's tasks when its daemon is lost: drain lets them run until the deadline, restart stops them at once.", func(a *Agent) field { return word(&a.MPS.OnDaemonLoss, LossDrain, LossRestart) }},
	{"mps.drainDeadline", "", "How long tasks of a lost daemon may run on before they are stopped.", func(a *Agent) field { return duration(&a.MPS.DrainDeadline, tenth, 0) }},

	{"task.cleanupAfter", "ECS_ENGINE_TASK_CLEANUP_WAIT_DURATION", "How long the containers of a stopped task are kept.", func(a *Agent) field { return duration(&a.Task.CleanupAfter, second, 0) }},
	{"task.pidsLimit", "ECS_TASK_PIDS_LIMIT", "Most processes and threads of a task; 0 for no limit.", func(a *Agent) field { return number(&a.Task.PidsLimit, "processes", 0, 4194304) }},
	// The kernel's bounds of cpu.cfs_period_us.
	{"task.cpuPeriod", "ECS_CGROUP_CPU_PERIOD", "The period over which a task's CPU limit is counted.", func(a *Agent) field { return duration(&a.Task.CPUPeriod, time.Millisecond, time.Second) }},

	{"reserved.memory", "ECS_RESERVED_MEMORY", "MiB of the machine's memory that tasks do not get.", func(a *Agent) field { return number(&a.Reserved.MemoryMiB, "MiB", 0, 1<<30) }},
	{"reserved.cpu", "", "CPU units of the machine that tasks do not get; 1024 are one vCPU.", func(a *Agent) field { return number(&a.Reserved.CPU, "CPU units", 0, 1<<30) }},
	{"reserved.ports", "ECS_RESERVED_PORTS", "TCP ports of the machine that tasks do not get.", func(a *Agent) field { return ports(&a.Reserved.Ports) }},
	{"reserved.udpPorts", "ECS_RESERVED_PORTS_UDP", "UDP ports of the machine that tasks do not get.", func(a *Agent) field { return ports(&a.Reserved.UDPPorts) }},
}

// ecsSays turns a value that ECS operators write into berth's word for it.
var ecsSays = map[string]map[string]string{
	"ECS_LOGLEVEL": {"warning": "warn", "crit": "error", "critical": "error"},
}

// notHonoured are names of the ECS agent that berth knows and does not honour,
// with the reason. They are warned of, as is any other ECS_ name.
var notHonoured = map[string]string{
	"ECS_AGENT_CONFIG_FILE_PATH":                   "berth reads a YAML file, named on its command line",
	"ECS_APPARMOR_CAPABLE":                         "Docker knows it by itself",
	"ECS_AVAILABLE_LOGGING_DRIVERS":                "what Docker has is available",
	"ECS_AWSVPC_BLOCK_IMDS":                        "berth has no awsvpc networking",
	"ECS_BACKEND_HOST":                             "berth does not speak to AWS",
	"ECS_CHECKPOINT":                               "berth always keeps its state, in stateDir",
	"ECS_DISABLE_DOCKER_HEALTH_CHECK":              "health checks of a task definition are always run",
	"ECS_DISABLE_IMAGE_CLEANUP":                    "berth removes no images",
	"ECS_DISABLE_METRICS":                          "set metricsAddress to nothing",
	"ECS_ENABLE_CONTAINER_METADATA":                "berth writes no metadata files",
	"ECS_ENABLE_GPU_SUPPORT":                       "GPUs are always supported where there are any",
	"ECS_ENABLE_SPOT_INSTANCE_DRAINING":            "berth does not watch for Spot interruptions yet",
	"ECS_ENABLE_TASK_CPU_MEM_LIMIT":                "limits of a task are always set",
	"ECS_ENABLE_TASK_ENI":                          "berth has no awsvpc networking",
	"ECS_ENABLE_TASK_IAM_ROLE":                     "berth gives no AWS credentials",
	"ECS_ENABLE_TASK_IAM_ROLE_NETWORK_HOST":        "berth gives no AWS credentials",
	"ECS_ENGINE_AUTH_DATA":                         "berth logs in to no registry",
	"ECS_ENGINE_AUTH_TYPE":                         "berth logs in to no registry",
	"ECS_ENGINE_TASK_CLEANUP_WAIT_DURATION_JITTER": "stopped tasks are removed at task.cleanupAfter, without jitter",
	"ECS_EXTERNAL":                                 "every machine of berth is its operator's own",
	"ECS_HOST_DATA_DIR":                            "the agent is no container; set stateDir",
	"ECS_IMAGE_CLEANUP_INTERVAL":                   "berth removes no images",
	"ECS_IMAGE_MINIMUM_CLEANUP_AGE":                "berth removes no images",
	"ECS_LOGFILE":                                  "set logDir",
	"ECS_NUM_IMAGES_DELETE_PER_CYCLE":              "berth removes no images",
	"ECS_POLL_METRICS":                             "use of the GPUs is read every gpu.sampleEvery",
	"ECS_SELINUX_CAPABLE":                          "Docker knows it by itself",
	"ECS_TASK_METADATA_RPS_LIMIT":                  "berth has no task metadata endpoint yet",
	"ECS_UPDATES_ENABLED":                          "berth does not update itself",
	"ECS_WARM_POOLS_CHECK":                         "berth does not know warm pools yet",
}
