package relay

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/securelink"
)

type rig struct {
	t      testing.TB
	ca     *identitytest.CA
	server *Server
	addr   string
}

func newRig(t testing.TB, change func(*Config)) *rig {
	ca := identitytest.New(t)
	cfg := DefaultConfig()
	cfg.ID, cfg.Logger = "relay-1", slog.New(slog.DiscardHandler)
	cfg.TLS = ca.Identity(t, identity.RoleRelay, "relay-1").ServerTLS()
	cfg.Authenticate = func(cs tls.ConnectionState) (Peer, error) {
		n, err := identity.PeerName(cs)
		return Peer{Role: string(n.Role), ID: n.ID}, err
	}
	if change != nil {
		change(&cfg)
	}
	s, err := New(cfg)
	require.NoError(t, err)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(ctx, ln) }()
	t.Cleanup(func() { cancel(); <-done })
	return &rig{t: t, ca: ca, server: s, addr: ln.Addr().String()}
}

func webLink() placement.LinkID {
	return placement.LinkID{Placement: placement.ID{Workload: "web", Node: "node-1"}, Port: 80}
}

// node runs an accepting end whose streams are echoed.
func (r *rig) node(id string, l placement.LinkID) *securelink.Relays {
	links := &securelink.LinkSet{}
	links.Set([]securelink.Record{{
		Link: l, Protocol: placement.ProtocolTCP, Kind: placement.KindContainer,
		Role: placement.RoleServing, State: placement.StateRunning, Ready: true,
	}})
	return r.run(identity.RoleNode, id, securelink.RelaysConfig{Links: links, Accept: func(in *securelink.Incoming) {
		c, err := in.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = c.Write(in.First)
		buf := make([]byte, 1024) // io.Copy would keep pipes
		for {
			n, err := c.Read(buf)
			if err != nil {
				return
			}
			_, _ = c.Write(buf[:n])
		}
	}})
}

type deaf struct{}

func (deaf) Up(string, time.Duration, []securelink.Report, []securelink.NodeSession) {}
func (deaf) Report(string, securelink.Report)                                        {}
func (deaf) NodeSession(string, securelink.NodeSession)                              {}
func (deaf) Down(string, time.Duration)                                              {}

func (r *rig) ingress(id string) *securelink.Relays {
	return r.run(identity.RoleIngress, id, securelink.RelaysConfig{Watcher: deaf{}})
}

func (r *rig) run(role identity.Role, id string, cfg securelink.RelaysConfig) *securelink.Relays {
	who := r.ca.Identity(r.t, role, id)
	cfg.TLS = func(relay string) *tls.Config {
		return who.ClientTLS(identity.Name{Role: identity.RoleRelay, ID: relay})
	}
	cfg.Instance, cfg.Logger = uint64(time.Now().UnixNano()), slog.New(slog.DiscardHandler)
	rs := securelink.NewRelays(cfg)
	rs.Set([]securelink.RelayAddress{{ID: "relay-1", Addr: r.addr}})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { rs.Run(ctx) })
	r.t.Cleanup(func() { cancel(); wg.Wait() })
	require.Eventually(r.t, func() bool { return rs.Reachable() == 1 }, 5*time.Second, time.Millisecond)
	return rs
}

func (r *rig) open(rs *securelink.Relays, l placement.LinkID) (*securelink.Stream, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return rs.Open(ctx, securelink.Open{Link: l, First: []byte("hi")})
}

func (r *rig) ready(rs *securelink.Relays, l placement.LinkID) {
	require.Eventually(r.t, func() bool {
		st, err := r.open(rs, l)
		if err == nil {
			st.Close()
		}
		return err == nil
	}, 5*time.Second, 5*time.Millisecond)
}

func TestServer_Refusals(t *testing.T) {
	r := newRig(t, nil)
	in := r.ingress("ingress-1")
	unknown := webLink()
	unknown.Port = 81
	r.node("node-1", webLink())
	r.ready(in, webLink())
	_, err := r.open(in, unknown)
	require.Equal(t, securelink.NotRegistered, securelink.RefusalCode(err))
	_, err = in.Open(t.Context(), securelink.Open{Link: webLink(), Epoch: 7})
	require.Equal(t, securelink.StaleEpoch, securelink.RefusalCode(err))
	r.server.Retire()
	r.server.mu.Lock()
	n := len(r.server.sessions)
	r.server.mu.Unlock()
	require.NotZero(t, n)
	_, err = r.open(in, webLink())
	require.Error(t, err)
	require.Zero(t, securelink.RefusalCode(err), "a restart says nothing about the placement")
}

// RLY-5: over a limit comes a clear refusal, and others are not stalled.
func TestServer_Limits(t *testing.T) {
	r := newRig(t, func(c *Config) { c.MaxPeerStreams = 4 })
	in := r.ingress("ingress-1")
	r.node("node-1", webLink())
	r.node("node-2", placement.LinkID{Placement: placement.ID{Workload: "web", Node: "node-2"}, Port: 80})
	r.ready(in, webLink())
	require.Eventually(t, func() bool { _, n := r.server.Status(); return n == 0 }, 5*time.Second, time.Millisecond)
	var open []*securelink.Stream
	for range 4 {
		st, err := r.open(in, webLink())
		require.NoError(t, err)
		open = append(open, st)
	}
	_, err := r.open(in, webLink())
	require.ErrorContains(t, err, "over limit")
	other := r.ingress("ingress-2")
	r.ready(other, placement.LinkID{Placement: placement.ID{Workload: "web", Node: "node-2"}, Port: 80})
	for _, st := range open {
		st.Close()
	}
	r.ready(in, webLink())
}

// RLY-3: a data connection with a used, expired or foreign token gets nothing.
func TestServer_Tokens(t *testing.T) {
	r := newRig(t, nil)
	in := r.ingress("ingress-1")
	var token securelink.Token
	require.Eventually(t, func() bool {
		if in.Status()[0].Pool < 8 {
			return false // it still spends tokens
		}
		r.server.mu.Lock()
		defer r.server.mu.Unlock()
		for _, sess := range r.server.sessions {
			sess.mu.Lock()
			held := len(sess.held)
			sess.mu.Unlock()
			if held < 8 {
				return false // some that it has sent are not here yet
			}
		}
		for tk := range r.server.tokens {
			token = tk
			return true
		}
		return false
	}, 5*time.Second, time.Millisecond)
	refused := func(tk securelink.Token) bool {
		c, err := net.Dial("tcp", r.addr)
		require.NoError(t, err)
		defer c.Close()
		_, _ = c.Write(append([]byte(securelink.Magic), tk[:]...))
		_, _ = c.Write(securelink.Open{Link: webLink()}.Encode(nil))
		_ = c.SetReadDeadline(time.Now().Add(3 * time.Second))
		n, err := c.Read(make([]byte, 64))
		return n == 0 && err != nil && !os.IsTimeout(err)
	}
	require.True(t, refused(securelink.Token{1, 2, 3}), "foreign")
	require.False(t, refused(token), "fresh: it gets an answer, if only a refusal")
	require.True(t, refused(token), "used")
	r.server.mu.Lock()
	for tk, g := range r.server.tokens {
		g.until = time.Now().Add(-time.Second)
		r.server.tokens[tk] = g
		token = tk
	}
	r.server.mu.Unlock()
	require.True(t, refused(token), "expired")
}

// SEC: garbage, half a frame and a 4 GB length end the connection and cost no
// memory.
func TestServer_Garbage(t *testing.T) {
	r := newRig(t, nil)
	who := r.ca.Identity(t, identity.RoleNode, "node-9")
	conf := who.ClientTLS(identity.Name{Role: identity.RoleRelay, ID: "relay-1"})
	conf.NextProtos = []string{securelink.ALPN}
	huge := append(binary.BigEndian.AppendUint32(nil, 0xffffffff), byte(securelink.FrameRegister))
	hello := securelink.Hello{Version: 1, Instance: 1, Caps: securelink.CapAccept}.Encode(nil)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for name, bytes := range map[string][]byte{
		"huge length":  append(append([]byte{}, hello...), huge...),
		"garbage":      append(append([]byte{}, hello...), "GET / HTTP/1.1\r\n\r\n"...),
		"bad register": securelink.AppendFrame(append([]byte{}, hello...), securelink.FrameRegister, []byte{0xff, 0xff, 1}),
		"no hello":     securelink.EncodeNumber(nil, securelink.FramePing, 1),
		"wrong caps":   securelink.Hello{Version: 1, Caps: securelink.CapFollow}.Encode(nil),
		"old version":  securelink.Hello{Version: 99, Caps: securelink.CapAccept}.Encode(nil),
	} {
		c, err := tls.Dial("tcp", r.addr, conf)
		require.NoError(t, err, name)
		_, err = c.Write(bytes)
		require.NoError(t, err, name)
		_ = c.SetReadDeadline(time.Now().Add(4 * time.Second))
		_, err = io.Copy(io.Discard, c)
		require.False(t, os.IsTimeout(err), name)
		_ = c.Close()
	}
	raw, err := net.Dial("tcp", r.addr)
	require.NoError(t, err)
	_, _ = raw.Write([]byte("SSH-2.0-x\r\n"))
	_ = raw.SetReadDeadline(time.Now().Add(3 * time.Second))
	n, err := raw.Read(make([]byte, 8))
	require.Zero(t, n)
	require.False(t, os.IsTimeout(err))
	runtime.GC()
	runtime.ReadMemStats(&after)
	require.Less(t, int64(after.HeapAlloc)-int64(before.HeapAlloc), int64(8<<20))
}

// RLY-5: strangers are bounded per address and in time.
func TestServer_Strangers(t *testing.T) {
	r := newRig(t, func(c *Config) { c.MaxStrangersPerIP = 8 })
	var quiet []net.Conn
	for range 8 {
		c, err := net.Dial("tcp", r.addr)
		require.NoError(t, err)
		quiet = append(quiet, c)
	}
	require.Eventually(t, func() bool {
		r.server.gate.mu.Lock()
		defer r.server.gate.mu.Unlock()
		return r.server.gate.total == 8
	}, 2*time.Second, time.Millisecond)
	if c, err := net.Dial("tcp", r.addr); err == nil { // the reset may even come first
		_ = c.SetReadDeadline(time.Now().Add(2 * time.Second))
		_, err = c.Read(make([]byte, 1))
		require.False(t, os.IsTimeout(err), "one too many is refused at once")
	}
	for _, q := range quiet {
		_ = q.SetReadDeadline(time.Now().Add(securelink.HandshakeWithin + 2*time.Second))
		_, err := q.Read(make([]byte, 1))
		require.False(t, os.IsTimeout(err), "the quiet ones are dropped at the deadline")
	}
	r.ingress("ingress-1") // and there is room again
}

// RLY-5: a burst of streams is no flood of strangers.
func TestServer_Burst(t *testing.T) {
	r := newRig(t, func(c *Config) { c.MaxStrangersPerIP = 2 })
	in := r.ingress("ingress-1")
	r.node("node-1", webLink())
	r.ready(in, webLink())
	var wg sync.WaitGroup
	for range 300 {
		wg.Go(func() {
			st, err := r.open(in, webLink())
			if err != nil {
				t.Error(err)
				return
			}
			st.Close()
		})
	}
	wg.Wait()
}

// RLY-2: dropping a session takes its links out and ends its streams at once.
func TestServer_DropEndsStreams(t *testing.T) {
	r := newRig(t, nil)
	in := r.ingress("ingress-1")
	r.node("node-1", webLink())
	r.ready(in, webLink())
	st, err := r.open(in, webLink())
	require.NoError(t, err)
	defer st.Close()
	_, err = io.ReadFull(st.Conn, make([]byte, 2))
	require.NoError(t, err)
	// SEC-1: revocation takes effect on open sessions.
	begun := time.Now()
	r.server.DropIf(func(c *x509.Certificate) bool { return c.Subject.CommonName == "node-1" })
	_, err = st.Conn.Read(make([]byte, 1))
	require.Error(t, err)
	require.NotErrorIs(t, err, io.EOF, "a cut is a reset, not an end")
	require.Less(t, time.Since(begun), time.Second)
}

// LNK-9: streams cost bounded memory and leave nothing behind.
func TestServer_ManyStreams(t *testing.T) {
	const streams = 2000
	r := newRig(t, nil)
	in := r.ingress("ingress-1")
	r.node("node-1", webLink())
	r.ready(in, webLink())
	require.Eventually(t, func() bool { _, n := r.server.Status(); return n == 0 }, 5*time.Second, time.Millisecond)
	goroutines, fds := runtime.NumGoroutine(), descriptors(t)
	open := make(chan *securelink.Stream, streams)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			for range streams / 20 {
				st, err := r.open(in, webLink())
				if err != nil {
					t.Error(err)
					return
				}
				open <- st
			}
		})
	}
	wg.Wait()
	close(open)
	_, n := r.server.Status()
	require.Equal(t, streams, n)
	for st := range open {
		_, err := st.Conn.Write([]byte("x"))
		require.NoError(t, err)
		_, err = io.ReadFull(st.Conn, make([]byte, 3))
		require.NoError(t, err)
		st.Close()
	}
	require.Eventually(t, func() bool { _, n := r.server.Status(); return n == 0 }, 10*time.Second, 5*time.Millisecond)
	// Warm pools may have grown; nothing else may stay.
	const pools = 4 * 256
	require.Eventually(t, func() bool { return runtime.NumGoroutine() < goroutines+pools }, 10*time.Second, 10*time.Millisecond)
	require.Eventually(t, func() bool { return descriptors(t) < fds+2*pools }, 10*time.Second, 10*time.Millisecond)
}

func descriptors(t testing.TB) int {
	d, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(d)
}
