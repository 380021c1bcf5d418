// Package bustest runs a real embedded NATS server for tests.
package bustest

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
)

const within = 20 * time.Second

// Server is a NATS server on loopback, with the controller's connections.
type Server struct {
	Store      *bus.Store
	Controller *bus.Conn // signs, and answers LastPlacement
	Identity   *identity.Identity

	t      testing.TB
	ca     *identitytest.CA
	dir    string
	addr   string
	url    string
	cancel context.CancelFunc
	done   chan error
}

// Start runs a server with all streams and buckets; it ends with the test.
func Start(t testing.TB, ca *identitytest.CA) *Server {
	t.Helper()
	s := &Server{t: t, ca: ca, dir: t.TempDir(), addr: "127.0.0.1:0", Identity: ca.Controller(t)}
	s.Start()
	t.Cleanup(s.Stop)

	s.Controller = s.Conn(t, s.Identity)
	store, err := bus.OpenStore(s.config(ca.Identity(t, identity.RoleController, identity.StoreName().ID)))
	must(t, err)
	t.Cleanup(store.Close)
	s.Store = store
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	must(t, bus.EnsureStreams(ctx, s.Controller))
	must(t, store.Ensure(ctx))
	Go(t, func(ctx context.Context) error { return s.Controller.AnswerLast(ctx) })
	Go(t, func(ctx context.Context) error { return s.Controller.AnswerSign(ctx, ca) })
	return s
}

// Start starts the server again after Stop, with the same port and store.
func (s *Server) Start() {
	s.t.Helper()
	srv, err := bus.NewServer(bus.ServerConfig{Addr: s.addr, StoreDir: s.dir, Identity: s.Identity, Logger: Logger(s.t)})
	must(s.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel, s.done = cancel, make(chan error, 1)
	go func() { s.done <- srv.Run(ctx) }()
	select {
	case <-srv.Ready():
	case err := <-s.done:
		s.t.Fatal(err)
	}
	s.addr = net.JoinHostPort("127.0.0.1", strconv.Itoa(srv.Port()))
	s.url = srv.URL()
}

// Stop stops the server; connections keep trying.
func (s *Server) Stop() {
	if s.cancel == nil {
		return
	}
	s.cancel()
	<-s.done
	s.cancel = nil
}

// URL returns where clients connect.
func (s *Server) URL() string { return s.url }

func (s *Server) config(i *identity.Identity) bus.Config {
	return bus.Config{URLs: []string{s.url}, Identity: i, Logger: Logger(s.t)}
}

// Conn connects an identity and waits until it is connected.
func (s *Server) Conn(t testing.TB, i *identity.Identity) *bus.Conn {
	t.Helper()
	c, err := bus.Connect(s.config(i))
	must(t, err)
	t.Cleanup(c.Close)
	for end := time.Now().Add(within); !c.Connected(); {
		if time.Now().After(end) {
			t.Fatalf("%s is not connected", i.Name())
		}
		<-time.After(5 * time.Millisecond)
	}
	return c
}

// Go runs fn until the test ends and waits for it.
func Go(t testing.TB, fn func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- fn(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// Logger discards.
func Logger(testing.TB) *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
