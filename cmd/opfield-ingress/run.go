package main

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/cmd/internal/daemon"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/ingress"
	"github.com/opfield/availability/ingress/endpoint"
	"github.com/opfield/availability/ingress/guard"
	"github.com/opfield/availability/securelink"
)

// stopNginxWithin bounds the end of our own nginx after SIGTERM.
const stopNginxWithin = 10 * time.Second

type runCmd struct {
	daemon.Common
	daemon.MetricsFlags `set:"metrics=127.0.0.1:9102"`
	nginxFlags
	PIDFile     string        `name:"pid-file" help:"File that holds the process id of the newest sidecar."`
	DrainWithin time.Duration `help:"How long streams may go on in the old process after a restart." default:"1h"`
	StopWithin  time.Duration `help:"How long streams may go on after SIGTERM." default:"10s"`
}

// parts are what work joins.
type parts struct {
	log      *slog.Logger
	id       *identity.Identity
	reg      *prometheus.Registry
	conn     *bus.Conn
	handover *daemon.Handover
	ln       net.Listener
	guard    *guard.Guard
	relays   *securelink.Relays
	set      *endpoint.Set
	ordered  *ordered
	in       *ingress.Ingress
}

// Run runs the sidecar.
func (c *runCmd) Run(ctx context.Context) error {
	if err := c.CheckMetrics(); err != nil {
		return err
	}
	daemon.MovesBytes()
	log := c.Logger("ingress", os.Stderr)
	id, err := c.OpenIdentity(identity.RoleIngress)
	if err != nil {
		return err
	}
	p := &parts{log: log, id: id, reg: daemon.NewRegistry(id)}
	news := &relayNews{young: map[string]*time.Timer{}}
	p.relays = securelink.NewRelays(securelink.RelaysConfig{
		TLS: func(relay string) *tls.Config {
			return id.ClientTLS(identity.Name{Role: identity.RoleRelay, ID: relay})
		},
		Instance: daemon.Instance(), Watcher: news, Logger: log,
	})
	self, err := os.Executable()
	if err != nil {
		return err
	}
	p.guard = guard.New(guard.Config{Command: []string{self, "guard"}, Logger: log})
	p.set = endpoint.New(endpoint.Config{
		Dialer: p.relays, Guard: p.guard, Drain: c.DrainWithin, Logger: log, Registerer: p.reg,
	})
	cfg, err := c.ingressConfig(id)
	if err != nil {
		return err
	}
	p.ordered = newOrdered(p.set)
	cfg.Endpoints, cfg.Logger, cfg.Registerer = p.ordered, log, p.reg
	cfg.OnRelays = func(all []ingress.RelayAddress) { p.relays.Set(addresses(all)) }
	cfg.Prober = ingress.LinkProber{TLS: func(name string) *tls.Config { return linkTLS(id, name) }}
	if p.conn, err = bus.Connect(bus.Config{URLs: c.NATS, Identity: id, Logger: log, Registerer: p.reg}); err != nil {
		return err
	}
	defer p.conn.Close()
	cfg.Source = source{p.conn}
	if p.in, err = ingress.New(cfg); err != nil {
		return daemon.UsageError(err.Error())
	}
	news.inbox = p.in.Inbox()
	if c.CheckConfig {
		return nil
	}
	if p.handover, err = daemon.NewHandover(c.PIDFile); err != nil {
		return err
	}
	p.ln, err = p.handover.Listen(func() (net.Listener, error) { return endpoint.Listen(ctx, c.EndpointPort) })
	if err != nil {
		return err
	}
	var boot []securelink.RelayAddress
	for _, r := range id.Bootstrap().Relays {
		boot = append(boot, securelink.RelayAddress{ID: r.ID, Addr: r.Addr})
	}
	p.relays.Set(boot)
	return c.work(ctx, p)
}

// work runs every part until the sidecar has ended.
func (c *runCmd) work(ctx context.Context, p *parts) error {
	// streams ends when the last stream has; side ends before it, as soon as
	// we stop or a successor has taken over.
	streams, stopStreams := context.WithCancel(context.Background())
	defer stopStreams()
	sideCtx, stopSide := context.WithCancel(context.Background())
	defer stopSide()
	accepting, stopAccepting := context.WithCancel(context.Background())
	defer stopAccepting()
	handing, stopHanding := context.WithCancel(ctx)
	defer stopHanding()

	carry, streams := errgroup.WithContext(streams)
	carry.Go(func() error { p.relays.Run(streams); return nil })
	carry.Go(func() error { return p.guard.Run(streams) })
	g, side := errgroup.WithContext(sideCtx)
	started := time.Now()
	show := sidecar{in: p.in, set: p.set, relays: p.relays, conn: p.conn}
	g.Go(func() error {
		return c.ServeMetrics(side, p.log, p.reg, func() error {
			if p.relays.Reachable() == 0 {
				return errors.New("no relay can be reached")
			}
			return nil
		}, daemon.Page{Path: "/status", Handler: statusHandler(show)})
	})
	g.Go(func() error {
		return daemon.Ended(p.id.Run(side, p.conn, func(err error) { p.log.Warn("certificate not renewed", "err", err) }))
	})
	g.Go(func() error { return daemon.Ended(p.conn.FollowRevocations(side)) })
	g.Go(func() error {
		return daemon.Ended(p.conn.PublishStatus(side, func() bus.Status {
			return bus.Status{Version: version, StartedAt: started, Ingress: show.status()}
		}))
	})
	succeeded := false
	g.Go(func() error {
		defer stopSide()
		defer stopAccepting()
		var err error
		succeeded, err = p.handover.Run(handing, p.log)
		return err
	})
	g.Go(func() error {
		// The predecessor lets go of the state when it has seen us ready.
		unlock, err := daemon.Lock(side, filepath.Join(c.StateDir, "ingress.lock"))
		if err != nil {
			return daemon.Ended(err)
		}
		defer unlock()
		return daemon.Ended(p.in.Run(side))
	})
	g.Go(func() error { // a part that fails ends the others
		<-side.Done()
		stopHanding()
		stopAccepting()
		return nil
	})
	served := make(chan error, 1)
	go func() {
		// Until the first orders are here, connections wait in the backlog.
		p.ordered.wait(accepting)
		served <- p.set.Serve(accepting, p.ln)
	}()
	err := g.Wait()
	if !succeeded && ctx.Err() != nil { // nginx outlives a sidecar that fails
		stop, cancel := context.WithTimeout(context.Background(), stopNginxWithin)
		defer cancel()
		err = errors.Join(err, p.in.StopNginx(stop))
	}
	if !succeeded {
		time.AfterFunc(c.StopWithin, stopStreams)
	}
	err = errors.Join(err, <-served)
	stopStreams()
	return errors.Join(err, carry.Wait())
}

func addresses(all []ingress.RelayAddress) []securelink.RelayAddress {
	out := make([]securelink.RelayAddress, 0, len(all))
	for _, r := range all {
		out = append(out, securelink.RelayAddress{ID: r.ID, Addr: r.Addr})
	}
	return out
}

// linkTLS is how nginx speaks to a node.
func linkTLS(id *identity.Identity, serverName string) *tls.Config {
	base := id.ClientTLS(id.Name())
	return &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: base.RootCAs, ServerName: serverName,
		GetClientCertificate: base.GetClientCertificate,
	}
}
