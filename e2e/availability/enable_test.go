package availability

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// ENA-1, ENA-2, ENA-6, ENA-7, MOD-5, LOS-1, LOS-2, LOS-3, STP-2: a running
// container becomes a workload with three placements, its host dies and comes
// back.
func TestEnable_ThenHostLost(t *testing.T) {
	s := newScene(t, 4)
	id, started := s.web.ID(), s.web.Inspect().State.StartedAt
	run := s.traffic()
	s.enable("--mode", "replicated", "--replicas", "3", "--grace", "15s")
	s.lossless(run)
	now := s.web.Inspect()
	require.Equal(t, id, now.ID, "the container is the same")
	require.Equal(t, started, now.State.StartedAt, "and was not restarted")
	require.EqualValues(t, "no", now.HostConfig.RestartPolicy.Name, "RDY-4")
	before := s.view("web").serving()
	require.Len(t, before, 3)
	t.Log("\n" + s.MustCLI("ha", "get", "web"))

	run = s.traffic()
	victim := before[2]
	dead := s.endpoint(victim)
	for _, n := range s.Nodes {
		if n.ID == victim {
			cut := time.Now()
			n.Cut()
			s.Env.Await(20*time.Second, "the node is shown offline", func() bool { return s.nodeState(victim) == "offline" })
			t.Logf("%s shown offline after %v", victim, time.Since(cut).Round(time.Millisecond))
			s.await(90*time.Second, "web", "it is healed", func(v view) bool { return v.Serving == 3 && v.Operation == nil })
			op := s.last("web", "heal")
			t.Logf("heal began %v after the cut and was done after %v", op.StartedAt.Sub(cut).Round(time.Millisecond), op.FinishedAt.Sub(cut).Round(time.Millisecond))
			require.GreaterOrEqual(t, op.StartedAt.Sub(cut), 12*time.Second, "not before the grace, which counts from the last sign of life")
			require.NotContains(t, s.view("web").serving(), victim)
			require.NotEmpty(t, s.copies("web")[victim], "the cut-off host still runs its copy")
			n.Heal()
			s.Env.Await(60*time.Second, "the stale copy is removed", func() bool { return len(s.copies("web")[victim]) == 0 })
			break
		}
	}
	s.losslessBut(run, dead)
	s.steady("web")
}

func (s *scene) nodeState(node string) string {
	var out struct {
		Nodes []struct{ ID, State string }
	}
	s.json(&out, "nodes", "list")
	for _, n := range out.Nodes {
		if n.ID == node {
			return n.State
		}
	}
	return ""
}
