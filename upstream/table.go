package upstream

import (
	"maps"
	"slices"

	"github.com/opfield/availability/placement"
)

// LinkReport is what a relay says about one link.
type LinkReport struct {
	Link     placement.LinkID
	Order    placement.Order
	Role     placement.Role
	Ready    bool
	State    placement.State
	Protocol placement.Protocol
	Present  bool // registered at that relay, and its session is alive
}

// Table folds everything the ingress node hears into what should be. The
// zero value is ready to use. It is not safe for concurrent use.
//
// Every input is level-triggered and most are a maximum by placement.Order,
// so repeating or reordering them does no harm. Only two reports of the same
// relay about the same link depend on their order, as they do on the wire.
type Table struct {
	workloads map[string]*workload
	relays    map[string]*relay
	nodes     map[string]nodeMark
	members   map[string]map[string]placement.Member // of workloads with a policy, by node
	primaries map[placement.LinkID]bool
	routes    []RouteView
	used      []servicePort // by serving routes, sorted

	names  []string             // of workloads, sorted
	dirty  map[string]*workload // to be judged again
	all    bool                 // every workload must be judged again
	orders []Order              // of all workloads; a view that Orders returns
	moved  []Order              // of the workloads judged since Orders or Changes
	whole  bool                 // the set of links changed: orders must be put together again
}

type servicePort struct {
	workload string
	port     uint16
}

type workload struct {
	copies map[string]*replica // by node
	orders []Order
	at     int // where they begin in the table's orders
	gone   map[placement.LinkID]bool
	lists  map[uint16]Service // made from orders when asked for
}

// replica is one placement as far as it is known.
type replica struct {
	known  bool            // an event arrived
	event  placement.Event // the newest one
	report map[uint16]LinkReport
}

type relay struct {
	up            bool
	authoritative bool
	views         map[placement.LinkID]view
}

// view is the last word of a relay about a link. A stale one is from an
// earlier session: it counts only while no relay knows better.
type view struct {
	ready   bool
	present bool
	stale   bool
}

type nodeMark struct {
	lost     bool
	revision uint64
}

func (t *Table) workload(name string) *workload {
	w := t.workloads[name]
	if w == nil {
		if t.workloads == nil {
			t.workloads = map[string]*workload{}
		}
		w = &workload{copies: map[string]*replica{}}
		t.workloads[name] = w
		at, _ := slices.BinarySearch(t.names, name)
		t.names = slices.Insert(t.names, at, name)
	}
	return w
}

// touch notes that a workload must be judged again.
func (t *Table) touch(name string, w *workload) {
	if t.dirty == nil {
		t.dirty = map[string]*workload{}
	}
	t.dirty[name] = w
}

func (w *workload) replica(node string) *replica {
	r := w.copies[node]
	if r == nil {
		r = &replica{report: map[uint16]LinkReport{}}
		w.copies[node] = r
	}
	return r
}

// Event folds in a health event, wherever it came from. An older one than
// the newest known changes nothing.
func (t *Table) Event(e placement.Event) {
	if e.Check() != nil {
		return
	}
	w := t.workload(e.Workload)
	r := w.replica(e.Node)
	if r.known && !e.Order().Newer(r.event.Order()) {
		return
	}
	e.Ports = slices.Clone(e.Ports)
	r.known, r.event = true, e
	t.touch(e.Workload, w)
}

// Forget drops a placement that was removed. Its links are gone then.
func (t *Table) Forget(id placement.ID) {
	w := t.workloads[id.Workload]
	if w == nil {
		return
	}
	if r := w.copies[id.Node]; r == nil || r.newest().state != placement.StateRemoved {
		return
	}
	delete(w.copies, id.Node)
	t.touch(id.Workload, w)
}

// RelayReport folds in what a relay says about a link. If it is newer than
// every event, it counts as one, so that routing follows changes without NATS.
// Reports of a session come after its RelayUp.
func (t *Table) RelayReport(name string, report LinkReport) {
	if report.Link.Placement.Check() != nil || report.Link.Port == 0 {
		return
	}
	rl := t.relay(name)
	rl.views[report.Link] = view{ready: report.Ready, present: report.Present}
	w := t.workload(report.Link.Placement.Workload)
	t.touch(report.Link.Placement.Workload, w)
	r := w.replica(report.Link.Placement.Node)
	// A relay that dropped a session repeats the last registration with
	// Ready false: that says nothing about the placement itself.
	if !report.Present {
		return
	}
	if old, ok := r.report[report.Link.Port]; ok && !report.Order.Newer(old.Order) {
		return
	}
	r.report[report.Link.Port] = report
}

func (t *Table) relay(name string) *relay {
	rl := t.relays[name]
	if rl == nil {
		if t.relays == nil {
			t.relays = map[string]*relay{}
		}
		rl = &relay{views: map[placement.LinkID]view{}}
		t.relays[name] = rl
	}
	return rl
}

// RelayUp says whether the session with a relay is alive, and whether the
// relay's silence about a link proves that it has no such link.
func (t *Table) RelayUp(name string, up, authoritative bool) {
	rl := t.relay(name)
	if up && !rl.up {
		for id, v := range rl.views {
			v.stale = true
			rl.views[id] = v
		}
	}
	if up && authoritative {
		maps.DeleteFunc(rl.views, func(_ placement.LinkID, v view) bool { return v.stale })
	}
	rl.up, rl.authoritative = up, authoritative
	t.all = true
}

// RelaySession begins a session with a relay: reports are everything that it
// knows, and what it said in an earlier session counts no more than the last
// word of a relay that is away.
func (t *Table) RelaySession(name string, authoritative bool, reports []LinkReport) {
	t.RelayUp(name, false, false)
	t.RelayUp(name, true, false)
	for _, r := range reports {
		t.RelayReport(name, r)
	}
	t.RelayUp(name, true, authoritative)
}

// ForgetRelay removes a relay that is no longer part of the system.
func (t *Table) ForgetRelay(name string) {
	delete(t.relays, name)
	t.all = true
}

// Node folds in the controller's word about a node. An older revision than
// the newest known changes nothing.
func (t *Table) Node(name string, lost bool, revision uint64) {
	if old, ok := t.nodes[name]; ok && revision <= old.revision {
		return
	}
	if t.nodes == nil {
		t.nodes = map[string]nodeMark{}
	}
	t.nodes[name] = nodeMark{lost: lost, revision: revision}
	t.all = true
}

// SetMembers says which placements of the workloads with a policy count, and
// from which generation and epoch on; a workload that is not named has no
// policy, and every placement of it counts (DSC-2, LOS-3).
func (t *Table) SetMembers(all []placement.Members) {
	t.members = make(map[string]map[string]placement.Member, len(all))
	for _, m := range all {
		nodes := make(map[string]placement.Member, len(m.Placements))
		for _, p := range m.Placements {
			nodes[p.Node] = p
		}
		t.members[m.Workload] = nodes
	}
	t.all = true
}

// Proven says which links the running nginx generation lists as primaries.
func (t *Table) Proven(primaries []placement.LinkID) {
	t.primaries = make(map[placement.LinkID]bool, len(primaries))
	for _, id := range primaries {
		t.primaries[id] = true
	}
	t.all = true
}

// Orders returns the order of every known link, sorted by link. It is a view:
// it follows the table, and the caller neither changes nor keeps it.
func (t *Table) Orders() []Order {
	t.judge()
	t.moved = nil
	if !t.whole {
		return t.orders
	}
	t.orders = t.orders[:0]
	for _, name := range t.names {
		w := t.workloads[name]
		w.at = len(t.orders)
		t.orders = append(t.orders, w.orders...)
	}
	t.whole = false
	return t.orders
}

// Changes returns the orders that may differ since the last call of it or of
// Orders, and costs nothing for the others. If all may, or the set of links
// changed, whole is true instead and Orders tells.
func (t *Table) Changes() (changed []Order, whole bool) {
	t.judge()
	if t.whole {
		return nil, true
	}
	changed, t.moved = t.moved, nil
	return changed, false
}

// Services returns what nginx should list for every workload port that a
// serving route uses, sorted. The caller must not change what the slices in it
// point to.
func (t *Table) Services() []Service {
	t.judge()
	out := make([]Service, 0, len(t.used))
	for _, k := range t.used {
		out = append(out, t.service(k))
	}
	return out
}

func (t *Table) service(k servicePort) Service {
	s := Service{Workload: k.workload, Port: k.port}
	w := t.workloads[k.workload]
	if w == nil {
		return s
	}
	if known, ok := w.lists[k.port]; ok {
		return known
	}
	for _, o := range w.orders {
		switch {
		case o.Link.Port != k.port:
		case o.State == Open:
			s.Open = append(s.Open, o.Link)
		case !w.gone[o.Link]:
			s.Others = append(s.Others, o.Link)
		}
	}
	w.lists[k.port] = s
	return s
}

// judge brings the orders of every workload that changed up to date.
func (t *Table) judge() {
	if t.all {
		for name, w := range t.workloads {
			t.judgeOne(name, w)
		}
		t.all, t.whole = false, true
		clear(t.dirty)
		return
	}
	for name, w := range t.dirty {
		old := w.orders
		t.judgeOne(name, w)
		if t.whole = t.whole || !slices.EqualFunc(old, w.orders, sameLink); !t.whole {
			copy(t.orders[w.at:], w.orders)
			t.moved = append(t.moved, w.orders...)
		}
	}
	clear(t.dirty)
}

func sameLink(a, b Order) bool { return a.Link == b.Link }

func (t *Table) judgeOne(name string, w *workload) {
	w.orders, w.gone = t.ordersOf(name, w)
	w.lists = map[uint16]Service{}
}
