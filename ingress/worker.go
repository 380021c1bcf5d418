package ingress

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/opfield/availability/ingress/apply"
	"github.com/opfield/availability/ingress/render"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// job is one apply; it is complete in itself.
type job struct {
	desired desired
	outside outside
	// before is what an earlier process brought to nginx, for the first job.
	before []upstream.Service
}

// result is how a job ended.
type result struct {
	generation string
	primaries  []placement.LinkID
	services   []upstream.Service // that it was made of
	asBefore   bool               // they are the job's before, not what is desired now
	leftOut    map[string]string
	outsideErr string // the user's newest files are not in use
	changed    bool   // nginx was reloaded or started
	again      bool   // something may work later without any change
	err        error
	took       time.Duration
}

func (r result) word() string {
	switch {
	case r.err != nil:
		return "failed"
	case r.changed:
		return "applied"
	default:
		return "unchanged"
	}
}

// worker renders and applies, one job at a time. It remembers which routes
// nginx refused and which of the user's files worked.
type worker struct {
	config  Config
	applier *apply.Applier
	refused map[string]refusal // by route
	good    *outside           // the user's files of the last success
}

type refusal struct {
	key  string // of the route that was refused
	port uint16 // that was taken; 0 = nginx refused the text
	why  string
}

func (w *worker) run(ctx context.Context, jobs <-chan job, done func(result)) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case j := <-jobs:
			// An apply that began is not left half done; it is bounded.
			began := time.Now()
			r := w.apply(context.WithoutCancel(ctx), j)
			r.took = time.Since(began)
			done(r)
		}
	}
}

// apply tries the user's newest files first and those of the last success
// when nginx does not take them.
func (w *worker) apply(ctx context.Context, j job) result {
	if r, ok := w.resume(ctx, j); ok {
		return r
	}
	r := w.attempt(ctx, j)
	if r.err == nil {
		w.good = &j.outside
		return r
	}
	if w.good == nil || w.good.digest == j.outside.digest {
		return r
	}
	why := r.err
	j.outside = *w.good
	r = w.attempt(ctx, j)
	if r.err != nil {
		r.err = errors.Join(why, r.err)
		return r
	}
	r.outsideErr = fmt.Sprintf("the last good templates and own files stay in use: %v", why)
	return r
}

func (w *worker) attempt(ctx context.Context, j job) result {
	renderer, err := w.renderer(j.outside)
	if err != nil {
		return result{err: err}
	}
	generate := func(keep []string) (render.Generation, error) {
		return renderer.Render(j.input(keep))
	}
	w.forget(j.desired.routes)
	for range len(j.desired.routes) + 1 {
		keep := w.keep(j.desired.routes)
		g, err := generate(keep)
		if err == nil && w.applier.Current() != g.ID {
			err = w.applier.Test(ctx, g)
		}
		if err != nil {
			bad, err := apply.Isolate(keep, func(keep []string) error {
				g, err := generate(keep)
				if err != nil {
					return err
				}
				return w.applier.Test(ctx, g)
			})
			if err != nil {
				return result{err: err, leftOut: w.leftOut()}
			}
			w.refuse(j.desired.routes, bad)
			continue
		}
		changed, err := w.applier.Apply(ctx, g)
		var taken *apply.Refusal
		if errors.As(err, &taken) && taken.Port != 0 && w.refusePort(j.desired.routes, taken) {
			continue
		}
		return result{
			generation: g.ID, primaries: g.Primaries, services: j.desired.services, leftOut: w.leftOut(), changed: changed, err: err,
			again: slices.ContainsFunc(slices.Collect(maps.Values(w.refused)), func(r refusal) bool { return r.port != 0 }),
		}
	}
	return result{err: errors.New("nginx refuses every selection of routes"), leftOut: w.leftOut()}
}

func (w *worker) renderer(o outside) (*render.Renderer, error) {
	c := w.config.Render
	c.Templates = o.templates
	return render.New(c)
}

func (j job) input(keep []string) render.Input {
	in := render.Input{
		Services: j.desired.services, Certs: j.desired.certs, User: j.outside.files, Identity: j.outside.identity,
		Address: func(id placement.LinkID) (netip.Addr, bool) { a, ok := j.desired.address[id]; return a, ok },
	}
	wanted := make(map[string]bool, len(keep))
	for _, name := range keep {
		wanted[name] = true
	}
	for _, r := range j.desired.routes {
		if wanted[r.Name] {
			in.Routes = append(in.Routes, r)
		}
	}
	return in
}

func (w *worker) keep(routes []upstream.Route) []string {
	var out []string
	for _, r := range routes {
		if _, bad := w.refused[r.Name]; !bad {
			out = append(out, r.Name)
		}
	}
	return out
}

// forget gives a refused route another chance when it changed or when its
// port is free.
func (w *worker) forget(routes []upstream.Route) {
	byName := map[string]upstream.Route{}
	for _, r := range routes {
		byName[r.Name] = r
	}
	maps.DeleteFunc(w.refused, func(name string, bad refusal) bool {
		r, ok := byName[name]
		return !ok || routeKey(r) != bad.key || bad.port != 0 && w.free(bad.port)
	})
}

func (w *worker) free(port uint16) bool {
	for _, a := range w.config.Render.Addresses {
		ln, err := net.Listen("tcp", netip.AddrPortFrom(a, port).String())
		if err != nil {
			return false
		}
		_ = ln.Close()
	}
	return true
}

func (w *worker) refuse(routes []upstream.Route, bad map[string]error) {
	for _, r := range routes {
		if err := bad[r.Name]; err != nil {
			w.refused[r.Name] = refusal{key: routeKey(r), why: err.Error()}
		}
	}
}

// refusePort leaves out the TCP routes that listen on a taken port.
func (w *worker) refusePort(routes []upstream.Route, taken *apply.Refusal) bool {
	found := false
	for _, r := range routes {
		_, already := w.refused[r.Name]
		if r.Protocol == placement.ProtocolTCP && r.Listen == taken.Port && !already {
			w.refused[r.Name] = refusal{key: routeKey(r), port: taken.Port, why: taken.Error()}
			found = true
		}
	}
	return found
}

func (w *worker) leftOut() map[string]string {
	out := map[string]string{}
	for name, r := range w.refused {
		out[name] = r.why
	}
	return out
}
