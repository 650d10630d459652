package taskdef

import "strings"

// Standing is what becomes of a field.
type Standing string

// The three standings. There is no fourth: a field that was silently ignored
// would be a promise not kept.
const (
	Honoured Standing = "honoured" // berth does what it says
	Shown    Standing = "shown"    // accepted, kept and shown, and changes nothing
	Refused  Standing = "refused"  // a definition with it is not taken
)

// Field is one member of RegisterTaskDefinition's input. A row with everything
// below it in one standing speaks for all of that.
type Field struct {
	Path     string // containerDefinitions[].cpu
	Standing Standing
	Says     string
}

const (
	describeOnly = "is what DescribeTaskDefinition answers, not what a definition asks for; remove it"
	needsSecrets = "berth reads no secret store; mount a file or set the variable in environment"
	needsConnect = "for Service Connect, which berth does not have"
	needsAWS     = "an AWS role; kept for AWS tools, berth gives no credentials"
	needsNitro   = "trusted execution is of ECS Managed Instances"
)

// fields is every field, in the order in which people write them.
var fields = []Field{
	{"family", Honoured, "required; 1 to 255 letters, digits, - and _"},
	{"containerDefinitions", Honoured, "required; 1 to 10, of which one is essential"},
	{"cpu", Honoured, "the task's CPU: units (`512`) or vCPU (`0.5 vCPU`), 128 to 196608 units; a hard limit on its cgroup"},
	{"memory", Honoured, "the task's memory: MiB (`1024`) or GB (`1 GB`); a hard limit on its cgroup"},
	{"networkMode", Honoured, "bridge (the default), host or none; awsvpc is refused: berth has no elastic network interfaces"},
	{"pidMode", Honoured, "host, not on a shared GPU; task is refused"},
	{"ipcMode", Honoured, "host, not on a shared GPU, or none; task is refused"},
	{"volumes", Honoured, "of a folder of the machine or a Docker volume"},
	{"tags", Shown, "at most 50"},
	{"placementConstraints", Refused, "berth does not place by expressions yet; remove it"},
	{"requiresCompatibilities", Shown, "berth's machines are none of these"},
	{"executionRoleArn", Shown, needsAWS},
	{"taskRoleArn", Shown, needsAWS},
	{"runtimePlatform", Honoured, "only LINUX"},
	{"runtimePlatform.operatingSystemFamily", Honoured, "LINUX"},
	{"runtimePlatform.cpuArchitecture", Shown, "the image decides"},
	{"proxyConfiguration", Refused, "berth has no App Mesh proxy; remove it"},
	{"inferenceAccelerators", Refused, "Elastic Inference is no longer available; remove it"},
	{"ephemeralStorage", Refused, "ephemeral storage is sized on Fargate only; remove it"},
	{"enableFaultInjection", Refused, "berth takes no fault injection requests from containers; remove it"},
	{"trustedExecutionConfiguration", Refused, needsNitro + "; remove it"},

	{"containerDefinitions[].name", Honoured, "required; unique in the task; 1 to 255 letters, digits, - and _"},
	{"containerDefinitions[].image", Honoured, "required"},
	{"containerDefinitions[].command", Honoured, ""},
	{"containerDefinitions[].entryPoint", Honoured, ""},
	{"containerDefinitions[].workingDirectory", Honoured, "an absolute path"},
	{"containerDefinitions[].user", Honoured, "name or id, with `:group` or without"},
	{"containerDefinitions[].essential", Honoured, "true unless it says false; when an essential container stops, so does its task"},
	{"containerDefinitions[].cpu", Honoured, "CPU units: shares, and what placement counts where the task has no cpu"},
	{"containerDefinitions[].memory", Honoured, "MiB, at least 6: a hard limit"},
	{"containerDefinitions[].memoryReservation", Honoured, "MiB, at least 6 and at most memory: a soft limit, and what placement counts"},
	{"containerDefinitions[].resourceRequirements", Honoured, "at most one GPU requirement; one kind in a task"},
	{"containerDefinitions[].resourceRequirements[].type", Honoured, "GPU; InferenceAccelerator and NeuronDevice are refused"},
	{"containerDefinitions[].resourceRequirements[].value", Honoured, "whole GPUs: a number of at least 1, or ALL"},
	{"containerDefinitions[].resourceRequirements[].sharingStrategy", Honoured, "instead of value: part of one GPU"},
	{"containerDefinitions[].resourceRequirements[].sharingStrategy.nvidiaMps", Honoured, "all in a task share one GPU, and their memory is summed"},
	{"containerDefinitions[].resourceRequirements[].sharingStrategy.nvidiaMps.memory", Honoured, "required; MiB of GPU memory, at least 1; a cap on each process"},
	{"containerDefinitions[].resourceRequirements[].sharingStrategy.nvidiaMps.maxComputePercent", Honoured, "1 to 100; a ceiling, not a reservation"},
	{"containerDefinitions[].environment", Honoured, "not the variables that berth sets: CUDA_MPS_*, NVIDIA_VISIBLE_DEVICES, ..."},
	{"containerDefinitions[].environment[].name", Honoured, "required; once"},
	{"containerDefinitions[].environment[].value", Honoured, ""},
	{"containerDefinitions[].environmentFiles", Refused, "files of variables lie in Amazon S3, which berth does not read; use environment"},
	{"containerDefinitions[].secrets", Refused, needsSecrets},
	{"containerDefinitions[].dependsOn", Honoured, "without a cycle"},
	{"containerDefinitions[].dependsOn[].containerName", Honoured, "required; another container of the task"},
	{"containerDefinitions[].dependsOn[].condition", Honoured, "required; START, COMPLETE and SUCCESS (of one that is not essential), HEALTHY (of one with a healthCheck)"},
	{"containerDefinitions[].startTimeout", Honoured, "seconds, at least 1"},
	{"containerDefinitions[].stopTimeout", Honoured, "seconds between TERM and KILL, at least 1"},
	{"containerDefinitions[].restartPolicy", Honoured, "through the gate: no capped container restarts on a GPU that is not held"},
	{"containerDefinitions[].restartPolicy.enabled", Honoured, "required"},
	{"containerDefinitions[].restartPolicy.ignoredExitCodes", Honoured, "at most 50"},
	{"containerDefinitions[].restartPolicy.restartAttemptPeriod", Honoured, "seconds it must have run, 60 to 1800; 300 unless it says"},
	{"containerDefinitions[].healthCheck", Honoured, ""},
	{"containerDefinitions[].healthCheck.command", Honoured, "required; begins with CMD or CMD-SHELL"},
	{"containerDefinitions[].healthCheck.interval", Honoured, "seconds, 5 to 300"},
	{"containerDefinitions[].healthCheck.timeout", Honoured, "seconds, 2 to 60"},
	{"containerDefinitions[].healthCheck.retries", Honoured, "1 to 10"},
	{"containerDefinitions[].healthCheck.startPeriod", Honoured, "seconds, 0 to 300"},
	{"containerDefinitions[].portMappings", Honoured, "not with networkMode none"},
	{"containerDefinitions[].portMappings[].containerPort", Honoured, "required; 1 to 65535"},
	{"containerDefinitions[].portMappings[].hostPort", Honoured, "bridge: 0 or none for one that Docker chooses; host: none or the containerPort"},
	{"containerDefinitions[].portMappings[].protocol", Honoured, "tcp (the default) or udp"},
	{"containerDefinitions[].portMappings[].containerPortRange", Refused, "list each port by itself"},
	{"containerDefinitions[].portMappings[].name", Shown, needsConnect},
	{"containerDefinitions[].portMappings[].appProtocol", Shown, needsConnect},
	{"containerDefinitions[].mountPoints", Honoured, ""},
	{"containerDefinitions[].mountPoints[].sourceVolume", Honoured, "required; one of volumes"},
	{"containerDefinitions[].mountPoints[].containerPath", Honoured, "required; absolute; not the root, and on a shared GPU not in /run/berth/mps, where the client folder is"},
	{"containerDefinitions[].mountPoints[].readOnly", Honoured, ""},
	{"containerDefinitions[].readonlyRootFilesystem", Honoured, ""},
	{"containerDefinitions[].ulimits", Honoured, "each name once"},
	{"containerDefinitions[].ulimits[].name", Honoured, "required"},
	{"containerDefinitions[].ulimits[].softLimit", Honoured, "at most the hard limit; -1 for none"},
	{"containerDefinitions[].ulimits[].hardLimit", Honoured, "-1 for none"},
	{"containerDefinitions[].logConfiguration", Honoured, "Docker's own drivers"},
	{"containerDefinitions[].logConfiguration.logDriver", Honoured, "required; json-file, syslog, journald, gelf, fluentd or splunk; awslogs and awsfirelens are the ECS agent's and refused"},
	{"containerDefinitions[].logConfiguration.options", Honoured, "passed to the driver"},
	{"containerDefinitions[].logConfiguration.secretOptions", Refused, needsSecrets},
	{"containerDefinitions[].dockerLabels", Honoured, "no name that begins with berth. or com.amazonaws.ecs."},
	{"containerDefinitions[].dockerSecurityOptions", Honoured, "no-new-privileges, apparmor:PROFILE or label:VALUE"},
	{"containerDefinitions[].hostname", Honoured, ""},
	{"containerDefinitions[].dnsServers", Honoured, "addresses"},
	{"containerDefinitions[].dnsSearchDomains", Honoured, ""},
	{"containerDefinitions[].extraHosts", Honoured, ""},
	{"containerDefinitions[].extraHosts[].hostname", Honoured, "required"},
	{"containerDefinitions[].extraHosts[].ipAddress", Honoured, "required"},
	{"containerDefinitions[].interactive", Honoured, ""},
	{"containerDefinitions[].pseudoTerminal", Honoured, ""},
	{"containerDefinitions[].privileged", Honoured, "where docker.disablePrivileged is false, and never on a shared GPU: it can open every device"},
	{"containerDefinitions[].systemControls", Honoured, "namespaced ones; net.* not with networkMode host, the others not with ipcMode host"},
	{"containerDefinitions[].systemControls[].namespace", Honoured, "required"},
	{"containerDefinitions[].systemControls[].value", Honoured, "required"},
	{"containerDefinitions[].versionConsistency", Shown, "Docker pulls the tag each time, by docker.pullBehavior"},
	{"containerDefinitions[].links", Refused, "Docker's links are gone from its newer engines; use a network port"},
	{"containerDefinitions[].volumesFrom", Refused, "name a volume in volumes and mount it in both containers"},
	{"containerDefinitions[].disableNetworking", Honoured, ""},
	{"containerDefinitions[].credentialSpecs", Refused, "credential specs are of Active Directory; remove it"},
	{"containerDefinitions[].firelensConfiguration", Refused, "berth has no FireLens router; use logConfiguration"},
	{"containerDefinitions[].repositoryCredentials", Refused, "credentials of a registry are Docker's: use docker login on the machine"},

	{"containerDefinitions[].linuxParameters", Honoured, ""},
	{"containerDefinitions[].linuxParameters.capabilities", Honoured, ""},
	{"containerDefinitions[].linuxParameters.capabilities.add", Honoured, "on a shared GPU none that leads out of the container: ALL, DAC_READ_SEARCH, SYS_ADMIN, SYS_MODULE, SYS_RAWIO"},
	{"containerDefinitions[].linuxParameters.capabilities.drop", Honoured, ""},
	{"containerDefinitions[].linuxParameters.devices", Honoured, "not on a shared GPU, and never a GPU: those are asked for in resourceRequirements"},
	{"containerDefinitions[].linuxParameters.devices[].hostPath", Honoured, "required; below /dev"},
	{"containerDefinitions[].linuxParameters.devices[].containerPath", Honoured, ""},
	{"containerDefinitions[].linuxParameters.devices[].permissions", Honoured, ""},
	{"containerDefinitions[].linuxParameters.initProcessEnabled", Honoured, ""},
	{"containerDefinitions[].linuxParameters.sharedMemorySize", Honoured, "MiB of /dev/shm, at least 1"},
	{"containerDefinitions[].linuxParameters.tmpfs", Honoured, ""},
	{"containerDefinitions[].linuxParameters.tmpfs[].containerPath", Honoured, "required; absolute; as for mountPoints"},
	{"containerDefinitions[].linuxParameters.tmpfs[].size", Honoured, "required; MiB, at least 1"},
	{"containerDefinitions[].linuxParameters.tmpfs[].mountOptions", Honoured, ""},
	{"containerDefinitions[].linuxParameters.maxSwap", Honoured, "MiB on top of memory, which it needs"},
	{"containerDefinitions[].linuxParameters.swappiness", Honoured, "0 to 100, with maxSwap"},

	{"volumes[].name", Honoured, "required; unique; 1 to 255 letters, digits, - and _"},
	{"volumes[].host", Honoured, "a folder of the machine"},
	{"volumes[].host.sourcePath", Honoured, "absolute; never one that contains or lies in the run folder; none for an empty volume that lives as long as the task; on a shared GPU nothing that contains or lies in /dev, /proc, /sys or the sockets of Docker and containerd"},
	{"volumes[].dockerVolumeConfiguration", Honoured, "a Docker volume"},
	{"volumes[].dockerVolumeConfiguration.scope", Honoured, "task (the default): made and removed with the task; shared: stays"},
	{"volumes[].dockerVolumeConfiguration.autoprovision", Honoured, "of a shared one: made when it is missing"},
	{"volumes[].dockerVolumeConfiguration.driver", Honoured, ""},
	{"volumes[].dockerVolumeConfiguration.driverOpts", Honoured, "for the local driver a folder is held to the rules of host.sourcePath; on a shared GPU its type is tmpfs, nfs, cifs or a bind"},
	{"volumes[].dockerVolumeConfiguration.labels", Honoured, "no name that begins with berth. or com.amazonaws.ecs."},
	{"volumes[].configuredAtLaunch", Refused, "berth creates no Amazon EBS volumes; use host or dockerVolumeConfiguration"},
	{"volumes[].efsVolumeConfiguration", Refused, "mount the file system on the machine and name its folder in host.sourcePath"},
	{"volumes[].fsxWindowsFileServerVolumeConfiguration", Refused, "FSx for Windows File Server is of Windows machines"},
	{"volumes[].s3filesVolumeConfiguration", Refused, "mount the file system on the machine and name its folder in host.sourcePath"},
	{"tags[].key", Shown, "required; 1 to 128 characters; unique; no aws: prefix"},
	{"tags[].value", Shown, "at most 256 characters"},

	{"compatibilities", Refused, describeOnly},
	{"deleteRequestedAt", Refused, describeOnly},
	{"deregisteredAt", Refused, describeOnly},
	{"registeredAt", Refused, describeOnly},
	{"registeredBy", Refused, describeOnly},
	{"requiresAttributes", Refused, describeOnly},
	{"revision", Refused, describeOnly},
	{"status", Refused, describeOnly},
	{"taskDefinitionArn", Refused, describeOnly},
}

var byPath = func() map[string]Field {
	m := make(map[string]Field, len(fields))
	for _, f := range fields {
		m[f.Path] = f
	}
	return m
}()

// Fields returns every row of the table.
func Fields() []Field { return append([]Field(nil), fields...) }

// Lookup finds the row that speaks for a path: its own, or that of a refused
// or shown ancestor.
func Lookup(path string) (Field, bool) {
	f, ok := byPath[path]
	for at := path; !ok; {
		cut := strings.LastIndexByte(at, '.')
		if cut < 0 {
			return Field{}, false
		}
		at = strings.TrimRight(at[:cut], "[]{}")
		if f, ok = byPath[at]; ok && f.Standing == Honoured {
			return Field{}, false
		}
	}
	return f, true
}

// refusal is the table as reading uses it.
func refusal(shape string) string {
	if f := byPath[shape]; f.Standing == Refused {
		return "not taken: " + f.Says
	}
	return ""
}
