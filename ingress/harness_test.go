package ingress_test

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/ingress"
	"github.com/opfield/availability/ingress/apply"
	"github.com/opfield/availability/ingress/ingresstest"
	"github.com/opfield/availability/ingress/render"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// env is one ingress node with a real nginx.
type env struct {
	t         testing.TB
	dir       string
	ca        *ingresstest.CA
	source    *ingresstest.Source
	endpoints *ingresstest.Endpoints
	config    ingress.Config
	ingress   *ingress.Ingress
	registry  *prometheus.Registry
	log       *lockedBuffer
	stop      func()
	client    *http.Client
}

type lockedBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func newEnv(t testing.TB, change ...func(*ingress.Config)) *env {
	t.Helper()
	dir, err := os.MkdirTemp("", "opf")
	require.NoError(t, err)
	require.NoError(t, os.Chmod(dir, 0o755))
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	e := &env{t: t, dir: dir, ca: ingresstest.NewCA(t), source: ingresstest.NewSource(), endpoints: ingresstest.NewEndpoints(t), log: &lockedBuffer{}}
	e.ca.WriteIdentity(t, filepath.Join(dir, "id"))
	out, err := exec.Command("nginx", "-V").CombinedOutput()
	require.NoError(t, err, "nginx must be installed")
	binary, err := exec.LookPath("nginx")
	require.NoError(t, err)
	c := render.DefaultConfig()
	c.Build, err = render.ParseBuild(string(out))
	require.NoError(t, err)
	c.RunDir, c.LogDir, c.SocketDir, c.CertDir = dir+"/run", dir+"/log", dir+"/run/s", dir+"/certs"
	c.ClientCert, c.ClientKey, c.ClientCA = dir+"/id/identity.crt", dir+"/id/identity.key", dir+"/id/ca.crt"
	c.Addresses = []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::1")}
	c.HTTPPort, c.HTTPSPort = ingresstest.FreePort(t), ingresstest.FreePort(t)
	c.EndpointPort, c.Workers, c.Connections = e.endpoints.Port, 2, 2048
	c.ShutdownTimeout = 5 * time.Second
	uid := -1
	if os.Geteuid() == 0 {
		u, err := user.Lookup("www-data")
		require.NoError(t, err)
		c.User = u.Username
		uid, err = strconv.Atoi(u.Uid)
		require.NoError(t, err)
	}
	e.config = ingress.Config{
		StateDir: dir + "/state", Render: c, WorkerUID: uid,
		Apply:      apply.Config{Binary: binary, Dir: dir + "/conf"},
		ProbeEvery: -1, Source: e.source, Endpoints: e.endpoints,
		Logger: slog.New(slog.NewTextHandler(e.log, nil)),
	}
	for _, f := range change {
		f(&e.config)
	}
	e.client = e.newClient(true)
	t.Cleanup(func() {
		if e.stop != nil {
			e.stop()
		}
		if t.Failed() {
			t.Logf("log:\n%s", e.log)
			for _, name := range []string{"error.log", "access.log"} {
				text, _ := os.ReadFile(filepath.Join(dir, "log", name))
				t.Logf("%s:\n%s", name, tail(text, 6000))
			}
		}
		if e.ingress != nil {
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
			defer cancel()
			_ = e.ingress.StopNginx(ctx)
		}
	})
	return e
}

func tail(b []byte, n int) string {
	if len(b) > n {
		b = b[len(b)-n:]
	}
	return string(b)
}

// start runs the sidecar; a second call after stop is a restart.
func (e *env) start() {
	e.t.Helper()
	var err error
	e.registry = prometheus.NewRegistry()
	e.config.Registerer = e.registry
	e.ingress, err = ingress.New(e.config)
	require.NoError(e.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- e.ingress.Run(ctx) }()
	e.stop = func() {
		cancel()
		if err := <-done; err != nil {
			e.t.Errorf("run: %v", err)
		}
		e.stop = nil
	}
}

func (e *env) newClient(keepalive bool) *http.Client {
	return &http.Client{
		Timeout: 30 * time.Second,
		Transport: &http.Transport{
			DisableKeepAlives: !keepalive, MaxIdleConnsPerHost: 64,
			TLSClientConfig: &tls.Config{RootCAs: e.ca.Pool},
			DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
				_, port, err := net.SplitHostPort(addr)
				if err != nil {
					return nil, err
				}
				return (&net.Dialer{}).DialContext(ctx, network, net.JoinHostPort("127.0.0.1", port))
			},
			ForceAttemptHTTP2: true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// answer is a response with its body.
type answer struct {
	*http.Response
	body string
}

func (e *env) do(method, url, body string, headers ...string) answer {
	e.t.Helper()
	a, err := e.try(method, url, body, headers...)
	require.NoError(e.t, err)
	return a
}

func (e *env) try(method, url, body string, headers ...string) (answer, error) {
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := e.client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return answer{resp, string(text)}, err
}

// url is that of a host's plain HTTP port.
func (e *env) url(host, path string) string {
	return fmt.Sprintf("http://%s:%d%s", host, e.config.Render.HTTPPort, path)
}

func (e *env) tlsURL(host, path string) string {
	return fmt.Sprintf("https://%s:%d%s", host, e.config.Render.HTTPSPort, path)
}

func event(workload, node string, counter uint64, ready bool) placement.Event {
	return placement.Event{
		Workload: workload, Node: node, Placement: workload + "." + node, Kind: placement.KindContainer,
		Role: placement.RoleServing, Ready: ready, State: placement.StateRunning,
		Ports:    []placement.Port{{Port: 80, Protocol: placement.ProtocolHTTP}},
		Sequence: placement.Sequence{Incarnation: 1, Counter: counter},
	}
}

func link(workload, node string) placement.LinkID {
	return placement.LinkID{Placement: placement.ID{Workload: workload, Node: node}, Port: 80}
}

// place starts placements "<prefix><i>" of a workload and announces them.
func (e *env) place(workload string, ready bool, nodes ...string) []*ingresstest.Placement {
	var out []*ingresstest.Placement
	for _, n := range nodes {
		p := ingresstest.NewPlacement(e.t, e.ca, workload, n)
		e.endpoints.Lead(link(workload, n), p)
		e.source.Publish(event(workload, n, 1, ready))
		out = append(out, p)
	}
	return out
}

func route(name, host, workload string) upstream.Route {
	return upstream.Route{Name: name, Hosts: []string{host}, Workload: workload, Port: 80}
}

func (e *env) within(d time.Duration, what string, cond func() bool) {
	e.t.Helper()
	require.Eventually(e.t, cond, d, 10*time.Millisecond, what)
}

// settledFor is longer than the status needs to follow a change (80 ms), and
// than nginx lets the workers of the old configuration take connections beside
// those of the new one (100 ms).
const settledFor = 200 * time.Millisecond

// settled waits until everything that was announced is in nginx. On a
// busy machine the placements may come after the routes were applied, and need a
// second reload.
func (e *env) settled() {
	e.t.Helper()
	var last string
	var since time.Time
	require.Eventually(e.t, func() bool {
		s := e.ingress.Status()
		text, _ := json.Marshal(s)
		last = string(text)
		switch {
		case !e.source.Heard(ingress.BucketRoutes), s.Reload.Generation == "", s.Reload.Result == "", s.Reload.Pending:
			since = time.Time{}
		case since.IsZero():
			since = time.Now()
		default:
			return time.Since(since) > settledFor
		}
		return false
	}, 30*raceFactor*time.Second, 20*time.Millisecond, "nginx did not settle: %s", last)
}

func (e *env) routeStatus(name string) ingress.RouteStatus {
	for _, r := range e.ingress.Status().Routes {
		if r.Name == name {
			return r
		}
	}
	return ingress.RouteStatus{}
}

// reloads counts how often nginx began a reload.
func (e *env) reloads() int {
	text, err := os.ReadFile(filepath.Join(e.dir, "log", "error.log"))
	require.NoError(e.t, err)
	return strings.Count(string(text), "(SIGHUP) received")
}
