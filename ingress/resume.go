package ingress

import (
	"context"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// A sidecar that starts beside a running nginx must not reload it because
// known members opened or closed meanwhile: that waits for quiet as always
// (RTE-8). So it remembers the members that nginx lists, and the first apply
// renders these first. If that is, to the byte, what nginx serves, then
// routes, certificates, templates and flags are the same too.

// keptService is an upstream.Service in the state.
type keptService struct {
	Workload string   `json:"workload"`
	Port     uint16   `json:"port"`
	Open     []string `json:"open,omitempty"`
	Others   []string `json:"others,omitempty"`
}

func keep(all []upstream.Service) []keptService {
	text := func(ids []placement.LinkID) (out []string) {
		for _, id := range ids {
			out = append(out, id.String())
		}
		return out
	}
	out := make([]keptService, 0, len(all))
	for _, s := range all {
		out = append(out, keptService{s.Workload, s.Port, text(s.Open), text(s.Others)})
	}
	return out
}

// services is the reverse of keep. What cannot be read is left out, and the
// generation made of the rest is then not the one that nginx serves.
func services(kept []keptService) []upstream.Service {
	parse := func(texts []string) (out []placement.LinkID) {
		for _, text := range texts {
			if id, err := placement.ParseLinkID(text); err == nil {
				out = append(out, id)
			}
		}
		return out
	}
	out := make([]upstream.Service, 0, len(kept))
	for _, k := range kept {
		out = append(out, upstream.Service{Workload: k.Workload, Port: k.Port, Open: parse(k.Open), Others: parse(k.Others)})
	}
	return out
}

func linksOf(all []upstream.Service) []placement.LinkID {
	var out []placement.LinkID
	for _, s := range all {
		out = append(append(out, s.Open...), s.Others...)
	}
	return out
}

// resume reports whether nginx proves that it serves the job's routes and
// files with the members of before.
func (w *worker) resume(ctx context.Context, j job) (result, bool) {
	if j.before == nil {
		return result{}, false
	}
	renderer, err := w.renderer(j.outside)
	if err != nil {
		return result{}, false // attempt says it
	}
	was := j
	was.desired.services = j.before
	g, err := renderer.Render(was.input(w.keep(j.desired.routes)))
	if err != nil || !w.applier.Serves(ctx, g.ID) {
		return result{}, false
	}
	w.good = &j.outside
	return result{generation: g.ID, primaries: g.Primaries, services: j.before, asBefore: true, leftOut: w.leftOut()}, true
}
