package agentapi

import (
	"context"
	"net"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
)

// rawCreds lets a handler close the connection that its stream came over. gRPC has no
// other way to be rid of a peer that reads nothing: the end of a stream waits behind the
// data that the peer does not take, and keeps it in memory.
type rawCreds struct {
	credentials.TransportCredentials
}

type rawInfo struct {
	credentials.AuthInfo
	conn net.Conn // below TLS, whose Close may wait for a peer
}

func (c rawCreds) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	return conn, rawInfo{info, raw}, nil
}

func (c rawCreds) Clone() credentials.TransportCredentials {
	return rawCreds{c.TransportCredentials.Clone()}
}

// hangUp closes the connection of a stream's context.
func hangUp(ctx context.Context) {
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(rawInfo); ok {
			info.conn.Close()
		}
	}
}
