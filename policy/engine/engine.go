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
	offered  bool          // nothing changed when a free slot was offered last
	changed  chan struct{} // closed at the next change of what is shown
}

// Engine decides about every policy while it leads.
type Engine struct {
	cfg     Config // fixed after New
	metrics *metrics
	// Requests, run by the loop. What they return is an error of the store.
	calls    chan func(context.Context) error
	reports  chan placement.NodeReport
	keepSoon chan struct{}

	mu       sync.Mutex // guards what follows
	leading  bool
	known    bool // what is stored was read, and no other controller is known to lead since
	policies map[string]*entry
	nodes    map[string]placement.NodeReport         // the newest of each
	settings map[string]nodeSettings                 // what operators decided about nodes
	members  map[string]string                       // as stored, by workload
	swaps    map[string]uint64                       // revisions of the nodes' settings
	damaged  map[string]bool                         // workloads whose stored policies cannot be used
	past     map[string]uint64                       // largest number of policies that ended, by workload
	all      bool                                    // every policy is to be looked at
	records  map[string]map[string]placement.Desired // wanted, by node and workload
	unkept   map[string]bool                         // nodes whose records are to be written
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
		cfg: cfg, metrics: newMetrics(cfg.Registerer), calls: make(chan func(context.Context) error), reports: make(chan placement.NodeReport, 256),
		keepSoon: make(chan struct{}, 1), past: map[string]uint64{}, records: map[string]map[string]placement.Desired{}, unkept: map[string]bool{},
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
	keeping, cancel := context.WithCancel(ctx)
	kept := make(chan struct{})
	go func() { defer close(kept); e.keep(keeping) }()
	defer func() { cancel(); <-kept }()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	passed, asked, repaired := time.Time{}, time.Now(), time.Now() // what is stored was read just now
	var cost time.Duration                                         // of the last look at every policy
	var nodes map[string]policy.Node
	e.ask(e.cfg.Fleet.PolicyNodes(), anyNode) // what came while nobody listened is lost
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
			if err := call(ctx); err != nil {
				return err
			}
		case <-look.C:
		}
		now := time.Now()
		if now.Sub(repaired) >= repairEvery {
			if err := e.repair(ctx); err != nil {
				return err
			}
			repaired = now
		}
		fresh := e.cfg.Fleet.PolicyNodes()
		// Many nodes tell what they have for the first time: looking at every
		// policy for each of them would take all the time there is.
		all := now.Sub(passed) >= passEvery || !alike(nodes, fresh) || now.Sub(passed) >= passCost*cost && e.takeAll()
		nodes = fresh
		if now.Sub(asked) >= askEvery {
			asked = now
			e.ask(nodes, e.unheard)
		}
		if all {
			passed = now
		}
		if err := e.pass(ctx, now, nodes, all); err != nil {
			return err
		}
		if all {
			cost = time.Since(now)
		}
		e.wakeKeeper()
	}
}

// ask asks nodes that are online for their reports.
func (e *Engine) ask(nodes map[string]policy.Node, which func(node string) bool) {
	for id, n := range nodes {
		if n.State != policy.NodeOnline || !which(id) {
			continue
		}
		if err := e.cfg.Nodes.AskReport(id); err != nil {
			e.cfg.Logger.Debug("a node is asked for its report later", "node", id, "err", err)
			return
		}
	}
}

// unheard reports whether the node has not told anything yet.
func (e *Engine) unheard(node string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, heard := e.nodes[node]
	return !heard
}

func anyNode(string) bool { return true }

// takeAll reports whether every policy is to be looked at, once.
func (e *Engine) takeAll() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := e.all
	e.all = false
	return all
}

// alike reports whether nothing about the nodes changed that policies react
// to.
func alike(a, b map[string]policy.Node) bool {
	return maps.EqualFunc(a, b, func(x, y policy.Node) bool {
		return x.State == y.State && x.Lost.Equal(y.Lost) && x.Healthy.Equal(y.Healthy) && (x.Relay == "") == (y.Relay == "")
	})
}

// audit tells what happened without a user's request, or in answer to one
// (OBS-2).
func (e *Engine) audit(a bus.AuditEvent) {
	e.cfg.Logger.Info(a.Text, "audit", string(a.Kind), "workload", a.Workload, "operation", a.Operation, "node", a.Node, "code", a.Code)
	if e.cfg.Audit != nil {
		a.At = time.Now()
		e.cfg.Audit(a)
	}
}

func (e *Engine) store(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, storeWithin)
}

// pass decides about every policy that something happened to, then about those
// that want a slot, in the order in which they get one (OPS-2).
func (e *Engine) pass(ctx context.Context, now time.Time, nodes map[string]policy.Node, all bool) error {
	start := time.Now()
	due, queue := e.due(now, all)
	if len(due) == 0 && len(queue) == 0 {
		return nil
	}
	w := e.look(now, nodes)
	for _, name := range due {
		if err := e.decide(ctx, now, name, w); err != nil {
			return err
		}
	}
	for _, c := range queue {
		if !c.due && !w.free() {
			continue
		}
		if err := e.decide(ctx, now, c.name, w); err != nil {
			return err
		}
	}
	if all {
		e.metrics.pass.Observe(time.Since(start).Seconds())
	}
	return nil
}

// queued is a policy that claims a slot.
type queued struct {
	name string
	due  bool // it is decided about also if no slot is free
}

// due returns the policies to decide about, and apart from them those that
// claim a slot, in the order in which they get one. One that could do nothing
// with a free slot is not among those until something happens to it.
func (e *Engine) due(now time.Time, all bool) ([]string, []queued) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []string
	var claims []policy.Claimant
	var queue []queued
	news := map[string]bool{}
	for name, en := range e.policies {
		claim, _, wants := en.doc.Claim(now)
		due := all || en.dirty || en.motion || !en.next.IsZero() && !now.Before(en.next)
		switch {
		case wants && due:
			news[name] = true
			claims = append(claims, claim)
		case wants && !en.offered:
			claims = append(claims, claim)
		case due:
			out = append(out, name)
		}
	}
	slices.Sort(out)
	for _, name := range policy.Grant(claims, 0, len(claims)) {
		queue = append(queue, queued{name, news[name]})
	}
	return out, queue
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
		if !plan.Changed && !plan.Over {
			e.mu.Lock()
			en.next, en.dirty, en.motion, en.offered = plan.Next, false, moves(&en.doc), world.Slot
			e.mu.Unlock()
			return e.route(ctx, name)
		}
		if plan.Over {
			return e.end(ctx, name, &doc, plan, revision)
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

// end removes a policy of which nothing is left. It is stored that nothing is
// left before it is deleted: only who may write it may delete it.
func (e *Engine) end(ctx context.Context, name string, before *policy.Document, plan policy.Plan, revision uint64) error {
	if _, err := e.save(ctx, &plan.Document, revision); err != nil {
		return err
	}
	e.tell(name, before, &plan)
	call, cancel := e.store(ctx)
	defer cancel()
	for _, bucket := range []string{bus.BucketMembers, bus.BucketPolicies} { // routing first: the policy knows what is left
		if err := e.cfg.Store.Delete(call, bucket, name); err != nil {
			return err
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if en := e.policies[name]; en != nil {
		close(en.changed)
	}
	delete(e.policies, name)
	delete(e.members, name)
	e.past[name] = max(e.past[name], plan.Document.Counter)
	plan.Document.Placements = nil
	e.record(&plan.Document)
	e.audit(bus.AuditEvent{Kind: bus.AuditEnded, Workload: name, Text: "the policy ended; nothing is left of it"})
	return nil
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

// tell tells what was decided.
func (e *Engine) tell(name string, before *policy.Document, plan *policy.Plan) {
	for _, ev := range plan.Events {
		e.audit(bus.AuditEvent{Kind: bus.AuditKind(ev.Kind), Workload: name, Operation: ev.Operation, Node: ev.Node, Code: string(ev.Code), Text: ev.Text})
	}
	last := ""
	if len(before.History) > 0 {
		last = before.History[0].ID
	}
	for _, op := range plan.Document.History {
		if op.ID == last {
			break
		}
		e.metrics.operations.WithLabelValues(string(op.Type), string(op.Status)).Inc()
	}
}
