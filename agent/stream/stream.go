// Package stream is the agent's side of the stream to a placement server: it hands
// the server's orders to the agent and reports what becomes of them.
//
// It holds no state that must survive: after a break both sides tell each other
// everything anew. What it sends is made from the agent's newest view, so there is no
// queue, and a server that reads slowly delays nothing but its own picture. Of what it
// hears the newest orders alone are obeyed. Run owns every goroutine and waits for
// them.
package stream

import (
	"context"
	"io"
	"math/rand/v2"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/berth-gpu/berth/agent"
	"github.com/berth-gpu/berth/config"
)

// Run keeps the agent connected to the server that the settings name until ctx ends,
// and returns its error. The agent works the same while no server can be reached.
func Run(ctx context.Context, a *agent.Agent, settings *config.Agent, version string, log *zap.Logger) error {
	c := &client{settings: settings.Server, cluster: settings.Cluster, instance: settings.Instance, version: version, log: log, agent: port{
		view: a.View, changed: a.Changed, want: a.Want, term: a.Term, heard: a.Heard, link: a.SetLink, logs: a.Logs,
	}}
	return c.run(ctx)
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

	said string // about the last ending, so that each is told once
}

// run opens one stream after the other, each until it breaks.
func (c *client) run(ctx context.Context) error {
	if err := c.waitForView(ctx); err != nil {
		return err
	}
	again := retry{addresses: len(c.settings.Address)}
	for {
		address := c.settings.Address[again.at]
		welcomed, end := c.session(ctx, address)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		c.tell(address, end)
		if end.how == retired {
			// What it ran is somebody else's by now.
			if _, err := c.agent.want(ctx, agent.Order{Fleet: true, Term: c.agent.term()}); err != nil && ctx.Err() == nil {
				c.log.Error("cannot stop the tasks of a retired machine, retrying", zap.Error(err))
			}
		}
		timer := time.NewTimer(again.next(end.how, welcomed, rand.Float64()))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
	}
}

// waitForView waits until the agent has looked at its machine.
func (c *client) waitForView(ctx context.Context) error {
	for {
		changed := c.agent.changed()
		if c.agent.view() != nil {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// tell says how a stream ended: to the view and the doctor, and in the log once.
func (c *client) tell(address string, end *ended) {
	l := agent.Link{Address: address, Says: end.Error(), Do: "check that berth server runs and that " + address + " is where it listens; tasks go on meanwhile"}
	if end.how == refused || end.how == retired {
		l.Refused, l.Do = true, "do what it says; berth-agent tries again by itself"
	}
	c.agent.link(l)
	say := c.log.Warn
	if l.Refused {
		say = c.log.Error
	}
	if said := end.Error(); said == c.said {
		say = c.log.Debug
	} else {
		c.said = said
	}
	say("no stream to the placement server, retrying", zap.String("server", address), zap.String("why", end.Error()))
}

func isSocket(address string) (path string, ok bool) { return strings.CutPrefix(address, "unix:") }
