package bus_test

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/bus/bustest"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/placement"
)

const (
	soon = 5 * time.Second
	poll = 5 * time.Millisecond
)

func event(workload, node string, counter uint64, ready bool) placement.Event {
	id := placement.ID{Workload: workload, Node: node}
	return placement.Event{
		Workload: workload, Placement: id.String(), Node: node, Kind: placement.KindContainer,
		Role: placement.RoleServing, Ready: ready, State: placement.StateRunning,
		Ports:      []placement.Port{{Port: 8080, Protocol: placement.ProtocolHTTP}},
		ObservedAt: time.Now(), Sequence: placement.Sequence{Incarnation: 1, Counter: counter},
	}
}

// fold keeps the newest event of each placement, as every consumer does.
type fold struct {
	mu     sync.Mutex
	events map[placement.ID]placement.Event
	calls  int
}

func (f *fold) add(e placement.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.events == nil {
		f.events = map[placement.ID]placement.Event{}
	}
	f.calls++
	if old, ok := f.events[e.ID()]; !ok || e.Order().Newer(old.Order()) {
		f.events[e.ID()] = e
	}
}

func (f *fold) counter(workload, node string) uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.events[placement.ID{Workload: workload, Node: node}].Sequence.Counter
}

func (f *fold) size() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.events)
}

func publish(t *testing.T, c *bus.Conn, e placement.Event) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	require.NoError(t, c.PublishPlacement(ctx, e))
}

func TestFollowPlacements_PresentStateThenChanges(t *testing.T) { // EVT-1, EVT-3, EVT-5
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	node := srv.Conn(t, ca.Identity(t, identity.RoleNode, "node-1"))
	const many = 1500 // more than two pages
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := w; i < many; i += 4 {
				publish(t, node, event(fmt.Sprintf("w%d", i), "node-1", 1, true))
			}
		})
	}
	wg.Wait()
	publish(t, node, event("w0", "node-1", 2, false))

	var seen fold
	sub := srv.Conn(t, ca.Identity(t, identity.RoleSubscriber, "s"))
	bustest.Go(t, func(ctx context.Context) error { return sub.FollowPlacements(ctx, seen.add) })
	require.Eventually(t, func() bool { return seen.size() == many }, soon, poll)
	require.EqualValues(t, 2, seen.counter("w0", "node-1"))

	publish(t, node, event("w0", "node-1", 3, true))
	require.Eventually(t, func() bool { return seen.counter("w0", "node-1") == 3 }, soon, poll)
	publish(t, node, event("w0", "node-1", 1, true)) // late: it never overrides
	publish(t, node, event("w1", "node-1", 2, true))
	require.Eventually(t, func() bool { return seen.counter("w1", "node-1") == 2 }, soon, poll)
	require.EqualValues(t, 3, seen.counter("w0", "node-1"))
}

func TestFollowPlacements_ResumesAfterServerRestart(t *testing.T) { // EVT-5, LNK-8
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	node := srv.Conn(t, ca.Identity(t, identity.RoleNode, "node-1"))
	sub := srv.Conn(t, ca.Identity(t, identity.RoleIngress, "i"))
	publish(t, node, event("shop", "node-1", 1, true))
	var seen fold
	bustest.Go(t, func(ctx context.Context) error { return sub.FollowPlacements(ctx, seen.add) })
	require.Eventually(t, func() bool { return seen.counter("shop", "node-1") == 1 }, soon, poll)

	srv.Stop()
	require.Eventually(t, func() bool { return !node.Connected() && !sub.Connected() }, soon, poll)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	require.ErrorIs(t, node.PublishPlacement(ctx, event("shop", "node-1", 2, false)), bus.ErrNotConnected)
	srv.Start()
	begin := time.Now()
	require.Eventually(t, node.Connected, soon, poll)
	publish(t, node, event("shop", "node-1", 2, false))
	require.Eventually(t, func() bool { return seen.counter("shop", "node-1") == 2 }, soon, poll)
	require.Less(t, time.Since(begin), 2*time.Second)
}

func TestConnect_DoesNotNeedNATS(t *testing.T) { // LNK-8
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	srv.Stop()
	c, err := bus.Connect(bus.Config{URLs: []string{srv.URL()}, Identity: ca.Identity(t, identity.RoleIngress, "i"), Logger: bustest.Logger(t)})
	require.NoError(t, err)
	defer c.Close()
	calls := make(chan map[string][]byte, 10)
	bustest.Go(t, func(ctx context.Context) error {
		return c.FollowBucket(ctx, bus.BucketRoutes, func(m map[string][]byte) { calls <- m })
	})
	select {
	case m := <-calls:
		t.Fatalf("a snapshot without NATS: %v", m)
	case <-time.After(300 * time.Millisecond):
	}
	srv.Start()
	select {
	case m := <-calls: // empty, but really read
		require.Empty(t, m)
	case <-time.After(soon):
		t.Fatal("no snapshot")
	}
}

func TestFollowBucket(t *testing.T) {
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	c := srv.Conn(t, ca.Identity(t, identity.RoleIngress, "i"))
	calls := make(chan map[string][]byte, 1000)
	bustest.Go(t, func(ctx context.Context) error {
		return c.FollowBucket(ctx, bus.BucketRoutes, func(m map[string][]byte) { calls <- m })
	})
	await := func(want map[string]string) int {
		t.Helper()
		n := 0
		for end := time.After(soon); ; {
			select {
			case m := <-calls:
				n++
				got := map[string]string{}
				for k, v := range m {
					got[k] = string(v)
				}
				if fmt.Sprint(got) == fmt.Sprint(want) {
					return n
				}
			case <-end:
				t.Fatalf("never saw %v", want)
			}
		}
	}
	await(map[string]string{})
	require.NoError(t, srv.Store.Put(t.Context(), bus.BucketRoutes, "a", []byte("1")))
	await(map[string]string{"a": "1"})
	require.NoError(t, srv.Store.Put(t.Context(), bus.BucketRoutes, "b", []byte("2")))
	require.NoError(t, srv.Store.Put(t.Context(), bus.BucketRoutes, "a", []byte("3")))
	await(map[string]string{"a": "3", "b": "2"})
	require.NoError(t, srv.Store.Delete(t.Context(), bus.BucketRoutes, "a"))
	await(map[string]string{"b": "2"})
	want := map[string]string{"b": "2"}
	for i := range 200 {
		k := fmt.Sprintf("k%d", i)
		want[k] = "x"
		require.NoError(t, srv.Store.Put(t.Context(), bus.BucketRoutes, k, []byte("x")))
	}
	require.Less(t, await(want), 100, "changes are coalesced")

	srv.Stop()
	require.Eventually(t, func() bool { return !c.Connected() }, soon, poll)
	srv.Start()
	require.Eventually(t, c.Connected, soon, poll)
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	require.Eventually(t, func() bool { return srv.Store.Delete(ctx, bus.BucketRoutes, "b") == nil }, soon, poll)
	delete(want, "b")
	await(want)
}

func TestLastPlacement(t *testing.T) { // EVT-3
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	a := srv.Conn(t, ca.Identity(t, identity.RoleNode, "a"))
	id := placement.ID{Workload: "shop", Node: "a"}
	_, found, err := a.LastPlacement(t.Context(), id)
	require.NoError(t, err)
	require.False(t, found)
	publish(t, a, event("shop", "a", 7, true))
	e, found, err := a.LastPlacement(t.Context(), id)
	require.NoError(t, err)
	require.True(t, found)
	require.EqualValues(t, 7, e.Sequence.Counter)
}

func TestFollowNodes(t *testing.T) {
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	require.NoError(t, srv.Store.PublishNode(t.Context(), bus.NodeEvent{Node: "a", State: bus.NodeOnline, Number: 1}))
	c := srv.Conn(t, ca.Identity(t, identity.RoleIngress, "i"))
	events := make(chan bus.NodeEvent, 10)
	bustest.Go(t, func(ctx context.Context) error {
		return c.FollowNodes(ctx, func(e bus.NodeEvent) { events <- e })
	})
	require.Equal(t, bus.NodeOnline, (<-events).State)
	require.NoError(t, srv.Store.PublishNode(t.Context(), bus.NodeEvent{Node: "a", State: bus.NodeOffline, Number: 2}))
	require.Eventually(t, func() bool { return (<-events).State == bus.NodeOffline }, soon, poll)
}

func TestStatus(t *testing.T) { // LOS-1
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	for _, role := range []identity.Role{identity.RoleNode, identity.RoleRelay, identity.RoleIngress} {
		c := srv.Conn(t, ca.Identity(t, role, "a"))
		got := make(chan bus.Status, 100)
		bustest.Go(t, func(ctx context.Context) error {
			return srv.Controller.FollowStatus(ctx, func(s bus.Status) {
				if s.Name.Role == role {
					got <- s
				}
			})
		})
		var version atomic.Value
		version.Store("1")
		bustest.Go(t, func(ctx context.Context) error {
			return c.PublishStatus(ctx, func() bus.Status { return bus.Status{Version: version.Load().(string)} })
		})
		s := <-got
		require.Equal(t, string(role)+"/a", s.Name.String())
		require.Equal(t, "1", s.Version)
		version.Store("2")
		begin := time.Now()
		require.Eventually(t, func() bool { return (<-got).Version == "2" }, soon, poll)
		require.Less(t, time.Since(begin), time.Second)
	}
}

func TestSign_OverNATS(t *testing.T) { // SEC-1, DSC-2
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	// The signer and its clients may live in different accounts.
	for _, role := range []identity.Role{identity.RoleNode, identity.RoleRelay, identity.RoleIngress} {
		id := ca.Identity(t, role, "x")
		w, err := id.Workloads(srv.Conn(t, id))
		require.NoError(t, err)
		if err = w.Ensure(t.Context(), "shop"); role == identity.RoleNode {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, "only nodes serve workloads")
		}
	}
	id := ca.Node(t, "a", identity.Grant{"shop"})
	c := srv.Conn(t, id)
	w, err := id.Workloads(c)
	require.NoError(t, err)
	require.NoError(t, w.Ensure(t.Context(), "shop"))
	require.ErrorIs(t, w.Ensure(t.Context(), "bank"), identity.ErrRefused)
}

func TestRevocation_EndsOpenSessions(t *testing.T) { // SEC-1
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	id := ca.Identity(t, identity.RoleNode, "a")
	other := ca.Identity(t, identity.RoleRelay, "r")
	c, rc := srv.Conn(t, id), srv.Conn(t, other)
	bustest.Go(t, rc.FollowRevocations)
	rev, err := ca.Revoke(id.Name())
	require.NoError(t, err)
	value, err := json.Marshal(rev)
	require.NoError(t, err)
	require.NoError(t, srv.Store.Put(t.Context(), bus.BucketRevoked, "node.a", value))
	require.NoError(t, srv.Identity.SetRevoked(ca.Revocations()))
	require.Eventually(t, func() bool { return !c.Connected() }, soon, poll)
	require.Never(t, c.Connected, 700*time.Millisecond, poll)
	require.True(t, rc.Connected())
	require.Eventually(t, func() bool { return len(other.Revocations()) == 1 }, soon, poll)
}
