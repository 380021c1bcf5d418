package engine

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

// errNotLeading ends a turn as the leader.
var errNotLeading = errors.New("another controller leads")

// entry is one policy.
type entry struct {
	doc      policy.Document
	revision uint64
	next     time.Time // of the next decision; zero: only after news
	dirty    bool
	motion   bool // something moves: links are looked at
	observed map[string]placement.Observed
	changed  chan struct{} // closed at the next change of what is shown
	outside  map[string]uint64
}

// Engine decides about every policy while it leads.
type Engine struct {
	cfg     Config // fixed after New
	metrics *metrics
	calls   chan func(context.Context) // requests, run by the loop
	reports chan placement.NodeReport

	mu       sync.Mutex // guards what follows
	leading  bool
	policies map[string]*entry
	nodes    map[string]placement.NodeReport // the newest of each
	settings map[string]nodeSettings         // what operators decided about nodes
	members  map[string]string               // as stored, by workload
	ended    map[string]*entry               // what is kept of policies that ended

	// Owned by the loop.
	records map[string]map[string]placement.Desired // wanted, by node and workload
	unkept  map[string]bool                         // nodes whose records are to be written
	swaps   map[string]uint64                       // revisions of the nodes' settings
}

// New checks the configuration and starts nothing.
func New(cfg Config) (*Engine, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if cfg.Timing == (policy.Timing{}) {
		cfg.Timing = policy.DefaultTiming()
	}
	if cfg.Instance == "" {
		var id [8]byte
		if _, err := rand.Read(id[:]); err != nil {
			return nil, err
		}
		cfg.Instance = hex.EncodeToString(id[:])
	}
	return &Engine{
		cfg: cfg, metrics: newMetrics(cfg.Registerer), calls: make(chan func(context.Context)), reports: make(chan placement.NodeReport, 256),
		policies: map[string]*entry{}, nodes: map[string]placement.NodeReport{}, settings: map[string]nodeSettings{}, members: map[string]string{},
	}, nil
}

// Run leads, or waits to lead, until ctx ends.
func (e *Engine) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		return e.cfg.Nodes.FollowReports(ctx, func(r placement.NodeReport) {
			select {
			case e.reports <- r:
			case <-ctx.Done():
			}
		})
	})
	g.Go(func() error { return e.compete(ctx) })
	return g.Wait()
}

// lead works as the leader until the lease is lost or ctx ends.
func (e *Engine) lead(ctx context.Context) error {
	if err := e.load(ctx); err != nil {
		return err
	}
	e.cfg.Logger.Info("this controller decides about policies", "instance", e.cfg.Instance, "policies", len(e.policies))
	defer e.resign()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	var passed, repaired time.Time
	var nodes map[string]policy.Node
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case r := <-e.reports:
			e.learn(r)
			for more := true; more; {
				select {
				case r := <-e.reports:
					e.learn(r)
				default:
					more = false
				}
			}
		case call := <-e.calls:
			call(ctx)
		case <-look.C:
		}
		now := time.Now()
		fresh := e.cfg.Fleet.PolicyNodes()
		all := now.Sub(passed) >= passEvery || !alike(nodes, fresh)
		nodes = fresh
		if all {
			passed = now
		}
		if err := e.pass(ctx, now, nodes, all); err != nil {
			return err
		}
		if now.Sub(repaired) >= repairEvery {
			repaired = now
			for node := range e.records {
				e.unkept[node] = true
			}
		}
		e.keep(ctx)
	}
}

// alike reports whether nothing about the nodes changed that policies react
// to.
func alike(a, b map[string]policy.Node) bool {
	return maps.EqualFunc(a, b, func(x, y policy.Node) bool {
		return x.State == y.State && x.Lost.Equal(y.Lost) && x.Healthy.Equal(y.Healthy) && (x.Relay == "") == (y.Relay == "")
	})
}

// load reads everything that is stored.
func (e *Engine) load(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, storeWithin)
	defer cancel()
	docs, err := e.cfg.Store.Read(ctx, bus.BucketPolicies)
	if err != nil {
		return err
	}
	members, err := e.cfg.Store.Read(ctx, bus.BucketMembers)
	if err != nil {
		return err
	}
	settings, err := e.cfg.Store.Read(ctx, bus.BucketNodes)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	before := e.policies
	e.policies = make(map[string]*entry, len(docs))
	e.ended = map[string]*entry{}
	e.members, e.settings, e.swaps = map[string]string{}, map[string]nodeSettings{}, map[string]uint64{}
	e.records, e.unkept = map[string]map[string]placement.Desired{}, map[string]bool{}
	for key, v := range docs {
		var doc policy.Document
		if err := json.Unmarshal(v.Value, &doc); err != nil || doc.Workload != key {
			e.cfg.Logger.Error("stored policy cannot be read and is left alone", "workload", key, "err", err)
			continue
		}
		if doc.Ended {
			e.ended[key] = &entry{doc: doc, revision: v.Revision}
			continue
		}
		e.enter(doc, v.Revision)
	}
	for key, v := range members {
		e.members[key] = string(v.Value)
	}
	for key, v := range settings {
		var s nodeSettings
		if err := json.Unmarshal(v.Value, &s); err != nil {
			e.cfg.Logger.Error("stored settings of a node cannot be read", "node", key, "err", err)
			continue
		}
		e.settings[key], e.swaps[key] = s, v.Revision
	}
	for node := range e.cfg.Fleet.PolicyNodes() {
		e.unkept[node] = true // a record may be left that belongs to nothing
	}
	for _, r := range e.nodes {
		e.spread(r)
	}
	for _, old := range before {
		close(old.changed)
	}
	e.leading = true
	e.metrics.leading.Set(1)
	return nil
}

// resign ends the turn as the leader.
func (e *Engine) resign() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.leading = false
	e.metrics.leading.Set(0)
}

// enter adds or replaces a policy; mu is held.
func (e *Engine) enter(doc policy.Document, revision uint64) *entry {
	en := e.policies[doc.Workload]
	if en == nil {
		en = &entry{observed: map[string]placement.Observed{}, changed: make(chan struct{}), outside: map[string]uint64{}}
		e.policies[doc.Workload] = en
		for _, r := range e.nodes {
			for _, o := range r.Placements {
				if o.Workload == doc.Workload {
					en.observed[r.Node] = o
				}
			}
		}
	}
	en.doc, en.revision, en.dirty = doc, revision, true
	en.motion = moves(&doc)
	e.record(&doc)
	return en
}

// record takes over what a document wants of nodes; mu is held.
func (e *Engine) record(doc *policy.Document) {
	want := doc.Desired()
	for node, all := range e.records {
		if _, still := want[node]; !still {
			if _, had := all[doc.Workload]; had {
				delete(all, doc.Workload)
				e.unkept[node] = true
			}
		}
	}
	for node, d := range want {
		if e.records[node] == nil {
			e.records[node] = map[string]placement.Desired{}
		}
		if e.records[node][doc.Workload].Revision != d.Revision {
			e.records[node][doc.Workload] = d
			e.unkept[node] = true
		}
	}
}

// moves reports whether links or streams decide what is next.
func moves(doc *policy.Document) bool {
	for _, op := range doc.Operations {
		if op.Status == policy.Running {
			return true
		}
	}
	return slices.ContainsFunc(doc.Placements, func(p policy.Placement) bool { return p.Want == placement.WantDraining })
}

// learn takes a node's report.
func (e *Engine) learn(r placement.NodeReport) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.nodes[r.Node] = r
	e.spread(r)
}

// spread hands the report's placements to their policies; mu is held.
func (e *Engine) spread(r placement.NodeReport) {
	told := map[string]bool{}
	for _, o := range r.Placements {
		told[o.Workload] = true
		en := e.policies[o.Workload]
		if en == nil {
			continue
		}
		if before, known := en.observed[r.Node]; known && sameObserved(before, o) {
			continue
		}
		en.observed[r.Node] = o
		en.dirty = true
		e.touched(en)
		if o.Outside != "" && o.OutsideNumber > en.outside[r.Node] {
			en.outside[r.Node] = o.OutsideNumber
			e.audit("changed by hand and repaired", "workload", o.Workload, "node", r.Node, "what", o.Outside)
		}
	}
	for name, en := range e.policies {
		if _, known := en.observed[r.Node]; known && !told[name] {
			delete(en.observed, r.Node)
			en.dirty = true
			e.touched(en)
		}
	}
}

// touched wakes whoever watches the policy; mu is held.
func (e *Engine) touched(en *entry) {
	close(en.changed)
	en.changed = make(chan struct{})
}

func sameObserved(a, b placement.Observed) bool {
	x, err := json.Marshal(a)
	if err != nil {
		return false
	}
	y, err := json.Marshal(b)
	return err == nil && string(x) == string(y)
}

func (e *Engine) store(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, storeWithin)
}

// pass decides about every policy that something happened to.
func (e *Engine) pass(ctx context.Context, now time.Time, nodes map[string]policy.Node, all bool) error {
	start := time.Now()
	w := e.look(now, nodes)
	due := e.due(now, all)
	for _, name := range due {
		if err := e.decide(ctx, now, name, w); err != nil {
			return err
		}
	}
	if all {
		e.metrics.pass.Observe(time.Since(start).Seconds())
	}
	return nil
}

// due returns the policies to decide about: those that claim a slot last, in
// the order in which they get one (OPS-2).
func (e *Engine) due(now time.Time, all bool) []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []string
	var queue []policy.Claimant
	running := 0
	for name, en := range e.policies {
		c, has, wants := en.doc.Claim(now)
		if has {
			running++
		}
		if wants {
			queue = append(queue, c)
		}
		if all || en.dirty || en.motion || !en.next.IsZero() && !now.Before(en.next) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	claimants := policy.Grant(queue, 0, len(queue))
	if running >= policy.MaxLimited {
		claimants = nil // nobody can begin: they are not looked at for that
	}
	out = slices.DeleteFunc(out, func(name string) bool { return slices.Contains(claimants, name) })
	return append(out, claimants...)
}

// decide decides about one policy until nothing changes any more.
func (e *Engine) decide(ctx context.Context, now time.Time, name string, w *surroundings) error {
	for range maxRounds {
		e.mu.Lock()
		en := e.policies[name]
		if en == nil {
			e.mu.Unlock()
			return nil
		}
		doc, revision := en.doc, en.revision
		world := w.world(e, en)
		e.mu.Unlock()

		e.metrics.decisions.Inc()
		plan := policy.Decide(now, doc, world)
		if !plan.Changed {
			e.mu.Lock()
			en.next, en.dirty, en.motion = plan.Next, false, moves(&en.doc)
			e.mu.Unlock()
			return e.route(ctx, name)
		}
		if plan.Over {
			return e.end(ctx, name, revision, &doc, plan)
		}
		next, err := e.save(ctx, &plan.Document, revision)
		if err != nil {
			return err
		}
		e.mu.Lock()
		e.enter(plan.Document, next)
		w.count(&plan.Document, en.observed)
		e.touched(en)
		e.mu.Unlock()
		e.tell(name, &doc, &plan)
		if err := e.route(ctx, name); err != nil {
			return err
		}
	}
	e.cfg.Logger.Error("a policy was decided about too often without news", "workload", name)
	return nil
}

// save stores a document. When it is not known whether that succeeded, the
// turn as the leader ends: the next one reads what is stored.
func (e *Engine) save(ctx context.Context, doc *policy.Document, revision uint64) (uint64, error) {
	data, err := json.Marshal(doc)
	if err != nil {
		return 0, fmt.Errorf("encode policy %s: %w", doc.Workload, err)
	}
	ctx, cancel := e.store(ctx)
	defer cancel()
	return e.cfg.Store.Swap(ctx, bus.BucketPolicies, doc.Workload, data, revision)
}

// route makes the members of routing what the document says.
func (e *Engine) route(ctx context.Context, name string) error {
	e.mu.Lock()
	en := e.policies[name]
	if en == nil {
		e.mu.Unlock()
		return nil
	}
	members, routed := en.doc.Members()
	stored := e.members[name]
	e.mu.Unlock()
	if !routed {
		return nil
	}
	data, err := json.Marshal(members)
	if err != nil {
		return err
	}
	if stored == string(data) {
		return nil
	}
	call, cancel := e.store(ctx)
	defer cancel()
	if err := e.cfg.Store.Put(call, bus.BucketMembers, name, data); err != nil {
		return err
	}
	e.mu.Lock()
	e.members[name] = string(data)
	e.mu.Unlock()
	return nil
}

// keep writes the records of the nodes that changed.
func (e *Engine) keep(ctx context.Context) {
	e.mu.Lock()
	work := make(map[string]map[string]placement.Desired, len(e.unkept))
	for node := range e.unkept {
		work[node] = maps.Clone(e.records[node])
	}
	clear(e.unkept)
	e.mu.Unlock()
	for _, node := range slices.Sorted(maps.Keys(work)) {
		call, cancel := e.store(ctx)
		err := e.cfg.Store.KeepDesired(call, node, work[node])
		cancel()
		if err != nil {
			e.cfg.Logger.Warn("a node's records are written again later", "node", node, "err", err)
			e.mu.Lock()
			e.unkept[node] = true
			e.mu.Unlock()
		}
	}
}
