package api

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

const expiryWarning = 14 * 24 * time.Hour

// Report is the answer of GET /v1/status.
type Report struct {
	NATS      string        `json:"nats"` // "connected" or what is wrong
	Nodes     []NodeView    `json:"nodes"`
	Relays    []ProcessView `json:"relays"`
	Ingresses []ProcessView `json:"ingresses"`
	Routes    []RouteView   `json:"routes"`
	Policies  []policy.View `json:"policies"`
	Warnings  []string      `json:"warnings"`
}

// ProcessView is a process with its own words about itself.
type ProcessView struct {
	ID      string             `json:"id"`
	State   Liveness           `json:"state"`
	Version string             `json:"version,omitempty"`
	Seen    time.Time          `json:"seen,omitzero"`
	Expires time.Time          `json:"certificateExpires,omitzero"`
	Relay   *bus.RelayStatus   `json:"relay,omitempty"`
	Ingress *bus.IngressStatus `json:"ingress,omitempty"`
}

// NodeView is a node.
type NodeView struct {
	ID         string                   `json:"id"`
	Name       string                   `json:"name,omitempty"` // that an operator gave it, for people
	State      Liveness                 `json:"state"`
	Since      time.Time                `json:"since,omitzero"`
	Reason     string                   `json:"reason,omitempty"`
	Drained    bool                     `json:"drained,omitempty"` // an operator wants no placement there
	Version    string                   `json:"version,omitempty"`
	Seen       time.Time                `json:"seen,omitzero"`
	Expires    time.Time                `json:"certificateExpires,omitzero"`
	Workloads  string                   `json:"workloads"` // what it may announce
	Docker     string                   `json:"docker,omitempty"`
	Relays     []bus.RelaySessionStatus `json:"relays"`
	Warnings   []string                 `json:"warnings"`
	Placements []placement.Event        `json:"placements"`
}

// NodeList is the answer of GET /v1/nodes.
type NodeList struct {
	Nodes []NodeView `json:"nodes"`
}

// RouteView is a route with where it leads.
type RouteView struct {
	Route      json.RawMessage   `json:"route"`
	Name       string            `json:"name"`
	Placements []placement.Event `json:"placements"`
	Ingresses  []RouteOnIngress  `json:"ingresses"`
}

// RouteOnIngress is how an ingress node sees the route.
type RouteOnIngress struct {
	Ingress string `json:"ingress"`
	Health  string `json:"health"`
	Error   string `json:"error,omitempty"`
}

func comparePlacements(a, b placement.ID) int { return cmp.Compare(a.String(), b.String()) }

func (s *Server) status(ctx context.Context, _ *http.Request) (any, error) {
	rep := s.Fleet.report(time.Now())
	s.drained(rep.Nodes)
	if s.Availability != nil {
		if err := s.Availability.Known(); err != nil {
			rep.Warnings = append(rep.Warnings, "available workloads are not shown: "+problemOf(err, s.Logger).Detail)
		} else {
			rep.Policies = append(rep.Policies, s.Availability.List()...)
		}
	}
	routes, err := s.listRoutes(ctx, nil)
	if err != nil {
		rep.Warnings = append(rep.Warnings, "routes cannot be read: "+problemOf(err, s.Logger).Detail)
		return rep, nil
	}
	for _, raw := range routes.(RouteList).Routes {
		rep.Routes = append(rep.Routes, s.Fleet.routeView(raw, rep.Ingresses))
	}
	certs, err := s.certs(ctx)
	if err != nil {
		rep.Warnings = append(rep.Warnings, "certificates cannot be read: "+problemOf(err, s.Logger).Detail)
	}
	for _, c := range certs {
		if left := time.Until(c.Expires); c.Error == "" && left < expiryWarning {
			rep.Warnings = append(rep.Warnings, fmt.Sprintf("certificate %s expires at %s", c.Name, c.Expires.UTC().Format(time.RFC3339)))
		}
	}
	return rep, nil
}

func (s *Server) nodes(context.Context, *http.Request) (any, error) {
	list := NodeList{s.Fleet.report(time.Now()).Nodes}
	s.drained(list.Nodes)
	return list, nil
}

// drained adds what the policy engine knows of the nodes.
func (s *Server) drained(nodes []NodeView) {
	if s.Availability == nil {
		return
	}
	known := map[string]policy.Node{}
	for _, n := range s.Availability.Nodes() {
		known[n.ID] = n
	}
	for i := range nodes {
		nodes[i].Drained, nodes[i].Name = known[nodes[i].ID].Drained, known[nodes[i].ID].Name
	}
}

// report describes the fleet.
func (f *Fleet) report(now time.Time) Report {
	rep := Report{NATS: "connected", Nodes: []NodeView{}, Relays: []ProcessView{}, Ingresses: []ProcessView{}, Routes: []RouteView{}, Policies: []policy.View{}, Warnings: []string{}}
	if !f.cfg.Conn.Connected() {
		rep.NATS = "not connected"
		rep.Warnings = append(rep.Warnings, "the controller is not connected to NATS: "+f.cfg.Conn.LastError())
	}
	members := f.cfg.Members()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range members {
		if m.Revoked {
			continue
		}
		s, known := f.processes[m.Name]
		p := ProcessView{ID: m.Name.ID, State: Unseen, Version: s.status.Version, Seen: s.at, Expires: m.NotAfter, Relay: s.status.Relay, Ingress: s.status.Ingress}
		switch {
		case known && now.Sub(s.at) < silentAfter:
			p.State = Online
		case known:
			p.State = NotReporting
		}
		if known {
			p.Expires = s.status.Expires
		}
		if p.Expires.Sub(now) < expiryWarning {
			rep.Warnings = append(rep.Warnings, fmt.Sprintf("the certificate of %s expires at %s", m.Name, p.Expires.UTC().Format(time.RFC3339)))
		}
		switch m.Name.Role {
		case identity.RoleNode:
			rep.Nodes = append(rep.Nodes, f.nodeViewLocked(m, p, s))
		case identity.RoleRelay:
			rep.Relays = append(rep.Relays, p)
		case identity.RoleIngress:
			rep.Ingresses = append(rep.Ingresses, p)
		}
	}
	return rep
}

func (f *Fleet) nodeViewLocked(m identity.Member, p ProcessView, s seen) NodeView {
	v := NodeView{
		ID: p.ID, State: f.verdicts[p.ID].state, Reason: f.verdicts[p.ID].reason, Since: f.since[p.ID],
		Version: p.Version, Seen: p.Seen, Expires: p.Expires, Workloads: m.Grant.String(),
		Relays: []bus.RelaySessionStatus{}, Warnings: []string{}, Placements: []placement.Event{},
	}
	if v.State == "" {
		v.State = Unseen
	}
	if n := s.status.Node; n != nil {
		v.Docker = n.Docker
		v.Relays = append(v.Relays, n.Relays...)
		v.Warnings = append(v.Warnings, n.Warnings...)
	}
	v.Placements = append(v.Placements, f.placementsLocked(func(e placement.Event) bool { return e.Node == p.ID })...)
	return v
}

// placementsLocked returns the newest events that match, without removed
// placements, in a fixed order.
func (f *Fleet) placementsLocked(match func(placement.Event) bool) []placement.Event {
	out := []placement.Event{}
	for _, e := range f.placements {
		if e.State != placement.StateRemoved && match(e) {
			out = append(out, e)
		}
	}
	slices.SortFunc(out, func(a, b placement.Event) int { return cmp.Compare(a.Placement, b.Placement) })
	return out
}

func (f *Fleet) routeView(raw json.RawMessage, ingresses []ProcessView) RouteView {
	var r struct {
		Name     string `json:"name"`
		Workload string `json:"workload"`
		Port     uint16 `json:"port"`
	}
	_ = json.Unmarshal(raw, &r) // stored by us
	v := RouteView{Route: raw, Name: r.Name, Ingresses: []RouteOnIngress{}}
	f.mu.Lock()
	v.Placements = f.placementsLocked(func(e placement.Event) bool {
		return e.Workload == r.Workload && slices.ContainsFunc(e.Ports, func(p placement.Port) bool { return p.Port == r.Port })
	})
	f.mu.Unlock()
	for _, p := range ingresses {
		if p.Ingress == nil {
			continue
		}
		for _, on := range p.Ingress.Routes {
			if on.Name == r.Name {
				v.Ingresses = append(v.Ingresses, RouteOnIngress{Ingress: p.ID, Health: on.Health, Error: on.Error})
			}
		}
	}
	return v
}
