// Package bench_test measures the whole path beside nginx → application and
// nginx → HAProxy → HAProxy → application, on the same hosts in one run.
package bench_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/lab"
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

// figure is one measurement.
type figure struct {
	perSecond float64
	p50, p99  time.Duration
	failed    string
	cpu       map[string]time.Duration // by program, per request
}

// TestBench prints throughput, latency and CPU time of every way. With
// OPFIELD_BENCH set it measures long enough to be quoted.
func TestBench(t *testing.T) {
	duration, rounds := time.Second, 1
	if os.Getenv("OPFIELD_BENCH") != "" {
		duration, rounds = 8*time.Second, 3
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
	for _, load := range []struct{ name, path string }{
		{"small, kept alive", "/ok"}, {"small, fresh connections", "/ok?close=1"}, {"1 MiB", "/bytes?n=1048576"},
	} {
		t.Logf("%s, %d connections:", load.name, connections)
		best := map[string]figure{}
		for range rounds { // turn by turn, so that a slow minute hurts all alike
			for _, w := range ways {
				f := measure(t, s, w, load.path, duration)
				require.Empty(t, f.failed, "%s %s", load.name, w.name)
				if f.perSecond > best[w.name].perSecond {
					best[w.name] = f
				}
			}
		}
		for _, w := range ways {
			f := best[w.name]
			t.Logf("  %-8s %8.0f/s  ratio %.2f  p50 %8s  p99 %8s  CPU per request: %s", w.name, f.perSecond,
				f.perSecond/best["direct"].perSecond, f.p50, f.p99, describe(f.cpu))
		}
	}
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

func measure(t *testing.T, s *system.System, w way, path string, duration time.Duration) figure {
	t.Helper()
	before := cpuTimes()
	out, err := s.Client().Run("wrk", "-t1", "-c", strconv.Itoa(connections), "-d", strconv.Itoa(int(duration.Seconds()))+"s", "--latency",
		"-H", "Host: "+w.host, "http://"+s.Ingress.HostPort(w.port)+path)
	require.NoError(t, err)
	after := cpuTimes()
	f := figure{perSecond: number(t, out, `Requests/sec:\s+([\d.]+)`), p50: latency(t, out, "50%"), p99: latency(t, out, "99%"), cpu: map[string]time.Duration{}}
	requests := number(t, out, `(\d+) requests in`)
	for name, used := range after {
		if d := used - before[name]; d > 0 {
			f.cpu[name] = time.Duration(float64(d) / requests)
		}
	}
	for line := range strings.Lines(out) {
		if strings.Contains(line, "Non-2xx") || strings.Contains(line, "Socket errors") && !strings.Contains(path, "close") {
			f.failed = line
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

func onPath(name string) bool {
	for _, want := range []string{"nginx", "haproxy", "opfield-ingress", "opfield-relay", "opfield-node", "testapp"} {
		if name == want || len(name) == 15 && strings.HasPrefix(want, name) {
			return true
		}
	}
	return false
}

func describe(cpu map[string]time.Duration) string {
	var parts []string
	for _, name := range []string{"nginx", "haproxy", "opfield-ingress", "opfield-relay", "opfield-node", "testapp"} {
		for key, d := range cpu {
			if strings.HasPrefix(name, key) && d >= time.Microsecond {
				parts = append(parts, fmt.Sprintf("%s %.0f µs", key, float64(d.Nanoseconds())/1000))
			}
		}
	}
	return strings.Join(parts, ", ")
}
