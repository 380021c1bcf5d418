package policy

import (
	"cmp"
	"slices"

	"github.com/opfield/availability/placement"
)

// stop stops what runs and keeps every placement (STP-1).
func (d *decision) stop() {
	draining := ""
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		if p.Want == placement.WantServing {
			p.Served = true
			d.retire(p, placement.WantStopped)
		}
		if p.Want == placement.WantDraining {
			if p.After == placement.WantServing {
				p.After, p.Served = placement.WantStopped, true
			}
			draining = p.Node
		}
	}
	if draining != "" {
		d.phase(Draining, "%d streams end on %s", d.w.Observed[draining].Streams, draining)
		return
	}
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		o := d.w.Observed[p.Node]
		if p.Want != placement.WantStopped || d.away(p.Node) || p.answers(o) && o.Done {
			continue
		}
		d.phase(Stopping, "node %s stops its copy", p.Node)
		switch {
		case !d.online(p.Node):
			d.hold(CodeNodeSilent, "node %s is %s", p.Node, d.w.Nodes[p.Node].State)
		case p.answers(o) && o.Fault != nil:
			d.hold(Code(o.Fault.Code), "node %s: %s", p.Node, o.Fault.Message)
		case d.due(d.nodeLimit(p)):
			d.hold(CodeNodeSilent, "node %s does not say that it did", p.Node)
		}
		return
	}
	d.finish(Completed, "", "")
}

// start starts the copies that served last (STP-1); a copy whose node is lost
// is replaced like after any node loss.
func (d *decision) start() {
	if d.doc.Stopped {
		d.doc.Stopped = false
		var served []*Placement
		for i := range d.doc.Placements {
			if p := &d.doc.Placements[i]; p.Served && p.Want == placement.WantStopped {
				served = append(served, p)
			}
		}
		slices.SortFunc(served, func(a, b *Placement) int {
			return cmp.Or(boolFirst(d.doc.Settings.allows(a.Node), d.doc.Settings.allows(b.Node)), boolFirst(a.Original, b.Original), compare(a.Node, b.Node))
		})
		for i, p := range served {
			p.Served = false
			if i >= d.doc.Settings.Replicas { // fewer are wanted since the stop
				d.put(p, rest(p))
				continue
			}
			p.Generation = d.doc.Current
			d.put(p, placement.WantServing)
		}
	}
	d.converge()
}

// restart goes over the serving copies one after another.
func (d *decision) restart() {
	op := d.active()
	if d.doc.Stopped {
		d.finish(Completed, "", "the workload is stopped")
		return
	}
	if t := d.tally(); len(t.draining) > 0 {
		d.phase(Draining, "%d streams end on %s", d.w.Observed[t.draining[0].Node].Streams, t.draining[0].Node)
		return
	}
	for len(op.Left) > 0 {
		p := d.doc.placementOn(op.Left[0])
		if p == nil || p.Want != placement.WantServing || d.lost(p.Node) {
			op.Left = slices.Clone(op.Left[1:])
			continue
		}
		if p.For != op.ID {
			t := d.tally()
			if !d.down(p) && t.ready < min(len(t.serving), d.doc.Settings.Replicas) {
				d.phase(CheckingHealth, "the other placements are not all ready")
				if !d.due(op.StartedAt.Add(d.w.Timing.StartWithin)) {
					return
				}
			}
			p.For = op.ID
			d.retire(p, placement.WantServing)
			if p.Want == placement.WantServing { // its node is away: nothing to drain
				p.startAgain()
				p.Since = d.now
			}
			d.phase(Draining, "the links to %s close", p.Node)
			return
		}
		if d.serves(p) {
			op.Left = slices.Clone(op.Left[1:])
			continue
		}
		if !d.online(p.Node) {
			d.phase(Starting, "waits for node %s, which is away", p.Node)
			d.hold(CodeNodeSilent, "node %s is %s", p.Node, d.w.Nodes[p.Node].State)
			return
		}
		d.phase(CheckingHealth, "%s: %s", p.Node, reasonOf(d.w.Observed[p.Node]))
		if code, message := d.failed(p); code != "" {
			d.finish(Failed, code, message)
		} else if o := d.w.Observed[p.Node]; p.answers(o) && o.Fault != nil && d.due(d.startLimit(p)) {
			d.hold(Code(o.Fault.Code), "node %s: %s", p.Node, o.Fault.Message)
		} else {
			d.unled(p)
		}
		return
	}
	d.finish(Completed, "", "")
}

// cleanup waits until what is not needed any more is gone.
func (d *decision) cleanup() {
	if nodes := d.unclean(); len(nodes) > 0 {
		p := d.doc.placementOn(nodes[0])
		d.phase(CleaningUp, "node %s removes its copy", p.Node)
		if o := d.w.Observed[p.Node]; p.answers(o) && o.Fault != nil {
			d.phase(CleaningUp, "node %s: %s", p.Node, o.Fault.Message)
			d.again(Code(o.Fault.Code), "node %s: %s", p.Node, o.Fault.Message)
		} else if d.due(d.nodeLimit(p)) {
			d.hold(CodeNodeSilent, "node %s does not say that it did", p.Node)
		}
		return
	}
	d.finish(Completed, "", "")
}

// unclean returns the nodes that are online and have a copy that shall go.
func (d *decision) unclean() []string {
	var out []string
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		o := d.w.Observed[p.Node]
		if p.Want == placement.WantAbsent && d.online(p.Node) && (!p.answers(o) || !o.Done) {
			out = append(out, p.Node)
		}
	}
	slices.SortFunc(out, compare)
	return out
}

// disable gives the policy up: the survivor becomes the ordinary workload, the
// other copies go, an original stays stopped (DIS).
func (d *decision) disable() {
	op := d.active()
	survivor := d.doc.placementOn(op.Survivor)
	if survivor == nil {
		d.doc.Disabling = false
		d.finish(Failed, CodeSurvivorUnreachable, "there is no placement on node "+op.Survivor+" any more; choose another survivor")
		return
	}
	if op.Result == "" { // what is left of the policy at the end does not tell it any more
		op.Result = d.kept(survivor)
	}
	if !d.freeSurvivor(survivor) || !d.endOthers(survivor) {
		return
	}
	d.put(survivor, placement.WantReleased)
	o := d.w.Observed[survivor.Node]
	if d.online(survivor.Node) && (!survivor.answers(o) || !o.Done) {
		d.phase(Finalizing, "node %s lets the container go: %s", survivor.Node, reasonOf(o))
		return
	}
	if !d.online(survivor.Node) {
		d.phase(Finalizing, "waits for node %s", survivor.Node)
		d.hold(CodeSurvivorUnreachable, "node %s has the survivor and is not online", survivor.Node)
		return
	}
	d.doc.Released = true
	op.Code, op.Message = "", ""
	var away []string
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		if p.Node != survivor.Node && (p.Want == placement.WantAbsent || p.Original) && !d.online(p.Node) {
			away = append(away, p.Node)
		}
	}
	status := Completed
	if len(away) > 0 {
		status = CleanupPending
		op.Message = "nodes that are away still have a copy: it is removed when they return"
	}
	d.finish(status, "", op.Message)
}

// kept says what a disable leaves behind.
func (d *decision) kept(survivor *Placement) string {
	text := "the workload runs on " + survivor.Node
	if d.doc.Stopped {
		text = "the workload is stopped on " + survivor.Node
	}
	for i := range d.doc.Placements {
		if p := &d.doc.Placements[i]; p.Original && p.Node != survivor.Node {
			text += "; its original is stopped on " + p.Node
		}
	}
	return text
}

// freeSurvivor sees to it that the survivor runs, unless the workload is
// stopped, and that it can take the traffic of the others.
func (d *decision) freeSurvivor(s *Placement) bool {
	if s.Want == placement.WantReleased || d.doc.Stopped {
		return true
	}
	if s.Want != placement.WantServing {
		if s.Want != placement.WantDraining {
			s.Generation, s.Revision = d.doc.Current, 0
		}
		d.put(s, placement.WantServing)
	}
	others := false
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		others = others || p != s && !d.down(p)
	}
	if d.serves(s) {
		return true
	}
	o := d.w.Observed[s.Node]
	if !others && s.answers(o) && o.Generation != 0 {
		return true // nothing better is left, and there is a container (DIS-4)
	}
	d.phase(CheckingHealth, "the survivor on %s: %s", s.Node, reasonOf(o))
	switch code, message := d.failed(s); {
	case !d.online(s.Node):
		d.hold(CodeSurvivorUnreachable, "node %s has the survivor and is not online", s.Node)
	case code != "":
		d.again(code, "%s", message)
		s.startAgain()
		s.Since = d.doc.Operations[0].Next
	default:
		d.unled(s)
	}
	return false
}

// endOthers drains and removes every copy but the survivor.
func (d *decision) endOthers(s *Placement) bool {
	wait, silent := false, ""
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		if p == s || p.Want == placement.WantReleased {
			continue
		}
		switch p.Want {
		case placement.WantDraining:
			p.After = rest(p)
			d.phase(Draining, "%d streams end on %s", d.w.Observed[p.Node].Streams, p.Node)
			wait = true
			continue
		case placement.WantServing:
			d.retire(p, rest(p))
			wait = wait || p.Want == placement.WantDraining
		case placement.WantPrepared, placement.WantStopped:
			d.put(p, rest(p))
		}
		o := d.w.Observed[p.Node]
		done := p.answers(o) && o.Done
		switch {
		case p.Want == placement.WantDraining || d.away(p.Node):
		case done && p.Original:
			d.put(p, placement.WantReleased)
		case !done:
			d.phase(CleaningUp, "node %s: %s", p.Node, reasonOf(o))
			// A copy that cannot be removed does not hold the others up.
			d.wake(p.Since.Add(d.w.Timing.NodeWithin))
			wait = wait || d.now.Before(p.Since.Add(d.w.Timing.NodeWithin)) || p.Original && d.online(p.Node)
			if p.Original && !d.online(p.Node) {
				silent = p.Node
			}
		}
	}
	if !wait && silent != "" {
		d.hold(CodeNodeSilent, "node %s, which has the original, is %s", silent, d.w.Nodes[silent].State)
	}
	return !wait && silent == ""
}
