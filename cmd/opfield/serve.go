package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/opfield/availability/api"
	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/cmd/internal/daemon"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/policy/engine"
	"github.com/opfield/availability/registry"
	"github.com/opfield/availability/securelink"
)

type serveCmd struct {
	daemon.MetricsFlags `set:"metrics=127.0.0.1:9100"`

	StateDir    string   `help:"Folder of the CA, the identities and NATS." default:"/var/lib/opfield" type:"path"`
	Listen      string   `help:"Address of the join endpoint." default:":8480"`
	NATSListen  string   `name:"nats-listen" help:"Address of the embedded NATS server." default:":4222"`
	NATSURL     []string `name:"nats-url" help:"Use this own NATS cluster instead; repeatable."`
	NATSCA      string   `name:"nats-ca" help:"PEM file with the CA of the own cluster's server certificates." type:"existingfile"`
	Name        []string `help:"Host name or address under which others reach this host; repeatable. Default: the addresses of this host."`
	LogLevel    string   `help:"debug, info, warn or error." default:"info" enum:"debug,info,warn,error"`
	CheckConfig bool     `help:"Check the configuration and exit."`
}

// check reports every problem of the configuration.
func (c *serveCmd) check() error {
	var errs []error
	for _, a := range []struct{ flag, addr string }{{"--listen", c.Listen}, {"--nats-listen", c.NATSListen}} {
		if _, _, err := net.SplitHostPort(a.addr); err != nil {
			errs = append(errs, fmt.Errorf("%s %q: want host:port, such as :8480", a.flag, a.addr))
		}
	}
	if err := c.CheckMetrics(); err != nil {
		errs = append(errs, err)
	}
	if c.NATSCA != "" && len(c.NATSURL) == 0 {
		errs = append(errs, errors.New("--nats-ca: want --nats-url with it; the embedded server uses the controller's own CA"))
	}
	for _, u := range c.NATSURL {
		if !strings.HasPrefix(u, "tls://") {
			errs = append(errs, fmt.Errorf("--nats-url %q: want tls://host:port", u))
		}
	}
	for _, n := range c.Name {
		if net.ParseIP(n) == nil && strings.ContainsAny(n, ":/ \"") {
			errs = append(errs, fmt.Errorf("--name %q: want a host name or an address without a port", n))
		}
	}
	return errors.Join(errs...)
}

// Run serves until the session ends.
func (c *serveCmd) Run(s *session, cli *app) error {
	if err := c.check(); err != nil {
		return usageError(err.Error())
	}
	if c.CheckConfig {
		s.say("the configuration is good")
		return nil
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		return err
	}
	log := slog.New(slog.NewJSONHandler(s.talk, &slog.HandlerOptions{Level: level})).With("component", "controller")
	err := c.serve(s.ctx, cli.Socket, log)
	if s.ctx.Err() != nil && errors.Is(err, context.Canceled) {
		log.Info("stopped")
		return nil
	}
	return err
}

func (c *serveCmd) serve(ctx context.Context, socket string, log *slog.Logger) (err error) {
	ca, err := identity.OpenCA(filepath.Join(c.StateDir, "ca"))
	if err != nil {
		return fmt.Errorf("--state-dir: %w", err)
	}
	defer func() { err = errors.Join(err, ca.Close()) }()
	boot, err := c.bootstrap()
	if err != nil {
		return err
	}
	if len(c.Name) == 0 {
		log.Warn("no --name given; others are told the addresses of this host", "names", strings.Join(c.names(), " "))
	}
	main, err := ca.Local(filepath.Join(c.StateDir, "identity"), identity.ControllerName(), boot, c.names())
	if err != nil {
		return err
	}
	writer, err := ca.Local(filepath.Join(c.StateDir, "store"), identity.StoreName(), boot, nil)
	if err != nil {
		return err
	}
	if err := main.SetRevoked(ca.Revocations()); err != nil {
		return err
	}
	// Everything that can be refused by the system is opened before anything
	// runs.
	joinLn, err := net.Listen("tcp", c.Listen)
	if err != nil {
		return fmt.Errorf("--listen, the join endpoint: %w", err)
	}
	defer joinLn.Close()
	apiLn, err := api.Listen(socket)
	if err != nil {
		return fmt.Errorf("--socket: %w", err)
	}
	defer apiLn.Close()
	var metricsLn net.Listener
	if c.Metrics != "" {
		if metricsLn, err = net.Listen("tcp", c.Metrics); err != nil {
			return fmt.Errorf("--metrics: %w", err)
		}
		defer metricsLn.Close()
	}

	urls, stopNATS, err := c.startNATS(ctx, main, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopNATS()) }() // after its clients
	reg := daemon.NewRegistry(main)
	conn, err := bus.Connect(bus.Config{URLs: urls, Identity: main, Logger: log, Registerer: reg})
	if err != nil {
		return err
	}
	defer conn.Close()
	store, err := bus.OpenStore(bus.Config{URLs: urls, Identity: writer, Logger: log.With("connection", "store")})
	if err != nil {
		return err
	}
	defer store.Close()
	fleet, err := api.NewFleet(api.FleetConfig{Conn: conn, Store: store, Members: ca.Members, Logger: log, Registerer: reg})
	if err != nil {
		return err
	}
	audit, err := bus.NewAuditLog(bus.AuditConfig{Store: store, Logger: log, Registerer: reg})
	if err != nil {
		return err
	}
	rights := &imageRights{log: log}
	images, err := registry.New(registry.Config{
		Dir: filepath.Join(c.StateDir, "registry"), Grants: rights, Keep: rights.keep, Identity: main, Logger: log, Registerer: reg,
	})
	if err != nil {
		return err
	}
	links := &securelink.LinkSet{}
	links.Set([]securelink.Record{images.Record()})
	relays := securelink.NewRelays(securelink.RelaysConfig{
		TLS: func(relay string) *tls.Config {
			return main.ClientTLS(identity.Name{Role: identity.RoleRelay, ID: relay})
		},
		Instance: daemon.Instance(), Links: links, Accept: images.Take, Logger: log,
	})
	relays.Set(relayAddresses(ca))
	keeper := newKeeper(ca, main, conn, store, log)
	changed := func() {
		keeper.wake()
		relays.Set(relayAddresses(ca))
	}
	decide, err := engine.New(engine.Config{
		Store: store, Nodes: conn, Fleet: fleet, Audit: audit.Add, Logger: log.With("part", "policy"), Registerer: reg,
		// The embedded server's port and store folder have one owner: no other
		// controller is alive that could use them.
		Alone: len(c.NATSURL) == 0,
		Revoke: func(_ context.Context, node string) error {
			_, err := ca.Revoke(identity.Name{Role: identity.RoleNode, ID: node})
			changed()
			return err
		},
	})
	if err != nil {
		return err
	}
	rights.pinned = func(context.Context) (map[string][]string, error) {
		digests, known := decide.Digests()
		if !known {
			return nil, registry.ErrUnknown
		}
		return digests, nil
	}
	server, err := api.New(api.Config{
		Conn: conn, Store: store, CA: ca, Fleet: fleet, CheckRoute: checkRoute, Availability: decide, Audit: audit.Add, Logger: log,
		Revoked: func([]identity.Revocation) { changed() },
	})
	if err != nil {
		return err
	}
	joiner := &identity.Joiner{CA: ca, Identity: main, Logger: log, Joined: func(identity.Member) { changed() }, Bootstrap: func() identity.Bootstrap {
		b := boot
		b.Relays = relaysOf(ca)
		return b
	}}
	report := func(err error) { log.Warn("certificate not renewed yet", "err", err) }

	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return keeper.Run(ctx) })
	g.Go(func() error { return fleet.Run(ctx) })
	g.Go(func() error { return audit.Run(ctx) })
	g.Go(func() error { return decide.Run(ctx) })
	g.Go(func() error { return conn.FollowBucket(ctx, bus.BucketDesired, rights.learn) })
	g.Go(func() error { return images.Run(ctx) })
	g.Go(func() error { relays.Run(ctx); return nil })
	g.Go(func() error { return server.Serve(ctx, apiLn) })
	g.Go(func() error { return joiner.Serve(ctx, joinLn) })
	g.Go(func() error { return conn.AnswerSign(ctx, ca) })
	g.Go(func() error { return conn.AnswerLast(ctx) })
	g.Go(func() error { return main.Run(ctx, ca, report) })
	g.Go(func() error { return writer.Run(ctx, ca, report) })
	if metricsLn != nil {
		g.Go(func() error { return daemon.ServeMetricsOn(ctx, metricsLn, reg, keeper.ready) })
	}
	log.Info("serving", "join", joinLn.Addr().String(), "nats", strings.Join(urls, " "), "socket", socket, "version", builtVersion())
	return g.Wait()
}

// startNATS starts the embedded server, unless another one is to be used.
func (c *serveCmd) startNATS(ctx context.Context, id *identity.Identity, log *slog.Logger) (urls []string, stop func() error, err error) {
	if len(c.NATSURL) > 0 {
		return c.NATSURL, func() error { return nil }, nil
	}
	srv, err := bus.NewServer(bus.ServerConfig{Addr: c.NATSListen, StoreDir: filepath.Join(c.StateDir, "nats"), Identity: id, Logger: log})
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan error, 1)
	go func() { done <- srv.Run(ctx) }()
	select {
	case <-srv.Ready():
	case err := <-done:
		cancel()
		return nil, nil, fmt.Errorf("--nats-listen: %w", err)
	}
	return []string{srv.URL()}, func() error {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			return err
		}
		return nil
	}, nil
}

// bootstrap is what joining processes are told, without relays.
func (c *serveCmd) bootstrap() (identity.Bootstrap, error) {
	var b identity.Bootstrap
	names := c.names()
	if len(names) == 0 {
		return b, errors.New("--name: this host has no address that others can reach; give one")
	}
	if _, port, err := net.SplitHostPort(c.Listen); err == nil {
		b.Controller = net.JoinHostPort(names[0], port)
	}
	if len(c.NATSURL) == 0 {
		_, port, err := net.SplitHostPort(c.NATSListen)
		if err != nil {
			return b, err
		}
		for _, n := range names {
			b.NATS = append(b.NATS, "tls://"+net.JoinHostPort(n, port))
		}
		return b, nil
	}
	b.NATS = c.NATSURL
	if c.NATSCA != "" {
		pem, err := os.ReadFile(c.NATSCA)
		if err != nil {
			return b, fmt.Errorf("--nats-ca: %w", err)
		}
		b.NATSCA = string(pem)
	}
	return b, nil
}

// names returns --name, or every address of this host that is not loopback.
func (c *serveCmd) names() []string {
	if len(c.Name) > 0 {
		return c.Name
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	var out []string
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() {
			out = append(out, n.IP.String())
		}
	}
	return out
}
