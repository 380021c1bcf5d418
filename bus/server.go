package bus

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/opfield/availability/identity"
)

const (
	readyWithin  = 20 * time.Second // start with a large store
	readyStep    = 100 * time.Millisecond
	pingEvery    = 2 * time.Second // both ends; a dead peer is found in
	pingsOut     = 2               // 3 × pingEvery
	authWithin   = 3 * time.Second // TLS handshake and CONNECT
	writeWithin  = 5 * time.Second
	maxPayload   = 8 << 20 // the status of an ingress node with 10,000 links
	maxStore     = 8 << 30 // all that the streams reserve: see Store.Ensure
	maxMemory    = 64 << 20
	maxClients   = 4096
	pruneMinimum = 256 // remembered sessions before closed ones are forgotten
)

// ServerConfig configures the embedded NATS server.
type ServerConfig struct {
	Addr     string             // host:port; port 0 takes a free one
	StoreDir string             // of JetStream
	Identity *identity.Identity // of the controller: certificate, CA and revocations
	Logger   *slog.Logger
}

// Server is an embedded NATS server with JetStream. Who may do what follows
// from the client's certificate; there is no user list.
type Server struct {
	cfg   ServerConfig // fixed after NewServer
	host  string       // fixed
	port  int          // fixed
	ready chan struct{}

	mu       sync.Mutex
	nats     *server.Server               // guarded by mu
	sessions map[uint64]*x509.Certificate // guarded by mu; by client id of nats
}

// NewServer checks the configuration; Run starts the server.
func NewServer(cfg ServerConfig) (*Server, error) {
	host, port, err := net.SplitHostPort(cfg.Addr)
	if err != nil {
		return nil, fmt.Errorf("nats listen address: %w", err)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("nats listen address: port %q: want 0 to 65535", port)
	}
	if cfg.StoreDir == "" || cfg.Identity == nil || cfg.Logger == nil {
		return nil, errors.New("nats server: store directory, identity and logger are required")
	}
	s := &Server{cfg: cfg, host: host, port: int(n), ready: make(chan struct{}), sessions: map[uint64]*x509.Certificate{}}
	if s.host == "" {
		s.host = "0.0.0.0"
	}
	if s.port == 0 {
		s.port = server.RANDOM_PORT
	}
	return s, nil
}

// Ready is closed when clients can connect.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Port returns the port the server listens on. Valid after Ready.
func (s *Server) Port() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.nats.Addr().(*net.TCPAddr).Port
}

// URL returns where a client on this host connects. Valid after Ready.
func (s *Server) URL() string {
	host := s.host
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return "tls://" + net.JoinHostPort(host, strconv.Itoa(s.Port()))
}

// Run serves until ctx ends. It runs once.
func (s *Server) Run(ctx context.Context) error {
	// Certificates of routes are in there, with their keys.
	if err := os.MkdirAll(s.cfg.StoreDir, 0o700); err != nil {
		return fmt.Errorf("nats server: %w", err)
	}
	opts := &server.Options{}
	if err := opts.ProcessConfigString(accountsConfig(nil)); err != nil {
		return fmt.Errorf("nats server: accounts: %w", err)
	}
	opts.ServerName = "opfield"
	opts.Host, opts.Port = s.host, s.port
	opts.NoSigs = true
	opts.JetStream, opts.StoreDir, opts.SyncAlways = true, s.cfg.StoreDir, true
	opts.JetStreamMaxStore, opts.JetStreamMaxMemory = maxStore, maxMemory
	opts.TLS, opts.TLSVerify = true, true
	opts.TLSConfig = s.cfg.Identity.ServerTLS()
	opts.TLSTimeout, opts.AuthTimeout = authWithin.Seconds(), authWithin.Seconds()
	opts.CustomClientAuthentication = s
	opts.PingInterval, opts.MaxPingsOut = pingEvery, pingsOut
	opts.WriteDeadline = writeWithin
	opts.MaxPayload, opts.MaxConn = maxPayload, maxClients

	ns, err := server.NewServer(opts)
	if err != nil {
		return fmt.Errorf("nats server: %w", err)
	}
	log := &serverLog{logger: s.cfg.Logger}
	ns.SetLoggerV2(log, false, false, false)
	s.mu.Lock()
	s.nats = ns
	s.mu.Unlock()
	ns.Start()
	defer func() {
		ns.Shutdown() // graceful: the store is closed
		ns.WaitForShutdown()
	}()
	for begin := time.Now(); !ns.ReadyForConnections(readyStep); {
		switch text := log.lastFatal(); {
		case text != "":
			return fmt.Errorf("nats server: %s", text)
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Since(begin) > readyWithin:
			return fmt.Errorf("nats server: not ready within %s", readyWithin)
		}
	}
	close(s.ready)
	return s.enforceRevocations(ctx)
}

// Check implements server.Authentication: the certificate is the login.
func (s *Server) Check(c server.ClientAuthentication) bool {
	cs := c.GetTLSConnectionState()
	if cs == nil {
		return false
	}
	name, err := identity.PeerName(*cs)
	if err != nil {
		return false
	}
	leaf := cs.VerifiedChains[0][0]
	s.mu.Lock()
	defer s.mu.Unlock()
	// Remembered before it is looked up: a revocation in between finds it.
	s.pruneLocked()
	s.sessions[c.GetID()] = leaf
	if s.cfg.Identity.Revoked(leaf) {
		delete(s.sessions, c.GetID())
		return false
	}
	acc, err := s.nats.LookupAccount(accountOf(name))
	if err != nil {
		return false
	}
	r := rightsOf(name, identity.CertificateGrant(leaf))
	c.RegisterUser(&server.User{
		Username: name.String(),
		Account:  acc,
		Permissions: &server.Permissions{
			Publish:   &server.SubjectPermission{Allow: r.publish},
			Subscribe: &server.SubjectPermission{Allow: r.subscribe},
		},
		ConnectionDeadline: leaf.NotAfter, // it comes back with the renewed one
	})
	return true
}

func (s *Server) pruneLocked() {
	if len(s.sessions) < pruneMinimum || len(s.sessions) < 2*s.nats.NumClients() {
		return
	}
	for id := range s.sessions {
		if s.nats.GetClient(id) == nil {
			delete(s.sessions, id)
		}
	}
}

// enforceRevocations ends open sessions of revoked identities (SEC-1).
func (s *Server) enforceRevocations(ctx context.Context) error {
	for {
		changed := s.cfg.Identity.RevocationsChanged()
		for _, id := range s.revokedSessions() {
			_ = s.nats.DisconnectClientByID(id) // an error: it is gone already
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

func (s *Server) revokedSessions() []uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ids []uint64
	for id, cert := range s.sessions {
		if s.cfg.Identity.Revoked(cert) {
			ids = append(ids, id)
			delete(s.sessions, id)
		}
	}
	return ids
}

// serverLog passes the server's log on.
type serverLog struct {
	logger *slog.Logger
	mu     sync.Mutex
	fatal  string // guarded by mu
}

func (l *serverLog) lastFatal() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fatal
}

func (l *serverLog) Noticef(format string, v ...any) { l.log(slog.LevelDebug, format, v) }
func (l *serverLog) Warnf(format string, v ...any)   { l.log(slog.LevelWarn, format, v) }
func (l *serverLog) Errorf(format string, v ...any)  { l.log(slog.LevelWarn, format, v) }
func (l *serverLog) Debugf(format string, v ...any)  { l.log(slog.LevelDebug, format, v) }
func (l *serverLog) Tracef(string, ...any)           {}
func (l *serverLog) Fatalf(format string, v ...any) {
	l.mu.Lock()
	l.fatal = fmt.Sprintf(format, v...)
	l.mu.Unlock()
	l.log(slog.LevelError, format, v)
}

func (l *serverLog) log(level slog.Level, format string, v []any) {
	if ctx := context.Background(); l.logger.Enabled(ctx, level) {
		l.logger.Log(ctx, level, "nats server", "text", fmt.Sprintf(format, v...))
	}
}
