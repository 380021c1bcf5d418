package engine_test

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/bus/bustest"
	"github.com/opfield/availability/policy"
	"github.com/opfield/availability/policy/engine/enginetest"
)

func names(prefix string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("%s-%d", prefix, i+1)
	}
	return out
}

// limited counts the operations at work that count against the limit.
func limited(k *enginetest.Controller) int {
	n := 0
	for _, v := range k.List() {
		if op := v.Operation; op != nil && op.Type.Limited() && op.Status == policy.Running {
			n++
		}
	}
	return n
}

// mostAtOnce returns how many of the operations ran at the same moment.
func mostAtOnce(ops []policy.Operation) int {
	type edge struct {
		at time.Time
		by int
	}
	var edges []edge
	for _, op := range ops {
		edges = append(edges, edge{op.StartedAt, 1}, edge{op.FinishedAt, -1})
	}
	slices.SortFunc(edges, func(a, b edge) int {
		if r := a.at.Compare(b.at); r != 0 {
			return r
		}
		return a.by - b.by
	})
	now, most := 0, 0
	for _, e := range edges {
		now += e.by
		most = max(most, now)
	}
	return most
}

func TestHeal_HundredPoliciesFourAtATime(t *testing.T) { // OPS-2, OPS-4
	const policies = 100
	c := enginetest.New(t, 12)
	k := c.Start()
	awaitLead(t, k, time.Second)
	// All of them run on the two nodes that will be lost.
	all := names("web", policies)
	enabled(t, c, k, "node-1", failover(), all[:policies/2]...)
	enabled(t, c, k, "node-2", failover(), all[policies/2:]...)
	enabled(t, c, k, "node-3", failover(), "other")
	require.True(t, until(soon, func() bool { return c.Created("other") == 0 && limited(k) == 0 }))
	for _, w := range all {
		require.Zero(t, c.Created(w), w)
	}
	c.SetPace(enginetest.Brisk())

	var sampled atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	bustest.Go(t, func(context.Context) error {
		until(2*time.Minute, func() bool {
			sampled.Store(max(sampled.Load(), int64(limited(k))))
			return ctx.Err() != nil
		})
		return nil
	})
	begin := time.Now()
	c.Lose(c.Node("node-1"), c.Node("node-2"))

	// A stop of another policy waits for none of them.
	require.True(t, until(soon, func() bool { return limited(k) == policy.MaxLimited }))
	asked := time.Now()
	_, err := k.Do(t.Context(), "other", policy.Stop)
	require.NoError(t, err)
	require.True(t, until(soon, func() bool { return len(history(t, k, "other", policy.Stop)) == 1 && !c.Node("node-3").Runs("other") }))
	stop := time.Since(asked)
	require.Equal(t, policy.Completed, history(t, k, "other", policy.Stop)[0].Status)

	var ops []policy.Operation
	for _, w := range all {
		idle(t, k, w, 3*time.Minute)
		heals := history(t, k, w, policy.Heal)
		require.Len(t, heals, 1, w)
		require.Equal(t, policy.Completed, heals[0].Status, w)
		require.Equal(t, 1, c.Created(w), w)
		require.Len(t, c.Running(w), 1, w)
		noStepTwice(t, k, w)
		ops = append(ops, heals...)
	}
	took := time.Since(begin)
	cancel()
	require.LessOrEqual(t, stop, 2*time.Second)
	require.Less(t, stop, took/4, "it waited for others")
	require.Equal(t, policy.MaxLimited, mostAtOnce(ops), "by their times")
	require.EqualValues(t, policy.MaxLimited, sampled.Load(), "by samples")
	// In the order they were asked for (those of the same moment by their
	// jitter and name).
	t.Logf("100 policies of 2 lost nodes healed in %v, 4 at a time; a stop meanwhile took %v", took.Round(time.Millisecond), stop.Round(time.Millisecond))
}
