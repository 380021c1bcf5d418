package ingress

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// probeTimeout bounds one probe; probesAtOnce bounds their number.
const (
	probeTimeout = 10 * time.Second
	probesAtOnce = 8
)

// Prober asks a placement through its link whether it answers.
type Prober interface {
	Probe(ctx context.Context, endpoint netip.AddrPort, route upstream.Route) error
}

// LinkProber probes like nginx would: a TLS handshake with the node and, for
// HTTP, one request. Any answer is good: it proves that the way is open.
type LinkProber struct {
	TLS func(serverName string) *tls.Config
}

// Probe implements Prober.
func (p LinkProber) Probe(ctx context.Context, endpoint netip.AddrPort, route upstream.Route) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	raw, err := (&net.Dialer{}).DialContext(ctx, "tcp", endpoint.String())
	if err != nil {
		return fmt.Errorf("connect link: %w", err)
	}
	defer raw.Close()
	conn := tls.Client(raw, p.TLS(placement.ServerName(route.Workload)))
	if err := conn.HandshakeContext(ctx); err != nil {
		return fmt.Errorf("handshake: %w", err)
	}
	if route.Protocol != placement.ProtocolHTTP || len(route.Hosts) == 0 {
		return conn.Close()
	}
	if at, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(at); err != nil {
			return fmt.Errorf("set deadline: %w", err)
		}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodHead, "http://"+probeHost(route.Hosts[0])+route.Path, nil)
	if err != nil {
		return fmt.Errorf("request: %w", err)
	}
	req.Header.Set("User-Agent", "opfield-ingress-probe")
	req.Close = true
	if err := req.Write(conn); err != nil {
		return fmt.Errorf("request: %w", err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), req)
	if err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	return resp.Body.Close()
}

// probeHost makes a name out of a wildcard.
func probeHost(host string) string {
	if len(host) > 2 && host[:2] == "*." {
		return "probe" + host[1:]
	}
	return host
}

// target is one service with the endpoints of its open placements.
type target struct {
	service service
	route   upstream.Route
	open    []netip.AddrPort
}

func (l *loop) targets() []target {
	seen := map[service]bool{}
	open := map[service][]netip.AddrPort{}
	for _, o := range l.orders {
		if a, ok := l.book.get(o.Link); ok && o.State == upstream.Open {
			s := service{o.Link.Placement.Workload, o.Link.Port}
			open[s] = append(open[s], netip.AddrPortFrom(a, l.config.Render.EndpointPort))
		}
	}
	var out []target
	for _, v := range l.table.Routes() {
		s := service{v.Route.Workload, v.Route.Port}
		if v.Serves && !seen[s] && len(open[s]) > 0 {
			seen[s] = true
			out = append(out, target{service: s, route: v.Route, open: open[s]})
		}
	}
	return out
}

// probeAll probes every service; one answering placement is enough.
func probeAll(ctx context.Context, p Prober, targets []target) map[service]bool {
	var mu sync.Mutex
	out := map[service]bool{}
	var g errgroup.Group
	g.SetLimit(probesAtOnce)
	for _, t := range targets {
		g.Go(func() error {
			ok := false
			for _, endpoint := range t.open {
				if ok = p.Probe(ctx, endpoint, t.route) == nil; ok {
					break
				}
			}
			mu.Lock()
			defer mu.Unlock()
			out[t.service] = ok
			return nil
		})
	}
	_ = g.Wait() // the functions return no errors
	return out
}
