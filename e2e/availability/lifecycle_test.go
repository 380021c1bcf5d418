package availability

import (
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/load"
	"github.com/opfield/availability/e2e/system"
)

// stopped waits until the workload is stopped and at rest.
func stopped(v view) bool { return v.Stopped && v.Health == "stopped" && v.Operation == nil }

// STP-1, STP-2, STP-4, RDY-4: stop and start keep every copy, a restart costs
// no request.
func TestLifecycle_StopStartRestart(t *testing.T) {
	s := newScene(t, 4)
	// STP-4: a stop right behind the enable is queued, and stops every copy.
	s.MustCLI("ha", "enable", "web", "--mode", "replicated", "--replicas", "3", "--grace", "5s", "--drain", "3s")
	s.MustCLI("ha", "stop", "web", "--wait")
	s.await(10*time.Second, "web", "it is stopped", stopped)
	require.Empty(t, s.running("web"))
	kept := s.inspect("web")
	require.Len(t, kept, 3)
	require.Equal(t, s.web.ID(), kept["node-1"].ID, "STP-2")
	require.Equal(t, "completed", s.last("web", "enable").Status)
	for i := range s.Nodes {
		s.Nodes[i].Agent.Restart(5 * time.Second)
	}
	time.Sleep(5 * time.Second)
	require.Empty(t, s.running("web"), "STP-4: no node starts a copy of a stopped workload by itself")
	require.Equal(t, kept, s.inspect("web"))

	// Start: exactly those that served.
	s.Env.Await(soon, "every node is online", func() bool {
		return !slices.ContainsFunc(s.Nodes, func(n *system.Node) bool { return s.nodeState(n.ID) != "online" })
	})
	begin := time.Now()
	s.MustCLI("ha", "start", "web", "--wait")
	t.Logf("started after %v", time.Since(begin).Round(time.Millisecond))
	s.steady("web")
	s.same(kept)
	s.answers(10 * time.Second)

	// Stop under traffic: the route says so.
	run := s.traffic()
	begin = time.Now()
	s.MustCLI("ha", "stop", "web", "--wait")
	t.Logf("stopped after %v", time.Since(begin).Round(time.Millisecond))
	s.await(10*time.Second, "web", "it is stopped", stopped)
	for _, f := range run.Stop().Failed("") {
		if f.Status != 503 && f.Status != 0 {
			s.explain([]load.Result{f})
		}
		require.Contains(t, []int{503, 0}, f.Status, "%+v", f)
		if f.Status == 0 {
			require.False(t, f.First, "a reload may close an idle connection, nothing else fails: %+v", f)
		}
	}
	status, retry := s.unavailable()
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.NotEmpty(t, retry, "Retry-After")
	require.Empty(t, s.running("web"))
	s.same(kept)
	require.Contains(t, s.MustCLI("ha", "get", "web"), "stopped")
	s.MustCLI("ha", "start", "web", "--wait")
	s.steady("web")
	s.same(kept)
	s.answers(10 * time.Second)

	// Restart: one after another, each once, no request lost.
	run, stop := s.traffic(), s.observe("web")
	begin = time.Now()
	s.MustCLI("ha", "restart", "web", "--wait")
	t.Logf("restarted after %v", time.Since(begin).Round(time.Millisecond))
	s.steady("web")
	seen := stop()
	s.lossless(run)
	s.always(seen, 2)
	s.same(kept)
	for node, c := range kept {
		require.Equal(t, 1, s.starts(node, c.ID, begin), "starts on %s", node)
	}

	// A start with a node offline replaces its copy.
	s.MustCLI("ha", "stop", "web", "--wait")
	away := s.view("web").Placements[1].Node
	if away == "node-1" {
		away = s.view("web").Placements[2].Node
	}
	s.node(away).Cut()
	s.Env.Await(soon, "it is offline", func() bool { return s.nodeState(away) == "offline" })
	begin = time.Now()
	s.MustCLI("ha", "start", "web")
	s.await(soon, "web", "the other two serve", func(v view) bool { return v.Serving >= 2 })
	t.Logf("two serve %v after the start", time.Since(begin).Round(time.Millisecond))
	s.await(soon, "web", "the third is replaced", func(v view) bool { return v.Serving == 3 && v.Operation == nil })
	t.Logf("three serve %v after the start", time.Since(begin).Round(time.Millisecond))
	require.NotContains(t, s.view("web").serving(), away)
	run = s.traffic()
	s.node(away).Heal()
	s.Env.Await(soon, "the stale copy is gone", func() bool { return len(s.containersOn(s.node(away), "web")) == 0 })
	s.steady("web")
	s.lossless(run)
}

// same checks that every container is the one it was, with restart policy no.
func (s *scene) same(before map[string]engineView) {
	s.t.Helper()
	now := s.inspect("web")
	require.Len(s.t, now, len(before))
	for node, c := range before {
		require.Equal(s.t, c.ID, now[node].ID, "the container on %s was not recreated", node)
		require.Equal(s.t, "no", now[node].Restart, "RDY-4")
	}
}

// unavailable asks for a page until the route answers 503.
func (s *scene) unavailable() (status int, retryAfter string) {
	client := http.Client{Transport: &http.Transport{DialContext: s.Client().DialContext, DisableKeepAlives: true}, Timeout: 5 * time.Second}
	s.Env.Await(10*time.Second, "the route answers 503", func() bool {
		req, err := http.NewRequest(http.MethodGet, "http://"+s.Ingress.HostPort(system.HTTPPort)+"/ok", nil)
		require.NoError(s.t, err)
		req.Host = host
		resp, err := client.Do(req)
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		status, retryAfter = resp.StatusCode, resp.Header.Get("Retry-After")
		return status == http.StatusServiceUnavailable
	})
	return status, retryAfter
}

// STP-3, STP-4, ROL: a stop during a rollout comes after it; a Docker daemon
// that hangs delays a stop and fails nothing.
func TestLifecycle_QueueAndBusyDocker(t *testing.T) {
	s := newScene(t, 3)
	s.enable("--mode", "replicated", "--replicas", "2", "--drain", "3s")
	run := s.traffic()
	s.MustCLI("ha", "rollout", "web", "--env", "VERSION=2")
	s.await(soon, "web", "the rollout is at work", func(v view) bool {
		return v.Operation != nil && v.Operation.Type == "rollout" && v.Operation.Status == "running"
	})
	s.MustCLI("ha", "stop", "web")
	v := s.view("web")
	require.Equal(t, "rollout", v.Operation.Type)
	require.Len(t, v.Queued, 1, "STP-4: it is queued")
	require.Equal(t, "stop", v.Queued[0].Type)
	s.await(soon, "web", "it is stopped", stopped)
	rollout, halt := s.last("web", "rollout"), s.last("web", "stop")
	require.Equal(t, "completed", rollout.Status, "%+v", rollout)
	require.False(t, halt.StartedAt.Before(rollout.FinishedAt))
	for _, f := range run.Stop().Failed("") {
		require.Truef(t, f.Start.Add(f.Latency).After(rollout.FinishedAt) || f.Status == 0 && !f.First, "no request was lost by the rollout: %+v", f)
	}
	require.Empty(t, s.running("web"))
	kept := s.inspect("web")
	s.MustCLI("ha", "start", "web", "--wait")
	s.steady("web")
	for node, c := range s.inspect("web") {
		require.Equal(t, kept[node].ID, c.ID)
		require.Contains(t, s.env(node, c.ID), "VERSION=2")
	}

	// STP-3.
	busy := s.view("web").serving()[1]
	s.node(busy).Engine.Pause()
	begin := time.Now()
	s.MustCLI("ha", "stop", "web")
	s.await(soon, "web", "the delay is shown", func(v view) bool {
		return v.Operation != nil && v.Operation.Type == "stop" && v.Operation.Code == "AVAILABILITY_DAEMON_BUSY"
	})
	t.Logf("shown as busy %v after the stop", time.Since(begin).Round(time.Millisecond))
	t.Log("\n" + s.MustCLI("ha", "get", "web"))
	time.Sleep(max(0, 3*time.Minute-time.Since(begin)))
	v = s.view("web")
	require.NotNil(t, v.Operation)
	require.Nil(t, v.Problem)
	require.Zero(t, v.Operation.Attempts)
	s.node(busy).Engine.Continue()
	t.Logf("stopped %v after the daemon answers again", s.await(soon, "web", "it is stopped", stopped).Round(time.Millisecond))
	require.Equal(t, "completed", s.last("web", "stop").Status)
	require.Empty(t, s.ended("web", "heal"))
	require.Empty(t, s.running("web"))
	for node, c := range s.inspect("web") {
		require.Equal(t, kept[node].ID, c.ID)
	}
}

// env returns the environment of a container.
func (s *scene) env(node, id string) []string {
	s.t.Helper()
	found, err := s.node(node).Docker().ContainerInspect(s.t.Context(), id)
	require.NoError(s.t, err, fmt.Sprintf("container %s on %s", id, node))
	return found.Config.Env
}
