package relay

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/securelink"
)

// Server is a relay.
type Server struct {
	cfg      Config
	instance uint64
	start    time.Time
	metrics  *metrics
	joiner   securelink.Joiner
	gate     gate
	wg       sync.WaitGroup // every connection

	mu        sync.Mutex
	sessions  map[sessionKey]*session
	links     map[placement.LinkID]entry
	nodes     map[string]bool // every node that had a session; true: has one
	followers map[*session]struct{}
	tokens    map[securelink.Token]grant
	streams   int
	retiring  bool
}

// sessionKey names a session: the processes of a peer have one each, because
// an ingress sidecar that restarts overlaps with its successor.
type sessionKey struct {
	peer     Peer
	instance uint64
}

// entry is a registered link and the session that registered it.
type entry struct {
	record securelink.Record
	s      *session
}

// grant is what a token admits to.
type grant struct {
	s     *session
	until time.Time
}

// New checks the configuration and returns a Server that does nothing until
// Serve.
func New(cfg Config) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	var seed [8]byte
	if _, err := rand.Read(seed[:]); err != nil {
		return nil, err
	}
	return &Server{
		cfg:       cfg,
		instance:  binary.BigEndian.Uint64(seed[:]),
		start:     time.Now(),
		metrics:   newMetrics(cfg.Registerer),
		gate:      gate{most: cfg.MaxStrangers, mostPerIP: cfg.MaxStrangersPerIP, perIP: map[string]int{}, known: map[string]int{}},
		sessions:  map[sessionKey]*session{},
		links:     map[placement.LinkID]entry{},
		nodes:     map[string]bool{},
		followers: map[*session]struct{}{},
		tokens:    map[securelink.Token]grant{},
	}, nil
}

// Serve accepts connections until ctx is done or the listener is closed, then
// ends every session and waits until nothing is left. Call Retire first for a
// restart that peers should know of.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer s.wg.Wait()
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = ln.Close() })
	defer stop()
	for {
		conn, err := ln.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return s.drain(ctx)
			}
			// Out of descriptors or the like: others must not suffer.
			s.cfg.Logger.Warn("accept failed, trying again", "err", err)
			select {
			case <-ctx.Done():
			case <-time.After(20 * time.Millisecond):
			}
			continue
		}
		tcp := conn.(*net.TCPConn)
		host, _, _ := net.SplitHostPort(tcp.RemoteAddr().String())
		if !s.gate.enter(host) {
			s.metrics.refused.WithLabelValues("too many strangers").Inc()
			securelink.Abort(tcp)
			continue
		}
		s.wg.Go(func() {
			admitted := sync.OnceFunc(func() { s.gate.leave(host) })
			defer admitted()
			s.admit(ctx, tcp, admitted)
		})
	}
}

// drain lets running streams finish after Retire, for DrainWithin at most.
func (s *Server) drain(ctx context.Context) error {
	s.mu.Lock()
	retiring := s.retiring
	s.mu.Unlock()
	if !retiring {
		return nil
	}
	deadline := time.NewTimer(s.cfg.DrainWithin)
	defer deadline.Stop()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		s.mu.Lock()
		n := s.streams
		s.mu.Unlock()
		if n == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-deadline.C:
			return nil
		case <-tick.C:
		}
	}
}

// Retire announces the restart to every peer and refuses new streams. The
// caller then closes the listener.
func (s *Server) Retire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.retiring = true
	for _, sess := range s.sessions {
		sess.control.Send(s.restarting())
	}
}

// restarting is the frame that announces a restart.
func (s *Server) restarting() []byte {
	return securelink.EncodeNumber(nil, securelink.FrameRestarting, uint64(max(s.cfg.RestartWithin/time.Millisecond, 1)))
}

// DropIf ends every session whose peer's certificate matches: for revocation,
// which takes effect on open sessions.
func (s *Server) DropIf(match func(*x509.Certificate) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sess := range s.sessions {
		if match(sess.cert) {
			sess.control.Fail(errRevoked)
		}
	}
}

// admit tells control connections from data connections by their first byte
// and lets in only what may come in. It returns when the connection is over.
func (s *Server) admit(ctx context.Context, conn *net.TCPConn, admitted func()) {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	_ = conn.SetDeadline(time.Now().Add(securelink.HandshakeWithin))
	var first [1]byte
	if _, err := io.ReadFull(conn, first[:]); err != nil {
		_ = conn.Close()
		return
	}
	const tlsHandshake = 0x16
	switch first[0] {
	case tlsHandshake:
		defer conn.Close()
		s.control(ctx, conn, first[0], admitted)
	case securelink.Magic[0]:
		s.data(conn, admitted)
	default:
		s.metrics.refused.WithLabelValues("unknown protocol").Inc()
		securelink.Abort(conn)
	}
}

// data admits a data connection by its token. Whoever has none gets nothing.
func (s *Server) data(conn *net.TCPConn, admitted func()) {
	var rest [len(securelink.Magic) - 1 + securelink.TokenSize]byte
	if _, err := io.ReadFull(conn, rest[:]); err != nil {
		_ = conn.Close()
		return
	}
	magic, token := rest[:len(securelink.Magic)-1], securelink.Token(rest[len(securelink.Magic)-1:])
	sess := s.redeem(token)
	if sess == nil || !sess.mayHave(string(magic)) {
		s.metrics.refused.WithLabelValues("token").Inc()
		securelink.Abort(conn)
		return
	}
	admitted()
	_ = conn.SetDeadline(time.Time{})
	if err := securelink.Watch(conn); err != nil {
		_ = conn.Close()
		return
	}
	if sess.hello.Caps&securelink.CapAccept != 0 && string(magic) == securelink.Magic[1:] {
		if !sess.offer(conn) { // else it waits in the session until a stream needs it
			_ = conn.Close()
		}
		return
	}
	defer conn.Close()
	if !sess.hold(conn) {
		return
	}
	t, body, err := securelink.ReadFrame(conn, nil)
	if !sess.release(conn) || err != nil || t != securelink.FrameOpen {
		return
	}
	s.open(sess, conn, body)
}

// redeem spends a token.
func (s *Server) redeem(t securelink.Token) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	g, ok := s.tokens[t]
	if !ok {
		return nil
	}
	delete(s.tokens, t)
	delete(g.s.tokens, t)
	if time.Now().After(g.until) {
		return nil
	}
	return g.s
}

// gate bounds the connections that have not proved who they are.
type gate struct {
	most, mostPerIP int

	mu    sync.Mutex
	total int
	perIP map[string]int
	known map[string]int // sessions by address: their data connections come in bursts
}

func (g *gate) enter(ip string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.total >= g.most || g.perIP[ip] >= g.mostPerIP && g.known[ip] == 0 {
		return false
	}
	g.total++
	g.perIP[ip]++
	return true
}

// session notes that a session from the address began (1) or ended (-1).
func (g *gate) session(ip string, change int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.known[ip] += change
	if g.known[ip] == 0 {
		delete(g.known, ip)
	}
}

func (g *gate) leave(ip string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.total--
	g.perIP[ip]--
	if g.perIP[ip] == 0 {
		delete(g.perIP, ip)
	}
}
