package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/securelink"
)

const (
	headersWithin = 10 * time.Second
	idleWithin    = 2 * time.Minute
	grantWithin   = 500 * time.Millisecond // a node may hear what it shall do before its right is known here
	grantEvery    = 20 * time.Millisecond
	stopWithin    = 5 * time.Second // for running requests when the process ends
	openEvery     = 2 * time.Second // while the storage cannot be opened
	collectEvery  = 24 * time.Hour
	collectAgain  = time.Minute // while it is not known what to keep, or somebody pushes
)

// ErrUnknown says that it is not known yet what to keep.
var ErrUnknown = errors.New("it is not known yet which images are in use")

// Grants says what a node may do with a repository.
type Grants interface {
	// MayPull: a placement of the node runs, or shall run, an image of it.
	MayPull(node, repository string) bool
	// MayPush: the node is being asked to mirror an image into it.
	MayPush(node, repository string) bool
}

// Config configures a Server.
type Config struct {
	Dir    string // of the images
	Grants Grants
	// Keep returns the digests in use, by repository. An error means that
	// they are not known now; then nothing is removed.
	Keep     func(context.Context) (map[string][]string, error)
	Identity *identity.Identity // of the controller

	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// Server is the registry.
type Server struct {
	cfg     Config
	service *securelink.Service
	storage storage
	metrics *metrics

	app atomic.Pointer[http.Handler] // distribution; nil until the storage is open

	// pushes is held for reading by every request that stores something or
	// asks whether it is there, and for writing by the removal.
	pushes sync.RWMutex

	mu      sync.Mutex
	touched map[digest.Digest]time.Time // blobs that a push found here already
}

// New returns a Server that does nothing until Run.
func New(cfg Config) (*Server, error) {
	if cfg.Dir == "" || cfg.Grants == nil || cfg.Keep == nil || cfg.Identity == nil {
		return nil, errors.New("registry: dir, grants, keep and identity are required")
	}
	quiet(cfg.Logger)
	return &Server{
		cfg: cfg, storage: storage{root: cfg.Dir}, metrics: newMetrics(cfg.Registerer), touched: map[digest.Digest]time.Time{},
		service: securelink.NewService(securelink.ServiceConfig{
			Name: placement.ServiceRegistry, TLS: cfg.Identity.ServerTLS(identity.RoleNode), Logger: cfg.Logger,
		}),
	}, nil
}

// Record is to be registered at the relays.
func (s *Server) Record() securelink.Record { return s.service.Record() }

// Take answers one stream of the registry's link.
func (s *Server) Take(in *securelink.Incoming) { s.service.Take(in) }

// Run serves until ctx is done. The storage is opened meanwhile, and what is
// not in use is removed at the start and once a day.
func (s *Server) Run(ctx context.Context) error {
	srv := &http.Server{
		Handler: s, ReadHeaderTimeout: headersWithin, IdleTimeout: idleWithin, MaxHeaderBytes: 16 << 10,
		ConnContext: withCaller, ErrorLog: slog.NewLogLogger(s.cfg.Logger.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(s.service) }()
	s.keep(ctx)
	s.app.Store(nil)
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopWithin)
	defer cancel()
	if err := srv.Shutdown(stop); err != nil {
		_ = srv.Close()
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("serve registry: %w", err)
	}
	return ctx.Err()
}

// keep opens the storage, and then removes what is not in use now and then.
func (s *Server) keep(ctx context.Context) {
	for ctx.Err() == nil {
		app, err := s.storage.open(ctx)
		if err == nil {
			s.app.Store(&app)
			s.cfg.Logger.Info("registry ready", "dir", s.cfg.Dir)
			break
		}
		s.cfg.Logger.Error("registry storage cannot be opened, trying again", "dir", s.cfg.Dir, "err", err)
		pause(ctx, openEvery)
	}
	for ctx.Err() == nil {
		wait := collectEvery
		_, err := s.Collect(ctx)
		switch {
		case errors.Is(err, ErrUnknown), errors.Is(err, errPushing):
			wait = collectAgain
		case err != nil && ctx.Err() == nil:
			s.cfg.Logger.Error("registry: unused images not removed", "err", err)
		}
		pause(ctx, wait)
	}
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
