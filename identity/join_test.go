package identity_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
)

// joiner serves the endpoint and returns its address.
func joiner(t *testing.T, ca *identitytest.CA) (string, *atomic.Int64) {
	t.Helper()
	joined := &atomic.Int64{}
	j := &identity.Joiner{
		CA: ca.CA, Identity: ca.Controller(t), Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
		Bootstrap: func() identity.Bootstrap { return identity.Bootstrap{NATS: []string{"tls://n:4222"}} },
		Joined:    func(identity.Member) { joined.Add(1) },
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- j.Serve(ctx, ln) }()
	t.Cleanup(func() { cancel(); <-done })
	return ln.Addr().String(), joined
}

func token(t *testing.T, ca *identitytest.CA, req identity.TokenRequest) string {
	t.Helper()
	text, _, err := ca.CreateToken(req)
	require.NoError(t, err)
	return text
}

func name(role identity.Role, id string) identity.Name { return identity.Name{Role: role, ID: id} }

func TestJoin(t *testing.T) { // SEC-1, DSC-2
	ca := identitytest.New(t)
	addr, joined := joiner(t, ca)
	text := token(t, ca, identity.TokenRequest{Role: identity.RoleNode, Grant: identity.Grant{"shop*"}})
	req := identity.JoinRequest{Token: text, Controller: addr, Name: name(identity.RoleNode, "node-1"), Dir: t.TempDir()}
	id, err := identity.Join(t.Context(), req)
	require.NoError(t, err)
	require.EqualValues(t, 1, joined.Load())
	require.Equal(t, identity.Grant{"shop*"}, id.Grant())
	require.Equal(t, []string{"tls://n:4222"}, id.Bootstrap().NATS)
	require.Equal(t, addr, id.Bootstrap().Controller)

	relay := ca.Identity(t, identity.RoleRelay, "r")
	_, _, serverErr, clientErr := handshake(t, relay.ServerTLS(identity.RoleNode), id.ClientTLS(relay.Name()))
	require.NoError(t, serverErr)
	require.NoError(t, clientErr)

	before, err := os.ReadFile(id.CertFile())
	require.NoError(t, err)
	_, err = identity.Join(t.Context(), req)
	require.ErrorContains(t, err, "once")
	after, err := os.ReadFile(id.CertFile())
	require.NoError(t, err)
	require.Equal(t, before, after, "a refused join leaves the identity alone")
	_, err = identity.Open(req.Dir)
	require.NoError(t, err)

	// Joining again with a good token replaces key and certificate.
	req.Token = token(t, ca, identity.TokenRequest{Role: identity.RoleNode, ID: "node-1"})
	again, err := identity.Join(t.Context(), req)
	require.NoError(t, err)
	require.Equal(t, identity.GrantAll(), again.Grant())
}

func TestJoin_Refusals(t *testing.T) { // SEC-1
	ca := identitytest.New(t)
	addr, joined := joiner(t, ca)
	ca.Identity(t, identity.RoleNode, "taken")
	node := identity.TokenRequest{Role: identity.RoleNode}
	short := token(t, ca, identity.TokenRequest{Role: identity.RoleNode, TTL: time.Nanosecond})
	revoked := token(t, ca, node)
	require.NoError(t, ca.RevokeToken(strings.Split(revoked, ".")[0]))
	good := token(t, ca, node)
	parts := strings.Split(good, ".")
	for label, tc := range map[string]struct {
		token string
		name  identity.Name
		want  string
	}{
		"expired":      {short, name(identity.RoleNode, "n"), "expired"},
		"revoked":      {revoked, name(identity.RoleNode, "n"), "unknown"},
		"wrong role":   {good, name(identity.RoleIngress, "n"), "not ingress"},
		"controller":   {good, name(identity.RoleController, "main"), "not controller"},
		"wrong id":     {token(t, ca, identity.TokenRequest{Role: identity.RoleNode, ID: "x"}), name(identity.RoleNode, "n"), `"x" only`},
		"taken id":     {good, name(identity.RoleNode, "taken"), "exists"},
		"wrong secret": {parts[0] + "." + strings.Repeat("0", 64) + "." + parts[2], name(identity.RoleNode, "n"), "unknown"},
		"garbage":      {"x.y.z", name(identity.RoleNode, "n"), "malformed"},
		"no advertise": {token(t, ca, identity.TokenRequest{Role: identity.RoleRelay}), name(identity.RoleRelay, "r"), "advertise"},
	} {
		_, err := identity.Join(t.Context(), identity.JoinRequest{Token: tc.token, Controller: addr, Name: tc.name, Dir: t.TempDir()})
		require.ErrorContains(t, err, tc.want, label)
	}
	require.Zero(t, joined.Load())
	for _, tok := range ca.Tokens() {
		require.Nil(t, tok.Hash)
		require.Empty(t, tok.Used)
	}
}

func TestJoin_NeverSendsTheSecretToAStranger(t *testing.T) { // SEC-1
	ca := identitytest.New(t)
	text := token(t, ca, identity.TokenRequest{Role: identity.RoleNode})
	var requests atomic.Int64
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { requests.Add(1) }))
	impostor := identitytest.New(t) // same names, another CA, which shows the real CA's certificate too
	srv.TLS = (&identity.Joiner{CA: impostor.CA, Identity: impostor.Controller(t)}).TLS()
	get := srv.TLS.GetCertificate
	real := ca.Controller(t)
	caPEM, err := os.ReadFile(real.CAFile())
	require.NoError(t, err)
	srv.TLS.GetCertificate = func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
		c, err := get(h)
		pair, _ := tls.X509KeyPair(append(pemOf(t, real.CertFile()), caPEM...), pemOf(t, real.KeyFile()))
		c.Certificate = append(c.Certificate, pair.Certificate[1])
		return c, err
	}
	srv.StartTLS()
	defer srv.Close()
	addr := srv.Listener.Addr().String()
	_, err = identity.Join(t.Context(), identity.JoinRequest{Token: text, Controller: addr, Name: name(identity.RoleNode, "n"), Dir: t.TempDir()})
	require.ErrorIs(t, err, identity.ErrPeer)
	require.Zero(t, requests.Load())

	// An ordinary identity of the right CA is not the controller either.
	node := ca.Identity(t, identity.RoleNode, "n")
	srv2 := httptest.NewUnstartedServer(srv.Config.Handler)
	pair, err := tls.X509KeyPair(append(pemOf(t, node.CertFile()), caPEM...), pemOf(t, node.KeyFile()))
	require.NoError(t, err)
	srv2.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
	srv2.StartTLS()
	defer srv2.Close()
	_, err = identity.Join(t.Context(), identity.JoinRequest{Token: text, Controller: srv2.Listener.Addr().String(), Name: name(identity.RoleNode, "n"), Dir: t.TempDir()})
	require.ErrorIs(t, err, identity.ErrPeer)
	require.Zero(t, requests.Load())
}

func pemOf(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return b
}

// endless is a body of 4 GB.
type endless struct {
	left int64
	read atomic.Int64
}

func (e *endless) Read(p []byte) (int, error) {
	if e.left <= 0 {
		return 0, io.EOF
	}
	n := copy(p, bytes.Repeat([]byte(" "), min(len(p), 32<<10)))
	e.left -= int64(n)
	e.read.Add(int64(n))
	return n, nil
}

func TestJoiner_BoundsBodies(t *testing.T) { // RLY-5
	ca := identitytest.New(t)
	addr, _ := joiner(t, ca)
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	url := "https://" + addr + identity.JoinPath
	huge := &endless{left: 4 << 30}
	resp, err := client.Post(url, "application/json", huge)
	if err == nil { // the server may cut the connection before its answer is read
		require.Equal(t, http.StatusRequestEntityTooLarge, resp.StatusCode)
		resp.Body.Close()
	}
	require.Less(t, huge.read.Load(), int64(64<<20))

	for body, want := range map[string]int{"": 400, "{": 400, "[]": 400, `{"name":{"role":"x","id":"y"}}`: 422, `{"name":{"role":"node","id":"../y"}}`: 422, `{"name":{"role":"node","id":"y"}}`: 422} {
		resp, err := client.Post(url, "application/json", strings.NewReader(body))
		require.NoError(t, err)
		require.Equal(t, want, resp.StatusCode, body)
		require.Equal(t, "application/problem+json", resp.Header.Get("Content-Type"))
		var p struct{ Code string }
		require.NoError(t, json.NewDecoder(resp.Body).Decode(&p))
		require.NotEmpty(t, p.Code)
		resp.Body.Close()
	}
	resp, err = client.Post(url, "text/plain", strings.NewReader("{}"))
	require.NoError(t, err)
	require.Equal(t, 415, resp.StatusCode)
	resp.Body.Close()
}

func TestCreateToken_Refuses(t *testing.T) {
	ca := identitytest.New(t)
	for _, req := range []identity.TokenRequest{
		{Role: identity.RoleController}, {Role: "boss"}, {Role: identity.RoleNode, ID: "A"},
		{Role: identity.RoleRelay, Grant: identity.GrantAll()}, {Role: identity.RoleNode, Grant: identity.Grant{"*x"}},
		{Role: identity.RoleNode, TTL: -1}, {Role: identity.RoleNode, TTL: 1000 * time.Hour * 24},
	} {
		_, _, err := ca.CreateToken(req)
		require.Error(t, err, req)
	}
	text := token(t, ca, identity.TokenRequest{Role: identity.RoleNode})
	secret := strings.Split(text, ".")[1]
	b, err := os.ReadFile(ca.LedgerFile())
	require.NoError(t, err)
	require.NotContains(t, string(b), secret) // SEC-3
}
