package ingress

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/opfield/availability/upstream"
)

// Status is what the sidecar says about itself.
type Status struct {
	Routes            []RouteStatus     `json:"routes"`
	Reload            ReloadStatus      `json:"reload"`
	CertificateExpiry map[string]string `json:"certificateExpiry,omitempty"` // RFC 3339 by pair
}

// RouteStatus is the state of one route.
type RouteStatus struct {
	Name   string `json:"name"`
	Health Health `json:"health"`
	Open   int    `json:"open"`
	Known  int    `json:"known"`
	Error  string `json:"error,omitempty"`
}

// Health says whether a route answers.
type Health string

// The healths of a route. The zero value means unknown.
const (
	HealthOnline  Health = "online"  // a serving placement answers through its link
	HealthOffline Health = "offline" // none does
	HealthRefused Health = "refused" // the route has an error and serves nothing
	HealthUnknown Health = ""
)

// ReloadStatus is the state of nginx.
type ReloadStatus struct {
	Generation string    `json:"generation"`
	At         time.Time `json:"at,omitzero"`
	Result     string    `json:"result,omitempty"` // "applied", "unchanged" or "failed"
	Error      string    `json:"error,omitempty"`
	Pending    bool      `json:"pending"`
}

// board holds the status for readers outside the loop.
type board struct {
	mu     sync.Mutex
	status Status
}

func (b *board) set(s Status) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.status = s
}

func (b *board) get() Status {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.status
	s.Routes = slices.Clone(s.Routes)
	s.CertificateExpiry = maps.Clone(s.CertificateExpiry)
	return s
}

func (l *loop) publish() {
	s := Status{CertificateExpiry: map[string]string{}, Routes: make([]RouteStatus, 0, len(l.state.Routes))}
	for v := range l.table.EachRoute() {
		r := RouteStatus{Name: v.Route.Name, Open: v.Open, Known: v.Known}
		if len(v.Problems) > 0 {
			r.Error = v.Problems.Error()
		}
		if err := l.leftOut[v.Route.Name]; err != "" {
			r.Error = err
		} else if t := v.Route.TLS; t != nil && r.Error == "" {
			if err := l.certs.errs[certID(*t)]; err != nil {
				r.Error = "tls: " + err.Error()
			} else if !l.certs.has(certID(*t)) {
				r.Error = "tls: the certificate has not arrived yet; add it or wait for it"
			}
		}
		r.Health = l.health(v)
		s.Routes = append(s.Routes, r)
	}
	for id, at := range l.certs.expiry {
		s.CertificateExpiry[id] = at.UTC().Format(time.RFC3339)
	}
	s.Reload = l.reload
	s.Reload.Pending = l.schedule.Pending()
	l.metrics.observe(s, l.orders)
	l.board.set(s)
}

func (l *loop) health(v upstream.RouteView) Health {
	switch {
	case !v.Serves, l.leftOut[v.Route.Name] != "":
		return HealthRefused
	case v.Open == 0:
		return HealthOffline
	}
	if ok, probed := l.probed[service{v.Route.Workload, v.Route.Port}]; probed && !ok {
		return HealthOffline
	}
	return HealthOnline
}
