package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

// ErrNotReady is the cause of a request that came before this controller led,
// or while another one leads. Nothing was done then.
var ErrNotReady = errors.New("this controller does not decide about policies yet")

// Known returns ErrNotReady while this controller does not know the policies:
// before it read what is stored, and while another one leads. Without an error
// a policy that is not shown does not exist. One that was read is shown also
// when NATS is lost.
func (e *Engine) Known() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.known {
		return ErrNotReady
	}
	return nil
}

// run runs a request in the loop and waits for it. After an error that is not
// a refusal it is not known what is stored: the loop reads it again.
func (e *Engine) run(ctx context.Context, do func(context.Context) error) error {
	done := make(chan error, 1)
	call := func(loop context.Context) error {
		if loop.Err() != nil {
			done <- fmt.Errorf("%w: %w", ErrNotReady, context.Cause(loop))
			return nil
		}
		err := do(loop)
		done <- err
		if _, refused := errors.AsType[*policy.Refusal](err); refused {
			return nil
		}
		return err
	}
	select {
	case e.calls <- call:
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", ErrNotReady, ctx.Err())
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func unknown(workload string) *policy.Refusal {
	return &policy.Refusal{Code: policy.CodeUnknown, NotFound: true, Message: fmt.Sprintf("workload %q has no policy; `opfield ha list` shows those that have, `opfield ha enable` gives it one", workload)}
}

// capture asks the node about the container of a request.
func (e *Engine) capture(ctx context.Context, req *policy.EnableRequest) (placement.Captured, error) {
	if _, known := e.cfg.Fleet.PolicyNodes()[req.Node]; !known {
		return placement.Captured{}, &policy.Refusal{Code: policy.CodeNodeUnknown, Message: "the node is not known",
			Violations: []policy.Violation{{Code: policy.CodeNodeUnknown, Field: "node", Message: fmt.Sprintf("there is no node %q; see `opfield nodes list`", req.Node)}}}
	}
	ctx, cancel := context.WithTimeout(ctx, inspectWithin)
	defer cancel()
	c, err := e.cfg.Nodes.Inspect(ctx, req.Node, req.Container)
	switch {
	case errors.Is(err, bus.ErrInspect): // the node looked
		return c, &policy.Refusal{Code: policy.CodeContainerUnknown, Message: "the container cannot be made available",
			Violations: []policy.Violation{{Code: policy.CodeContainerUnknown, Field: "container", Message: fmt.Sprintf("node %s: %v; see `opfield workloads`", req.Node, err)}}}
	case err != nil:
		return c, &policy.Refusal{Code: policy.CodeOriginNotEligible, Conflict: true, Message: fmt.Sprintf("node %s did not answer about container %q: %v", req.Node, req.Container, err)}
	}
	if req.Workload == "" {
		req.Workload = cmp.Or(c.Workload, c.Name)
	}
	return c, nil
}

// nodesNow returns the nodes with everything that is known of them.
func (e *Engine) nodesNow() map[string]policy.Node {
	return e.look(time.Now(), e.cfg.Fleet.PolicyNodes()).nodes
}

func (e *Engine) preflight(req policy.EnableRequest, c placement.Captured) policy.Eligibility {
	nodes := e.nodesNow()
	for id, why := range e.cfg.Fleet.Refused(req.Workload) {
		n := nodes[id]
		n.Refused = why
		nodes[id] = n
	}
	e.mu.Lock()
	_, exists := e.policies[req.Workload]
	e.mu.Unlock()
	return policy.Preflight(req, policy.Subject{Captured: c, Nodes: nodes, Exists: exists})
}

// Check says whether a container may become available, and changes nothing.
func (e *Engine) Check(ctx context.Context, req policy.EnableRequest) (policy.Eligibility, error) {
	if err := e.Known(); err != nil {
		return policy.Eligibility{}, err
	}
	c, err := e.capture(ctx, &req)
	if err != nil {
		return policy.Eligibility{}, err
	}
	return e.preflight(req, c), nil
}

// Enable gives a running container a policy.
func (e *Engine) Enable(ctx context.Context, req policy.EnableRequest) (policy.Operation, error) {
	c, err := e.capture(ctx, &req)
	if err != nil {
		return policy.Operation{}, err
	}
	var op policy.Operation
	err = e.run(ctx, func(loop context.Context) error {
		if e.isDamaged(req.Workload) {
			return &policy.Refusal{Code: policy.CodeExists, Conflict: true,
				Message: fmt.Sprintf("workload %s has a stored policy that cannot be read, and its placements are left as they are; the controller's log says why", req.Workload)}
		}
		el := e.preflight(req, c)
		if !el.OK() {
			first := el.Blockers[0]
			return &policy.Refusal{Code: policy.CodePreflight, Conflict: true, Eligibility: &el,
				Message: fmt.Sprintf("workload %s cannot be made available: %s", el.Workload, first.Message)}
		}
		doc := policy.NewDocument(time.Now(), el, c, e.base(req.Workload))
		revision, err := e.save(loop, &doc, 0)
		if err != nil {
			return err
		}
		e.mu.Lock()
		e.enter(doc, revision)
		e.mu.Unlock()
		op = doc.Operations[0]
		return nil
	})
	return op, err
}

func (e *Engine) isDamaged(workload string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.damaged[workload]
}

// base returns the largest number that is known to have been in use for the
// workload: of generations in health events, and of records that nodes still
// had when they reported.
func (e *Engine) base(workload string) uint64 {
	most := e.cfg.Fleet.Generation(workload)
	e.mu.Lock()
	defer e.mu.Unlock()
	most = max(most, e.past[workload])
	for _, r := range e.nodes {
		for _, o := range r.Placements {
			if o.Workload == workload {
				most = max(most, o.Revision, o.Generation)
			}
		}
	}
	return most
}

// change applies a request to a document and stores it.
func (e *Engine) change(ctx context.Context, workload string, do func(*policy.Document, policy.World) (policy.Operation, *policy.Refusal)) (policy.Operation, error) {
	var op policy.Operation
	err := e.run(ctx, func(loop context.Context) error {
		w := e.look(time.Now(), e.cfg.Fleet.PolicyNodes())
		e.mu.Lock()
		en := e.policies[workload]
		if en == nil {
			e.mu.Unlock()
			return unknown(workload)
		}
		doc, revision := en.doc, en.revision
		doc.Operations = slices.Clone(doc.Operations)
		world := w.world(e, en)
		e.mu.Unlock()
		var refusal *policy.Refusal
		if op, refusal = do(&doc, world); refusal != nil {
			return refusal
		}
		next, err := e.save(loop, &doc, revision)
		if err != nil {
			return err
		}
		e.mu.Lock()
		e.touched(e.enter(doc, next))
		e.mu.Unlock()
		return nil
	})
	return op, err
}

// Update takes new settings.
func (e *Engine) Update(ctx context.Context, workload string, s policy.Settings) (policy.Operation, error) {
	known := e.cfg.Fleet.PolicyNodes()
	for _, list := range []struct {
		field string
		nodes []string
	}{{"nodes", s.Nodes}, {"nodePriority", s.NodePriority}} {
		for i, n := range list.nodes {
			if _, ok := known[n]; !ok {
				return policy.Operation{}, &policy.Refusal{Code: policy.CodeNodeUnknown, Message: "a node is not known", Violations: []policy.Violation{
					{Code: policy.CodeNodeUnknown, Field: fmt.Sprintf("%s[%d]", list.field, i), Message: fmt.Sprintf("there is no node %q; see `opfield nodes list`", n)}}}
			}
		}
	}
	return e.change(ctx, workload, func(d *policy.Document, _ policy.World) (policy.Operation, *policy.Refusal) {
		return d.Update(time.Now(), s)
	})
}

// Rollout brings out a new version.
func (e *Engine) Rollout(ctx context.Context, workload string, c policy.Change) (policy.Operation, error) {
	return e.change(ctx, workload, func(d *policy.Document, w policy.World) (policy.Operation, *policy.Refusal) {
		if r := d.MayRollOut(w, c); r != nil {
			return policy.Operation{}, r
		}
		return d.Rollout(time.Now(), c)
	})
}

// Disable gives the policy up.
func (e *Engine) Disable(ctx context.Context, workload string, r policy.DisableRequest) (policy.Operation, error) {
	return e.change(ctx, workload, func(d *policy.Document, w policy.World) (policy.Operation, *policy.Refusal) {
		return d.Disable(time.Now(), r, w)
	})
}

// Do queues a start, stop or restart.
func (e *Engine) Do(ctx context.Context, workload string, t policy.Type) (policy.Operation, error) {
	return e.change(ctx, workload, func(d *policy.Document, _ policy.World) (policy.Operation, *policy.Refusal) {
		return d.Do(time.Now(), t)
	})
}

// Retry tries a failed operation again.
func (e *Engine) Retry(ctx context.Context, workload, operation string) (policy.Operation, error) {
	return e.change(ctx, workload, func(d *policy.Document, _ policy.World) (policy.Operation, *policy.Refusal) {
		return d.Retry(time.Now(), operation)
	})
}

// Get returns what is shown of one policy.
func (e *Engine) Get(workload string) (policy.View, bool) {
	v, _, ok := e.Watch(workload)
	return v, ok
}

// Watch returns the present view and a channel that is closed at the next
// change.
func (e *Engine) Watch(workload string) (policy.View, <-chan struct{}, bool) {
	w := e.look(time.Now(), e.cfg.Fleet.PolicyNodes())
	e.mu.Lock()
	defer e.mu.Unlock()
	en := e.policies[workload]
	if en == nil {
		return policy.View{}, nil, false
	}
	return policy.Show(en.doc, w.world(e, en)), en.changed, true
}

// List returns every policy, sorted by workload.
func (e *Engine) List() []policy.View {
	w := e.look(time.Now(), e.cfg.Fleet.PolicyNodes())
	e.mu.Lock()
	defer e.mu.Unlock()
	out := make([]policy.View, 0, len(e.policies))
	for _, name := range slices.Sorted(maps.Keys(e.policies)) {
		out = append(out, policy.Show(e.policies[name].doc, w.world(e, e.policies[name])))
	}
	return out
}

// Operations returns those at work and queued, then those that ended.
func (e *Engine) Operations(workload string) ([]policy.Operation, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	en := e.policies[workload]
	switch {
	case !e.known:
		return nil, ErrNotReady
	case en == nil:
		return nil, unknown(workload)
	}
	return slices.Concat(en.doc.Operations, en.doc.History), nil
}

// Digests returns the image digests that must stay, by repository (IMG-4);
// false while this controller does not lead, or cannot read a policy, and so does
// not know them.
func (e *Engine) Digests() (map[string][]string, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.leading || len(e.damaged) > 0 {
		return nil, false
	}
	out := map[string][]string{}
	for name, en := range e.policies {
		out[name] = en.doc.Digests()
	}
	return out, true
}

// Nodes returns every node, sorted by id.
func (e *Engine) Nodes() []policy.Node {
	nodes := e.nodesNow()
	return slices.SortedFunc(maps.Values(nodes), func(a, b policy.Node) int { return cmp.Compare(a.ID, b.ID) })
}

// edit changes what operators decided about a node.
func (e *Engine) edit(ctx context.Context, node string, change func(*nodeSettings)) error {
	return e.run(ctx, func(loop context.Context) error {
		if _, known := e.cfg.Fleet.PolicyNodes()[node]; !known {
			return unknownNode(node)
		}
		e.mu.Lock()
		s, before := e.settings[node], e.swaps[node]
		e.mu.Unlock()
		change(&s)
		data, err := json.Marshal(s)
		if err != nil {
			return err
		}
		call, cancel := e.store(loop)
		defer cancel()
		revision, err := e.cfg.Store.Swap(call, bus.BucketNodes, node, data, before)
		if err != nil {
			return err
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		e.settings[node], e.swaps[node] = s, revision
		for _, en := range e.policies {
			en.dirty = true
		}
		return nil
	})
}

func unknownNode(node string) *policy.Refusal {
	return &policy.Refusal{Code: policy.CodeNodeUnknown, NotFound: true, Message: fmt.Sprintf("there is no node %q; see `opfield nodes list`", node)}
}

// DrainNode moves every placement off a node and keeps new ones away.
func (e *Engine) DrainNode(ctx context.Context, node string) error {
	return e.edit(ctx, node, func(s *nodeSettings) { s.Drained = true })
}

// UndrainNode lets the node take placements again.
func (e *Engine) UndrainNode(ctx context.Context, node string) error {
	return e.edit(ctx, node, func(s *nodeSettings) { s.Drained = false })
}

// RenameNode gives a node a name for people; its id stays.
func (e *Engine) RenameNode(ctx context.Context, node, name string) error {
	const longest = 128
	if len(name) > longest {
		return &policy.Refusal{Code: policy.CodeChangeInvalid, Message: "the name is too long",
			Violations: []policy.Violation{{Code: policy.CodeChangeInvalid, Field: "name", Message: fmt.Sprintf("%d bytes, at most %d are allowed", len(name), longest)}}}
	}
	if strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return &policy.Refusal{Code: policy.CodeChangeInvalid, Message: "the name cannot be shown",
			Violations: []policy.Violation{{Code: policy.CodeChangeInvalid, Field: "name", Message: "has a character that cannot be shown; use letters, digits, signs and spaces"}}}
	}
	return e.edit(ctx, node, func(s *nodeSettings) { s.Name = name })
}

// ConfirmLost takes an operator's word that a silent node is lost. A controller
// that does not lead refuses it: nobody would act on it.
func (e *Engine) ConfirmLost(ctx context.Context, node string) error {
	return e.run(ctx, func(context.Context) error {
		n, known := e.cfg.Fleet.PolicyNodes()[node]
		switch {
		case !known:
			return unknownNode(node)
		case n.State == policy.NodeOnline:
			return &policy.Refusal{Code: policy.CodeNodeNotLost, Conflict: true, Message: fmt.Sprintf("node %s is online; a node that is heard cannot be confirmed as lost", node)}
		}
		if err := e.cfg.Fleet.ConfirmLost(node); err != nil {
			return unknownNode(node)
		}
		e.cfg.Logger.Info("an operator confirmed that a node is lost", "node", node)
		return nil
	})
}

// RemoveNode takes a node out that has no placement any more.
func (e *Engine) RemoveNode(ctx context.Context, node string) error {
	if _, known := e.cfg.Fleet.PolicyNodes()[node]; !known {
		return unknownNode(node)
	}
	if e.cfg.Revoke == nil {
		return ErrNotReady
	}
	return e.run(ctx, func(loop context.Context) error {
		n := e.cfg.Fleet.PolicyNodes()[node]
		e.mu.Lock()
		var users []string
		for name, en := range e.policies {
			for _, p := range en.doc.Placements {
				if p.Node == node && (p.Want == placement.WantServing || p.Want == placement.WantDraining || p.Original && n.State == policy.NodeOnline) {
					users = append(users, name)
				}
			}
		}
		e.mu.Unlock()
		if len(users) > 0 {
			slices.Sort(users)
			return &policy.Refusal{Code: policy.CodeNodeInUse, Conflict: true, Message: fmt.Sprintf("node %s has placements of %v; drain it first with `opfield nodes drain %s`", node, slices.Compact(users), node)}
		}
		call, cancel := e.store(loop)
		defer cancel()
		if err := e.cfg.Revoke(call, node); err != nil {
			return err
		}
		if err := errors.Join(e.cfg.Store.Delete(call, bus.BucketNodes, node), e.cfg.Store.KeepDesired(call, node, nil)); err != nil {
			return err
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.settings, node)
		delete(e.swaps, node)
		delete(e.nodes, node)
		e.all = true
		return nil
	})
}
