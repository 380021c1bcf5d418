// Package endpoint holds the link endpoints of an ingress node: loopback
// addresses where nginx reaches one port of one placement. An endpoint is
// open, joined, holding or closed, as package upstream orders; what goes
// through it is TLS that is not ended here.
//
// A Set may be used by several goroutines at once.
package endpoint

import (
	"cmp"
	"context"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/securelink"
	"github.com/opfield/availability/upstream"
)

// Dialer opens streams through the relays.
type Dialer interface {
	// Open returns a *securelink.Refusal in its error exactly when a relay
	// answered about the placement.
	Open(ctx context.Context, o securelink.Open) (*securelink.Stream, error)
	// Reachable returns the number of relays with a live session.
	Reachable() int
	// RestartingUntil returns when an announced restart should be over.
	RestartingUntil() time.Time
}

// Guard holds nginx's connections so that a killed sidecar does not end them.
type Guard interface {
	Hold(*net.TCPConn) (release func())
}

// Config configures a Set.
type Config struct {
	Dialer     Dialer
	Guard      Guard         // nil: none
	Drain      time.Duration // how long streams may go on after Serve was told to stop, default 1 h
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// Set is every link endpoint of this ingress node.
type Set struct {
	cfg     Config
	joiner  securelink.Joiner
	junk    []byte // endJunk bytes
	metrics *metrics

	mu      sync.Mutex
	byAddr  map[netip.Addr]*link
	byLink  map[placement.LinkID]*link
	joined  map[*stream]struct{} // the streams that lead to a sibling of their link
	changed chan struct{}        // closed and replaced whenever an order changed
}

// link is the endpoint of one link; guarded by Set.mu.
type link struct {
	order   upstream.Order
	addr    netip.Addr
	since   time.Time
	failed  time.Time // until when its last failed attempt counts
	streams map[*stream]struct{}
}

// New returns a Set without endpoints.
func New(cfg Config) *Set {
	s := &Set{
		cfg:     cfg,
		junk:    make([]byte, endJunk),
		byAddr:  map[netip.Addr]*link{},
		byLink:  map[placement.LinkID]*link{},
		joined:  map[*stream]struct{}{},
		changed: make(chan struct{}),
	}
	s.metrics = newMetrics(cfg.Registerer, s.total)
	return s
}

// Apply replaces the orders of all endpoints at once. An endpoint that is not
// named any more refuses; its streams go on until they end.
func (s *Set) Apply(orders []upstream.Order, addr func(placement.LinkID) netip.Addr) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	seen := make(map[placement.LinkID]struct{}, len(orders))
	changed := false
	for _, o := range orders {
		seen[o.Link] = struct{}{}
		l := s.byLink[o.Link]
		if l == nil {
			l = &link{since: now, streams: map[*stream]struct{}{}}
			s.byLink[o.Link] = l
		}
		if a := addr(o.Link); a != l.addr {
			delete(s.byAddr, l.addr)
			l.addr = a
			s.byAddr[a] = l
		}
		changed = s.orderLocked(l, o, now) || changed
	}
	for id, l := range s.byLink {
		if _, ok := seen[id]; ok {
			continue
		}
		gone := upstream.Order{Link: id, State: upstream.Closed, Reason: "placement unknown"}
		changed = s.orderLocked(l, gone, now) || changed
		delete(s.byAddr, l.addr)
		l.addr = netip.Addr{}
		if len(l.streams) == 0 {
			delete(s.byLink, id)
		}
	}
	if changed {
		s.wakeLocked()
	}
}

// Update gives some endpoints new orders and leaves the others alone: a change
// must not cost more because there are thousands of links. Links that Apply
// did not name are left out.
func (s *Set) Update(orders []upstream.Order) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	changed := false
	for _, o := range orders {
		if l := s.byLink[o.Link]; l != nil {
			changed = s.orderLocked(l, o, now) || changed
		}
	}
	if changed {
		s.wakeLocked()
	}
}

// wakeLocked wakes whoever waits for an order.
func (s *Set) wakeLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// orderLocked gives one endpoint its order and reports whether it differs.
func (s *Set) orderLocked(l *link, o upstream.Order, now time.Time) bool {
	if o.Reset {
		for st := range l.streams {
			st.reset()
		}
	}
	old := l.order
	if old.State == o.State && old.Epoch == o.Epoch && old.Primary == o.Primary &&
		old.MayHold == o.MayHold && old.Reason == o.Reason && slices.Equal(old.Open, o.Open) {
		return false
	}
	l.order = o
	if old.State != o.State {
		l.since = now
		if o.State == upstream.Open {
			// What failed before it closed says nothing about now.
			l.failed = time.Time{}
			for _, r := range s.straysLocked(now, l) {
				r.Nudge()
			}
		}
		s.metrics.changes.WithLabelValues(o.State.String()).Inc()
	}
	return true
}

// Status describes one endpoint.
type Status struct {
	Link    placement.LinkID
	Addr    netip.Addr
	State   upstream.State
	Reason  string
	Since   time.Time
	Streams int // that lead to its placement
}

// Status returns every endpoint, by link.
func (s *Set) Status() []Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]Status, 0, len(s.byLink))
	for id, l := range s.byLink {
		all = append(all, Status{
			Link: id, Addr: l.addr, State: l.order.State, Reason: l.order.Reason,
			Since: l.since, Streams: len(l.streams),
		})
	}
	slices.SortFunc(all, func(a, b Status) int { return upstream.CompareLinks(a.Link, b.Link) })
	return all
}

// verdict is what to do with a connection now.
type verdict struct {
	target placement.LinkID // dial this link, if not zero
	epoch  uint64
	within time.Duration   // limit of this attempt
	alone  <-chan struct{} // set when no sibling serves: closed when that may have changed
	wait   <-chan struct{} // nothing to dial: wait for this
	refuse bool
}

// decide says where a connection that came to l leads, began at start and has
// failed to reach the links in tried.
func (s *Set) decide(l *link, start time.Time, tried map[placement.LinkID]struct{}) verdict {
	now := time.Now()
	reachable := s.cfg.Dialer.Reachable() > 0
	hold := holdWithin
	if s.cfg.Dialer.RestartingUntil().After(start) {
		hold = holdRestart
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	o := l.order
	sibling := s.siblingLocked(o, now, tried)
	own := o.State == upstream.Open
	_, failedHere := tried[o.Link]
	recently := now.Before(l.failed)
	if sibling != nil && reachable {
		switch {
		case own && !failedHere && !recently:
			return verdict{target: o.Link, epoch: o.Epoch, within: dialWithin}
		case o.State == upstream.Joined, own && o.Primary, o.State == upstream.Holding, len(tried) > 0 && o.Primary:
			return verdict{target: sibling.order.Link, epoch: sibling.order.Epoch, within: dialWithin}
		default:
			return verdict{refuse: true}
		}
	}
	left := start.Add(hold).Sub(now)
	if left <= 0 || !reachable && !o.MayHold || !own && !o.MayHold && o.State != upstream.Joined {
		return verdict{refuse: true}
	}
	if own && reachable && !failedHere {
		return verdict{target: o.Link, epoch: o.Epoch, within: left, alone: s.changed}
	}
	if !o.MayHold {
		return verdict{refuse: true} // everything was tried: nginx must go on
	}
	return verdict{wait: s.changed, within: left}
}

// siblingLocked returns the open sibling with the fewest streams, those that
// failed lately last; nil if there is none that was not tried.
func (s *Set) siblingLocked(o upstream.Order, now time.Time, tried map[placement.LinkID]struct{}) *link {
	var best *link
	for _, id := range o.Open {
		l := s.byLink[id]
		if _, failed := tried[id]; failed || l == nil || l.order.State != upstream.Open {
			continue
		}
		if best == nil || cmp.Or(
			compareBool(now.Before(l.failed), now.Before(best.failed)),
			cmp.Compare(len(l.streams), len(best.streams))) < 0 {
			best = l
		}
	}
	return best
}

// compareBool orders false before true.
func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	default:
		return 1
	}
}

// fail notes a failed attempt to reach a link.
func (s *Set) fail(id placement.LinkID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.byLink[id]; l != nil {
		l.failed = time.Now().Add(skipFor)
	}
}

// enter counts a stream to the link that it leads to.
func (s *Set) enter(id placement.LinkID, st *stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.byLink[id]; l != nil {
		l.streams[st] = struct{}{}
		if l.order.Reset {
			st.reset() // fenced while the stream was being opened
		}
	}
	if st.joined != nil {
		s.joined[st] = struct{}{}
	}
}

func (s *Set) leave(id placement.LinkID, st *stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.joined, st)
	l := s.byLink[id]
	if l == nil {
		return
	}
	delete(l.streams, st)
	if len(l.streams) == 0 && !l.addr.IsValid() {
		delete(s.byLink, id)
	}
}

// total returns the number of streams.
func (s *Set) total() float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, l := range s.byLink {
		n += len(l.streams)
	}
	return float64(n)
}
