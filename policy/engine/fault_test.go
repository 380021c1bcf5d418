package engine_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
	"github.com/opfield/availability/policy/engine/enginetest"
)

// every returns an error for every nth write to a bucket.
func every(n int64, bucket string, err error) func(enginetest.Write) error {
	var count atomic.Int64
	return func(w enginetest.Write) error {
		if w.Bucket == bucket && count.Add(1)%n == 0 {
			return err
		}
		return nil
	}
}

func TestStore_WritesWhoseAnswerIsLost(t *testing.T) { // OPS-3
	for name, spoil := range map[string]func(*enginetest.Store){
		"committed, no answer": func(s *enginetest.Store) { s.After(every(3, bus.BucketPolicies, context.DeadlineExceeded)) },
		"not committed":        func(s *enginetest.Store) { s.Before(every(3, bus.BucketPolicies, context.DeadlineExceeded)) },
		"conflict":             func(s *enginetest.Store) { s.Before(every(4, bus.BucketPolicies, bus.ErrConflict)) },
		"members":              func(s *enginetest.Store) { s.Before(every(2, bus.BucketMembers, context.DeadlineExceeded)) },
		"records":              func(s *enginetest.Store) { s.Before(every(2, bus.BucketDesired, context.DeadlineExceeded)) },
	} {
		t.Run(name, func(t *testing.T) {
			c := enginetest.New(t, 4)
			k := c.Start()
			awaitLead(t, k, time.Second)
			enabled(t, c, k, "node-1", failover(), "web")
			spoil(k.Store)
			c.Lose(c.Node("node-1"))
			require.True(t, until(30*time.Second, func() bool { return len(c.Running("web")) == 1 }))
			idle(t, k, "web", 30*time.Second)
			require.Equal(t, 1, c.Created("web"))
			require.Len(t, history(t, k, "web", policy.Heal), 1)
			noStepTwice(t, k, "web")
		})
	}
}

func TestStore_RequestsWhoseAnswerIsLost(t *testing.T) {
	c := enginetest.New(t, 3)
	k := c.Start()
	awaitLead(t, k, time.Second)
	known(t, c, k)
	c.Node("node-1").Run("web")
	once := func(bucket string) func(enginetest.Write) error {
		var done atomic.Bool
		return func(w enginetest.Write) error {
			if w.Bucket == bucket && !done.Swap(true) {
				return context.DeadlineExceeded
			}
			return nil
		}
	}
	k.Store.After(once(bus.BucketPolicies))
	_, err := k.Enable(t.Context(), "web", "node-1", failover())
	require.ErrorIs(t, err, context.DeadlineExceeded)
	// It was stored, and so it is done.
	idle(t, k, "web", soon)
	require.Len(t, history(t, k, "web", policy.Enable), 1)

	k.Store.After(once(bus.BucketNodes))
	require.ErrorIs(t, k.DrainNode(t.Context(), "node-2"), context.DeadlineExceeded)
	require.True(t, until(soon, func() bool {
		for _, n := range k.Nodes() {
			if n.ID == "node-2" {
				return n.Drained
			}
		}
		return false
	}))
	require.NoError(t, k.UndrainNode(t.Context(), "node-2"), "no conflict is left")
}

func TestStore_NATSRestartsAtWork(t *testing.T) { // OPS-3
	c := enginetest.New(t, 5)
	k := c.Start()
	awaitLead(t, k, time.Second)
	all := names("web", 8)
	enabled(t, c, k, "node-1", failover(), all...)
	c.SetPace(enginetest.Brisk())
	c.Lose(c.Node("node-1"))
	require.True(t, until(soon, func() bool { return limited(k) == policy.MaxLimited }))
	c.NATS.Stop()
	c.NATS.Start()
	for _, w := range all {
		require.True(t, until(time.Minute, func() bool { return len(history(t, k, w, policy.Heal)) == 1 }), w)
		idle(t, k, w, time.Minute)
		require.Equal(t, 1, c.Created(w), w)
		require.Len(t, c.Running(w), 1, w)
		noStepTwice(t, k, w)
	}
}

func TestStore_OneNodesRecordsCannotBeWritten(t *testing.T) {
	c := enginetest.New(t, 4)
	k := c.Start()
	awaitLead(t, k, time.Second)
	known(t, c, k)
	block := make(chan struct{})
	var failed atomic.Int64
	k.Store.Before(func(w enginetest.Write) error {
		if w.Call == "KeepDesired" && w.Key == "node-2" {
			if failed.Add(1)%2 == 0 {
				<-block // it hangs
			}
			return errors.New("not this one")
		}
		return nil
	})
	defer close(block)
	c.Node("node-1").Run("web")
	_, err := k.Enable(t.Context(), "web", "node-1", failover())
	require.NoError(t, err)
	require.True(t, until(soon, func() bool { return len(history(t, k, "web", policy.Enable)) == 1 }))
	require.True(t, until(soon, func() bool { return failed.Load() >= 2 }))
	c.Lose(c.Node("node-1"))
	require.True(t, until(soon, func() bool { return len(c.Running("web")) == 1 }))
	asked := time.Now()
	_, err = k.Do(t.Context(), "web", policy.Stop)
	require.NoError(t, err)
	require.True(t, until(soon, func() bool { return len(c.Running("web")) == 0 }))
	require.Less(t, time.Since(asked), 3*time.Second)
}

func TestStore_DamagedDocumentIsLeftAlone(t *testing.T) {
	c := enginetest.New(t, 4)
	k := c.Start()
	awaitLead(t, k, time.Second)
	enabled(t, c, k, "node-1", replicated(2), "web", "shop")
	before, err := c.NATS.Store.Read(t.Context(), bus.BucketDesired)
	require.NoError(t, err)
	k.Stop()
	for _, damaged := range []string{`{"workload":"web"`, `{"workload":"web","versions":[],"current":1}`, `{"workload":"other"}`} {
		require.NoError(t, c.NATS.Store.Put(t.Context(), bus.BucketPolicies, "web", []byte(damaged)))
		k = c.Start()
		awaitLead(t, k, soon)
		known(t, c, k)
		_, there := k.Get("web")
		require.False(t, there)
		_, err = k.Enable(t.Context(), "web", "node-1", failover())
		require.Contains(t, refusal(t, err, policy.CodeExists).Message, "cannot be read")
		_, pinned := k.Digests()
		require.False(t, pinned, "images of a policy that cannot be read are not collected")
		// The other goes on.
		_, err = k.Do(t.Context(), "shop", policy.Restart)
		require.NoError(t, err)
		require.True(t, until(soon, func() bool { return len(history(t, k, "shop", policy.Restart)) > 0 }))
		idle(t, k, "shop", soon)
		// Nothing of the damaged one was touched.
		require.Len(t, c.Running("web"), 2)
		after, err := c.NATS.Store.Read(t.Context(), bus.BucketDesired)
		require.NoError(t, err)
		for key, e := range before {
			if !strings.HasSuffix(key, ".web") {
				continue
			}
			if _, ok := after[key]; !ok {
				t.Errorf("record %s is gone", key)
			} else if key == "node-1.web" {
				require.Equal(t, string(e.Value), string(after[key].Value))
			}
		}
		docs, err := c.NATS.Store.Read(t.Context(), bus.BucketPolicies)
		require.NoError(t, err)
		require.Equal(t, damaged, string(docs["web"].Value))
		k.Stop()
	}
}

func TestStore_RepairsWhatSomebodyElseWrote(t *testing.T) {
	c := enginetest.New(t, 3)
	k := c.Start()
	awaitLead(t, k, time.Second)
	enabled(t, c, k, "node-1", failover(), "web")
	require.NoError(t, c.NATS.Store.KeepDesired(t.Context(), "node-1", map[string]placement.Desired{}))
	k.Stop() // the repair of a minute is that of a start, too
	k = c.Start()
	awaitLead(t, k, time.Second)
	require.True(t, until(soon, func() bool {
		all, err := c.NATS.Store.Read(t.Context(), bus.BucketDesired)
		return err == nil && len(all["node-1.web"].Value) > 0
	}))
	idle(t, k, "web", soon)
}
