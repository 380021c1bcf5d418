package simulate

import (
	"slices"
	"time"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

// timing is the product's, but a run without news is not looked at for longer.
func timing() policy.Timing { return policy.DefaultTiming() }

// mostDecisions in a minute: more are a decision that is never content.
const mostDecisions = 1000

// world is what the controller knows.
func (s *run) world(w *workload) policy.World {
	world := s.view // its maps are used again: a decision keeps nothing of them
	world.Observed, world.Timing = w.observed, timing()
	for _, n := range s.nodes {
		state := policy.NodeOnline
		switch {
		case n.confirmed && !n.reachable():
			state = policy.NodeOffline
		case !s.controllerLinked, n.up && !n.cut && n.natsCut:
			state = policy.NodeNotReporting
		case !n.up || n.cut:
			if s.now.Sub(n.lostAt) >= 5*time.Second {
				state = policy.NodeOffline
			} else {
				state = policy.NodeNotReporting
			}
		}
		view := policy.Node{ID: n.id, State: state, Known: true, Drained: n.drained, Facts: placement.NodeFacts{
			Arch: "amd64", OS: "linux", Docker: "20.10", CPU: 8000, Memory: n.memory,
		}}
		if n.memory < 1<<30 {
			view.PlannedMemory = s.planned(n, w)
		}
		if state == policy.NodeOffline {
			view.Lost = n.lostAt
		}
		if state == policy.NodeOnline {
			view.Healthy = n.healthy
			if n.hang {
				view.Facts.Error = "its Docker daemon does not answer"
			}
			if !s.registry {
				view.Facts.Registry = "the internal registry does not answer"
			}
		}
		world.Nodes[n.id] = view
		// One that is silent for 10 s is not waited for.
		confirmed := s.ingress || s.now.Sub(s.ingressSilent) >= 10*time.Second
		p := placementOn(&w.doc, n.id)
		open := p != nil && opened(p)
		world.LinksClosed[n.id], world.LinksOpen[n.id] = confirmed && !open, confirmed && open
	}
	running := 0
	for _, other := range s.policies {
		if other != w && other.exists && other.limited {
			running++
		}
	}
	world.Slot = running < policy.MaxLimited
	return world
}

// opened reports whether the links to a placement are open by its document.
func opened(p *policy.Placement) bool { return p.Want == placement.WantServing && !p.Suspended }

// relinked reports whether links open or close from one document to the next.
func relinked(before, after *policy.Document) bool {
	for i := range after.Placements {
		p := &after.Placements[i]
		if q := placementOn(before, p.Node); opened(p) != (q != nil && opened(q)) {
			return true
		}
	}
	return false
}

// planned is what other workloads take of a node.
func (s *run) planned(n *node, w *workload) int64 {
	var sum int64
	for _, other := range s.policies {
		if p := placementOn(&other.doc, n.id); other != w && other.exists && p != nil && (p.Want == placement.WantServing || p.Want == placement.WantDraining) {
			sum += need
		}
	}
	return sum
}

// soon asks for a decision.
func (s *run) soon(w *workload, d time.Duration) {
	at := s.now.Add(d)
	if !w.due.IsZero() && !at.Before(w.due) && !s.now.After(w.due) {
		return
	}
	w.due = at
	w.wake++
	wake := w.wake
	s.at(at, func() {
		if w.wake == wake {
			w.due = time.Time{}
			s.decide(w)
		}
	})
}

func (s *run) everybody(d time.Duration) {
	for _, w := range s.policies {
		if w.exists {
			s.soon(w, d)
		}
	}
}

// heard takes what a node says.
func (s *run) heard(r *replica, o placement.Observed) {
	w := s.workload(r.workload)
	if !w.exists {
		return
	}
	before, known := w.observed[r.n.id]
	if known && sameReport(before, o) {
		return
	}
	w.observed[r.n.id] = o
	s.soon(w, 0)
}

func sameReport(a, b placement.Observed) bool {
	fault := func(f *placement.Fault) string {
		if f == nil {
			return ""
		}
		return f.Code
	}
	fa, fb := fault(a.Fault), fault(b.Fault)
	ma, mb := a.Mirrored != nil, b.Mirrored != nil
	a.Fault, b.Fault, a.Mirrored, b.Mirrored = nil, nil, nil, nil
	return a == b && fa == fb && ma == mb
}

// decide is one round of the controller for a policy. It may be killed before
// or after it stored its decision.
func (s *run) decide(w *workload) {
	if !s.alive || !w.exists || s.result.Broken != nil {
		return
	}
	if !s.controllerLinked {
		s.soon(w, 5*time.Second)
	}
	s.result.Decisions++
	if s.now.Sub(w.minute) > time.Minute {
		w.minute, w.decisions = s.now, 0
	}
	if w.decisions++; w.decisions > mostDecisions {
		s.fail(decided, "%s was decided about %d times within a minute", w.name, w.decisions)
	}
	world := s.world(w)
	plan := policy.Decide(s.now, w.doc, world)
	if s.cfg.spoil != nil {
		s.cfg.spoil(&w.doc, &plan)
	}
	s.inspectAgain(w, &plan, world)
	if plan.Changed {
		if !s.quiet && s.chance(0.002) {
			s.kill("before it stored")
			return
		}
		before := w.doc
		if s.cfg.Trace != nil {
			for _, e := range plan.Events {
				s.log("%s: %s %s %s", w.name, e.Operation, e.Code, e.Text)
			}
			for _, op := range plan.Document.Operations {
				s.log("%s: %s is %s, %s: %s%s", w.name, op.ID, op.Status, op.Phase, op.Note, op.Message)
			}
		}
		for _, op := range newlyEnded(&before, &plan.Document) {
			s.result.Operations[Ended{op.Type, op.Status}]++
		}
		w.doc, w.changed = plan.Document, s.now
		_, w.limited, _ = w.doc.Claim(s.now)
		s.inspectStep(w, &before, world)
		if plan.Over {
			s.log("%s: the policy is given up", w.name)
			w.exists, w.limited = false, false
			s.after(s.between(time.Minute, time.Hour), func() { s.enable(w) })
			return
		}
		if !s.quiet && s.chance(0.002) {
			s.kill("after it stored")
			return
		}
		s.publish(w)
		if relinked(&before, &w.doc) { // the ingress nodes confirm
			s.soon(w, s.between(5*time.Millisecond, 100*time.Millisecond))
		}
		for _, other := range s.policies { // a slot may be free now
			if other != w && other.exists {
				if _, _, wants := other.doc.Claim(s.now); wants {
					s.soon(other, time.Millisecond)
				}
			}
		}
	}
	if !plan.Next.IsZero() {
		s.soon(w, max(plan.Next.Sub(s.now), time.Millisecond))
	}
}

// publish sends every record that a node does not have.
func (s *run) publish(w *workload) {
	var desired map[string]placement.Desired
	for _, p := range w.doc.Placements { // in order: the trace depends on the seed alone
		n := s.node(p.Node)
		if r := n.replica(w.name); !n.reachable() || r.known && r.desired.Revision >= p.Revision {
			continue
		}
		if desired == nil {
			desired = w.doc.Desired()
		}
		s.send(n, w, desired[p.Node])
	}
}

// send delivers a record a little later; what is lost is repaired when the
// node is reached again.
func (s *run) send(n *node, w *workload, d placement.Desired) {
	epoch := w.epoch
	if s.cfg.spoilRecord != nil {
		s.cfg.spoilRecord(&d)
	}
	s.after(s.between(2*time.Millisecond, 60*time.Millisecond), func() {
		if n.reachable() && w.exists && w.epoch == epoch {
			n.replica(w.name).receive(d)
		}
	})
}

func (s *run) node(id string) *node {
	return s.nodes[slices.IndexFunc(s.nodes, func(n *node) bool { return n.id == id })]
}

// kill ends the controller; another one starts later from what is stored.
func (s *run) kill(when string) {
	s.log("fault: the controller is killed %s", when)
	s.result.Kills++
	s.alive = false
	for _, w := range s.policies {
		w.observed = map[string]placement.Observed{}
	}
	s.after(s.between(time.Second, 5*time.Minute), func() {
		s.alive = true
		s.log("the controller starts")
		for _, n := range s.nodes {
			n.healthy = s.now // PRI-3
			s.resync(n)
		}
		s.everybody(time.Second)
	})
}

// resync is what happens when a node and the controller see each other again.
func (s *run) resync(n *node) {
	if !s.alive || !n.reachable() {
		return
	}
	for _, w := range s.policies {
		if !w.exists {
			continue
		}
		if d, ok := w.doc.Desired()[n.id]; ok {
			s.send(n, w, d)
		}
		if r := n.copies[w.name]; r != nil {
			r.report()
		}
		s.soon(w, 200*time.Millisecond)
	}
}
