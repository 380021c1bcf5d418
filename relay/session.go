package relay

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/securelink"
)

var (
	errRevoked  = errors.New("identity revoked")
	errReplaced = errors.New("replaced by a newer session of the same peer")
	errForeign  = errors.New("link of another node")
)

const (
	maxLinks  = 4096 // a peer may register
	maxTokens = 1024 // a peer may hold
	// maxSessions bounds the processes of one peer: more than a few mean that
	// it restarts in a loop while its streams go on.
	maxSessions = 8
	// maxHeld bounds a peer's data connections that wait for a stream.
	maxHeld = 512
)

// session is one peer's control session.
type session struct {
	peer    Peer
	cert    *x509.Certificate
	hello   securelink.Hello
	since   time.Time
	control *securelink.Control
	opens   *rate.Limiter

	// guarded by Server.mu
	links      map[placement.LinkID]struct{}
	tokens     map[securelink.Token]struct{}
	dirtyLinks map[placement.LinkID]struct{} // followers: to be reported
	dirtyNodes map[string]struct{}
	listing    bool // followers: the full list has not been sent yet

	mu      sync.Mutex
	over    bool
	held    map[*net.TCPConn]struct{} // wait for a stream
	ready   []*net.TCPConn            // accepting end: those of held that can be taken, newest last
	waiters []chan *net.TCPConn
	streams map[*net.TCPConn]struct{} // our side of joined streams
}

// control works a control connection from its TLS handshake to its end.
func (s *Server) control(ctx context.Context, conn *net.TCPConn, first byte, admitted func()) {
	if err := securelink.Watch(conn); err != nil {
		return
	}
	sess, err := s.greet(ctx, conn, first)
	if err != nil {
		s.metrics.refused.WithLabelValues("handshake").Inc()
		s.cfg.Logger.Debug("control connection refused", "remote", conn.RemoteAddr().String(), "err", err)
		return
	}
	admitted()
	ip, _, _ := net.SplitHostPort(conn.RemoteAddr().String())
	s.gate.session(ip, 1)
	defer s.gate.session(ip, -1)
	var flush func([]byte) []byte
	if sess.hello.Caps&securelink.CapFollow != 0 {
		flush = func(b []byte) []byte { return s.flush(sess, b) }
	}
	s.cfg.Logger.Info("session up", "peer", sess.peer.String())
	err = sess.control.Run(ctx, func(t securelink.FrameType, body []byte) (bool, error) {
		return s.handle(sess, t, body)
	}, flush)
	s.leave(sess)
	s.cfg.Logger.Info("session down", "peer", sess.peer.String(), "err", err)
	s.metrics.dropped.WithLabelValues(sess.peer.Role, reason(err)).Inc()
}

func reason(err error) string {
	var ne net.Error
	switch {
	case errors.Is(err, securelink.ErrSilent):
		return "hung"
	case errors.Is(err, errReplaced):
		return "replaced"
	case errors.Is(err, errRevoked):
		return "revoked"
	case errors.Is(err, securelink.ErrFrame):
		return "malformed"
	case errors.Is(err, securelink.ErrUnreachable), errors.As(err, &ne) && ne.Timeout():
		return "unreachable"
	default:
		return "closed"
	}
}

// greet shakes hands and enters the session into the registry.
func (s *Server) greet(ctx context.Context, conn *net.TCPConn, first byte) (*session, error) {
	conf := s.cfg.TLS.Clone()
	conf.NextProtos = []string{securelink.ALPN}
	t := tls.Server(&prefixed{TCPConn: conn, prefix: []byte{first}}, conf)
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	if got := t.ConnectionState().NegotiatedProtocol; got != securelink.ALPN {
		return nil, fmt.Errorf("peer speaks %q, want %q", got, securelink.ALPN)
	}
	peer, err := s.cfg.Authenticate(t.ConnectionState())
	if err != nil {
		return nil, err
	}
	ft, body, err := securelink.ReadFrame(t, nil)
	if err != nil {
		return nil, err
	}
	if ft != securelink.FrameHello {
		return nil, fmt.Errorf("first frame has type %d", ft)
	}
	hello, err := securelink.DecodeHello(body)
	if err != nil {
		return nil, err
	}
	w := securelink.Welcome{
		Version: securelink.ProtocolVersion, Instance: s.instance, Relay: s.cfg.ID,
		AgeMilli: uint64(time.Since(s.start) / time.Millisecond),
	}
	if _, err := t.Write(w.Encode(nil)); err != nil {
		return nil, err
	}
	if hello.Version != securelink.ProtocolVersion {
		return nil, fmt.Errorf("peer has protocol version %d, want %d", hello.Version, securelink.ProtocolVersion)
	}
	if !mayBe(peer.Role, hello.Caps) {
		_, _ = t.Write(securelink.EncodeRefusal(nil, securelink.FrameRefused, securelink.Unauthorised))
		return nil, fmt.Errorf("role %q may not do what it asks for", peer.Role)
	}
	if err := t.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	sess := &session{
		peer: peer, cert: t.ConnectionState().PeerCertificates[0], hello: hello, since: time.Now(),
		control:    securelink.NewControl(t, conn),
		opens:      rate.NewLimiter(rate.Limit(s.cfg.MaxPeerOpenRate), int(s.cfg.MaxPeerOpenRate)),
		links:      map[placement.LinkID]struct{}{},
		tokens:     map[securelink.Token]struct{}{},
		dirtyLinks: map[placement.LinkID]struct{}{},
		dirtyNodes: map[string]struct{}{},
		listing:    true,
		held:       map[*net.TCPConn]struct{}{},
		streams:    map[*net.TCPConn]struct{}{},
	}
	if err := s.enter(sess); err != nil {
		_, _ = t.Write(securelink.EncodeRefusal(nil, securelink.FrameRefused, securelink.OverLimit))
		return nil, err
	}
	return sess, nil
}

// mayBe reports whether a role may have these capabilities.
func mayBe(role string, caps uint8) bool {
	switch role {
	case roleNode, roleController:
		return caps == securelink.CapAccept
	case roleIngress:
		return caps == securelink.CapFollow
	default:
		return false
	}
}

// mayHave reports whether the session may have data connections that begin
// with 'O' and these bytes.
func (sess *session) mayHave(magic string) bool {
	switch magic {
	case securelink.Magic[1:]:
		return true
	case securelink.MagicDial[1:]: // what a dialing end has anyway
		return sess.hello.Caps&securelink.CapAccept != 0
	default:
		return false
	}
}

// hold takes a data connection into the session until its peer has said which
// stream it wants; false: there is no room.
func (sess *session) hold(c *net.TCPConn) bool {
	sess.mu.Lock()
	defer sess.mu.Unlock()
	return sess.holdLocked(c)
}

func (sess *session) holdLocked(c *net.TCPConn) bool {
	if sess.over || len(sess.held) >= maxHeld {
		return false
	}
	sess.held[c] = struct{}{}
	return true
}

// offer takes a data connection of an accepting end into the session until a
// stream needs it.
func (sess *session) offer(c *net.TCPConn) bool {
	sess.mu.Lock()
	defer sess.mu.Unlock()
	if !sess.holdLocked(c) {
		return false
	}
	if len(sess.waiters) > 0 {
		w := sess.waiters[0]
		sess.waiters = sess.waiters[1:]
		delete(sess.held, c)
		w <- c // it has room for one
		return true
	}
	sess.ready = append(sess.ready, c)
	return true
}

// release takes a connection out of hold; false: the session is over.
func (sess *session) release(c *net.TCPConn) bool {
	sess.mu.Lock()
	defer sess.mu.Unlock()
	delete(sess.held, c)
	return !sess.over
}

// take returns a waiting connection of an accepting end, asking for more when
// they run low.
func (sess *session) take(ctx context.Context) (*net.TCPConn, error) {
	sess.mu.Lock()
	if sess.over {
		sess.mu.Unlock()
		return nil, &securelink.Refusal{Code: securelink.NotRegistered}
	}
	if n := len(sess.ready); n > 0 {
		c := sess.ready[n-1]
		sess.ready = sess.ready[:n-1]
		delete(sess.held, c)
		sess.mu.Unlock()
		return c, nil
	}
	w := make(chan *net.TCPConn, 1)
	sess.waiters = append(sess.waiters, w)
	want := len(sess.waiters)
	sess.mu.Unlock()
	sess.control.Send(securelink.EncodeNumber(nil, securelink.FrameWant, uint64(want)))
	select {
	case c, ok := <-w:
		if !ok {
			return nil, &securelink.Refusal{Code: securelink.NotRegistered}
		}
		return c, nil
	case <-ctx.Done():
	}
	sess.mu.Lock()
	i := slices.Index(sess.waiters, w)
	if i >= 0 {
		sess.waiters = slices.Delete(sess.waiters, i, i+1)
	}
	sess.mu.Unlock()
	if i < 0 {
		if c, ok := <-w; ok { // it came just now
			return c, nil
		}
	}
	return nil, &securelink.Refusal{Code: securelink.Timeout}
}

// joined adds our side of a stream; false: the session is over.
func (sess *session) joined(c *net.TCPConn) bool {
	sess.mu.Lock()
	defer sess.mu.Unlock()
	if sess.over {
		return false
	}
	sess.streams[c] = struct{}{}
	return true
}

func (sess *session) parted(c *net.TCPConn) {
	sess.mu.Lock()
	defer sess.mu.Unlock()
	delete(sess.streams, c)
}

func (sess *session) streamCount() int {
	sess.mu.Lock()
	defer sess.mu.Unlock()
	return len(sess.streams)
}

// end resets the session's streams and closes what waits. It is idempotent.
func (sess *session) end() {
	sess.mu.Lock()
	defer sess.mu.Unlock()
	sess.over = true
	for c := range sess.held {
		_ = c.Close()
	}
	sess.ready = nil
	for c := range sess.streams {
		securelink.Abort(c)
	}
	for _, w := range sess.waiters {
		close(w)
	}
	sess.waiters = nil
}
