package node

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/opfield/availability/node/discovery"
)

// probe keeps watch over one port of one start of a container.
type probe struct {
	addr netip.AddrPort
	// passive probes look only after a kick, until the port answers: the
	// image's health check says the rest.
	passive bool
	kick    chan struct{} // capacity 1: look now
	cancel  context.CancelFunc

	state discovery.PortState // guarded by Agent.mu
}

// run probes until the context ends and tells every change of the state.
func (p *probe) run(ctx context.Context, state discovery.PortState, changed func(discovery.PortState)) {
	wait, timeouts := time.Duration(0), 0
	since := time.Now() // of being not open
	if p.passive {
		wait = -1
	}
	for {
		var due <-chan time.Time
		if wait >= 0 {
			due = time.After(wait)
		}
		select {
		case <-ctx.Done():
			return
		case <-p.kick:
		case <-due:
		}
		err := dial(ctx, p.addr)
		if ctx.Err() != nil {
			return
		}
		next := state
		switch {
		case err == nil:
			timeouts = 0
			next = discovery.PortOpen
		case state == discovery.PortOpen && !errors.Is(err, syscall.ECONNREFUSED) && timeouts+1 < probeTimeouts:
			timeouts++
		case state == discovery.PortOpen || state == discovery.PortClosed, p.passive:
			next = discovery.PortClosed
		default:
			next = discovery.PortOpening
		}
		if next != state {
			if next != discovery.PortOpen {
				since = time.Now()
			}
			state = next
			changed(state)
		}
		switch {
		case state == discovery.PortOpen && timeouts > 0:
			wait = probeEvery
		case state == discovery.PortOpen && p.passive:
			wait = -1
		case state == discovery.PortOpen:
			wait = probeReady
		case time.Since(since) < probeFastFor:
			wait = probeEvery
		default:
			wait = min(2*max(wait, probeEvery), probeSlow)
		}
	}
}

// look asks for a probe now; one that is asked for already is enough.
func (p *probe) look() {
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

func dial(ctx context.Context, addr netip.AddrPort) error {
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr.String())
	if err != nil {
		return err
	}
	return conn.Close()
}
