package carry

import (
	"sync"
	"time"
)

// crashes counts how often a copy ended by itself.
type crashes struct {
	looked  bool // an end from before the worker's first look is not counted
	counted string
	times   []time.Time // since the last stable run
	looping bool
	ours    string // the run that we ended ourselves
}

// run names one start of one container.
func run(id, startedAt string) string { return id + "@" + startedAt }

// ended takes in that a run is over, by itself if byItself, and returns when
// the next may begin.
func (c *crashes) ended(run string, byItself func() bool, now time.Time) time.Time {
	if c.counted != run {
		c.counted = run
		if c.looked && c.ours != run && byItself() {
			c.times = append(c.times, now)
		}
	}
	c.looked = true
	n := len(c.times)
	if n == 0 {
		return now
	}
	if n >= crashLoop && c.times[n-1].Sub(c.times[n-crashLoop]) <= crashStable {
		c.looping = true
	}
	if n == 1 {
		return c.times[0]
	}
	return c.times[n-1].Add(min(crashFirst<<min(n-2, 10), crashMost))
}

// forgive forgets what was: another version, or a start that was asked for,
// begins with a clean record.
func (c *crashes) forgive() { c.times, c.looping = nil, false }

// runs takes in that a run goes on since a moment.
func (c *crashes) runs(since, now time.Time) {
	c.looked = true
	if len(c.times) > 0 && now.Sub(since) >= crashStable {
		c.times, c.looping = nil, false
	}
}

// hands remembers which containers were signalled, and which signals are our
// own.
type hands struct {
	mu   sync.Mutex
	seen map[string]time.Time // signals from outside, by container id
	own  map[string]int       // stops and removals of ours that run
	done map[string]time.Time // and the last that ended: its events come late
}

func newHands() *hands {
	return &hands{seen: map[string]time.Time{}, own: map[string]int{}, done: map[string]time.Time{}}
}

// ours announces that we end a container, until the returned function.
func (h *hands) ours(id string) func() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.own[id]++
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.own[id]--; h.own[id] == 0 {
			delete(h.own, id)
		}
		now := time.Now()
		h.done[id] = now
		for id, at := range h.done {
			if now.Sub(at) > handHold {
				delete(h.done, id)
			}
		}
	}
}

// signalled hears of a signal to a container.
func (h *hands) signalled(id string, at time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.own[id] > 0 || at.Before(h.done[id]) {
		return
	}
	for other, when := range h.seen {
		if at.Sub(when) > handHold {
			delete(h.seen, other)
		}
	}
	h.seen[id] = at
}

// forget is for an engine that goes: what it signals then is not by hand.
func (h *hands) forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	clear(h.seen)
}

// signals reports whether somebody else signalled a container lately.
func (h *hands) signals(id string, now time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	at, ok := h.seen[id]
	return ok && now.Sub(at) <= handHold
}

// take reports whether that is still believed, and forgets it.
func (h *hands) take(id string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, ok := h.seen[id]
	delete(h.seen, id)
	return ok
}
