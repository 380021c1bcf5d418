package policy

import (
	"fmt"
	"slices"

	"github.com/opfield/availability/placement"
)

// standbysWanted is how many further nodes have the image (LOS-6).
const standbysWanted = 2

// propose queues what the policy does by itself. There is no operation at
// work; one may wait.
func (d *decision) propose() {
	if d.doc.Disabling && !d.doc.Released || d.has(Enable) {
		return
	}
	if nodes := d.unclean(); len(nodes) > 0 && !d.has(Cleanup) {
		d.queue(Cleanup, fmt.Sprintf("node %s has a copy that is not needed", nodes[0]))
	}
	if d.doc.Stopped || d.doc.Released || d.doc.Disabling {
		return
	}
	if why := d.ill(); why != "" {
		if !d.has(Heal, Scale, Rollout, Start) {
			d.queue(Heal, why)
		}
		return
	}
	if why := d.misplaced(); why != "" {
		if !d.has(Scale, Rollout, Start) {
			d.queue(Scale, why)
		}
		return
	}
	if why := d.outranked(); why != "" && len(d.doc.Operations) == 0 {
		d.queue(Failback, why)
	}
}

// queue adds an operation of our own, a little later than now, so that not all
// begin at the same moment.
func (d *decision) queue(t Type, reason string) {
	op := d.doc.add(d.now, t, reason)
	op.Next = d.now.Add(d.jitter())
	d.wake(op.Next)
	d.events = append(d.events, Event{Kind: Progressed, Operation: op.ID, Text: fmt.Sprintf("%s: %s", t, reason)})
}

func (d *decision) has(types ...Type) bool {
	return slices.ContainsFunc(d.doc.Operations, func(op Operation) bool { return slices.Contains(types, op.Type) })
}

// ill says why fewer placements serve than wanted although something can be
// done about it, or "" (LOS-2).
func (d *decision) ill() string {
	good, why := 0, ""
	here := false
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		switch {
		case p.Want == placement.WantDraining && p.After == placement.WantServing:
			good++
		case p.Want != placement.WantServing:
		case d.lost(p.Node):
			why = fmt.Sprintf("node %s is lost", p.Node)
		case p.Suspended:
			why, here = fmt.Sprintf("the copy on %s failed its checks", p.Node), true
		default:
			good++
		}
	}
	if good >= d.doc.Settings.Replicas {
		return ""
	}
	if why == "" {
		why = fmt.Sprintf("%d of %d placements", good, d.doc.Settings.Replicas)
	}
	if !here && len(d.candidates()) == 0 {
		return ""
	}
	return why
}

// misplaced says why placements must change that all serve, or "".
func (d *decision) misplaced() string {
	t := d.tally()
	s := d.doc.Settings
	switch {
	case len(t.serving) > s.Replicas:
		return fmt.Sprintf("%d of %d placements", len(t.serving), s.Replicas)
	case len(t.old) > 0 && (s.MaxUnavailable > 0 || s.MaxSurge > 0 && len(d.candidates()) > 0):
		return fmt.Sprintf("the copy on %s has an older version", t.old[0].Node)
	case len(t.vacate) > 0 && len(d.candidates()) > 0 && (s.MaxUnavailable > 0 || s.MaxSurge > 0):
		return fmt.Sprintf("the copy on %s shall leave its node", t.vacate[0].Node)
	}
	return ""
}

// CanFailBack reports whether the settings let a placement serve throughout a
// failback (PRI-6).
func (s Settings) CanFailBack() bool {
	return s.MaxSurge >= 1 || s.Mode == Replicated && s.MaxUnavailable >= 1
}

// outranked says why the workload moves to nodes of higher priority, or "".
func (d *decision) outranked() string {
	s := d.doc.Settings
	if !s.PriorityMode || !s.CanFailBack() {
		return ""
	}
	t := d.tally()
	if t.ready != s.Replicas || len(t.serving) != s.Replicas || len(t.draining) > 0 {
		return ""
	}
	for _, node := range d.wanted() {
		if !d.servesOn(node) && d.due(d.doc.FailbackAfter) {
			return fmt.Sprintf("node %s has a higher priority", node)
		}
	}
	return ""
}

func (d *decision) standby(node string) bool {
	p := d.doc.placementOn(node)
	return p != nil && p.Want == placement.WantPrepared
}

// standbys keeps the image ready on further nodes (LOS-6). It is not an
// operation: nobody waits for it.
func (d *decision) standbys() {
	if d.doc.Stopped || d.doc.Disabling || d.doc.Released || !d.doc.Routed || len(d.doc.Operations) > 0 {
		return
	}
	v := d.doc.version(d.doc.Current)
	if v.Image.Digest == "" {
		return
	}
	good, bad := 0, 0
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		if p.Want != placement.WantPrepared {
			continue
		}
		if n := d.w.Nodes[p.Node]; n.State == NodeOnline && !n.Known {
			return // it may do well: this controller has only begun to listen
		}
		if code := d.nodeRefusal(p.Node, v); code == "" && p.Generation == d.doc.Current {
			good++
		} else {
			bad++
		}
	}
	if good == standbysWanted && bad == 0 {
		return // those stay: nothing is to be chosen
	}
	nodes := d.candidates()
	// One that is on its way stays, whatever became better meanwhile.
	slices.SortStableFunc(nodes, func(a, b string) int { return boolFirst(d.standby(a), d.standby(b)) })
	chosen := nodes[:min(standbysWanted, len(nodes))]
	for _, node := range chosen {
		p := d.place(node)
		if p.Want != placement.WantPrepared || p.Generation != d.doc.Current {
			p.Generation = d.doc.Current
			d.put(p, placement.WantPrepared)
		}
	}
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		if p.Want == placement.WantPrepared && !p.Original && !slices.Contains(chosen, p.Node) && d.online(p.Node) {
			d.put(p, placement.WantAbsent)
		}
	}
}
