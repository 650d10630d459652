package engine

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/docker/docker/api/types/versions"
	"github.com/docker/docker/client"
	"go.uber.org/zap"
)

// DefaultHost is where Docker listens unless it was told otherwise.
const DefaultHost = client.DefaultDockerHost

// oldestAPI is Docker 20.10's, the oldest engine that berth works with.
const oldestAPI = "1.41"

// Engine is a connection to one Docker daemon.
type Engine struct {
	docker *client.Client
	host   string
	log    *zap.Logger

	mu     sync.Mutex
	pulled map[string]bool // references that this process pulled, for PullOnce
}

// Info is what the engine says about itself.
type Info struct {
	Version        string // 20.10.24
	API            string // negotiated: 1.41
	CgroupDriver   string // cgroupfs, systemd, none (rootless without delegation)
	CgroupVersion  string // 1, 2
	Runtimes       []string
	DefaultRuntime string
	CDI            bool // CDI device names can be granted
	CDISpecDirs    []string
	RootDir        string // /var/lib/docker
	LiveRestore    bool   // containers outlive a restart of Docker
	SwapLimit      bool   // the kernel limits swap
	Rootless       bool
	UserNamespace  bool // userns-remap
}

// Open connects to the Docker daemon at host (empty: the default socket) and
// pings it. The version of the API is negotiated: the newest that both know.
func Open(ctx context.Context, host string, log *zap.Logger) (*Engine, error) {
	if host == "" {
		host = DefaultHost
	}
	docker, err := client.NewClientWithOpts(client.WithHost(host), client.WithAPIVersionNegotiation())
	if err != nil {
		return nil, fmt.Errorf("docker host %q: %w; give a URL such as %s", host, err, DefaultHost)
	}
	e := &Engine{docker: docker, host: host, log: log, pulled: map[string]bool{}}
	if err := e.Ping(ctx); err != nil {
		docker.Close()
		return nil, err
	}
	if api := docker.ClientVersion(); versions.LessThan(api, oldestAPI) {
		docker.Close()
		return nil, fmt.Errorf("docker at %s speaks API %s; berth needs %s (Docker 20.10) or newer: upgrade Docker", host, api, oldestAPI)
	}
	return e, nil
}

// Ping asks whether Docker answers, within 10 s.
func (e *Engine) Ping(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	ping, err := e.docker.Ping(bounded)
	if err != nil {
		return fmt.Errorf("docker does not answer at %s: %w; start it (`systemctl start docker`) or set dockerHost to where it listens", e.host, err)
	}
	e.docker.NegotiateAPIVersionPing(ping)
	return nil
}

// Close ends the connection. Streams that were opened end with their contexts.
func (e *Engine) Close() error { return e.docker.Close() }

// Host is the URL that the engine was opened with.
func (e *Engine) Host() string { return e.host }

// Info asks the engine about itself.
func (e *Engine) Info(ctx context.Context) (Info, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	i, err := e.docker.Info(ctx)
	if err != nil {
		return Info{}, fmt.Errorf("docker info at %s: %w", e.host, err)
	}
	info := Info{
		Version:        i.ServerVersion,
		API:            e.docker.ClientVersion(),
		CgroupDriver:   i.CgroupDriver,
		CgroupVersion:  i.CgroupVersion,
		DefaultRuntime: i.DefaultRuntime,
		CDISpecDirs:    i.CDISpecDirs,
		RootDir:        i.DockerRootDir,
		LiveRestore:    i.LiveRestoreEnabled,
		SwapLimit:      i.SwapLimit,
		Rootless:       slices.ContainsFunc(i.SecurityOptions, func(s string) bool { return strings.Contains(s, "name=rootless") }),
		UserNamespace:  slices.ContainsFunc(i.SecurityOptions, func(s string) bool { return strings.Contains(s, "name=userns") }),
	}
	for name := range i.Runtimes {
		info.Runtimes = append(info.Runtimes, name)
	}
	slices.Sort(info.Runtimes)
	// Docker 20.10 takes a CDI request at create and fails only at start
	// ("could not select device driver"); from API 1.44 on an engine that has CDI
	// switched on names its folders.
	info.CDI = versions.GreaterThanOrEqualTo(info.API, "1.44") && len(i.CDISpecDirs) > 0
	return info, nil
}
