package identity

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"time"
)

const (
	joinParallel   = 16 // requests worked on at the same time
	joinConns      = 256
	joinReadWithin = 10 * time.Second
	joinShutdown   = 3 * time.Second
)

// Joiner serves the join endpoint of the controller.
type Joiner struct {
	CA        *CA
	Identity  *Identity        // of the controller
	Bootstrap func() Bootstrap // what a new identity is told
	// Joined is called after a success; what it does must also be repaired at
	// the next start from CA.Members.
	Joined func(Member)
	Logger *slog.Logger
}

// TLS returns the configuration of the join listener. The CA certificate is
// sent along, so that a joining process can check its fingerprint.
func (j *Joiner) TLS() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			cert := *j.Identity.cert.Load()
			cert.Certificate = [][]byte{cert.Certificate[0], j.Identity.ca.Raw}
			return &cert, nil
		},
	}
}

// Serve answers on ln until ctx ends.
func (j *Joiner) Serve(ctx context.Context, ln net.Listener) error {
	mux := http.NewServeMux()
	mux.Handle("POST "+JoinPath, j.handler())
	srv := &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: joinReadWithin,
		ReadTimeout:       joinReadWithin,
		WriteTimeout:      joinReadWithin,
		IdleTimeout:       joinReadWithin,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(j.Logger.Handler(), slog.LevelDebug),
	}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(tls.NewListener(newLimit(ln, joinConns), j.TLS())) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), joinShutdown)
	defer cancel()
	err := srv.Shutdown(stop)
	<-done
	return errors.Join(ctx.Err(), err)
}

// handler bounds what it reads and how many requests it works on.
func (j *Joiner) handler() http.Handler {
	slots := make(chan struct{}, joinParallel)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case slots <- struct{}{}:
			defer func() { <-slots }()
		case <-r.Context().Done():
			return
		}
		if !isJSON(r) {
			refuse(w, http.StatusUnsupportedMediaType, "JOIN_MEDIA_TYPE", "want Content-Type: application/json")
			return
		}
		var call joinCall
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, joinBody)).Decode(&call); err != nil {
			status := http.StatusBadRequest
			if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
				status = http.StatusRequestEntityTooLarge
			}
			refuse(w, status, "JOIN_MALFORMED", "the body is not a join request")
			return
		}
		j.join(w, r, call)
	})
}

func (j *Joiner) join(w http.ResponseWriter, r *http.Request, call joinCall) {
	log := j.Logger.With("identity", call.Name.String(), "token", call.TokenID, "remote", r.RemoteAddr)
	if err := call.Name.Check(); err != nil {
		refuse(w, http.StatusUnprocessableEntity, "JOIN_NAME_INVALID", err.Error())
		return
	}
	if err := CheckAddress(call.Advertise); call.Name.Role == RoleRelay && err != nil {
		refuse(w, http.StatusUnprocessableEntity, "JOIN_ADVERTISE_INVALID", err.Error())
		return
	}
	cert, m, err := j.CA.redeem(call.TokenID, call.Secret, call.Name, call.Advertise, call.CSR)
	switch {
	case errors.Is(err, ErrToken):
		log.Warn("join refused", "err", err)
		refuse(w, http.StatusForbidden, "JOIN_TOKEN_REFUSED", err.Error())
		return
	case errors.Is(err, ErrRefused):
		refuse(w, http.StatusUnprocessableEntity, "JOIN_CSR_INVALID", err.Error())
		return
	case err != nil:
		log.Error("join not completed", "err", err)
		refuse(w, http.StatusInternalServerError, "JOIN_NOT_STORED", "the controller could not store the identity; see its log")
		return
	}
	log.Info("identity joined", "workloads", m.Grant.String())
	if j.Joined != nil {
		j.Joined(m)
	}
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(joinAnswer{Certificate: cert, Bootstrap: j.Bootstrap()}); err != nil {
		log.Warn("join answer not sent", "err", err)
	}
}

func refuse(w http.ResponseWriter, status int, code, detail string) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(problem{Type: "about:blank", Title: http.StatusText(status), Status: status, Code: code, Detail: detail})
}
