package agentpb_test

import (
	"testing"

	"github.com/berth-gpu/berth/api/agentpb"
)

func TestUnderstand(t *testing.T) {
	agent := func(protocol uint32) agentpb.Side {
		return agentpb.Side{Name: "berth-agent on i-1", Version: "1.4", Protocol: protocol}
	}
	server := func(protocol uint32) agentpb.Side {
		return agentpb.Side{Name: "this server", Version: "1.2", Protocol: protocol}
	}
	for _, test := range []struct {
		agent, server uint32
		says          string
	}{
		{1, 1, ""},
		{1, 2, ""},
		{2, 1, ""},
		{1, 3, "berth-agent on i-1 (berth 1.4) speaks protocol 1 and this server (berth 1.2) protocol 3, and no more than one apart is understood: upgrade berth-agent on i-1"},
		{3, 1, "this server (berth 1.2) speaks protocol 1 and berth-agent on i-1 (berth 1.4) protocol 3, and no more than one apart is understood: upgrade this server"},
		{1, 1<<32 - 1, "berth-agent on i-1 (berth 1.4) speaks protocol 1 and this server (berth 1.2) protocol 4294967295, and no more than one apart is understood: upgrade berth-agent on i-1"},
	} {
		for _, err := range []error{agentpb.Understand(agent(test.agent), server(test.server)), agentpb.Understand(server(test.server), agent(test.agent))} {
			if got := ""; err != nil {
				got = err.Error()
				if got != test.says {
					t.Errorf("agent %d, server %d: %q, want %q", test.agent, test.server, got, test.says)
				}
			} else if test.says != "" {
				t.Errorf("agent %d, server %d are understood", test.agent, test.server)
			}
		}
	}
}
