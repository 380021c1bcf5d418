package node

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/opfield/availability/node/discovery"
	"github.com/opfield/availability/node/docker"
	"github.com/opfield/availability/placement"
)

// watchPortsLocked starts and ends probes so that exactly the ports of
// running containers are watched, and returns the containers with what the
// probes found. The mutex is held.
func (a *Agent) watchPortsLocked(ctx context.Context, helpers *sync.WaitGroup, snapshot []docker.Container, managed map[string]discovery.Managed) []discovery.Container {
	byID := map[string][]placement.Port{}
	for _, m := range managed {
		byID[m.Container] = m.Ports
	}
	wanted := map[probeKey]bool{}
	containers := make([]discovery.Container, len(snapshot))
	for i, c := range snapshot {
		containers[i] = c.Container
		if c.Status != discovery.Running || !c.Addr.IsValid() {
			continue
		}
		ports, ours := byID[c.ID]
		if !ours {
			spec, err := discovery.ParseLabels(c.Labels)
			if err != nil {
				continue // Fold warns of it
			}
			ports = spec.Ports
		}
		containers[i].Ports = map[uint16]discovery.PortState{}
		for _, port := range ports {
			key := probeKey{
				container: c.ID, startedAt: c.StartedAt, addr: netip.AddrPortFrom(c.Addr, port.Port),
				passive: c.Health != discovery.NoCheck,
			}
			wanted[key] = true
			p := a.probes[key]
			if p == nil {
				p = a.startProbe(ctx, helpers, key)
				a.probes[key] = p
			}
			containers[i].Ports[port.Port] = p.state
		}
	}
	for key, p := range a.probes {
		if !wanted[key] {
			p.cancel()
			delete(a.probes, key)
		}
	}
	return containers
}

func (a *Agent) startProbe(ctx context.Context, helpers *sync.WaitGroup, key probeKey) *probe {
	ctx, cancel := context.WithCancel(ctx)
	twin := key
	twin.passive = !key.passive
	state := discovery.PortUnknown
	if former := a.probes[twin]; former != nil {
		// The health check was relied on so far: the port counts as open until
		// the first look, a moment from now, says otherwise.
		if state = former.state; state == discovery.PortUnknown && !key.passive {
			state = discovery.PortOpen
		}
	}
	p := &probe{state: state, addr: key.addr, passive: key.passive, kick: make(chan struct{}, 1), cancel: cancel}
	helpers.Go(func() {
		defer cancel()
		p.run(ctx, state, func(state discovery.PortState) {
			a.mu.Lock()
			p.state = state
			a.mu.Unlock()
			a.again()
		})
	})
	return p
}

// fetch asks for the certificate of a workload until it is there.
func (a *Agent) fetch(ctx context.Context, workload string) {
	for wait := certificateRetry; ; wait = min(2*wait, certificateRetries) {
		call, cancel := context.WithTimeout(ctx, certificateLimit)
		err := a.config.Certificates.Ensure(call, workload)
		cancel()
		a.mu.Lock()
		if err == nil {
			delete(a.asked, workload)
		} else {
			a.asked[workload] = err.Error()
		}
		a.mu.Unlock()
		a.again()
		if err == nil {
			return
		}
		a.config.Logger.Warn("workload waits for its certificate", "workload", workload, "err", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}
