package availability_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/ingress/endpoint"
	"github.com/opfield/availability/node/accept"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/relay"
	"github.com/opfield/availability/securelink"
	"github.com/opfield/availability/upstream"
)

// path is the whole way of a stream in one process: endpoints, relays, nodes
// and applications, with real sockets and real certificates between them.
type path struct {
	t       testing.TB
	ctx     context.Context
	ca      *identitytest.CA
	log     *slog.Logger
	relays  []*pathRelay
	nodes   map[string]*pathNode
	set     *endpoint.Set
	dial    *securelink.Relays
	ingress *identity.Identity
	port    uint16
	heard   *heard
}

type pathRelay struct {
	id     string
	addr   string
	server *relay.Server
	ln     net.Listener
	stop   func()
}

type pathNode struct {
	links   *securelink.LinkSet
	accept  *accept.Acceptor
	records []securelink.Record
	mu      sync.Mutex
	targets map[placement.LinkID]netip.AddrPort
	failed  int
}

func (n *pathNode) Target(l placement.LinkID) (netip.AddrPort, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	a, ok := n.targets[l]
	return a, ok
}

func (n *pathNode) Failed(placement.LinkID, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.failed++
}

func (n *pathNode) set(records ...securelink.Record) {
	n.records = records
	n.accept.Apply(records)
	n.links.Set(records)
}

// heard keeps what the dialing end was told.
type heard struct {
	mu    sync.Mutex
	ready map[string]map[placement.LinkID]bool
	down  []time.Duration
}

func (h *heard) Up(r string, _ time.Duration, links []securelink.Report, _ []securelink.NodeSession) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ready[r] = map[placement.LinkID]bool{}
	for _, l := range links {
		h.ready[r][l.Link] = l.Present && l.Serves()
	}
}

func (h *heard) Report(r string, l securelink.Report) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ready[r][l.Link] = l.Present && l.Serves()
}

func (h *heard) NodeSession(string, securelink.NodeSession) {}

func (h *heard) Down(r string, announced time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.ready, r)
	h.down = append(h.down, announced)
}

func (h *heard) isReady(r string, l placement.LinkID) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ready[r][l]
}

func link(node string) placement.LinkID {
	return placement.LinkID{Placement: placement.ID{Workload: "web", Node: node}, Port: 80}
}

func serving(l placement.LinkID) securelink.Record {
	return securelink.Record{
		Link: l, Protocol: placement.ProtocolHTTP, Kind: placement.KindContainer,
		Role: placement.RoleServing, State: placement.StateRunning, Ready: true,
		Order: placement.Order{Sequence: placement.Sequence{Incarnation: 1, Counter: 1}},
	}
}

// newPath starts n relays and one node per application.
func newPath(t testing.TB, relays int, apps map[string]net.Addr) *path {
	ctx, cancel := context.WithCancel(context.Background())
	p := &path{t: t, ctx: ctx, ca: identitytest.New(t), log: slog.New(slog.DiscardHandler), nodes: map[string]*pathNode{},
		heard: &heard{ready: map[string]map[placement.LinkID]bool{}}}
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	t.Cleanup(cancel)
	var addrs []securelink.RelayAddress
	for i := range relays {
		r := p.startRelay(fmt.Sprintf("relay-%d", i+1), "127.0.0.1:0")
		p.relays = append(p.relays, r)
		addrs = append(addrs, securelink.RelayAddress{ID: r.id, Addr: r.addr})
	}
	for name, app := range apps {
		id := p.ca.Identity(t, identity.RoleNode, name)
		n := &pathNode{links: &securelink.LinkSet{}, targets: map[placement.LinkID]netip.AddrPort{}}
		n.targets[link(name)] = netip.MustParseAddrPort(app.String())
		n.accept = accept.New(accept.Config{
			TLS:     id.ServesWorkloads(p.ca.Workloads(t, id, "web"), identity.RoleIngress),
			Targets: n, Drain: 5 * time.Second, Logger: p.log,
		})
		rs := securelink.NewRelays(securelink.RelaysConfig{
			TLS: relayTLS(id), Instance: 1, Links: n.links, Accept: n.accept.Accept, Logger: p.log,
		})
		rs.Set(addrs)
		wg.Go(func() { rs.Run(ctx) })
		wg.Go(func() { _ = n.accept.Run(ctx) })
		n.set(serving(link(name)))
		p.nodes[name] = n
	}
	p.ingress = p.ca.Identity(t, identity.RoleIngress, "ingress-1")
	p.dial = securelink.NewRelays(securelink.RelaysConfig{
		TLS: relayTLS(p.ingress), Instance: 2, Watcher: p.heard, Logger: p.log,
	})
	p.dial.Set(addrs)
	wg.Go(func() { p.dial.Run(ctx) })
	p.set = endpoint.New(endpoint.Config{Dialer: p.dial, Drain: time.Second, Logger: p.log})
	probe, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p.port = uint16(probe.Addr().(*net.TCPAddr).Port)
	require.NoError(t, probe.Close())
	ln, err := endpoint.Listen(ctx, p.port)
	require.NoError(t, err)
	wg.Go(func() { _ = p.set.Serve(ctx, ln) })
	for name := range apps {
		for _, r := range p.relays {
			require.Eventually(t, func() bool { return p.heard.isReady(r.id, link(name)) }, 5*time.Second, 5*time.Millisecond)
		}
	}
	return p
}

func relayTLS(id *identity.Identity) func(string) *tls.Config {
	return func(relay string) *tls.Config {
		return id.ClientTLS(identity.Name{Role: identity.RoleRelay, ID: relay})
	}
}

func (p *path) startRelay(id, addr string) *pathRelay {
	who := p.ca.Identity(p.t, identity.RoleRelay, id)
	cfg := relay.DefaultConfig()
	cfg.ID, cfg.TLS, cfg.Logger = id, who.ServerTLS(), p.log
	cfg.Authenticate = func(cs tls.ConnectionState) (relay.Peer, error) {
		n, err := identity.PeerName(cs)
		return relay.Peer{Role: string(n.Role), ID: n.ID}, err
	}
	server, err := relay.New(cfg)
	require.NoError(p.t, err)
	ln, err := net.Listen("tcp", addr)
	require.NoError(p.t, err)
	ctx, cancel := context.WithCancel(p.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(ctx, ln)
	}()
	r := &pathRelay{id: id, addr: ln.Addr().String(), server: server, ln: ln}
	r.stop = sync.OnceFunc(func() { cancel(); <-done })
	p.t.Cleanup(r.stop)
	return r
}

// addr gives node n of the path an endpoint address.
func addr(l placement.LinkID) netip.Addr {
	a := netip.MustParseAddr("127.64.7.0").As4()
	for _, c := range l.Placement.Node {
		a[3] += byte(c)
	}
	return netip.AddrFrom4(a)
}

func (p *path) apply(orders ...upstream.Order) { p.set.Apply(orders, addr) }

func order(l placement.LinkID, s upstream.State, open ...placement.LinkID) upstream.Order {
	return upstream.Order{Link: l, Protocol: placement.ProtocolHTTP, State: s, MayHold: s != upstream.Closed, Open: open}
}

// connect does what nginx does: TCP to the endpoint, then TLS.
func (p *path) connect(l placement.LinkID) (*tls.Conn, error) {
	conn, err := net.Dial("tcp", netip.AddrPortFrom(addr(l), p.port).String())
	if err != nil {
		return nil, err
	}
	c := tls.Client(conn, p.nginxTLS(l.ServerName()))
	_ = conn.SetDeadline(time.Now().Add(12 * time.Second))
	if err := c.Handshake(); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return c, nil
}

func (p *path) nginxTLS(name string) *tls.Config {
	cfg := p.ingress.ClientTLS(identity.Name{Role: identity.RoleNode, ID: "x"})
	return &tls.Config{
		MinVersion: tls.VersionTLS13, ServerName: name, RootCAs: cfg.RootCAs,
		GetClientCertificate: cfg.GetClientCertificate,
	}
}

func app(t testing.TB, name string) net.Addr {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/echo" {
			_, _ = io.Copy(w, r.Body)
			return
		}
		_, _ = fmt.Fprint(w, name)
	}))
	t.Cleanup(s.Close)
	return s.Listener.Addr()
}

func get(c net.Conn) (string, error) {
	if _, err := fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		return "", err
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

func TestPath_CarriesStreams(t *testing.T) {
	p := newPath(t, 2, map[string]net.Addr{"a": app(t, "a"), "b": app(t, "b")})
	a, b := link("a"), link("b")
	p.apply(order(a, upstream.Open, b), order(b, upstream.Open, a))
	for _, l := range []placement.LinkID{a, b} {
		c, err := p.connect(l)
		require.NoError(t, err)
		for range 3 { // kept alive
			got, err := get(c)
			require.NoError(t, err)
			require.Equal(t, l.Placement.Node, got)
		}
		require.NoError(t, c.Close())
	}
	require.Eventually(t, func() bool { return p.nodes["a"].accept.Streams()+p.nodes["b"].accept.Streams() == 0 }, 3*time.Second, 5*time.Millisecond)

	// Bulk both ways, byte for byte.
	c, err := p.connect(a)
	require.NoError(t, err)
	body := strings.Repeat("0123456789abcdef", 512<<10) // 8 MiB
	go func() {
		_, _ = fmt.Fprintf(c, "POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	}()
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	got, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.True(t, string(got) == body)
}

// LNK-1, LNK-2: closed refuses, joined leads to the open sibling, and what
// does not serve gets nothing.
func TestPath_EndpointStates(t *testing.T) {
	p := newPath(t, 1, map[string]net.Addr{"a": app(t, "a"), "b": app(t, "b")})
	a, b := link("a"), link("b")
	p.apply(order(a, upstream.Closed, b), order(b, upstream.Open))
	begun := time.Now()
	_, err := p.connect(a)
	require.Error(t, err)
	require.Less(t, time.Since(begun), time.Second)

	joined := order(a, upstream.Joined, b)
	joined.Primary = true
	p.apply(joined, order(b, upstream.Open))
	c, err := p.connect(a)
	require.NoError(t, err)
	got, err := get(c)
	require.NoError(t, err)
	require.Equal(t, "b", got)

	// Back home: nginx must not keep the stream that leads to b. What is
	// under way goes on: the rest of the record follows the early byte.
	p.apply(order(a, upstream.Open, b), order(b, upstream.Open, a))
	_, err = fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	require.NoError(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	_, err = io.ReadAll(resp.Body)
	require.NoError(t, err)
	var first [1]byte
	n, err := c.NetConn().Read(first[:])
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Contains(t, "\x17\x03", string(first[:]), "the first early byte, or the second where TLS took the first")

	// The node itself refuses a link that does not serve, whatever the
	// ingress node believes.
	standby := serving(b)
	standby.Role = placement.RoleStandby
	p.nodes["b"].set(standby)
	p.apply(order(a, upstream.Closed), order(b, upstream.Open))
	_, err = p.connect(b)
	require.Error(t, err)

	_, err = net.Dial("tcp", netip.AddrPortFrom(netip.MustParseAddr("127.64.200.1"), p.port).String())
	require.NoError(t, err) // accepted, then reset: no such endpoint
}

// LNK-4, LNK-5: while nothing else serves a connection is held, and it moves
// on the moment something opens.
func TestPath_Holds(t *testing.T) {
	p := newPath(t, 1, map[string]net.Addr{"a": app(t, "a"), "b": app(t, "b")})
	a, b := link("a"), link("b")
	p.apply(order(a, upstream.Holding), order(b, upstream.Closed))
	go func() {
		time.AfterFunc(700*time.Millisecond, func() { p.apply(order(a, upstream.Holding, b), order(b, upstream.Open)) })
	}()
	begun := time.Now()
	c, err := p.connect(a)
	require.NoError(t, err)
	require.Greater(t, time.Since(begun), 600*time.Millisecond)
	require.Less(t, time.Since(begun), 1500*time.Millisecond)
	got, err := get(c)
	require.NoError(t, err)
	require.Equal(t, "b", got)

	p.apply(order(a, upstream.Holding), order(b, upstream.Closed))
	begun = time.Now()
	_, err = p.connect(a)
	require.Error(t, err)
	require.InDelta(t, 3, time.Since(begun).Seconds(), 0.4)
}

// LNK-2: a planned close ends idle connections and cuts no running answer.
func TestPath_NudgesIdleConnections(t *testing.T) {
	release := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		<-release
		_, _ = fmt.Fprint(w, "late")
	}))
	t.Cleanup(s.Close)
	p := newPath(t, 1, map[string]net.Addr{"a": s.Listener.Addr()})
	a := link("a")
	p.apply(order(a, upstream.Open))

	idle, err := p.connect(a)
	require.NoError(t, err)
	conn, err := net.Dial("tcp", netip.AddrPortFrom(addr(a), p.port).String())
	require.NoError(t, err)
	rec := &recorder{Conn: conn}
	busy := tls.Client(rec, p.nginxTLS(a.ServerName()))
	require.NoError(t, busy.Handshake())
	_, err = fmt.Fprint(busy, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	require.NoError(t, err)
	require.Eventually(t, func() bool { return p.nodes["a"].accept.Streams() == 2 }, 3*time.Second, 5*time.Millisecond)

	draining := serving(a)
	draining.Role = placement.RoleDraining
	p.nodes["a"].set(draining)
	// nginx looks below TLS: the socket became readable.
	raw := idle.NetConn()
	var first [1]byte
	n, err := raw.Read(first[:])
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Equal(t, byte(0x17), first[0])

	close(release)
	resp, err := http.ReadResponse(bufio.NewReader(busy), nil)
	require.NoError(t, err)
	got, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, "late", string(got))
	// Behind the answer the next early byte is there already.
	require.Eventually(t, func() bool { return rec.lastByte() == 0x17 }, time.Second, time.Millisecond)
}

// recorder remembers the last byte that came in below TLS.
type recorder struct {
	net.Conn
	last atomic.Uint32
}

func (r *recorder) Read(b []byte) (int, error) {
	n, err := r.Conn.Read(b)
	if n > 0 {
		r.last.Store(uint32(b[n-1]))
	}
	return n, err
}

func (r *recorder) lastByte() byte { return byte(r.last.Load()) }

// LNK-6: a stream that is cut does not end like one that is complete: bytes
// that are no TLS record come before the end.
func TestPath_CutIsNotAnEnd(t *testing.T) {
	for name, cut := range map[string]func(p *path, appConn net.Conn){
		"application reset": func(_ *path, c net.Conn) { _ = c.(*net.TCPConn).SetLinger(0); _ = c.Close() },
		"relay killed":      func(p *path, _ net.Conn) { p.relays[0].stop() },
	} {
		t.Run(name, func(t *testing.T) {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			t.Cleanup(func() { _ = ln.Close() })
			conns := make(chan net.Conn, 1)
			go func() {
				c, err := ln.Accept()
				if err == nil {
					_, _ = c.Read(make([]byte, 1024))
					_, _ = fmt.Fprint(c, "HTTP/1.1 200 OK\r\n\r\npart")
					conns <- c
				}
			}()
			p := newPath(t, 1, map[string]net.Addr{"a": ln.Addr()})
			p.apply(order(link("a"), upstream.Open))
			c, err := p.connect(link("a"))
			require.NoError(t, err)
			_, err = fmt.Fprint(c, "GET / HTTP/1.1\r\n\r\n")
			require.NoError(t, err)
			part := make([]byte, len("HTTP/1.1 200 OK\r\n\r\npart"))
			_, err = io.ReadFull(c, part)
			require.NoError(t, err)
			cut(p, <-conns)
			_, err = c.Read(part)
			require.Error(t, err)
			require.NotErrorIs(t, err, io.EOF)
			require.ErrorAs(t, err, new(tls.RecordHeaderError))
		})
	}
	t.Run("normal end", func(t *testing.T) {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			c, _, _ := http.NewResponseController(w).Hijack()
			_, _ = fmt.Fprint(c, "HTTP/1.1 200 OK\r\n\r\nwhole")
			_ = c.Close()
		}))
		t.Cleanup(s.Close)
		p := newPath(t, 1, map[string]net.Addr{"a": s.Listener.Addr()})
		p.apply(order(link("a"), upstream.Open))
		c, err := p.connect(link("a"))
		require.NoError(t, err)
		got, err := get(c)
		require.NoError(t, err)
		require.Equal(t, "whole", got)
	})
}

// RLY-6, LNK-4: with another relay alive, a dead one costs nothing; without
// any, connections wait for it to come back.
func TestPath_RelayLoss(t *testing.T) {
	p := newPath(t, 2, map[string]net.Addr{"a": app(t, "a")})
	p.apply(order(link("a"), upstream.Open))
	p.relays[0].stop()
	for range 20 {
		c, err := p.connect(link("a"))
		require.NoError(t, err)
		_, err = get(c)
		require.NoError(t, err)
		_ = c.Close()
	}
	p.relays[1].stop()
	time.AfterFunc(time.Second, func() { p.startRelay("relay-2", p.relays[1].addr) })
	begun := time.Now()
	c, err := p.connect(link("a"))
	require.NoError(t, err)
	require.Less(t, time.Since(begun), 3*time.Second)
	_, err = get(c)
	require.NoError(t, err)
}

// SEC-1, LNK-3: each hop verifies who is there.
func TestPath_RefusesWrongIdentities(t *testing.T) {
	p := newPath(t, 1, map[string]net.Addr{"a": app(t, "a")})
	p.apply(order(link("a"), upstream.Open))
	dial := func(cfg *tls.Config) error {
		conn, err := net.Dial("tcp", netip.AddrPortFrom(addr(link("a")), p.port).String())
		require.NoError(t, err)
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
		c := tls.Client(conn, cfg)
		if err := c.Handshake(); err != nil {
			return err
		}
		_, err = get(c)
		return err
	}
	good := p.nginxTLS("web.workload.opfield.internal")
	require.NoError(t, dial(good))

	none := good.Clone()
	none.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &tls.Certificate{}, nil }
	require.Error(t, dial(none), "no client certificate")
	wrongRole := good.Clone()
	wrongRole.GetClientCertificate = p.ca.Identity(t, identity.RoleNode, "b").ClientCertificate()
	require.Error(t, dial(wrongRole), "a node's certificate")
	foreign := good.Clone()
	foreign.GetClientCertificate = identitytest.New(t).Identity(t, identity.RoleIngress, "ingress-1").ClientCertificate()
	require.Error(t, dial(foreign), "a certificate of another CA")
	name := good.Clone()
	name.ServerName = "other.workload.opfield.internal"
	require.Error(t, dial(name), "another workload's name")

	// A node cannot follow, and cannot register another node's links.
	id := p.ca.Identity(t, identity.RoleNode, "evil")
	links := &securelink.LinkSet{}
	links.Set([]securelink.Record{serving(link("a"))})
	peer := securelink.NewPeer(securelink.PeerConfig{
		Relay: securelink.RelayAddress{ID: "relay-1", Addr: p.relays[0].addr}, TLS: relayTLS(id)("relay-1"),
		Links: links, Accept: func(i *securelink.Incoming) { i.Refuse(securelink.AppRefused) }, Logger: p.log,
	})
	ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
	defer cancel()
	peer.Run(ctx)
	require.NoError(t, dial(good), "the link still leads to its own node")
}
