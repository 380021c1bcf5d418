package engine_test

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/policy"
	"github.com/opfield/availability/policy/engine"
	"github.com/opfield/availability/policy/engine/enginetest"
)

func alone(cfg *engine.Config) { cfg.Alone = true }

// only checks that one controller at most leads, until the test ends.
func only(t *testing.T, all ...*enginetest.Controller) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		until(5*time.Minute, func() bool {
			leads := 0
			for _, k := range all {
				if k.Leads() {
					leads++
				}
			}
			if leads > 1 {
				t.Error("two controllers lead")
				return true
			}
			return ctx.Err() != nil
		})
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
}

func TestLeader_TheOtherRefuses(t *testing.T) {
	c := enginetest.New(t, 3)
	a := c.Start()
	awaitLead(t, a, time.Second)
	enabled(t, c, a, "node-1", failover(), "web")
	b := c.Start()
	only(t, a, b)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	begin := time.Now()
	_, err := b.Do(ctx, "web", policy.Stop)
	require.ErrorIs(t, err, engine.ErrNotReady)
	require.Less(t, time.Since(begin), 2*time.Second)
	require.ErrorIs(t, b.DrainNode(ctx, "node-1"), engine.ErrNotReady)
	c.Fleet.Set("node-3", policy.NodeNotReporting)
	require.ErrorIs(t, b.ConfirmLost(ctx, "node-3"), engine.ErrNotReady, "the one that leads would not hear of it")
	c.Fleet.Set("node-3", policy.NodeOnline)
	_, err = b.Operations("web")
	require.ErrorIs(t, err, engine.ErrNotReady)
	_, err = b.Check(ctx, policy.EnableRequest{Workload: "other", Node: "node-1", Container: "other"})
	require.ErrorIs(t, err, engine.ErrNotReady)
	require.ErrorIs(t, b.Known(), engine.ErrNotReady, "it must not say that there is no policy")
	require.NoError(t, a.Known())
	require.False(t, b.Leads())
	require.Empty(t, history(t, a, "web", policy.Stop))

	// A graceful end hands over at once.
	begin = time.Now()
	a.Stop()
	awaitLead(t, b, soon)
	took := time.Since(begin)
	t.Logf("after a graceful stop the other leads in %v", took.Round(time.Millisecond))
	require.Less(t, took, 1500*time.Millisecond)
	require.NoError(t, b.Known())
	idle(t, b, "web", soon)
}

func TestLeader_KilledAtWork(t *testing.T) { // OPS-3
	c := enginetest.New(t, 5)
	a := c.Start()
	awaitLead(t, a, time.Second)
	all := names("web", 8)
	enabled(t, c, a, "node-1", failover(), all...)
	b := c.Start()
	c.SetPace(enginetest.Brisk())
	c.Lose(c.Node("node-1"))
	env := "2"
	require.True(t, until(soon, func() bool { return limited(a) == policy.MaxLimited }))
	begin := time.Now()
	a.Kill()
	awaitLead(t, b, 20*time.Second)
	took := time.Since(begin)
	t.Logf("after the leader was killed the other leads in %v", took.Round(time.Millisecond))
	require.Less(t, took, 15*time.Second)
	for _, w := range all {
		idle(t, b, w, time.Minute)
		require.Equal(t, 1, c.Created(w), w)
		require.Len(t, c.Running(w), 1, w)
		require.Len(t, history(t, b, w, policy.Heal), 1, w)
		noStepTwice(t, b, w)
	}
	_, err := b.Rollout(t.Context(), "web-1", policy.Change{Env: map[string]*string{"VERSION": &env}})
	require.NoError(t, err)
	require.True(t, until(soon, func() bool { return len(history(t, b, "web-1", policy.Rollout)) == 1 }))
}

func TestLeader_Restarts(t *testing.T) {
	for _, test := range []struct {
		name   string
		end    func(*enginetest.Controller)
		tune   []func(*engine.Config)
		within time.Duration
	}{
		{"graceful", (*enginetest.Controller).Stop, nil, time.Second},
		{"killed", (*enginetest.Controller).Kill, nil, 10 * time.Second},
		{"killed and alone", (*enginetest.Controller).Kill, []func(*engine.Config){alone}, time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := enginetest.New(t, 3)
			k := c.Start(test.tune...)
			awaitLead(t, k, time.Second)
			enabled(t, c, k, "node-1", failover(), "web")
			test.end(k)
			k = c.Start(test.tune...)
			took := awaitLead(t, k, soon)
			t.Logf("leads again in %v", took.Round(time.Millisecond))
			require.Less(t, took, test.within)
			idle(t, k, "web", soon)
			require.Zero(t, c.Created("web"))
		})
	}
}

func TestLeader_NATSAway(t *testing.T) {
	c := enginetest.New(t, 4)
	k := c.Start()
	awaitLead(t, k, time.Second)
	enabled(t, c, k, "node-1", failover(), "web")
	c.NATS.Stop()
	// A request answers with an error within its deadline.
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	begin := time.Now()
	_, err := k.Do(ctx, "web", policy.Restart)
	require.Error(t, err)
	require.Less(t, time.Since(begin), 4*time.Second)
	require.True(t, until(soon, func() bool { return !k.Leads() }), "it steps down")
	_, shown := k.Get("web")
	require.True(t, shown, "what is known is still shown")
	require.NoError(t, k.Known())
	c.NATS.Start()
	awaitLead(t, k, soon)
	idle(t, k, "web", soon)
	_, err = k.Do(t.Context(), "web", policy.Stop)
	require.NoError(t, err)
	require.True(t, until(soon, func() bool { return len(history(t, k, "web", policy.Stop)) == 1 && len(c.Running("web")) == 0 }))
}

func TestLeader_LosesTheLease(t *testing.T) {
	c := enginetest.New(t, 3)
	k := c.Start()
	awaitLead(t, k, time.Second)
	enabled(t, c, k, "node-1", failover(), "web")
	// Somebody else takes the lease and changes a document.
	data, err := json.Marshal(map[string]any{"instance": "another", "number": 1})
	require.NoError(t, err)
	require.NoError(t, c.NATS.Store.Put(t.Context(), bus.BucketLeader, "policies", data))
	docs, err := c.NATS.Store.Read(t.Context(), bus.BucketPolicies)
	require.NoError(t, err)
	require.NoError(t, c.NATS.Store.Put(t.Context(), bus.BucketPolicies, "web", docs["web"].Value))
	// Its own write conflicts: nothing is overwritten.
	_, err = k.Do(t.Context(), "web", policy.Stop)
	require.True(t, errors.Is(err, bus.ErrConflict) || errors.Is(err, engine.ErrNotReady), err)
	require.True(t, until(5*time.Second, func() bool { return !k.Leads() }))
	require.True(t, until(5*time.Second, func() bool { return errors.Is(k.Known(), engine.ErrNotReady) }), "what it read is not sure any more")
	require.Len(t, c.Running("web"), 1)
	// The other is silent from now on.
	begin := time.Now()
	require.True(t, until(soon, k.Leads))
	require.Greater(t, time.Since(begin), 5*time.Second, "a lease is not taken from one who may be at work")
	idle(t, k, "web", soon)
}
