package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/cmd/internal/daemon"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/relay"
	"github.com/opfield/availability/securelink"
)

// stopWithin is how long running streams may go on after SIGTERM without a
// successor. Peers wait for 8 s (--restart-within): the rest is for the start.
const stopWithin = 3 * time.Second

type runCmd struct {
	daemon.Common
	daemon.MetricsFlags `set:"metrics=127.0.0.1:9101"`
	Listen              string        `help:"Address for nodes and ingress nodes." default:":9443"`
	PIDFile             string        `name:"pid-file" help:"File that holds the process id of the newest process."`
	MaxStreams          int           `help:"Streams in total." default:"65536"`
	MaxPeerStreams      int           `help:"Streams per peer." default:"16384"`
	MaxPeerOpenRate     float64       `help:"New streams per second and peer." default:"5000"`
	MaxStrangers        int           `help:"Connections that are not admitted yet." default:"1024"`
	MaxStrangersPerIP   int           `name:"max-strangers-per-ip" help:"Of these, from one address." default:"128"`
	RestartWithin       time.Duration `help:"How long an announced restart may take." default:"8s"`
	DrainWithin         time.Duration `help:"How long streams may go on in the old process after a restart." default:"1h"`
}

// Run runs the relay.
func (c *runCmd) Run(ctx context.Context) error {
	if err := c.CheckMetrics(); err != nil {
		return err
	}
	daemon.MovesBytes()
	log := c.Logger("relay", os.Stderr)
	id, err := c.OpenIdentity(identity.RoleRelay)
	if err != nil {
		return err
	}
	reg := daemon.NewRegistry(id)
	cfg := relay.Config{
		ID: id.Name().ID, TLS: id.ServerTLS(identity.RoleNode, identity.RoleIngress, identity.RoleController),
		Authenticate: peer,
		MaxStreams:   c.MaxStreams, MaxPeerStreams: c.MaxPeerStreams, MaxPeerOpenRate: c.MaxPeerOpenRate,
		MaxStrangers: c.MaxStrangers, MaxStrangersPerIP: c.MaxStrangersPerIP,
		RestartWithin: c.RestartWithin, DrainWithin: c.DrainWithin,
		Logger: log, Registerer: reg,
	}
	if err := cfg.Validate(); err != nil {
		return daemon.UsageError(err.Error())
	}
	if c.CheckConfig {
		return nil
	}
	server, err := relay.New(cfg)
	if err != nil {
		return err
	}
	handover, err := daemon.NewHandover(c.PIDFile)
	if err != nil {
		return err
	}
	ln, err := handover.Listen(func() (net.Listener, error) {
		cfg := securelink.ListenConfig()
		return cfg.Listen(ctx, "tcp", c.Listen)
	})
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	conn, err := bus.Connect(bus.Config{URLs: c.NATS, Identity: id, Logger: log, Registerer: reg})
	if err != nil {
		return err
	}
	defer conn.Close()
	return c.work(ctx, log, id, conn, server, handover, ln, func(ctx context.Context) error {
		return c.ServeMetrics(ctx, log, reg, func() error { return nil })
	})
}

// peer names the other end of a finished handshake by its certificate.
func peer(cs tls.ConnectionState) (relay.Peer, error) {
	n, err := identity.PeerName(cs)
	return relay.Peer{Role: string(n.Role), ID: n.ID}, err
}

// work runs every part until the relay has ended.
func (c *runCmd) work(ctx context.Context, log *slog.Logger, id *identity.Identity, conn *bus.Conn,
	server *relay.Server, handover *daemon.Handover, ln net.Listener, metrics func(context.Context) error) error {
	// Everything but the streams ends at once when we stop or are replaced.
	side, stopSide := context.WithCancel(context.Background())
	defer stopSide()
	serve, stopServe := context.WithCancel(context.Background())
	defer stopServe()
	handing, stopHanding := context.WithCancel(ctx)
	defer stopHanding()
	g, side := errgroup.WithContext(side)
	started := time.Now()
	g.Go(func() error { return metrics(side) })
	g.Go(func() error {
		return daemon.Ended(id.Run(side, conn, func(err error) { log.Warn("certificate not renewed", "err", err) }))
	})
	g.Go(func() error { return daemon.Ended(conn.FollowRevocations(side)) })
	g.Go(func() error {
		for {
			changed := id.RevocationsChanged()
			server.DropIf(id.Revoked)
			select {
			case <-side.Done():
				return nil
			case <-changed:
			}
		}
	})
	g.Go(func() error {
		return daemon.Ended(conn.PublishStatus(side, func() bus.Status {
			return bus.Status{Name: id.Name(), Version: version, StartedAt: started, Expires: id.Expires(), Relay: status(server, ln)}
		}))
	})
	g.Go(func() error {
		defer stopSide()
		defer ln.Close() // Serve then lets streams finish
		defer server.Retire()
		succeeded, err := handover.Run(handing, log)
		if !succeeded {
			time.AfterFunc(stopWithin, stopServe)
		}
		return err
	})
	g.Go(func() error { // a part that fails ends the relay: its peers have others, and it is started again
		<-side.Done()
		stopHanding()
		return nil
	})
	err := server.Serve(serve, ln)
	return errors.Join(err, g.Wait())
}

func status(server *relay.Server, ln net.Listener) *bus.RelayStatus {
	sessions, streams := server.Status()
	st := &bus.RelayStatus{Addr: ln.Addr().String(), Streams: streams, Sessions: []bus.RelaySession{}}
	for _, s := range sessions {
		st.Sessions = append(st.Sessions, bus.RelaySession{
			Name: identity.Name{Role: identity.Role(s.Peer.Role), ID: s.Peer.ID}, Since: s.Since, Links: s.Links, Streams: s.Streams,
		})
	}
	return st
}
