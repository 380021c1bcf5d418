package e2e

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/lab"
	"github.com/opfield/availability/e2e/load"
	"github.com/opfield/availability/e2e/system"
)

// scene is a system with the workload "web" on every node.
type scene struct {
	*system.System
	t    *testing.T
	apps map[string]*lab.Container // by node
}

const webHost = "web.example"

// newScene starts relays and nodes; web serves on all nodes but, if standby is
// set, the last.
func newScene(t *testing.T, cfg system.Config, standby bool) *scene {
	t.Helper()
	env := lab.New(t)
	sc := &scene{System: system.Start(t, env, cfg), t: t, apps: map[string]*lab.Container{}}
	var open []string
	for i, n := range sc.Nodes {
		app := lab.App{Workload: "web", Args: []string{"-drain", "6s"}, StopSeconds: 30}
		if standby && i == len(sc.Nodes)-1 {
			app.Role = "standby"
		} else {
			open = append(open, link(n.ID))
		}
		sc.apps[n.ID] = n.RunApp(app)
	}
	sc.MustCLI("route", "add", "web", "--host", webHost, "--workload", "web", "--port", "8080")
	sc.AwaitLinks(20*time.Second, "open", open...)
	sc.AwaitRoute(20*time.Second, webHost)
	sc.settle()
	return sc
}

// settle waits until nginx says what it should and nothing is pending.
func (sc *scene) settle() {
	sc.t.Helper()
	sc.Env.Await(60*time.Second, "nginx is up to date", func() bool {
		st, err := sc.IngressStatus()
		return err == nil && !st.Reload.Pending && st.Reload.Error == ""
	})
}

func link(node string) string { return "web." + node + "/8080" }

// steady is 200 GET/s and 20 POST/s, half of each on fresh connections.
func (sc *scene) steady(d time.Duration) *load.Run {
	body := []byte(strings.Repeat("b", 200))
	return load.Start(load.Config{
		Dial: sc.Client().DialContext, Address: sc.Ingress.HostPort(system.HTTPPort), Host: webHost,
		Duration: d,
		Streams: []load.Stream{
			{Name: "get-kept", Method: "GET", Path: "/ok", Rate: 100},
			{Name: "get-fresh", Method: "GET", Path: "/ok", Rate: 100, Fresh: true},
			{Name: "post-kept", Method: "POST", Path: "/ok", Rate: 10, Body: body},
			{Name: "post-fresh", Method: "POST", Path: "/ok", Rate: 10, Fresh: true, Body: body},
		},
	})
}

// endpoint returns the link's loopback address and port.
func (sc *scene) endpoint(l string) string {
	st, err := sc.IngressStatus()
	require.NoError(sc.t, err)
	for _, x := range st.Links {
		if x.Link == l {
			return x.Address + ":7443"
		}
	}
	sc.t.Fatalf("no link %s", l)
	return ""
}

// since returns when the link took its present state.
func (sc *scene) since(l string) time.Time {
	st, err := sc.IngressStatus()
	require.NoError(sc.t, err)
	for _, x := range st.Links {
		if x.Link == l {
			return x.Since
		}
	}
	return time.Time{}
}

// requirePOSTsSentTo fails unless every failed POST had been sent to one of
// the endpoints and to no application that lives: the only ones that may fail.
func (sc *scene) requirePOSTsSentTo(report *load.Report, alive func(load.Result, string) bool, endpoints map[string]bool) int {
	sc.t.Helper()
	joined := report.Join(sc.Env.Deliveries())
	access := map[string]system.Access{}
	for _, a := range sc.AccessLog() {
		if len(a.Tries) > 0 {
			access[a.ID] = a
		}
	}
	if failed := report.Failed("GET"); len(failed) > 0 {
		for _, f := range failed[:min(len(failed), 20)] {
			sc.t.Logf("%s at %v (%v): %+v, delivered %+v", f.ID, f.Start.Sub(report.Began), f.Start, access[f.ID], joined.Deliveries[f.ID])
		}
		st, _ := sc.IngressStatus()
		sc.t.Logf("links %+v", st.Links)
		sc.t.Fatalf("%d GETs failed:\n%s", len(failed), report.Describe(failed, 20))
	}
	failed := report.Failed("POST")
	for _, f := range failed {
		a, ok := access[f.ID]
		require.True(sc.t, ok, "failed POST %s is not in the access log", f.ID)
		last := a.Tries[len(a.Tries)-1]
		require.True(sc.t, endpoints[last.Endpoint] && last.Sent > 0,
			"POST %s failed (%s %d %s) but was not sent to the dead placement: %+v", f.ID, f.Kind, f.Status, f.Err, a)
		for _, d := range joined.Deliveries[f.ID] {
			require.False(sc.t, alive(f, d.By), "POST %s failed although %s, which lives, received it", f.ID, d.By)
		}
	}
	require.Empty(sc.t, joined.DoubledBy("POST"), "no POST is delivered twice (RTE-3)")
	require.Empty(sc.t, joined.Phantom)
	return len(failed)
}

// butReloads leaves out what a reload of nginx costs, where one is due (RTE-8):
// it closes idle kept-alive connections, and a request that a client sends at
// that very moment never reaches it. RFC 9112 section 9.5 lets a client send it
// again.
func (sc *scene) butReloads(failed []load.Result) []load.Result {
	seen := map[string]bool{}
	for _, a := range sc.AccessLog() {
		seen[a.ID] = true
	}
	rest := slices.DeleteFunc(slices.Clone(failed), func(r load.Result) bool {
		return !seen[r.ID] && !r.First && (r.Kind == load.NoResponse || r.Kind == load.NotSent)
	})
	if n := len(failed) - len(rest); n > 0 {
		sc.t.Logf("%d requests met a connection that a reload of nginx had closed", n)
	}
	return rest
}

func percent(d []time.Duration) string {
	var most, sum time.Duration
	for _, x := range d {
		most, sum = max(most, x), sum+x
	}
	return fmt.Sprintf("n=%d mean=%v max=%v", len(d), (sum / time.Duration(max(len(d), 1))).Round(time.Millisecond), most.Round(time.Millisecond))
}

// logSlowest shows the slowest requests with what nginx tried.
func (sc *scene) logSlowest(report *load.Report, n int) {
	all := slices.Clone(report.Results)
	slices.SortFunc(all, func(a, b load.Result) int { return cmp.Compare(b.Latency, a.Latency) })
	access := map[string]system.Access{}
	for _, a := range sc.AccessLog() {
		access[a.ID] = a
	}
	for _, r := range all[:min(n, len(all))] {
		sc.t.Logf("slow: %s at %v took %v: %+v", r.ID, r.Start.Sub(report.Began).Round(time.Millisecond), r.Latency.Round(time.Millisecond), access[r.ID].Tries)
	}
}
