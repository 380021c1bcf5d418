package api_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/opfield/availability/api"
	"github.com/opfield/availability/api/apitest"
	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/bus/bustest"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/placement"
)

const (
	soon = 10 * time.Second
	poll = 10 * time.Millisecond
)

type setup struct {
	t      *testing.T
	ca     *identitytest.CA
	nats   *bustest.Server
	socket string
	client *http.Client
}

func start(t *testing.T) *setup {
	t.Helper()
	return startWith(t, nil, bustest.Logger(t))
}

func startWith(t *testing.T, engine api.Availability, log *slog.Logger) *setup {
	t.Helper()
	srv := apitest.Start(t, engine, log)
	s := &setup{t: t, ca: srv.CA, nats: srv.NATS, socket: srv.Socket}
	s.client = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", s.socket)
	}}}
	t.Cleanup(s.client.CloseIdleConnections)
	return s
}

// call sends a request; a problem is returned as its code and field.
func (s *setup) call(method, path string, body any, out any) string {
	s.t.Helper()
	b, err := json.Marshal(body)
	require.NoError(s.t, err)
	if raw, ok := body.(string); ok {
		b = []byte(raw)
	}
	req, err := http.NewRequest(method, "http://opfield"+path, bytes.NewReader(b))
	require.NoError(s.t, err)
	resp, err := s.client.Do(req)
	require.NoError(s.t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(s.t, err)
	if resp.StatusCode/100 != 2 {
		require.Equal(s.t, "application/problem+json", resp.Header.Get("Content-Type"))
		var p api.Problem
		require.NoError(s.t, json.Unmarshal(text, &p))
		require.Equal(s.t, resp.StatusCode, p.Status)
		if len(p.Errors) > 0 {
			return string(p.Code) + " " + p.Errors[0].Field
		}
		return string(p.Code)
	}
	if out != nil {
		require.NoError(s.t, json.Unmarshal(text, out))
	}
	return ""
}

func TestRoutes(t *testing.T) { // RTE-11, API-1
	s := start(t)
	require.Empty(t, s.call("PUT", "/v1/routes/b", map[string]any{"name": "b", "created": 99}, nil))
	require.Empty(t, s.call("PUT", "/v1/routes/a", map[string]any{"name": "a"}, nil))
	var applied api.Applied
	body := map[string]any{"routes": []any{map[string]any{"name": "b", "port": 1}, map[string]any{"name": "c"}, map[string]any{"name": "a"}}}
	require.Empty(t, s.call("POST", "/v1/routes", body, &applied))
	require.Equal(t, api.Applied{Added: []string{"c"}, Changed: []string{"b"}, Unchanged: []string{"a"}}, applied)
	created := func() map[string]float64 {
		var list struct {
			Routes []struct {
				Name    string
				Created float64
			}
		}
		require.Empty(t, s.call("GET", "/v1/routes", nil, &list))
		out := map[string]float64{}
		for _, r := range list.Routes {
			out[r.Name] = r.Created
		}
		return out
	}
	require.Equal(t, map[string]float64{"b": 1, "a": 2, "c": 3}, created(), "age is the server's, and kept")

	for want, body := range map[string]any{
		"ROUTE_NAME_INVALID routes[1].name":     map[string]any{"routes": []any{map[string]any{"name": "new"}, map[string]any{"name": "B A D"}}},
		"ROUTE_NAME_DUPLICATE routes[1].name":   map[string]any{"routes": []any{map[string]any{"name": "new"}, map[string]any{"name": "new"}}},
		"ROUTE_CERT_UNKNOWN routes[0].tls.cert": map[string]any{"routes": []any{map[string]any{"name": "new", "tls": map[string]any{"cert": "no"}}}},
		"REQUEST_MALFORMED":                     "{",
	} {
		require.Equal(t, want, s.call("POST", "/v1/routes", body, nil))
	}
	require.Equal(t, "REQUEST_MALFORMED", s.call("POST", "/v1/routes", `{"routes":[],"extra":1}`, nil))
	require.Equal(t, "REQUEST_TOO_LARGE", s.call("POST", "/v1/routes", `{"routes":["`+strings.Repeat("x", 9<<20)+`"]}`, nil))
	require.Equal(t, "ROUTE_NAME_MISMATCH name", s.call("PUT", "/v1/routes/x", map[string]any{"name": "y"}, nil))
	require.Len(t, created(), 3, "a refused list stores nothing")
	require.Empty(t, s.call("DELETE", "/v1/routes/b", nil, nil))
	require.Equal(t, "NOT_FOUND", s.call("DELETE", "/v1/routes/b", nil, nil))
	require.Equal(t, "NOT_FOUND", s.call("GET", "/v1/nothing", nil, nil))
	require.Len(t, created(), 2)
}

// pair makes a certificate good from..to for the names.
func pair(t *testing.T, from, to time.Time, names ...string) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: from, NotAfter: to, DNSNames: names}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &k.PublicKey, k)
	require.NoError(t, err)
	kd, err := x509.MarshalPKCS8PrivateKey(k)
	require.NoError(t, err)
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: kd}))
}

func TestCerts(t *testing.T) { // RTE-13, SEC-3
	s := start(t)
	now := time.Now()
	cert, key := pair(t, now.Add(-time.Hour), now.Add(24*time.Hour), "example.com")
	_, other := pair(t, now, now.Add(time.Hour), "example.com")
	expired, expiredKey := pair(t, now.Add(-2*time.Hour), now.Add(-time.Hour), "example.com")
	later, laterKey := pair(t, now.Add(48*time.Hour), now.Add(72*time.Hour), "example.com")
	nameless, namelessKey := pair(t, now.Add(-time.Hour), now.Add(time.Hour))
	up := func(c, k string) api.CertUpload { return api.CertUpload{Certificate: c, Key: k} }
	require.Empty(t, s.call("PUT", "/v1/certs/example.com", up(cert, key), nil))
	read := func() []byte {
		all, err := s.nats.Controller.ReadBucket(t.Context(), bus.BucketCerts)
		require.NoError(t, err)
		return all["example.com"]
	}
	stored := read()
	_, err := tls.X509KeyPair(stored, stored)
	require.NoError(t, err)

	for want, u := range map[string]api.CertUpload{
		"CERT_KEY_MISMATCH key":          up(cert, other),
		"CERT_EXPIRED certificate":       up(expired, expiredKey),
		"CERT_NOT_YET_VALID certificate": up(later, laterKey),
		"CERT_NAMES_MISSING certificate": up(nameless, namelessKey),
		"CERT_INVALID certificate":       up("nonsense", key),
		"CERT_KEY_INVALID key":           up(cert, "nonsense"),
	} {
		require.Equal(t, want, s.call("PUT", "/v1/certs/example.com", u, nil))
	}
	require.Equal(t, "CERT_INVALID certificate", s.call("PUT", "/v1/certs/example.com", up(cert+key, key), nil))
	require.Equal(t, "CERT_INVALID certificate", s.call("PUT", "/v1/certs/example.com", up(cert+cert[:60], key), nil))
	require.Equal(t, "CERT_NAME_INVALID name", s.call("PUT", "/v1/certs/..%2f", up(cert, key), nil))
	require.Equal(t, stored, read(), "what was good is kept")

	var list struct{ Certs []api.Cert }
	require.Empty(t, s.call("GET", "/v1/certs", nil, &list))
	require.Len(t, list.Certs, 1)
	require.Equal(t, []string{"example.com"}, list.Certs[0].Names)
	b, err := json.Marshal(list)
	require.NoError(t, err)
	require.NotContains(t, string(b), "PRIVATE")

	require.Empty(t, s.call("PUT", "/v1/routes/r", map[string]any{"name": "r", "tls": map[string]any{"cert": "example.com"}}, nil))
	require.Equal(t, "CERT_IN_USE", s.call("DELETE", "/v1/certs/example.com", nil, nil))
	require.Empty(t, s.call("DELETE", "/v1/routes/r", nil, nil))
	require.Empty(t, s.call("DELETE", "/v1/certs/example.com", nil, nil))
}

func TestTokensAndIdentities(t *testing.T) { // SEC-1
	s := start(t)
	var tok api.NewToken
	require.Empty(t, s.call("POST", "/v1/tokens", api.TokenOrder{Role: identity.RoleNode, Workloads: "a,b*", TTL: "5m"}, &tok))
	require.Equal(t, identity.Grant{"a", "b*"}, tok.For.Grant)
	require.True(t, strings.HasSuffix(tok.Text, s.ca.Fingerprint()))
	require.Equal(t, "TOKEN_REQUEST_INVALID ttl", s.call("POST", "/v1/tokens", api.TokenOrder{Role: identity.RoleNode, TTL: "x"}, nil))
	require.Equal(t, "TOKEN_REQUEST_INVALID workloads", s.call("POST", "/v1/tokens", api.TokenOrder{Role: identity.RoleNode, Workloads: "A"}, nil))
	require.Equal(t, "TOKEN_REQUEST_INVALID", s.call("POST", "/v1/tokens", api.TokenOrder{Role: identity.RoleController}, nil))
	require.Empty(t, s.call("DELETE", "/v1/tokens/"+tok.For.ID, nil, nil))
	require.Equal(t, "TOKEN_UNKNOWN", s.call("DELETE", "/v1/tokens/"+tok.For.ID, nil, nil))

	require.Equal(t, "IDENTITY_NOT_REVOKED", s.call("POST", "/v1/identities/revoke", identity.Name{Role: identity.RoleNode, ID: "x"}, nil))
	s.ca.Identity(t, identity.RoleNode, "x")
	require.Empty(t, s.call("POST", "/v1/identities/revoke", identity.Name{Role: identity.RoleNode, ID: "x"}, nil))
	require.Len(t, s.ca.Revocations(), 1)
}

func TestListen_OwnerOnly(t *testing.T) { // SEC-4
	s := start(t)
	st, err := os.Stat(s.socket)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), st.Mode().Perm())
	_, err = api.Listen(s.socket)
	require.ErrorContains(t, err, "in use")

	// Whatever the mode, another user is not admitted.
	require.NoError(t, os.Chmod(s.socket, 0o666))
	for _, dir := range []string{filepath.Dir(s.socket), filepath.Dir(filepath.Dir(s.socket))} {
		require.NoError(t, os.Chmod(dir, 0o755))
	}
	require.Zero(t, os.Geteuid(), "this test needs root")
	got := make(chan error, 1)
	go func() { got <- callAs(65534, s.socket) }()
	require.ErrorIs(t, <-got, io.EOF)
	go func() { got <- callAs(0, s.socket) }()
	require.NoError(t, <-got)
}

// callAs connects as another user and waits for an answer. It spoils its
// thread, which ends with the goroutine.
func callAs(uid uintptr, socket string) error {
	runtime.LockOSThread()
	keep := ^uintptr(0)
	if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, keep, uid, keep); errno != 0 {
		return errno
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: socket}); err != nil {
		return err
	}
	if _, err := unix.Write(fd, []byte("GET /v1/tokens HTTP/1.1\r\nHost: x\r\n\r\n")); err != nil {
		return io.EOF // already cut off
	}
	n, err := unix.Read(fd, make([]byte, 16))
	if n <= 0 {
		return io.EOF
	}
	return err
}

// A full disk is not the store's fault.
func TestFilesOfTheController(t *testing.T) { // API-1
	s := start(t)
	require.NoError(t, os.RemoveAll(filepath.Dir(s.ca.LedgerFile())))
	require.Equal(t, "INTERNAL", s.call("POST", "/v1/tokens", api.TokenOrder{Role: identity.RoleRelay, TTL: "1h"}, nil))
}

func TestStatusAndEvents(t *testing.T) { // LOS-1, API-3, EVT-5
	s := start(t)
	nodeConn := s.nats.Conn(t, s.ca.Identity(t, identity.RoleNode, "node-1"))
	ctx, stop := context.WithCancel(t.Context())
	stopped := make(chan error, 1)
	go func() {
		stopped <- nodeConn.PublishStatus(ctx, func() bus.Status { return bus.Status{Version: "v1", Node: &bus.NodeStatus{Docker: "ok"}} })
	}()
	id := placement.ID{Workload: "shop", Node: "node-1"}
	require.NoError(t, nodeConn.PublishPlacement(t.Context(), placement.Event{
		Workload: "shop", Placement: id.String(), Node: "node-1", Kind: placement.KindContainer, Role: placement.RoleServing,
		Ready: true, State: placement.StateRunning, Ports: []placement.Port{{Port: 80, Protocol: placement.ProtocolHTTP}},
	}))
	require.Empty(t, s.call("PUT", "/v1/routes/r", map[string]any{"name": "r", "workload": "shop", "port": 80}, nil))

	state := func() api.NodeView {
		var rep api.Report
		require.Empty(t, s.call("GET", "/v1/status", nil, &rep))
		if len(rep.Nodes) != 1 || len(rep.Routes) != 1 || len(rep.Routes[0].Placements) != 1 {
			return api.NodeView{}
		}
		return rep.Nodes[0]
	}
	require.Eventually(t, func() bool { return state().State == api.Online }, soon, poll)
	require.Equal(t, "ok", state().Docker)

	resp, err := s.client.Get("http://opfield/v1/events?follow=true")
	require.NoError(t, err)
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	next := func(want string) {
		t.Helper()
		for lines.Scan() {
			if strings.Contains(lines.Text(), want) {
				return
			}
		}
		t.Fatalf("no event with %s", want)
	}
	next(placement.EventType)
	stop()
	<-stopped
	begin := time.Now()
	next(`"state":"offline"`) // no relay holds it
	require.InDelta(t, 5, time.Since(begin).Seconds(), 2.5)
	require.Equal(t, api.Offline, state().State)
}

func TestWorkloads(t *testing.T) { // DSC-3
	s := start(t)
	list := func() (out api.WorkloadList) {
		require.Empty(t, s.call("GET", "/v1/workloads", nil, &out))
		return out
	}
	b := s.nats.Conn(t, s.ca.Identity(t, identity.RoleNode, "b"))
	a := s.nats.Conn(t, s.ca.Identity(t, identity.RoleNode, "a"))
	require.Eventually(t, func() bool { return len(list().Warnings) == 2 }, soon, poll, "both have not told yet")
	tell := func(c *bus.Conn, name string) {
		bustest.Go(t, func(ctx context.Context) error {
			return c.PublishStatus(ctx, func() bus.Status { return bus.Status{Node: &bus.NodeStatus{Docker: "ok"}} })
		})
		bustest.Go(t, func(ctx context.Context) error {
			return c.PublishInventory(ctx, func() (bus.Inventory, bool) {
				return bus.Inventory{Node: "b", Omitted: 7, Workloads: []bus.InventoryEntry{{Name: name, Kind: placement.KindContainer, Containers: []bus.InventoryContainer{{Name: name, State: "running", Ports: []bus.InventoryPort{{Port: 80, Transport: "tcp"}}}}}}}, true
			})
		})
	}
	tell(b, "y")
	tell(a, "x")
	require.Eventually(t, func() bool {
		l := list()
		return len(l.Workloads) == 2 && len(l.Warnings) == 2 && strings.Contains(l.Warnings[0], "7 more")
	}, soon, poll)
	got := list().Workloads
	require.Equal(t, "a", got[0].Node, "a node speaks for itself only")
	require.Equal(t, "x", got[0].Name)
	require.Equal(t, "b", got[1].Node)
	require.False(t, got[1].Containers[0].Ports[0].Published.IsValid())
}
