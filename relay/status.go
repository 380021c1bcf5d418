package relay

import (
	"cmp"
	"slices"
	"time"
)

// SessionStatus describes one session.
type SessionStatus struct {
	Peer    Peer
	Since   time.Time
	Links   int
	Streams int
}

// Status returns every session, by peer, and the number of streams.
func (s *Server) Status() (sessions []SessionStatus, streams int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sess := range s.sessions {
		sessions = append(sessions, SessionStatus{
			Peer: sess.peer, Since: sess.since, Links: len(sess.links), Streams: sess.streamCount(),
		})
	}
	slices.SortFunc(sessions, func(a, b SessionStatus) int { return cmp.Compare(a.Peer.String(), b.Peer.String()) })
	return sessions, s.streams
}
