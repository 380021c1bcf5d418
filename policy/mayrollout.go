package policy

import "github.com/opfield/availability/placement"

// MayRollOut runs the checks again that came before the enable: a blocker
// refuses the rollout and changes nothing (ELG-6, ELG-5). Room is looked for
// with the limits that the change asks for: a change that takes back too high
// a limit must get through, and one that sets it must not.
func (d *Document) MayRollOut(w World, c Change) *Refusal {
	if r := d.mayChange(); r != nil { // no advice about room for what is given up
		return r
	}
	next, r := d.changed(c)
	if r != nil {
		return r
	}
	if d.Stopped {
		return nil // it takes effect at the start
	}
	v := *d.version(d.Current)
	v.Memory, v.CPU = next.Memory, next.CPU
	dec := &decision{w: w, doc: *d}
	dec.doc.Versions = []Version{v}
	free := len(dec.candidates())
	here := 0
	for i := range d.Placements {
		p := &d.Placements[i]
		if n := w.Nodes[p.Node]; (p.Want == placement.WantServing || p.Want == placement.WantDraining) && n.State == NodeOnline && n.Facts.Error == "" {
			here++
		}
	}
	s := d.Settings
	switch {
	case here+free < s.Replicas:
		return refuse(CodeInsufficientNodes, "%d nodes have or can take the workload, %d are needed: %s", here+free, s.Replicas, dec.whyNot())
	case s.MaxUnavailable == 0 && (s.MaxSurge == 0 || here+free <= s.Replicas):
		return refuse(CodeRolloutCapacity, "no node has room for a temporary placement (maxSurge %d): set maxUnavailable to at least 1, or add a node: %s", s.MaxSurge, dec.whyNot())
	}
	return nil
}
