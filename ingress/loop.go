package ingress

import (
	"encoding/json"
	"errors"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/opfield/availability/ingress/apply"
	"github.com/opfield/availability/ingress/render"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// service is one workload port.
type service struct {
	workload string
	port     uint16
}

// loop owns everything that changes. It runs in one goroutine; the fields
// are grouped by what they are about.
type loop struct {
	config  Config
	metrics *metrics
	board   *board

	// What is known.
	table  upstream.Table
	events map[placement.ID]placement.Event
	state  state
	certs  *certStore
	named  map[string][]byte // certificates of the bucket, as PEM
	probed map[service]bool
	moving map[string]bool            // workloads whose placements a planned move changes
	gone   map[placement.ID]time.Time // removed placements, and since when we know

	// What was told to others.
	orders   []upstream.Order   // the table's view
	links    []placement.LinkID // of the orders
	book     *addressBook
	noted    desired
	routed   desired // routes and certificates; the rest is empty
	applied  map[placement.LinkID]bool
	before   []upstream.Service // until the first apply: what an earlier process brought to nginx
	leftOut  map[string]string  // route → why nginx does not have it
	reload   ReloadStatus
	schedule apply.Schedule
	jobs     chan job
	outside  outside

	stateDirty, statusDirty, nginxDirty, routesMoved bool
}

// outside are the files beside ours that nginx reads.
type outside struct {
	digest    string
	identity  string // of this ingress node, as nginx shows it to nodes
	files     []render.File
	templates map[string]string
	err       string // why the newest files are not in use
}

func newLoop(c Config, m *metrics, b *board) (*loop, error) {
	l := &loop{
		config: c, metrics: m, board: b,
		events: map[placement.ID]placement.Event{}, named: map[string][]byte{}, probed: map[service]bool{}, gone: map[placement.ID]time.Time{},
		certs: newCertStore(c.Render.CertDir, c.WorkerUID), jobs: make(chan job, 1),
		leftOut: map[string]string{}, applied: map[placement.LinkID]bool{},
	}
	text, err := os.ReadFile(filepath.Join(c.StateDir, addressesFile))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if l.book, err = newAddressBook(text, time.Now()); err != nil {
		c.Logger.Error("addresses cannot be read, new ones are given", "err", err)
	}
	return l, nil
}

// restore folds in the last known state.
func (l *loop) restore() {
	s, err := readState(l.config.StateDir)
	if err != nil {
		l.config.Logger.Error("last state cannot be read", "err", err)
	}
	l.state = s
	for _, e := range s.Events {
		l.event(e)
	}
	for name, n := range s.Nodes {
		l.table.Node(name, n.Lost, n.Revision)
	}
	var primaries []placement.LinkID
	for _, text := range s.Primaries {
		if id, err := placement.ParseLinkID(text); err == nil {
			primaries = append(primaries, id)
		}
	}
	l.prove(primaries)
	l.reload.Generation = s.Generation
	if s.Known && s.Generation != "" {
		l.before = services(s.Services)
	}
	l.outside = l.readOutside()
	if s.Known {
		l.acceptRoutes()
	}
	if len(s.Relays) > 0 {
		l.tellRelays()
	}
	l.tellMembers()
	l.stateDirty = false
}

func (l *loop) event(e placement.Event) {
	if e.Check() != nil {
		return
	}
	l.table.Event(e)
	if old, ok := l.events[e.ID()]; ok && !e.Order().Newer(old.Order()) {
		return
	}
	l.events[e.ID()] = e
	l.stateDirty = true
	delete(l.gone, e.ID())
	if e.State == placement.StateRemoved {
		l.gone[e.ID()] = time.Now()
	}
}

// forget drops the placements that have been gone for longer than their last
// event is kept anywhere.
func (l *loop) forget(now time.Time) {
	for id, since := range l.gone {
		if now.Sub(since) < forgetAfter {
			continue
		}
		delete(l.gone, id)
		delete(l.events, id)
		l.table.Forget(id)
		l.stateDirty, l.nginxDirty = true, true
	}
}

func (l *loop) node(name string, lost bool, revision uint64) {
	l.table.Node(name, lost, revision)
	if l.state.Nodes == nil {
		l.state.Nodes = map[string]nodeState{}
	}
	if old, ok := l.state.Nodes[name]; !ok || revision > old.Revision {
		l.state.Nodes[name] = nodeState{Lost: lost, Revision: revision}
		l.stateDirty = true
	}
}

func (l *loop) setRoutes(routes map[string][]byte) {
	next := raw(routes)
	if l.state.Known && maps.EqualFunc(l.state.Routes, next, func(a, b json.RawMessage) bool { return string(a) == string(b) }) {
		return
	}
	l.state.Routes, l.state.Known = next, true
	l.stateDirty = true
	l.acceptRoutes()
}

func raw(values map[string][]byte) map[string]json.RawMessage {
	out := make(map[string]json.RawMessage, len(values))
	for k, v := range values {
		if json.Valid(v) {
			out[k] = slices.Clone(v)
		} else {
			out[k] = json.RawMessage("null") // shown as a route with problems
		}
	}
	return out
}

// acceptRoutes decodes the routes; one that cannot be read is shown with its
// problems and takes no other down.
func (l *loop) acceptRoutes() {
	var routes []upstream.Route
	for _, name := range slices.Sorted(maps.Keys(l.state.Routes)) {
		var r upstream.Route
		if err := json.Unmarshal(l.state.Routes[name], &r); err != nil {
			l.metrics.malformed.Inc()
			r = upstream.Route{}
		}
		r.Name = name
		routes = append(routes, r)
	}
	l.table.SetRoutes(routes)
	l.routesMoved = true
	l.loadCertificates()
}

func (l *loop) setCertificates(certs map[string][]byte) {
	l.named = map[string][]byte{}
	for name, value := range certs {
		text, err := pemOf(value)
		if err != nil {
			l.certs.errs["named-"+name] = err
			continue
		}
		l.named[name] = text
	}
	l.loadCertificates()
}

// loadCertificates stores the pairs that routes use.
func (l *loop) loadCertificates() {
	used := map[string]bool{}
	for _, v := range l.table.Routes() {
		t := v.Route.TLS
		if t == nil || !v.Serves {
			continue
		}
		id := certID(*t)
		if used[id] {
			continue
		}
		used[id] = true
		if t.Cert == "" {
			l.certs.load(*t)
		} else if text, ok := l.named[t.Cert]; ok {
			_ = l.certs.put(id, text) // kept in errs, shown on the route
		}
	}
	l.certs.prune(used)
	l.statusDirty = true
	l.reroute()
}

func (l *loop) setRelays(relays map[string][]byte) {
	l.state.Relays = raw(relays)
	l.stateDirty = true
	l.tellRelays()
}

func (l *loop) setMembers(members map[string][]byte) {
	l.state.Members = raw(members)
	l.stateDirty = true
	l.tellMembers()
}

// tellMembers hands the members to the table. What cannot be read is as if it
// were not there: traffic does not end for a record of a newer version.
func (l *loop) tellMembers() {
	var all []placement.Members
	l.moving = map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(l.state.Members)) {
		var m placement.Members
		if json.Unmarshal(l.state.Members[name], &m) != nil || m.Workload != name {
			l.metrics.malformed.Inc()
			continue
		}
		all = append(all, m)
		if m.Moving {
			l.moving[name] = true
		}
	}
	l.table.SetMembers(all)
}

func (l *loop) tellRelays() {
	var out []RelayAddress
	for _, id := range slices.Sorted(maps.Keys(l.state.Relays)) {
		var r RelayAddress
		if json.Unmarshal(l.state.Relays[id], &r) != nil || r.Addr == "" {
			l.metrics.malformed.Inc()
			continue
		}
		r.ID = id
		out = append(out, r)
	}
	if l.config.OnRelays != nil {
		l.config.OnRelays(out)
	}
}

// prove says what the running nginx lists as primaries.
func (l *loop) prove(primaries []placement.LinkID) {
	l.applied = map[placement.LinkID]bool{}
	for _, id := range primaries {
		l.applied[id] = true
	}
	l.table.Proven(primaries)
}

// round acts on everything that is known: links first and at once, nginx
// later and collected.
func (l *loop) round(now time.Time) {
	changed, whole := l.table.Changes()
	l.orders = l.table.Orders()
	if whole {
		l.readdress(now)
	}
	if l.book.dirty {
		l.saveAddresses()
	}
	if whole {
		l.config.Endpoints.Apply(l.orders, l.address)
	} else {
		l.config.Endpoints.Update(changed)
	}
	l.statusDirty, l.nginxDirty = true, true
	if l.routed.version != l.noted.version {
		l.consider(now)
	}
}

// readdress gives every link its address.
func (l *loop) readdress(now time.Time) {
	if !slices.EqualFunc(l.links, l.orders, func(id placement.LinkID, o upstream.Order) bool { return id == o.Link }) {
		l.links = make([]placement.LinkID, len(l.orders))
		for i, o := range l.orders {
			l.links[i] = o.Link
		}
		l.book.update(l.links, now)
	}
}

// consider notes what nginx must learn. It costs milliseconds with thousands
// of routes, so it is not part of every round.
func (l *loop) consider(now time.Time) {
	l.nginxDirty = false
	if !l.state.Known {
		return // nginx keeps what it has until the routes are known
	}
	d := l.routed
	d.services, d.outside = l.table.Services(), l.outside.digest
	if c := compare(l.noted, d, l.moving); c != apply.None {
		l.schedule.Note(now, c)
		l.noted = d
	}
}

func (l *loop) address(id placement.LinkID) netip.Addr {
	a, _ := l.book.get(id)
	return a
}

// saveAddresses comes before the first use of an address: a restart must not
// give it to another link.
func (l *loop) saveAddresses() {
	text, err := l.book.encode()
	if err == nil {
		err = writeFile(filepath.Join(l.config.StateDir, addressesFile), text, 0o600, -1)
	}
	if err != nil {
		l.config.Logger.Error("addresses cannot be stored", "err", err)
		return
	}
	l.book.dirty = false
}

// reroute brings what is rendered of routes and certificates up to date.
func (l *loop) reroute() {
	next := desired{version: l.routed.version, certs: map[string]string{}}
	for _, v := range l.table.Routes() {
		if !v.Serves {
			continue
		}
		next.routes = append(next.routes, v.Route)
		if t := v.Route.TLS; t != nil {
			if id := certID(*t); l.certs.has(id) {
				next.certs[v.Route.Name] = id
			}
		}
	}
	same := func(a, b upstream.Route) bool { return routeKey(a) == routeKey(b) }
	if next.version == 0 || !maps.Equal(next.certs, l.routed.certs) || !slices.EqualFunc(next.routes, l.routed.routes, same) {
		next.version++
		l.routed = next
	}
}

// begin hands the present snapshot to the apply goroutine.
func (l *loop) begin() {
	l.schedule.Began()
	// Until the reload is over, workers of both generations may serve.
	both := maps.Clone(l.applied)
	for _, s := range l.noted.services {
		for _, id := range s.Primaries() {
			both[id] = true
		}
	}
	l.table.Proven(slices.Collect(maps.Keys(both)))
	d := l.noted
	d.address = l.book.snapshot(append(linksOf(l.before), l.links...))
	l.jobs <- job{desired: d, outside: l.outside, before: l.before}
	l.before = nil
}

// ended takes the result of an apply.
func (l *loop) ended(now time.Time, r result) {
	l.metrics.applied(r)
	l.leftOut = r.leftOut
	l.outside.err = r.outsideErr
	l.reload.At, l.reload.Result, l.reload.Error = now, r.word(), r.outsideErr
	if r.err != nil {
		l.reload.Error = r.err.Error()
		l.schedule.Failed(now)
		l.table.Proven(slices.Collect(maps.Keys(l.applied)))
		l.config.Logger.Error("configuration was not applied", "err", r.err)
		return
	}
	l.schedule.Succeeded()
	if r.again {
		l.schedule.Again(now.Add(apply.AgainAfter))
	}
	l.reload.Generation = r.generation
	l.prove(r.primaries)
	if r.asBefore {
		// What moved since waits until it is quiet, or for the next reload.
		l.noted.services, l.nginxDirty = r.services, true
	}
	l.state.Generation, l.state.Services, l.state.Primaries = r.generation, keep(r.services), nil
	for _, id := range r.primaries {
		l.state.Primaries = append(l.state.Primaries, id.String())
	}
	l.stateDirty = true
	if r.changed {
		l.config.Logger.Info("generation applied", "generation", r.generation, "took", r.took)
	}
	for _, name := range slices.Sorted(maps.Keys(r.leftOut)) {
		l.config.Logger.Warn("route left out", "route", name, "err", r.leftOut[name])
	}
}

// snapshot returns the state as another goroutine may write it.
func (l *loop) snapshot() state {
	l.stateDirty = false
	s := l.state
	s.Routes, s.Relays, s.Nodes = maps.Clone(s.Routes), maps.Clone(s.Relays), maps.Clone(s.Nodes)
	s.Primaries, s.Services = slices.Clone(s.Primaries), slices.Clone(s.Services)
	s.Events = make([]placement.Event, 0, len(l.events))
	for _, e := range l.events {
		s.Events = append(s.Events, e)
	}
	return s
}
