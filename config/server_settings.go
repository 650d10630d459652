package config

import (
	"regexp"
	"time"
)

// serverPrefix begins the server's names in the environment. No setting of the agent
// begins with it: BERTH_SERVER_ would meet those that name the agent's server.
const serverPrefix = "BERTH_PLACEMENT_"

// serverDefaults are the settings of a placement server that is told nothing.
func serverDefaults() *Server {
	return &Server{
		Cluster:  "default",
		DataDir:  "/var/lib/berth-server",
		Socket:   "/run/berth/server.sock",
		LogLevel: "info",
		Etcd:     Etcd{Endpoints: []string{}},
		Agents:   Agents{Listen: "127.0.0.1:9465", Lease: 10 * time.Second, Grace: time.Minute},
		Replace: Replace{
			When:          ReplaceAny,
			AtOnce:        10,
			PerHour:       10,
			DrainDeadline: 15 * time.Minute,
			JoinTimeout:   10 * time.Minute,
		},
		TrustDomain: TrustCluster,
		Provider:    ProviderNone,
		Dev:         Dev{GPUs: 2, GPUMemoryMiB: 81920},
	}
}

const port = `:(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])`

var (
	listenAddress = regexp.MustCompile(`^(?:[a-zA-Z0-9.-]*|\[[0-9a-fA-F:.]+\])` + port + `$`)
	etcdEndpoint  = regexp.MustCompile(`^(?:https?://(?:[a-zA-Z0-9.-]+|\[[0-9a-fA-F:.]+\])` + port + `|unix:///[^\x00\n]+)$`)
)

// serverSettings is the table of the server's settings.
var serverSettings = []setting[Server]{
	{"cluster", "", "The cluster of this server; agents of another one are refused.", func(s *Server) field {
		return matching(&s.Cluster, `1 to 255 letters, digits and any of "-_"`, `[a-zA-Z0-9_-]{1,255}`)
	}},
	{"dataDir", "", "The store, unless etcd.endpoints names another. One server has it to itself.", func(s *Server) field { return folder(&s.DataDir) }},
	{"socket", "", "Where berth's commands reach the server.", func(s *Server) field { return folder(&s.Socket) }},
	{"logLevel", "", "How much is logged.", func(s *Server) field { return word(&s.LogLevel, "debug", "info", "warn", "error") }},
	{"trustDomain", "", "Whose tasks may share a GPU: all of the cluster's, those of one family, or those with one value of a task definition's tag. Without that tag a family is on its own.", func(s *Server) field {
		return matching(&s.TrustDomain, `cluster, family, or tag: and a key, as "tag:team"`, `cluster|family|tag:[^\x00-\x1f]{1,128}`)
	}},

	{"etcd.endpoints", "", "An etcd cluster that holds the store instead of dataDir. Servers on the same one elect a leader.", func(s *Server) field {
		return texts(&s.Etcd.Endpoints, "https://host:port, http://host:port or unix:///path", etcdEndpoint.MatchString)
	}},
	{"etcd.ca", "", "File with the certificates that may sign etcd's.", func(s *Server) field { return optionalPath(&s.Etcd.CA) }},
	{"etcd.cert", "", "File with the server's certificate towards etcd.", func(s *Server) field { return optionalPath(&s.Etcd.Cert) }},
	{"etcd.key", "", "File with the key of etcd.cert.", func(s *Server) field { return optionalPath(&s.Etcd.Key) }},

	{"agents.listen", "", "Where agents connect. An address that other machines can reach needs agents.cert, agents.key and agents.clientCA.", func(s *Server) field {
		return text(&s.Agents.Listen, "host:port, or unix: and an absolute path", isListen)
	}},
	{"agents.cert", "", "File with the server's certificate towards agents.", func(s *Server) field { return optionalPath(&s.Agents.Cert) }},
	{"agents.key", "", "File with the key of agents.cert.", func(s *Server) field { return optionalPath(&s.Agents.Key) }},
	{"agents.clientCA", "", "File with the certificates that may sign agents'.", func(s *Server) field { return optionalPath(&s.Agents.ClientCA) }},
	{"agents.lease", "", "An agent that was not heard for so long is cut off: nothing is placed on its machine.", func(s *Server) field { return duration(&s.Agents.Lease, second, 0) }},
	{"agents.grace", "", "How long a cut-off agent may take to return before its tasks are placed elsewhere.", func(s *Server) field { return duration(&s.Agents.Grace, second, 0) }},

	{"replace.when", "", "When a machine with failed GPUs is replaced: any of them failed, all did, or the share of usable ones is below this.", func(s *Server) field {
		return matching(&s.Replace.When, `never, any, all, or a share from 1% to 100%, as "50%"`, `never|any|all|(?:[1-9][0-9]?|100)%`)
	}},
	{"replace.atOnce", "", "Percent of the machines that may be in replacement at a time; one always may.", func(s *Server) field { return number(&s.Replace.AtOnce, "percent", 1, 100) }},
	{"replace.perHour", "", "Most replacements begun within an hour.", func(s *Server) field { return number(&s.Replace.PerHour, "", 1, 1_000_000) }},
	{"replace.drainDeadline", "", "How long tasks of a machine in replacement may run on before they are stopped.", func(s *Server) field { return duration(&s.Replace.DrainDeadline, second, 0) }},
	{"replace.joinTimeout", "", "How long a new machine may take to join.", func(s *Server) field { return duration(&s.Replace.JoinTimeout, second, 0) }},

	{"provider", "", "Who makes new machines: nobody, or dev, which simulates them.", func(s *Server) field { return word(&s.Provider, ProviderNone, ProviderDev) }},
	{"dev.dir", "", "Folder of the simulated machines.", func(s *Server) field { return optionalPath(&s.Dev.Dir) }},
	{"dev.gpus", "", "GPUs of a simulated machine.", func(s *Server) field { return number(&s.Dev.GPUs, "", 1, 16) }},
	{"dev.gpuMemory", "", "MiB of memory of each simulated GPU.", func(s *Server) field { return number(&s.Dev.GPUMemoryMiB, "MiB", 1, 1<<24) }},
}
