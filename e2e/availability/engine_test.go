package availability

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/system"
)

// restartEngine restarts a node's Docker daemon: in order, when it stops its
// containers itself, or by a crash, when the next daemon finds them running.
func (s *scene) restartEngine(n *system.Node, crash bool) {
	s.t.Helper()
	begin := time.Now()
	if crash {
		n.KillEngine()
	} else {
		n.Engine.Stop(30 * time.Second)
	}
	n.Engine.Start()
	require.NoError(s.t, n.AwaitEngine())
	s.t.Logf("the engine of %s was away for %v", n.ID, time.Since(begin).Round(time.Millisecond))
}

// RDY-4, STP-1, STP-4: whoever restarts Docker does not decide what runs. Of a
// stopped workload nothing starts; what served is started by the agent, as the
// same container, and the other placements answer meanwhile.
func TestEngine_Restarted(t *testing.T) {
	s := newScene(t, 3)
	s.enable("--mode", "replicated", "--replicas", "2", "--drain", "3s")
	serving := s.view("web").serving()
	require.Equal(t, "node-1", serving[0])
	kept := s.inspect("web")
	ways := map[string]bool{serving[0]: false, serving[1]: true} // node → by a crash

	// While it serves.
	for _, node := range serving {
		crash := ways[node]
		run, ops, dead := s.traffic(), len(s.operations("web")), s.endpoint(node)
		s.Env.Await(soon, "there is traffic", func() bool { return len(run.Results()) > 200 })
		begin := time.Now()
		s.restartEngine(s.node(node), crash)
		s.Env.Await(soon, "its copy serves again", func() bool {
			now := s.inspect("web")[node]
			return now.Running && now.Started != kept[node].Started && s.LinkState("web."+node+"/8080") == "open"
		})
		t.Logf("%s serves again %v after its engine began to end (crash: %v)", node, time.Since(begin).Round(time.Millisecond), crash)
		s.steady("web")
		s.losslessBut(run, dead)
		s.same(kept)
		require.Equal(t, kept[node].ID, s.view("web").container(node))
		require.Len(t, s.operations("web"), ops, "no operation was needed")
	}

	// While it is stopped.
	s.MustCLI("ha", "stop", "web", "--wait")
	s.await(10*time.Second, "web", "it is stopped", stopped)
	kept = s.inspect("web")
	ops := len(s.operations("web"))
	for _, node := range serving {
		s.restartEngine(s.node(node), ways[node])
	}
	s.Env.Await(soon, "every node is online", func() bool {
		return !slices.ContainsFunc(s.Nodes, func(n *system.Node) bool { return s.nodeState(n.ID) != "online" })
	})
	time.Sleep(5 * time.Second)
	require.Empty(t, s.running("web"), "nothing starts by itself")
	require.Equal(t, kept, s.inspect("web"))
	require.Len(t, s.operations("web"), ops)
	require.True(t, stopped(s.view("web")))

	// Start: exactly those that served.
	s.MustCLI("ha", "start", "web", "--wait")
	s.steady("web")
	s.same(kept)
	s.answers(10 * time.Second)
}
