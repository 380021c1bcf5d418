package availability

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// from reports whether the workload serves from exactly these nodes and rests.
func from(nodes ...string) func(view) bool {
	return func(v view) bool {
		return slices.Equal(v.ServingFrom, nodes) && slices.Equal(v.serving(), nodes) && v.Operation == nil
	}
}

func warns(v view, code string) bool {
	for _, w := range v.Warnings {
		if w.Code == code {
			return true
		}
	}
	return false
}

// PRI-1, PRI-2, PRI-4, PRI-6, PRI-7, ENA-1, LOS-1: a failover workload moves
// to its primary, to a backup when the primary is lost, and back.
func TestPriority_Failover(t *testing.T) {
	s := newScene(t, 3)
	id := s.web.ID()

	// ENA-1: it begins where it runs; PRI-2: then it moves to its primary.
	run, stop := s.traffic(), s.observe("web")
	out, err := s.CLI("ha", "enable", "web", "--wait", "--mode", "failover", "--priority", "node-2,node-1,node-3",
		"--failback-delay", "5s", "--grace", "5s", "--drain", "5s")
	t.Log("\n" + out)
	require.NoError(t, err)
	took := s.await(soon, "web", "it serves from its primary", from("node-2"))
	t.Logf("on the primary %v after enable was done", took.Round(time.Millisecond))
	seen := stop()
	s.lossless(run)
	s.always(seen, 1) // PRI-2: a placement serves throughout
	backup := slices.ContainsFunc(seen, func(v view) bool {
		return v.Primary == "node-2" && v.OnBackup && slices.Equal(v.ServingFrom, []string{"node-1"})
	})
	require.True(t, backup, "PRI-7: shown as on a backup before")
	require.False(t, s.view("web").OnBackup)
	require.Regexp(t, `Primary +node-2\n`, s.MustCLI("ha", "get", "web"))
	original := s.inspect("web")["node-1"]
	require.Equal(t, id, original.ID, "STP-2: the original is kept")
	require.False(t, original.Running, "and stopped")
	require.Len(t, s.ended("web", "failback"), 1)

	// LOS-1: the primary's host is lost.
	primary := s.node("node-2")
	run = s.traffic()
	cut := time.Now()
	primary.Cut()
	s.await(soon, "web", "the first backup serves", from("node-1"))
	heal := s.last("web", "heal")
	t.Logf("replacement began %v after the cut, done after %v", heal.StartedAt.Sub(cut).Round(time.Millisecond), heal.FinishedAt.Sub(cut).Round(time.Millisecond))
	require.GreaterOrEqual(t, heal.StartedAt.Sub(cut), 2*time.Second, "not before the grace, which counts from the last sign of life")
	v := s.view("web")
	require.True(t, v.OnBackup)
	require.Contains(t, s.MustCLI("ha", "get", "web"), "On backup")
	require.Equal(t, id, s.inspect("web")["node-1"].ID, "the original serves again")
	s.answers(10 * time.Second)
	t.Logf("no answer for %v", gap(run.Stop(), cut).Round(time.Millisecond))

	// PRI-2: it is back, and takes over after the delay.
	run, stop = s.traffic(), s.observe("web")
	back := time.Now()
	primary.Heal()
	s.await(soon, "web", "the primary serves", from("node-2"))
	seen = stop()
	s.lossless(run)
	failbacks := s.ended("web", "failback")
	require.Len(t, failbacks, 2)
	t.Logf("failback began %v after the host's return, done after %v", failbacks[0].StartedAt.Sub(back).Round(time.Millisecond), failbacks[0].FinishedAt.Sub(back).Round(time.Millisecond))
	require.GreaterOrEqual(t, failbacks[0].StartedAt.Sub(back), 5*time.Second)
	s.always(seen, 1)

	// PRI-6: without room for a second copy it stays on the backup.
	s.MustCLI("ha", "update", "web", "--wait", "--max-surge", "0")
	require.True(t, warns(s.view("web"), "AVAILABILITY_FAILBACK_NEEDS_SURGE"))
	primary.Cut()
	s.await(soon, "web", "the first backup serves", from("node-1"))
	primary.Heal()
	s.Env.Await(soon, "the primary is online", func() bool { return s.nodeState("node-2") == "online" })
	s.answers(10 * time.Second)
	run, stop = s.traffic(), s.observe("web")
	time.Sleep(9 * time.Second) // the delay and more
	for _, v := range stop() {
		require.NotContains(t, v.ServingFrom, "node-2")
		require.True(t, warns(v, "AVAILABILITY_FAILBACK_NEEDS_SURGE"))
	}
	require.Len(t, s.ended("web", "failback"), 2)
	s.MustCLI("ha", "update", "web", "--wait", "--max-surge", "1")
	s.await(soon, "web", "the primary serves", from("node-2"))
	s.lossless(run)
}

// PRI-3: a primary that comes and goes never takes the traffic back.
func TestPriority_Flapping(t *testing.T) {
	s := newScene(t, 3)
	primary := s.node("node-2")
	primary.Cut()
	s.Env.Await(soon, "the primary is offline", func() bool { return s.nodeState("node-2") == "offline" })
	s.enable("--mode", "failover", "--priority", "node-2,node-1,node-3", "--failback-delay", "10s", "--grace", "5s", "--drain", "5s")
	run, stop := s.traffic(), s.observe("web")
	for range 3 {
		primary.Heal()
		time.Sleep(4 * time.Second)
		primary.Cut()
		time.Sleep(7 * time.Second)
	}
	healed := time.Now()
	primary.Heal()
	seen := stop()
	for _, v := range seen {
		require.Equal(t, []string{"node-1"}, v.ServingFrom)
		require.True(t, v.OnBackup)
	}
	require.Empty(t, s.ended("web", "failback"))
	s.await(soon, "web", "the primary serves", from("node-2"))
	op := s.last("web", "failback")
	t.Logf("failback began %v after the last return", op.StartedAt.Sub(healed).Round(time.Millisecond))
	require.GreaterOrEqual(t, op.StartedAt.Sub(healed), 10*time.Second)
	s.lossless(run)

	// A controller's restart starts the delay again: nothing moves at once.
	s.MustCLI("ha", "update", "web", "--wait", "--priority", "node-3,node-2,node-1", "--failback-delay", "1h")
	s.Controller.Process.Restart(10 * time.Second)
	s.Env.Await(soon, "the controller answers", func() bool { _, err := s.CLI("ha", "get", "web"); return err == nil })
	again := time.Now()
	s.MustCLI("ha", "update", "web", "--wait", "--failback-delay", "8s")
	s.await(soon, "web", "the new primary serves", from("node-3"))
	op = s.last("web", "failback")
	t.Logf("failback began %v after the controller's restart", op.StartedAt.Sub(again).Round(time.Millisecond))
	require.GreaterOrEqual(t, op.StartedAt.Sub(again), 6*time.Second)
}

// PRI-1, PRI-2, STP-2: the replicas of a replicated workload move to the first
// nodes of the order, one after another.
func TestPriority_Replicated(t *testing.T) {
	s := newScene(t, 4)
	run, stop := s.traffic(), s.observe("web")
	s.enable("--mode", "replicated", "--replicas", "2", "--drain", "5s")
	enabled := time.Now()
	s.MustCLI("ha", "update", "web", "--wait", "--priority", "node-3,node-4,node-1,node-2", "--failback-delay", "2s")
	s.await(soon, "web", "it serves from the first two", from("node-3", "node-4"))
	t.Logf("moved %v after the order was set", time.Since(enabled).Round(time.Millisecond))
	seen := stop()
	s.lossless(run)
	s.always(seen, 2) // PRI-2: as many serve as wanted throughout
	original := s.inspect("web")["node-1"]
	require.Equal(t, s.web.ID(), original.ID)
	require.False(t, original.Running)
	require.False(t, s.view("web").OnBackup)
}
