package relay

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/securelink"
)

// open works one stream: it finds the accepting end, passes OPEN on, passes
// the answer back and joins the two connections until both ends are done.
func (s *Server) open(from *session, conn *net.TCPConn, body []byte) {
	o, err := securelink.DecodeOpen(body)
	if err != nil {
		s.metrics.opens.WithLabelValues("malformed").Inc()
		securelink.Abort(conn)
		return
	}
	// o.First aliases body, which stays untouched until the answer is here.
	far, to, err := s.reach(from, o)
	if err != nil {
		code := securelink.RefusalCode(err)
		s.metrics.opens.WithLabelValues(code.String()).Inc()
		_, _ = conn.Write(securelink.EncodeRefusal(nil, securelink.FrameRefuse, code))
		return
	}
	defer s.streamEnded()
	defer far.Close()
	if !from.joined(conn) || !to.joined(far) {
		from.parted(conn)
		return
	}
	defer from.parted(conn)
	defer to.parted(far)
	if err := securelink.WriteFull(conn, securelink.AppendFrame(nil, securelink.FrameOK, nil)); err != nil {
		securelink.Abort(far)
		return
	}
	s.metrics.opens.WithLabelValues("ok").Inc()
	_ = errors.Join(securelink.Unwatch(conn), securelink.Unwatch(far))
	s.joiner.Join(conn, far)
}

// reach gets the accepting end's OK on one of its connections. Afterwards the
// stream is counted.
func (s *Server) reach(from *session, o securelink.Open) (*net.TCPConn, *session, error) {
	if !from.opens.Allow() {
		return nil, nil, &securelink.Refusal{Code: securelink.OverLimit}
	}
	to, err := s.lookup(from, o)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), securelink.OpenWithin)
	defer cancel()
	frame := o.Encode(nil)
	for {
		far, err := to.take(ctx)
		if err == nil {
			err = s.ask(ctx, to, far, frame)
		}
		if err == nil {
			return far, to, nil
		}
		if code := securelink.RefusalCode(err); code != 0 {
			s.streamEnded()
			return nil, nil, err
		}
		// The pooled connection was dead. With the session it would have
		// been closed by us; so take the next one.
	}
}

// ask sends OPEN and waits for the answer. An error that is no refusal means
// that the connection was dead before it was used.
func (s *Server) ask(ctx context.Context, to *session, far *net.TCPConn, frame []byte) error {
	if !to.joined(far) { // so that the wait ends with the session
		_ = far.Close()
		return &securelink.Refusal{Code: securelink.NotRegistered}
	}
	defer to.parted(far)
	deadline, _ := ctx.Deadline()
	_ = far.SetDeadline(deadline)
	if err := securelink.WriteFull(far, frame); err != nil {
		_ = far.Close()
		return s.lost(ctx, to, err)
	}
	t, body, err := securelink.ReadFrame(far, nil)
	if err != nil {
		_ = far.Close()
		return s.lost(ctx, to, err)
	}
	switch t {
	case securelink.FrameOK:
		return far.SetDeadline(time.Time{})
	case securelink.FrameRefuse:
		_ = far.Close()
		code, err := securelink.DecodeRefusal(body)
		if err != nil {
			code = securelink.AppRefused
		}
		return &securelink.Refusal{Code: code}
	default:
		_ = far.Close()
		return &securelink.Refusal{Code: securelink.AppRefused}
	}
}

func (s *Server) lost(ctx context.Context, to *session, err error) error {
	to.mu.Lock()
	over := to.over
	to.mu.Unlock()
	switch {
	case over:
		return &securelink.Refusal{Code: securelink.NotRegistered}
	case ctx.Err() != nil:
		return &securelink.Refusal{Code: securelink.Timeout}
	default:
		return err
	}
}

// lookup finds the session that has the link ready, within the limits. On
// success the stream is counted.
func (s *Server) lookup(from *session, o securelink.Open) (*session, error) {
	refuse := func(c securelink.Code) (*session, error) { return nil, &securelink.Refusal{Code: c} }
	if !mayOpen(from.peer, o.Link) {
		return refuse(securelink.Unauthorised)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.links[o.Link]
	switch {
	case s.retiring:
		return refuse(securelink.ShuttingDown)
	case !ok:
		return refuse(securelink.NotRegistered)
	case o.Epoch != e.record.Order.Epoch:
		return refuse(securelink.StaleEpoch)
	case !e.record.Serves():
		return refuse(securelink.NotReady)
	case s.streams >= s.cfg.MaxStreams,
		from.streamCount() >= s.cfg.MaxPeerStreams, e.s.streamCount() >= s.cfg.MaxPeerStreams:
		return refuse(securelink.OverLimit)
	}
	s.streams++
	s.metrics.streams.Set(float64(s.streams))
	return e.s, nil
}

// mayOpen reports whether the peer may use the link: ingress nodes those of
// workloads, nodes those of services. The accepting end verifies it again
// inside the end-to-end TLS.
func mayOpen(p Peer, l placement.LinkID) bool {
	if l.Service != "" {
		return p.Role == roleNode
	}
	return p.Role == roleIngress
}

func (s *Server) streamEnded() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.streams--
	s.metrics.streams.Set(float64(s.streams))
}
