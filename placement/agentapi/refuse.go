package agentapi

import (
	"fmt"
	"regexp"

	"github.com/berth-gpu/berth/api/agentpb"
)

// The rule of the agent's own setting "instance".
var instanceName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}$`)

const longest = 256 // bytes of what an agent says of itself in one word

// judge is why a Hello is refused whoever else is here; nil: it is not. The distance of
// protocols comes first: beyond it the other fields need not mean what they do here.
func judge(hello *agentpb.Hello, server agentpb.Side, cluster string) *agentpb.Refusal {
	if hello.GetProtocol() == 0 {
		return invalid("the first message has to be a Hello with its protocol, of a berth-agent: is it one that connects here?")
	}
	agent := agentpb.Side{Name: "berth-agent", Version: hello.Version, Protocol: hello.Protocol}
	if err := agentpb.Understand(agent, server); err != nil {
		return &agentpb.Refusal{Code: agentpb.Refusal_PROTOCOL, Says: err.Error()}
	}
	if !instanceName.MatchString(hello.Instance) {
		return invalid("instance is %.100q, and has to be 1 to 63 letters, digits and any of \"-_.\": set instance in the agent's settings", hello.Instance)
	}
	if hello.AgentId == "" {
		return invalid("agent_id is empty: is it a berth-agent that connects here?")
	}
	for _, word := range []struct{ name, value string }{
		{"agent_id", hello.AgentId}, {"boot_id", hello.BootId}, {"version", hello.Version},
	} {
		if len(word.value) > longest {
			return invalid("%s has %d bytes, and may have %d: is it a berth-agent that connects here?", word.name, len(word.value), longest)
		}
	}
	if hello.Cluster != cluster {
		return &agentpb.Refusal{Code: agentpb.Refusal_CLUSTER, Says: fmt.Sprintf(
			"the agent of %s is of cluster %.100q and this server of %q: set cluster to the same in both, or the agent's server.address to its own cluster's",
			hello.Instance, hello.Cluster, cluster)}
	}
	return nil
}

func invalid(format string, args ...any) *agentpb.Refusal {
	return &agentpb.Refusal{Code: agentpb.Refusal_INVALID, Says: fmt.Sprintf(format, args...)}
}

func nameInUse(instance string) *agentpb.Refusal {
	return &agentpb.Refusal{Code: agentpb.Refusal_NAME_IN_USE, Says: fmt.Sprintf(
		"another agent speaks for instance %s: give each machine a name of its own (instance in the agent's settings); if that one is gone for good, this one is taken once its lease has run out", instance)}
}

func notLeader() *agentpb.Refusal {
	return &agentpb.Refusal{Code: agentpb.Refusal_NOT_LEADER, Says: "this server does not lead, or its term has ended: try another one, or this one again in a moment"}
}

func stopping() *agentpb.Refusal {
	return &agentpb.Refusal{Code: agentpb.Refusal_NOT_LEADER, Says: "this server is stopping: try another one, or this one again in a moment"}
}
