package ingress

import (
	"encoding/json"
	"maps"
	"net/netip"
	"slices"

	"github.com/opfield/availability/ingress/apply"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// desired is a full snapshot of what nginx should say. It is a value that
// the apply goroutine may keep.
type desired struct {
	version  uint64 // of the routes
	routes   []upstream.Route
	services []upstream.Service
	certs    map[string]string
	outside  string // digest of templates and user files
	address  map[placement.LinkID]netip.Addr
	rollout  map[placement.LinkID]bool // placements that are part of a running rollout
}

// compare says how soon nginx must learn about the step from was to is.
func compare(was, is desired) apply.Change {
	if was.outside != is.outside || !maps.Equal(was.certs, is.certs) || was.version != is.version {
		return apply.Prompt
	}
	listed := map[placement.LinkID]bool{}
	for _, s := range was.services {
		for _, id := range slices.Concat(s.Open, s.Others) {
			listed[id] = true
		}
	}
	change := apply.None
	for _, s := range is.services {
		for _, id := range slices.Concat(s.Open, s.Others) {
			if !listed[id] && !is.rollout[id] {
				return apply.Prompt
			}
		}
	}
	if !slices.EqualFunc(was.services, is.services, sameService) {
		change = apply.Quiet
	}
	return change
}

func sameService(a, b upstream.Service) bool {
	return a.Workload == b.Workload && a.Port == b.Port && slices.Equal(a.Open, b.Open) && slices.Equal(a.Others, b.Others)
}

// routeKey is equal for routes that are rendered alike.
func routeKey(r upstream.Route) string {
	text, err := json.Marshal(r)
	if err != nil {
		return r.Name
	}
	return string(text)
}

// rollouts finds the placements whose siblings are of another generation.
func rollouts(orders []upstream.Order) map[placement.LinkID]bool {
	type span struct{ low, high uint64 }
	spans := map[string]span{}
	for _, o := range orders {
		w := o.Link.Placement.Workload
		s, ok := spans[w]
		if !ok {
			s = span{o.Generation, o.Generation}
		}
		spans[w] = span{min(s.low, o.Generation), max(s.high, o.Generation)}
	}
	out := map[placement.LinkID]bool{}
	for _, o := range orders {
		if s := spans[o.Link.Placement.Workload]; s.low != s.high {
			out[o.Link] = true
		}
	}
	return out
}
