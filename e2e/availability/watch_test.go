package availability

import (
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/events"
	"github.com/docker/docker/api/types/filters"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/load"
	"github.com/opfield/availability/e2e/system"
)

// observe records what is shown of the workload until stop is called.
func (s *scene) observe(workload string) (stop func() []view) {
	var seen []view
	var wg sync.WaitGroup
	end := make(chan struct{})
	wg.Go(func() {
		for {
			select {
			case <-end:
				return
			case <-time.After(100 * time.Millisecond):
			}
			var v view
			if out, err := s.CLI("--json", "ha", "get", workload); err == nil && json.Unmarshal([]byte(out), &v) == nil {
				seen = append(seen, v)
			}
		}
	})
	halt := sync.OnceFunc(func() { close(end); wg.Wait() })
	s.t.Cleanup(halt)
	return func() []view {
		halt()
		return seen
	}
}

// always checks that, once as many placements served, never fewer did.
func (s *scene) always(seen []view, serving int) {
	s.t.Helper()
	from := slices.IndexFunc(seen, func(v view) bool { return v.Serving >= serving })
	require.GreaterOrEqual(s.t, from, 0, "%d placements served", serving)
	for _, v := range seen[from:] {
		require.GreaterOrEqual(s.t, v.Serving, serving, "%+v", v)
	}
}

// ended returns every operation of a type that ended.
func (s *scene) ended(workload, kind string) []operation {
	return slices.DeleteFunc(s.operations(workload), func(op operation) bool { return op.Type != kind || op.FinishedAt.IsZero() })
}

// refused runs the CLI and expects a refusal with a code.
func (s *scene) refused(code string, args ...string) {
	s.t.Helper()
	out, err := s.CLI(args...)
	require.Error(s.t, err, "%v: %s", args, out)
	require.Contains(s.t, out, code, "%v", args)
}

// engineView is what the engines say of one container.
type engineView struct {
	Node, Name, ID, Restart string
	Running                 bool
	Started                 string // time of the last start
}

// inspect asks the engines for every container of the workload, by node; one
// container per node is expected. A node that is cut off still answers.
func (s *scene) inspect(workload string) map[string]engineView {
	s.t.Helper()
	out := map[string]engineView{}
	for _, n := range s.Nodes {
		for _, c := range s.containersOn(n, workload) {
			require.NotContains(s.t, out, n.ID, "one copy on a node at most: %+v", c)
			out[n.ID] = c
		}
	}
	return out
}

func (s *scene) containersOn(n *system.Node, workload string) []engineView {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	list, err := n.Docker().ContainerList(ctx, container.ListOptions{All: true})
	require.NoError(s.t, err)
	var out []engineView
	for _, c := range list {
		if strings.TrimPrefix(c.Names[0], "/") != workload && c.Labels["opfield.workload"] != workload {
			continue
		}
		found, err := n.Docker().ContainerInspect(ctx, c.ID)
		if err != nil {
			continue // it was removed just now
		}
		out = append(out, engineView{
			Node: n.ID, Name: strings.TrimPrefix(found.Name, "/"), ID: found.ID, Restart: string(found.HostConfig.RestartPolicy.Name),
			Running: found.State.Running, Started: found.State.StartedAt,
		})
	}
	return out
}

// running returns the nodes on which a copy runs.
func (s *scene) running(workload string) []string {
	var out []string
	for _, n := range s.Nodes {
		for _, c := range s.containersOn(n, workload) {
			if c.Running {
				out = append(out, n.ID)
			}
		}
	}
	slices.Sort(out)
	return out
}

// starts counts the starts of a container since a moment, as its engine
// recorded them.
func (s *scene) starts(node, id string, since time.Time) int {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	stamp := func(t time.Time) string { return strconv.FormatFloat(float64(t.UnixNano())/1e9, 'f', 9, 64) }
	messages, errs := s.node(node).Docker().Events(ctx, events.ListOptions{
		Since: stamp(since), Until: stamp(time.Now()), Filters: filters.NewArgs(filters.Arg("container", id), filters.Arg("event", "start")),
	})
	n := 0
	for {
		select {
		case <-messages:
			n++
		case <-errs: // the end of the time
			return n
		}
	}
}

// status asks for a page of the route once.
func (s *scene) status() int {
	code, _ := system.GetHost(s.Client(), s.Ingress.HostPort(system.HTTPPort), host, "/ok")
	return code
}

// answers waits until the route answers 200, several times in a row.
func (s *scene) answers(within time.Duration) time.Duration {
	s.t.Helper()
	good := 0
	return s.Env.Await(within, "the route answers", func() bool {
		if good++; s.status() != 200 {
			good = 0
		}
		return good >= 5
	})
}

// gap is the longest time without a good answer, and when it ended.
func gap(report *load.Report, since time.Time) time.Duration {
	last, longest := since, time.Duration(0)
	var good []time.Time
	for _, r := range report.Results {
		if r.OK() && r.Start.After(since) {
			good = append(good, r.Start.Add(r.Latency))
		}
	}
	slices.SortFunc(good, time.Time.Compare)
	for _, at := range good {
		longest, last = max(longest, at.Sub(last)), at
	}
	return longest
}

// onlyFrom checks that nginx led every request of a run over one link.
func (s *scene) onlyFrom(run *load.Run, link string) {
	s.t.Helper()
	status, err := s.IngressStatus()
	require.NoError(s.t, err)
	i := slices.IndexFunc(status.Links, func(l system.Link) bool { return l.Link == link })
	require.GreaterOrEqual(s.t, i, 0, "%+v", status.Links)
	access := s.access()
	for _, r := range run.Results() {
		for _, try := range access[r.ID].Tries {
			require.True(s.t, strings.HasPrefix(try.Endpoint, status.Links[i].Address+":"), "%s at %s by %s", r.ID, r.Start, try.Endpoint)
		}
	}
}

// fail makes the application of a container answer its health check badly.
func (s *scene) fail(c engineView) {
	s.t.Helper()
	n := s.node(c.Node)
	found, err := n.Docker().ContainerInspect(s.t.Context(), c.ID)
	require.NoError(s.t, err)
	_, err = system.Get(n.Host, "http://"+found.NetworkSettings.Networks["bridge"].IPAddress+":8080/health/down")
	require.NoError(s.t, err)
}
