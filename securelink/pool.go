package securelink

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"
)

const (
	poolLeast  = 8   // idle data connections kept warm per session
	poolMost   = 256 // and at most after a burst
	poolShrink = 10 * time.Second
	dialAtOnce = 16 // data connections being dialled at the same time
)

var errNoToken = errors.New("no token for a data connection")

// pool keeps idle data connections of one session: at a dialing end ready to
// be taken, at an accepting end waiting for the relay's OPEN.
type pool struct {
	s    *session
	wake chan struct{}
	slot chan struct{} // one entry per dial under way

	mu      sync.Mutex
	closed  bool
	want    int
	idle    []*net.TCPConn            // dialing end, newest last
	waiting map[*net.TCPConn]struct{} // accepting end
	dialing int
	tokens  []timedToken
	asked   time.Time
	changed chan struct{} // closed and replaced when tokens arrive
}

type timedToken struct {
	token Token
	until time.Time
}

func (p *pool) init(s *session) {
	p.s = s
	p.wake = make(chan struct{}, 1)
	p.slot = make(chan struct{}, dialAtOnce)
	p.want = poolLeast
	p.waiting = map[*net.TCPConn]struct{}{}
	p.changed = make(chan struct{})
}

func (p *pool) signal() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

func (p *pool) addTokens(tokens []Token) {
	until := time.Now().Add(TokenLife - 5*time.Second)
	p.mu.Lock()
	for _, t := range tokens {
		p.tokens = append(p.tokens, timedToken{t, until})
	}
	p.asked = time.Time{}
	close(p.changed)
	p.changed = make(chan struct{})
	p.mu.Unlock()
	p.signal()
}

// grow raises the number of warm connections after the pool ran low.
func (p *pool) grow(by int) {
	p.mu.Lock()
	p.want = min(p.want+max(by, 1), poolMost)
	p.mu.Unlock()
	p.signal()
}

// takeToken returns a fresh token, asking for more before they run out.
func (p *pool) takeToken(ctx context.Context) (Token, error) {
	for {
		p.mu.Lock()
		now := time.Now()
		for len(p.tokens) > 0 && now.After(p.tokens[0].until) {
			p.tokens = p.tokens[1:]
		}
		if len(p.tokens) < p.want && now.Sub(p.asked) > time.Second {
			p.asked = now
			p.s.control.Send(EncodeNumber(nil, FrameAskTokens, uint64(2*p.want)))
		}
		if len(p.tokens) > 0 {
			t := p.tokens[0].token
			p.tokens = p.tokens[1:]
			p.mu.Unlock()
			return t, nil
		}
		changed := p.changed
		p.mu.Unlock()
		select {
		case <-changed:
		case <-p.s.ended:
			return Token{}, errSession
		case <-ctx.Done():
			return Token{}, errors.Join(errNoToken, ctx.Err())
		}
	}
}

// dial makes one data connection and admits it; magic says what it is for.
func (p *pool) dial(ctx context.Context, magic string) (*net.TCPConn, error) {
	token, err := p.takeToken(ctx)
	if err != nil {
		return nil, err
	}
	d := net.Dialer{Timeout: ConnectWithin, KeepAlive: -1}
	conn, err := d.DialContext(ctx, "tcp", p.s.addr)
	if err != nil {
		return nil, err
	}
	tcp := conn.(*net.TCPConn)
	if err := Watch(tcp); err != nil {
		_ = tcp.Close()
		return nil, err
	}
	if err := WriteFull(tcp, append([]byte(magic), token[:]...)); err != nil {
		_ = tcp.Close()
		return nil, err
	}
	return tcp, nil
}

// fill keeps the pool at its wanted size until ctx is done.
func (p *pool) fill(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	shrink := time.NewTicker(poolShrink)
	defer shrink.Stop()
	for {
		for p.reserve() {
			select {
			case p.slot <- struct{}{}:
			case <-ctx.Done():
				return
			}
			wg.Go(func() {
				defer func() { <-p.slot }()
				if err := p.add(ctx); err != nil {
					// The control connection tells whether the relay is
					// alive; a failed data connection is tried again.
					sleep(ctx, retryFirst)
					p.signal()
				}
			})
		}
		select {
		case <-ctx.Done():
			return
		case <-p.wake:
		case <-shrink.C:
			p.mu.Lock()
			p.want = max(p.want*3/4, poolLeast)
			var surplus *net.TCPConn
			if len(p.idle) > p.want {
				surplus = p.idle[0]
				p.idle = p.idle[1:]
			}
			p.mu.Unlock()
			if surplus != nil {
				_ = surplus.Close()
			}
		}
	}
}

// reserve reports whether one more connection is wanted, and counts it.
func (p *pool) reserve() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.idle)+len(p.waiting)+p.dialing >= p.want {
		return false
	}
	p.dialing++
	return true
}

func (p *pool) add(ctx context.Context) error {
	conn, err := p.dial(ctx, Magic)
	p.mu.Lock()
	p.dialing--
	if err != nil {
		p.mu.Unlock()
		return err
	}
	if p.closed {
		p.mu.Unlock()
		return conn.Close()
	}
	if p.s.cfg.Accept == nil {
		p.idle = append(p.idle, conn)
		p.mu.Unlock()
		return nil
	}
	p.waiting[conn] = struct{}{}
	p.mu.Unlock()
	p.s.handlers.Go(func() { p.s.await(conn) })
	return nil
}

// take returns a warm connection, or dials one when there is none. Dials are
// bounded: a burst must not look to the relay like a flood of strangers. An
// accepting end has none that are warm for its own streams: they are few.
func (p *pool) take(ctx context.Context) (*net.TCPConn, error) {
	accepts := p.s.cfg.Accept != nil
	if !accepts {
		if conn := p.pop(); conn != nil {
			return conn, nil
		}
		p.signal()
	}
	select {
	case p.slot <- struct{}{}:
	case <-p.s.ended:
		return nil, errSession
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { <-p.slot }()
	if accepts {
		return p.dial(ctx, MagicDial)
	}
	if conn := p.pop(); conn != nil { // another dial has brought it
		return conn, nil
	}
	return p.dial(ctx, Magic)
}

// pop takes a living idle connection out of the pool, or returns nil.
func (p *pool) pop() *net.TCPConn {
	for {
		p.mu.Lock()
		n := len(p.idle)
		if n <= p.want/4 {
			p.want = min(p.want*2, poolMost)
		}
		if n == 0 {
			p.mu.Unlock()
			return nil
		}
		conn := p.idle[n-1]
		p.idle = p.idle[:n-1]
		p.mu.Unlock()
		p.signal()
		if !stale(conn) {
			return conn
		}
		_ = conn.Close()
	}
}

// left notes that a waiting connection of an accepting end is in use or gone.
func (p *pool) left(conn *net.TCPConn) {
	p.mu.Lock()
	delete(p.waiting, conn)
	p.mu.Unlock()
	p.signal()
}

// size returns the number of warm connections.
func (p *pool) size() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.idle) + len(p.waiting)
}

func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, c := range p.idle {
		_ = c.Close()
	}
	p.idle = nil
	for c := range p.waiting {
		_ = c.Close()
	}
}

// sleep waits for d or until ctx is done.
func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
