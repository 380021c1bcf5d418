package node_test

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/events"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/node"
	"github.com/opfield/availability/node/discovery"
	"github.com/opfield/availability/placement"
)

// managed is a carrier that says what a test wants.
type managed struct {
	mu    sync.Mutex
	known bool
	all   map[string]discovery.Managed
	agent *node.Agent
}

func (m *managed) Managed() (map[string]discovery.Managed, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[string]discovery.Managed{}
	for w, one := range m.all {
		out[w] = one
	}
	return out, m.known
}

func (m *managed) Owned(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, one := range m.all {
		if one.Container == id {
			return true
		}
	}
	return false
}

func (m *managed) set(workload string, one discovery.Managed) {
	m.mu.Lock()
	m.known = true
	m.all[workload] = one
	m.mu.Unlock()
	m.agent.ManagedChanged()
}

func (m *managed) drop(workload string) {
	m.mu.Lock()
	delete(m.all, workload)
	m.mu.Unlock()
	m.agent.ManagedChanged()
}

func (h *harness) startManaged() *managed {
	h.t.Helper()
	m := &managed{all: map[string]discovery.Managed{}}
	agent, err := node.New(node.Config{Node: "node-1", StateFile: h.file, Engine: h.engine, Publisher: h.store, Links: h.store,
		Certificates: h.certs, Managed: m, Logger: slog.New(slog.NewTextHandler(h.t.Output(), nil))})
	require.NoError(h.t, err)
	m.agent, h.agent = agent, agent
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- agent.Run(ctx) }()
	h.stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(h.t, <-done)
	})
	return m
}

func TestAgent_Managed(t *testing.T) { // ENA-1, RDY-3, MOD-4
	h := newHarness(t)
	m := h.startManaged()
	labels, port, ln := application(t, "web")
	h.engine.Run("c1", labels)
	h.engine.Run("other", nil)
	require.Never(t, func() bool { return len(h.events("web")) > 0 }, 200*time.Millisecond, time.Millisecond, "what is managed is not known yet")
	m.set("shop", discovery.Managed{})
	h.await("discovered", func() bool { return h.last("web").Serves() })

	// Its generation goes on from 0, with a port that was not looked at yet.
	_, more, _ := application(t, "web")
	one := discovery.Managed{
		Container: "c1", Looked: true, Kind: placement.KindContainer, Generation: 1, Role: placement.RoleServing, Kept: true,
		Ports: []placement.Port{{Port: port, Protocol: placement.ProtocolHTTP}, {Port: more, Protocol: placement.ProtocolTCP}},
	}
	m.set("web", one)
	h.await("managed", func() bool { return h.last("web").Generation == 1 })
	for _, e := range h.events("web") {
		require.True(t, e.Serves(), "%+v", e)
	}
	link := placement.LinkID{Placement: placement.ID{Workload: "web", Node: "node-1"}, Port: more}
	_, ok := h.agent.Target(link)
	require.True(t, ok)

	begin := time.Now()
	draining := one
	draining.Role = placement.RoleDraining
	m.set("web", draining)
	h.await("draining", func() bool { return h.last("web").Role == placement.RoleDraining })
	require.Less(t, time.Since(begin), 100*time.Millisecond)
	m.set("web", one)
	h.await("serving", func() bool { return h.last("web").Serves() })

	// A container without any label is watched because it is ours.
	shop := one
	shop.Container, shop.Ports = "other", []placement.Port{{Port: port, Protocol: placement.ProtocolHTTP}}
	m.set("shop", shop)
	h.await("adopted", func() bool { return h.last("shop").Serves() })
	require.Len(t, h.events("shop"), 1)
	h.engine.Emit("other", events.ActionKill, "signal=9")
	h.await("killed", func() bool { return !h.last("shop").Ready })

	// Removed: the new container has another generation, and is looked at.
	h.engine.Edit("c1", func(c *container.InspectResponse) { c.State.Status = container.StateExited })
	h.engine.Emit("c1", events.ActionDie)
	h.await("not ready", func() bool { return !h.last("web").Ready })
	h.engine.Run("c2", labels)
	next := one
	next.Container, next.Generation = "c2", 2
	m.set("web", next)
	h.await("the next generation", func() bool { return h.last("web").Serves() && h.last("web").Generation == 2 })
	ln.Close()

	h.engine.Remove("c1")
	h.engine.Emit("c1", events.ActionDestroy)
	h.engine.Remove("c2")
	h.engine.Emit("c2", events.ActionDestroy)
	next.Container, next.Kept = "", false
	m.set("web", next)
	h.await("removed", func() bool { return h.last("web").State == placement.StateRemoved })
	require.EqualValues(t, 2, h.last("web").Generation)
	// A container that nothing manages any more is announced after all that,
	// also by an agent that was started again.
	m.drop("web")
	h.engine.Run("c3", labels)
	h.await("discovered again", func() bool { return h.last("web").State != placement.StateRemoved })
	require.EqualValues(t, 2, h.last("web").Generation)
	h.stop()
	first := h.last("web").Sequence
	h.start()
	h.await("announced anew", func() bool { return h.last("web").Sequence.Incarnation > first.Incarnation })
	require.EqualValues(t, 2, h.last("web").Generation)
	var before placement.Event
	for _, e := range h.events("web") { // EVT-3
		require.NoError(t, e.Check())
		require.True(t, e.Order().Newer(before.Order()), "%+v", e)
		before = e
	}
}
