package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/api"
	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
)

const (
	soon = 15 * time.Second
	poll = 20 * time.Millisecond
)

// controller is a running `opfield serve`.
type controller struct {
	t      *testing.T
	dir    string
	listen string
	nats   string
	stat   string
	stop   func()
}

func freeAddr(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	return ln.Addr().String()
}

// syncBuffer is a log that tests read while the process writes.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func startController(t *testing.T) *controller {
	c := &controller{t: t, dir: t.TempDir(), listen: freeAddr(t), nats: freeAddr(t), stat: freeAddr(t)}
	c.start()
	t.Cleanup(func() { c.stop() })
	return c
}

func (c *controller) start() {
	c.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	log := &syncBuffer{}
	done := make(chan int, 1)
	args := []string{"serve", "--state-dir", c.dir, "--socket", c.socket(), "--listen", c.listen, "--nats-listen", c.nats, "--metrics", c.stat, "--name", "127.0.0.1"}
	go func() { done <- run(ctx, args, io.Discard, log) }()
	c.stop = sync.OnceFunc(func() {
		cancel()
		code := <-done
		if code != 0 || c.t.Failed() {
			c.t.Errorf("serve ended with %d:\n%s", code, log)
		}
	})
	require.Eventually(c.t, func() bool {
		resp, err := http.Get("http://" + c.stat + "/readyz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	}, soon, poll)
}

func (c *controller) socket() string { return filepath.Join(c.dir, "api.sock") }

// cli runs a command and returns its exit code and output.
func (c *controller) cli(args ...string) (code int, stdout, stderr string) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	var out, talk bytes.Buffer
	code = run(ctx, append([]string{"--socket", c.socket()}, args...), &out, &talk)
	return code, out.String(), talk.String()
}

// must runs a command that succeeds and returns its output.
func (c *controller) must(args ...string) string {
	c.t.Helper()
	code, out, talk := c.cli(args...)
	require.Zero(c.t, code, talk)
	return out
}

func (c *controller) join(role identity.Role, id string, more ...string) *identity.Identity {
	c.t.Helper()
	text := c.must(append([]string{"token", "create", "--role", string(role)}, more...)...)
	i, err := identity.Join(c.t.Context(), identity.JoinRequest{
		Token: text, Controller: c.listen, Name: identity.Name{Role: role, ID: id}, Advertise: "10.0.0.1:9443", Dir: c.t.TempDir(),
	})
	require.NoError(c.t, err)
	return i
}

func (c *controller) connect(i *identity.Identity) *bus.Conn {
	c.t.Helper()
	conn, err := bus.Connect(bus.Config{Identity: i, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(c.t, err)
	c.t.Cleanup(conn.Close)
	require.Eventually(c.t, conn.Connected, soon, poll)
	return conn
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestController_EndToEnd(t *testing.T) { // SEC-1, API-3, DSC-2
	c := startController(t)
	relay := c.join(identity.RoleRelay, "r1")
	node := c.join(identity.RoleNode, "node-1", "--workloads", "shop,team-*", "--ttl", "5m")
	require.Equal(t, "shop,team-*", node.Grant().String())
	require.Equal(t, []identity.RelayAddress{{ID: "r1", Addr: "10.0.0.1:9443"}}, node.Bootstrap().Relays)

	conn := c.connect(node)
	w, err := node.Workloads(conn)
	require.NoError(t, err)
	require.NoError(t, w.Ensure(t.Context(), "team-a"))
	require.ErrorIs(t, w.Ensure(t.Context(), "bank"), identity.ErrRefused)
	id := placement.ID{Workload: "shop", Node: "node-1"}
	require.NoError(t, conn.PublishPlacement(t.Context(), placement.Event{
		Workload: "shop", Placement: id.String(), Node: "node-1", Kind: placement.KindContainer, Role: placement.RoleServing,
		Ready: true, State: placement.StateRunning, Ports: []placement.Port{{Port: 80, Protocol: placement.ProtocolHTTP}},
	}))

	c.must("route", "add", "shop", "--host", "Shop.Example.", "--workload", "shop", "--port", "80")
	c.must("route", "add", "-f", write(t, "routes:\n- {name: raw, protocol: tcp, workload: shop, port: 80, listen: 5432}\n"))
	list := c.must("route", "list")
	require.Contains(t, list, "shop.example /")
	require.Contains(t, list, ":5432")
	require.Eventually(t, func() bool { return strings.Contains(c.must("status"), "node-1=serving") }, soon, poll)
	require.Contains(t, c.must("events", "--json"), placement.EventType)
	require.Contains(t, c.must("events"), "placement shop.node-1")
	require.Contains(t, c.must("nodes", "list"), "node-1")
	stock, stopStock := context.WithCancel(t.Context())
	go func() { // DSC-3
		_ = conn.PublishInventory(stock, func() (bus.Inventory, bool) {
			return bus.Inventory{Workloads: []bus.InventoryEntry{
				{Name: "cache", Kind: placement.KindContainer, Containers: []bus.InventoryContainer{{Name: "cache", Image: "redis:7", State: "running", Ports: []bus.InventoryPort{{Port: 6379, Transport: "tcp", Published: netip.MustParseAddrPort("[::]:6379")}}}}},
				{Name: "proj", Kind: placement.KindCompose, Containers: []bus.InventoryContainer{{Name: "proj-web-1", Service: "web", Image: "web:1", State: "exited", Workload: "shop"}}},
			}}, true
		})
	}()
	require.Eventually(t, func() bool { return strings.Contains(c.must("workloads"), "cache") }, soon, poll)
	stopStock()
	text := c.must("workloads")
	require.Regexp(t, `(?m)^node-1 +cache +container +redis:7 +running +- +\[::\]:6379->6379/tcp +-$`, text)
	require.Regexp(t, `(?m)^node-1 +proj +compose +- +0/1 running +- +- +shop$`, text)
	require.Regexp(t, `(?m)^node-1 +web \(proj-web-1\) +service +web:1 +exited +- +- +shop$`, text)
	var workloads api.WorkloadList
	require.NoError(t, json.Unmarshal([]byte(c.must("workloads", "--json")), &workloads))
	require.Len(t, workloads.Workloads, 2)
	require.Contains(t, c.must("token", "list"), "node/node-1")
	require.Contains(t, c.must("nats", "config"), "opfield.placement.v1.*.node-1")

	code, _, talk := c.cli("route", "add", "x", "--host", "bad host", "--workload", "UP", "--port", "80")
	require.Equal(t, exitFailed, code)
	require.Contains(t, talk, "hosts[0]: ")
	require.Contains(t, talk, "workload: ")
	code, _, talk = c.cli("cert", "add", "example.com", "--cert", node.CertFile(), "--key", relay.KeyFile())
	require.Equal(t, exitFailed, code)
	require.Contains(t, talk, "CERT_KEY_MISMATCH")
	c.must("cert", "add", "example.com", "--cert", node.CertFile(), "--key", node.KeyFile())
	require.Contains(t, c.must("cert", "list"), "example.com")

	c.plainClient()

	// After a restart everything is as it was, and the node is back by itself.
	c.stop()
	c.start()
	require.Eventually(t, conn.Connected, soon, poll)
	require.Contains(t, c.must("route", "list"), "shop.example /")
	require.Contains(t, c.must("events", "--json"), placement.EventType)

	relayConn := c.connect(relay)
	c.must("identity", "revoke", "node/node-1")
	require.Eventually(t, func() bool { return !conn.Connected() }, soon, poll)
	revoked, err := relayConn.ReadBucket(t.Context(), bus.BucketRevoked)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		revoked, err = relayConn.ReadBucket(t.Context(), bus.BucketRevoked)
		return err == nil && len(revoked) == 1
	}, soon, poll)
	require.Contains(t, c.must("identity", "list"), "revoked")

	var rep api.Report
	require.NoError(t, json.Unmarshal([]byte(c.must("status", "--json")), &rep))
	require.Empty(t, rep.Nodes)
	require.Len(t, rep.Routes, 2)
	resp, err := http.Get("http://" + c.stat + "/metrics")
	require.NoError(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Contains(t, string(b), "opfield_nats_connected 1")
	require.Contains(t, string(b), `opfield_nodes{state="online"} 0`)

	require.Contains(t, string(b), `opfield_audit_dropped_total{reason="full"} 0`)
	audit := c.must("audit", "list") // OBS-2
	require.Contains(t, audit, "decides about policies from now on")
	require.Regexp(t, `accepted .* POST /v1/identities/revoke \(`, audit)
}

func TestServe_WithoutItsNATS(t *testing.T) { // LNK-8, API-3
	c := &controller{t: t, dir: t.TempDir(), listen: freeAddr(t), stat: freeAddr(t)}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan int, 1)
	log := &syncBuffer{}
	args := []string{"serve", "--state-dir", c.dir, "--socket", c.socket(), "--listen", c.listen, "--metrics", c.stat, "--name", "127.0.0.1", "--nats-url", "tls://" + freeAddr(t)}
	go func() { done <- run(ctx, args, io.Discard, log) }()
	require.Eventually(t, func() bool { code, _, _ := c.cli("identity", "list"); return code == 0 }, soon, poll)
	config := c.must("nats", "config") // what the cluster needs before it can be reached
	require.Contains(t, config, "main.controller.opfield.internal")
	require.Contains(t, config, "store.controller.opfield.internal")
	c.must("token", "create", "--role", "node")
	require.Contains(t, c.must("status"), "not connected")
	code, _, talk := c.cli("route", "add", "r", "--host", "a.example", "--workload", "w", "--port", "80")
	require.Equal(t, exitFailed, code)
	require.Contains(t, talk, "NATS cannot be reached")
	resp, err := http.Get("http://" + c.stat + "/readyz")
	require.NoError(t, err)
	resp.Body.Close()
	require.Equal(t, http.StatusServiceUnavailable, resp.StatusCode)
	cancel()
	require.Zero(t, <-done, log.String())
}

// plainClient does what docs/events.md says about the plain NATS client.
func (c *controller) plainClient() { // EVT-5
	c.t.Helper()
	file := write(c.t, c.must("token", "create", "--role", "subscriber", "--id", "my-reader"))
	dir := c.t.TempDir()
	c.must("join", "--id", "my-reader", "--controller", c.listen, "--identity-dir", dir, "--token-file", file)
	nc, err := nats.Connect("tls://"+c.nats, nats.RootCAs(dir+"/ca.crt"), nats.ClientCert(dir+"/identity.crt", dir+"/identity.key"),
		nats.CustomInboxPrefix("_INBOX.subscriber.my-reader"))
	require.NoError(c.t, err)
	defer nc.Close()
	_, err = nc.SubscribeSync("opfield.placement.v1.>")
	require.NoError(c.t, err)
	m, err := nc.Request("opfield.read.OPFIELD_PLACEMENTS", []byte(`{"seq":1,"next_by_subj":"opfield.placement.v1.>","batch":1000}`), soon)
	require.NoError(c.t, err)
	require.Equal(c.t, "opfield.placement.v1.shop.node-1", m.Header.Get("Nats-Subject"))
	_, err = placement.UnmarshalEvent(m.Data)
	require.NoError(c.t, err)
	require.NoError(c.t, nc.LastError())
}

func TestRun_ExitCodes(t *testing.T) { // API-3
	c := &controller{t: t, dir: t.TempDir()}
	for _, tc := range []struct {
		want int
		says string
		args []string
	}{
		{0, "", []string{"version"}},
		{0, "", []string{"--help"}},
		{exitUsage, "--role", []string{"token", "create"}},
		{exitUsage, "see opfield token create --help", []string{"token", "create"}},
		{exitUsage, `one of "replicated","failover"`, []string{"ha", "update", "web", "--mode", "both"}},
		{exitUsage, "into fields; want", []string{"ha", "enable", "-f", write(t, "hello")}},
		{exitUsage, "into fields; want", []string{"route", "apply", "-f", write(t, "- a")}},
		{exitUsage, "--controller", []string{"join", "--id", "x", "--token", "t", "--controller", "ctrl.example"}},
		{exitUsage, "--controller", []string{"join", "--id", "x", "--token", "t", "--controller", "http://ctrl.example:8480"}},
		{exitUsage, "unexpected", []string{"nonsense"}},
		{exitUsage, "identity name", []string{"identity", "revoke", "x"}},
		{exitUsage, "name", []string{"route", "add"}},
		{exitUsage, "routes", []string{"route", "apply", "-f", write(t, "")}},
		{exitUsage, `there is no field "nmae" here`, []string{"route", "apply", "-f", write(t, "routes: [{nmae: x}]")}},
		{exitFailed, "opfield serve", []string{"status"}},
		{exitUsage, "loopback", []string{"serve", "--metrics", ":9100"}},
		{exitUsage, "unknown key nope", []string{"serve", "--check-config", "--config", write(t, "nope: 1\nlog-level: debug\n")}},
		{exitUsage, "log-level", []string{"serve", "--check-config", "--config", write(t, "log-level: loud\n")}},
		{0, "good", []string{"serve", "--check-config", "--config", write(t, "log-level: debug\nname: [a.example, 10.0.0.1]\n")}},
	} {
		code, _, talk := c.cli(tc.args...)
		require.Equal(t, tc.want, code, "%v: %s", tc.args, talk)
		require.Contains(t, talk, tc.says, tc.args)
	}
}

// What is set for the controller is not what a route listens on.
func TestRun_EnvironmentIsForServe(t *testing.T) {
	c := startController(t)
	t.Setenv("OPFIELD_LISTEN", "8480")
	t.Setenv("OPFIELD_PROTOCOL", "tcp")
	t.Setenv("OPFIELD_JSON", "true")
	c.must("route", "add", "a", "--host", "a.example", "--workload", "w", "--port", "80")
	require.Contains(t, c.must("route", "list"), `"protocol": "http"`)
}

func TestPrintable(t *testing.T) { // SEC-3
	require.Equal(t, "a [31m b", printable("a\x1b[31m\nb"))
	require.Equal(t, "-", printable(""))
}
