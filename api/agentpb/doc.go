// Package agentpb is the stream between agents and the placement server: agent.proto
// and the Go that protoc makes of it (scripts/generate).
package agentpb

import "fmt"

// Protocol is the version that this code speaks. A peer that is one apart is
// understood: fields are only ever added within it. One that is further apart is
// refused, with a sentence that says which side to upgrade.
const Protocol = 1

// MaxMessage is the size in bytes of the largest message that either side takes. gRPC's
// own default of 4 MiB is less than the first orders of a full machine can be.
const MaxMessage = 32 << 20

// Side is one end of the stream, as it is named to people.
type Side struct {
	Name     string // berth-agent on i-1, this server
	Version  string
	Protocol uint32
}

// Understand is nil where the two sides are at most one protocol apart, else an error
// that says which to upgrade.
func Understand(a, b Side) error {
	older, newer := a, b
	if older.Protocol > newer.Protocol {
		older, newer = b, a
	}
	if newer.Protocol-older.Protocol <= 1 {
		return nil
	}
	return fmt.Errorf("%s (berth %s) speaks protocol %d and %s (berth %s) protocol %d, and no more than one apart is understood: upgrade %s",
		older.Name, older.Version, older.Protocol, newer.Name, newer.Version, newer.Protocol, older.Name)
}
