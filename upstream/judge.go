package upstream

import (
	"cmp"
	"maps"
	"slices"

	"github.com/opfield/availability/placement"
)

// Why a link is not open. Shown to people, never parsed outside this package.
const (
	reasonRemoved   = "placement removed"
	reasonRole      = "placement is not serving: "
	reasonState     = "placement is not running: "
	reasonNotReady  = "placement is not ready"
	reasonFenced    = "stale generation or epoch"
	reasonStranger  = "not a placement of the policy"
	reasonClosed    = "taken out of routing by the policy"
	reasonLost      = "node lost"
	reasonNoRelay   = "no reachable relay has the placement ready"
	reasonPortGone  = "placement no longer has this port"
	reasonJoinedTo  = "joined to open siblings: "
	reasonHoldUntil = "holding until a placement opens: "
)

// present is the newest knowledge about a placement: event or relay report.
type present struct {
	order placement.Order
	role  placement.Role
	ready bool
	state placement.State
}

// newest folds the event and the reports of one placement; a report counts
// only if it is newer than the event.
func (r *replica) newest() present {
	var p present
	var known bool
	if r.known {
		e := r.event
		p, known = present{order: e.Order(), role: e.Role, ready: e.Ready, state: e.State}, true
	}
	for _, port := range slices.Sorted(maps.Keys(r.report)) {
		rep := r.report[port]
		if !known || rep.Order.Newer(p.order) {
			p, known = present{order: rep.Order, role: rep.Role, ready: rep.Ready, state: rep.State}, true
		}
	}
	return p
}

// ports returns every port of the placement and what it speaks. A port that
// the newest event no longer lists and no newer report names is gone: it maps
// to "".
func (r *replica) ports() map[uint16]placement.Protocol {
	ports := map[uint16]placement.Protocol{}
	if r.known {
		for _, p := range r.event.Ports {
			ports[p.Port] = p.Protocol
		}
	}
	for port, rep := range r.report {
		switch {
		case !r.known || rep.Order.Newer(r.event.Order()):
			ports[port] = rep.Protocol
		case ports[port] == "":
			ports[port] = ""
		}
	}
	return ports
}

// ordersOf judges every link of a workload. The second result holds the links
// that are gone for good and belong in no list of nginx.
func (t *Table) ordersOf(name string, w *workload) ([]Order, map[placement.LinkID]bool) {
	var orders []Order
	gone := map[placement.LinkID]bool{}
	open := map[uint16][]placement.LinkID{}
	for _, node := range slices.Sorted(maps.Keys(w.copies)) {
		r := w.copies[node]
		ports := r.ports()
		for _, port := range slices.Sorted(maps.Keys(ports)) {
			id := placement.LinkID{Placement: placement.ID{Workload: name, Node: node}, Port: port}
			o := t.verdict(id, r.newest(), ports[port] == "")
			o.Protocol = ports[port]
			switch {
			case o.State == Open:
				open[port] = append(open[port], id)
			case o.Reason == reasonRemoved, o.Reason == reasonPortGone, o.Reason == reasonStranger:
				gone[id] = true
			}
			orders = append(orders, o)
		}
	}
	t.chooseHolders(orders)
	for i := range orders {
		o := &orders[i]
		siblings := open[o.Link.Port]
		switch {
		case o.State == Open:
			siblings = without(siblings, o.Link)
		case len(siblings) > 0 && o.Primary:
			o.State, o.Reason = Joined, reasonJoinedTo+o.Reason
		case len(siblings) == 0 && o.MayHold:
			o.State, o.Reason = Holding, reasonHoldUntil+o.Reason
		}
		o.Open = siblings
	}
	slices.SortFunc(orders, func(a, b Order) int { return CompareLinks(a.Link, b.Link) })
	return orders, gone
}

// passedOver is how many endpoints of a workload port may refuse at once while
// another one holds: nginx's first round has no more tries to spend on them
// than this, and one hold after another would add up.
const passedOver = 3

// chooseHolders leaves MayHold only to some of the links that could hold, per
// port: the first of those that nginx lists as primaries, or the first of all,
// and with many links those behind the ones that may be passed over.
func (t *Table) chooseHolders(orders []Order) {
	candidates := map[uint16][]*Order{}
	for i := range orders {
		if o := &orders[i]; o.MayHold {
			candidates[o.Link.Port] = append(candidates[o.Link.Port], o)
		}
	}
	for _, all := range candidates {
		slices.SortStableFunc(all, func(a, b *Order) int {
			switch {
			case a.Primary == b.Primary:
				return 0
			case a.Primary:
				return -1
			default:
				return 1
			}
		})
		primaries := 0
		for _, o := range all {
			if o.Primary {
				primaries++
			}
		}
		holders := max(1, primaries-passedOver)
		for _, o := range all[holders:] {
			o.MayHold = false
		}
	}
}

// verdict says whether a link is open by what is known of it alone; its
// siblings decide later whether a closed one joins or holds.
func (t *Table) verdict(id placement.LinkID, p present, portGone bool) Order {
	members, managed := t.members[id.Placement.Workload]
	member, counts := members[id.Placement.Node]
	o := Order{
		Link: id, Generation: p.order.Generation, Epoch: p.order.Epoch,
		State: Closed, Primary: t.primaries[id],
	}
	switch {
	case p.state == placement.StateRemoved:
		o.Reason = reasonRemoved
		return o
	case portGone:
		o.Reason = reasonPortGone
		return o
	case managed && !counts:
		// What runs where the policy does not want it is cut; what still drains
		// there may end.
		o.Reason, o.Reset = reasonStranger, p.role != placement.RoleDraining
		return o
	case p.order.Generation < member.Generation, p.order.Epoch < member.Epoch:
		o.Reason, o.Reset = reasonFenced, true
		return o
	case member.Closed:
		o.Reason = reasonClosed
		return o
	case p.role != placement.RoleServing:
		o.Reason = reasonRole + string(p.role)
		return o
	}
	o.MayHold = true
	switch {
	case p.state != placement.StateRunning:
		o.Reason = reasonState + string(p.state)
	case !p.ready:
		o.Reason = reasonNotReady
	default:
		o.Reason = t.unreachable(id)
		if o.Reason == "" {
			o.State = Open
		}
	}
	return o
}

func without(ids []placement.LinkID, id placement.LinkID) []placement.LinkID {
	out := make([]placement.LinkID, 0, len(ids))
	for _, one := range ids {
		if one != id {
			out = append(out, one)
		}
	}
	return out
}

// unreachable says why connections to a ready placement are not even tried,
// or "". Only a relay that answered can say no (LNK-5); without any answer
// the last words count, and without those the event alone.
func (t *Table) unreachable(id placement.LinkID) string {
	var refused, remembered, rememberedReady bool
	for _, rl := range t.relays {
		v, ok := rl.views[id]
		switch {
		case rl.up && ok && !v.stale:
			if v.present && v.ready {
				return ""
			}
			refused = true
		case rl.up && !ok && rl.authoritative:
			refused = true
		case ok:
			remembered = true
			rememberedReady = rememberedReady || v.present && v.ready
		}
	}
	switch {
	case refused:
		return reasonNoRelay
	case t.nodes[id.Placement.Node].lost:
		return reasonLost
	case remembered && !rememberedReady:
		return reasonNoRelay
	default:
		return ""
	}
}

// CompareLinks orders links by workload, node and port.
func CompareLinks(a, b placement.LinkID) int {
	return cmp.Or(
		cmp.Compare(a.Placement.Workload, b.Placement.Workload),
		cmp.Compare(a.Placement.Node, b.Placement.Node),
		cmp.Compare(a.Port, b.Port),
	)
}
