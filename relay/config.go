package relay

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opfield/availability/placement"
)

// The roles that a relay tells apart.
const (
	roleNode       = "node"
	roleIngress    = "ingress"
	roleController = "controller"
)

// Peer is the verified identity of the other end of a session.
type Peer struct {
	Role string
	ID   string
}

// String returns "<role>/<id>".
func (p Peer) String() string { return p.Role + "/" + p.ID }

// Config configures a Server. Zero limits mean the defaults.
type Config struct {
	ID  string
	TLS *tls.Config // requires and verifies a client certificate
	// Authenticate names the peer of a finished handshake, or refuses it.
	Authenticate func(tls.ConnectionState) (Peer, error)

	MaxStreams        int           // in total, 1–1,000,000, default 65,536
	MaxPeerStreams    int           // per peer, 1–1,000,000, default 16,384
	MaxPeerOpenRate   float64       // new streams per second and peer, default 5,000
	MaxStrangers      int           // connections that are not admitted yet, default 1,024
	MaxStrangersPerIP int           // of these from one address, default 128
	RestartWithin     time.Duration // how long an announced restart may take, default 8 s
	DrainWithin       time.Duration // how long running streams may go on after it, default 1 h

	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// DefaultConfig returns the defaults of every limit.
func DefaultConfig() Config {
	return Config{
		MaxStreams:        65536,
		MaxPeerStreams:    16384,
		MaxPeerOpenRate:   5000,
		MaxStrangers:      1024,
		MaxStrangersPerIP: 128,
		RestartWithin:     8 * time.Second,
		DrainWithin:       time.Hour,
	}
}

// Validate reports every field that cannot be used.
func (c Config) Validate() error {
	var errs []error
	if err := placement.CheckName(c.ID); err != nil {
		errs = append(errs, fmt.Errorf("id: %w", err))
	}
	if c.TLS == nil || c.Authenticate == nil {
		errs = append(errs, errors.New("tls: no identity; join the relay first"))
	}
	for _, f := range []struct {
		name string
		v    float64
	}{
		{"maxStreams", float64(c.MaxStreams)}, {"maxPeerStreams", float64(c.MaxPeerStreams)},
		{"maxPeerOpenRate", c.MaxPeerOpenRate}, {"maxStrangers", float64(c.MaxStrangers)},
		{"maxStrangersPerIP", float64(c.MaxStrangersPerIP)},
	} {
		if f.v < 1 || f.v > 1e6 {
			errs = append(errs, fmt.Errorf("%s: %v is outside 1 to 1000000", f.name, f.v))
		}
	}
	if c.RestartWithin < 0 || c.RestartWithin > time.Minute {
		errs = append(errs, fmt.Errorf("restartWithin: %v is outside 0 to 60s", c.RestartWithin))
	}
	if c.DrainWithin < 0 {
		errs = append(errs, fmt.Errorf("drainWithin: %v is negative", c.DrainWithin))
	}
	return errors.Join(errs...)
}
