package ingresstest

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// Delivery is one request that a placement received.
type Delivery struct {
	Method  string
	Host    string
	URI     string
	ID      string // X-Request-Id
	Body    int64
	Conn    string // remote address: equal for requests of one connection
	Resumed bool   // the TLS session was resumed
}

// Placement is a node's end of a link with an application behind it: mutual
// TLS 1.3, finished only after the application was dialled.
type Placement struct {
	Name    string
	Address string

	mu         sync.Mutex
	deliveries []Delivery
	answer     func(w http.ResponseWriter, r *http.Request)
	refuse     bool // the application does not accept connections
	abort      bool // the application takes the request and dies
	conns      map[net.Conn]bool
}

// NewPlacement starts a placement of the workload that names itself in the
// header X-Placement.
func NewPlacement(t testing.TB, ca *CA, workload, name string) *Placement {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &Placement{Name: name, Address: ln.Addr().String(), conns: map[net.Conn]bool{}}
	config := &tls.Config{
		MinVersion:   tls.VersionTLS13,
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    ca.Pool,
		Certificates: []tls.Certificate{ca.Certificate(t, workload+".workload.opfield.internal")},
		NextProtos:   []string{"h2", "http/1.1"},
		// The application is "dialled" inside the handshake.
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			if p.refuses() {
				return nil, fmt.Errorf("application refuses")
			}
			return nil, nil
		},
	}
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	server := &http.Server{Handler: p, TLSConfig: config, Protocols: &protocols, ErrorLog: discard()}
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(tls.NewListener(tracked{ln, p}, config)) })
	t.Cleanup(func() { _ = server.Close(); wg.Wait() })
	return p
}

// NewTCPPlacement starts a placement whose application echoes.
func NewTCPPlacement(t testing.TB, ca *CA, workload, name string) *Placement {
	t.Helper()
	config := &tls.Config{
		MinVersion: tls.VersionTLS13, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: ca.Pool,
		Certificates: []tls.Certificate{ca.Certificate(t, workload+".workload.opfield.internal")},
	}
	ln, err := tls.Listen("tcp", "127.0.0.1:0", config)
	require.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_, _ = fmt.Fprintf(c, "%s\n", name)
				_, _ = io.Copy(c, bufio.NewReader(c))
			})
		}
	})
	t.Cleanup(func() { _ = ln.Close() })
	return &Placement{Name: name, Address: ln.Addr().String()}
}

type tracked struct {
	net.Listener
	p *Placement
}

func (l tracked) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.p.mu.Lock()
		l.p.conns[c] = true
		l.p.mu.Unlock()
	}
	return c, err
}

func (p *Placement) refuses() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.refuse
}

// Answer sets what the application does with a request.
func (p *Placement) Answer(f func(w http.ResponseWriter, r *http.Request)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answer = f
}

// Status makes the application answer every request with a status, its own
// body and Retry-After.
func (p *Placement) Status(code int) {
	p.Answer(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Retry-After", "77")
		w.WriteHeader(code)
		_, _ = fmt.Fprintf(w, "own %d of %s", code, p.Name)
	})
}

// Abort makes the application take every request and end the connection.
func (p *Placement) Abort() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.abort = true
}

// Deliveries returns what arrived.
func (p *Placement) Deliveries() []Delivery {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]Delivery(nil), p.deliveries...)
}

// ServeHTTP implements http.Handler.
func (p *Placement) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n, _ := io.Copy(io.Discard, r.Body)
	p.mu.Lock()
	p.deliveries = append(p.deliveries, Delivery{Method: r.Method, Host: r.Host, URI: r.RequestURI, ID: r.Header.Get("X-Request-Id"), Body: n, Conn: r.RemoteAddr, Resumed: r.TLS != nil && r.TLS.DidResume})
	answer, abort := p.answer, p.abort
	p.mu.Unlock()
	w.Header().Set("X-Placement", p.Name)
	w.Header().Set("X-Method", r.Method)
	switch {
	case abort:
		panic(http.ErrAbortHandler)
	case answer != nil:
		answer(w, r)
	default:
		_, _ = fmt.Fprintf(w, "hello from %s", p.Name)
	}
}

// Count returns how many of the placements' deliveries match.
func Count(match func(Delivery) bool, placements ...*Placement) int {
	n := 0
	for _, p := range placements {
		for _, d := range p.Deliveries() {
			if match(d) {
				n++
			}
		}
	}
	return n
}
