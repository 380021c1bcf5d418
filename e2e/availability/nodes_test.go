package availability

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/lab"
)

// listed is what `opfield nodes list` says of a node.
type listed struct {
	ID, Name, State string
	Drained         bool
}

func (s *scene) listed(node string) (listed, bool) {
	var out struct{ Nodes []listed }
	s.json(&out, "nodes", "list")
	for _, n := range out.Nodes {
		if n.ID == node {
			return n, true
		}
	}
	return listed{}, false
}

// other returns the node that serves beside the first.
func (s *scene) other() string {
	s.t.Helper()
	for _, n := range s.view("web").serving() {
		if n != "node-1" {
			return n
		}
	}
	s.t.Fatal("only the first node serves")
	return ""
}

// API-1, DSC-2, LOS-4, SEC-4: what operators do with nodes under traffic.
func TestNodes(t *testing.T) {
	s := newScene(t, 4)
	s.enable("--mode", "replicated", "--replicas", "2", "--drain", "3s", "--grace", "2s")
	run := s.traffic()

	// DSC-2: only placements count, whatever else has the name.
	free := slices.DeleteFunc([]string{"node-2", "node-3", "node-4"}, func(n string) bool { return slices.Contains(s.view("web").serving(), n) })
	stray := s.node(free[1]).RunApp(lab.App{Name: "stray", Workload: "web", Configure: func(c *container.Config, h *container.HostConfig) {
		c.Cmd, c.Hostname, h.Binds = []string{"serve", "--name", "stray"}, "", nil
	}})
	time.Sleep(4 * time.Second)
	for _, r := range run.Results() {
		require.NotEqual(t, "stray", r.ServedBy)
	}
	require.True(t, stray.Inspect().State.Running, "MOD-6: it is nobody's")

	// Drain: the copy moves away, no request is lost.
	victim := s.other()
	s.refused("AVAILABILITY_NODE_IN_USE", "nodes", "remove", victim)
	s.refused("AVAILABILITY_NODE_NOT_LOST", "nodes", "confirm-lost", victim)
	stop := s.observe("web")
	begin := time.Now()
	s.MustCLI("nodes", "drain", victim)
	s.await(soon, "web", "it left the node", func(v view) bool {
		return v.Serving == 2 && v.Operation == nil && !slices.Contains(v.serving(), victim) && v.container(victim) == ""
	})
	t.Logf("moved %v after the drain was asked for", time.Since(begin).Round(time.Millisecond))
	s.always(stop(), 2)
	s.Env.Await(10*time.Second, "the copy is removed", func() bool { return len(s.containersOn(s.node(victim), "web")) == 0 })
	n, _ := s.listed(victim)
	require.True(t, n.Drained)

	// Undrain and rename: the node may be chosen again, nothing moves.
	serving := s.view("web").serving()
	s.MustCLI("nodes", "undrain", victim)
	s.MustCLI("nodes", "rename", victim, "rack 7, left")
	n, _ = s.listed(victim)
	require.False(t, n.Drained)
	require.Equal(t, "rack 7, left", n.Name)
	require.Contains(t, s.MustCLI("nodes", "list"), "rack 7, left")
	s.MustCLI("ha", "update", "web", "--replicas", "3", "--wait")
	s.steady("web")
	s.MustCLI("ha", "update", "web", "--replicas", "2", "--wait")
	s.steady("web")
	t.Logf("served from %v, now from %v", serving, s.view("web").serving())
	s.lossless(run)
	for _, r := range run.Results() {
		require.NotEqual(t, "stray", r.ServedBy)
	}

	// Remove: it is forgotten, and its identity counts no more.
	gone := free[1]
	s.MustCLI("nodes", "drain", gone)
	s.await(soon, "web", "it left the node", func(v view) bool { return v.Serving == 2 && v.Operation == nil && !slices.Contains(v.serving(), gone) })
	run = s.traffic()
	s.MustCLI("nodes", "remove", gone)
	_, known := s.listed(gone)
	require.False(t, known)
	s.refused("AVAILABILITY_NODE_UNKNOWN", "nodes", "drain", gone)
	s.node(gone).Agent.Restart(5 * time.Second)
	for range 20 {
		time.Sleep(500 * time.Millisecond)
		_, known := s.listed(gone)
		require.False(t, known, "a removed node does not come back")
		require.NotEqual(t, "open", s.LinkState("web."+gone+"/8080"))
	}
	s.lossless(run)
	require.True(t, stray.Inspect().State.Running, "MOD-6")
	t.Log("\n" + s.MustCLI("nodes", "list"))

	// LOS-4: most nodes go silent together; an operator says which is lost.
	last := slices.DeleteFunc([]string{"node-2", "node-3", "node-4"}, func(n string) bool { return n == gone || slices.Contains(s.view("web").serving(), n) })[0]
	for _, n := range s.Nodes {
		if n.ID != last && n.ID != gone {
			n.Cut()
		}
	}
	s.Env.Await(soon, "they are shown as not reporting", func() bool {
		n, _ := s.listed("node-1")
		return n.State == "not reporting"
	})
	time.Sleep(5 * time.Second)
	require.Empty(t, s.ended("web", "heal"))
	require.Nil(t, s.view("web").Operation)
	begin = time.Now()
	s.MustCLI("nodes", "confirm-lost", "node-1")
	s.await(soon, "web", "it is replaced", func(v view) bool { return slices.Contains(v.serving(), last) })
	s.answers(20 * time.Second)
	t.Logf("served again %v after the loss was confirmed", time.Since(begin).Round(time.Millisecond))
	for _, n := range s.Nodes {
		if n.ID != gone {
			n.Heal()
		}
	}
	s.steady("web")
	s.answers(10 * time.Second)

	// It may join again, as a new node.
	s.rejoin(gone)
	s.Env.Await(soon, "it is back", func() bool { n, _ := s.listed(gone); return n.State == "online" && !n.Drained })
	s.MustCLI("nodes", "drain", gone)
	n, _ = s.listed(gone)
	require.True(t, n.Drained)
}

// rejoin joins a node again with a new token, as a user would.
func (s *scene) rejoin(id string) {
	s.t.Helper()
	n := s.node(id)
	n.Agent.Stop(5 * time.Second)
	var token string
	for line := range strings.Lines(s.MustCLI("token", "create", "--role", "node", "--id", id)) {
		if line = strings.TrimSpace(line); !strings.Contains(line, " ") {
			token = line
		}
	}
	out, err := n.Run(s.Env.Binary("./cmd/opfield-node"), "join", "--controller", s.Controller.HostPort(8480), "--token", "@"+n.WriteFile("token", token),
		"--id", id, "--identity-dir", n.Path("identity"))
	require.NoError(s.t, err, out)
	n.Agent.Start()
}
