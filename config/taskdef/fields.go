package taskdef

// standing is what becomes of a field. There is no fourth: a field that was
// silently ignored would be a promise not kept.
type standing string

const (
	honoured standing = "honoured" // berth does what it says
	shown    standing = "shown"    // accepted, kept and shown, and changes nothing
	refused  standing = "refused"  // a definition with it is not taken
)

// field is one member of RegisterTaskDefinition's input. A row that is shown or
// refused speaks for everything below it.
type field struct {
	path     string // containerDefinitions[].cpu
	standing standing
	says     string
}

const (
	describeOnly = "is what DescribeTaskDefinition answers, not what a definition asks for; remove it"
	needsSecrets = "berth reads no secret store; mount a file or set the variable in environment"
	needsConnect = "for Service Connect, which berth does not have"
	needsAWS     = "an AWS role; kept for AWS tools, berth gives no credentials"
	needsNitro   = "trusted execution is of ECS Managed Instances"
)

// fields is every field, in the order in which people write them.
var fields = []field{
	{"family", honoured, "required; 1 to 255 letters, digits, - and _"},
	{"containerDefinitions", honoured, "required; 1 to 10, of which one is essential"},
	{"cpu", honoured, "the task's CPU: units (`512`) or vCPU (`0.5 vCPU`), 128 to 196608 units; a hard limit on its cgroup"},
	{"memory", honoured, "the task's memory: MiB (`1024`) or GB (`1 GB`); a hard limit on its cgroup"},
	{"networkMode", honoured, "bridge (the default), host or none; awsvpc is refused: berth has no elastic network interfaces"},
	{"pidMode", honoured, "host, not on a shared GPU; task is refused"},
	{"ipcMode", honoured, "host, not on a shared GPU, or none; task is refused"},
	{"volumes", honoured, "of a folder of the machine or a Docker volume"},
	{"tags", shown, "at most 50"},
	{"placementConstraints", refused, "berth does not place by expressions yet; remove it"},
	{"requiresCompatibilities", shown, "berth's machines are none of these"},
	{"executionRoleArn", shown, needsAWS},
	{"taskRoleArn", shown, needsAWS},
	{"runtimePlatform", honoured, "only LINUX"},
	{"runtimePlatform.operatingSystemFamily", honoured, "LINUX"},
	{"runtimePlatform.cpuArchitecture", shown, "the image decides"},
	{"proxyConfiguration", refused, "berth has no App Mesh proxy; remove it"},
	{"inferenceAccelerators", refused, "Elastic Inference is no longer available; remove it"},
	{"ephemeralStorage", refused, "ephemeral storage is sized on Fargate only; remove it"},
	{"enableFaultInjection", refused, "berth takes no fault injection requests from containers; remove it"},
	{"trustedExecutionConfiguration", refused, needsNitro + "; remove it"},

	{"containerDefinitions[].name", honoured, "required; unique in the task; 1 to 255 letters, digits, - and _"},
	{"containerDefinitions[].image", honoured, "required"},
	{"containerDefinitions[].command", honoured, ""},
	{"containerDefinitions[].entryPoint", honoured, ""},
	{"containerDefinitions[].workingDirectory", honoured, "an absolute path"},
	{"containerDefinitions[].user", honoured, "name or id, with `:group` or without"},
	{"containerDefinitions[].essential", honoured, "true unless it says false; when an essential container stops, so does its task"},
	{"containerDefinitions[].cpu", honoured, "CPU units: shares, and what placement counts where the task has no cpu"},
	{"containerDefinitions[].memory", honoured, "MiB, at least 6: a hard limit"},
	{"containerDefinitions[].memoryReservation", honoured, "MiB, at least 6 and at most memory: a soft limit, and what placement counts"},
	{"containerDefinitions[].resourceRequirements", honoured, "at most one GPU requirement; one kind in a task"},
	{"containerDefinitions[].resourceRequirements[].type", honoured, "GPU; InferenceAccelerator and NeuronDevice are refused"},
	{"containerDefinitions[].resourceRequirements[].value", honoured, "whole GPUs: a number of at least 1, or ALL"},
	{"containerDefinitions[].resourceRequirements[].sharingStrategy", honoured, "instead of value: part of one GPU"},
	{"containerDefinitions[].resourceRequirements[].sharingStrategy.nvidiaMps", honoured, "all in a task share one GPU, and their memory is summed"},
	{"containerDefinitions[].resourceRequirements[].sharingStrategy.nvidiaMps.memory", honoured, "required; MiB of GPU memory, at least 1; a cap on each process"},
	{"containerDefinitions[].resourceRequirements[].sharingStrategy.nvidiaMps.maxComputePercent", honoured, "1 to 100; a ceiling, not a reservation"},
	{"containerDefinitions[].environment", honoured, "not the variables that berth sets itself"},
	{"containerDefinitions[].environment[].name", honoured, "required; once"},
	{"containerDefinitions[].environment[].value", honoured, ""},
	{"containerDefinitions[].environmentFiles", refused, "files of variables lie in Amazon S3, which berth does not read; use environment"},
	{"containerDefinitions[].secrets", refused, needsSecrets},
	{"containerDefinitions[].dependsOn", honoured, "without a cycle"},
	{"containerDefinitions[].dependsOn[].containerName", honoured, "required; another container of the task"},
	{"containerDefinitions[].dependsOn[].condition", honoured, "required; START, COMPLETE and SUCCESS (of one that is not essential), HEALTHY (of one with a healthCheck)"},
	{"containerDefinitions[].startTimeout", honoured, "seconds, at least 1"},
	{"containerDefinitions[].stopTimeout", honoured, "seconds between TERM and KILL, at least 1"},
	{"containerDefinitions[].restartPolicy", honoured, "through the gate: no capped container restarts on a GPU that is not held"},
	{"containerDefinitions[].restartPolicy.enabled", honoured, "required"},
	{"containerDefinitions[].restartPolicy.ignoredExitCodes", honoured, "at most 50"},
	{"containerDefinitions[].restartPolicy.restartAttemptPeriod", honoured, "seconds it must have run, 60 to 1800; 300 unless it says"},
	{"containerDefinitions[].healthCheck", honoured, ""},
	{"containerDefinitions[].healthCheck.command", honoured, "required; begins with CMD or CMD-SHELL"},
	{"containerDefinitions[].healthCheck.interval", honoured, "seconds, 5 to 300"},
	{"containerDefinitions[].healthCheck.timeout", honoured, "seconds, 2 to 60"},
	{"containerDefinitions[].healthCheck.retries", honoured, "1 to 10"},
	{"containerDefinitions[].healthCheck.startPeriod", honoured, "seconds, 0 to 300"},
	{"containerDefinitions[].portMappings", honoured, "not with networkMode none"},
	{"containerDefinitions[].portMappings[].containerPort", honoured, "required; 1 to 65535"},
	{"containerDefinitions[].portMappings[].hostPort", honoured, "bridge: 0 or none for one that Docker chooses; host: none or the containerPort"},
	{"containerDefinitions[].portMappings[].protocol", honoured, "tcp (the default) or udp"},
	{"containerDefinitions[].portMappings[].containerPortRange", refused, "list each port by itself"},
	{"containerDefinitions[].portMappings[].name", shown, needsConnect},
	{"containerDefinitions[].portMappings[].appProtocol", shown, needsConnect},
	{"containerDefinitions[].mountPoints", honoured, ""},
	{"containerDefinitions[].mountPoints[].sourceVolume", honoured, "required; one of volumes"},
	{"containerDefinitions[].mountPoints[].containerPath", honoured, "required; absolute; not the root, and on a shared GPU not in /run/berth/mps, where the client folder is"},
	{"containerDefinitions[].mountPoints[].readOnly", honoured, ""},
	{"containerDefinitions[].readonlyRootFilesystem", honoured, ""},
	{"containerDefinitions[].ulimits", honoured, "each name once"},
	{"containerDefinitions[].ulimits[].name", honoured, "required"},
	{"containerDefinitions[].ulimits[].softLimit", honoured, "at most the hard limit; -1 for none"},
	{"containerDefinitions[].ulimits[].hardLimit", honoured, "-1 for none"},
	{"containerDefinitions[].logConfiguration", honoured, "Docker's own drivers"},
	{"containerDefinitions[].logConfiguration.logDriver", honoured, "required; json-file, syslog, journald, gelf, fluentd or splunk; awslogs and awsfirelens are the ECS agent's and refused"},
	{"containerDefinitions[].logConfiguration.options", honoured, "passed to the driver"},
	{"containerDefinitions[].logConfiguration.secretOptions", refused, needsSecrets},
	{"containerDefinitions[].dockerLabels", honoured, "no name that begins with berth. or com.amazonaws.ecs."},
	{"containerDefinitions[].dockerSecurityOptions", honoured, "no-new-privileges, apparmor:PROFILE or label:VALUE"},
	{"containerDefinitions[].hostname", honoured, ""},
	{"containerDefinitions[].dnsServers", honoured, "addresses"},
	{"containerDefinitions[].dnsSearchDomains", honoured, ""},
	{"containerDefinitions[].extraHosts", honoured, ""},
	{"containerDefinitions[].extraHosts[].hostname", honoured, "required"},
	{"containerDefinitions[].extraHosts[].ipAddress", honoured, "required"},
	{"containerDefinitions[].interactive", honoured, ""},
	{"containerDefinitions[].pseudoTerminal", honoured, ""},
	{"containerDefinitions[].privileged", honoured, "where docker.disablePrivileged is false, and never on a shared GPU: it can open every device"},
	{"containerDefinitions[].systemControls", honoured, "namespaced ones; net.* not with networkMode host, the others not with ipcMode host"},
	{"containerDefinitions[].systemControls[].namespace", honoured, "required"},
	{"containerDefinitions[].systemControls[].value", honoured, "required"},
	{"containerDefinitions[].versionConsistency", shown, "the tag is pulled by docker.pullBehavior"},
	{"containerDefinitions[].links", refused, "Docker's links are a thing of the past; publish a port and use that"},
	{"containerDefinitions[].volumesFrom", refused, "name a volume in volumes and mount it in both containers"},
	{"containerDefinitions[].disableNetworking", honoured, ""},
	{"containerDefinitions[].credentialSpecs", refused, "credential specs are of Active Directory; remove it"},
	{"containerDefinitions[].firelensConfiguration", refused, "berth has no FireLens router; use logConfiguration"},
	{"containerDefinitions[].repositoryCredentials", refused, "berth logs in to no registry; pull the image on the machine and set docker.pullBehavior to prefer-cached"},

	{"containerDefinitions[].linuxParameters", honoured, ""},
	{"containerDefinitions[].linuxParameters.capabilities", honoured, ""},
	{"containerDefinitions[].linuxParameters.capabilities.add", honoured, "on a shared GPU none that leads out of the container: ALL, DAC_READ_SEARCH, SYS_ADMIN, SYS_MODULE, SYS_RAWIO"},
	{"containerDefinitions[].linuxParameters.capabilities.drop", honoured, ""},
	{"containerDefinitions[].linuxParameters.devices", honoured, "not on a shared GPU, and never a GPU: those are asked for in resourceRequirements"},
	{"containerDefinitions[].linuxParameters.devices[].hostPath", honoured, "required; below /dev"},
	{"containerDefinitions[].linuxParameters.devices[].containerPath", honoured, ""},
	{"containerDefinitions[].linuxParameters.devices[].permissions", honoured, ""},
	{"containerDefinitions[].linuxParameters.initProcessEnabled", honoured, ""},
	{"containerDefinitions[].linuxParameters.sharedMemorySize", honoured, "MiB of /dev/shm, at least 1"},
	{"containerDefinitions[].linuxParameters.tmpfs", honoured, ""},
	{"containerDefinitions[].linuxParameters.tmpfs[].containerPath", honoured, "required; absolute; as for mountPoints"},
	{"containerDefinitions[].linuxParameters.tmpfs[].size", honoured, "required; MiB, at least 1"},
	{"containerDefinitions[].linuxParameters.tmpfs[].mountOptions", honoured, ""},
	{"containerDefinitions[].linuxParameters.maxSwap", honoured, "MiB on top of memory, which it needs"},
	{"containerDefinitions[].linuxParameters.swappiness", honoured, "0 to 100, with maxSwap"},

	{"volumes[].name", honoured, "required; unique; 1 to 255 letters, digits, - and _"},
	{"volumes[].host", honoured, "a folder of the machine"},
	{"volumes[].host.sourcePath", honoured, "absolute; never one that contains or lies in the run folder; none for an empty volume that lives as long as the task; on a shared GPU nothing that contains or lies in /dev, /proc, /sys or the sockets of Docker and containerd"},
	{"volumes[].dockerVolumeConfiguration", honoured, "a Docker volume"},
	{"volumes[].dockerVolumeConfiguration.scope", honoured, "task (the default): made and removed with the task; shared: stays"},
	{"volumes[].dockerVolumeConfiguration.autoprovision", honoured, "of a shared one: made when it is missing"},
	{"volumes[].dockerVolumeConfiguration.driver", honoured, ""},
	{"volumes[].dockerVolumeConfiguration.driverOpts", honoured, "for the local driver a folder is held to the rules of host.sourcePath; on a shared GPU its type is tmpfs, nfs, cifs or a bind"},
	{"volumes[].dockerVolumeConfiguration.labels", honoured, "no name that begins with berth. or com.amazonaws.ecs."},
	{"volumes[].configuredAtLaunch", refused, "berth creates no Amazon EBS volumes; use host or dockerVolumeConfiguration"},
	{"volumes[].efsVolumeConfiguration", refused, "mount the file system on the machine and name its folder in host.sourcePath"},
	{"volumes[].fsxWindowsFileServerVolumeConfiguration", refused, "FSx for Windows File Server is of Windows machines"},
	{"volumes[].s3filesVolumeConfiguration", refused, "mount the file system on the machine and name its folder in host.sourcePath"},
	{"tags[].key", shown, "required; 1 to 128 characters; unique; no aws: prefix"},
	{"tags[].value", shown, "at most 256 characters"},

	{"compatibilities", refused, describeOnly},
	{"deleteRequestedAt", refused, describeOnly},
	{"deregisteredAt", refused, describeOnly},
	{"registeredAt", refused, describeOnly},
	{"registeredBy", refused, describeOnly},
	{"requiresAttributes", refused, describeOnly},
	{"revision", refused, describeOnly},
	{"status", refused, describeOnly},
	{"taskDefinitionArn", refused, describeOnly},
}

var byPath = func() map[string]field {
	m := make(map[string]field, len(fields))
	for _, f := range fields {
		m[f.path] = f
	}
	return m
}()

// refusal is the table as reading uses it.
func refusal(shape string) string {
	if f := byPath[shape]; f.standing == refused {
		return "not taken: " + f.says
	}
	return ""
}
