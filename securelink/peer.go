package securelink

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

// RelayAddress is a relay's id and host:port.
type RelayAddress struct {
	ID   string `json:"id"`
	Addr string `json:"addr"`
}

// Watcher is told by the dialing end's sessions what the relays say. Calls
// for one relay come one after another; those for different relays may
// overlap. A Watcher must not block.
type Watcher interface {
	// Up is called when a session has received the relay's full list. What
	// the relay said in an earlier session no longer counts.
	Up(relay string, age time.Duration, links []Report, nodes []NodeSession)
	// Report is called for each change after Up.
	Report(relay string, r Report)
	// NodeSession is called for each change after Up.
	NodeSession(relay string, n NodeSession)
	// Down is called when the session is lost, or when the relay announced
	// its restart; announced is zero in the first case.
	Down(relay string, announced time.Duration)
}

// PeerConfig configures the sessions with one relay.
type PeerConfig struct {
	Relay    RelayAddress
	TLS      *tls.Config     // mutual TLS with the relay's name; ALPN is set by the session
	Instance uint64          // random, the same for all sessions of this process
	Links    *LinkSet        // accepting end only
	Accept   func(*Incoming) // accepting end only; each call has its own goroutine
	Watcher  Watcher         // dialing end only
	Up       func()          // a session came up and takes new streams; may be nil; must not block
	Logger   *slog.Logger
}

// PeerStatus says how the sessions with one relay are.
type PeerStatus struct {
	Relay     RelayAddress
	Connected bool
	Since     time.Time // of the present state
	Err       string    // why there is no session
	Streams   int
	Pool      int
}

// Peer keeps a session with one relay: it dials again for ever, and overlaps
// the old session with the new one when the relay restarts.
type Peer struct {
	cfg PeerConfig

	mu      sync.Mutex
	current *session // nil without a live session that takes new streams
	since   time.Time
	lastErr error
	retired map[*session]struct{}
}

// NewPeer returns a Peer that does nothing until Run.
func NewPeer(cfg PeerConfig) *Peer {
	return &Peer{cfg: cfg, since: time.Now(), retired: map[*session]struct{}{}}
}

// Run keeps the session until ctx is done. Then nothing of it is left.
func (p *Peer) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wait := retryFirst
	var left uint64 // the relay process that announced its restart
	for ctx.Err() == nil {
		s, err := connect(ctx, p.cfg)
		if err == nil && s.welcome.Instance == left {
			// Still the old process: it only keeps its running streams.
			_ = s.tls.Close()
			sleep(ctx, 4*retryFirst)
			continue
		}
		if err != nil {
			p.failed(err)
			sleep(ctx, wait/2+rand.N(wait))
			wait = min(wait*2, retryMost)
			continue
		}
		wait = retryFirst
		p.up(s)
		ended := make(chan error, 1)
		wg.Go(func() { ended <- s.run(ctx) })
		select {
		case err := <-ended:
			p.down(s, err)
			if _, refused := errors.AsType[*Refusal](err); refused {
				sleep(ctx, retryMost)
			}
		case <-s.announced:
			left = s.welcome.Instance
			p.down(s, nil)
			wg.Go(func() { p.outlive(ctx, s, ended) })
		}
	}
}

// outlive keeps a retired session until its streams are finished.
func (p *Peer) outlive(ctx context.Context, s *session, ended <-chan error) {
	p.mu.Lock()
	p.retired[s] = struct{}{}
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.retired, s)
		p.mu.Unlock()
	}()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ended:
			return
		case <-tick.C:
			if s.streamCount() == 0 {
				s.control.Fail(errSession)
			}
		case <-ctx.Done():
			<-ended
			return
		}
	}
}

func (p *Peer) up(s *session) {
	p.mu.Lock()
	p.current, p.since, p.lastErr = s, time.Now(), nil
	p.mu.Unlock()
	p.cfg.Logger.Info("relay session up", "relay", p.cfg.Relay.ID)
	if p.cfg.Up != nil {
		p.cfg.Up()
	}
}

func (p *Peer) down(s *session, err error) {
	announced := s.announcedFor()
	p.mu.Lock()
	p.current, p.since, p.lastErr = nil, time.Now(), err
	p.mu.Unlock()
	p.cfg.Logger.Info("relay session down", "relay", p.cfg.Relay.ID, "restart_announced", announced > 0, "err", err)
	if p.cfg.Watcher != nil {
		p.cfg.Watcher.Down(p.cfg.Relay.ID, announced)
	}
}

func (p *Peer) failed(err error) {
	p.mu.Lock()
	first := p.lastErr == nil || p.lastErr.Error() != err.Error()
	p.lastErr = err
	p.mu.Unlock()
	if first {
		p.cfg.Logger.Warn("relay not reached, trying again", "relay", p.cfg.Relay.ID, "err", err)
	}
}

func (p *Peer) session() *session {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.current
}

// Status returns a snapshot.
func (p *Peer) Status() PeerStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	st := PeerStatus{Relay: p.cfg.Relay, Connected: p.current != nil, Since: p.since}
	if p.lastErr != nil {
		st.Err = p.lastErr.Error()
	}
	if p.current != nil {
		st.Streams += p.current.streamCount()
		st.Pool = p.current.pool.size()
	}
	for s := range p.retired {
		st.Streams += s.streamCount()
	}
	return st
}

// Stream is an opened stream at the dialing end.
type Stream struct {
	Conn *net.TCPConn
	s    *session
}

// Close ends the stream and releases it.
func (st *Stream) Close() {
	_ = st.Conn.Close()
	st.s.untrack(st.Conn)
}

// Open opens a stream through this relay. The error is a *Refusal when the
// relay or the accepting end answered.
func (p *Peer) Open(ctx context.Context, o Open) (*Stream, error) {
	s := p.session()
	if s == nil {
		return nil, errSession
	}
	frame := o.Encode(nil)
	var err error
	for range 3 {
		var conn *net.TCPConn
		conn, err = s.pool.take(ctx)
		if err != nil {
			return nil, err
		}
		var answered bool
		answered, err = s.ask(ctx, conn, frame)
		if err == nil {
			return &Stream{Conn: conn, s: s}, nil
		}
		s.untrack(conn)
		_ = conn.Close()
		if answered || ctx.Err() != nil {
			return nil, err
		}
		// The pooled connection was dead; nothing was sent on it that a
		// placement would have acted on.
	}
	return nil, err
}

// ask sends OPEN and reads the answer.
func (s *session) ask(ctx context.Context, conn *net.TCPConn, frame []byte) (answered bool, err error) {
	if err := s.track(conn); err != nil {
		return false, err
	}
	past := time.Unix(1, 0)
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(past) })
	if err := WriteFull(conn, frame); err != nil {
		stop()
		return false, err
	}
	t, body, err := ReadFrame(conn, nil)
	if !stop() {
		return false, context.Cause(ctx)
	}
	if err != nil {
		return false, err
	}
	switch t {
	case FrameOK:
		return true, Unwatch(conn)
	case FrameRefuse:
		code, err := DecodeRefusal(body)
		if err != nil {
			return true, err
		}
		return true, &Refusal{Code: code, Relay: s.cfg.Relay.ID}
	default:
		return true, fmt.Errorf("%w: answer of type %d", ErrFrame, t)
	}
}
