// Package agentpb is the stream between agents and the placement server:
// agent.proto and the Go that protoc makes of it.
package agentpb


// Protocol is the version that this code speaks. A peer that is one apart is
// understood: fields are only ever added within it. One that is further apart is
// refused, with a sentence that says which side to upgrade.
const Protocol = 1
