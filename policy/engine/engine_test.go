package engine_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
	"github.com/opfield/availability/policy/engine"
	"github.com/opfield/availability/policy/engine/enginetest"
)

const (
	soon = 15 * time.Second
	poll = 10 * time.Millisecond
)

// failover is the settings of most tests: nothing is waited for.
func failover() policy.Settings {
	s := policy.DefaultSettings(policy.Failover)
	s.ReplacementGraceSeconds, s.DrainSeconds = 0, 0
	return s
}

func replicated(n int) policy.Settings {
	s := policy.DefaultSettings(policy.Replicated)
	s.Replicas, s.ReplacementGraceSeconds, s.DrainSeconds = n, 0, 0
	return s
}

func awaitLead(t *testing.T, k *enginetest.Controller, within time.Duration) time.Duration {
	t.Helper()
	begin := time.Now()
	require.Eventually(t, k.Leads, within, poll)
	return time.Since(begin)
}

// enabled runs workloads on a node and makes them available.
func enabled(t *testing.T, c *enginetest.Cluster, k *enginetest.Controller, node string, s policy.Settings, workloads ...string) {
	t.Helper()
	known(t, c, k)
	for _, w := range workloads {
		c.Node(node).Run(w)
		_, err := k.Enable(t.Context(), w, node, s)
		require.NoError(t, err)
	}
	for _, w := range workloads {
		idle(t, k, w, soon)
	}
}

// known waits until every node was heard.
func known(t *testing.T, c *enginetest.Cluster, k *enginetest.Controller) {
	t.Helper()
	require.Eventually(t, func() bool {
		heard := 0
		for _, n := range k.Nodes() {
			if n.Known {
				heard++
			}
		}
		return heard == len(c.Nodes)
	}, soon, poll)
}

// idle waits until a policy is healthy and nothing is at work.
func idle(t *testing.T, k *enginetest.Controller, workload string, within time.Duration) policy.View {
	t.Helper()
	var v policy.View
	if !until(within, func() bool {
		v, _ = k.Get(workload)
		return v.Health == policy.Healthy && v.Operation == nil
	}) {
		ops, _ := k.Operations(workload)
		t.Fatalf("%s is not healthy: %+v\noperations %+v", workload, v, ops)
	}
	return v
}

func until(within time.Duration, ok func() bool) bool {
	end := time.NewTimer(within)
	defer end.Stop()
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for !ok() {
		select {
		case <-end.C:
			return ok()
		case <-tick.C:
		}
	}
	return true
}

// history returns the operations of one type that ended.
func history(t *testing.T, k *enginetest.Controller, workload string, kind policy.Type) []policy.Operation {
	t.Helper()
	all, err := k.Operations(workload)
	require.NoError(t, err)
	var out []policy.Operation
	for _, op := range all {
		if op.Type == kind && !op.FinishedAt.IsZero() {
			out = append(out, op)
		}
	}
	return out
}

func serving(v policy.View) []string {
	var out []string
	for _, p := range v.Placements {
		if p.Ready {
			out = append(out, p.Node)
		}
	}
	return out
}

// noStepTwice checks the steps of every operation (OPS-3).
func noStepTwice(t *testing.T, k *enginetest.Controller, workload string) {
	t.Helper()
	all, err := k.Operations(workload)
	require.NoError(t, err)
	for _, op := range all {
		seen := map[string]bool{}
		for _, s := range op.Steps {
			if seen[s.Name] {
				t.Errorf("%s: step %q was done twice", op.ID, s.Name)
			}
			seen[s.Name] = true
		}
	}
}

func refusal(t *testing.T, err error, code policy.Code) *policy.Refusal {
	t.Helper()
	var r *policy.Refusal
	require.ErrorAs(t, err, &r)
	require.Equal(t, code, r.Code, r.Message)
	return r
}

func keys(t *testing.T, c *enginetest.Cluster, bucket string) []string {
	t.Helper()
	all, err := c.NATS.Store.Read(t.Context(), bucket)
	require.NoError(t, err)
	var out []string
	for key := range all {
		out = append(out, key)
	}
	return out
}

func TestEngine_LifeOfAPolicy(t *testing.T) {
	c := enginetest.New(t, 4)
	k := c.Start()
	awaitLead(t, k, time.Second)
	enabled(t, c, k, "node-1", failover(), "web")
	v := idle(t, k, "web", soon)
	require.Equal(t, uint64(1), v.Version)
	require.True(t, until(soon, func() bool { return len(keys(t, c, bus.BucketMembers)) == 1 }))

	// Watch tells the next change.
	_, changed, ok := k.Watch("web")
	require.True(t, ok)
	op, err := k.Do(t.Context(), "web", policy.Restart)
	require.NoError(t, err)
	select {
	case <-changed:
	case <-time.After(time.Second):
		t.Fatal("nothing changed")
	}
	idle(t, k, "web", soon)
	require.Equal(t, op.ID, history(t, k, "web", policy.Restart)[0].ID)

	// A new version, then the end.
	env := "2"
	_, err = k.Rollout(t.Context(), "web", policy.Change{Env: map[string]*string{"VERSION": &env}})
	require.NoError(t, err)
	require.True(t, until(soon, func() bool { return len(history(t, k, "web", policy.Rollout)) == 1 }))
	v = idle(t, k, "web", soon)
	require.Greater(t, v.Version, uint64(1))
	require.Equal(t, policy.Completed, history(t, k, "web", policy.Rollout)[0].Status)
	noStepTwice(t, k, "web")
	survivor := serving(v)[0]

	_, err = k.Disable(t.Context(), "web", policy.DisableRequest{Survivor: survivor})
	refusal(t, err, policy.CodeConfirmation)
	_, changed, _ = k.Watch("web")
	_, err = k.Disable(t.Context(), "web", policy.DisableRequest{Survivor: survivor, Confirm: "web"})
	require.NoError(t, err)
	<-changed
	_, err = k.Do(t.Context(), "web", policy.Start)
	refusal(t, err, policy.CodeDisableInProgress)
	require.True(t, until(soon, func() bool { _, there := k.Get("web"); return !there }))

	// Nothing of it is left in the buckets.
	require.Empty(t, keys(t, c, bus.BucketPolicies))
	require.Empty(t, keys(t, c, bus.BucketMembers))
	require.True(t, until(soon, func() bool {
		all, err := c.NATS.Store.Read(t.Context(), bus.BucketDesired)
		for _, e := range all {
			if string(e.Value) != "{}" { // the index of a node
				return false
			}
		}
		return err == nil
	}))
	require.Equal(t, []string{survivor}, c.Running("web"))

	_, err = k.Do(t.Context(), "web", policy.Start)
	refusal(t, err, policy.CodeUnknown)
	_, err = k.Operations("web")
	refusal(t, err, policy.CodeUnknown)
}

func TestEngine_GenerationsGoOnAfterTheEnd(t *testing.T) {
	c := enginetest.New(t, 3)
	k := c.Start()
	awaitLead(t, k, time.Second)
	enabled(t, c, k, "node-1", failover(), "web")
	for i := range 3 {
		env := fmt.Sprint(i)
		_, err := k.Rollout(t.Context(), "web", policy.Change{Env: map[string]*string{"VERSION": &env}})
		require.NoError(t, err)
		require.True(t, until(soon, func() bool { return len(history(t, k, "web", policy.Rollout)) == i+1 }))
		idle(t, k, "web", soon)
	}
	old := c.Fleet.Generation("web")
	require.Greater(t, old, uint64(3))
	v := idle(t, k, "web", soon)
	survivor := serving(v)[0]
	_, err := k.Disable(t.Context(), "web", policy.DisableRequest{Survivor: survivor, Confirm: "web"})
	require.NoError(t, err)
	require.True(t, until(soon, func() bool { _, there := k.Get("web"); return !there }))

	// At once: nodes may not have heard that the records are gone.
	again := policy.EnableRequest{Workload: "web", Node: survivor, Container: "web", Settings: failover()}
	op, err := k.Engine.Enable(t.Context(), again)
	require.NoError(t, err)
	v = idle(t, k, "web", soon)
	require.Greater(t, v.Version, old, "subscribers ignore older generations")
	require.Equal(t, []string{survivor}, c.Running("web"), "adopted as it runs")
	require.NotEqual(t, "web-3", op.ID, "operations are not mixed up either")

	// The first version is still the one whose image only the origin has, and
	// it is replaced after a loss as ever.
	c.Lose(c.Node(survivor))
	require.True(t, until(soon, func() bool { return len(c.Running("web")) == 1 }))
	v = idle(t, k, "web", soon)
	require.Greater(t, v.Version, old)

	// The same after a restart of the controller, which remembers nothing.
	k.Stop()
	k = c.Start()
	awaitLead(t, k, time.Second)
	survivor = serving(idle(t, k, "web", soon))[0]
	c.Fleet.Remove(func() string { // the lost one is not waited for
		for _, n := range k.Nodes() {
			if n.State == policy.NodeOffline {
				return n.ID
			}
		}
		return ""
	}())
	_, err = k.Disable(t.Context(), "web", policy.DisableRequest{Survivor: survivor, Confirm: "web"})
	require.NoError(t, err)
	require.True(t, until(soon, func() bool { _, there := k.Get("web"); return !there }))
	require.GreaterOrEqual(t, c.Fleet.Generation("web"), v.Version)
}

func TestEngine_EnableTwice(t *testing.T) {
	c := enginetest.New(t, 3)
	k := c.Start()
	awaitLead(t, k, time.Second)
	known(t, c, k)
	c.Node("node-1").Run("web")
	errs := make([]error, 4)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { _, errs[i] = k.Enable(t.Context(), "web", "node-1", failover()) })
	}
	wg.Wait()
	good := 0
	for _, err := range errs {
		if err == nil {
			good++
			continue
		}
		r := refusal(t, err, policy.CodePreflight)
		require.Contains(t, []policy.Code{policy.CodeExists, policy.CodePlacementManaged}, r.Eligibility.Blockers[0].Code)
	}
	require.Equal(t, 1, good)
	idle(t, k, "web", soon)
	require.Zero(t, c.Created("web"), "it was adopted")
}

func TestEngine_Refuses(t *testing.T) {
	c := enginetest.New(t, 3)
	k := c.Start()
	awaitLead(t, k, time.Second)
	ctx := t.Context()
	enabled(t, c, k, "node-1", failover(), "web")

	s := failover()
	s.Selection, s.Nodes = policy.SelectedNodes, []string{"node-1", "node-9"}
	_, err := k.Update(ctx, "web", s)
	r := refusal(t, err, policy.CodeNodeUnknown)
	require.Equal(t, "nodes[1]", r.Violations[0].Field)
	s = failover()
	s.PriorityMode, s.NodePriority = true, []string{"node-7"}
	_, err = k.Update(ctx, "web", s)
	require.Equal(t, "nodePriority[0]", refusal(t, err, policy.CodeNodeUnknown).Violations[0].Field)
	s = failover()
	s.Replicas = 3
	_, err = k.Update(ctx, "web", s)
	refusal(t, err, policy.CodeSettings)
	_, err = k.Update(ctx, "shop", failover())
	refusal(t, err, policy.CodeUnknown)
	_, err = k.Enable(ctx, "web", "node-9", failover())
	refusal(t, err, policy.CodeNodeUnknown)
	_, err = k.Enable(ctx, "shop", "node-1", failover())
	refusal(t, err, policy.CodeContainerUnknown)
	_, err = k.Retry(ctx, "web", "web-99")
	refusal(t, err, policy.CodeOperationUnknown)
	_, err = k.Rollout(ctx, "web", policy.Change{})
	refusal(t, err, policy.CodeChangeEmpty)
	refusal(t, k.ConfirmLost(ctx, "node-1"), policy.CodeNodeNotLost)
	refusal(t, k.ConfirmLost(ctx, "node-9"), policy.CodeNodeUnknown)
	refusal(t, k.DrainNode(ctx, "node-9"), policy.CodeNodeUnknown)
	require.Contains(t, refusal(t, k.RemoveNode(ctx, "node-1"), policy.CodeNodeInUse).Message, "web")
	refusal(t, k.RemoveNode(ctx, "node-9"), policy.CodeNodeUnknown)
	require.Equal(t, uint64(1), idle(t, k, "web", soon).Version)
}

func TestEngine_DrainAndRemoveNode(t *testing.T) {
	c := enginetest.New(t, 4)
	k := c.Start()
	awaitLead(t, k, time.Second)
	ctx := t.Context()
	enabled(t, c, k, "node-1", replicated(2), "web", "shop")
	var node string
	for _, p := range idle(t, k, "web", soon).Placements {
		if p.Want == placement.WantServing && !p.Original {
			node = p.Node
		}
	}
	refusal(t, k.RemoveNode(ctx, node), policy.CodeNodeInUse)
	require.Error(t, k.RenameNode(ctx, node, "rack\n7"))
	require.NoError(t, k.RenameNode(ctx, node, "rack 7"))
	require.NoError(t, k.DrainNode(ctx, node))
	require.True(t, until(soon, func() bool {
		return !c.Node(node).Exists("web") && !c.Node(node).Exists("shop") && len(c.Running("web")) == 2
	}))
	idle(t, k, "web", soon)
	idle(t, k, "shop", soon)
	require.NoError(t, k.RemoveNode(ctx, node))
	require.NotContains(t, c.Fleet.PolicyNodes(), node)
	require.Empty(t, keys(t, c, bus.BucketNodes))

	// It joins again under the same name, and can be drained again.
	c.Fleet.Set(node, policy.NodeOnline)
	require.NoError(t, k.DrainNode(ctx, node))
	require.NoError(t, k.UndrainNode(ctx, node))
	for _, n := range k.Nodes() {
		require.Empty(t, n.Name)
		require.False(t, n.Drained)
	}
}

func TestEngine_RestartChangesNothing(t *testing.T) {
	c := enginetest.New(t, 6)
	k := c.Start()
	awaitLead(t, k, time.Second)
	all := names("web", 5)
	enabled(t, c, k, "node-1", replicated(2), all...)
	quiet := func() bool {
		before := k.Store.Writes()
		<-time.After(time.Second)
		return k.Store.Writes() == before
	}
	require.True(t, until(soon, quiet))
	before, err := c.NATS.Store.Read(t.Context(), bus.BucketPolicies)
	require.NoError(t, err)
	k.Stop()
	// Nodes are online at once, and tell what they have a little later.
	k = c.Start()
	awaitLead(t, k, time.Second)
	known(t, c, k)
	require.True(t, until(soon, quiet))
	after, err := c.NATS.Store.Read(t.Context(), bus.BucketPolicies)
	require.NoError(t, err)
	require.Equal(t, before, after)
}

func TestEngine_ConfirmLost(t *testing.T) { // LOS-4
	c := enginetest.New(t, 3)
	k := c.Start()
	awaitLead(t, k, time.Second)
	enabled(t, c, k, "node-1", failover(), "web")
	c.Node("node-1").Kill()
	c.Fleet.Set("node-1", policy.NodeNotReporting)
	require.False(t, until(time.Second, func() bool { return len(c.Running("web")) > 0 }), "nothing is moved on a suspicion")
	require.NoError(t, k.ConfirmLost(t.Context(), "node-1"))
	require.True(t, until(soon, func() bool { return len(c.Running("web")) == 1 }))
	idle(t, k, "web", soon)
}

func TestEngine_LeavesNothingBehind(t *testing.T) {
	before := goleak.IgnoreCurrent()
	t.Run("session", func(t *testing.T) {
		c := enginetest.New(t, 3)
		k := c.Start()
		awaitLead(t, k, time.Second)
		enabled(t, c, k, "node-1", failover(), "web")
		k.Stop()
		// The engine alone is gone before anything else ends.
		require.ErrorIs(t, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			return k.DrainNode(ctx, "node-1")
		}(), engine.ErrNotReady)
	})
	goleak.VerifyNone(t, before)
}

func TestEngine_ChangedByHandIsToldOnce(t *testing.T) { // OBS-2, MOD-4
	c := enginetest.New(t, 2)
	log := &lines{}
	listen := func(cfg *engine.Config) {
		cfg.Alone = true
		cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	}
	told := func() int { return log.count("changed by hand") }
	k := c.Start(listen)
	enabled(t, c, k, "node-1", failover(), "web")
	c.Node("node-1").ByHand("web", "it was stopped")
	require.True(t, until(soon, func() bool { return told() == 1 }))
	idle(t, k, "web", soon)
	for i, end := range []func(*enginetest.Controller){(*enginetest.Controller).Stop, (*enginetest.Controller).Kill} {
		end(k)
		k = c.Start(listen)
		awaitLead(t, k, soon)
		known(t, c, k)
		require.False(t, until(time.Second, func() bool { return told() != i+1 }), "a restart tells nothing again")
		c.Node("node-1").ByHand("web", "it was stopped again")
		require.True(t, until(soon, func() bool { return told() == i+2 }))
	}
	require.Equal(t, 1, log.count("it was stopped\""))
}

// lines keeps what is logged.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), text)
}
