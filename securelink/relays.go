package securelink

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/opfield/availability/placement"
)

// ErrNoRelay is returned by Open when no relay can be reached.
var ErrNoRelay = errors.New("no relay can be reached")

// RelaysConfig configures the sessions with all relays.
type RelaysConfig struct {
	TLS      func(relay string) *tls.Config // mutual TLS with that relay
	Instance uint64                         // random per process
	Links    *LinkSet                       // accepting end only
	Accept   func(*Incoming)                // accepting end only
	Watcher  Watcher                        // dialing end only; may be nil
	Up       func()                         // a session came up and takes new streams; may be nil; must not block
	Logger   *slog.Logger
}

// Relays keeps a session with every relay and opens streams through the best
// one.
type Relays struct {
	cfg  RelaysConfig
	wake chan struct{}

	mu    sync.Mutex
	want  []RelayAddress
	peers map[RelayAddress]*running
	views map[string]*view
	until time.Time // an announced restart is expected to be over
}

type running struct {
	peer *Peer
	stop context.CancelFunc
	done chan struct{}
}

// view is what one relay says; it exists while its session is up.
type view struct {
	since time.Time // when the relay process started, by our clock
	ready map[placement.LinkID]bool
	nodes map[string]bool // value: has a session now
}

// NewRelays returns a Relays that does nothing until Run.
func NewRelays(cfg RelaysConfig) *Relays {
	return &Relays{
		cfg:   cfg,
		wake:  make(chan struct{}, 1),
		peers: map[RelayAddress]*running{},
		views: map[string]*view{},
	}
}

// Set replaces the list of relays. Sessions with relays that stay are kept.
func (r *Relays) Set(addrs []RelayAddress) {
	r.mu.Lock()
	r.want = slices.Clone(addrs)
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Run keeps the sessions until ctx is done. Then nothing of them is left.
func (r *Relays) Run(ctx context.Context) {
	for {
		r.reconcile(ctx)
		select {
		case <-ctx.Done():
			r.mu.Lock()
			r.want = nil
			r.mu.Unlock()
			r.reconcile(ctx)
			return
		case <-r.wake:
		}
	}
}

// reconcile starts and stops peers. Only Run calls it.
func (r *Relays) reconcile(ctx context.Context) {
	r.mu.Lock()
	var stopped []*running
	for addr, p := range r.peers {
		if !slices.Contains(r.want, addr) {
			delete(r.peers, addr)
			stopped = append(stopped, p)
		}
	}
	for _, addr := range r.want {
		if _, ok := r.peers[addr]; ok {
			continue
		}
		pctx, stop := context.WithCancel(ctx)
		p := &running{stop: stop, done: make(chan struct{}), peer: NewPeer(PeerConfig{
			Relay: addr, TLS: r.cfg.TLS(addr.ID), Instance: r.cfg.Instance,
			Links: r.cfg.Links, Accept: r.cfg.Accept, Logger: r.cfg.Logger,
			Watcher: r.watcher(), Up: r.cfg.Up,
		})}
		r.peers[addr] = p
		go func() {
			defer close(p.done)
			p.peer.Run(pctx)
		}()
	}
	r.mu.Unlock()
	for _, p := range stopped {
		p.stop()
		<-p.done
	}
}

func (r *Relays) watcher() Watcher {
	if r.cfg.Watcher == nil {
		return nil
	}
	return &viewer{r}
}

// Status returns a snapshot of every relay, by id.
func (r *Relays) Status() []PeerStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []PeerStatus
	for _, p := range r.peers {
		all = append(all, p.peer.Status())
	}
	slices.SortFunc(all, func(a, b PeerStatus) int {
		return cmp.Or(cmp.Compare(a.Relay.ID, b.Relay.ID), cmp.Compare(a.Relay.Addr, b.Relay.Addr))
	})
	return all
}

// Reachable returns the number of relays with a live session.
func (r *Relays) Reachable() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, p := range r.peers {
		if p.peer.session() != nil {
			n++
		}
	}
	return n
}

// RestartingUntil returns when the last announced restart of a relay is
// expected to be over; it may lie in the past or be zero.
func (r *Relays) RestartingUntil() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.until
}

// Open opens a stream through the best relay: one that says the link is ready
// comes first, then the one with the fewest streams. A relay that has not
// answered after hedgeAfter is not waited for: the next one is tried beside
// it, and the first stream wins. A *Refusal in the error is about the
// placement; any other error says only that no way was found.
func (r *Relays) Open(ctx context.Context, o Open) (*Stream, error) {
	peers := r.candidates(o.Link)
	if len(peers) == 0 {
		return nil, ErrNoRelay
	}
	if len(peers) == 1 { // the common case needs no goroutine
		st, err := peers[0].Open(ctx, o)
		return st, r.weigh(peers[0], o.Link, err)
	}
	return r.openHedged(ctx, peers, o)
}

type opened struct {
	peer *Peer
	st   *Stream
	err  error
}

func (r *Relays) openHedged(ctx context.Context, peers []*Peer, o Open) (*Stream, error) {
	ctx, cancel := context.WithCancel(ctx)
	results := make(chan opened, len(peers))
	next, running := 0, 0
	launch := func() {
		p := peers[next]
		next++
		running++
		go func() {
			st, err := p.Open(ctx, o)
			results <- opened{p, st, err}
		}()
	}
	launch()
	defer func() {
		cancel()
		if running > 0 {
			go discard(results, running)
		}
	}()
	hedge := time.NewTimer(hedgeAfter)
	defer hedge.Stop()
	var err error
	for running > 0 {
		select {
		case <-hedge.C:
			if next < len(peers) {
				launch()
				hedge.Reset(hedgeAfter)
			}
		case res := <-results:
			running--
			if res.err == nil {
				return res.st, nil
			}
			e := r.weigh(res.peer, o.Link, res.err)
			// "Not registered" from one relay is no answer against a more
			// telling one from another.
			if code := RefusalCode(err); code == 0 || code == NotRegistered {
				err = e
			}
			if next < len(peers) && ctx.Err() == nil {
				launch()
			}
		}
	}
	return nil, err
}

// discard closes what a cancelled attempt may still bring.
func discard(results <-chan opened, n int) {
	for range n {
		if res := <-results; res.err == nil {
			res.st.Close()
		}
	}
}

// weigh hides a refusal that says nothing about the placement.
func (r *Relays) weigh(p *Peer, link placement.LinkID, err error) error {
	if err == nil || r.counts(p.cfg.Relay.ID, link, RefusalCode(err)) {
		return err
	}
	return noAnswer{err}
}

// noAnswer hides a refusal that says nothing about the placement.
type noAnswer struct{ err error }

func (n noAnswer) Error() string { return n.err.Error() }

// counts reports whether a refusal says something about the placement. "Not
// registered" does only from a relay that has seen the node, or has been up
// long enough for the node to have come back.
func (r *Relays) counts(relay string, link placement.LinkID, code Code) bool {
	if !code.AboutPlacement() {
		return false
	}
	if code != NotRegistered {
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.views[relay]
	if v == nil {
		return false
	}
	_, seen := v.nodes[link.Placement.Node]
	return seen || time.Since(v.since) >= YoungRelay
}

func (r *Relays) candidates(link placement.LinkID) []*Peer {
	type candidate struct {
		peer    *Peer
		ready   bool
		streams int
	}
	r.mu.Lock()
	var all []candidate
	for addr, p := range r.peers {
		s := p.peer.session()
		if s == nil {
			continue
		}
		v := r.views[addr.ID]
		all = append(all, candidate{p.peer, v != nil && v.ready[link], s.streamCount()})
	}
	r.mu.Unlock()
	slices.SortFunc(all, func(a, b candidate) int {
		if a.ready != b.ready {
			if a.ready {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(a.streams, b.streams), cmp.Compare(a.peer.cfg.Relay.ID, b.peer.cfg.Relay.ID))
	})
	peers := make([]*Peer, len(all))
	for i, c := range all {
		peers[i] = c.peer
	}
	return peers
}

func (v *view) set(rep Report) {
	if rep.Present && rep.Serves() {
		v.ready[rep.Link] = true
	} else {
		delete(v.ready, rep.Link)
	}
}

// viewer keeps the views and passes everything on.
type viewer struct{ r *Relays }

func (w *viewer) Up(relay string, age time.Duration, links []Report, nodes []NodeSession) {
	v := &view{since: time.Now().Add(-age), ready: map[placement.LinkID]bool{}, nodes: map[string]bool{}}
	for _, l := range links {
		v.set(l)
	}
	for _, n := range nodes {
		v.nodes[n.Node] = n.Present
	}
	w.r.mu.Lock()
	w.r.views[relay] = v
	w.r.mu.Unlock()
	w.r.cfg.Watcher.Up(relay, age, links, nodes)
}

func (w *viewer) Report(relay string, rep Report) {
	w.r.mu.Lock()
	if v := w.r.views[relay]; v != nil {
		v.set(rep)
	}
	w.r.mu.Unlock()
	w.r.cfg.Watcher.Report(relay, rep)
}

func (w *viewer) NodeSession(relay string, n NodeSession) {
	w.r.mu.Lock()
	if v := w.r.views[relay]; v != nil {
		v.nodes[n.Node] = n.Present
	}
	w.r.mu.Unlock()
	w.r.cfg.Watcher.NodeSession(relay, n)
}

func (w *viewer) Down(relay string, announced time.Duration) {
	w.r.mu.Lock()
	delete(w.r.views, relay)
	if announced > 0 {
		w.r.until = time.Now().Add(announced)
	}
	w.r.mu.Unlock()
	w.r.cfg.Watcher.Down(relay, announced)
}
