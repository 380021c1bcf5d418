package ingress_test

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/ingress"
	"github.com/opfield/availability/ingress/ingresstest"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// RTE-7: nginx -t passes, the reload is refused: the port is taken. Only that
// route is left out, it says why, and the others go on, also after a restart.
func TestIngress_TakenPortLeavesOutOneRoute(t *testing.T) {
	e := newEnv(t)
	e.place("web", true, "a")
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	port := uint16(taken.Addr().(*net.TCPAddr).Port)
	tcp := upstream.Route{Name: "tcp", Protocol: placement.ProtocolTCP, Listen: port, Workload: "web", Port: 80}
	began := time.Now()
	e.source.SetRoutes(t, route("web", "web.example", "web"), tcp, route("new", "new.example", "web"))
	e.within(6*time.Second, "reported", func() bool { return strings.Contains(e.routeStatus("tcp").Error, "Address already in use") })
	t.Logf("reported after %s", time.Since(began))
	require.Equal(t, ingress.HealthRefused, e.routeStatus("tcp").Health)
	e.within(5*time.Second, "the other new route serves", func() bool {
		return e.do(http.MethodGet, e.url("new.example", "/"), "").StatusCode == 200
	})
	require.Equal(t, 200, e.do(http.MethodGet, e.url("web.example", "/"), "").StatusCode)

	// A fresh nginx is not kept down by it either.
	e.stop()
	e.killNginx()
	e.start()
	e.within(15*time.Second, "serves again", func() bool {
		a, err := e.try(http.MethodGet, e.url("web.example", "/"), "")
		return err == nil && a.StatusCode == 200
	})
	e.within(5*time.Second, "still named", func() bool { return e.routeStatus("tcp").Error != "" })
}

func (e *env) masterPID() int {
	text, err := os.ReadFile(filepath.Join(e.dir, "run", "nginx.pid"))
	require.NoError(e.t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	require.NoError(e.t, err)
	return pid
}

// killNginx kills the master and its workers like the kernel would.
func (e *env) killNginx() {
	pid := e.masterPID()
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	require.NoError(e.t, err)
	require.NoError(e.t, syscall.Kill(pid, syscall.SIGKILL))
	for _, c := range strings.Fields(string(children)) {
		if n, err := strconv.Atoi(c); err == nil {
			_ = syscall.Kill(n, syscall.SIGKILL)
		}
	}
}

func TestIngress_StartsNginxAgain(t *testing.T) {
	e := newEnv(t)
	e.place("web", true, "a")
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	e.killNginx()
	e.within(5*time.Second, "serves again", func() bool {
		a, err := e.try(http.MethodGet, e.url("web.example", "/"), "")
		return err == nil && a.StatusCode == 200
	})
}

// RTE-7, RTE-9: a file of the user that nginx -t accepts and the reload
// refuses (a zone whose key changed) is named within 5 s; the old
// configuration serves, routes still change, and the next good file applies.
func TestIngress_UserFileRefusedByReload(t *testing.T) {
	own := t.TempDir()
	e := newEnv(t, func(c *ingress.Config) { c.UserHTTP = own })
	zone := func(key string, burst int) string {
		return fmt.Sprintf("limit_req_zone %s zone=mine:1m rate=1000r/s;\n# %d\n", key, burst)
	}
	file := filepath.Join(own, "limits.conf")
	require.NoError(t, os.WriteFile(file, []byte(zone("$binary_remote_addr", 1)), 0o644))
	e.place("web", true, "a")
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	require.Empty(t, e.ingress.Status().Reload.Error)

	began := time.Now()
	require.NoError(t, os.WriteFile(file, []byte(zone("$server_name", 1)), 0o644))
	e.within(5*time.Second, "reported", func() bool { return strings.Contains(e.ingress.Status().Reload.Error, `uses the "$server_name" key`) })
	t.Logf("reported after %s", time.Since(began))
	require.Equal(t, 200, e.do(http.MethodGet, e.url("web.example", "/"), "").StatusCode)
	e.source.SetRoutes(t, route("web", "web.example", "web"), route("new", "new.example", "web"))
	e.within(5*time.Second, "routes still change", func() bool {
		return e.do(http.MethodGet, e.url("new.example", "/"), "").StatusCode == 200
	})
	require.Contains(t, e.ingress.Status().Reload.Error, "$server_name")

	// Half-written: nginx -t refuses it.
	require.NoError(t, os.WriteFile(file, []byte("limit_req_zone $bin"), 0o644))
	e.within(5*time.Second, "named", func() bool { return strings.Contains(e.ingress.Status().Reload.Error, "limits.conf") })

	began = time.Now()
	require.NoError(t, os.WriteFile(file, []byte(zone("$binary_remote_addr", 2)), 0o644))
	e.within(3*time.Second, "the good file applies", func() bool { return e.ingress.Status().Reload.Error == "" && !e.ingress.Status().Reload.Pending })
	t.Logf("good file applied after %s", time.Since(began))
}

// RTE-9, RTE-13: a renewed pair is served without a reload, a broken one
// never; in place, by rename and by symlink swap.
func TestIngress_CertificateFiles(t *testing.T) {
	dir := t.TempDir()
	write := func(folder string, cert, key []byte) {
		require.NoError(t, os.MkdirAll(folder, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(folder, "site.crt"), cert, 0o644))
		require.NoError(t, os.WriteFile(filepath.Join(folder, "site.key"), key, 0o600))
	}
	e := newEnv(t)
	cert, key := e.ca.Pair(t, "web.example")
	write(filepath.Join(dir, "v1"), cert, key)
	live := filepath.Join(dir, "live")
	require.NoError(t, os.Symlink("v1", live))
	e.place("web", true, "a")
	r := route("web", "web.example", "web")
	r.TLS = &upstream.RouteTLS{CertFile: live + "/site.crt", KeyFile: live + "/site.key", Redirect: true}
	e.source.SetRoutes(t, r)
	e.start()
	e.settled()
	serial := func() string {
		c, err := tls.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", e.config.Render.HTTPSPort), &tls.Config{ServerName: "web.example", RootCAs: e.ca.Pool})
		if err != nil {
			return err.Error()
		}
		defer c.Close()
		return c.ConnectionState().PeerCertificates[0].SerialNumber.String()
	}
	first := serial()
	require.Equal(t, 200, e.do(http.MethodGet, e.tlsURL("web.example", "/"), "").StatusCode)
	a := e.do(http.MethodPost, e.url("web.example", "/p?q=1"), "")
	require.Equal(t, 308, a.StatusCode)
	require.Equal(t, e.tlsURL("web.example", "/p?q=1"), a.Header.Get("Location"))
	_, err := tls.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", e.config.Render.HTTPSPort), &tls.Config{ServerName: "other.example", RootCAs: e.ca.Pool})
	require.Error(t, err)
	reloads := e.reloads()

	changed := func(what string, from string) string {
		e.within(time.Second, what, func() bool { s := serial(); return s != from && !strings.Contains(s, " ") })
		return serial()
	}
	cert2, key2 := e.ca.Pair(t, "web.example")
	write(filepath.Join(dir, "v1"), cert2, key2)
	second := changed("in place", first)

	cert3, key3 := e.ca.Pair(t, "web.example")
	write(filepath.Join(dir, "v2"), cert3, key3)
	require.NoError(t, os.Symlink("v2", live+".new"))
	require.NoError(t, os.Rename(live+".new", live))
	third := changed("symlink swap", second)

	require.NoError(t, os.WriteFile(filepath.Join(dir, "v2", "site.crt"), cert2, 0o644)) // does not fit the key
	e.within(2*time.Second, "named", func() bool { return strings.Contains(e.routeStatus("web").Error, "do not fit") })
	require.Equal(t, third, serial())

	tmp := filepath.Join(dir, "v2", ".tmp")
	require.NoError(t, os.WriteFile(tmp, key2, 0o600))
	require.NoError(t, os.Rename(tmp, filepath.Join(dir, "v2", "site.key")))
	changed("rename", third)
	e.within(time.Second, "no error left", func() bool { return e.routeStatus("web").Error == "" })
	require.Equal(t, reloads, e.reloads())
}

// LNK-8, RTE-8: with the control plane away the sidecar starts from its last
// state, keeps every address, and reloads nothing.
func TestIngress_RestartsWithoutControlPlane(t *testing.T) {
	e := newEnv(t)
	e.place("web", true, "a", "b")
	e.place("web", false, "c")
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	addr := e.endpoints.Address(link("web", "a"))
	e.source.Publish(event("web", "a", 2, false))
	e.within(time.Second, "joined", func() bool { return e.endpoints.State(link("web", "a")) == upstream.Joined })
	generation := e.ingress.Status().Reload.Generation
	e.stop()
	reloads := e.reloads()
	e.source.Down()
	e.start()
	e.within(2*time.Second, "known again", func() bool { return e.endpoints.State(link("web", "b")) == upstream.Open })
	require.Equal(t, addr, e.endpoints.Address(link("web", "a")))
	require.Equal(t, upstream.Joined, e.endpoints.State(link("web", "a")), "what nginx lists is remembered")
	require.Equal(t, 200, e.do(http.MethodGet, e.url("web.example", "/"), "").StatusCode)
	e.unchanged(generation, reloads)

	// Nothing changed at all.
	e.stop()
	e.start()
	e.unchanged(generation, reloads)
}

// RTE-7: another process that got the pid is never signalled.
func TestIngress_NeverSignalsAnotherProcess(t *testing.T) {
	e := newEnv(t)
	e.place("web", true, "a")
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	pid := e.masterPID()
	file := filepath.Join(e.dir, "run", "nginx.pid")
	require.NoError(t, os.WriteFile(file, []byte(strconv.Itoa(os.Getpid())), 0o644))
	e.source.SetRoutes(t, route("web", "web.example", "web"), route("new", "new.example", "web"))
	// This process would have died of SIGHUP. The sidecar finds no nginx of its
	// own and the ports taken, and says so.
	e.within(20*time.Second, "reported", func() bool { return e.ingress.Status().Reload.Result == "failed" })
	require.NoError(t, os.WriteFile(file, []byte(strconv.Itoa(pid)), 0o644))
	e.within(20*time.Second, "applied later", func() bool {
		a, err := e.try(http.MethodGet, e.url("new.example", "/"), "")
		return err == nil && a.StatusCode == 200
	})
}

// RTE-9: a template of the user is used; a broken one is named and the last
// good one stays.
func TestIngress_Templates(t *testing.T) {
	dir := t.TempDir()
	e := newEnv(t, func(c *ingress.Config) { c.TemplateDir = dir })
	e.place("web", true, "a")
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	text, err := os.ReadFile("../templates/http.conf.tmpl")
	require.NoError(t, err)
	file := filepath.Join(dir, "http.conf.tmpl")
	require.NoError(t, os.WriteFile(file, []byte(strings.Replace(string(text), "no route for this host\\n", "mine\\n", 1)), 0o644))
	e.within(3*time.Second, "applied", func() bool {
		return e.do(http.MethodGet, e.url("x.example", "/"), "").body == "mine\n"
	})
	require.NoError(t, os.WriteFile(file, []byte("{{broken"), 0o644))
	e.within(3*time.Second, "named", func() bool {
		return strings.Contains(e.ingress.Status().Reload.Error, "http.conf.tmpl") || strings.Contains(e.ingress.Status().Reload.Error, "parse template")
	})
	require.Equal(t, "mine\n", e.do(http.MethodGet, e.url("x.example", "/"), "").body)
}

// RTE-8: what only opens and closes known members waits for 30 s of quiet; a
// route and a new placement begin at once.
func TestIngress_KnownMembersDoNotReload(t *testing.T) {
	e := newEnv(t)
	e.place("web", true, "a", "b")
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	before := e.reloads()
	for i := range 21 {
		e.source.Publish(event("web", "a", uint64(2+i), i%2 == 1))
	}
	e.within(time.Second, "seen", func() bool { return e.ingress.Status().Reload.Pending })
	began := time.Now()
	e.place("web", true, "c")
	e.within(2*time.Second, "a new placement is listed", func() bool { return e.reloads() == before+1 })
	t.Logf("reload began after %s", time.Since(began))
	e.settled()
	require.Equal(t, before+1, e.reloads())
}

// RTE-8: what a planned move adds waits; what comes after it takes it along.
func TestIngress_PlannedMoveWaits(t *testing.T) {
	e := newEnv(t)
	members := func(moving bool, nodes ...string) {
		m := placement.Members{Workload: "web", Moving: moving}
		for _, n := range nodes {
			m.Placements = append(m.Placements, placement.Member{Node: n})
		}
		text, err := json.Marshal(m)
		require.NoError(t, err)
		e.source.SetBucket(ingress.BucketMembers, map[string][]byte{"web": text})
	}
	members(false, "a", "b")
	e.place("web", true, "a", "b")
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	before := e.reloads()
	members(true, "a", "b", "c")
	e.place("web", true, "c")
	e.within(time.Second, "the new placement is open", func() bool { return e.endpoints.State(link("web", "c")) == upstream.Open })
	require.Never(t, func() bool { return e.reloads() != before }, 3*time.Second, 50*time.Millisecond, "nginx was reloaded")
	require.True(t, e.ingress.Status().Reload.Pending)

	// Its end alone adds nothing; a placement outside a move applies at once.
	members(false, "a", "b", "c", "d")
	e.place("web", true, "d")
	e.within(2*time.Second, "a new placement is listed", func() bool { return e.reloads() == before+1 })
	e.settled()
	require.Equal(t, before+1, e.reloads())
}

// RTE-8, RTE-11: 2,000 workloads (500 under the race detector) of three placements; 500 changes in two
// seconds are at most three reloads.
func TestIngress_Large(t *testing.T) {
	e := newEnv(t, func(c *ingress.Config) { c.Apply.ProveWithin = 20 * time.Second })
	p := ingresstest.NewPlacement(t, e.ca, "w7", "n0")
	e.endpoints.Lead(link("w7", "n0"), p)
	var routes []upstream.Route
	for w := range manyWorkloads {
		name := fmt.Sprintf("w%d", w)
		for n := range 3 {
			e.source.Publish(event(name, fmt.Sprintf("n%d", n), 1, n == 0 || w != 7))
		}
		routes = append(routes, route(name, name+".example", name))
	}
	e.source.SetRoutes(t, routes...)
	e.start()
	e.within(60*time.Second, "first apply", func() bool {
		a, err := e.try(http.MethodGet, e.url("w7.example", "/"), "")
		return err == nil && a.StatusCode == 200
	})
	e.settled()
	before := e.reloads()
	began := time.Now()
	e.source.SetRoutes(t, append(routes, route("extra", "extra.example", "w7"))...)
	e.within(30*time.Second, "full apply", func() bool {
		a, err := e.try(http.MethodGet, e.url("extra.example", "/"), "")
		return err == nil && a.StatusCode == 200
	})
	took := time.Since(began)
	t.Logf("full apply of %d workloads x 3, from change to served: %s", manyWorkloads, took)
	require.Less(t, took, 5*raceFactor*time.Second)
	e.settled()
	require.Equal(t, before+1, e.reloads())

	tick := time.NewTicker(4 * time.Millisecond)
	defer tick.Stop()
	for i := range 500 {
		<-tick.C
		e.source.Publish(event(fmt.Sprintf("w%d", i%manyWorkloads), fmt.Sprintf("x%d", i), 1, true))
	}
	e.within(60*time.Second, "settled", func() bool {
		s := e.ingress.Status()
		return !s.Reload.Pending && e.routeStatus("w499").Known == 4
	})
	n := e.reloads() - before - 1
	t.Logf("500 changes in 2 s: %d reloads", n)
	require.LessOrEqual(t, n, 3)
}

// A renewed identity is shown to the nodes without a stop.
func TestIngress_RenewedIdentity(t *testing.T) { // SEC-1
	e := newEnv(t)
	e.place("web", true, "a")
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	before := e.reloads()
	e.ca.WriteIdentity(t, filepath.Join(e.dir, "id"))
	e.within(5*time.Second, "reloaded", func() bool { return e.reloads() == before+1 })
	require.Equal(t, 200, e.do(http.MethodGet, e.url("web.example", "/"), "").StatusCode)
}
