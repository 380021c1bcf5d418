package ingress_test

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/ingress"
	"github.com/opfield/availability/ingress/ingresstest"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// RTE-5: gRPC over HTTP/2 to the client and to the placement, trailers and
// all; two of three placements closed before any reload.
func TestIngress_GRPC(t *testing.T) {
	e := newEnv(t)
	all := e.place("api", true, "a", "b", "c")
	for _, p := range all {
		p.Answer(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/grpc")
			w.Header().Set("Trailer", "grpc-status")
			w.Header().Set("X-Proto", r.Proto)
			w.WriteHeader(200)
			_, _ = w.Write([]byte("\x00\x00\x00\x00\x02hi"))
			w.Header().Set("grpc-status", "0")
		})
	}
	r := route("api", "api.example", "api")
	r.Protocol, r.TLS = placement.ProtocolGRPC, &upstream.RouteTLS{Cert: "site"}
	cert, key := e.ca.Pair(t, "api.example")
	e.source.SetBucket("opfield_certs", map[string][]byte{"site": append(cert, key...)})
	e.source.SetRoutes(t, r)
	e.start()
	e.settled()
	call := func() answer {
		return e.do(http.MethodPost, e.tlsURL("api.example", "/pkg.Service/Method"), "\x00\x00\x00\x00\x00", "Content-Type", "application/grpc", "TE", "trailers")
	}
	e.within(5*time.Second, "certificate", func() bool {
		_, err := e.try(http.MethodGet, e.tlsURL("api.example", "/"), "")
		return err == nil
	})
	for range 30 {
		a := call()
		require.Equal(t, 200, a.StatusCode)
		require.Equal(t, "HTTP/2.0", a.Header.Get("X-Proto"))
		require.Equal(t, "0", a.Trailer.Get("grpc-status"))
	}
	e.source.Publish(event("api", "a", 2, false))
	e.source.Publish(event("api", "b", 2, false))
	e.within(time.Second, "joined", func() bool { return e.endpoints.State(link("api", "b")) == upstream.Joined })
	for range 30 {
		require.Equal(t, 200, call().StatusCode)
	}
	require.Equal(t, 405, e.do("FOO", e.tlsURL("api.example", "/"), "").StatusCode)
}

// RTE-5: server-sent events arrive one by one.
func TestIngress_ServerSentEvents(t *testing.T) {
	e := newEnv(t)
	next := make(chan struct{})
	e.place("web", true, "a")[0].Answer(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			_, _ = fmt.Fprintf(w, "data: %d\n\n", i)
			w.(http.Flusher).Flush()
			select {
			case <-next:
			case <-r.Context().Done():
				return
			}
		}
	})
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	resp, err := e.client.Get(e.url("web.example", "/events"))
	require.NoError(t, err)
	defer resp.Body.Close()
	s := bufio.NewScanner(resp.Body)
	for i := range 3 {
		require.True(t, s.Scan())
		require.Equal(t, fmt.Sprintf("data: %d", i), s.Text())
		require.True(t, s.Scan())
		next <- struct{}{} // the next one is written only after this one arrived
	}
}

// RTE-5: an upgraded connection carries bytes both ways.
func TestIngress_WebSocket(t *testing.T) {
	e := newEnv(t)
	e.place("web", true, "a")[0].Answer(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "websocket" || !strings.EqualFold(r.Header.Get("Connection"), "upgrade") {
			w.WriteHeader(400)
			return
		}
		c, rw, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
		_, _ = io.Copy(c, rw)
	})
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", e.config.Render.HTTPPort))
	require.NoError(t, err)
	defer c.Close()
	require.NoError(t, c.SetDeadline(time.Now().Add(10*time.Second)))
	_, err = io.WriteString(c, "GET /ws HTTP/1.1\r\nHost: web.example\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
	require.NoError(t, err)
	br := bufio.NewReader(c)
	resp, err := http.ReadResponse(br, nil)
	require.NoError(t, err)
	require.Equal(t, 101, resp.StatusCode)
	_, err = io.WriteString(c, "ping\n")
	require.NoError(t, err)
	line, err := br.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ping\n", line)
}

// RTE-5: uploads pass, buffered and not; limits are those of the path, for
// bodies of known and of unknown length.
func TestIngress_BodiesAndLimits(t *testing.T) {
	e := newEnv(t)
	p := e.place("web", true, "a")[0]
	small, up := route("small", "web.example", "web"), route("up", "web.example", "web")
	small.Settings.MaxBodyBytes = 1000
	up.Path, up.Settings.MaxBodyBytes, up.Settings.StreamRequest = "/up", 100<<20, true
	e.source.SetRoutes(t, small, up, route("free", "free.example", "web"))
	e.start()
	e.settled()
	big := strings.Repeat("x", 64<<20)
	require.Equal(t, 200, e.do("POST", e.url("free.example", "/"), big).StatusCode)
	require.Equal(t, 200, e.do("POST", e.url("web.example", "/up/x"), big).StatusCode)
	require.Equal(t, 200, e.do("PUT", e.url("web.example", "/up"), big).StatusCode)
	for _, d := range p.Deliveries() {
		require.Equal(t, int64(len(big)), d.Body)
	}
	e.client = e.newClient(false)
	for _, path := range []string{"/", "/upx", "/x/up"} {
		a, err := e.try("POST", e.url("web.example", path), strings.Repeat("x", 5000))
		require.NoError(t, err)
		require.Equal(t, 413, a.StatusCode, path)
	}
	req, err := http.NewRequest("POST", e.url("web.example", "/"), io.MultiReader(bytes.NewReader(make([]byte, 5000))))
	require.NoError(t, err)
	resp, err := e.client.Do(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 413, resp.StatusCode, "chunked")
}

// RTE-1: the longest path wins, whole segments only, after decoding.
func TestIngress_Paths(t *testing.T) {
	e := newEnv(t)
	for _, w := range []string{"root", "api", "deep"} {
		e.place(w, true, w)
	}
	api, deep := route("api", "web.example", "api"), route("deep", "web.example", "deep")
	api.Path, deep.Path = "/api", "/api/v1.2"
	only := route("only", "only.example", "api")
	only.Path = "/x"
	e.source.SetRoutes(t, route("root", "web.example", "root"), api, deep, only)
	e.start()
	e.settled()
	for path, want := range map[string]string{
		"/": "root", "/apix": "root", "/api": "api", "/api/": "api", "/api/v1x2": "api", "/api/v1.2": "deep",
		"/api/v1.2/a": "deep", "/%61pi/v": "api", "/x/../api/q": "api", "/api%0A": "root", "/API": "root",
	} {
		a := e.do(http.MethodGet, e.url("web.example", path), "")
		require.Equal(t, want, a.Header.Get("X-Placement"), path)
	}
	require.Equal(t, 200, e.do(http.MethodGet, e.url("only.example", "/x/y"), "").StatusCode)
	require.Equal(t, 404, e.do(http.MethodGet, e.url("only.example", "/y"), "").StatusCode)
}

// RTE-5: a trusted proxy in front says who the client is and what it spoke.
func TestIngress_TrustedProxy(t *testing.T) {
	e := newEnv(t, func(c *ingress.Config) { c.Render.Trusted = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")} })
	var seen http.Header
	e.place("web", true, "a")[0].Answer(func(_ http.ResponseWriter, r *http.Request) { seen = r.Header.Clone() })
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	for _, method := range []string{"GET", "FOO"} {
		require.Equal(t, 200, e.do(method, e.url("web.example", "/"), "", "X-Forwarded-For", "9.9.9.9, 203.0.113.7, 127.0.0.5", "X-Forwarded-Proto", "https").StatusCode)
		require.Equal(t, "203.0.113.7", seen.Get("X-Forwarded-For"), method)
		require.Equal(t, "https", seen.Get("X-Forwarded-Proto"), method)
	}
}

// RTE-7: a route that cannot be read, a route with hostile words and a route
// in conflict are shown with their error; the others serve.
func TestIngress_BadRoutesAlone(t *testing.T) {
	e := newEnv(t)
	e.place("web", true, "a")
	e.source.SetBucket("opfield_routes", map[string][]byte{
		"web":     []byte(`{"hosts":["web.example"],"workload":"web","port":80,"created":1}`),
		"broken":  []byte(`{"hosts":`),
		"hostile": []byte(`{"hosts":["a;return 200 pwn;#"],"workload":"web","port":80}`),
		"late":    []byte(`{"hosts":["web.example"],"workload":"web","port":80,"created":2}`),
	})
	e.start()
	e.settled()
	require.Equal(t, 200, e.do(http.MethodGet, e.url("web.example", "/"), "").StatusCode)
	require.Equal(t, ingress.HealthOnline, e.routeStatus("web").Health)
	for name, want := range map[string]string{"broken": "workload", "hostile": "hosts[0]", "late": "older route web"} {
		require.Equal(t, ingress.HealthRefused, e.routeStatus(name).Health)
		require.Contains(t, e.routeStatus(name).Error, want)
	}
}

// RTE-10: health is what the link answers, not what the events say.
func TestIngress_ProbesThroughLinks(t *testing.T) {
	var ca *ingresstest.CA
	e := newEnv(t, func(c *ingress.Config) { c.ProbeEvery = 100 * time.Millisecond })
	ca = e.ca
	pair := ca.Certificate(t, "ingress-1.ingress.opfield.internal")
	e.config.Prober = ingress.LinkProber{TLS: func(name string) *tls.Config {
		return &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: ca.Pool, ServerName: name, Certificates: []tls.Certificate{pair}}
	}}
	p := e.place("web", true, "a")[0]
	e.source.Publish(event("gone", "a", 1, true)) // ready, but nothing is behind its link
	e.source.SetRoutes(t, route("web", "web.example", "web"), route("gone", "gone.example", "gone"))
	e.start()
	e.within(10*time.Second, "probed", func() bool {
		return e.routeStatus("gone").Health == ingress.HealthOffline && e.routeStatus("web").Health == ingress.HealthOnline
	})
	require.NotEmpty(t, p.Deliveries())
	require.Equal(t, "HEAD", p.Deliveries()[0].Method)
}

// RTE-1: IPv6 clients are served like the others.
func TestIngress_IPv6(t *testing.T) { // RTE-11
	e := newEnv(t)
	e.place("web", true, "a")
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	c, err := net.Dial("tcp", fmt.Sprintf("[::1]:%d", e.config.Render.HTTPPort))
	require.NoError(t, err)
	defer c.Close()
	_, err = io.WriteString(c, "GET / HTTP/1.0\r\nHost: web.example.\r\n\r\n")
	require.NoError(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	require.Equal(t, 200, resp.StatusCode)
}
