package apply

import "time"

// Change says how soon a change must reach nginx.
type Change uint8

// The kinds of changes. The zero value is no change.
const (
	None   Change = iota
	Quiet         // joined links already route right: wait until things are quiet
	Prompt        // a route, a certificate or a new placement
)

// Timing of Schedule (RTE-8). Every reload loses about one request on every
// third busy client connection, so they are collected.
const (
	promptGap   = 150 * time.Millisecond // a burst is over after this long without a prompt change
	promptLimit = 1500 * time.Millisecond
	quietGap    = 30 * time.Second
	retryFirst  = 2 * time.Second
	retryLimit  = time.Minute
)

// AgainAfter is when a route that was left out for a taken port is tried again.
const AgainAfter = 30 * time.Second

// Schedule decides when the next apply begins. The zero value is ready.
type Schedule struct {
	promptFirst, promptLast time.Time
	quietLast               time.Time
	retryAt                 time.Time
	failures                int
	running                 bool
}

// Note records a change.
func (s *Schedule) Note(now time.Time, c Change) {
	switch c {
	case Prompt:
		if s.promptFirst.IsZero() {
			s.promptFirst = now
		}
		s.promptLast = now
	case Quiet:
		s.quietLast = now
	}
}

// Due returns when the next apply begins; false if nothing waits for one or
// one is running.
func (s *Schedule) Due() (time.Time, bool) {
	if s.running {
		return time.Time{}, false
	}
	var due time.Time
	earliest := func(t time.Time) {
		if due.IsZero() || t.Before(due) {
			due = t
		}
	}
	if !s.promptFirst.IsZero() {
		earliest(s.promptLast.Add(promptGap))
		earliest(s.promptFirst.Add(promptLimit))
	}
	if !s.quietLast.IsZero() {
		earliest(s.quietLast.Add(quietGap))
	}
	if !s.retryAt.IsZero() {
		earliest(s.retryAt)
	}
	return due, !due.IsZero()
}

// Again asks for one more apply at a time, whatever else happens.
func (s *Schedule) Again(at time.Time) { s.retryAt = at }

// Pending reports whether something waits to be applied.
func (s *Schedule) Pending() bool {
	return s.running || !s.promptFirst.IsZero() || !s.quietLast.IsZero() || s.failures > 0
}

// Began says that an apply of everything noted so far begins.
func (s *Schedule) Began() {
	s.promptFirst, s.promptLast, s.quietLast, s.retryAt = time.Time{}, time.Time{}, time.Time{}, time.Time{}
	s.running = true
}

// Succeeded says that the apply ended well.
func (s *Schedule) Succeeded() { s.running, s.failures = false, 0 }

// Failed says that the apply ended badly and must be tried again even if
// nothing changes.
func (s *Schedule) Failed(now time.Time) {
	s.running = false
	s.retryAt = now.Add(min(retryFirst<<min(s.failures, 10), retryLimit))
	s.failures++
}
