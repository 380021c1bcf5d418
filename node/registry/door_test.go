package registry

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/registry"
	"github.com/opfield/availability/registry/registrytest"
	"github.com/opfield/availability/relay"
	"github.com/opfield/availability/securelink"
)

// anything lets every node do everything with its own repository.
type anything struct{}

func (anything) MayPull(node, repository string) bool { return repository == "of-"+node }
func (anything) MayPush(node, repository string) bool { return repository == "of-"+node }

type rig struct {
	t      *testing.T
	ca     *identitytest.CA
	relays []securelink.RelayAddress
	dir    string
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// run runs fn until the returned function, or the test, ends.
func (r *rig) run(fn func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { fn(ctx) })
	stop = func() { cancel(); wg.Wait() }
	r.t.Cleanup(stop)
	return stop
}

// relay starts a relay; addr may be that of an earlier one.
func (r *rig) relay(id, addr string) (at string, stop func()) {
	cfg := relay.DefaultConfig()
	cfg.ID, cfg.Logger, cfg.TLS = id, quiet(), r.ca.Identity(r.t, identity.RoleRelay, id).ServerTLS()
	cfg.Authenticate = func(cs tls.ConnectionState) (relay.Peer, error) {
		n, err := identity.PeerName(cs)
		return relay.Peer{Role: string(n.Role), ID: n.ID}, err
	}
	s, err := relay.New(cfg)
	require.NoError(r.t, err)
	ln, err := net.Listen("tcp", addr)
	require.NoError(r.t, err)
	return ln.Addr().String(), r.run(func(ctx context.Context) { _ = s.Serve(ctx, ln) })
}

func (r *rig) peer(who *identity.Identity, cfg securelink.RelaysConfig) *securelink.Relays {
	cfg.TLS = func(relay string) *tls.Config {
		return who.ClientTLS(identity.Name{Role: identity.RoleRelay, ID: relay})
	}
	cfg.Instance, cfg.Logger = uint64(time.Now().UnixNano()), quiet()
	rs := securelink.NewRelays(cfg)
	rs.Set(r.relays)
	return rs
}

// controller starts the registry and its sessions.
func (r *rig) controller() (stop func()) {
	who := r.ca.Controller(r.t)
	s, err := registry.New(registry.Config{
		Dir: r.dir, Grants: anything{}, Identity: who, Logger: quiet(),
		Keep: func(context.Context) (map[string][]string, error) { return nil, registry.ErrUnknown },
	})
	require.NoError(r.t, err)
	links := &securelink.LinkSet{}
	links.Set([]securelink.Record{s.Record()})
	rs := r.peer(who, securelink.RelaysConfig{Links: links, Accept: s.Take})
	stopServer := r.run(func(ctx context.Context) { _ = s.Run(ctx) })
	stopRelays := r.run(rs.Run)
	return func() { stopRelays(); stopServer() }
}

func freePort(t *testing.T) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	return ln.Addr().String()
}

// node starts a node's sessions and its door.
func (r *rig) node(id string) *Door {
	who := r.ca.Identity(r.t, identity.RoleNode, id)
	var d *Door
	rs := r.peer(who, securelink.RelaysConfig{Links: &securelink.LinkSet{}, Accept: func(in *securelink.Incoming) { in.Refuse(securelink.NotRegistered) }, Up: func() { d.Try() }})
	var err error
	d, err = New(Config{Listen: freePort(r.t), Logger: quiet(), Dial: func(ctx context.Context) (net.Conn, error) {
		return rs.DialService(ctx, placement.ServiceRegistry, who.ClientTLS(identity.ControllerName()))
	}})
	require.NoError(r.t, err)
	r.run(rs.Run)
	r.run(func(ctx context.Context) { _ = d.Run(ctx) })
	return d
}

func newRig(t *testing.T, relays ...string) (*rig, []func()) {
	r := &rig{t: t, ca: identitytest.New(t), dir: t.TempDir()}
	var stops []func()
	for _, id := range relays {
		addr, stop := r.relay(id, "127.0.0.1:0")
		r.relays = append(r.relays, securelink.RelayAddress{ID: id, Addr: addr})
		stops = append(stops, stop)
	}
	return r, stops
}

func client(t *testing.T, d *Door) *registrytest.Client {
	c := &registrytest.Client{HTTP: &http.Client{Transport: &http.Transport{}}, Base: "http://" + d.cfg.Listen, User: user, Password: d.password}
	t.Cleanup(c.HTTP.CloseIdleConnections)
	return c
}

func reached(t *testing.T, d *Door) {
	t.Helper()
	require.Eventually(t, func() bool { return d.Check(t.Context()) == nil }, 15*time.Second, 5*time.Millisecond)
}

// RLY-1, IMG-1: a push and a pull through door, relay and link.
func TestDoor_PushPull(t *testing.T) {
	r, _ := newRig(t, "relay-1", "relay-2")
	r.controller()
	d := r.node("node-1")
	reached(t, d)
	c := client(t, d)
	digest, err := c.PushImage("of-node-1", "g1", `{}`, bytes.Repeat([]byte("layer"), 1<<20))
	require.NoError(t, err)
	n, err := c.Pull("of-node-1", digest)
	require.NoError(t, err)
	require.Greater(t, n, 5<<20)
	_, err = c.PushImage("of-node-2", "g1", `{}`)
	require.ErrorContains(t, err, "403")
}

// SEC: only the daemon that has the credentials, and only what a pull or a
// push needs.
func TestDoor_Refusals(t *testing.T) {
	r, _ := newRig(t, "relay-1")
	r.controller()
	d := r.node("node-1")
	reached(t, d)
	c := client(t, d)
	for _, bad := range []registrytest.Client{{}, {User: user}, {User: user, Password: "x"}, {User: "root", Password: d.password}} {
		bad.HTTP, bad.Base = c.HTTP, c.Base
		status, header, _, err := bad.Do("GET", "/v2/", "", nil)
		require.NoError(t, err)
		require.Equal(t, http.StatusUnauthorized, status)
		require.NotEmpty(t, header.Get("WWW-Authenticate"))
	}
	for request, want := range map[string]int{
		"DELETE /v2/of-node-1/manifests/x": http.StatusMethodNotAllowed, "GET /metrics": http.StatusNotFound,
		"GET /v2/_catalog": http.StatusMethodNotAllowed, "GET /v2/": http.StatusOK,
	} {
		method, path, _ := strings.Cut(request, " ")
		status, _, _, err := c.Do(method, path, "", nil)
		require.NoError(t, err)
		require.Equal(t, want, status, request)
	}
	for _, addr := range []string{"0.0.0.0:7447", "10.0.0.1:7447", "127.0.0.1:0", "localhost:7447", "", "127.0.0.1"} {
		require.Error(t, CheckListen(addr), addr)
	}
	require.NoError(t, CheckListen("[::1]:7447"))
}

// IMG-3: without relay or controller the answer says to try again, and it
// works once they are back.
func TestDoor_Away(t *testing.T) {
	r, relays := newRig(t, "relay-1")
	stop := r.controller()
	d := r.node("node-1")
	reached(t, d)
	c := client(t, d)
	digest, err := c.PushImage("of-node-1", "g1", `{}`, []byte("layer"))
	require.NoError(t, err)

	stop()
	status, header, body, err := c.Do("GET", "/v2/", "", nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.NotEmpty(t, header.Get("Retry-After"))
	var answer struct {
		Errors []struct{ Code, Message string }
	}
	require.NoError(t, json.Unmarshal(body, &answer))
	require.Equal(t, "UNAVAILABLE", answer.Errors[0].Code)
	require.Contains(t, answer.Errors[0].Message, "not registered")

	r.controller()
	_, err = c.Pull("of-node-1", digest)
	require.NoError(t, err, "the controller's registry keeps images over its restart")

	relays[0]()
	restarted := r.run(func(context.Context) { // in the middle of the next pull
		r.relay("relay-1", r.relays[0].Addr)
	})
	_, err = c.Pull("of-node-1", digest)
	restarted()
	require.NoError(t, err, "a relay's restart is waited for")
}

// RLY-6: with several relays the loss of one does not matter.
func TestDoor_LossOfARelay(t *testing.T) {
	r, relays := newRig(t, "relay-1", "relay-2")
	r.controller()
	d := r.node("node-1")
	reached(t, d)
	c := client(t, d)
	digest, err := c.PushImage("of-node-1", "g1", `{}`, []byte("layer"))
	require.NoError(t, err)
	for _, stop := range relays[:1] {
		stop()
	}
	for range 5 {
		_, err = c.Pull("of-node-1", digest)
		require.NoError(t, err)
		d.transport.CloseIdleConnections()
	}
}

func TestDoor_Names(t *testing.T) {
	d, err := New(Config{Listen: "127.0.0.1:7447", Logger: quiet()})
	require.NoError(t, err)
	image := placement.Image{Repository: "web", Digest: "sha256:1"}
	require.Equal(t, "127.0.0.1:7447/web@sha256:1", d.Reference(image))
	image.Digest = ""
	require.Equal(t, "127.0.0.1:7447/web", d.Reference(image))
	require.Equal(t, "127.0.0.1:7447/web:g3", d.PushReference("web", "g3"))
	data, err := base64.URLEncoding.DecodeString(d.Auth())
	require.NoError(t, err)
	require.Contains(t, string(data), d.password)
	other, err := New(Config{Listen: "127.0.0.1:7447", Logger: quiet()})
	require.NoError(t, err)
	require.NotEqual(t, d.Auth(), other.Auth(), "credentials are made per start")
	require.ErrorIs(t, d.Check(t.Context()), errStarting)
}

// A taken port is told and waited for.
func TestDoor_PortTaken(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	d, err := New(Config{Listen: ln.Addr().String(), Logger: quiet(), Dial: func(context.Context) (net.Conn, error) { return nil, io.EOF }})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	require.Eventually(t, func() bool {
		err := d.Check(ctx)
		return err != nil && strings.Contains(err.Error(), "address already in use")
	}, 5*time.Second, time.Millisecond)
	require.NoError(t, ln.Close())
	require.Eventually(t, func() bool { return errors.Is(d.Check(ctx), io.EOF) }, 10*time.Second, time.Millisecond)
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
}

// A node whose relay comes up late reaches the registry at once then.
func TestDoor_RelayComesUp(t *testing.T) {
	r, _ := newRig(t)
	at := freePort(t)
	r.relays = []securelink.RelayAddress{{ID: "relay-1", Addr: at}}
	r.controller()
	d := r.node("node-1")
	require.Eventually(t, func() bool { err := d.Check(t.Context()); return err != nil && !errors.Is(err, errStarting) }, 5*time.Second, time.Millisecond)
	r.relay("relay-1", at)
	reached(t, d)
}

// It is asked soon and then less often, and at once when a relay is there.
func TestDoor_AsksAgain(t *testing.T) {
	var mu sync.Mutex
	var asked []time.Time
	count := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(asked)
	}
	d, err := New(Config{Listen: freePort(t), Logger: quiet(), Dial: func(context.Context) (net.Conn, error) {
		mu.Lock()
		defer mu.Unlock()
		asked = append(asked, time.Now())
		return nil, io.EOF
	}})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	require.Eventually(t, func() bool { return count() == 4 }, 10*time.Second, time.Millisecond)
	begin := time.Now()
	d.Try()
	require.Eventually(t, func() bool { return count() == 5 }, 10*time.Second, time.Millisecond)
	require.Less(t, time.Since(begin), 500*time.Millisecond, "the next was due in 2 s")
	require.Eventually(t, func() bool { return count() == 6 }, 10*time.Second, time.Millisecond)
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	require.Less(t, asked[1].Sub(asked[0]), time.Second)
	require.Greater(t, asked[3].Sub(asked[2]), 900*time.Millisecond)
	require.Less(t, asked[5].Sub(asked[4]), 900*time.Millisecond)
}
