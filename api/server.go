package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/identity"
)

const (
	maxBody      = 8 << 20 // `route apply` with 10,000 routes
	readWithin   = 30 * time.Second
	callWithin   = 20 * time.Second // what a call may do at the store
	stopWithin   = 3 * time.Second
	socketMode   = 0o600
	socketFolder = 0o755
)

// RouteChecker validates one route and returns its name and its normal form.
// The error is Violations if the route itself is wrong.
type RouteChecker func(json.RawMessage) (name string, normal json.RawMessage, err error)

// Config configures a Server.
type Config struct {
	Conn       *bus.Conn // of the controller
	Store      *bus.Store
	CA         *identity.CA
	Fleet      *Fleet
	CheckRoute RouteChecker
	// Revoked is called after a revocation was stored.
	Revoked func([]identity.Revocation)
	// Availability is the policy engine; nil: it has not started.
	Availability Availability
	// Audit takes every request that was refused or changed something (OBS-2);
	// nil: they are logged only. It must not block.
	Audit  func(bus.AuditEvent)
	Logger *slog.Logger
}

// Server answers the controller's API.
type Server struct {
	Config            // fixed after New
	write  sync.Mutex // one change at a time: checks look at what is stored
}

// New checks the configuration.
func New(cfg Config) (*Server, error) {
	if cfg.Conn == nil || cfg.Store == nil || cfg.CA == nil || cfg.Fleet == nil || cfg.CheckRoute == nil || cfg.Logger == nil {
		return nil, errors.New("api: connection, store, ca, fleet, route checker and logger are required")
	}
	return &Server{Config: cfg}, nil
}

// handler is a call that returns what to answer as JSON.
type handler func(context.Context, *http.Request) (any, error)

// Handler returns the routes of the API.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	for pattern, h := range map[string]handler{
		"GET /v1/status":             s.status,
		"GET /v1/nodes":              s.nodes,
		"GET /v1/workloads":          s.workloads,
		"GET /v1/routes":             s.listRoutes,
		"POST /v1/routes":            s.applyRoutes,
		"PUT /v1/routes/{name}":      s.putRoute,
		"DELETE /v1/routes/{name}":   s.deleteRoute,
		"GET /v1/certs":              s.listCerts,
		"PUT /v1/certs/{name}":       s.putCert,
		"DELETE /v1/certs/{name}":    s.deleteCert,
		"GET /v1/tokens":             s.listTokens,
		"POST /v1/tokens":            s.createToken,
		"DELETE /v1/tokens/{id}":     s.revokeToken,
		"GET /v1/identities":         s.listIdentities,
		"POST /v1/identities/revoke": s.revokeIdentity,
	} {
		mux.Handle(pattern, s.call(h))
	}
	mux.HandleFunc("GET /v1/events", s.events)
	s.mount(mux)
	mux.HandleFunc("GET /v1/openapi.json", s.document)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		p := refuse(http.StatusNotFound, CodeNotFound, "there is no %s %s; CLI and controller may be of different versions", r.Method, r.URL.Path)
		s.refused(r.Context(), r.Method, r.URL.Path, p)
		writeProblem(w, p)
	})
	return mux
}

func (s *Server) document(w http.ResponseWriter, _ *http.Request) {
	b, err := Document()
	if err != nil {
		writeProblem(w, problemOf(err, s.Logger))
		return
	}
	w.Header().Set("Content-Type", "application/openapi+json")
	_, _ = w.Write(b) // the client is gone
}

func (s *Server) call(h handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), callWithin)
		defer cancel()
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		out, err := h(ctx, r)
		if err != nil {
			p := problemOf(err, s.Logger)
			s.refused(r.Context(), r.Method, r.URL.Path, p)
			writeProblem(w, p)
			return
		}
		if r.Method != http.MethodGet {
			s.accepted(r.Context(), bus.AuditEvent{Method: r.Method, Path: pathOf(r.URL.Path), Text: strings.TrimSpace(r.Method + " " + pathOf(r.URL.Path) + " " + about(out))})
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(out) // the client is gone
	})
}

// decode reads exactly one JSON document without unknown fields.
func decode(r *http.Request, v any) error {
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	err := d.Decode(v)
	if err == nil {
		if _, err = d.Token(); errors.Is(err, io.EOF) {
			return nil
		}
		err = errors.New("more than one document")
	}
	if _, large := errors.AsType[*http.MaxBytesError](err); large {
		return err
	}
	return refuse(http.StatusBadRequest, CodeMalformed, "the body is not the expected JSON: %v", withoutValue(err))
}

// withoutValue keeps submitted values, which may be secrets, out of errors.
func withoutValue(err error) error {
	if t, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fmt.Errorf("field %s: want %s", t.Field, t.Type)
	}
	return err
}

// Listen opens the socket at path for this user and root only.
func Listen(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), socketFolder); err != nil {
		return nil, fmt.Errorf("api socket: %w", err)
	}
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		c.Close()
		return nil, fmt.Errorf("api socket: %s is in use; another controller runs", path)
	}
	if st, err := os.Lstat(path); err == nil && st.Mode().Type() == os.ModeSocket {
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("api socket: %w", err)
		}
	}
	ln, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("api socket: %w", err)
	}
	if err := os.Chmod(path, socketMode); err != nil {
		ln.Close()
		return nil, fmt.Errorf("api socket: %w", err)
	}
	return &ownerOnly{ln}, nil
}

// ownerOnly admits root and the user of this process, whatever the mode of
// the socket is.
type ownerOnly struct{ net.Listener }

func (l *ownerOnly) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if uid, err := peerUID(c); err == nil && (uid == 0 || int(uid) == os.Geteuid()) {
			return c, nil
		}
		c.Close()
	}
}

func peerUID(c net.Conn) (uint32, error) {
	uc, ok := c.(*net.UnixConn)
	if !ok {
		return 0, errors.New("not a unix connection")
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, credErr); err != nil {
		return 0, err
	}
	return cred.Uid, nil
}

// Serve answers on ln until ctx ends.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	srv := &http.Server{
		Handler:           s.Handler(),
		ReadHeaderTimeout: readWithin,
		ReadTimeout:       readWithin,
		ConnContext:       withCaller,
		BaseContext:       func(net.Listener) context.Context { return ctx }, // ends followers
		ErrorLog:          slog.NewLogLogger(s.Logger.Handler(), slog.LevelDebug),
	}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(ln) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopWithin)
	defer cancel()
	err := srv.Shutdown(stop)
	<-done
	return errors.Join(ctx.Err(), err)
}
