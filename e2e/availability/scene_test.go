package availability

import (
	"encoding/json"
	"fmt"
	"slices"
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
	host = "web.example"
	// soon bounds what takes a few seconds on a quiet machine.
	soon = 60 * time.Second
)

// scene is a system whose first node runs the container "web".
type scene struct {
	*system.System
	t    *testing.T
	web  *lab.Container
	runs int // of traffic: their requests have names of their own
}

// newScene starts two relays, an ingress node and Docker nodes. The container
// has labels, so that a route leads to it before it gets a policy (ENA-7).
//
// Scenes wait more than they work: as many run at the same time as there are
// cores.
func newScene(t *testing.T, nodes int, edit ...func(*container.Config, *container.HostConfig)) *scene {
	t.Helper()
	t.Parallel()
	env := lab.New(t)
	s := &scene{System: system.Start(t, env, system.Config{Relays: 2, Nodes: nodes}), t: t}
	s.web = s.run("web", edit...)
	s.MustCLI("route", "add", "web", "--host", host, "--workload", "web", "--port", "8080")
	s.AwaitLinks(soon, "open", "web.node-1/8080")
	s.AwaitRoute(soon, host)
	env.Await(soon, "the container is listed", func() bool { return strings.Contains(s.MustCLI("workloads"), "web") })
	return s
}

// run runs a container on node-1 that can be made available: no mounts.
func (s *scene) run(name string, edit ...func(*container.Config, *container.HostConfig)) *lab.Container {
	return s.Nodes[0].RunApp(lab.App{Name: name, Workload: name, StopSeconds: 10, Configure: func(c *container.Config, h *container.HostConfig) {
		c.Cmd, c.Hostname = []string{"serve", "--name", name, "-drain-limit", "8s"}, ""
		h.Binds = nil
		h.RestartPolicy = container.RestartPolicy{Name: container.RestartPolicyUnlessStopped}
		for _, fn := range edit {
			fn(c, h)
		}
	}})
}

// traffic is 150 GET/s and 20 POST/s on kept-alive and fresh connections.
func (s *scene) traffic() *load.Run {
	s.runs++
	name := func(stream string) string { return fmt.Sprintf("%s-%d", stream, s.runs) }
	return load.Start(load.Config{
		Dial: s.Client().DialContext, Address: s.Ingress.HostPort(system.HTTPPort), Host: host, Duration: 10 * time.Minute,
		Streams: []load.Stream{
			{Name: name("get-kept"), Method: "GET", Path: "/ok", Rate: 80},
			{Name: name("get-fresh"), Method: "GET", Path: "/ok", Rate: 70, Fresh: true},
			{Name: name("post-kept"), Method: "POST", Path: "/ok", Rate: 20, Body: []byte("body")},
		},
	})
}

// lossless ends the traffic and fails unless every request was answered. What
// a reload of nginx costs is counted apart: it closes idle kept-alive
// connections, and a request that a client sends at that very moment never
// reaches it (RTE-8; RFC 9112 section 9.5 lets a client send it again).
func (s *scene) lossless(run *load.Run) {
	s.t.Helper()
	s.losslessBut(run, "")
}

// losslessBut also lets those requests fail that must not be repeated and had
// been sent to a placement that died, given by its endpoint (RTE-3).
func (s *scene) losslessBut(run *load.Run, dead string) {
	s.t.Helper()
	run.Stop()
	report := run.Wait()
	s.t.Log("\n" + report.String())
	access := s.access()
	var failed []load.Result
	reload, sent := 0, 0
	for _, f := range report.Failed("") {
		a, seen := access[f.ID]
		last := system.Try{}
		if n := len(a.Tries); n > 0 {
			last = a.Tries[n-1]
		}
		switch {
		case !seen && !f.First && (f.Kind == load.NoResponse || f.Kind == load.NotSent):
			reload++
		case dead != "" && f.Method == "POST" && last.Endpoint == dead && last.Sent > 0:
			sent++
		default:
			failed = append(failed, f)
		}
	}
	if reload > 0 {
		s.t.Logf("%d requests met a connection that a reload of nginx had closed", reload)
	}
	if sent > 0 {
		s.t.Logf("%d requests that must not be repeated had been sent to the placement that died", sent)
	}
	if len(failed) > 0 {
		s.explain(failed)
	}
	require.Empty(s.t, failed, report.Describe(failed, 20))
	require.LessOrEqual(s.t, sent, deadMost)
}

// deadMost is how many of 20 POSTs a second may have been under way to one of
// three placements when it died.
const deadMost = 4

// endpoint is where nginx reaches the workload on a node.
func (s *scene) endpoint(node string) string {
	s.t.Helper()
	st, err := s.IngressStatus()
	require.NoError(s.t, err)
	for _, l := range st.Links {
		if l.Link == "web."+node+"/8080" {
			return l.Address + ":7443"
		}
	}
	s.t.Fatalf("no link to web on %s", node)
	return ""
}

// access is nginx's log by request.
func (s *scene) access() map[string]system.Access {
	access := map[string]system.Access{}
	for _, a := range s.AccessLog() {
		access[a.ID] = a
	}
	return access
}

// explain logs what nginx did with failed requests.
func (s *scene) explain(failed []load.Result) {
	access := s.access()
	for _, f := range failed[:min(len(failed), 10)] {
		s.t.Logf("%s at %v: %s %d, %+v", f.ID, f.Start, f.Kind, f.Status, access[f.ID])
	}
	s.t.Log("\n" + s.MustCLI("ha", "get", "web"))
	s.t.Log("\n" + s.MustCLI("ha", "operations", "web"))
}

// view is what `opfield ha get` shows.
type view struct {
	Health      string
	Stopped     bool
	Wanted      int
	Serving     int
	Generation  uint64
	ServingFrom []string
	OnBackup    bool
	Primary     string
	Placements  []struct {
		Node, NodeState, Want, State, Container, ContainerID, Reason, Outside string
		Generation                                                            uint64
		Original, Ready, ImageReady                                           bool
		Streams                                                               int
	}
	Operation *operation
	Queued    []operation
	Warnings  []struct{ Code string }
	Problem   *struct{ Code, Message string }
}

type operation struct {
	ID, Type, Phase, Status, Code, Message, Note, Result string
	Attempts                                             int
	CreatedAt, StartedAt, FinishedAt                     time.Time
	Steps                                                []struct {
		At   time.Time
		Name string
	}
}

func (s *scene) view(workload string) view {
	var v view
	out, err := s.CLI("--json", "ha", "get", workload)
	if err == nil {
		err = json.Unmarshal([]byte(out), &v)
	}
	if err != nil {
		s.t.Logf("opfield ha get: %v\n%s", err, out)
		return view{}
	}
	return v
}

// operations returns every operation, the newest that ended first.
func (s *scene) operations(workload string) []operation {
	var all struct{ Operations []operation }
	require.NoError(s.t, json.Unmarshal([]byte(s.MustCLI("--json", "ha", "operations", workload)), &all))
	return all.Operations
}

func (s *scene) last(workload, kind string) operation {
	for _, op := range s.operations(workload) {
		if op.Type == kind {
			return op
		}
	}
	return operation{}
}

// serving returns the nodes whose placement is ready.
func (v view) serving() []string {
	var out []string
	for _, p := range v.Placements {
		if p.Ready {
			out = append(out, p.Node)
		}
	}
	slices.Sort(out)
	return out
}

// enable makes the workload available and waits until it is done.
func (s *scene) enable(args ...string) {
	s.t.Helper()
	s.t.Log("\n" + s.MustCLI(append([]string{"ha", "enable", "web", "--no-wait"}, args...)...))
	s.steady("web")
}

// steady waits until no operation is at work and as many serve as wanted.
func (s *scene) steady(workload string) time.Duration {
	s.t.Helper()
	return s.await(2*time.Minute, workload, "it is healthy and at rest", func(v view) bool {
		return v.Health == "healthy" && v.Serving == v.Wanted && v.Operation == nil
	})
}

func (s *scene) await(within time.Duration, workload, what string, cond func(view) bool) time.Duration {
	s.t.Helper()
	start := time.Now()
	var v view
	for time.Since(start) < within {
		if v = s.view(workload); cond(v) {
			return time.Since(start)
		}
		time.Sleep(100 * time.Millisecond)
	}
	s.t.Log("\n" + s.MustCLI("ha", "get", workload))
	s.t.Log("\n" + s.MustCLI("ha", "operations", workload))
	s.t.Fatalf("within %v: %s: %+v", within, what, v)
	return 0
}

// copies returns the running containers of the workload by node, as the
// engines say. A node that is cut off still answers here.
func (s *scene) copies(workload string) map[string][]string {
	out := map[string][]string{}
	for _, n := range s.Nodes {
		for _, c := range n.Containers() {
			if strings.TrimPrefix(c.Names[0], "/") == workload || c.Labels["opfield.workload"] == workload {
				out[n.ID] = append(out[n.ID], fmt.Sprintf("%s %s", strings.TrimPrefix(c.Names[0], "/"), c.State))
			}
		}
	}
	return out
}

// json runs the CLI with --json and decodes what it prints.
func (s *scene) json(v any, args ...string) {
	s.t.Helper()
	require.NoError(s.t, json.Unmarshal([]byte(s.MustCLI(append([]string{"--json"}, args...)...)), v))
}
