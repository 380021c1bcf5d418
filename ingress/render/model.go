package render

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// nothing is the address that stands for "no placement": it is never given
// to a link, so connecting to it is refused.
func nothing() netip.Addr { return netip.AddrFrom4([4]byte{127, 64, 0, 1}) }

const (
	maxTries          = 5  // deliveries of a request that is safe to repeat (RTE-4)
	idleConnections   = 32 // kept per pool and worker
	repeatableReuse   = "60s"
	unrepeatableReuse = "1s" // RTE-6
)

// model is what the templates see. Fields that hold a user's words are only
// written through the functions v and re.
type model struct {
	Config
	Generation   string
	Identity     string
	StreamModule string
	HasStream    bool
	OpenFiles    int
	WorkersText  string
	ShutdownText string

	Hashes                          bool
	MapHash, NameHash, VariableHash hash
	DefaultServer                   bool
	TLS                             bool
	HTTP2Directive                  bool
	Listeners                       []listener
	HTTPSSuffix                     string

	Hosts    []hostEntry
	PathMaps []pathMap
	Routes   []routeEntry
	Groups   []group
	Classes  []class
	Pools    []pool
	Servers  []server

	TCPRoutes  []upstream.Route
	TCPPools   []pool
	TCPServers []tcpServer
}

type hash struct{ Max, Bucket int }

type listener struct {
	Address   string
	TLS       bool
	HTTP2Flag bool
}

type hostEntry struct {
	Host    string
	Route   string
	PathMap string
	Cert    string

	limits []entry
	routes []upstream.Route
}

type pathMap struct {
	Name    string
	Default string
	Paths   []pathEntry
}

type pathEntry struct{ Path, Route string }

type routeEntry struct {
	Name, Workload string
	Port           uint16
	Group          string
	Redirect       bool
}

// class is one set of equal settings; a group is a class with a number of
// tries. Routes of one group share every location.
type class struct {
	Name                                string
	MaxBody                             uint64
	Read, Send                          string
	RequestBuffering, ResponseBuffering string
	Buffer, Busy                        int
}

type group struct {
	class
	Class string
	Name  string
	GRPC  bool
	Tries int // in the first round
	Again int // in the second
}

type pool struct {
	Workload  string
	Port      uint16
	Kind      string
	Zone      string
	ZoneSize  int // kB
	Servers   []poolServer
	Keepalive *keepalive
}

type keepalive struct {
	Connections int
	Timeout     string
}

type poolServer struct {
	Addr    netip.AddrPort
	Options string
}

// server serves all hosts whose routes limit bodies alike: the limit is the
// one setting that nginx checks before our own choice of a location.
type server struct {
	Hosts   []string
	Entries []entry
	Groups  []group
	Classes []class
}

type entry struct {
	Modifier, Path, Slash string
	MaxBody               uint64
}

type tcpServer struct {
	Listen        []string
	Idle          string
	ProxyProtocol bool
}

func newModel(c Config, in Input) (model, error) {
	m := model{Config: c, Identity: in.Identity}
	routes := slices.Clone(in.Routes)
	slices.SortFunc(routes, func(a, b upstream.Route) int { return cmp.Compare(a.Name, b.Name) })
	services := map[string]upstream.Service{}
	for _, s := range in.Services {
		services[serviceKey(s.Workload, s.Port)] = s
	}
	for i := 1; i < len(routes); i++ {
		if routes[i].Name == routes[i-1].Name {
			return model{}, fmt.Errorf("route %s appears twice", routes[i].Name)
		}
	}
	m.main()
	m.http(routes, services, in.Certs)
	m.tcp(routes)
	if err := m.pools(routes, services, in.Address); err != nil {
		return model{}, err
	}
	m.sizes()
	return m, nil
}

func serviceKey(workload string, port uint16) string {
	// '_' cannot be part of a workload's name, so keys cannot collide.
	return workload + "_" + strconv.Itoa(int(port))
}

func (m *model) main() {
	m.DefaultServer = !m.Include
	m.Hashes = !m.Include || m.OwnHashes
	m.OpenFiles = 2*m.Connections + 1024
	m.WorkersText = "auto"
	m.ShutdownText = milliseconds(upstream.Duration(m.ShutdownTimeout))
	if m.Workers > 0 {
		m.WorkersText = strconv.Itoa(m.Workers)
	}
	m.HasStream = m.Build.Stream
	if m.Build.StreamDynamic {
		m.StreamModule = m.Build.ModulesPath + "/ngx_stream_module.so"
	}
	m.HTTP2Directive = m.Build.HTTP2 && m.Build.AtLeast(1, 25, 1)
	if m.HTTPSPort != 443 {
		m.HTTPSSuffix = fmt.Sprintf(":%d", m.HTTPSPort)
	}
}

func (m *model) listen(port uint16) []string {
	var out []string
	for _, a := range m.Addresses {
		out = append(out, netip.AddrPortFrom(a, port).String())
	}
	return out
}

func (m *model) listeners() {
	flag := m.Build.HTTP2 && !m.HTTP2Directive
	for _, a := range m.listen(m.HTTPPort) {
		m.Listeners = append(m.Listeners, listener{Address: a})
	}
	if m.PlainGRPCPort != 0 {
		for _, a := range m.listen(m.PlainGRPCPort) {
			m.Listeners = append(m.Listeners, listener{Address: a, HTTP2Flag: flag})
		}
	}
	if m.TLS {
		for _, a := range m.listen(m.HTTPSPort) {
			m.Listeners = append(m.Listeners, listener{Address: a, TLS: true, HTTP2Flag: flag})
		}
	}
}

// rounds says how often a repeatable request may be delivered.
//
// In the first round once per open placement, none by status if there is only
// one (RTE-4). nginx takes kept connections first and asks each member once;
// when a relay or a host dies, those to several members may be dead at the
// same moment. So a request that was sent and lost gets a second round on
// fresh connections, as far as maxTries in all allow.
func rounds(n int) (first, again int) {
	if n < 2 {
		return 0, 1
	}
	first = min(n, maxTries-1)
	return first, min(maxTries-first, 2)
}

func (m *model) http(routes []upstream.Route, services map[string]upstream.Service, certs map[string]string) {
	classes := classNames(routes)
	groups := map[string]group{}
	hosts := map[string]*hostEntry{}
	groupOf := map[string]group{}
	for _, r := range routes {
		if r.Protocol == placement.ProtocolTCP {
			continue
		}
		cl := classOf(r.Settings)
		cl.Name = classes[cl]
		g := group{class: cl, Class: cl.Name, GRPC: r.Protocol == placement.ProtocolGRPC}
		if g.GRPC {
			g.Name = cl.Name + "_g"
		} else {
			g.Tries, g.Again = rounds(services[serviceKey(r.Workload, r.Port)].N())
			g.Name = fmt.Sprintf("%s_n%d", cl.Name, g.Tries)
		}
		groups[g.Name] = g
		groupOf[r.Name] = g
		m.Routes = append(m.Routes, routeEntry{
			Name: r.Name, Workload: r.Workload, Port: r.Port, Group: g.Name,
			Redirect: r.TLS != nil && r.TLS.Redirect,
		})
		m.TLS = m.TLS || r.TLS != nil
		for _, h := range r.Hosts {
			if hosts[h] == nil {
				hosts[h] = &hostEntry{Host: h}
			}
			hosts[h].routes = append(hosts[h].routes, r)
		}
	}
	m.listeners()
	m.Groups = slices.SortedFunc(maps.Values(groups), func(a, b group) int { return cmp.Compare(a.Name, b.Name) })
	m.Classes = classesOf(m.Groups)
	m.hosts(hosts, certs)
	m.servers(groupOf)
}

func (m *model) hosts(hosts map[string]*hostEntry, certs map[string]string) {
	pathMaps := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(hosts)) {
		h := hosts[name]
		// The longest path first: the maps take the first that fits.
		slices.SortFunc(h.routes, func(a, b upstream.Route) int {
			return cmp.Or(-cmp.Compare(len(a.Path), len(b.Path)), cmp.Compare(a.Path, b.Path))
		})
		h.limits = limits(h.routes)
		h.Cert = certOf(h.routes, certs)
		if len(h.routes) == 1 && h.routes[0].Path == "/" {
			h.Route = h.routes[0].Name
		} else {
			h.PathMap = m.pathMap(h.routes, pathMaps)
		}
		m.Hosts = append(m.Hosts, *h)
	}
}

// pathMap returns the variable that chooses among routes by path; hosts with
// the same choice share it.
func (m *model) pathMap(routes []upstream.Route, known map[string]string) string {
	var pm pathMap
	var key strings.Builder
	for _, r := range routes {
		fmt.Fprintf(&key, "%s %s\n", r.Path, r.Name)
		if r.Path == "/" {
			pm.Default = r.Name
			continue
		}
		pm.Paths = append(pm.Paths, pathEntry{Path: r.Path, Route: r.Name})
	}
	if name, ok := known[key.String()]; ok {
		return name
	}
	pm.Name = fmt.Sprintf("opf_path_%d", len(m.PathMaps))
	known[key.String()] = pm.Name
	m.PathMaps = append(m.PathMaps, pm)
	return pm.Name
}

// certOf returns the pair of the host's oldest route that has one.
func certOf(routes []upstream.Route, certs map[string]string) string {
	var cert string
	var oldest upstream.Route
	for _, r := range routes {
		id, ok := certs[r.Name]
		if r.TLS == nil || !ok || !certPattern.MatchString(id) {
			continue
		}
		if cert == "" || cmp.Or(cmp.Compare(r.Created, oldest.Created), cmp.Compare(r.Name, oldest.Name)) < 0 {
			cert, oldest = id, r
		}
	}
	return cert
}

// limits returns the entry locations of a host: one, unless its paths limit
// bodies differently.
func limits(routes []upstream.Route) []entry {
	out := []entry{{Path: "/"}}
	same := true
	for _, r := range routes {
		if r.Path == "/" {
			out[0].MaxBody = r.Settings.MaxBodyBytes
		}
		same = same && r.Settings.MaxBodyBytes == routes[0].Settings.MaxBodyBytes
	}
	if same {
		out[0].MaxBody = routes[0].Settings.MaxBodyBytes
		return out
	}
	for _, r := range routes {
		if r.Path != "/" {
			out = append(out,
				entry{Modifier: "=", Path: r.Path, MaxBody: r.Settings.MaxBodyBytes},
				entry{Path: r.Path, Slash: "/", MaxBody: r.Settings.MaxBodyBytes})
		}
	}
	return out
}

func (m *model) servers(groupOf map[string]group) {
	type build struct {
		server
		groups map[string]group
	}
	byLimits := map[string]*build{}
	var keys []string
	for _, h := range m.Hosts {
		key := fmt.Sprintf("%+v", h.limits)
		b := byLimits[key]
		if b == nil {
			b = &build{server: server{Entries: h.limits}, groups: map[string]group{}}
			byLimits[key] = b
			keys = append(keys, key)
		}
		b.Hosts = append(b.Hosts, h.Host)
		for _, r := range h.routes {
			g := groupOf[r.Name]
			b.groups[g.Name] = g
		}
	}
	for _, key := range keys {
		b := byLimits[key]
		b.Groups = slices.SortedFunc(maps.Values(b.groups), func(a, b group) int { return cmp.Compare(a.Name, b.Name) })
		b.Classes = classesOf(b.Groups)
		m.Servers = append(m.Servers, b.server)
	}
}

// classesOf returns the classes of the groups that take any method.
func classesOf(groups []group) []class {
	out := map[string]class{}
	for _, g := range groups {
		if !g.GRPC {
			out[g.Class] = g.class
		}
	}
	return slices.SortedFunc(maps.Values(out), func(a, b class) int { return cmp.Compare(a.Name, b.Name) })
}

func classOf(s upstream.RouteSettings) class {
	s = s.Filled()
	return class{
		MaxBody: s.MaxBodyBytes,
		Read:    milliseconds(s.ReadTimeout), Send: milliseconds(s.SendTimeout),
		RequestBuffering: offIf(s.StreamRequest), ResponseBuffering: offIf(s.StreamResponse),
		Buffer: int(s.BufferKB), Busy: 2 * int(s.BufferKB),
	}
}

// classNames numbers the distinct settings in a fixed order.
func classNames(routes []upstream.Route) map[class]string {
	set := map[class]string{}
	for _, r := range routes {
		if r.Protocol != placement.ProtocolTCP {
			set[classOf(r.Settings)] = ""
		}
	}
	all := slices.SortedFunc(maps.Keys(set), func(a, b class) int {
		return cmp.Compare(fmt.Sprintf("%+v", a), fmt.Sprintf("%+v", b))
	})
	for i, c := range all {
		set[c] = fmt.Sprintf("opf_c%d", i)
	}
	return set
}

func milliseconds(d upstream.Duration) string {
	return strconv.FormatInt(time.Duration(d).Milliseconds(), 10) + "ms"
}

func offIf(off bool) string {
	if off {
		return "off"
	}
	return "on"
}

func (m *model) tcp(routes []upstream.Route) {
	servers := map[tcpKey][]string{}
	for _, r := range routes {
		if r.Protocol != placement.ProtocolTCP {
			continue
		}
		m.TCPRoutes = append(m.TCPRoutes, r)
		k := tcpKey{idle: r.Settings.Filled().IdleTimeout, proxy: r.Settings.ProxyProtocol}
		servers[k] = append(servers[k], m.listen(r.Listen)...)
	}
	keys := slices.SortedFunc(maps.Keys(servers), func(a, b tcpKey) int {
		return cmp.Or(cmp.Compare(a.idle, b.idle), cmp.Compare(offIf(a.proxy), offIf(b.proxy)))
	})
	for _, k := range keys {
		m.TCPServers = append(m.TCPServers, tcpServer{Listen: servers[k], Idle: milliseconds(k.idle), ProxyProtocol: k.proxy})
	}
}

type tcpKey struct {
	idle  upstream.Duration
	proxy bool
}
