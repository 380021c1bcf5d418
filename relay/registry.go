package relay

import (
	"crypto/rand"
	"fmt"
	"time"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/securelink"
)

// enter adds the session. A session of the same process is dead by now, and
// so are those of earlier processes of an accepting end: its streams end in
// the process. Dialing ends may overlap.
func (s *Server) enter(sess *session) error {
	key := sessionKey{sess.peer, sess.hello.Instance}
	s.mu.Lock()
	var old []*session
	count := 0
	for k, other := range s.sessions {
		if k.peer != sess.peer {
			continue
		}
		count++
		if k == key || sess.hello.Caps&securelink.CapAccept != 0 {
			old = append(old, other)
		}
	}
	if count-len(old) >= maxSessions {
		s.mu.Unlock()
		return fmt.Errorf("%s has %d sessions already", sess.peer, count)
	}
	s.sessions[key] = sess
	s.metrics.sessions.WithLabelValues(sess.peer.Role).Inc()
	if sess.peer.Role == roleNode {
		s.nodes[sess.peer.ID] = true
		s.changedNode(sess.peer.ID)
	}
	if sess.hello.Caps&securelink.CapFollow != 0 {
		s.followers[sess] = struct{}{}
	}
	if s.retiring {
		sess.control.Send(s.restarting())
	}
	s.mu.Unlock()
	for _, o := range old {
		o.control.Fail(errReplaced)
		o.end()
	}
	return nil
}

// leave takes the session out of the registry and ends its streams: a host
// that is gone is out of routing from here on.
func (s *Server) leave(sess *session) {
	s.mu.Lock()
	s.metrics.sessions.WithLabelValues(sess.peer.Role).Dec()
	delete(s.followers, sess)
	for t := range sess.tokens {
		delete(s.tokens, t)
	}
	for id := range sess.links {
		// A newer session of the node may own the link by now.
		if e := s.links[id]; e.s == sess {
			delete(s.links, id)
			s.changedLink(id)
		}
	}
	if key := (sessionKey{sess.peer, sess.hello.Instance}); s.sessions[key] == sess {
		delete(s.sessions, key)
	}
	if !s.hasSessionLocked(sess.peer) {
		if sess.peer.Role == roleNode {
			s.nodes[sess.peer.ID] = false
			s.changedNode(sess.peer.ID)
		}
	}
	s.mu.Unlock()
	sess.end()
}

func (s *Server) hasSessionLocked(p Peer) bool {
	for k := range s.sessions {
		if k.peer == p {
			return true
		}
	}
	return false
}

// changedLink marks what followers are to be told. They route workloads only;
// service links are no concern of theirs.
func (s *Server) changedLink(id placement.LinkID) {
	if id.Service != "" {
		return
	}
	for f := range s.followers {
		f.dirtyLinks[id] = struct{}{}
		f.control.Notify()
	}
}

func (s *Server) changedNode(node string) {
	for f := range s.followers {
		f.dirtyNodes[node] = struct{}{}
		f.control.Notify()
	}
}

// flush appends what a follower has not been told yet.
func (s *Server) flush(f *session, b []byte) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f.listing {
		for id := range s.links {
			if id.Service == "" {
				f.dirtyLinks[id] = struct{}{}
			}
		}
		for node := range s.nodes {
			f.dirtyNodes[node] = struct{}{}
		}
	}
	for node := range f.dirtyNodes {
		b = securelink.NodeSession{Node: node, Present: s.nodes[node]}.Encode(b)
	}
	for id := range f.dirtyLinks {
		e, ok := s.links[id]
		rep := securelink.Report{Record: e.record, Present: ok}
		rep.Link = id
		b = rep.Encode(b)
	}
	clear(f.dirtyLinks)
	clear(f.dirtyNodes)
	if f.listing {
		f.listing = false
		b = securelink.AppendFrame(b, securelink.FrameSynced, nil)
	}
	return b
}

func (s *Server) handle(sess *session, t securelink.FrameType, body []byte) (bool, error) {
	switch t {
	case securelink.FrameRegister:
		r, err := securelink.DecodeRegister(body)
		if err != nil {
			return true, err
		}
		return true, s.register(sess, r)
	case securelink.FrameUnregister:
		id, err := securelink.DecodeUnregister(body)
		if err != nil {
			return true, err
		}
		s.unregister(sess, id)
	case securelink.FrameAskTokens:
		n, err := securelink.DecodeNumber(body)
		if err != nil {
			return true, err
		}
		return true, s.issue(sess, int(min(n, maxTokens)))
	case securelink.FrameSynced:
	default:
		return false, nil
	}
	return true, nil
}

func (s *Server) register(sess *session, r securelink.Record) error {
	if !mayRegister(sess.peer, r.Link) {
		return fmt.Errorf("register %s: %w", r.Link, errForeign)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := sess.links[r.Link]; !ok && len(sess.links) >= maxLinks {
		return fmt.Errorf("register %s: more than %d links", r.Link, maxLinks)
	}
	if s.sessions[sessionKey{sess.peer, sess.hello.Instance}] != sess {
		return errReplaced
	}
	sess.links[r.Link] = struct{}{}
	s.links[r.Link] = entry{record: r, s: sess}
	s.changedLink(r.Link)
	return nil
}

// mayRegister reports whether the peer is what the link leads to.
func mayRegister(p Peer, l placement.LinkID) bool {
	if l.Service != "" {
		return p.Role == roleController
	}
	return p.Role == roleNode && l.Placement.Node == p.ID
}

func (s *Server) unregister(sess *session, id placement.LinkID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(sess.links, id)
	if e := s.links[id]; e.s == sess {
		delete(s.links, id)
		s.changedLink(id)
	}
}

// issue gives a peer n fresh tokens. Unused ones count against its limit
// until they expire.
func (s *Server) issue(sess *session, n int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if len(sess.tokens)+n > maxTokens {
		for t := range sess.tokens {
			if now.After(s.tokens[t].until) {
				delete(s.tokens, t)
				delete(sess.tokens, t)
			}
		}
		n = min(n, maxTokens-len(sess.tokens))
	}
	tokens := make([]securelink.Token, n)
	for i := range tokens {
		if _, err := rand.Read(tokens[i][:]); err != nil {
			return err
		}
		s.tokens[tokens[i]] = grant{s: sess, until: now.Add(securelink.TokenLife)}
		sess.tokens[tokens[i]] = struct{}{}
	}
	sess.control.Send(securelink.EncodeTokens(nil, tokens))
	return nil
}
