package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/docker/docker/client"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/cmd/internal/daemon"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/node"
	"github.com/opfield/availability/node/accept"
	"github.com/opfield/availability/node/carry"
	noderegistry "github.com/opfield/availability/node/registry"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/securelink"
)

type runCmd struct {
	daemon.Common
	daemon.MetricsFlags `set:"metrics=127.0.0.1:9103"`
	Docker              string        `help:"Address of the Docker daemon." default:"unix:///var/run/docker.sock"`
	Drain               time.Duration `help:"How long the streams of a placement that stopped serving may go on." default:"30s"`
	StopWithin          time.Duration `help:"How long running streams may go on after SIGTERM." default:"10s"`
	RegistryListen      string        `help:"Loopback address of the internal registry for the Docker daemon of this host." default:"127.0.0.1:7447"`
}

// parts are what work joins.
type parts struct {
	log      *slog.Logger
	id       *identity.Identity
	certs    *identity.WorkloadCertificates
	reg      *prometheus.Registry
	conn     *bus.Conn
	agent    *node.Agent
	carrier  *carry.Carrier
	acceptor *accept.Acceptor
	links    *accept.Links
	relays   *securelink.Relays
	images   *noderegistry.Door
}

// Run runs the agent.
func (c *runCmd) Run(ctx context.Context) error {
	if err := c.CheckMetrics(); err != nil {
		return err
	}
	if c.Drain < 0 || c.Drain > time.Hour {
		return daemon.UsageError(fmt.Sprintf("--drain: %v is outside 0 to 1h", c.Drain))
	}
	if err := noderegistry.CheckListen(c.RegistryListen); err != nil {
		return daemon.UsageError(fmt.Sprintf("--registry-listen: %v", err))
	}
	daemon.MovesBytes()
	p := &parts{log: c.Logger("node", os.Stderr)}
	var err error
	if p.id, err = c.OpenIdentity(identity.RoleNode); err != nil {
		return err
	}
	engine, err := client.NewClientWithOpts(client.WithHost(c.Docker), client.WithAPIVersionNegotiation())
	if err != nil {
		return daemon.UsageError(fmt.Sprintf("--docker: %v", err))
	}
	defer engine.Close()
	if c.CheckConfig {
		return nil
	}
	if err := os.MkdirAll(c.StateDir, 0o711); err != nil {
		return err
	}
	unlock, err := daemon.Lock(ctx, filepath.Join(c.StateDir, "node.lock"))
	if err != nil {
		return daemon.Ended(err)
	}
	defer unlock()
	p.reg = daemon.NewRegistry(p.id)
	if p.conn, err = bus.Connect(bus.Config{URLs: c.NATS, Identity: p.id, Logger: p.log, Registerer: p.reg}); err != nil {
		return err
	}
	defer p.conn.Close()
	if p.certs, err = p.id.Workloads(p.conn); err != nil {
		return err
	}
	p.images, err = noderegistry.New(noderegistry.Config{Listen: c.RegistryListen, Logger: p.log, Registerer: p.reg, Dial: func(ctx context.Context) (net.Conn, error) {
		return p.relays.DialService(ctx, placement.ServiceRegistry, p.id.ClientTLS(identity.ControllerName()))
	}})
	if err != nil {
		return err
	}
	targets := &agentTargets{}
	p.carrier, err = carry.New(carry.Config{
		Node: p.id.Name().ID, File: filepath.Join(c.StateDir, "desired.json"), Engine: engine, Logger: p.log, Registerer: p.reg, Registry: p.images,
		RegistryError: func() string {
			if err := p.images.Check(ctx); err != nil {
				return err.Error()
			}
			return ""
		},
		Health:  func(workload string) (placement.Event, bool) { return p.agent.Placement(workload) },
		Streams: func(id placement.ID) int { return p.acceptor.StreamsOf(id) },
		Changed: func() { p.agent.ManagedChanged() },
	})
	if err != nil {
		return err
	}
	p.acceptor = accept.New(accept.Config{
		TLS: p.id.ServesWorkloads(p.certs, identity.RoleIngress), Targets: targets, Drain: c.Drain, DrainOf: p.carrier.Drain,
		Logger: p.log, Registerer: p.reg,
	})
	p.links = &accept.Links{Acceptor: p.acceptor, Relays: &securelink.LinkSet{}}
	p.agent, err = node.New(node.Config{
		Node: p.id.Name().ID, StateFile: filepath.Join(c.StateDir, "node.json"), Engine: engine,
		Publisher: p.conn, Links: p.links, Certificates: p.certs, Managed: p.carrier, Logger: p.log, Registerer: p.reg,
	})
	if err != nil {
		return err
	}
	targets.Agent = p.agent
	p.relays = securelink.NewRelays(securelink.RelaysConfig{
		TLS: func(relay string) *tls.Config {
			return p.id.ClientTLS(identity.Name{Role: identity.RoleRelay, ID: relay})
		},
		Instance: daemon.Instance(), Links: p.links.Relays, Accept: p.acceptor.Accept, Up: p.images.Try, Logger: p.log,
	})
	return c.work(ctx, p)
}

// agentTargets breaks the ring between the agent and the acceptor.
type agentTargets struct{ *node.Agent }

// work runs every part until ctx ends. Streams then have StopWithin: the
// links are taken out of routing first, so that siblings get what is new.
func (c *runCmd) work(ctx context.Context, p *parts) error {
	book := newRelayBook(filepath.Join(c.StateDir, "relays.json"), p)
	streams, stopStreams := context.WithCancel(context.Background())
	defer stopStreams()
	var moving errgroup.Group
	moving.Go(func() error { p.relays.Run(streams); return nil })
	moving.Go(func() error { return p.acceptor.Run(streams) })
	err := c.announce(ctx, p, book)
	p.links.Set(nil)
	p.acceptor.Finish(c.StopWithin)
	stopStreams()
	return errors.Join(err, moving.Wait())
}

// announce runs everything but the streams until ctx ends.
func (c *runCmd) announce(ctx context.Context, p *parts, book *relayBook) error {
	g, ctx := errgroup.WithContext(ctx)
	started := time.Now()
	g.Go(func() error { return daemon.Ended(p.conn.FollowBucket(ctx, bus.BucketRelays, book.learn)) })
	g.Go(func() error { return daemon.Ended(p.conn.FollowRevocations(ctx)) })
	g.Go(func() error { return daemon.Ended(p.conn.KeepPlacements(ctx)) })
	g.Go(func() error {
		return daemon.Ended(p.id.Run(ctx, p.conn, func(err error) { p.log.Warn("certificate not renewed", "err", err) }))
	})
	g.Go(func() error {
		return daemon.Ended(p.certs.Run(ctx, func(err error) { p.log.Warn("workload certificate not renewed", "err", err) }))
	})
	g.Go(func() error { return daemon.Ended(p.agent.Run(ctx)) })
	g.Go(func() error { return daemon.Ended(p.images.Run(ctx)) })
	g.Go(func() error {
		return daemon.Ended(p.conn.PublishStatus(ctx, func() bus.Status {
			return bus.Status{Version: version, StartedAt: started, Node: p.status()}
		}))
	})
	g.Go(func() error { return daemon.Ended(p.conn.PublishInventory(ctx, p.agent.Inventory)) })
	g.Go(func() error { return daemon.Ended(p.carrier.Run(ctx)) })
	g.Go(func() error {
		return daemon.Ended(p.conn.FollowDesired(ctx, func(all map[string]placement.Desired) { p.carrier.SetDesired(ctx, all) }))
	})
	g.Go(func() error { return daemon.Ended(p.conn.PublishReport(ctx, p.carrier.Report)) })
	g.Go(func() error { return daemon.Ended(p.conn.AnswerInspect(ctx, p.carrier.Capture)) })
	g.Go(func() error {
		return c.ServeMetrics(ctx, p.log, p.reg, func() error {
			if s := p.agent.Status(); s.Docker != "ok" {
				return errors.New("docker: " + s.Docker)
			}
			return nil
		})
	})
	return g.Wait()
}

func (p *parts) status() *bus.NodeStatus {
	s := p.agent.Status()
	st := &bus.NodeStatus{Placements: s.Placements, Docker: s.Docker, Warnings: s.Warnings}
	for _, r := range p.relays.Status() {
		st.Relays = append(st.Relays, bus.RelaySessionStatus{ID: r.Relay.ID, Addr: r.Relay.Addr, Connected: r.Connected, Since: r.Since, Err: r.Err})
	}
	return st
}

// relayBook is the list of relays: the last known one until NATS tells more.
type relayBook struct {
	file string
	p    *parts
}

func newRelayBook(file string, p *parts) *relayBook {
	b := &relayBook{file: file, p: p}
	var known []securelink.RelayAddress
	if data, err := os.ReadFile(file); err != nil || json.Unmarshal(data, &known) != nil {
		for _, r := range p.id.Bootstrap().Relays {
			known = append(known, securelink.RelayAddress{ID: r.ID, Addr: r.Addr})
		}
	}
	p.relays.Set(known)
	return b
}

// learn takes the bucket of relays.
func (b *relayBook) learn(all map[string][]byte) {
	known := make([]securelink.RelayAddress, 0, len(all))
	for key, value := range all {
		var r securelink.RelayAddress
		if err := json.Unmarshal(value, &r); err != nil || r.ID != key {
			b.p.log.Warn("relay address skipped", "relay", key, "err", err)
			continue
		}
		known = append(known, r)
	}
	b.p.relays.Set(known)
	data, err := json.Marshal(known)
	if err == nil {
		err = daemon.WriteFile(b.file, data, 0o600)
	}
	if err != nil {
		b.p.log.Warn("relay list not kept", "err", err)
	}
}
