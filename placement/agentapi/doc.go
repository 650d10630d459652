// Package agentapi is the server's side of the agents' stream (api/agentpb): who may
// speak for an instance, what it is told, and when it counts as cut off.
//
//	             Hello                Hello nil
//	Connect ──────────────> named ───────────────> welcomed ──> ended ──> Gone
//	   │                      │                                  │
//	   └──> refused <─────────┘                     a refusal where there is a reason
//
// An instance has one stream. A second one of the same agent ends the first, and is not
// heard before Gone of the first has returned; one of another agent is refused for as
// long as the first was heard within the lease.
//
// Each stream has two goroutines, one that reads and one that writes, and nothing that
// one of them waits for delays the other. Reports are handed on one at a time: while one
// is handled the next ones wait in gRPC's window, at the agent in the end, and the
// silence clock stands still. Orders wait in a slot of one, the newest; what logs have
// to say waits behind them, in a place for each log. A stream over which nothing comes
// for the lease, or nothing can be sent, is cut off with its connection. Serve returns
// when the last goroutine has ended, and every Gone has been called.
package agentapi
