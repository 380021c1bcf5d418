package endpoint

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/securelink"
	"github.com/opfield/availability/upstream"
)

// The limits of LNK-1 and LNK-4. nginx's proxy_connect_timeout, which also
// bounds the handshake, is above the longest of them.
const (
	dialWithin  = 2 * time.Second       // while another placement serves
	holdWithin  = 3 * time.Second       // without relay, or without another placement
	holdRestart = 8 * time.Second       // after an announced restart of a relay
	skipFor     = time.Second           // a link whose attempt failed
	tryAgain    = 50 * time.Millisecond // while holding
	firstWithin = 10 * time.Second      // for nginx to send its ClientHello
	nudgeEvery  = 20 * time.Millisecond // joined streams whose own placement is back
)

// endJunk is how many bytes follow the end of a stream. They are not a TLS
// record and longer than the longest one, so OpenSSL fails on them wherever
// the stream was cut; behind a close_notify nobody reads them (LNK-6).
const endJunk = 17 << 10

// stream is one connection of nginx that leads somewhere.
type stream struct {
	nginx *net.TCPConn
	far   *net.TCPConn
	// joined is set if the stream leads to a sibling of the link via.
	joined *securelink.Records
	via    *link
}

// reset cuts the stream at both ends.
func (st *stream) reset() {
	securelink.Abort(st.far)
}

// Serve accepts nginx's connections until ctx is done or the listener is
// closed. Running streams then have the drain interval.
func (s *Set) Serve(ctx context.Context, ln net.Listener) error {
	stop := context.AfterFunc(ctx, func() { _ = ln.Close() })
	defer stop()
	hard, cancel := context.WithCancel(context.Background())
	var wg, conns sync.WaitGroup
	wg.Go(func() { s.homeward(hard) })
	defer wg.Wait()
	defer cancel()
	defer conns.Wait()
	for {
		conn, err := ln.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				s.drain(&conns)
				return nil
			}
			s.cfg.Logger.Warn("accept failed, trying again", "err", err)
			pause(ctx, tryAgain, nil)
			continue
		}
		tcp := conn.(*net.TCPConn)
		conns.Go(func() { s.serve(hard, tcp) })
	}
}

// homeward ends joined streams, once idle, whose own placement is back: as
// long as nginx keeps one, that endpoint would share the sibling's fate.
func (s *Set) homeward(ctx context.Context) {
	tick := time.NewTicker(nudgeEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			s.mu.Lock()
			for _, r := range s.straysLocked(now, nil) {
				r.Nudge()
			}
			s.mu.Unlock()
		}
	}
}

// straysLocked returns the joined streams that should end when idle: all, or
// those that came to one link.
func (s *Set) straysLocked(now time.Time, via *link) []*securelink.Records {
	var all []*securelink.Records
	for st := range s.joined {
		if (via == nil || st.via == via) && st.via.order.State == upstream.Open && !now.Before(st.via.failed) {
			all = append(all, st.joined)
		}
	}
	return all
}

// drain waits until every connection has ended, for the drain interval.
func (s *Set) drain(wg *sync.WaitGroup) {
	done := make(chan struct{})
	go func() {
		wg.Wait()
		close(done)
	}()
	limit := time.NewTimer(s.cfg.Drain)
	defer limit.Stop()
	select {
	case <-done:
	case <-limit.C:
		s.mu.Lock()
		for _, l := range s.byLink {
			for st := range l.streams {
				st.reset()
				securelink.Abort(st.nginx)
			}
		}
		s.mu.Unlock()
	}
}

// serve works one connection from nginx.
func (s *Set) serve(ctx context.Context, nginx *net.TCPConn) {
	defer nginx.Close()
	local, err := netip.ParseAddrPort(nginx.LocalAddr().String())
	if err != nil {
		return
	}
	s.mu.Lock()
	l := s.byAddr[local.Addr()]
	var via placement.LinkID
	if l != nil {
		via = l.order.Link
	}
	s.mu.Unlock()
	if l == nil {
		s.metrics.conns.WithLabelValues("unknown").Inc()
		securelink.Abort(nginx)
		return
	}
	if s.decide(l, time.Now(), nil).refuse {
		s.metrics.conns.WithLabelValues("refused").Inc()
		securelink.Abort(nginx)
		return
	}
	first := firstBytes(nginx)
	if first == nil {
		s.metrics.conns.WithLabelValues("silent").Inc()
		securelink.Abort(nginx)
		return
	}
	far, target := s.reach(ctx, l, first)
	if far == nil {
		s.metrics.conns.WithLabelValues("refused").Inc()
		securelink.Abort(nginx)
		return
	}
	defer far.Close()
	s.metrics.conns.WithLabelValues("ok").Inc()
	st := &stream{nginx: nginx, far: far.Conn, via: l}
	if target != via {
		st.joined = &securelink.Records{Dst: nginx}
	}
	s.enter(target, st)
	defer s.leave(target, st)
	s.join(st)
}

// firstBytes reads what nginx sends first, or returns nil.
func firstBytes(nginx *net.TCPConn) []byte {
	buf := make([]byte, 4<<10)
	_ = nginx.SetReadDeadline(time.Now().Add(firstWithin))
	n, err := nginx.Read(buf)
	if err != nil || n == 0 {
		return nil
	}
	_ = nginx.SetReadDeadline(time.Time{})
	return buf[:n]
}

// reach opens a stream to the link's placement or, as its state says, to a
// sibling. It returns nil when nginx must go on to another endpoint.
func (s *Set) reach(ctx context.Context, l *link, first []byte) (*securelink.Stream, placement.LinkID) {
	start := time.Now()
	var tried map[placement.LinkID]struct{}
	for ctx.Err() == nil {
		v := s.decide(l, start, tried)
		switch {
		case v.refuse:
			return nil, placement.LinkID{}
		case v.wait != nil:
			pause(ctx, min(v.within, tryAgain), v.wait)
			clear(tried) // what failed while nothing else served is tried again
			continue
		}
		attempt, cancel := context.WithTimeout(ctx, v.within)
		if v.alone != nil {
			go giveWay(attempt, cancel, v.alone)
		}
		far, err := s.cfg.Dialer.Open(attempt, securelink.Open{Link: v.target, Epoch: v.epoch, First: first})
		timedOut := attempt.Err() != nil
		cancel()
		if err == nil {
			return far, v.target
		}
		s.cfg.Logger.Debug("link attempt failed", "link", v.target.String(), "err", err)
		if timedOut || securelink.RefusalCode(err) != 0 {
			s.fail(v.target)
			if tried == nil {
				tried = map[placement.LinkID]struct{}{}
			}
			tried[v.target] = struct{}{}
			continue
		}
		// No relay answered about the placement.
		pause(ctx, tryAgain, nil)
	}
	return nil, placement.LinkID{}
}

// giveWay ends an attempt that was given more than dialWithin because no
// sibling served, when that changes.
func giveWay(attempt context.Context, cancel context.CancelFunc, changed <-chan struct{}) {
	begun := time.Now()
	select {
	case <-attempt.Done():
	case <-changed:
		pause(attempt, dialWithin-time.Since(begun), nil)
		cancel()
	}
}

// pause waits for d, for wake or for ctx.
func pause(ctx context.Context, d time.Duration, wake <-chan struct{}) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-wake:
	case <-ctx.Done():
	}
}

// join copies both ways until the stream ends. Whatever ended it, nginx gets
// bytes that are no TLS record before the end.
func (s *Set) join(st *stream) {
	if s.cfg.Guard != nil {
		defer s.cfg.Guard.Hold(st.nginx)()
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := s.joiner.Copy(st.far, st.nginx); err != nil {
			securelink.Abort(st.far)
			return
		}
		_ = st.far.CloseWrite()
	})
	var err error
	if st.joined != nil {
		err = st.joined.Copy(st.far)
	} else {
		err = s.joiner.Copy(st.nginx, st.far)
	}
	// The node ends its side only when both directions are done, so after a
	// clean end nginx has its close_notify and there is nothing left to send.
	_, _ = st.nginx.Write(s.junk)
	if err != nil {
		securelink.Abort(st.far)
	}
	_ = st.nginx.CloseWrite() // with a guard, closing alone sends nothing
	_ = st.nginx.Close()
	_ = st.far.Close()
	wg.Wait()
}
