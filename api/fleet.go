package api

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
)

const (
	judgeEvery    = 250 * time.Millisecond
	publishWithin = 2 * time.Second
)

// FleetConfig configures a Fleet.
type FleetConfig struct {
	Conn    *bus.Conn  // of the controller
	Store   *bus.Store // node events are published through it
	Members func() []identity.Member
	Logger  *slog.Logger
	// Registerer may be nil: no metrics.
	Registerer prometheus.Registerer
}

// Fleet knows what every process tells, decides which nodes are offline and
// publishes that.
type Fleet struct {
	cfg   FleetConfig // fixed after NewFleet
	hub   hub
	nodes *prometheus.GaugeVec // number of nodes by state

	mu         sync.Mutex
	processes  map[identity.Name]seen           // guarded by mu
	placements map[placement.ID]placement.Event // guarded by mu; newest of each
	published  map[string]bus.NodeEvent         // guarded by mu; by node
	verdicts   map[string]verdict               // guarded by mu
	since      map[string]time.Time             // guarded by mu; of the verdict's state
	inventory  map[string]bus.Inventory         // guarded by mu; by node
	heard      time.Time                        // guarded by mu; zero while NATS is away
	healthy    map[string]time.Time             // guarded by mu; by node: online without an error and a break
	confirmed  map[string]time.Time             // guarded by mu; nodes that an operator confirmed as lost
}

// NewFleet checks the configuration.
func NewFleet(cfg FleetConfig) (*Fleet, error) {
	if cfg.Conn == nil || cfg.Store == nil || cfg.Members == nil || cfg.Logger == nil {
		return nil, errors.New("fleet: connection, store, members and logger are required")
	}
	nodes := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "opfield_nodes", Help: "Nodes by liveness."}, []string{"state"})
	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(nodes)
	}
	return &Fleet{
		cfg:        cfg,
		nodes:      nodes,
		processes:  map[identity.Name]seen{},
		placements: map[placement.ID]placement.Event{},
		published:  map[string]bus.NodeEvent{},
		verdicts:   map[string]verdict{},
		since:      map[string]time.Time{},
		inventory:  map[string]bus.Inventory{},
		healthy:    map[string]time.Time{},
		confirmed:  map[string]time.Time{},
	}, nil
}

// Run follows the fleet until ctx ends.
func (f *Fleet) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return f.cfg.Conn.FollowStatus(ctx, f.observe) })
	g.Go(func() error { return f.cfg.Conn.FollowPlacements(ctx, f.placementEvent) })
	g.Go(func() error { return f.cfg.Conn.FollowNodes(ctx, f.nodeEvent) })
	g.Go(func() error { return f.cfg.Conn.FollowInventory(ctx, f.stock) })
	g.Go(func() error { return f.judgeLoop(ctx) })
	return g.Wait()
}

func (f *Fleet) observe(s bus.Status) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.processes[s.Name] = seen{status: s, at: time.Now()}
}

func (f *Fleet) placementEvent(e placement.Event) {
	f.mu.Lock()
	old, known := f.placements[e.ID()]
	newer := !known || e.Order().Newer(old.Order())
	if newer {
		f.placements[e.ID()] = e
	}
	f.mu.Unlock()
	if newer {
		if b, err := e.Marshal(); err == nil {
			f.hub.send(b)
		}
	}
}

func (f *Fleet) nodeEvent(e bus.NodeEvent) {
	f.mu.Lock()
	newer := e.Number > f.published[e.Node].Number
	if newer {
		f.published[e.Node] = e
	}
	f.mu.Unlock()
	if newer {
		if b, err := e.Marshal(); err == nil {
			f.hub.send(b)
		}
	}
}

func (f *Fleet) judgeLoop(ctx context.Context) error {
	tick := time.NewTicker(judgeEvery)
	defer tick.Stop()
	for {
		for _, e := range f.step(time.Now(), f.cfg.Conn.Connected()) {
			f.publish(ctx, e)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// step judges and returns the node events that are due.
func (f *Fleet) step(now time.Time, connected bool) []bus.NodeEvent {
	nodes := f.nodeIDs()
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case !connected:
		f.heard = time.Time{}
	case f.heard.IsZero():
		f.heard = now
	}
	before := map[string]Liveness{}
	for node, v := range f.verdicts {
		before[node] = v.state
	}
	for node, e := range f.published { // also after a restart of ours
		if e.State == bus.NodeOffline {
			before[node] = Offline
		}
	}
	f.verdicts = judge(now, f.heard, nodes, f.processes, before)
	f.follow(now, nodes)
	count := map[Liveness]int{Unseen: 0, Online: 0, NotReporting: 0, Offline: 0}
	for _, v := range f.verdicts {
		count[v.state]++
	}
	for state, n := range count {
		f.nodes.WithLabelValues(string(state)).Set(float64(n))
	}
	var due []bus.NodeEvent
	for _, node := range nodes {
		v := f.verdicts[node]
		if before[node] != v.state || f.since[node].IsZero() {
			f.since[node] = now
			f.cfg.Logger.Info("node liveness", "node", node, "state", string(v.state), "reason", v.reason)
		}
		last := f.published[node]
		if want, ok := wire(v.state); ok && want != last.State {
			due = append(due, bus.NodeEvent{Node: node, State: want, Since: f.since[node], Number: max(last.Number+1, uint64(now.UnixMilli())), Reason: v.reason})
		}
	}
	return due
}

// wire returns what is published for a state; uncertainty is not.
func wire(l Liveness) (bus.NodeState, bool) {
	switch l {
	case Online:
		return bus.NodeOnline, true
	case Offline:
		return bus.NodeOffline, true
	}
	return "", false
}

// publish is tried again by the next step if it fails.
func (f *Fleet) publish(ctx context.Context, e bus.NodeEvent) {
	ctx, cancel := context.WithTimeout(ctx, publishWithin)
	defer cancel()
	if err := f.cfg.Store.PublishNode(ctx, e); err != nil {
		f.cfg.Logger.Debug("node event again later", "node", e.Node, "err", err)
		return
	}
	f.nodeEvent(e)
}

// nodeIDs returns the nodes that joined and were not revoked.
func (f *Fleet) nodeIDs() []string {
	var out []string
	for _, m := range f.cfg.Members() {
		if m.Name.Role == identity.RoleNode && !m.Revoked {
			out = append(out, m.Name.ID)
		}
	}
	slices.Sort(out)
	return out
}

// present returns every last event, encoded, in a fixed order.
func (f *Fleet) present() [][]byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out [][]byte
	for _, node := range slices.Sorted(maps.Keys(f.published)) {
		if b, err := f.published[node].Marshal(); err == nil {
			out = append(out, b)
		}
	}
	for _, id := range slices.SortedFunc(maps.Keys(f.placements), comparePlacements) {
		if b, err := f.placements[id].Marshal(); err == nil {
			out = append(out, b)
		}
	}
	return out
}
