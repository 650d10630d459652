package agentapi

import (
	"slices"

	"github.com/berth-gpu/berth/api/agentpb"
)

// outbox is what waits to be sent: the newest orders, and one place for each log. So it
// is bounded however slowly the agent reads.
type outbox struct {
	orders *agentpb.Orders
	asks   []*ask
}

// ask is what is to be said of one log.
type ask struct {
	id      uint64
	request *agentpb.LogRequest // nil once it was sent
	more    uint64              // bytes
	cancel  bool
}

// next takes the next message out; nil: there is none. Orders go first.
func (o *outbox) next() *agentpb.FromServer {
	if orders := o.orders; orders != nil {
		o.orders = nil
		return &agentpb.FromServer{Is: &agentpb.FromServer_Orders{Orders: orders}}
	}
	if len(o.asks) == 0 {
		return nil
	}
	a := o.asks[0]
	o.asks = slices.Delete(o.asks, 0, 1)
	switch {
	case a.cancel:
		return &agentpb.FromServer{Is: &agentpb.FromServer_LogCancel{LogCancel: &agentpb.LogCancel{Id: a.id}}}
	case a.request != nil:
		request := a.request
		a.request = nil
		return &agentpb.FromServer{Is: &agentpb.FromServer_Log{Log: request}}
	default:
		more := a.more
		a.more = 0
		return &agentpb.FromServer{Is: &agentpb.FromServer_LogMore{LogMore: &agentpb.LogMore{Id: a.id, Bytes: more}}}
	}
}

// ask puts a log in the queue, once.
func (o *outbox) ask(a *ask) {
	if !slices.Contains(o.asks, a) {
		o.asks = append(o.asks, a)
	}
}

// cancel says that a log is not wanted any more: nothing at all where the agent has not
// been asked yet.
func (o *outbox) cancel(a *ask) {
	a.cancel = true
	if a.request == nil {
		o.ask(a)
		return
	}
	if i := slices.Index(o.asks, a); i >= 0 {
		o.asks = slices.Delete(o.asks, i, i+1)
	}
}
