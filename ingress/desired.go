package ingress

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strings"

	"github.com/opfield/availability/ingress/apply"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// desired is a full snapshot of what nginx should say. It is a value that
// the apply goroutine may keep.
type desired struct {
	version  uint64 // of the routes and their certificates
	routes   []upstream.Route
	services []upstream.Service
	certs    map[string]string
	outside  string                          // digest of templates and user files
	address  map[placement.LinkID]netip.Addr // filled in when the apply begins
}

// compare says how soon nginx must learn about the step from was to is.
// rollout is asked about a placement that nginx does not list yet.
func compare(was, is desired, rollout func(placement.LinkID) bool) apply.Change {
	if was.version != is.version || was.outside != is.outside || len(was.services) != len(is.services) {
		return apply.Prompt
	}
	change := apply.None
	for i, s := range is.services {
		old := was.services[i]
		if sameService(old, s) {
			continue
		}
		change = apply.Quiet
		for _, id := range slices.Concat(s.Open, s.Others) {
			if !slices.Contains(old.Open, id) && !slices.Contains(old.Others, id) && !rollout(id) {
				return apply.Prompt
			}
		}
	}
	return change
}

func sameService(a, b upstream.Service) bool {
	return a.Workload == b.Workload && a.Port == b.Port && sameLinks(a.Open, b.Open) && sameLinks(a.Others, b.Others)
}

// sameLinks compares; what did not change is most often the very same list.
func sameLinks(a, b []placement.LinkID) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0] || slices.Equal(a, b))
}

// routeKey is equal for routes that are rendered alike.
func routeKey(r upstream.Route) string {
	text, err := json.Marshal(r)
	if err != nil {
		return r.Name
	}
	return string(text)
}

// partOfRollout reports whether siblings of the placement are of another
// generation: then more of the same kind follow, and one reload serves all.
func partOfRollout(orders []upstream.Order, id placement.LinkID) bool {
	from, _ := slices.BinarySearchFunc(orders, id.Placement.Workload, func(o upstream.Order, w string) int {
		return strings.Compare(o.Link.Placement.Workload, w)
	})
	for _, o := range orders[from:] {
		if o.Link.Placement.Workload != id.Placement.Workload {
			return false
		}
		if o.Generation != orders[from].Generation {
			return true
		}
	}
	return false
}
