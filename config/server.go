package config

import (
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Server is everything an operator can say about one placement server.
type Server struct {
	Cluster  string
	DataDir  string // the embedded store, and what else must survive a reboot
	Socket   string // the operator's API
	LogLevel string // debug, info, warn, error

	TrustDomain string // whose tasks may share a GPU: cluster, family, or tag: and the key of a task definition's tag

	Etcd    Etcd
	Agents  Agents
	Replace Replace

	Provider string // of new machines: none, dev
	Dev      Dev
}

// Etcd is an outside cluster that holds the store. Without endpoints the server
// runs a member of its own in DataDir.
type Etcd struct {
	Endpoints     []string // http://, https:// or unix://
	CA, Cert, Key string   // files; "" for none
}

// Agents is how the agents' streams are served, and when a silent one is lost.
type Agents struct {
	Listen   string // host:port, or unix: and an absolute path
	Cert     string // files, all three or none; none only where no other machine can reach Listen
	Key      string
	ClientCA string
	Lease    time.Duration // nothing heard for so long: AGENT_CONNECTIVITY is IMPAIRED
	Grace    time.Duration // and for so long after that: its tasks count as lost
}

// Replace is when an impaired machine is replaced, and how many at once.
type Replace struct {
	When          string // never, any, all, or a share of its GPUs as "50%"
	AtOnce        int    // percent of the fleet; one machine always may
	PerHour       int    // machines
	DrainDeadline time.Duration
	JoinTimeout   time.Duration
}

// Dev is provider dev: simulated machines, each a berth-agent of this machine.
type Dev struct {
	Dir          string
	GPUs         int
	GPUMemoryMiB int64
}

// Values of the server's settings that are one of a few words.
const (
	ReplaceNever = "never"
	ReplaceAny   = "any"
	ReplaceAll   = "all"

	TrustCluster = "cluster"
	TrustFamily  = "family"
	TrustTag     = "tag:" // and a key

	ProviderNone = "none"
	ProviderDev  = "dev"
)

// LoadServer reads the settings of a placement server: environ's
// BERTH_PLACEMENT_ names over the file at path over the defaults. An empty path
// reads no file. The error is Problems, where the file could be read at all:
// every one there is.
func LoadServer(path string, environ []string) (*Server, []Warning, error) {
	s := serverDefaults()
	l := newLoader(bind(serverPrefix, serverSettings, s))
	if err := l.read(path); err != nil {
		return nil, nil, err
	}
	given := l.environment(environ, func(name string) bool { return strings.HasPrefix(name, serverPrefix) })
	for _, r := range l.table {
		// What reads as if it were the server's. BERTH_SOCKET is the command's.
		name := envName("BERTH_", r.key)
		if _, ok := given[name]; ok && !slices.Contains(notSettings, name) {
			l.warnings = append(l.warnings, Warning{name, "it is for agents; the server reads " + r.env})
		}
	}
	l.serverTogether(s)
	if len(l.problems) > 0 {
		return nil, l.warnings, l.problems
	}
	return s, l.warnings, nil
}

// longestDataDir leaves room, in the 107 bytes of a socket's address, for the name
// of the embedded store's socket.
const longestDataDir = 90

// serverTogether are the rules over more than one setting.
func (l *loader) serverTogether(s *Server) {
	if n := len(s.DataDir); len(s.Etcd.Endpoints) == 0 && n > longestDataDir {
		l.late("dataDir", "takes %d bytes; want at most %d, so that the store's socket fits", n, longestDataDir)
	}
	if (s.Etcd.Cert == "") != (s.Etcd.Key == "") {
		l.late("etcd.cert", "give etcd.cert and etcd.key, or neither")
	}
	if s.Etcd.CA+s.Etcd.Cert != "" && slices.ContainsFunc(s.Etcd.Endpoints, func(e string) bool { return !strings.HasPrefix(e, "https://") }) {
		l.late("etcd.endpoints", "want https:// with etcd.ca or etcd.cert")
	}
	a := s.Agents
	switch given := len(slices.DeleteFunc([]string{a.Cert, a.Key, a.ClientCA}, func(s string) bool { return s == "" })); {
	case given > 0 && given < 3:
		l.late("agents.cert", "give agents.cert, agents.key and agents.clientCA, or none of them")
	case given == 0 && !isLocal(a.Listen):
		l.late("agents.listen", "other machines can reach it; give agents.cert, agents.key and agents.clientCA, or listen on loopback")
	}
	if s.Provider == ProviderDev && s.Dev.Dir == "" {
		l.late("dev.dir", "provider dev needs a folder for its machines")
	}
}

// isListen says whether s is host:port, or unix: and an absolute path.
func isListen(s string) bool {
	if path, ok := strings.CutPrefix(s, "unix:"); ok {
		return isPath(path)
	}
	return listenAddress.MatchString(s)
}

// isLocal says whether no other machine can reach what listens on s.
func isLocal(s string) bool {
	if strings.HasPrefix(s, "unix:") || strings.HasPrefix(s, "localhost:") {
		return true
	}
	a, err := netip.ParseAddrPort(s)
	return err == nil && a.Addr().IsLoopback()
}
