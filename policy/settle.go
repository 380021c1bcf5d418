package policy

import (
	"slices"

	"github.com/opfield/availability/placement"
)

// settle says what is waited for, or ends the operation.
func (d *decision) settle() {
	op := d.active()
	s := d.doc.Settings
	t := d.tally()
	missing := s.Replicas - len(t.serving) - returning(t.draining)
	switch {
	case len(t.draining) > 0:
		p := t.draining[0]
		if p.Closed.IsZero() {
			d.phase(Draining, "the links to %s close", p.Node)
		} else {
			d.phase(Draining, "%d streams end on %s", d.w.Observed[p.Node].Streams, p.Node)
		}
		return
	case missing > 0:
		d.phase(SelectingNodes, "%d of %d placements have no node", missing, s.Replicas)
		d.hold(CodeInsufficientNodes, "no node can take %d more of %d placements: %s", missing, s.Replicas, d.whyNot())
		return
	}
	for _, p := range t.serving {
		if d.ready(p) {
			continue
		}
		o := d.w.Observed[p.Node]
		switch {
		case !d.online(p.Node):
			d.phase(Starting, "waits for node %s, which is away", p.Node)
			d.hold(CodeNodeSilent, "node %s is %s", p.Node, d.w.Nodes[p.Node].State)
		case !p.answers(o):
			d.phase(Starting, "node %s begins", p.Node)
		case !o.ImageReady:
			d.phase(PreparingImages, "node %s pulls the image", p.Node)
		case o.State == placement.StateRunning || o.State == placement.StateUnhealthy || o.State == placement.StateStarting:
			d.phase(CheckingHealth, "%s: %s", p.Node, reasonOf(o))
		default:
			d.phase(Starting, "%s: %s", p.Node, reasonOf(o))
		}
		pulls := !d.current(p) && !d.prefetched(p) && !(p.answers(o) && o.Fault != nil)
		if d.online(p.Node) && !pulls && d.due(d.startLimit(p)) { // not started by this operation, so it cannot fail it
			d.hold(placement.CodeNotReady, "node %s: %s", p.Node, reasonOf(o))
		}
		return
	}
	for _, p := range t.serving {
		if !d.serves(p) {
			d.phase(ActivatingRoutes, "an ingress node does not lead to %s yet", p.Node)
			d.unled(p)
			return
		}
	}
	if len(t.old) > 0 || len(t.vacate) > 0 || len(t.serving) > s.Replicas {
		code, what := CodeRolloutCapacity, "be updated"
		if len(t.old) == 0 {
			what = "be moved"
		}
		if d.awaitsImage(t.old) {
			return
		}
		d.phase(SelectingNodes, "no room for a temporary placement")
		d.hold(code, "no placement can %s: maxSurge %d finds no node, and maxUnavailable is %d: %s", what, s.MaxSurge, s.MaxUnavailable, d.whyNot())
		return
	}
	if p := d.leftover(); p != "" {
		d.phase(CleaningUp, "node %s removes its copy", p)
		return
	}
	d.phase(Finalizing, "")
	d.succeed(op)
}

// awaitsImage reports whether a node has to pull the new image before its copy
// is updated. It is not waited for with the turn while it hears of nothing or
// cannot pull: that may take for ever.
func (d *decision) awaitsImage(old []*Placement) bool {
	var held *Placement
	for _, p := range old {
		o := d.w.Observed[p.Node]
		switch {
		case d.prefetched(p):
		case d.online(p.Node) && !(p.answers(o) && o.Fault != nil):
			d.phase(PreparingImages, "node %s pulls the image", p.Node)
			return true
		case held == nil:
			held = p
		}
	}
	switch {
	case held == nil:
		return false
	case !d.online(held.Node):
		d.phase(PreparingImages, "waits for node %s, which is away", held.Node)
		d.hold(CodeNodeSilent, "node %s is %s", held.Node, d.w.Nodes[held.Node].State)
	default:
		f := d.w.Observed[held.Node].Fault
		d.phase(PreparingImages, "node %s: %s", held.Node, f.Message)
		d.hold(Code(f.Code), "node %s: %s", held.Node, f.Message)
	}
	return true
}

// leftover is a node that is not away and still removes a copy.
func (d *decision) leftover() string {
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		if p.Want == placement.WantAbsent && !d.away(p.Node) && p.For == d.active().ID {
			o, ok := d.w.Observed[p.Node]
			if ok && p.answers(o) && o.Fault != nil {
				continue // a later cleanup sees to it
			}
			d.wake(p.Since.Add(d.w.Timing.NodeWithin))
			if d.now.Before(p.Since.Add(d.w.Timing.NodeWithin)) {
				return p.Node
			}
		}
	}
	return ""
}

// succeed ends an operation that reached what it wanted.
func (d *decision) succeed(op *Operation) {
	if op.RolledBack {
		d.finish(Failed, op.Code, op.Message)
		return
	}
	op.Code, op.Message = "", ""
	d.finish(Completed, "", "")
}

// whyNot names the reason of each node that cannot take a placement.
func (d *decision) whyNot() string {
	v := d.doc.version(d.doc.Current)
	ids := make([]string, 0, len(d.w.Nodes))
	for id := range d.w.Nodes {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	text := make([]byte, 0, 64*len(ids))
	for _, id := range ids {
		code := d.nodeRefusal(id, v)
		if code == "" {
			continue
		}
		n, c := d.w.Nodes[id], d.claimOn(id, v)
		why := n.explain(code, &c)
		if len(text) > 0 {
			text = append(text, "; "...)
		}
		text = append(append(append(text, id...), ": "...), why...)
	}
	if len(text) == 0 {
		return "every node has one"
	}
	return string(text)
}

// progress is the share of placements that are as they shall be.
func (d *decision) progress() int {
	t := d.tally()
	all := max(len(t.serving)+len(t.draining), d.doc.Settings.Replicas, 1)
	good := 0
	for _, p := range t.serving {
		if d.serves(p) && d.current(p) {
			good++
		}
	}
	if op := d.active(); op.Type == Stop || op.Type == Restart || op.Type == Disable {
		all, good = max(len(d.doc.Placements), 1), 0
		for i := range d.doc.Placements {
			if o := d.w.Observed[d.doc.Placements[i].Node]; d.doc.Placements[i].answers(o) && o.Done {
				good++
			}
		}
	}
	return min(99, 100*good/all)
}
