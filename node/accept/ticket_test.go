package accept

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"io"
	"math/big"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A session is resumed again and again with the same ticket; a handshake that
// could not be resumed brings a new one.
func TestKeepsTicket(t *testing.T) {
	cert, pool := certificate(t)
	var now atomic.Int64
	now.Store(time.Now().UnixNano())
	clock := func() time.Time { return time.Unix(0, now.Load()) }
	base := &tls.Config{
		MinVersion: tls.VersionTLS13, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool, Time: clock,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &cert, nil },
	}
	base.GetConfigForClient = keepsTicket(base)
	cache := &countingCache{ClientSessionCache: tls.NewLRUClientSessionCache(4)}
	client := &tls.Config{ServerName: "web", RootCAs: pool, Certificates: []tls.Certificate{cert}, ClientSessionCache: cache, Time: clock}
	require.False(t, handshake(t, base, client), "the first")
	require.EqualValues(t, 1, cache.put.Load())
	kept, _ := cache.Get("web")
	for range 3 {
		cache.ClientSessionCache.Put("web", kept) // crypto/tls uses a ticket once, nginx often
		require.True(t, handshake(t, base, client))
	}
	require.EqualValues(t, 1, cache.put.Load())

	now.Add(int64(8 * 24 * time.Hour))
	old := &tls.Config{ServerName: "web", RootCAs: pool, Certificates: []tls.Certificate{cert}, ClientSessionCache: cache}
	cache.ClientSessionCache.Put("web", kept)
	require.False(t, handshake(t, base, old), "after eight days")
	require.EqualValues(t, 2, cache.put.Load())
}

type countingCache struct {
	tls.ClientSessionCache
	put atomic.Int64
}

func (c *countingCache) Put(key string, s *tls.ClientSessionState) {
	if s != nil {
		c.put.Add(1)
	}
	c.ClientSessionCache.Put(key, s)
}

// handshake reports whether the session was resumed.
func handshake(t *testing.T, server, client *tls.Config) bool {
	t.Helper()
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	s, c := tls.Server(a, server), tls.Client(b, client)
	done := make(chan error, 1)
	go func() {
		_, err := s.Write([]byte("x"))
		done <- err
	}()
	_, err := io.ReadFull(c, make([]byte, 1)) // the ticket comes before it
	require.NoError(t, err)
	require.NoError(t, <-done)
	return s.ConnectionState().DidResume
}

func certificate(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "web"}, DNSNames: []string{"web"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(30 * 24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	leaf, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, pool
}
