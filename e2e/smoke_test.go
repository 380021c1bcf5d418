package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/lab"
	"github.com/opfield/availability/e2e/load"
	"github.com/opfield/availability/e2e/system"
)

// DSC-1, RTE-1: labels alone are enough for a route to work.
func TestSmoke_LabelsToRoute(t *testing.T) {
	env := lab.New(t)
	s := system.Start(t, env, system.Config{Relays: 2, Nodes: 2})
	for _, n := range s.Nodes {
		n.RunApp(lab.App{Workload: "web"})
	}
	s.Nodes[1].RunApp(lab.App{Name: "plain", Env: []string{"PASSWORD=hunter2"}})
	s.MustCLI("route", "add", "web", "--host", "web.example", "--workload", "web", "--port", "8080")
	t.Log("links open after", s.AwaitLinks(20*time.Second, "open", "web.node-1/8080", "web.node-2/8080"))
	t.Log("route answers after", s.AwaitRoute(20*time.Second, "web.example"))
	run := load.Start(load.Config{
		Dial: s.Client().DialContext, Address: s.Ingress.HostPort(system.HTTPPort), Host: "web.example",
		Duration: 3 * time.Second,
		Streams: []load.Stream{
			{Name: "get", Method: "GET", Path: "/ok", Rate: 100},
			{Name: "get-fresh", Method: "GET", Path: "/ok", Rate: 50, Fresh: true},
			{Name: "post", Method: "POST", Path: "/ok", Rate: 20, Body: []byte("x")},
		},
	})
	report := run.Wait()
	t.Log("\n" + report.String())
	require.Empty(t, report.Failed(""), report.Describe(report.Failed(""), 10))
	t.Log("\n" + s.MustCLI("status"))
	var list string
	env.Await(20*time.Second, "both kinds are listed", func() bool { // DSC-3
		list = s.MustCLI("workloads")
		return strings.Contains(list, "plain") && strings.Count(list, "web") >= 4
	})
	t.Log("\n" + list)
	require.Regexp(t, `(?m)^node-1 +web +container +opfield/testapp:plain +running .* web$`, list)
	require.Regexp(t, `(?m)^node-2 +plain +container +opfield/testapp:plain +running .* -$`, list)
	require.NotContains(t, s.MustCLI("workloads", "--json"), "hunter2")
}
