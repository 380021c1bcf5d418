// Package registry is the node's door to the internal registry: a loopback
// port that the node's own Docker daemon uses as a registry and that leads
// over a secure link to the controller. Whoever does not have the credentials
// of this start of the agent is refused: they are for this daemon only, and
// what the node may pull and push is decided by the controller.
//
// A Door may be used by several goroutines at once.
package registry

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"time"

	dockerregistry "github.com/docker/docker/api/types/registry"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opfield/availability/placement"
)

const (
	probeEvery    = 15 * time.Second
	probeFirst    = 250 * time.Millisecond // while it is not reached, doubled each time
	probeMost     = 2 * time.Second
	probeWithin   = 5 * time.Second
	dialWithin    = 8 * time.Second // an announced restart of a relay is shorter
	dialEvery     = 250 * time.Millisecond
	listenEvery   = time.Second // while the port is taken
	headersWithin = 10 * time.Second
	idleLocal     = 2 * time.Minute
	idleLink      = 30 * time.Second // connections to the controller that nobody uses
	stopWithin    = 5 * time.Second
	buffer        = 64 << 10
)

// user is the name in the credentials; the password makes the difference.
const user = "opfield"

// errStarting is what Check says before the first probe.
var errStarting = errors.New("not asked yet")

// Config configures a Door.
type Config struct {
	Listen string // loopback address with a port, such as 127.0.0.1:7447
	// Dial opens a connection to the controller's registry.
	Dial       func(context.Context) (net.Conn, error)
	Logger     *slog.Logger
	Registerer prometheus.Registerer // nil: no metrics
}

// Door is the loopback port.
type Door struct {
	cfg       Config
	password  string
	proof     [sha256.Size]byte // of user and password
	transport *http.Transport
	prober    *http.Transport // a stream for each probe, and no patience
	tried     chan struct{}   // capacity 1
	proxy     *httputil.ReverseProxy

	mu    sync.Mutex
	state error // of the last probe, or why the port is not open
}

// CheckListen reports an address that is not a port of loopback.
func CheckListen(addr string) error {
	a, err := netip.ParseAddrPort(addr)
	if err != nil || !a.Addr().IsLoopback() || a.Port() == 0 {
		return fmt.Errorf("%q: want a loopback address and a port, such as 127.0.0.1:7447", addr)
	}
	return nil
}

// New returns a Door that does nothing until Run.
func New(cfg Config) (*Door, error) {
	if err := CheckListen(cfg.Listen); err != nil {
		return nil, err
	}
	d := &Door{cfg: cfg, password: rand.Text(), tried: make(chan struct{}, 1), state: errStarting}
	d.proof = proof(user, d.password)
	d.transport = &http.Transport{
		DialContext:        func(ctx context.Context, _, _ string) (net.Conn, error) { return d.dial(ctx) },
		DisableCompression: true, MaxIdleConnsPerHost: 8, IdleConnTimeout: idleLink,
		ReadBufferSize: buffer, WriteBufferSize: buffer,
	}
	d.prober = &http.Transport{
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return cfg.Dial(ctx) },
		DisableKeepAlives: true,
	}
	d.proxy = &httputil.ReverseProxy{
		Transport: d.transport, Rewrite: rewrite, ModifyResponse: relative, ErrorHandler: d.unreachable,
		ErrorLog: slog.NewLogLogger(cfg.Logger.Handler(), slog.LevelDebug), BufferPool: &buffers{},
	}
	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "opfield_node_registry_up", Help: "1 while the internal registry is reached.",
		}, func() float64 {
			if d.Check(context.Background()) != nil {
				return 0
			}
			return 1
		}))
	}
	return d, nil
}

// Reference returns the name under which the node's Docker pulls the image, or
// that of the repository if the image has no digest.
func (d *Door) Reference(i placement.Image) string {
	ref := d.cfg.Listen + "/" + i.Repository
	if i.Digest != "" {
		ref += "@" + i.Digest
	}
	return ref
}

// PushReference returns the name under which the node's Docker pushes.
func (d *Door) PushReference(repository, tag string) string {
	return d.cfg.Listen + "/" + repository + ":" + tag
}

// Auth returns the credentials as Docker's API wants them. They change with
// every start.
func (d *Door) Auth() string {
	text, err := dockerregistry.EncodeAuthConfig(dockerregistry.AuthConfig{
		Username: user, Password: d.password, ServerAddress: d.cfg.Listen,
	})
	if err != nil {
		panic(fmt.Sprintf("encode credentials: %v", err)) // strings can always be encoded
	}
	return text
}

// Check reports why the registry cannot be reached, as of the last probe.
func (d *Door) Check(context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.state
}

// Try lets the registry be asked now, such as after a session with a relay
// came up.
func (d *Door) Try() {
	select {
	case d.tried <- struct{}{}:
	default:
	}
}

// Run serves until ctx is done. A port that is taken is no reason to end: the
// node does everything else meanwhile.
func (d *Door) Run(ctx context.Context) error {
	defer d.transport.CloseIdleConnections()
	lc := net.ListenConfig{}
	for {
		ln, err := lc.Listen(ctx, "tcp", d.cfg.Listen)
		if err == nil {
			return d.serve(ctx, ln)
		}
		d.set(fmt.Errorf("the port for the node's Docker cannot be opened: %w", err))
		if !pause(ctx, listenEvery) {
			return ctx.Err()
		}
	}
}

func (d *Door) serve(ctx context.Context, ln net.Listener) error {
	srv := &http.Server{
		Handler: d, ReadHeaderTimeout: headersWithin, IdleTimeout: idleLocal, MaxHeaderBytes: 16 << 10,
		ErrorLog: slog.NewLogLogger(d.cfg.Logger.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	again := probeFirst
	for ctx.Err() == nil {
		wait := probeEvery
		if err := d.probe(ctx); err == nil {
			again = probeFirst
		} else {
			wait, again = again, min(2*again, probeMost)
		}
		select {
		case <-time.After(wait):
		case <-d.tried:
			again = probeFirst
		case <-ctx.Done():
		}
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopWithin)
	defer cancel()
	if err := srv.Shutdown(stop); err != nil {
		_ = srv.Close()
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve registry port: %w", err)
	}
	return ctx.Err()
}

// probe asks the registry whether it is ready, and remembers.
func (d *Door) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeWithin)
	defer cancel()
	err := d.ask(ctx)
	if ctx.Err() == nil || errors.Is(ctx.Err(), context.DeadlineExceeded) {
		d.set(err)
	}
	return err
}

func (d *Door) ask(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://registry/v2/", nil)
	if err != nil {
		return err
	}
	resp, err := d.prober.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 512))
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("the registry answers %s: %s", resp.Status, strings.TrimSpace(string(body)))
	}
	return nil
}

func (d *Door) set(err error) {
	d.mu.Lock()
	was := d.state
	d.state = err
	d.mu.Unlock()
	switch {
	case err == nil && was != nil:
		d.cfg.Logger.Info("internal registry reached")
	case err != nil && (was == nil || errors.Is(was, errStarting)):
		d.cfg.Logger.Warn("internal registry not reached, trying again", "err", err)
	}
}

// dial opens a connection to the registry. It tries for a while, so that a
// relay that restarts costs a moment and not a pull.
func (d *Door) dial(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialWithin)
	defer cancel()
	var first error
	for {
		conn, err := d.cfg.Dial(ctx)
		if err == nil {
			return conn, nil
		}
		first = cmp.Or(first, err)
		if !pause(ctx, dialEvery) {
			return nil, first
		}
	}
}

// ServeHTTP implements http.Handler.
func (d *Door) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name, password, _ := r.BasicAuth()
	if got := proof(name, password); subtle.ConstantTimeCompare(got[:], d.proof[:]) != 1 {
		w.Header().Set("WWW-Authenticate", `Basic realm="opfield"`)
		answer(w, http.StatusUnauthorized, "UNAUTHORIZED", "this port is for the node's own Docker daemon")
		return
	}
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch:
	default:
		answer(w, http.StatusMethodNotAllowed, "UNSUPPORTED", "only pulls and pushes are possible here")
		return
	}
	if !strings.HasPrefix(r.URL.Path, "/v2/") {
		answer(w, http.StatusNotFound, "UNSUPPORTED", "only /v2/ is here")
		return
	}
	d.proxy.ServeHTTP(w, r)
}

// unreachable answers when the registry did not: Docker tries again after an
// error of this form.
func (d *Door) unreachable(w http.ResponseWriter, r *http.Request, err error) {
	if r.Context().Err() != nil {
		return
	}
	d.cfg.Logger.Debug("registry request not answered", "method", r.Method, "path", r.URL.Path, "err", err)
	w.Header().Set("Retry-After", "1")
	answer(w, http.StatusServiceUnavailable, "UNAVAILABLE", "the internal registry cannot be reached from this node: "+err.Error())
}

func proof(name, password string) [sha256.Size]byte {
	return sha256.Sum256([]byte(name + ":" + password))
}

// rewrite sends the request to the registry, without what is for us.
func rewrite(p *httputil.ProxyRequest) {
	p.Out.URL.Scheme, p.Out.URL.Host, p.Out.Host = "http", "registry", "registry"
	p.Out.Header.Del("Authorization")
}

// relative makes the address of an upload one of this port.
func relative(resp *http.Response) error {
	if text := resp.Header.Get("Location"); text != "" {
		u, err := url.Parse(text)
		if err != nil {
			return fmt.Errorf("location of an upload: %w", err)
		}
		u.Scheme, u.Host, u.User = "", "", nil
		resp.Header.Set("Location", u.String())
	}
	return nil
}

// pause waits and reports whether ctx still goes on.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// buffers is the pool of what is copied through.
type buffers struct{ pool sync.Pool }

// Get implements httputil.BufferPool.
func (b *buffers) Get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, buffer)
}

// Put implements httputil.BufferPool.
func (b *buffers) Put(p []byte) { b.pool.Put(&p) }
