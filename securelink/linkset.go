package securelink

import (
	"maps"
	"sync"

	"github.com/opfield/availability/placement"
)

// LinkSet is what an accepting end wants registered at every relay. Each
// session sends the difference to what it has sent before.
type LinkSet struct {
	mu      sync.Mutex
	records map[placement.LinkID]Record
	watch   map[*Control]struct{}
}

// Set replaces the whole set.
func (s *LinkSet) Set(records []Record) {
	next := make(map[placement.LinkID]Record, len(records))
	for _, r := range records {
		next[r.Link] = r
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if maps.Equal(s.records, next) {
		return
	}
	s.records = next
	for c := range s.watch {
		c.Notify()
	}
}

// follow returns the flush function of one session and what ends it.
func (s *LinkSet) follow(c *Control) (flush func([]byte) []byte, end func()) {
	s.mu.Lock()
	if s.watch == nil {
		s.watch = map[*Control]struct{}{}
	}
	s.watch[c] = struct{}{}
	s.mu.Unlock()
	sent := map[placement.LinkID]Record{}
	first := true
	flush = func(b []byte) []byte {
		s.mu.Lock()
		defer s.mu.Unlock()
		for id := range sent {
			if _, ok := s.records[id]; !ok {
				delete(sent, id)
				b = EncodeUnregister(b, id)
			}
		}
		for id, r := range s.records {
			if sent[id] != r {
				sent[id] = r
				b = r.EncodeRegister(b)
			}
		}
		if first {
			first = false
			b = AppendFrame(b, FrameSynced, nil)
		}
		return b
	}
	return flush, func() {
		s.mu.Lock()
		delete(s.watch, c)
		s.mu.Unlock()
	}
}
