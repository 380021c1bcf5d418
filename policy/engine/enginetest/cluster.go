package enginetest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/bus/bustest"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
	"github.com/opfield/availability/policy/engine"
)

// Cluster is a NATS server, nodes, and any number of controllers.
type Cluster struct {
	NATS  *bustest.Server
	CA    *identitytest.CA
	Fleet *Fleet
	Nodes []*Node // "node-1" first

	t      testing.TB
	byID   map[string]*Node
	writer *identity.Identity
}

// New starts a NATS server and nodes that are online; all end with the test.
func New(t testing.TB, nodes int) *Cluster {
	t.Helper()
	ca := identitytest.New(t)
	c := &Cluster{
		t: t, CA: ca, NATS: bustest.Start(t, ca), byID: map[string]*Node{},
		writer: ca.Identity(t, identity.RoleController, identity.StoreName().ID),
		Fleet:  &Fleet{nodes: map[string]policy.Node{}, refused: map[string]map[string]string{}},
	}
	c.Fleet.events = func(workload string) uint64 {
		var most uint64
		for _, n := range c.Nodes {
			most = max(most, n.Generation(workload))
		}
		return most
	}
	for i := range nodes {
		id := fmt.Sprintf("node-%d", i+1)
		n := &Node{
			ID: id, t: t, url: c.NATS.URL, identity: ca.Identity(t, identity.RoleNode, id),
			copies: map[string]*replica{}, announced: map[string]uint64{},
		}
		c.Nodes, c.byID[id] = append(c.Nodes, n), n
		n.Connect()
		c.Fleet.Set(id, policy.NodeOnline)
		t.Cleanup(n.Kill)
	}
	return c
}

// Node returns a node by its id.
func (c *Cluster) Node(id string) *Node { return c.byID[id] }

// SetPace changes how long things take on every node.
func (c *Cluster) SetPace(p Pace) {
	for _, n := range c.Nodes {
		n.SetPace(p)
	}
}

// Created returns how many containers all nodes created for the workload.
func (c *Cluster) Created(workload string) int {
	total := 0
	for _, n := range c.Nodes {
		total += n.Created(workload)
	}
	return total
}

// Running returns the nodes where the workload runs.
func (c *Cluster) Running(workload string) []string {
	var out []string
	for _, n := range c.Nodes {
		if n.Runs(workload) {
			out = append(out, n.ID)
		}
	}
	return out
}

// Lose kills nodes, and the controller knows it.
func (c *Cluster) Lose(nodes ...*Node) {
	for _, n := range nodes {
		n.Kill()
	}
	for _, n := range nodes {
		c.Fleet.Set(n.ID, policy.NodeOffline)
	}
}

// Controller is one controller as far as policies go, with connections of its
// own.
type Controller struct {
	*engine.Engine
	Store   *Store
	Conn    *bus.Conn
	Metrics *prometheus.Registry

	t      testing.TB
	cancel context.CancelFunc
	done   chan struct{}
	err    error // set before done is closed
}

// Timing is the product's with a short time to a node's loss.
func Timing() policy.Timing {
	t := policy.DefaultTiming()
	t.OfflineAfter = time.Second
	return t
}

// Start starts a controller; it ends with the test. Tune may change its
// configuration.
func (c *Cluster) Start(tune ...func(*engine.Config)) *Controller {
	c.t.Helper()
	conn, err := bus.Connect(bus.Config{URLs: []string{c.NATS.URL()}, Identity: c.NATS.Identity, Logger: quiet()})
	c.must(err)
	store, err := bus.OpenStore(bus.Config{URLs: []string{c.NATS.URL()}, Identity: c.writer, Logger: quiet()})
	c.must(err)
	k := &Controller{Store: &Store{Store: store}, Conn: conn, Metrics: prometheus.NewRegistry(), t: c.t, done: make(chan struct{})}
	cfg := engine.Config{
		Store: k.Store, Nodes: conn, Fleet: c.Fleet, Timing: Timing(), Logger: quiet(), Registerer: k.Metrics,
		Revoke: func(_ context.Context, node string) error { c.Fleet.Remove(node); return nil },
	}
	for _, fn := range tune {
		fn(&cfg)
	}
	k.Engine, err = engine.New(cfg)
	c.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	k.cancel = cancel
	go func() {
		defer close(k.done)
		k.err = k.Engine.Run(ctx)
	}()
	c.t.Cleanup(k.Stop)
	return k
}

// Stop ends the controller as a signal does.
func (k *Controller) Stop() {
	k.cancel()
	<-k.done
	k.Conn.Close()
	k.Store.Store.Close()
	if !errors.Is(k.err, context.Canceled) {
		k.t.Errorf("controller ended with %v", k.err)
	}
}

// Kill ends the controller with no chance to write anything more.
func (k *Controller) Kill() {
	k.Conn.Close()
	k.Store.Store.Close()
	k.cancel()
	<-k.done
}

// Leads reports whether it decides.
func (k *Controller) Leads() bool { return k.Metric("opfield_policy_leading") == 1 }

// Metric returns a gauge or counter without labels, or the sum of a histogram.
func (k *Controller) Metric(name string) float64 {
	k.t.Helper()
	all, err := k.Metrics.Gather()
	if err != nil {
		k.t.Fatal(err)
	}
	for _, f := range all {
		if f.GetName() == name {
			m := f.GetMetric()[0]
			return m.GetGauge().GetValue() + m.GetCounter().GetValue() + m.GetHistogram().GetSampleSum()
		}
	}
	return 0
}

// Enable makes the running container available on a node.
func (k *Controller) Enable(ctx context.Context, workload, node string, s policy.Settings) (policy.Operation, error) {
	return k.Engine.Enable(ctx, policy.EnableRequest{Workload: workload, Node: node, Container: workload, Settings: s})
}

func (c *Cluster) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// Ports are those of every simulated container.
func Ports() []placement.Port { return []placement.Port{{Port: 80, Protocol: placement.ProtocolHTTP}} }

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }
