// Package bench_test measures the whole path beside nginx → application and
// nginx → HAProxy → HAProxy → application, on the same hosts in one run.
package bench_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/lab"
	"github.com/opfield/availability/e2e/load"
	"github.com/opfield/availability/e2e/system"
)

const (
	directPort  = 8090
	haproxyPort = 8091
	hopPort     = 7000
	connections = 32
)

// way is one way to the application.
type way struct {
	name string
	port uint16
	host string
}

// figure is what one or several measurements of a way gave.
type figure struct {
	ratios    []float64 // throughput to direct's, one for each round
	perSecond float64   // of the best round, like the latencies
	p50, p99  time.Duration
	requests  float64                  // of all rounds
	cpu       map[string]time.Duration // of all rounds, by program
}

// TestBench prints throughput, latency and CPU time of every way. With
// OPFIELD_BENCH set it measures long enough to be quoted; a duration in it is
// that of each measurement.
func TestBench(t *testing.T) {
	duration, rounds := time.Second, 1
	if os.Getenv("OPFIELD_BENCH") != "" {
		duration, rounds = 5*time.Second, 3
		if d, err := time.ParseDuration(os.Getenv("OPFIELD_BENCH")); err == nil {
			duration = d
		}
	}
	env := lab.New(t)
	s := system.Start(t, env, system.Config{Relays: 1, Nodes: 1})
	node := s.Nodes[0]
	node.RunApp(lab.App{Workload: "web", Configure: func(c *container.Config, h *container.HostConfig) {
		h.NetworkMode = "host" // every way ends at the same socket
		c.Hostname = ""
		c.Cmd = []string{"serve", "--name", "web"} // and records nothing
	}})
	s.MustCLI("route", "add", "web", "--host", "web.example", "--workload", "web", "--port", "8080")
	startRivals(env, s)
	s.AwaitRoute(20*time.Second, "web.example")
	ways := []way{{"direct", directPort, "any"}, {"haproxy", haproxyPort, "any"}, {"opfield", system.HTTPPort, "web.example"}}
	for _, w := range ways {
		env.Await(10*time.Second, w.name+" answers", func() bool {
			status, _ := system.GetHost(s.Client(), s.Ingress.HostPort(w.port), w.host, "/ok")
			return status == 200
		})
	}
	for _, c := range []struct {
		name, path string
		least      float64 // far below the goal: a smoke test on a busy machine
	}{
		{"small, kept alive", "/ok", 0.10}, {"small, fresh connections", "/ok?close=1", 0.02}, {"1 MiB", "/bytes?n=1048576", 0.10},
	} {
		t.Run(c.name, func(t *testing.T) {
			full, resumed := handshakes(t, s)
			figures := saturate(t, s, ways, c.path, duration, rounds)
			fullNow, resumedNow := handshakes(t, s)
			print(t, ways, figures)
			t.Logf("  TLS handshakes: %.0f full, %.0f resumed", fullNow-full, resumedNow-resumed)
			require.Greater(t, median(figures["opfield"].ratios), c.least)
		})
	}
	t.Run("steady", func(t *testing.T) { steady(t, s, ways, duration*time.Duration(rounds)) })
}

// saturate measures every way with all connections busy, turn by turn, so that
// a slow minute hurts all alike.
func saturate(t *testing.T, s *system.System, ways []way, path string, duration time.Duration, rounds int) map[string]*figure {
	t.Helper()
	all := map[string]*figure{}
	for range rounds {
		var direct float64
		for _, w := range ways {
			f := measure(t, s, w, path, duration)
			if w.name == "direct" {
				direct = f.perSecond
			}
			f.ratios = []float64{f.perSecond / direct}
			if old := all[w.name]; old != nil {
				f.join(old)
			}
			all[w.name] = f
		}
	}
	return all
}

func (f *figure) join(old *figure) {
	f.ratios = append(f.ratios, old.ratios...)
	f.requests += old.requests
	for name, d := range old.cpu {
		f.cpu[name] += d
	}
	if old.perSecond > f.perSecond {
		f.perSecond, f.p50, f.p99 = old.perSecond, old.p50, old.p99
	}
}

// perRequest returns the CPU time of all programs for one request.
func (f *figure) perRequest() float64 {
	var sum time.Duration
	for _, d := range f.cpu {
		sum += d
	}
	return float64(sum) / f.requests
}

func median(all []float64) float64 {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[len(sorted)/2]
}

// print prints the figures beside each other. The ratio by CPU time is that of
// the work done, so it hardly depends on what else the machine does.
func print(t *testing.T, ways []way, figures map[string]*figure) {
	t.Helper()
	t.Logf("  %-8s %9s %6s %8s %9s %9s   CPU time per request", "", "per s", "ratio", "by CPU", "p50", "p99")
	for _, w := range ways {
		f := figures[w.name]
		t.Logf("  %-8s %9.0f %6.3f %8.3f %9s %9s   %s", w.name, f.perSecond, median(f.ratios),
			figures["direct"].perRequest()/f.perRequest(), f.p50, f.p99, describe(f))
	}
	direct, ours := figures["direct"], figures["opfield"]
	t.Logf("  added p99: %.2f x direct's", float64(ours.p99-direct.p99)/float64(direct.p99))
}

// steadyRate is far below what any way can do.
const steadyRate = 200

// steady measures latency at a moderate fixed rate on kept-alive connections.
func steady(t *testing.T, s *system.System, ways []way, duration time.Duration) {
	t.Helper()
	runs := map[string]*load.Run{}
	for _, w := range ways { // all at once: each sees the same machine
		runs[w.name] = load.Start(load.Config{
			Dial: s.Client().DialContext, Address: s.Ingress.HostPort(w.port), Host: w.host, Duration: duration,
			Streams: []load.Stream{{Name: w.name, Method: "GET", Path: "/ok", Rate: steadyRate}},
		})
	}
	t.Logf("  %d requests per second on each way", steadyRate)
	var direct [2]time.Duration
	for _, w := range ways {
		var latencies []time.Duration
		for _, r := range runs[w.name].Wait().Results {
			require.True(t, r.OK(), "%+v", r)
			latencies = append(latencies, r.Latency)
		}
		slices.Sort(latencies)
		p50, p99 := latencies[len(latencies)/2], latencies[len(latencies)*99/100]
		if w.name == "direct" {
			direct = [2]time.Duration{p50, p99}
		}
		t.Logf("  %-8s p50 %9s (%+9s)  p99 %9s (%+9s)", w.name, p50.Round(time.Microsecond), (p50 - direct[0]).Round(time.Microsecond),
			p99.Round(time.Microsecond), (p99 - direct[1]).Round(time.Microsecond))
	}
}

// handshakes returns how many TLS handshakes the node has finished.
func handshakes(t *testing.T, s *system.System) (full, resumed float64) {
	t.Helper()
	body, err := system.Get(s.Nodes[0].Host, "http://127.0.0.1:9103/metrics")
	require.NoError(t, err)
	get := func(label string) float64 {
		m := regexp.MustCompile(`opfield_node_handshakes_total\{kind="` + label + `"\} (\S+)`).FindSubmatch(body)
		if m == nil {
			return 0
		}
		n, err := strconv.ParseFloat(string(m[1]), 64)
		require.NoError(t, err)
		return n
	}
	return get("full"), get("resumed")
}

// startRivals starts an nginx that goes to the application directly and
// through two HAProxies in TCP mode.
func startRivals(env *lab.Env, s *system.System) {
	node, relay := s.Nodes[0], s.Relays[0]
	for _, hop := range []struct {
		h      *lab.Host
		target string
	}{{node.Host, node.HostPort(8080)}, {relay.Host, node.HostPort(hopPort)}} {
		config := hop.h.WriteFile("haproxy.cfg", fmt.Sprintf(`global
  maxconn 5000
defaults
  mode tcp
  timeout connect 5s
  timeout client 60s
  timeout server 60s
listen hop
  bind %s
  server next %s
`, hop.h.HostPort(hopPort), hop.target))
		hop.h.Start("haproxy", "haproxy", "-db", "-f", config)
	}
	dir := s.Ingress.Path("rival")
	config := s.Ingress.WriteFile("rival/nginx.conf", fmt.Sprintf(`daemon off;
worker_processes auto;
pid %[1]s/nginx.pid;
error_log %[1]s/error.log;
events { worker_connections 4096; }
http {
  access_log off;
  client_body_temp_path %[1]s/body; proxy_temp_path %[1]s/proxy; fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s;
  keepalive_requests 1000000;
  upstream direct { server %[2]s; keepalive 64; }
  upstream haproxy { server %[3]s; keepalive 64; }
  proxy_http_version 1.1;
  proxy_set_header Connection "";
  server { listen %[4]d reuseport; location / { proxy_pass http://direct; } }
  server { listen %[5]d reuseport; location / { proxy_pass http://haproxy; } }
}
`, dir, node.HostPort(8080), relay.HostPort(hopPort), directPort, haproxyPort))
	s.Ingress.Start("nginx-rival", "nginx", "-c", config, "-p", dir, "-e", filepath.Join(dir, "error.log"))
}

func measure(t *testing.T, s *system.System, w way, path string, duration time.Duration) *figure {
	t.Helper()
	before := cpuTimes()
	out, err := s.Client().Run("wrk", "-t1", "-c", strconv.Itoa(connections), "-d", fmt.Sprintf("%.0fs", duration.Seconds()), "--latency",
		"-H", "Host: "+w.host, "http://"+s.Ingress.HostPort(w.port)+path)
	require.NoError(t, err)
	f := &figure{
		perSecond: number(t, out, `Requests/sec:\s+([\d.]+)`), requests: number(t, out, `(\d+) requests in`),
		p50: latency(t, out, "50%"), p99: latency(t, out, "99%"), cpu: map[string]time.Duration{},
	}
	for name, used := range cpuTimes() {
		if d := used - before[name]; d > 0 {
			f.cpu[name] = d
		}
	}
	for line := range strings.Lines(out) {
		if strings.Contains(line, "Non-2xx") || strings.Contains(line, "Socket errors") && !strings.Contains(path, "close") {
			require.Fail(t, "requests failed", "%s %s: %s", w.name, path, line)
		}
	}
	return f
}

func number(t *testing.T, text, pattern string) float64 {
	t.Helper()
	m := regexp.MustCompile(pattern).FindStringSubmatch(text)
	require.Len(t, m, 2, text)
	n, err := strconv.ParseFloat(m[1], 64)
	require.NoError(t, err)
	return n
}

func latency(t *testing.T, text, percentile string) time.Duration {
	t.Helper()
	m := regexp.MustCompile(percentile + `\s+([\d.]+(?:us|ms|s|m))`).FindStringSubmatch(text)
	require.Len(t, m, 2, text)
	d, err := time.ParseDuration(m[1])
	require.NoError(t, err)
	return d
}

// cpuTimes sums up the CPU time of the programs on the path by name: those
// whose network namespace is not ours.
func cpuTimes() map[string]time.Duration {
	const tick = 10 * time.Millisecond // USER_HZ is 100 on every Linux
	own, _ := os.Readlink("/proc/self/ns/net")
	sum := map[string]time.Duration{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		space, err := os.Readlink(filepath.Join(filepath.Dir(path), "ns/net"))
		b, err2 := os.ReadFile(path)
		if err != nil || err2 != nil || space == own {
			continue
		}
		text := string(b)
		open, end := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
		fields := strings.Fields(text[end+1:])
		name := text[open+1 : end]
		if len(fields) < 13 || !onPath(name) {
			continue
		}
		user, _ := strconv.Atoi(fields[11])
		system, _ := strconv.Atoi(fields[12])
		sum[name] += time.Duration(user+system) * tick
	}
	return sum
}

// programs are those whose CPU time counts. A program's name in /proc is cut
// off after 15 bytes.
func programs() []string {
	return []string{"nginx", "haproxy", "opfield-ingress", "opfield-relay", "opfield-node", "testapp"}
}

func onPath(name string) bool { return slices.Contains(programs(), name) }

func describe(f *figure) string {
	var parts []string
	for _, name := range programs() {
		if us := float64(f.cpu[name].Nanoseconds()) / 1000 / f.requests; us >= 1 {
			parts = append(parts, fmt.Sprintf("%s %.0f µs", name, us))
		}
	}
	return strings.Join(parts, ", ")
}
