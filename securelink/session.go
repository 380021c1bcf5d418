package securelink

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// ErrVersion ends a session whose two ends speak different versions.
var ErrVersion = errors.New("protocol version differs")

// errSession is what streams of an ended session fail with.
var errSession = errors.New("session with the relay ended")

// session is a peer's live session with one relay process.
type session struct {
	cfg     PeerConfig
	control *Control
	tls     *tls.Conn
	welcome Welcome
	addr    string

	announced chan struct{} // closed when the relay says it restarts
	ended     chan struct{} // closed when the session is over

	pool pool

	mu       sync.Mutex
	over     bool
	restart  time.Duration
	streams  map[*net.TCPConn]struct{}
	reports  []Report // gathered until the relay has sent its full list
	nodes    []NodeSession
	synced   bool
	handlers sync.WaitGroup
}

// connect dials the relay and shakes hands.
func connect(ctx context.Context, cfg PeerConfig) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, HandshakeWithin)
	defer cancel()
	dialer := net.Dialer{Timeout: ConnectWithin}
	conn, err := dialer.DialContext(ctx, "tcp", cfg.Relay.Addr)
	if err != nil {
		return nil, err
	}
	tcp := conn.(*net.TCPConn)
	if err := Watch(tcp); err != nil {
		_ = tcp.Close()
		return nil, fmt.Errorf("set socket options: %w", err)
	}
	conf := cfg.TLS.Clone()
	conf.NextProtos = []string{ALPN}
	t := tls.Client(tcp, conf)
	welcome, err := greet(ctx, t, cfg)
	if err != nil {
		_ = tcp.Close()
		return nil, err
	}
	s := &session{
		cfg:       cfg,
		control:   NewControl(t, tcp),
		tls:       t,
		welcome:   welcome,
		addr:      tcp.RemoteAddr().String(),
		announced: make(chan struct{}),
		ended:     make(chan struct{}),
		streams:   map[*net.TCPConn]struct{}{},
	}
	s.pool.init(s)
	return s, nil
}

func greet(ctx context.Context, t *tls.Conn, cfg PeerConfig) (Welcome, error) {
	if err := t.HandshakeContext(ctx); err != nil {
		return Welcome{}, err
	}
	if got := t.ConnectionState().NegotiatedProtocol; got != ALPN {
		return Welcome{}, fmt.Errorf("%w: relay speaks %q, want %q", ErrVersion, got, ALPN)
	}
	deadline, _ := ctx.Deadline()
	_ = t.SetDeadline(deadline)
	hello := Hello{Version: ProtocolVersion, Instance: cfg.Instance}
	if cfg.Accept != nil {
		hello.Caps |= CapAccept
	}
	if cfg.Watcher != nil {
		hello.Caps |= CapFollow
	}
	if _, err := t.Write(hello.Encode(nil)); err != nil {
		return Welcome{}, err
	}
	ft, body, err := ReadFrame(t, nil)
	if err != nil {
		return Welcome{}, err
	}
	switch ft {
	case FrameWelcome:
	case FrameRefused:
		code, err := DecodeRefusal(body)
		if err != nil {
			return Welcome{}, err
		}
		return Welcome{}, &Refusal{Code: code, Relay: cfg.Relay.ID}
	default:
		return Welcome{}, fmt.Errorf("%w: first frame has type %d", ErrFrame, ft)
	}
	w, err := DecodeWelcome(body)
	if err != nil {
		return Welcome{}, err
	}
	if w.Version != ProtocolVersion {
		return Welcome{}, fmt.Errorf("%w: relay has %d, we have %d", ErrVersion, w.Version, ProtocolVersion)
	}
	return w, t.SetDeadline(time.Time{})
}

// run works the session until it ends, then resets its streams and waits for
// everything it started.
func (s *session) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var flush func([]byte) []byte
	if s.cfg.Links != nil {
		var end func()
		flush, end = s.cfg.Links.follow(s.control)
		defer end()
	}
	var wg sync.WaitGroup
	wg.Go(func() { s.pool.fill(ctx) })
	err := s.control.Run(ctx, s.handle, flush)
	cancel()
	close(s.ended)
	s.mu.Lock()
	s.over = true
	for c := range s.streams {
		Abort(c)
	}
	s.mu.Unlock()
	s.pool.close()
	wg.Wait()
	s.handlers.Wait()
	return err
}

func (s *session) handle(t FrameType, body []byte) (bool, error) {
	switch t {
	case FrameTokens:
		tokens, err := DecodeTokens(body)
		if err != nil {
			return true, err
		}
		s.pool.addTokens(tokens)
	case FrameWant:
		n, err := DecodeNumber(body)
		if err != nil {
			return true, err
		}
		s.pool.grow(int(min(n, poolMost)))
	case FrameRestarting:
		ms, err := DecodeNumber(body)
		if err != nil {
			return true, err
		}
		s.retire(time.Duration(min(ms, 60_000)) * time.Millisecond)
	case FrameLink:
		r, err := DecodeReport(body)
		if err != nil {
			return true, err
		}
		s.report(r)
	case FrameNode:
		n, err := DecodeNodeSession(body)
		if err != nil {
			return true, err
		}
		s.nodeSession(n)
	case FrameSynced:
		s.listed()
	case FrameRefused:
		code, err := DecodeRefusal(body)
		if err != nil {
			return true, err
		}
		return true, &Refusal{Code: code, Relay: s.cfg.Relay.ID}
	default:
		return false, nil
	}
	return true, nil
}

func (s *session) report(r Report) {
	s.mu.Lock()
	synced := s.synced
	if !synced {
		s.reports = append(s.reports, r)
	}
	s.mu.Unlock()
	if synced && s.cfg.Watcher != nil && !s.retired() {
		s.cfg.Watcher.Report(s.cfg.Relay.ID, r)
	}
}

func (s *session) nodeSession(n NodeSession) {
	s.mu.Lock()
	synced := s.synced
	if !synced {
		s.nodes = append(s.nodes, n)
	}
	s.mu.Unlock()
	if synced && s.cfg.Watcher != nil && !s.retired() {
		s.cfg.Watcher.NodeSession(s.cfg.Relay.ID, n)
	}
}

func (s *session) listed() {
	s.mu.Lock()
	first := !s.synced
	s.synced = true
	reports, nodes := s.reports, s.nodes
	s.reports, s.nodes = nil, nil
	s.mu.Unlock()
	if first && s.cfg.Watcher != nil {
		s.cfg.Watcher.Up(s.cfg.Relay.ID, time.Duration(s.welcome.AgeMilli)*time.Millisecond, reports, nodes)
	}
}

// retire notes an announced restart: running streams go on, new ones go
// elsewhere.
func (s *session) retire(in time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.restart = in
	select {
	case <-s.announced:
	default:
		close(s.announced)
	}
}

func (s *session) retired() bool {
	select {
	case <-s.announced:
		return true
	default:
		return false
	}
}

// announcedFor returns how long the relay said its restart may take, or zero.
func (s *session) announcedFor() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.restart
}

// track takes responsibility for a joined stream: it is reset when the
// session ends. It fails if that has happened already.
func (s *session) track(c *net.TCPConn) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return errSession
	}
	s.streams[c] = struct{}{}
	return nil
}

func (s *session) untrack(c *net.TCPConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.streams, c)
}

func (s *session) streamCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.streams)
}
