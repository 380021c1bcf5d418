package availability

import (
	"strings"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/lab"
)

// disable gives the policy up and waits until it is gone.
func (s *scene) disable(survivor string) (said string) {
	s.t.Helper()
	begin := time.Now()
	out, err := s.CLI("ha", "disable", "web", "--survivor", survivor, "--confirm", "web", "--wait")
	s.t.Log("\n" + out)
	require.NoError(s.t, err)
	s.t.Logf("disabled after %v", time.Since(begin).Round(time.Millisecond))
	s.gone()
	return out
}

// gone waits until the workload has no policy.
func (s *scene) gone() {
	s.t.Helper()
	s.Env.Await(soon, "the policy is gone", func() bool {
		out, err := s.CLI("ha", "get", "web")
		return err != nil && strings.Contains(out, "AVAILABILITY_NOT_ENABLED")
	})
}

// DIS-1, DIS-2, STP-2, MOD-6: every survivor keeps running as it is and
// becomes the ordinary workload, and can be made available again.
func TestDisable_Survivors(t *testing.T) {
	s := newScene(t, 3)
	id, started := s.web.ID(), s.web.Inspect().State.StartedAt
	settings := []string{"--mode", "replicated", "--replicas", "3", "--drain", "3s"}

	// The original survives.
	s.enable(settings...)
	require.Len(t, s.inspect("web"), 3)
	run := s.traffic()
	s.disable("node-1")
	s.lossless(run)
	left := s.inspect("web")
	require.Len(t, left, 1, "the other copies are removed")
	require.Equal(t, engineView{Node: "node-1", Name: "web", ID: id, Restart: "unless-stopped", Running: true, Started: started}, left["node-1"])
	s.answers(10 * time.Second)
	// Discovery goes on: its route follows Docker again.
	s.web.Stop(1)
	s.Env.Await(10*time.Second, "the route is down", func() bool { return s.status() == 503 })
	s.web.Start()
	s.answers(10 * time.Second)
	started = s.web.Inspect().State.StartedAt

	// Another copy survives, of a newer generation.
	s.enable(settings...)
	require.Equal(t, started, s.web.Inspect().State.StartedAt)
	run = s.traffic()
	s.MustCLI("ha", "update", "web", "--max-unavailable", "1", "--wait")
	s.MustCLI("ha", "rollout", "web", "--env", "VERSION=2", "--wait")
	s.steady("web")
	before := s.inspect("web")
	id = before["node-1"].ID
	said := s.disable("node-2")
	s.lossless(run)
	require.Contains(t, said, "its original is stopped on node-1")
	now := s.inspect("web")
	require.Len(t, now, 2)
	survivor := before["node-2"]
	survivor.Name, survivor.Restart = "web", "unless-stopped"
	require.Equal(t, survivor, now["node-2"], "the same container, not restarted, under the workload's name")
	require.Equal(t, id, now["node-1"].ID, "STP-2")
	require.False(t, now["node-1"].Running)
	require.Equal(t, "no", now["node-1"].Restart, "nobody starts it beside the survivor")
	s.Nodes[0].Agent.Restart(5 * time.Second)
	s.Nodes[1].Agent.Restart(5 * time.Second)
	time.Sleep(3 * time.Second)
	s.answers(20 * time.Second)
	require.Equal(t, []string{"node-2"}, s.running("web"))

	// From there it is made available again, and stopped.
	s.enable(append(settings, "--node", "node-2")...)
	again := s.inspectAll("web")
	require.Len(t, again, 4, "three copies, and the old original: %+v", again)
	require.Equal(t, survivor.ID, s.view("web").container("node-2"))
	run = s.traffic()
	time.Sleep(2 * time.Second)
	s.lossless(run)
	s.MustCLI("ha", "stop", "web", "--wait")
	copy3 := s.view("web").container("node-3")
	s.disable("node-3") // DIS-1: a stopped workload's survivor stays stopped
	require.Empty(t, s.running("web"))
	last := s.inspectAll("web")
	require.Len(t, last, 3, "%+v", last)
	for _, c := range last {
		if c.Node == "node-3" {
			require.Equal(t, copy3, c.ID)
			require.Equal(t, "web", c.Name)
			require.NoError(t, s.node("node-3").Docker().ContainerStart(t.Context(), c.ID, container.StartOptions{}))
		}
	}
	s.answers(10 * time.Second) // an ordinary container: started by hand, it serves
}

// container returns the id of the container of a placement.
func (v view) container(node string) string {
	for _, p := range v.Placements {
		if p.Node == node {
			return p.ContainerID
		}
	}
	return ""
}

// inspectAll is inspect without the expectation of one copy per node.
func (s *scene) inspectAll(workload string) []engineView {
	var out []engineView
	for _, n := range s.Nodes {
		out = append(out, s.containersOn(n, workload)...)
	}
	return out
}

// DIS-1, DIS-3: what is refused, a container without labels, a node that is
// away.
func TestDisable_WithoutLabelsAndAwayNode(t *testing.T) {
	s := newScene(t, 3)
	s.web.Remove()
	s.Env.Await(10*time.Second, "the route is down", func() bool { return s.status() == 503 })
	plain := s.Nodes[0].RunApp(lab.App{Name: "plain", StopSeconds: 10, Configure: func(c *container.Config, h *container.HostConfig) {
		c.Cmd, c.Hostname, h.Binds = []string{"serve", "--name", "plain", "-drain-limit", "8s"}, "", nil
		h.RestartPolicy = container.RestartPolicy{Name: container.RestartPolicyAlways}
	}})
	started := plain.Inspect().State.StartedAt
	settings := []string{"--node", "node-1", "--container", "plain", "--port", "8080", "--mode", "replicated", "--replicas", "2", "--drain", "3s"}
	s.enable(settings...)
	s.answers(20 * time.Second)

	// DIS-1: the name must be typed.
	s.refused("AVAILABILITY_CONFIRMATION_REQUIRED", "ha", "disable", "web", "--survivor", "node-1", "--confirm", "wbe")
	s.refused("AVAILABILITY_SURVIVOR_REQUIRED", "ha", "disable", "web", "--survivor", "node-9", "--confirm", "web")
	require.Len(t, s.view("web").serving(), 2)

	// A container without labels goes on to serve.
	run := s.traffic()
	s.disable("node-1")
	now := plain.Inspect()
	require.Equal(t, started, now.State.StartedAt)
	require.EqualValues(t, "always", now.HostConfig.RestartPolicy.Name)
	require.Equal(t, "/plain", now.Name)
	s.lossless(run)
	s.Nodes[0].Agent.Restart(5 * time.Second)
	s.Env.Await(20*time.Second, "its node is back", func() bool { return s.nodeState("node-1") == "online" })
	s.answers(20 * time.Second)

	// A node with a copy is away.
	s.Env.Await(soon, "its node reaches the registry again", func() bool {
		_, err := s.CLI(append([]string{"ha", "check", "web"}, settings...)...)
		return err == nil
	})
	s.enable(settings...)
	away := "node-2"
	if s.view("web").container(away) == "" {
		away = "node-3"
	}
	s.node(away).Cut()
	s.Env.Await(soon, "it is offline", func() bool { return s.nodeState(away) == "offline" })
	run = s.traffic()
	out, err := s.CLI("ha", "disable", "web", "--survivor", "node-1", "--confirm", "web", "--wait")
	t.Log("\n" + out)
	require.NoError(t, err)
	v := s.view("web")
	require.Equal(t, "cleanup_pending", v.Health)
	require.Equal(t, "cleanup_pending", s.last("web", "disable").Status)
	// DIS-3: nothing is done to it any more.
	s.refused("AVAILABILITY_DISABLE_IN_PROGRESS", "ha", "stop", "web")
	s.refused("AVAILABILITY_DISABLE_IN_PROGRESS", "ha", "rollout", "web", "--env", "A=1")
	s.refused("AVAILABILITY_DISABLE_IN_PROGRESS", "ha", "update", "web", "--replicas", "3")
	s.refused("AVAILABILITY_DISABLE_IN_PROGRESS", "ha", "disable", "web", "--survivor", "node-1", "--confirm", "web")
	require.NotEmpty(t, s.containersOn(s.node(away), "web"), "the cut-off host still runs it")
	healed := time.Now()
	s.node(away).Heal()
	s.Env.Await(soon, "the copy is removed", func() bool { return len(s.containersOn(s.node(away), "web")) == 0 })
	s.gone()
	t.Logf("clean %v after the return", time.Since(healed).Round(time.Millisecond))
	s.lossless(run)
	s.onlyFrom(run, "web.node-1/8080")
	require.Equal(t, started, plain.Inspect().State.StartedAt)
}

// DIS-4, DIS-3: a policy is given up although nothing is healthy, and while
// it is, nothing else is done.
func TestDisable_NothingHealthy(t *testing.T) {
	s := newScene(t, 3, func(c *container.Config, _ *container.HostConfig) {
		c.Healthcheck = &container.HealthConfig{
			Test: []string{"CMD", "/testapp", "check", "http://127.0.0.1:8080/healthz"}, Interval: time.Second, Timeout: time.Second, Retries: 2,
		}
	})
	s.enable("--mode", "replicated", "--replicas", "2", "--drain", "3s")
	for _, c := range s.inspectAll("web") {
		s.fail(c)
	}
	s.await(soon, "web", "none serves", func(v view) bool { return v.Serving == 0 })
	before := s.inspectAll("web")
	begin := time.Now()
	s.MustCLI("ha", "disable", "web", "--survivor", "node-1", "--confirm", "web")
	if v := s.view("web"); v.Health != "" {
		require.Equal(t, "disabling", v.Health)
		s.refused("AVAILABILITY_DISABLE_IN_PROGRESS", "ha", "start", "web")
	}
	s.gone()
	t.Logf("disabled after %v", time.Since(begin).Round(time.Millisecond))
	now := s.inspectAll("web")
	require.Len(t, now, 1, "%+v", now)
	for _, c := range before {
		if c.Node == "node-1" {
			require.Equal(t, c.ID, now[0].ID)
			require.Equal(t, c.Started, now[0].Started)
		}
	}
}
