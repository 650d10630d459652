package stream

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	"github.com/berth-gpu/berth/api/agentpb"
	"github.com/berth-gpu/berth/config"
)

// connectLimit bounds a try, from the first packet to the server's Welcome.
const connectLimit = 5 * time.Second

// dial prepares a connection; the first call on it connects. Certificates are read
// anew each time, so that renewed ones are taken up.
func dial(s config.Upstream, address string) (*grpc.ClientConn, error) {
	options := []grpc.DialOption{
		grpc.WithNoProxy(), grpc.WithDisableServiceConfig(), grpc.WithDisableRetry(), grpc.WithIdleTimeout(0),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(agentpb.MaxMessage), grpc.MaxCallSendMsgSize(agentpb.MaxMessage)),
		// For a network that swallows packets; a server that is silent is noticed by its
		// lease. gRPC allows no shorter time.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
	}
	if path, ok := isSocket(address); ok {
		options = append(options, grpc.WithAuthority("localhost"), grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", path)
			}))
		return grpc.NewClient("passthrough:///localhost", options...)
	}
	secure := insecure.NewCredentials()
	if s.CA != "" {
		var err error
		if secure, err = certificates(s); err != nil {
			return nil, err
		}
	}
	options = append(options, grpc.WithTransportCredentials(secure),
		grpc.WithContextDialer(func(ctx context.Context, to string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", to)
		}))
	return grpc.NewClient("passthrough:///"+address, options...)
}

func certificates(s config.Upstream) (credentials.TransportCredentials, error) {
	pem, err := os.ReadFile(s.CA)
	if err != nil {
		return nil, fmt.Errorf("server.ca: %w", err)
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: x509.NewCertPool()}
	if !c.RootCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("server.ca: %s holds no certificate in PEM", s.CA)
	}
	if s.Cert != "" {
		own, err := tls.LoadX509KeyPair(s.Cert, s.Key)
		if err != nil {
			return nil, fmt.Errorf("server.cert, server.key: %w", err)
		}
		c.Certificates = []tls.Certificate{own}
	}
	return credentials.NewTLS(c), nil
}
