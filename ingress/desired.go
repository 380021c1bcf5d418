package ingress

import (
	"encoding/json"
	"net/netip"
	"slices"

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

// compare says how soon nginx must learn about the step from was to is. What
// is new in a workload that a planned move is at work on waits for the others
// that follow: one reload serves all.
func compare(was, is desired, moving map[string]bool) apply.Change {
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
		if moving[s.Workload] {
			continue
		}
		for _, id := range slices.Concat(s.Open, s.Others) {
			if !slices.Contains(old.Open, id) && !slices.Contains(old.Others, id) {
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
