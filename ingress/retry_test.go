package ingress_test

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/ingress"
	"github.com/opfield/availability/ingress/ingresstest"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

func TestIngress_ServesAndPassesOn(t *testing.T) { // RTE-1, RTE-5, RTE-12
	e := newEnv(t)
	var seen http.Header
	var host, uri string
	p := e.place("web", true, "a")[0]
	p.Answer(func(_ http.ResponseWriter, r *http.Request) { seen, host, uri = r.Header.Clone(), r.Host, r.RequestURI })
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	a := e.do(http.MethodGet, e.url("WEB.example", "/a%2Fb//c?x=%20y"), "", "X-Request-Id", "my-id", "X-Opf-Pool", "evil", "X-Forwarded-For", "6.6.6.6")
	require.Equal(t, 200, a.StatusCode)
	require.Equal(t, "/a%2Fb//c?x=%20y", uri)
	require.Equal(t, fmt.Sprintf("web.example:%d", e.config.Render.HTTPPort), host)
	require.Equal(t, "my-id", seen.Get("X-Request-Id"))
	require.Equal(t, "127.0.0.1", seen.Get("X-Forwarded-For"))
	require.Equal(t, "http", seen.Get("X-Forwarded-Proto"))
	require.Equal(t, host, seen.Get("X-Forwarded-Host"))

	require.Equal(t, 404, e.do(http.MethodGet, e.url("other.example", "/"), "").StatusCode)
	require.Equal(t, 404, e.do(http.MethodGet, e.url("other.example", "/generation"), "").StatusCode)

	// 30 kB of headers pass.
	require.Equal(t, 200, e.do(http.MethodGet, e.url("web.example", "/"), "", "X-Big", strings.Repeat("a", 28<<10)).StatusCode)

	e.within(2*time.Second, "every log line is JSON", func() bool {
		text, err := os.ReadFile(filepath.Join(e.dir, "log", "access.log"))
		return err == nil && validLines(string(text)) >= 3 && strings.Contains(string(text), `"id":"my-id","route":"web","workload":"web","generation":"`+e.ingress.Status().Reload.Generation+`"`)
	})
}

// RTE-3: what was sent is repeated only if the method allows it.
func TestIngress_DeliversAtMostOnce(t *testing.T) {
	e := newEnv(t)
	all := e.place("web", true, "a", "b", "c")
	for _, p := range all {
		p.Abort()
	}
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	for _, method := range []string{"POST", "PATCH", "LOCK", "FOO", "PURGE", "REPORT"} {
		for i := range 5 {
			id := fmt.Sprintf("%s-%d", method, i)
			a := e.do(method, e.url("web.example", "/"+id), "body", "X-Request-Id", id)
			require.Equal(t, 502, a.StatusCode, method)
			require.Equal(t, 1, ingresstest.Count(func(d ingresstest.Delivery) bool { return d.ID == id }, all...), id)
		}
	}
	a := e.do(http.MethodGet, e.url("web.example", "/get"), "", "X-Request-Id", "get")
	require.Equal(t, 502, a.StatusCode)
	require.Equal(t, 5, ingresstest.Count(func(d ingresstest.Delivery) bool { return d.ID == "get" }, all...), "three, and two in the second round")
}

// RTE-3: an unknown method arrives as it is, body and address included.
func TestIngress_UnknownMethodIntact(t *testing.T) {
	e := newEnv(t)
	p := e.place("web", true, "a")[0]
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	body := strings.Repeat("x", 300<<10)
	a := e.do("FOO", e.url("web.example", "/a%2Fb?q=%20"), body)
	require.Equal(t, 200, a.StatusCode)
	d := p.Deliveries()
	require.Len(t, d, 1)
	require.Equal(t, "FOO", d[0].Method)
	require.Equal(t, "/a%2Fb?q=%20", d[0].URI)
	require.Equal(t, int64(len(body)), d[0].Body)
	require.Equal(t, fmt.Sprintf("web.example:%d", e.config.Render.HTTPPort), d[0].Host)
}

// RTE-3: a repeatable request that one placement loses is answered by another.
func TestIngress_GetIsRetried(t *testing.T) {
	e := newEnv(t)
	all := e.place("web", true, "a", "b", "c")
	all[0].Abort()
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	for range 30 {
		require.Equal(t, 200, e.do(http.MethodGet, e.url("web.example", "/"), "").StatusCode)
	}
}

// RTE-4: 20 closed and 2 open members, 8 reloads: no request fails.
func TestIngress_ManyClosedMembers(t *testing.T) {
	e := newEnv(t)
	e.place("web", true, "open-a", "open-b")
	for i := range 20 {
		e.source.Publish(event("web", fmt.Sprintf("closed-%d", i), 1, false))
	}
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	// One request per connection: a reload loses requests of kept client
	// connections, which is nginx's own and not measured here.
	e.client = e.newClient(false)
	before := e.reloads()
	for i := range 8 {
		e.source.SetRoutes(t, route("web", "web.example", "web"), route("more", fmt.Sprintf("m%d.example", i), "web"))
		for range 12 {
			require.Equal(t, 200, e.do(http.MethodGet, e.url("web.example", "/"), "").StatusCode)
			require.Equal(t, 200, e.do(http.MethodPost, e.url("web.example", "/"), "x").StatusCode)
		}
		e.within(5*time.Second, "the new route serves", func() bool {
			a, err := e.try(http.MethodGet, e.url(fmt.Sprintf("m%d.example", i), "/"), "")
			return err == nil && a.StatusCode == 200
		})
	}
	require.Equal(t, 8, e.reloads()-before)
}

// RTE-4: an application's own 503 arrives with body and Retry-After after at
// most min(5, N) deliveries, and does not hurt other requests.
func TestIngress_OwnStatusPasses(t *testing.T) {
	for _, n := range []int{1, 3, 8} {
		t.Run(fmt.Sprintf("%d open", n), func(t *testing.T) {
			e := newEnv(t)
			var nodes []string
			for i := range n {
				nodes = append(nodes, fmt.Sprintf("n%d", i))
			}
			all := e.place("web", true, nodes...)
			for i := range 3 {
				e.source.Publish(event("web", fmt.Sprintf("closed-%d", i), 1, false))
			}
			for _, p := range all {
				p.Answer(func(w http.ResponseWriter, r *http.Request) {
					if strings.HasPrefix(r.URL.Path, "/bad") {
						w.Header().Set("Retry-After", "77")
						w.WriteHeader(503)
						_, _ = fmt.Fprint(w, "own 503")
					}
				})
			}
			e.source.SetRoutes(t, route("web", "web.example", "web"))
			e.start()
			e.settled()
			for i := range 10 {
				for _, method := range []string{"GET", "POST", "FOO"} {
					id := fmt.Sprintf("%s-%d", method, i)
					a := e.do(method, e.url("web.example", "/bad"), "", "X-Request-Id", id)
					require.Equal(t, 503, a.StatusCode)
					require.Equal(t, "own 503", a.body)
					require.Equal(t, "77", a.Header.Get("Retry-After"))
					want := 1
					if method == "GET" {
						want = min(4, n) // the fifth is kept for the second round
					}
					got := ingresstest.Count(func(d ingresstest.Delivery) bool { return d.ID == id }, all...)
					require.Equal(t, want, got, id)
					require.Equal(t, 200, e.do(method, e.url("web.example", "/good"), "").StatusCode)
				}
			}
		})
	}
}

// RTE-4, LNK-1: both rendered primaries close and only a third is open; until
// the lists are up to date they are joined to it, and nothing fails.
func TestIngress_PrimariesJoinBeforeReload(t *testing.T) {
	e := newEnv(t)
	e.place("web", true, "a", "b")
	e.place("web", false, "c")
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	before := e.reloads()
	e.source.Publish(event("web", "c", 2, true))
	e.source.Publish(event("web", "a", 2, false))
	e.source.Publish(event("web", "b", 2, false))
	e.within(time.Second, "joined", func() bool {
		return e.endpoints.State(link("web", "a")) == upstream.Joined && e.endpoints.State(link("web", "c")) == upstream.Open
	})
	for range 20 {
		for _, method := range []string{"GET", "POST", "FOO"} {
			a := e.do(method, e.url("web.example", "/"), "")
			require.Equal(t, 200, a.StatusCode, method)
			require.Equal(t, "c", a.Header.Get("X-Placement"))
		}
	}
	require.Equal(t, before, e.reloads(), "no reload was needed")
}

// RTE-10: nothing serves and nothing was sent: our page, for every method.
func TestIngress_NothingServes(t *testing.T) {
	e := newEnv(t)
	e.source.Publish(event("web", "a", 1, false))
	grpc := route("grpc", "grpc.example", "web")
	grpc.Protocol, grpc.TLS = placement.ProtocolGRPC, &upstream.RouteTLS{Cert: "site"}
	e.source.SetRoutes(t, route("web", "web.example", "web"), route("none", "none.example", "none"), grpc)
	cert, key := e.ca.Pair(t, "grpc.example")
	e.source.SetBucket("opfield_certs", map[string][]byte{"site": append(cert, key...)})
	e.start()
	e.settled()
	for _, host := range []string{"web.example", "none.example"} {
		for _, method := range []string{"GET", "POST", "FOO", "DELETE"} {
			a := e.do(method, e.url(host, "/"), "x")
			require.Equal(t, 503, a.StatusCode, method)
			require.Equal(t, "5", a.Header.Get("Retry-After"))
			require.Contains(t, a.body, "No instance serves")
		}
	}
	e.within(5*time.Second, "gRPC status 14", func() bool {
		a, err := e.try(http.MethodPost, e.tlsURL("grpc.example", "/s/M"), "", "Content-Type", "application/grpc")
		return err == nil && a.StatusCode == 200 && a.Header.Get("grpc-status") == "14" && a.ProtoMajor == 2
	})
	require.Equal(t, "offline", string(e.routeStatus("web").Health))
}

func TestIngress_TCP(t *testing.T) { // RTE-1, RTE-5
	e := newEnv(t)
	port := ingresstest.FreePort(t)
	p := ingresstest.NewTCPPlacement(t, e.ca, "db", "a")
	e.endpoints.Lead(link("db", "a"), p)
	e.source.Publish(event("db", "b", 1, false))
	e.source.Publish(event("db", "a", 1, true))
	e.source.SetRoutes(t, upstream.Route{Name: "db", Protocol: placement.ProtocolTCP, Listen: port, Workload: "db", Port: 80})
	e.start()
	e.settled()
	c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	require.NoError(t, err)
	defer c.Close()
	_, err = fmt.Fprint(c, "ping\n")
	require.NoError(t, err)
	require.NoError(t, c.(*net.TCPConn).CloseWrite())
	require.NoError(t, c.SetReadDeadline(time.Now().Add(5*time.Second)))
	s := bufio.NewScanner(c)
	var lines []string
	for s.Scan() {
		lines = append(lines, s.Text())
	}
	require.Equal(t, []string{"a", "ping"}, lines, "half-close keeps the answer")
}

// RTE-6: repeatable requests share kept connections; those that must not be
// repeated take a fresh one if the route says so, and resume the TLS session.
func TestIngress_Connections(t *testing.T) {
	e := newEnv(t, func(c *ingress.Config) { c.Render.Workers = 1 })
	p := e.place("web", true, "a")[0]
	r := route("web", "web.example", "web")
	r.Settings.FreshConnections = true
	e.source.SetRoutes(t, r)
	e.start()
	e.settled()
	conns := func(method string) (n, resumed int) {
		seen := map[string]bool{}
		for _, d := range p.Deliveries() {
			if d.Method == method && !seen[d.Conn] {
				seen[d.Conn] = true
				n++
				if d.Resumed {
					resumed++
				}
			}
		}
		return n, resumed
	}
	for range 20 {
		for _, method := range []string{"GET", "POST"} {
			require.Equal(t, 200, e.do(method, e.url("web.example", "/"), "").StatusCode)
		}
	}
	n, _ := conns("GET")
	require.Equal(t, 1, n)
	n, resumed := conns("POST")
	require.Equal(t, 20, n)
	require.GreaterOrEqual(t, resumed, 18)
}
