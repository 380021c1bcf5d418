package e2e

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/load"
	"github.com/opfield/availability/e2e/system"
)

// The promises of RLY-2, LNK-4 and LNK-5.
const (
	dropWithin    = 3500 * time.Millisecond
	closeWithin   = 100 * time.Millisecond
	requestWithin = 3700 * time.Millisecond
	connectWithin = 2.2 // seconds
	rounds        = 20
	betweenRounds = 1500 * time.Millisecond // so that every round is one fault, not two
)

// RLY-2, LNK-4, LNK-5, RTE-3: a host that is cut off under load.
func TestNodeLoss_HostCut(t *testing.T) {
	sc := newScene(t, system.Config{Relays: 2, Nodes: 3}, true)
	dead := map[string]bool{sc.endpoint(link("node-1")): true, sc.endpoint(link("node-2")): true}
	type window struct {
		node     string
		from, to time.Time
	}
	var windows []window
	var drops, closes []time.Duration
	before, err := sc.IngressStatus()
	require.NoError(t, err)
	run := sc.steady(10 * time.Minute)
	for i := range rounds {
		n := sc.Nodes[i%2]
		sc.Env.Await(10*time.Second, "load flows", func() bool { return len(run.Results()) > 200 })
		cut := time.Now()
		n.Cut()
		var first, last time.Time
		sc.Env.Await(6*time.Second, "the relays drop "+n.ID, func() bool {
			first, last = sc.DroppedAt(n.ID, cut)
			return !last.IsZero() && last != first
		})
		sc.Env.Await(time.Second, "the link leaves routing", func() bool { return sc.LinkState(link(n.ID)) != "open" })
		closed := sc.since(link(n.ID))
		drops = append(drops, last.Sub(cut))
		closes = append(closes, max(closed.Sub(last), 0))
		require.Less(t, last.Sub(cut), dropWithin, "round %d", i)
		require.Less(t, closed.Sub(last), closeWithin, "round %d", i)
		n.Heal()
		sc.AwaitLinks(15*time.Second, "open", link(n.ID))
		windows = append(windows, window{n.ID, cut, time.Now()})
		<-time.After(betweenRounds)
	}
	report := run.Stop()
	// RTE-8: a failover and its return within 30 s reload nothing.
	after, err := sc.IngressStatus()
	require.NoError(t, err)
	require.Equal(t, before.Reload.Generation, after.Reload.Generation)
	require.Equal(t, before.Reload.At, after.Reload.At)
	t.Logf("dropped after: %s", percent(drops))
	t.Logf("link closed after the drop: %s", percent(closes))
	t.Logf("\n%s", report)
	failed := sc.requirePOSTsSentTo(report, func(f load.Result, by string) bool {
		for _, w := range windows {
			if f.Start.Add(f.Latency).After(w.from) && f.Start.Before(w.to) && by == w.node+"/web" {
				return false
			}
		}
		return true
	}, dead)
	t.Logf("failed POSTs, all of them sent to the dead host: %d of %d", failed, len(report.Select(func(r load.Result) bool { return r.Method == "POST" })))
	sc.logSlowest(report, 8)
	require.LessOrEqual(t, report.Latency(nil).Max, requestWithin)
	worst := 0.0
	for _, a := range sc.AccessLog() {
		for _, try := range a.Tries {
			worst = max(worst, try.Connect)
		}
	}
	t.Logf("slowest connect of nginx to a link: %.3f s", worst)
	require.LessOrEqual(t, worst, connectWithin)
}

// RDY-2, RDY-3, RTE-3: a serving container is killed under load.
func TestNodeLoss_ContainerKilled(t *testing.T) {
	sc := newScene(t, system.Config{Relays: 1, Nodes: 3}, true)
	dead := map[string]bool{sc.endpoint(link("node-1")): true, sc.endpoint(link("node-2")): true}
	var closes []time.Duration
	var kills [][2]time.Time // from the call, which takes its time, until the link was closed
	run := sc.steady(10 * time.Minute)
	for i := range rounds {
		n := sc.Nodes[i%2]
		sc.Env.Await(10*time.Second, "load flows", func() bool { return len(run.Results()) > (i+1)*100 })
		killed := time.Now()
		sc.apps[n.ID].Kill("KILL")
		sc.Env.Await(2*time.Second, "the link leaves routing", func() bool { return sc.LinkState(link(n.ID)) != "open" })
		gone := sc.since(link(n.ID))
		kills = append(kills, [2]time.Time{killed, gone})
		closed := gone.Sub(killed)
		closes = append(closes, closed)
		require.Less(t, closed, 200*time.Millisecond, "round %d", i)
		sc.apps[n.ID].Start()
		sc.AwaitLinks(15*time.Second, "open", link(n.ID))
		<-time.After(betweenRounds)
	}
	report := run.Stop()
	t.Logf("link closed after docker kill: %s", percent(closes))
	t.Logf("\n%s", report)
	failed := sc.requirePOSTsSentTo(report, func(load.Result, string) bool { return false }, dead)
	// What is in the dead container's socket counts as with it: nobody can
	// tell whether it had been read.
	for _, f := range report.Failed("POST") {
		ended := f.Start.Add(f.Latency)
		require.True(t, slices.ContainsFunc(kills, func(k [2]time.Time) bool {
			return f.Start.Before(k[1]) && ended.After(k[0])
		}), "POST %s failed away from any kill", f.ID)
	}
	t.Logf("failed POSTs, all of them with their container when it died: %d", failed)
}

// RDY-2, LNK-2: docker stop of an application that drains loses nothing.
func TestNodeLoss_GracefulStop(t *testing.T) {
	sc := newScene(t, system.Config{Relays: 1, Nodes: 2}, false)
	run := sc.steady(5 * time.Minute)
	for i := range 4 {
		n := sc.Nodes[i%2]
		sc.Env.Await(10*time.Second, "load flows", func() bool { return len(run.Results()) > (i+1)*300 })
		sc.apps[n.ID].Stop(20)
		sc.apps[n.ID].Start()
		sc.AwaitLinks(15*time.Second, "open", link(n.ID))
	}
	report := run.Stop()
	t.Logf("\n%s", report)
	require.Empty(t, report.Failed(""), report.Describe(report.Failed(""), 20))
	require.Empty(t, report.Join(sc.Env.Deliveries()).DoubledBy("POST"))
}

// RLY-2: a busy host stays, a hung agent goes after 10 s.
func TestNodeLoss_BusyAndHung(t *testing.T) {
	sc := newScene(t, system.Config{Relays: 1, Nodes: 2}, false)
	n := sc.Nodes[0]
	burn := n.Start("burn", sc.Env.Binary("./e2e/testapp"), "burn")
	run := sc.steady(time.Minute)
	paused := time.Now()
	n.Agent.Pause()
	<-time.After(2 * time.Second)
	require.Equal(t, "open", sc.LinkState(link(n.ID)))
	n.Agent.Continue()
	<-time.After(2 * time.Second)
	first, _ := sc.DroppedAt(n.ID, paused)
	require.True(t, first.IsZero(), "a busy node was dropped")
	burn.Kill()

	hung := time.Now()
	n.Agent.Pause()
	sc.Env.Await(15*time.Second, "the hung agent is dropped", func() bool {
		first, _ = sc.DroppedAt(n.ID, hung)
		return !first.IsZero()
	})
	t.Logf("hung agent dropped after %v", first.Sub(hung).Round(time.Millisecond))
	require.InDelta(t, 10, first.Sub(hung).Seconds(), 1.5)
	n.Agent.Continue()
	sc.AwaitLinks(15*time.Second, "open", link(n.ID))
	report := run.Stop()
	require.Empty(t, report.Join(sc.Env.Deliveries()).DoubledBy("POST"))
}
