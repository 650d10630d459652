package agentapi_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math/big"
	"net"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/berth-gpu/berth/api/agentpb"
	"github.com/berth-gpu/berth/placement/agentapi"
	"github.com/berth-gpu/berth/placement/agentapi/agentapitest"
)

func certificate(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	form := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"berth"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	der, err := x509.CreateCertificate(rand.Reader, form, form, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(parsed)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

// The same over what agents connect through: a unix socket, and TCP with certificates on
// both sides; two listeners of one server.
func TestSockets(t *testing.T) {
	before := runtime.NumGoroutine()
	cert, pool := certificate(t)
	secure := credentials.NewTLS(&tls.Config{ServerName: "berth", RootCAs: pool, Certificates: []tls.Certificate{cert}})
	for name, test := range map[string]struct {
		server *tls.Config
		agent  credentials.TransportCredentials
	}{
		"plaintext": {},
		"tls":       {&tls.Config{Certificates: []tls.Certificate{cert}, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert}, secure},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, agentapi.Options{Version: "1.0", Cluster: "c", Pulse: 50 * time.Millisecond, Lease: time.Second, TLS: test.server})
			r.server.SetTerm(7, true)
			var opts []grpc.DialOption
			if test.agent != nil {
				opts = append(opts, grpc.WithTransportCredentials(test.agent))
			}
			unix, err := net.Listen("unix", filepath.Join(t.TempDir(), "agents.sock"))
			if err != nil {
				t.Fatal(err)
			}
			tcp, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithCancel(t.Context())
			served := make(chan error, 2)
			for _, l := range []net.Listener{unix, tcp} {
				go func() { served <- r.server.Serve(ctx, l) }()
			}
			dial := func(target, instance, agentID string) *agentapitest.Agent {
				t.Helper()
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				t.Cleanup(cancel)
				a, err := agentapitest.Dial(ctx, target, agentapitest.Hello("c", instance, agentID), opts...)
				if err != nil {
					t.Fatal(err)
				}
				return a
			}
			over := []string{"unix:" + unix.Addr().String(), "passthrough:///" + tcp.Addr().String()}
			for _, target := range over {
				a := dial(target, "i-1", "a")
				if err := a.Report(&agentpb.Report{Full: true}); err != nil {
					t.Fatal(err)
				}
				r.server.Send("i-1", r.session("i-1"), &agentpb.Orders{Revision: 5})
				if orders, err := a.Orders(); err != nil || orders.Revision != 5 {
					t.Errorf("%s: orders %v, %v", target, orders, err)
				}
				a.Close()
			}
			// The second listener's stream displaces the first one's, one that is silent goes,
			// and one that is there when the server stops is told.
			first := dial(over[0], "i-2", "a")
			silent := dial(over[1], "i-2", "a")
			if err := last(first); err == nil {
				t.Error("the first one goes on")
			}
			if err := last(silent); err == nil {
				t.Error("the silent one goes on")
			}
			there := dial(over[1], "i-3", "a")
			stop()
			var refused *agentapitest.Refused
			if err := last(there); !errors.As(err, &refused) || refused.Code != agentpb.Refusal_NOT_LEADER {
				t.Errorf("at the end: %v", err)
			}
			for range over {
				if err := <-served; err != nil {
					t.Error(err)
				}
			}
			for _, a := range []*agentapitest.Agent{first, silent, there} {
				a.Close()
			}
		})
	}
	var left int
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if left = runtime.NumGoroutine(); left <= before {
			return
		}
	}
	all := make([]byte, 1<<20)
	t.Errorf("%d goroutines at first, %d now\n%s", before, left, all[:runtime.Stack(all, true)])
}

func TestServeSaysWhatItsListenerBrokeOn(t *testing.T) {
	r := newRig(t, agentapi.Options{Version: "1.0", Cluster: "c", Pulse: pulse, Lease: lease})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := r.server.Serve(t.Context(), l); err == nil {
		t.Error("nil")
	} else {
		t.Log(err)
	}
}
