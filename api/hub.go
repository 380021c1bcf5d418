package api

import (
	"net/http"
	"sync"
	"time"
)

const (
	// hubQueue holds the events a slow follower has not read yet. One that
	// falls behind is cut off; it comes back and gets the present state.
	hubQueue    = 8192
	maxFollow   = 64 // followers at the same time
	writeWithin = 10 * time.Second
)

// hub hands events to followers.
type hub struct {
	mu        sync.Mutex
	followers map[chan []byte]struct{} // guarded by mu
}

func (h *hub) send(b []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for ch := range h.followers {
		select {
		case ch <- b:
		default:
			delete(h.followers, ch)
			close(ch)
		}
	}
}

// follow returns a queue, closed when the follower is too slow, or nil when
// there are too many followers.
func (h *hub) follow() chan []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.followers) >= maxFollow {
		return nil
	}
	if h.followers == nil {
		h.followers = map[chan []byte]struct{}{}
	}
	ch := make(chan []byte, hubQueue)
	h.followers[ch] = struct{}{}
	return ch
}

func (h *hub) leave(ch chan []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.followers[ch]; ok {
		delete(h.followers, ch)
		close(ch)
	}
}

// events answers with one CloudEvents document a line: the present state, and
// with ?follow=true every change after it.
func (s *Server) events(w http.ResponseWriter, r *http.Request) {
	var live chan []byte
	if r.URL.Query().Get("follow") == "true" {
		if live = s.Fleet.hub.follow(); live == nil {
			writeProblem(w, refuse(http.StatusTooManyRequests, "EVENTS_FOLLOWERS", "%d followers already; end one of them", maxFollow))
			return
		}
		defer s.Fleet.hub.leave(live)
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	out := http.NewResponseController(w)
	line := func(b []byte) bool {
		_ = out.SetWriteDeadline(time.Now().Add(writeWithin)) // unsupported by test recorders only
		if _, err := w.Write(append(b, '\n')); err != nil {
			return false
		}
		return len(live) > 0 || out.Flush() == nil
	}
	for _, b := range s.Fleet.present() {
		if !line(b) {
			return
		}
	}
	if live == nil {
		return
	}
	if out.Flush() != nil {
		return
	}
	for {
		select {
		case <-r.Context().Done():
			return
		case b, ok := <-live:
			if !ok || !line(b) {
				return
			}
		}
	}
}
