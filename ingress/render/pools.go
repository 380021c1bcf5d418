package render

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// pools writes the upstream lists (RTE-2):
//
//	_r  repeatable methods: open members as primaries that are never marked
//	    failed, the others as backups
//	_a  the same without kept connections, for the second round
//	_o  the other methods: open members that are skipped for a second after a
//	    failure, and every placement again as backup
//	_g  the same for gRPC, whose kept connections speak HTTP/2
//	_t  the same for TCP, in the stream block
func (m *model) pools(routes []upstream.Route, services map[string]upstream.Service, address func(placement.LinkID) (netip.Addr, bool)) error {
	type use struct{ http, grpc, tcp, fresh bool }
	uses := map[string]use{}
	order := []upstream.Service{}
	for _, r := range routes {
		key := serviceKey(r.Workload, r.Port)
		u, ok := uses[key]
		if !ok {
			s := services[key]
			s.Workload, s.Port = r.Workload, r.Port
			order = append(order, s)
		}
		switch r.Protocol {
		case placement.ProtocolGRPC:
			u.grpc = true
		case placement.ProtocolTCP:
			u.tcp = true
		default:
			u.http = true
			u.fresh = u.fresh || r.Settings.FreshConnections
		}
		uses[key] = u
	}
	slices.SortFunc(order, func(a, b upstream.Service) int {
		return upstream.CompareLinks(
			placement.LinkID{Placement: placement.ID{Workload: a.Workload}, Port: a.Port},
			placement.LinkID{Placement: placement.ID{Workload: b.Workload}, Port: b.Port})
	})
	for _, s := range order {
		primaries, err := m.addresses(s.Primaries(), address)
		if err != nil {
			return err
		}
		backups, err := m.addresses(s.Backups(), address)
		if err != nil {
			return err
		}
		if len(primaries) == 0 {
			primaries = []netip.AddrPort{netip.AddrPortFrom(nothing(), m.EndpointPort)}
		}
		u := uses[serviceKey(s.Workload, s.Port)]
		repeatable := newPool(s, "r", lines(primaries, " max_fails=0"), lines(backups, " max_fails=0 backup"))
		repeatable.Keepalive = &keepalive{Connections: idleConnections, Timeout: repeatableReuse}
		again := repeatable
		again.Kind, again.Keepalive = "a", nil
		others := newPool(s, "o",
			lines(primaries, " max_fails=1 fail_timeout=1s"),
			lines(primaries, " max_fails=0 backup"),
			lines(backups, " max_fails=0 backup"))
		grpc, tcp := others, others
		grpc.Kind, tcp.Kind = "g", "t"
		if !u.fresh {
			others.Keepalive = &keepalive{Connections: idleConnections, Timeout: unrepeatableReuse}
		}
		grpc.Keepalive = &keepalive{Connections: idleConnections, Timeout: unrepeatableReuse}
		if u.http {
			m.Pools = append(m.Pools, repeatable, again, others)
		}
		if u.grpc {
			m.Pools = append(m.Pools, grpc)
		}
		if u.tcp {
			m.TCPPools = append(m.TCPPools, tcp)
		}
	}
	shareZones(m.Pools, "opf_zone_")
	shareZones(m.TCPPools, "opf_tcp_zone_")
	return nil
}

func newPool(s upstream.Service, kind string, parts ...[]poolServer) pool {
	return pool{Workload: s.Workload, Port: s.Port, Kind: kind, Servers: slices.Concat(parts...)}
}

// poolsPerZone is how many pools share a zone. nginx looks for every zone
// among all others, at each test and twice at each reload, and maps memory for
// each: with 4,000 zones that is most of its time (measured).
const poolsPerZone = 128

// shareZones gives neighbouring pools one zone of computed size. Every line
// also keeps one TLS session in it; a zone that is too small loses resumption
// (measured).
func shareZones(pools []pool, name string) {
	for n := 0; n*poolsPerZone < len(pools); n++ {
		group := pools[n*poolsPerZone : min((n+1)*poolsPerZone, len(pools))]
		size := 32
		for _, p := range group {
			size += 4 * len(p.Servers)
		}
		for i := range group {
			group[i].Zone, group[i].ZoneSize = name+strconv.Itoa(n), max(64, size)
		}
	}
}

func lines(addrs []netip.AddrPort, options string) []poolServer {
	out := make([]poolServer, len(addrs))
	for i, a := range addrs {
		out[i] = poolServer{Addr: a, Options: options}
	}
	return out
}

func (m *model) addresses(ids []placement.LinkID, address func(placement.LinkID) (netip.Addr, bool)) ([]netip.AddrPort, error) {
	out := make([]netip.AddrPort, len(ids))
	for i, id := range ids {
		a, ok := address(id)
		if !ok {
			return nil, fmt.Errorf("link %s has no address", id)
		}
		out[i] = netip.AddrPortFrom(a, m.EndpointPort)
	}
	return out, nil
}

// sizes computes the hash tables for what is in them: nginx warns, or
// refuses, when one is too small.
func (m *model) sizes() {
	longest, names := 32, len(m.Hosts)
	for _, h := range m.Hosts {
		longest = max(longest, len(h.Host))
	}
	for _, r := range m.Routes {
		longest = max(longest, len(r.Name))
	}
	m.NameHash = newHash(names, longest)
	m.MapHash = newHash(max(names, len(m.Routes), len(m.TCPRoutes)), longest)
	m.VariableHash = newHash(512+len(m.PathMaps), 64)
}

// newHash leaves room for eight of the longest keys in a bucket and for four
// buckets per key.
func newHash(keys, longest int) hash {
	element := 8 + (longest+2+7)/8*8
	h := hash{Max: 1024, Bucket: max(512, (8*element+8+63)/64*64)}
	for h.Max < 4*keys {
		h.Max *= 2
	}
	return h
}
