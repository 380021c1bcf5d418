package identity_test

import (
	"context"
	"crypto/tls"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/placement"
)

// handshake runs one over an in-memory connection and returns both results.
func handshake(t *testing.T, server, client *tls.Config) (sc, cc *tls.Conn, serverErr, clientErr error) {
	t.Helper()
	a, b := net.Pipe()
	t.Cleanup(func() { a.Close(); b.Close() })
	sc, cc = tls.Server(a, server), tls.Client(b, client)
	done := make(chan error, 1)
	go func() {
		err := sc.Handshake()
		if err != nil {
			a.Close()
		} else {
			_, err = sc.Write([]byte("x"))
		}
		done <- err
	}()
	clientErr = cc.Handshake()
	if clientErr == nil { // in TLS 1.3 a refusal arrives with the first read
		_, clientErr = cc.Read(make([]byte, 1))
	}
	if clientErr != nil {
		b.Close()
	}
	return sc, cc, <-done, clientErr
}

func TestTLS_RolesAndNames(t *testing.T) { // SEC-1
	ca, other := identitytest.New(t), identitytest.New(t)
	relay := ca.Identity(t, identity.RoleRelay, "r1")
	node := ca.Identity(t, identity.RoleNode, "node-1")
	sub := ca.Identity(t, identity.RoleSubscriber, "s")

	sc, cc, serverErr, clientErr := handshake(t, relay.ServerTLS(identity.RoleNode), node.ClientTLS(relay.Name()))
	require.NoError(t, serverErr)
	require.NoError(t, clientErr)
	name, err := identity.PeerName(sc.ConnectionState())
	require.NoError(t, err)
	require.Equal(t, node.Name(), name)
	name, err = identity.PeerName(cc.ConnectionState())
	require.NoError(t, err)
	require.Equal(t, relay.Name(), name)

	refused := func(server, client *tls.Config) {
		t.Helper()
		_, _, serverErr, clientErr := handshake(t, server, client)
		require.Error(t, serverErr)
		require.Error(t, clientErr)
	}
	refused(relay.ServerTLS(identity.RoleNode), sub.ClientTLS(relay.Name()))
	refused(relay.ServerTLS(identity.RoleNode), node.ClientTLS(identity.Name{Role: identity.RoleRelay, ID: "r2"}))
	refused(node.ServerTLS(), sub.ClientTLS(relay.Name()))
	refused(relay.ServerTLS(), other.Identity(t, identity.RoleNode, "node-1").ClientTLS(relay.Name()))
	plain := node.ClientTLS(relay.Name())
	plain.GetClientCertificate = nil
	refused(relay.ServerTLS(), plain)
	old := node.ClientTLS(relay.Name())
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	refused(relay.ServerTLS(), old)
}

func TestWorkloads_AreServedAndAreNoIdentity(t *testing.T) {
	ca := identitytest.New(t)
	node := ca.Node(t, "node-1", identity.Grant{"shop", "team-*"})
	ingress := ca.Identity(t, identity.RoleIngress, "i1")
	w := ca.Workloads(t, node, "shop", "team-a")
	require.ErrorIs(t, w.Ensure(t.Context(), "bank"), identity.ErrRefused) // DSC-2
	_, err := w.Get("bank")
	require.ErrorIs(t, err, identity.ErrNoCertificate)

	client := ingress.ClientTLS(ingress.Name())
	client.ServerName, client.VerifyConnection = placement.ServerName("shop"), nil
	_, cc, serverErr, clientErr := handshake(t, node.ServesWorkloads(w, identity.RoleIngress), client)
	require.NoError(t, serverErr)
	require.NoError(t, clientErr)
	_, err = identity.PeerName(cc.ConnectionState())
	require.ErrorIs(t, err, identity.ErrPeer, "a workload's certificate must not pass as its node")

	_, _, serverErr, clientErr = handshake(t, node.ServesWorkloads(w, identity.RoleNode), client)
	require.Error(t, serverErr)
	require.Error(t, clientErr)
	for _, sni := range []string{placement.ServerName("bank"), "", node.Name().ServerName()} {
		c := client.Clone()
		c.ServerName, c.InsecureSkipVerify = sni, true
		_, _, serverErr, _ = handshake(t, node.ServesWorkloads(w, identity.RoleIngress), c)
		require.Error(t, serverErr, sni)
	}

	// A workload's key pair is no client certificate.
	crt, err := w.Get("shop")
	require.NoError(t, err)
	stolen := ingress.ClientTLS(ingress.Name())
	stolen.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return crt, nil }
	_, _, serverErr, _ = handshake(t, ingress.ServerTLS(), stolen)
	require.Error(t, serverErr)

	// The cache answers after a restart without the CA.
	again, err := identity.Open(node.Dir())
	require.NoError(t, err)
	w2, err := again.Workloads(nil)
	require.NoError(t, err)
	require.NoError(t, w2.Ensure(t.Context(), "shop"))
}

func TestRevocation(t *testing.T) { // SEC-1
	ca := identitytest.New(t)
	relay := ca.Identity(t, identity.RoleRelay, "r1")
	node := ca.Identity(t, identity.RoleNode, "node-1")
	w := ca.Workloads(t, node, "shop")
	changed := relay.RevocationsChanged()
	_, err := ca.Revoke(node.Name())
	require.NoError(t, err)
	require.NoError(t, relay.SetRevoked(ca.Revocations()))
	<-changed

	refused := func(r *identity.Identity) {
		t.Helper()
		_, _, serverErr, clientErr := handshake(t, r.ServerTLS(), node.ClientTLS(r.Name()))
		require.Error(t, serverErr)
		require.Error(t, clientErr)
	}
	refused(relay)
	again, err := identity.Open(relay.Dir()) // after a restart without NATS
	require.NoError(t, err)
	refused(again)
	require.ErrorIs(t, w.Ensure(t.Context(), "other"), identity.ErrRefused)
	cert, err := w.Get("shop")
	require.NoError(t, err)
	require.True(t, relay.Revoked(cert.Leaf))

	fresh := ca.Identity(t, identity.RoleNode, "node-1") // joined anew
	_, _, serverErr, clientErr := handshake(t, relay.ServerTLS(), fresh.ClientTLS(relay.Name()))
	require.NoError(t, serverErr)
	require.NoError(t, clientErr)
}

func TestSign_NeedsTheKeyOfTheIdentity(t *testing.T) { // SEC-2
	ca := identitytest.New(t)
	a := ca.Identity(t, identity.RoleNode, "a")
	b := ca.Identity(t, identity.RoleNode, "b")
	// b sends a's certificate with its own proof.
	w, err := b.Workloads(signerFunc(func(ctx context.Context, csr []byte, req identity.SignRequest) ([]byte, error) {
		var err error
		req.Certificate, err = os.ReadFile(a.CertFile())
		require.NoError(t, err)
		return ca.Sign(ctx, csr, req)
	}))
	require.NoError(t, err)
	err = w.Ensure(t.Context(), "shop")
	require.ErrorIs(t, err, identity.ErrRefused)
	require.ErrorContains(t, err, "proof")
}

type signerFunc func(context.Context, []byte, identity.SignRequest) ([]byte, error)

func (f signerFunc) Sign(ctx context.Context, csr []byte, req identity.SignRequest) ([]byte, error) {
	return f(ctx, csr, req)
}

func TestRun_RenewsWithoutRestart(t *testing.T) { // SEC-1
	synctest.Test(t, func(t *testing.T) {
		ca := identitytest.New(t)
		relay := ca.Identity(t, identity.RoleRelay, "r1")
		node := ca.Node(t, "node-1", identity.Grant{"shop"})
		w := ca.Workloads(t, node, "shop")
		server, client := relay.ServerTLS(), node.ClientTLS(relay.Name())
		first, firstLeaf := node.Expires(), mustGet(t, w, "shop").Leaf.NotAfter

		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var down atomic.Bool
		down.Store(true)
		var reports atomic.Int64
		flaky := signerFunc(func(ctx context.Context, csr []byte, req identity.SignRequest) ([]byte, error) {
			if down.Load() {
				return nil, context.DeadlineExceeded
			}
			return ca.Sign(ctx, csr, req)
		})
		go node.Run(ctx, flaky, func(error) { reports.Add(1) })
		go relay.Run(ctx, ca, nil)
		go w.Run(ctx, nil)

		time.Sleep(61 * 24 * time.Hour) // synctest
		synctest.Wait()
		require.Equal(t, first, node.Expires())
		require.Positive(t, reports.Load())
		require.Less(t, reports.Load(), int64(1000))
		down.Store(false)
		time.Sleep(time.Hour)
		synctest.Wait()
		require.True(t, node.Expires().After(first))
		require.True(t, mustGet(t, w, "shop").Leaf.NotAfter.After(firstLeaf))
		require.Equal(t, identity.Grant{"shop"}, node.Grant())

		time.Sleep(30 * 24 * time.Hour) // the first certificates are over; the same configurations go on
		synctest.Wait()
		_, _, serverErr, clientErr := handshake(t, server, client)
		require.NoError(t, serverErr)
		require.NoError(t, clientErr)
		again, err := identity.Open(node.Dir())
		require.NoError(t, err)
		require.Equal(t, node.Expires(), again.Expires())
		cancel()
		synctest.Wait()
	})
}

func mustGet(t *testing.T, w *identity.WorkloadCertificates, name string) *tls.Certificate {
	t.Helper()
	c, err := w.Get(name)
	require.NoError(t, err)
	return c
}

func TestOpen_Refuses(t *testing.T) {
	_, err := identity.Open(t.TempDir())
	require.ErrorIs(t, err, identity.ErrNotJoined)

	ca := identitytest.New(t)
	node := ca.Identity(t, identity.RoleNode, "n")
	require.NoError(t, os.Chmod(node.KeyFile(), 0o640)) // SEC-3
	_, err = identity.Open(node.Dir())
	require.ErrorContains(t, err, "chmod 600")
	require.NoError(t, os.Chmod(node.KeyFile(), 0o600))
	other := ca.Identity(t, identity.RoleNode, "m")
	b, err := os.ReadFile(other.CertFile())
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(node.CertFile(), b, 0o644))
	_, err = identity.Open(node.Dir())
	require.ErrorContains(t, err, "does not belong to the key")
}

func TestCA_SurvivesRestartAndRefusesASecondProcess(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ca")
	ca, err := identity.OpenCA(dir)
	require.NoError(t, err)
	_, err = identity.OpenCA(dir)
	require.ErrorContains(t, err, "in use")
	fp := ca.Fingerprint()
	_, err = ca.Local(t.TempDir(), identity.Name{Role: identity.RoleRelay, ID: "r"}, identity.Bootstrap{}, nil)
	require.NoError(t, err)
	_, err = ca.Revoke(identity.Name{Role: identity.RoleRelay, ID: "r"})
	require.NoError(t, err)
	require.NoError(t, ca.Close())
	ca, err = identity.OpenCA(dir)
	require.NoError(t, err)
	defer ca.Close()
	require.Equal(t, fp, ca.Fingerprint())
	require.Len(t, ca.Revocations(), 1)
	st, err := os.Stat(filepath.Join(dir, "ca.key"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), st.Mode().Perm())
}

func TestGrant(t *testing.T) {
	g, err := identity.ParseGrant("a, b*,c-*")
	require.NoError(t, err)
	for name, want := range map[string]bool{"a": true, "ab": false, "b": true, "bx": true, "c-1": true, "c": false, "A": false, "b.x": false, "": false} {
		require.Equal(t, want, g.Allows(name), name)
	}
	for _, bad := range []string{"", "a,", "*a", "a**", "a b", "a/b", "A", "-*", ">"} {
		_, err := identity.ParseGrant(bad)
		require.ErrorIs(t, err, identity.ErrInvalidGrant, bad)
	}
	require.False(t, identity.Grant(nil).Allows("a"))
}
