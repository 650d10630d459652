package stream

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/berth-gpu/berth/api/agentpb"
	"github.com/berth-gpu/berth/config"
)

// authority signs certificates for 127.0.0.1 and writes them into its folder.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t, dir: t.TempDir()}
	a.cert, a.key = a.sign("ca", true)
	return a
}

func (a *authority) path(name string) string { return filepath.Join(a.dir, name+".pem") }

func (a *authority) sign(name string, ca bool) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: ca, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	parent, signer := a.cert, a.key
	if ca {
		parent, signer = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	for path, b := range map[string]*pem.Block{a.path(name): {Type: "CERTIFICATE", Bytes: der}, a.path(name + "-key"): {Type: "EC PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(b), 0o600); err != nil {
			a.t.Fatal(err)
		}
	}
	if c, err = x509.ParseCertificate(der); err != nil {
		a.t.Fatal(err)
	}
	return c, key
}

func TestCertificates(t *testing.T) {
	ours, others := newAuthority(t), newAuthority(t)
	for _, a := range []*authority{ours, others} {
		a.sign("server", false)
		a.sign("agent", false)
	}
	pair, err := tls.LoadX509KeyPair(ours.path("server"), ours.path("server-key"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(ours.cert)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &server{t: t, peers: make(chan *peer, 16), grpc: grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{
		Certificates: []tls.Certificate{pair}, ClientCAs: roots, ClientAuth: tls.RequireAndVerifyClientCert})))}
	agentpb.RegisterAgentsServer(s.grpc, s)
	go s.grpc.Serve(l)
	t.Cleanup(s.grpc.Stop)

	for _, tt := range []struct {
		name    string
		ca, by  *authority
		missing bool
		says    string
	}{
		{name: "both are known", ca: ours, by: ours},
		{name: "a strange server", ca: others, by: ours, says: "certificate signed by unknown authority"},
		{name: "a strange agent", ca: ours, by: others, says: "unknown certificate authority"},
		{name: "a file that is not there", ca: ours, by: ours, missing: true, says: "server.cert, server.key: open "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := newMachine()
			c := &client{settings: config.Upstream{Address: []string{l.Addr().String()}, CA: tt.ca.path("ca"), Cert: tt.by.path("agent"), Key: tt.by.path("agent-key")},
				cluster: "c", instance: "m-1", version: "test", log: zap.NewNop(), agent: m.port()}
			if tt.missing {
				c.settings.Cert += ".gone"
			}
			start(t, c)
			if tt.says == "" {
				s.next().welcome(nil).report("a report", func(r *agentpb.Report) bool { return r.Full })
				return
			}
			until(t, "the agent says why", func() bool { return strings.Contains(m.says().Says, tt.says) })
		})
	}
}
