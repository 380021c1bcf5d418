package node_test

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/events"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/opfield/availability/node"
	"github.com/opfield/availability/node/docker/dockertest"
	"github.com/opfield/availability/placement"
)

// store is a bus and the relays: it keeps the last event of every placement.
type store struct {
	mu     sync.Mutex
	stored map[string]placement.Event
	seen   map[string][]placement.Event // in the order of publication
	refuse map[string]error
	linked []placement.Event
}

func newStore() *store {
	return &store{stored: map[string]placement.Event{}, seen: map[string][]placement.Event{}, refuse: map[string]error{}}
}

func (s *store) PublishPlacement(_ context.Context, e placement.Event) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.refuse[e.Workload]; err != nil {
		return err
	}
	s.stored[e.Placement] = e
	s.seen[e.Workload] = append(s.seen[e.Workload], e)
	return nil
}

func (s *store) LastPlacement(_ context.Context, id placement.ID) (placement.Event, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.refuse[id.Workload]; err != nil {
		return placement.Event{}, false, err
	}
	e, ok := s.stored[id.String()]
	return e, ok, nil
}

func (s *store) Set(all []placement.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.linked = all
}

func (s *store) last(workload string) placement.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stored[workload+".node-1"]
}

func (s *store) set(workload string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refuse[workload] = err
}

func (s *store) events(workload string) []placement.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]placement.Event(nil), s.seen[workload]...)
}

// certificates has all names but those that are missing.
type certificates struct {
	mu      sync.Mutex
	missing map[string]bool
	refused error
}

func (c *certificates) Get(workload string) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.missing[workload] {
		return nil, errors.New("no certificate")
	}
	return &tls.Certificate{}, nil
}

func (c *certificates) Ensure(_ context.Context, workload string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.refused != nil {
		return c.refused
	}
	delete(c.missing, workload)
	return nil
}

type harness struct {
	*store
	t      *testing.T
	engine *dockertest.Engine
	certs  *certificates
	file   string
	agent  *node.Agent
	stop   func()
}

func newHarness(t *testing.T) *harness {
	t.Cleanup(func() { goleak.VerifyNone(t) })
	h := &harness{store: newStore(), t: t, engine: dockertest.New(), certs: &certificates{missing: map[string]bool{}},
		file: filepath.Join(t.TempDir(), "agent.json"), stop: func() {}}
	t.Cleanup(func() { h.stop() })
	return h
}

func (h *harness) start() {
	h.t.Helper()
	agent, err := node.New(node.Config{Node: "node-1", StateFile: h.file, Engine: h.engine, Publisher: h.store, Links: h.store,
		Certificates: h.certs, Logger: slog.New(slog.NewTextHandler(h.t.Output(), nil))})
	require.NoError(h.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- agent.Run(ctx) }()
	h.agent = agent
	h.stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(h.t, <-done)
	})
}

func (h *harness) await(what string, cond func() bool) {
	h.t.Helper()
	require.Eventually(h.t, cond, 5*time.Second, time.Millisecond, what)
}

// application listens on a port and returns the labels of its container.
func application(t *testing.T, workload string) (labels map[string]string, port uint16, ln net.Listener) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { ln.Close() })
	number := ln.Addr().(*net.TCPAddr).Port
	return map[string]string{"opfield.workload": workload, "opfield.port": strconv.Itoa(number)}, uint16(number), ln
}

func TestAgent_FollowsAContainer(t *testing.T) { // DSC-1, RDY-1, RDY-3
	h := newHarness(t)
	h.start()
	labels, port, ln := application(t, "web")
	link := placement.LinkID{Placement: placement.ID{Workload: "web", Node: "node-1"}, Port: port}
	h.engine.Run("c1", labels)
	h.await("ready", func() bool { return h.last("web").Serves() })
	require.Len(t, h.events("web"), 1, "the first event is the ready one: the port was looked at before")
	addr, ok := h.agent.Target(link)
	require.True(t, ok)
	require.Equal(t, port, addr.Port())

	// A dial that failed is looked at again at once.
	ln.Close()
	begin := time.Now()
	h.agent.Failed(link, errors.New("refused"))
	h.await("not ready", func() bool { return !h.last("web").Ready })
	require.Less(t, time.Since(begin), time.Second)
	require.Equal(t, placement.StateUnhealthy, h.last("web").State)
	_, ok = h.agent.Target(link)
	require.False(t, ok)
	again, err := net.Listen("tcp", ln.Addr().String())
	require.NoError(t, err)
	defer again.Close()
	h.await("ready again", func() bool { return h.last("web").Serves() })

	h.engine.Emit("c1", events.ActionKill, "signal=15")
	h.await("draining before it ended", func() bool { return h.last("web").Role == placement.RoleDraining })
	h.engine.Edit("c1", func(c *container.InspectResponse) { c.State.Status = container.StateExited })
	h.engine.Emit("c1", events.ActionDie)
	h.await("stopped", func() bool { return h.last("web").State == placement.StateStopped })
	require.Equal(t, placement.RoleStopped, h.last("web").Role)
	h.engine.Remove("c1")
	h.engine.Emit("c1", events.ActionDestroy)
	h.await("removed", func() bool { return h.last("web").State == placement.StateRemoved })
	h.await("forgotten", func() bool { return len(h.agent.Status().Placements) == 0 })

	var before placement.Event
	for _, e := range h.events("web") { // EVT-3
		require.NoError(t, e.Check())
		require.True(t, e.Order().Newer(before.Order()))
		before = e
	}
}

func TestAgent_KilledIsNotReadyBeforeItIsDead(t *testing.T) { // RDY-3
	h := newHarness(t)
	h.start()
	labels, _, _ := application(t, "web")
	h.engine.Run("c1", labels)
	h.await("ready", func() bool { return h.last("web").Serves() })
	h.engine.Emit("c1", events.ActionKill, "signal=9") // the engine still calls it running
	h.await("not ready", func() bool { return !h.last("web").Ready })
	require.Never(t, func() bool { return h.last("web").Ready }, 300*time.Millisecond, time.Millisecond)
}

func TestAgent_HealthCheckDecides(t *testing.T) { // RDY-1
	h := newHarness(t)
	h.start()
	labels, _, _ := application(t, "web")
	started := time.Now()
	h.engine.Run("c1", labels, func(c *container.InspectResponse) {
		c.Config.Healthcheck = &container.HealthConfig{Test: []string{"CMD", "true"}}
		c.State.StartedAt = started.Format(time.RFC3339Nano)
		c.State.Health = &container.Health{Status: container.Healthy, Log: []*container.HealthcheckResult{{Start: started.Add(-time.Minute)}}}
	})
	h.await("a result from before the start does not count", func() bool { return h.last("web").State == placement.StateStarting })
	h.engine.Edit("c1", func(c *container.InspectResponse) {
		c.State.Health = &container.Health{Status: container.Healthy, Log: []*container.HealthcheckResult{{Start: started.Add(time.Second)}}}
	})
	h.engine.Emit("c1", events.ActionHealthStatusHealthy)
	h.await("healthy", func() bool { return h.last("web").Serves() })
	h.engine.Hang("c1") // the event alone is enough
	h.engine.Emit("c1", events.ActionHealthStatusUnhealthy)
	h.await("unhealthy", func() bool { return h.last("web").State == placement.StateUnhealthy })
	h.engine.Release("c1")
}

func TestAgent_AHangingContainerBlocksNobody(t *testing.T) {
	h := newHarness(t)
	h.engine.Hang("bad")
	h.start()
	bad, _, _ := application(t, "bad")
	h.engine.Run("bad", bad)
	for _, name := range []string{"one", "two", "three"} {
		labels, _, _ := application(t, name)
		h.engine.Run(name, labels)
		h.await(name, func() bool { return h.last(name).Serves() })
	}
	require.False(t, h.last("bad").Ready)
	h.engine.Release("bad")
	h.await("bad", func() bool { return h.last("bad").Serves() })
}

func TestAgent_EngineAwayChangesNothing(t *testing.T) { // RDY-2
	h := newHarness(t)
	h.start()
	labels, _, _ := application(t, "web")
	h.engine.Run("c1", labels)
	h.await("ready", func() bool { return h.last("web").Serves() })
	h.engine.Stop()
	h.await("shown", func() bool { return h.agent.Status().Docker != "ok" })
	require.True(t, h.last("web").Serves())
	h.engine.Remove("c1") // its event is missed
	h.engine.Start()
	h.await("the list after it tells", func() bool { return h.last("web").State == placement.StateRemoved })
	h.await("shown", func() bool { return h.agent.Status().Docker == "ok" })
}

func TestAgent_NewNameWaitsForItsCertificate(t *testing.T) { // DSC-2
	h := newHarness(t)
	h.certs.missing["web"] = true
	h.certs.refused = errors.New("workload web is not in the node's grant")
	h.start()
	labels, _, _ := application(t, "web")
	other, _, _ := application(t, "other")
	h.engine.Run("c1", labels)
	h.engine.Run("c2", other)
	h.await("others do not wait", func() bool { return h.last("other").Serves() })
	h.await("shown", func() bool {
		s := h.agent.Status()
		return len(s.Warnings) == 1 && len(s.Placements) == 2 && s.Warnings[0] == "workload web: it waits for its certificate: workload web is not in the node's grant"
	})
	require.Empty(t, h.events("web"))
	h.certs.mu.Lock()
	h.certs.refused = nil
	h.certs.mu.Unlock()
	h.await("announced", func() bool { return h.last("web").Serves() })
	require.Empty(t, h.agent.Status().Warnings)
}

func TestAgent_BadLabelsAreShown(t *testing.T) {
	h := newHarness(t)
	h.start()
	h.engine.Run("c1", map[string]string{"opfield.workload": "web", "opfield.port": "http"})
	h.await("shown", func() bool { return len(h.agent.Status().Warnings) == 1 })
	require.Contains(t, h.agent.Status().Warnings[0], "container c1 is not announced: label opfield.port")
}

func TestAgent_RestartIsNoChange(t *testing.T) { // EVT-3
	h := newHarness(t)
	h.start()
	labels, _, _ := application(t, "web")
	gone, _, _ := application(t, "gone")
	h.engine.Run("c1", labels)
	h.engine.Run("c2", gone)
	h.await("ready", func() bool { return h.last("web").Serves() && h.last("gone").Serves() })
	first := h.last("web")
	h.stop()
	h.engine.Remove("c2") // while the agent is away
	h.start()
	h.await("announced anew", func() bool { return h.last("web").Sequence.Incarnation > first.Sequence.Incarnation })
	h.await("what went away is told", func() bool { return h.last("gone").State == placement.StateRemoved })
	for _, e := range h.events("web") {
		require.True(t, e.Serves(), "a restart of the agent closes nothing: %+v", e)
	}
}

func TestAgent_IncarnationBeatsTheStoredOne(t *testing.T) { // EVT-3
	h := newHarness(t)
	future := uint64(time.Now().Add(24 * time.Hour).UnixNano())
	h.stored["web.node-1"] = placement.Event{Workload: "web", Node: "node-1", Placement: "web.node-1",
		Sequence: placement.Sequence{Incarnation: future, Counter: 7}}
	h.start()
	labels, _, _ := application(t, "web")
	h.engine.Run("c1", labels)
	h.await("newer", func() bool { return h.last("web").Sequence.Incarnation > future })
	require.Len(t, h.events("web"), 1, "nothing older replaced the stored event")
	h.stop()
	require.NoError(t, os.Truncate(h.file, 3)) // a broken state file is no reason to stop
	h.start()
	h.await("newer again", func() bool { return h.last("web").Sequence.Incarnation > future+1 })
}

func TestAgent_PublishesTheNewestAfterAnOutage(t *testing.T) {
	h := newHarness(t)
	h.start()
	labels, _, _ := application(t, "web")
	other, _, _ := application(t, "other")
	h.set("web", errors.New("no acknowledgement"))
	h.engine.Run("c1", labels)
	h.await("links do not wait for the bus", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.linked) == 1 && h.linked[0].Serves()
	})
	h.engine.Run("c2", other)
	h.await("others do not wait", func() bool { return h.last("other").Serves() })
	h.engine.Emit("c1", events.ActionPause)
	h.engine.Edit("c1", func(c *container.InspectResponse) { c.State.Status = container.StatePaused })
	h.set("web", nil)
	h.await("the newest", func() bool { return h.last("web").Reason == "container c1: it is paused" })
	require.False(t, h.last("web").Ready)
}
