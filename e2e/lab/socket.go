package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// BlockingSocket is a socket in front of a node's engine that can hold back
// what is asked about single containers, or everything, as an engine does in
// which something hangs.
type BlockingSocket struct {
	path  string
	proxy *httputil.ReverseProxy

	mu      sync.Mutex
	held    map[string]bool // names and ids; "" is everything
	changed chan struct{}   // closed and replaced when held shrinks
}

// BlockingSocket opens a socket in front of the engine. It passes everything
// on until it is told otherwise, and ends with the environment.
func (n *Node) BlockingSocket() *BlockingSocket {
	n.env.tb.Helper()
	engine := strings.TrimPrefix(n.Socket(), "unix://")
	s := &BlockingSocket{path: n.Path("blocking.sock"), held: map[string]bool{}, changed: make(chan struct{})}
	s.proxy = &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host = "http", "docker"
		},
		Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "unix", engine)
			},
			DisableCompression: true,
		},
		FlushInterval: -1, // events and progress are told at once
		ErrorHandler:  func(w http.ResponseWriter, _ *http.Request, _ error) { panic(http.ErrAbortHandler) },
	}
	ln, err := net.Listen("unix", s.path)
	if err != nil {
		n.env.tb.Fatalf("open a blocking socket on %s: %v", n.name, err)
	}
	srv := &http.Server{Handler: s}
	go func() { _ = srv.Serve(ln) }()
	n.env.tb.Cleanup(func() { _ = srv.Close() })
	return s
}

// Address returns "unix://…".
func (s *BlockingSocket) Address() string { return "unix://" + s.path }

// Block holds back every request whose path names one of the containers;
// without any it holds back every request.
func (s *BlockingSocket) Block(containers ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(containers) == 0 {
		s.held[""] = true
	}
	for _, c := range containers {
		s.held[c] = true
	}
}

// Claim makes the engine say that its architecture is another one.
func (s *BlockingSocket) Claim(arch string) {
	s.proxy.ModifyResponse = func(r *http.Response) error {
		if !strings.HasSuffix(r.Request.URL.Path, "/info") {
			return nil
		}
		var info map[string]any
		if err := json.NewDecoder(r.Body).Decode(&info); err != nil {
			return err
		}
		info["Architecture"] = arch
		body, err := json.Marshal(info)
		if err != nil {
			return err
		}
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		r.Header.Set("Content-Length", strconv.Itoa(len(body)))
		return nil
	}
}

// Release lets go what Block holds back.
func (s *BlockingSocket) Release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.held)
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *BlockingSocket) blocks(path string) (bool, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	hit := s.held[""] || slices.ContainsFunc(strings.Split(path, "/"), func(part string) bool { return part != "" && s.held[part] })
	return hit, s.changed
}

// ServeHTTP implements http.Handler.
func (s *BlockingSocket) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	for {
		held, changed := s.blocks(r.URL.Path)
		if !held {
			break
		}
		select {
		case <-r.Context().Done():
			return
		case <-changed:
		}
	}
	s.proxy.ServeHTTP(w, r)
}
