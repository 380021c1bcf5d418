package e2e

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/ingress"
	"github.com/opfield/availability/ingress/apply"
	"github.com/opfield/availability/ingress/endpoint"
	"github.com/opfield/availability/ingress/ingresstest"
	"github.com/opfield/availability/ingress/render"
	"github.com/opfield/availability/node/accept"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/relay"
	"github.com/opfield/availability/securelink"
	"github.com/opfield/availability/upstream"
)

// inprocess is the whole path in one process, behind a real nginx with the
// product's own configuration: for what must be timed to microseconds.
type inprocess struct {
	t      *testing.T
	dir    string
	source *ingresstest.Source
	set    *endpoint.Set
	in     *ingress.Ingress
	nodes  map[string]*inprocessNode
	port   uint16 // of nginx

	mu    sync.Mutex
	ready map[placement.LinkID]bool // as the relay says
}

// inprocessNode is a node with one placement of the workload "web".
type inprocessNode struct {
	name    string
	links   accept.Links
	target  netip.AddrPort
	counter uint64
}

func (n *inprocessNode) Target(placement.LinkID) (netip.AddrPort, bool) { return n.target, true }
func (n *inprocessNode) Failed(placement.LinkID, error)                 {}

func (n *inprocessNode) link() placement.LinkID {
	return placement.LinkID{Placement: placement.ID{Workload: "web", Node: n.name}, Port: 80}
}

// newInprocess starts one relay and one node for each application, and waits
// until nginx serves.
func newInprocess(t *testing.T, apps map[string]http.Handler) *inprocess {
	t.Helper()
	dir, err := os.MkdirTemp("", "opf")
	require.NoError(t, err)
	require.NoError(t, os.Chmod(dir, 0o755))
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	p := &inprocess{t: t, dir: dir, source: ingresstest.NewSource(), nodes: map[string]*inprocessNode{}, ready: map[placement.LinkID]bool{}}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	log := slog.New(slog.DiscardHandler)
	ca := identitytest.New(t)

	rc := relay.DefaultConfig()
	rc.ID, rc.TLS, rc.Logger = "relay-1", ca.Identity(t, identity.RoleRelay, "relay-1").ServerTLS(), log
	rc.Authenticate = func(cs tls.ConnectionState) (relay.Peer, error) {
		n, err := identity.PeerName(cs)
		return relay.Peer{Role: string(n.Role), ID: n.ID}, err
	}
	server, err := relay.New(rc)
	require.NoError(t, err)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	wg.Go(func() { _ = server.Serve(ctx, ln) })
	addrs := []securelink.RelayAddress{{ID: "relay-1", Addr: ln.Addr().String()}}
	relayTLS := func(id *identity.Identity) func(string) *tls.Config {
		return func(name string) *tls.Config { return id.ClientTLS(identity.Name{Role: identity.RoleRelay, ID: name}) }
	}

	for name, app := range apps {
		web := httptest.NewServer(app)
		t.Cleanup(web.Close)
		id := ca.Identity(t, identity.RoleNode, name)
		n := &inprocessNode{name: name, target: netip.MustParseAddrPort(web.Listener.Addr().String())}
		n.links.Relays = &securelink.LinkSet{}
		n.links.Acceptor = accept.New(accept.Config{
			TLS: id.ServesWorkloads(ca.Workloads(t, id, "web"), identity.RoleIngress), Targets: n, Drain: time.Minute, Logger: log,
		})
		rs := securelink.NewRelays(securelink.RelaysConfig{
			TLS: relayTLS(id), Instance: 1, Links: n.links.Relays, Accept: n.links.Acceptor.Accept, Logger: log,
		})
		rs.Set(addrs)
		wg.Go(func() { rs.Run(ctx) })
		wg.Go(func() { _ = n.links.Acceptor.Run(ctx) })
		p.nodes[name] = n
	}

	id := ca.Identity(t, identity.RoleIngress, "ingress-1")
	dial := securelink.NewRelays(securelink.RelaysConfig{TLS: relayTLS(id), Instance: 2, Watcher: p, Logger: log})
	dial.Set(addrs)
	wg.Go(func() { dial.Run(ctx) })
	p.set = endpoint.New(endpoint.Config{Dialer: dial, Drain: time.Second, Logger: log})
	cfg := p.ingressConfig(id)
	endpoints, err := endpoint.Listen(ctx, cfg.Render.EndpointPort)
	require.NoError(t, err)
	wg.Go(func() { _ = p.set.Serve(ctx, endpoints) })
	p.in, err = ingress.New(cfg)
	require.NoError(t, err)
	wg.Go(func() { _ = p.in.Run(ctx) })
	t.Cleanup(func() {
		stop, done := context.WithTimeout(context.Background(), 3*time.Second)
		defer done()
		_ = p.in.StopNginx(stop)
	})
	for _, n := range p.nodes {
		p.serve(n)
	}
	p.source.SetRoutes(t, upstream.Route{Name: "web", Hosts: []string{webHost}, Workload: "web", Port: 80})
	p.await(30*time.Second, "nginx is up to date", func() bool {
		s := p.in.Status()
		return s.Reload.Generation != "" && !s.Reload.Pending && len(s.Routes) == 1 && s.Routes[0].Open == len(apps)
	})
	return p
}

func (p *inprocess) ingressConfig(id *identity.Identity) ingress.Config {
	t := p.t
	binary, err := exec.LookPath("nginx")
	require.NoError(t, err, "nginx must be installed")
	version, err := exec.Command(binary, "-V").CombinedOutput()
	require.NoError(t, err)
	c := render.DefaultConfig()
	c.Build, err = render.ParseBuild(string(version))
	require.NoError(t, err)
	c.RunDir, c.LogDir, c.SocketDir, c.CertDir = p.dir+"/run", p.dir+"/log", p.dir+"/run/s", p.dir+"/certs"
	c.ClientCert, c.ClientKey, c.ClientCA = id.CertFile(), id.KeyFile(), id.CAFile()
	c.Addresses = []netip.Addr{netip.MustParseAddr("127.0.0.1")}
	p.port = ingresstest.FreePort(t)
	c.HTTPPort, c.HTTPSPort, c.EndpointPort = p.port, ingresstest.FreePort(t), ingresstest.FreePort(t)
	c.Workers, c.Connections = 2, 2048
	u, err := user.Lookup("www-data")
	require.NoError(t, err)
	c.User = u.Username
	uid, err := strconv.Atoi(u.Uid)
	require.NoError(t, err)
	return ingress.Config{
		StateDir: p.dir + "/state", Render: c, WorkerUID: uid, Apply: apply.Config{Binary: binary, Dir: p.dir + "/conf"},
		ProbeEvery: -1, Source: p.source, Endpoints: p.set, Registerer: prometheus.NewRegistry(), Logger: slog.New(slog.DiscardHandler),
	}
}

func (n *inprocessNode) event(role placement.Role) placement.Event {
	n.counter++
	return placement.Event{
		Workload: "web", Node: n.name, Placement: "web." + n.name, Kind: placement.KindContainer,
		Role: role, Ready: true, State: placement.StateRunning,
		Ports:    []placement.Port{{Port: 80, Protocol: placement.ProtocolHTTP}},
		Sequence: placement.Sequence{Incarnation: 1, Counter: n.counter},
	}
}

// serve opens the node's placement, as its agent does, and waits until
// everybody knows.
func (p *inprocess) serve(n *inprocessNode) {
	p.t.Helper()
	e := n.event(placement.RoleServing)
	n.links.Set([]placement.Event{e})
	p.await(10*time.Second, n.name+" is ready at the relay", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.ready[n.link()]
	})
	p.source.Publish(e)
	p.await(10*time.Second, n.name+" is open", func() bool { return p.state(n) == upstream.Open })
}

// drain is a planned close of the node's placement, as its agent does it.
func (p *inprocess) drain(n *inprocessNode) {
	e := n.event(placement.RoleDraining)
	n.links.Set([]placement.Event{e})
	p.source.Publish(e)
}

func (p *inprocess) state(n *inprocessNode) upstream.State {
	for _, s := range p.set.Status() {
		if s.Link == n.link() {
			return s.State
		}
	}
	return upstream.Unknown
}

func (p *inprocess) await(within time.Duration, what string, cond func() bool) {
	p.t.Helper()
	require.Eventually(p.t, cond, within, time.Millisecond, what)
}

// reloads counts how often nginx began a reload.
func (p *inprocess) reloads() int {
	text, err := os.ReadFile(filepath.Join(p.dir, "log", "error.log"))
	require.NoError(p.t, err)
	return strings.Count(string(text), "(SIGHUP) received")
}

// address is where nginx serves.
func (p *inprocess) address() string { return fmt.Sprintf("127.0.0.1:%d", p.port) }

// Up implements securelink.Watcher.
func (p *inprocess) Up(r string, _ time.Duration, links []securelink.Report, _ []securelink.NodeSession) {
	for _, l := range links {
		p.Report(r, l)
	}
}

// Report implements securelink.Watcher.
func (p *inprocess) Report(_ string, l securelink.Report) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ready[l.Link] = l.Present && l.Serves()
}

// NodeSession implements securelink.Watcher.
func (p *inprocess) NodeSession(string, securelink.NodeSession) {}

// Down implements securelink.Watcher.
func (p *inprocess) Down(string, time.Duration) {}
