// Package accept is the node's end of secure links: it dials the application
// before it answers, finishes TLS with nginx, copies, and ends streams so
// that a cut never looks like a complete answer.
//
// An Acceptor may be used by several goroutines at once.
package accept

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/securelink"
)

const (
	// dialWithin bounds the connection to the application on this host. It is
	// below the 2 s that a dialing end grants while a sibling serves.
	dialWithin = 1500 * time.Millisecond
	// handshakeWithin bounds TLS with nginx after the application answered.
	handshakeWithin = 5 * time.Second
	// nudgeEvery is how often the streams of a draining link are nudged: one
	// may become idle at any time.
	nudgeEvery = 20 * time.Millisecond
)

// Targets knows where the applications of this node listen.
type Targets interface {
	// Target returns the address of a ready instance behind the link.
	Target(link placement.LinkID) (netip.AddrPort, bool)
	// Failed tells that a dial did not succeed: its readiness is in doubt.
	Failed(link placement.LinkID, err error)
}

// Config configures an Acceptor.
type Config struct {
	// TLS serves the certificate of the workload that SNI names and requires
	// the certificate of a caller that may use links.
	TLS     *tls.Config
	Targets Targets
	Drain   time.Duration // how long streams of a closed link may go on, default 30 s
	// DrainOf is the Drain of one placement, if it has its own; nil: none has.
	DrainOf    func(placement.ID) (time.Duration, bool)
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// Acceptor answers the streams of one node.
type Acceptor struct {
	cfg     Config
	tls     map[placement.Protocol]*tls.Config
	buffers sync.Pool
	results *prometheus.CounterVec
	// handshakes counts those with nginx; a full one costs it several times
	// the CPU time of a resumed one.
	handshakes *prometheus.CounterVec

	mu      sync.Mutex
	records map[placement.LinkID]securelink.Record
	streams map[placement.LinkID]map[*stream]struct{}
	drains  map[placement.LinkID]time.Time // when running streams are reset
}

// stream is one accepted stream.
type stream struct {
	link placement.LinkID
	conn *securelink.Nudger
}

// New returns an Acceptor without links.
func New(cfg Config) *Acceptor {
	a := &Acceptor{
		cfg:     cfg,
		buffers: sync.Pool{New: func() any { b := make([]byte, 2*record); return &b }},
		tls:     map[placement.Protocol]*tls.Config{},
		records: map[placement.LinkID]securelink.Record{},
		streams: map[placement.LinkID]map[*stream]struct{}{},
		drains:  map[placement.LinkID]time.Time{},
		results: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "opfield_node_streams_total", Help: "Streams asked for, by result.",
		}, []string{"result"}),
		handshakes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "opfield_node_handshakes_total", Help: "TLS handshakes with ingress nodes: full or resumed.",
		}, []string{"kind"}),
	}
	for proto, alpn := range map[placement.Protocol][]string{
		placement.ProtocolHTTP: {"http/1.1"},
		placement.ProtocolGRPC: {"h2"},
		placement.ProtocolTCP:  nil,
	} {
		a.tls[proto] = cfg.TLS.Clone()
		a.tls[proto].NextProtos = alpn
		a.tls[proto].GetConfigForClient = keepsTicket(a.tls[proto])
		// nginx decrypts nothing before a record is whole, and each is a
		// system call at every hop: no small ones at the start.
		a.tls[proto].DynamicRecordSizingDisabled = true
	}
	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(a.results, a.handshakes, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "opfield_node_streams", Help: "Streams that run now.",
		}, func() float64 { return float64(a.Streams()) }))
	}
	return a
}

// Apply replaces the links this node answers for. The streams of a link that
// does not serve any more are nudged: idle ones end, the others have the
// drain interval.
func (a *Acceptor) Apply(records []securelink.Record) {
	next := make(map[placement.LinkID]securelink.Record, len(records))
	for _, r := range records {
		next[r.Link] = r
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	old := a.records
	a.records = next
	now := time.Now()
	for id, r := range old {
		if r.Serves() && !next[id].Serves() {
			a.drains[id] = now.Add(a.drain(id.Placement))
			a.nudgeLocked(id)
		}
	}
	for id := range a.drains {
		if next[id].Serves() {
			delete(a.drains, id)
		}
	}
}

func (a *Acceptor) drain(id placement.ID) time.Duration {
	if a.cfg.DrainOf != nil {
		if d, own := a.cfg.DrainOf(id); own {
			return d
		}
	}
	return a.cfg.Drain
}

// Run ends the streams of closed links until ctx is done.
func (a *Acceptor) Run(ctx context.Context) error {
	tick := time.NewTicker(nudgeEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-tick.C:
			a.mu.Lock()
			for id, until := range a.drains {
				switch {
				case len(a.streams[id]) == 0:
					delete(a.drains, id)
				case now.After(until):
					for st := range a.streams[id] {
						securelink.Abort(st.conn.TCPConn)
					}
				default:
					a.nudgeLocked(id)
				}
			}
			a.mu.Unlock()
		}
	}
}

func (a *Acceptor) nudgeLocked(id placement.LinkID) {
	for st := range a.streams[id] {
		st.conn.Nudge()
	}
}

// Finish waits until no stream is left, for the time at most. Apply with no
// links comes before it.
func (a *Acceptor) Finish(within time.Duration) {
	deadline := time.Now().Add(within)
	tick := time.NewTicker(nudgeEvery)
	defer tick.Stop()
	for a.Streams() > 0 && time.Now().Before(deadline) {
		<-tick.C
	}
}

// Streams returns the number of running streams.
func (a *Acceptor) Streams() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := 0
	for _, s := range a.streams {
		n += len(s)
	}
	return n
}

// StreamsOf returns the number of running streams of a placement.
func (a *Acceptor) StreamsOf(id placement.ID) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := 0
	for link, s := range a.streams {
		if link.Placement == id {
			n += len(s)
		}
	}
	return n
}

// Accept answers one stream and works it to its end.
func (a *Acceptor) Accept(in *securelink.Incoming) {
	a.mu.Lock()
	r, ok := a.records[in.Link]
	a.mu.Unlock()
	switch {
	case !ok:
		a.refuse(in, securelink.NotRegistered)
		return
	case r.Order.Epoch != in.Epoch:
		a.refuse(in, securelink.StaleEpoch)
		return
	case !r.Serves():
		a.refuse(in, securelink.NotReady)
		return
	}
	app, code := a.dial(in.Link)
	if app == nil {
		a.refuse(in, code)
		return
	}
	defer app.Close()
	conn, err := in.Accept()
	if err != nil {
		return
	}
	defer conn.Close()
	st := &stream{link: in.Link, conn: &securelink.Nudger{TCPConn: conn, First: in.First}}
	if !a.add(st) {
		securelink.Abort(conn)
		return
	}
	defer a.remove(st)
	if err := a.serve(st, r, app); err != nil {
		a.results.WithLabelValues("cut").Inc()
		securelink.Abort(conn)
		securelink.Abort(app)
		a.cfg.Logger.Debug("stream cut", "link", in.Link.String(), "err", err)
		return
	}
	a.results.WithLabelValues("ok").Inc()
}

func (a *Acceptor) refuse(in *securelink.Incoming, code securelink.Code) {
	a.results.WithLabelValues(code.String()).Inc()
	in.Refuse(code)
}

func (a *Acceptor) dial(link placement.LinkID) (*net.TCPConn, securelink.Code) {
	addr, ok := a.cfg.Targets.Target(link)
	if !ok {
		return nil, securelink.NotReady
	}
	d := net.Dialer{Timeout: dialWithin}
	conn, err := d.Dial("tcp", addr.String())
	if err != nil {
		a.cfg.Targets.Failed(link, err)
		if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
			return nil, securelink.Timeout
		}
		return nil, securelink.AppRefused
	}
	return conn.(*net.TCPConn), 0
}

// add counts the stream in, unless its link closed meanwhile.
func (a *Acceptor) add(st *stream) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.records[st.link].Serves() {
		return false
	}
	if a.streams[st.link] == nil {
		a.streams[st.link] = map[*stream]struct{}{}
	}
	a.streams[st.link][st] = struct{}{}
	return true
}

func (a *Acceptor) remove(st *stream) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.streams[st.link], st)
	if len(a.streams[st.link]) == 0 {
		delete(a.streams, st.link)
	}
}
