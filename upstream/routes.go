package upstream

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/opfield/availability/placement"
)

// SetRoutes replaces all routes. A route with problems serves nothing; a
// route whose host (or TCP port) an older route holds serves without it and
// takes it over as soon as it is free.
func (t *Table) SetRoutes(routes []Route) {
	sorted := slices.Clone(routes)
	slices.SortStableFunc(sorted, func(a, b Route) int {
		return cmp.Or(cmp.Compare(a.Created, b.Created), cmp.Compare(a.Name, b.Name))
	})
	t.routes = nil
	used := map[servicePort]bool{}
	holders := map[string]string{} // host+path or port → route
	names := map[string]bool{}
	for _, r := range sorted {
		v := judgeRoute(r)
		if v.Serves && names[v.Route.Name] {
			v.Serves = false
			v.Problems = append(v.Problems, Problem{Code: CodeName, Field: "name", Message: "another route has this name; choose another one"})
		}
		if v.Serves {
			names[v.Route.Name] = true
			v.claim(holders)
		}
		if v.Serves {
			used[servicePort{v.Route.Workload, v.Route.Port}] = true
		}
		t.routes = append(t.routes, v)
	}
	t.used = slices.SortedFunc(maps.Keys(used), func(a, b servicePort) int {
		return cmp.Or(cmp.Compare(a.workload, b.workload), cmp.Compare(a.port, b.port))
	})
	slices.SortStableFunc(t.routes, func(a, b RouteView) int { return cmp.Compare(a.Route.Name, b.Route.Name) })
}

func judgeRoute(r Route) RouteView {
	n, err := r.Normalised()
	v := RouteView{Route: n, Serves: err == nil}
	if ps, ok := err.(Problems); ok {
		v.Problems = ps
	}
	return v
}

// claim takes what the route listens for unless an older route has it.
func (v *RouteView) claim(holders map[string]string) {
	if v.Route.Protocol == placement.ProtocolTCP {
		key := fmt.Sprintf(":%d", v.Route.Listen)
		if other, taken := holders[key]; taken {
			v.Serves = false
			v.Problems = append(v.Problems, Problem{Code: CodePortConflict, Field: "listen", Message: fmt.Sprintf("port %d is held by the older route %s; choose another port or delete that route", v.Route.Listen, other)})
			return
		}
		holders[key] = v.Route.Name
		return
	}
	var held []string
	for _, h := range v.Route.Hosts {
		// The separator cannot be part of a host name.
		key := h + " " + v.Route.Path
		if other, taken := holders[key]; taken {
			v.Problems = append(v.Problems, Problem{Code: CodeHostConflict, Field: "hosts", Message: fmt.Sprintf("%s is held by the older route %s; it is taken over when that route lets it go", strings.TrimSuffix(key, " /"), other)})
			continue
		}
		holders[key] = v.Route.Name
		held = append(held, h)
	}
	v.Route.Hosts = held
	v.Serves = len(held) > 0
}

// Routes returns every route as it is served, sorted by name.
func (t *Table) Routes() []RouteView {
	return slices.AppendSeq(make([]RouteView, 0, len(t.routes)), t.EachRoute())
}

// EachRoute is Routes without a copy.
func (t *Table) EachRoute() iter.Seq[RouteView] {
	t.judge()
	return func(yield func(RouteView) bool) {
		for _, v := range t.routes {
			s := t.service(servicePort{v.Route.Workload, v.Route.Port})
			v.Open, v.Known = len(s.Open), len(s.Open)+len(s.Others)
			if !yield(v) {
				return
			}
		}
	}
}
