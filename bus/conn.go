package bus

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
)

// ErrNotConnected is returned for a request while NATS cannot be reached.
var ErrNotConnected = errors.New("not connected to NATS")

const (
	dialWithin      = 2 * time.Second
	reconnectEvery  = 200 * time.Millisecond
	reconnectSpread = 200 * time.Millisecond
	requestWithin   = 3 * time.Second // a request whose context has no deadline
)

// Config configures a connection.
type Config struct {
	URLs       []string              // none: those of the identity
	Identity   *identity.Identity    // required
	Logger     *slog.Logger          // required
	Registerer prometheus.Registerer // nil: no metrics
}

// Conn is a connection to NATS that comes back by itself.
type Conn struct {
	identity *identity.Identity // fixed after Connect
	logger   *slog.Logger       // fixed
	metrics  *metrics           // fixed
	nc       *nats.Conn         // fixed
	desired  desiredTiming      // fixed

	asked chan struct{} // a report is asked for

	lastError atomic.Pointer[string] // the newest asynchronous error

	mu        sync.Mutex
	connected chan struct{}       // guarded by mu; closed and replaced at each connect
	malformed map[string]struct{} // guarded by mu; subjects logged already

	keepMu sync.Mutex
	kept   map[placement.ID]kept // guarded by keepMu; see KeepPlacements
}

// Connect begins to connect and returns at once: it fails for a wrong
// configuration only, never because NATS is down.
func Connect(cfg Config) (*Conn, error) {
	if cfg.Identity == nil || cfg.Logger == nil {
		return nil, errors.New("connect to NATS: identity and logger are required")
	}
	boot := cfg.Identity.Bootstrap()
	if len(cfg.URLs) == 0 {
		cfg.URLs = boot.NATS
	}
	if len(cfg.URLs) == 0 {
		return nil, errors.New("connect to NATS: no URL is known; join again, or set it by flag")
	}
	tlsConfig, err := clientTLS(cfg.Identity, boot.NATSCA)
	if err != nil {
		return nil, err
	}
	c := &Conn{
		identity:  cfg.Identity,
		desired:   defaultDesiredTiming(),
		logger:    cfg.Logger,
		metrics:   newMetrics(cfg.Registerer),
		connected: make(chan struct{}),
		malformed: map[string]struct{}{},
		kept:      map[placement.ID]kept{},
		asked:     make(chan struct{}, 1),
	}
	opts := nats.GetDefaultOptions()
	opts.Servers = cfg.URLs
	opts.Name = cfg.Identity.Name().String()
	opts.Secure, opts.TLSConfig = true, tlsConfig
	opts.InboxPrefix = inboxPrefix(cfg.Identity.Name())
	opts.RetryOnFailedConnect, opts.MaxReconnect = true, -1
	opts.ReconnectWait, opts.ReconnectJitter, opts.ReconnectJitterTLS = reconnectEvery, reconnectSpread, reconnectSpread
	opts.IgnoreAuthErrorAbort = true // a revoked identity may be joined again
	opts.ReconnectBufSize = -1       // nothing stale is sent later
	opts.Timeout, opts.PingInterval, opts.MaxPingsOut = dialWithin, pingEvery, pingsOut
	opts.ConnectedCB, opts.ReconnectedCB = c.onConnect, c.onConnect
	opts.DisconnectedErrCB, opts.AsyncErrorCB = c.onDisconnect, c.onError
	if c.nc, err = opts.Connect(); err != nil {
		return nil, fmt.Errorf("connect to NATS: %w", err)
	}
	return c, nil
}

func clientTLS(id *identity.Identity, natsCA string) (*tls.Config, error) {
	if natsCA == "" {
		return id.ClientTLS(identity.ControllerName()), nil
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM([]byte(natsCA)) {
		return nil, errors.New("connect to NATS: the CA of NATS holds no certificate")
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool, GetClientCertificate: id.ClientCertificate()}, nil
}

// Connected reports whether NATS is reachable now.
func (c *Conn) Connected() bool { return c.nc.IsConnected() }

// LastError returns the newest error that NATS reported outside of a call,
// such as a refused publish, or "".
func (c *Conn) LastError() string {
	if s := c.lastError.Load(); s != nil {
		return *s
	}
	return ""
}

// Close ends the connection; Follow calls end with their own context.
func (c *Conn) Close() { c.nc.Close() }

func (c *Conn) onConnect(nc *nats.Conn) {
	c.logger.Info("connected to NATS", "url", nc.ConnectedUrlRedacted())
	c.metrics.connected.Set(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.connected)
	c.connected = make(chan struct{})
}

// nextConnect returns a channel that is closed at the next connect.
func (c *Conn) nextConnect() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.connected
}

func (c *Conn) onDisconnect(_ *nats.Conn, err error) {
	c.metrics.connected.Set(0)
	if err == nil { // Close
		return
	}
	c.logger.Warn("lost connection to NATS", "err", err)
}

// onError hears of refused publishes, which look like time-outs to the caller.
func (c *Conn) onError(_ *nats.Conn, sub *nats.Subscription, err error) {
	subject := ""
	if sub != nil {
		subject = sub.Subject
	}
	text := err.Error()
	if old := c.lastError.Swap(&text); old == nil || *old != text {
		c.logger.Warn("NATS reported an error", "subject", subject, "err", err)
	}
	c.metrics.errors.Inc()
}

// skip counts a malformed message and logs the first of each subject.
func (c *Conn) skip(subject string, err error) {
	const maxRemembered = 4096
	c.metrics.malformed.Inc()
	c.mu.Lock()
	_, known := c.malformed[subject]
	if !known && len(c.malformed) < maxRemembered {
		c.malformed[subject] = struct{}{}
	}
	c.mu.Unlock()
	if !known {
		c.logger.Warn("malformed message skipped", "subject", subject, "err", err)
	}
}

// request sends one request and waits for one answer.
func (c *Conn) request(ctx context.Context, msg *nats.Msg) (*nats.Msg, error) {
	if !c.Connected() {
		return nil, ErrNotConnected
	}
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, requestWithin)
		defer cancel()
	}
	answer, err := c.nc.RequestMsgWithContext(ctx, msg)
	if err != nil {
		return nil, fmt.Errorf("request on %s: %w", msg.Subject, err)
	}
	return answer, nil
}

// metrics of one connection.
type metrics struct {
	connected prometheus.Gauge
	errors    prometheus.Counter
	malformed prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		connected: prometheus.NewGauge(prometheus.GaugeOpts{Name: "opfield_nats_connected", Help: "1 while NATS is connected."}),
		errors:    prometheus.NewCounter(prometheus.CounterOpts{Name: "opfield_nats_errors_total", Help: "Errors reported by NATS outside of a call, such as a refused publish."}),
		malformed: prometheus.NewCounter(prometheus.CounterOpts{Name: "opfield_malformed_messages_total", Help: "Messages skipped because they were malformed."}),
	}
	if reg != nil {
		reg.MustRegister(m.connected, m.errors, m.malformed)
	}
	return m
}
