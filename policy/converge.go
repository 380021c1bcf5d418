package policy

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/opfield/availability/placement"
)

// work carries the operation on as far as it goes now.
func (d *decision) work() {
	op := d.active()
	if op == nil {
		return
	}
	switch op.Type {
	case Stop:
		d.stop()
	case Restart:
		d.restart()
	case Disable:
		d.disable()
	case Cleanup:
		d.cleanup()
	case Start:
		d.start()
	default:
		d.converge()
	}
	if op := d.active(); op != nil {
		op.Progress = d.progress()
	}
}

// tally is how the placements are at the moment.
type tally struct {
	serving  []*Placement // that shall serve, without those whose node is lost
	draining []*Placement
	old      []*Placement // of serving: another content than wanted
	vacate   []*Placement // of serving: they shall leave their node
	ready    int          // of serving: they serve
}

func (d *decision) tally() tally {
	n := len(d.doc.Placements)
	all := make([]*Placement, 4*n) // one piece of memory for the four
	t := tally{serving: all[:0:n], draining: all[n : n : 2*n], old: all[2*n : 2*n : 3*n], vacate: all[3*n : 3*n]}
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		switch p.Want {
		case placement.WantDraining:
			t.draining = append(t.draining, p)
		case placement.WantServing:
			t.serving = append(t.serving, p)
			if d.serves(p) {
				t.ready++
			}
			if d.leaves(p) {
				t.vacate = append(t.vacate, p)
			} else if !d.current(p) {
				t.old = append(t.old, p)
			}
		}
	}
	return t
}

// leaves reports whether a placement shall leave its node: an operator does
// not want it there, or a failback moves it.
func (d *decision) leaves(p *Placement) bool {
	n, known := d.w.Nodes[p.Node]
	if !known || n.Drained || !d.doc.Settings.allows(p.Node) {
		return true
	}
	return d.failsBack() && !slices.Contains(d.wanted(), p.Node)
}

// failsBack reports whether a failback is at work, and the settings still let
// it.
func (d *decision) failsBack() bool {
	op := d.active()
	return op != nil && op.Type == Failback && d.doc.Settings.PriorityMode && d.doc.Settings.CanFailBack()
}

// unavailable is how many placements may be made unavailable now: by a
// failback only if it cannot do without (PRI-2, PRI-6).
func (d *decision) unavailable() int {
	s := d.doc.Settings
	if op := d.active(); op != nil && op.Type == Failback && (s.Mode == Failover || s.MaxSurge > 0) {
		return 0
	}
	return s.MaxUnavailable
}

// wanted returns the nodes that priority mode wants the workload on: the first
// healthy ones of its order (PRI-1, PRI-2).
func (d *decision) wanted() []string {
	var out []string
	for _, id := range d.order() {
		if len(out) == d.doc.Settings.Replicas {
			break
		}
		out = append(out, id)
	}
	return out
}

// order returns every node that has the workload or could take it and has been
// healthy for the failback delay, by priority. A node that serves needs no delay.
func (d *decision) order() []string {
	v := d.doc.version(d.doc.Current)
	delay := d.failbackDelay()
	var out []string
	for id, n := range d.w.Nodes {
		p := d.doc.placementOn(id)
		serves := p != nil && (p.Want == placement.WantServing || p.Want == placement.WantDraining && p.After == placement.WantServing) && !p.Suspended
		if serves && n.State != NodeOffline && !n.Drained && d.doc.Settings.allows(id) {
			out = append(out, id)
			continue
		}
		if n.Healthy.IsZero() || serves {
			continue
		}
		if d.nodeRefusal(id, v) == "" && d.due(n.Healthy.Add(delay)) {
			out = append(out, id)
		}
	}
	slices.SortFunc(out, func(a, b string) int {
		if ra, rb := d.rank(a), d.rank(b); ra != rb {
			return ra - rb
		}
		if r := boolFirst(d.servesOn(a), d.servesOn(b)); r != 0 {
			return r // nodes without a rank: nothing is moved between them
		}
		return compare(a, b)
	})
	return out
}

func (d *decision) failbackDelay() time.Duration {
	return time.Duration(d.doc.Settings.FailbackDelaySeconds) * time.Second
}

func (d *decision) servesOn(node string) bool {
	p := d.doc.placementOn(node)
	return p != nil && p.Want == placement.WantServing
}

// converge brings the placements to what is wanted: as many as wanted, of the
// current version, on nodes that may have them. It is what enable, scale,
// rollout, heal and failback have in common; they differ in what is wanted
// and in what a failure means.
func (d *decision) converge() {
	op := d.active()
	if d.doc.Stopped {
		if op.RolledBack { // what it was for did not come about
			d.finish(Failed, op.Code, op.Message)
			return
		}
		d.finish(Completed, "", "the workload is stopped; it takes effect at its start")
		return
	}
	if op.Type == Rollout && !op.RolledBack && op.Worked >= d.w.Timing.RolloutWithin {
		d.rollBack(CodeRolloutTimeout, fmt.Sprintf("it was not done within %v", d.w.Timing.RolloutWithin))
	}
	for again := true; again; { // once more after a rollout turned round
		if !d.image() {
			return
		}
		d.replaceLost()
		if again = d.failures(); again && d.active() == nil {
			return
		}
	}
	d.replaceSuspended()
	for range 2 * (MaxReplicas + len(d.doc.Placements)) {
		if !d.move(d.tally()) {
			break
		}
	}
	if d.active() == nil || d.active().Status != Running {
		return
	}
	d.settle()
}

// place returns the placement on a node, a new one if there is none. Pointers
// to other placements do not hold after it.
func (d *decision) place(node string) *Placement {
	if p := d.doc.placementOn(node); p != nil {
		return p
	}
	d.doc.Placements = append(d.doc.Placements, Placement{Node: node, Original: node == d.doc.Original.Node, Since: d.now})
	return &d.doc.Placements[len(d.doc.Placements)-1]
}

// replaceable reports whether the node of a placement is lost and another can
// take its place. Without one it is kept: it serves again when its node is back.
func (d *decision) replaceable(p Placement) bool {
	if p.Want != placement.WantServing || !d.lost(p.Node) {
		return false
	}
	_, known := d.w.Nodes[p.Node]
	return !known || len(d.candidates()) > 0 || len(d.tally().serving) > d.doc.Settings.Replicas
}

// replaceLost gives up the placements of lost nodes.
func (d *decision) replaceLost() {
	for i := range d.doc.Placements {
		if p := &d.doc.Placements[i]; d.replaceable(*p) {
			d.step(p.Node, "node %s is lost", p.Node)
			d.put(p, rest(p))
		}
	}
}

// replaceSuspended gives up the placements that are out of routing by their
// checks, as far as other nodes can take them; the others are restarted where
// they are.
func (d *decision) replaceSuspended() {
	op := d.active()
	free := -1
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		if p.Want != placement.WantServing || !p.Suspended || p.For == op.ID {
			continue
		}
		if free < 0 {
			free = len(d.candidates())
		}
		if free == 0 {
			p.startAgain()
			p.For, p.Since = op.ID, d.now
			d.step(p.Node, "restart on %s: no other node can take it", p.Node)
			continue
		}
		free--
		op.Avoid = append(slices.Clone(op.Avoid), p.Node)
		d.put(p, rest(p))
		// The node was no good for the workload: its delay starts again (PRI-3).
		if back := d.now.Add(d.failbackDelay()); back.After(d.doc.FailbackAfter) {
			d.doc.FailbackAfter = back
		}
	}
}

// move makes one change towards what is wanted and reports whether it did.
func (d *decision) move(t tally) bool {
	s := d.doc.Settings
	running := len(t.serving) + len(t.draining)
	missing := s.Replicas - (len(t.serving) - len(t.vacate)) - returning(t.draining)
	// may reports whether one placement less may serve now.
	may := func(p *Placement) bool {
		return d.down(p) || t.ready-1 >= s.Replicas-d.unavailable()
	}
	switch {
	case missing > 0 && len(t.serving)+returning(t.draining) < s.Replicas:
		room := s.MaxSurge
		if t.ready < s.Replicas-d.unavailable() {
			room = max(1, room) // what drains does not hold a replacement up
		}
		return running < s.Replicas+room && d.addCopy()
	case missing > 0: // something leaves its node, and has no successor yet
		if running < s.Replicas+s.MaxSurge {
			return d.addCopy()
		}
		if p := d.firstToGo(t.vacate); d.unavailable() > 0 && len(t.draining) == 0 && may(p) {
			d.retire(p, rest(p))
			return true
		}
		return false
	}
	if op := d.active(); op.RolledBack && len(t.serving)+returning(t.draining) > s.Replicas {
		// What was started for the new version only is not brought back.
		for _, p := range t.old {
			if d.down(p) {
				d.retire(p, rest(p))
				return true
			}
		}
	}
	if len(t.old) > 0 {
		return d.update(t, running, may)
	}
	if extra := len(t.serving) + returning(t.draining) - s.Replicas; extra > 0 && len(t.serving) > 0 && !d.starting(t.serving) {
		p := d.firstToGo(t.serving)
		if len(t.vacate) > 0 {
			p = d.firstToGo(t.vacate)
		}
		if d.idle(p) || t.ready > s.Replicas {
			d.retire(p, rest(p))
			return true
		}
	}
	return false
}

// starting reports whether a copy that the operation started is not ready yet:
// it is not judged before that, so the original is not given up for a
// temporary copy.
func (d *decision) starting(serving []*Placement) bool {
	op := d.active()
	return slices.ContainsFunc(serving, func(p *Placement) bool { return p.For == op.ID && d.current(p) && !d.ready(p) && d.online(p.Node) })
}

// returning counts the draining placements that serve again afterwards.
func returning(draining []*Placement) int {
	n := 0
	for _, p := range draining {
		if p.After == placement.WantServing {
			n++
		}
	}
	return n
}

// addCopy starts a copy on the best node.
func (d *decision) addCopy() bool {
	nodes := d.candidates()
	if d.failsBack() {
		// Only where priority wants it.
		wanted := d.wanted()
		nodes = slices.DeleteFunc(nodes, func(n string) bool { return !slices.Contains(wanted, n) })
	}
	if len(nodes) == 0 {
		return false
	}
	p := d.place(nodes[0])
	p.Generation = d.doc.Current
	d.put(p, placement.WantServing)
	d.added = p.Node
	return true
}

// update brings one placement to the current version, or starts one more so
// that this can be done.
func (d *decision) update(t tally, running int, may func(*Placement) bool) bool {
	s := d.doc.Settings
	p := d.nextToUpdate(t.old)
	fresh := 0 // of the new version, and serving
	for _, q := range t.serving {
		if d.serves(q) && d.current(q) {
			fresh++
		}
	}
	if fresh >= s.Replicas && !p.Original && !s.PriorityMode {
		d.retire(p, rest(p)) // enough have the new version: this one is not needed
		return true
	}
	switch {
	case may(p):
		if !d.prefetched(p) {
			return false
		}
		if o := d.w.Observed[p.Node]; d.ready(p) && p.answers(o) && prefetchFault(o) {
			d.attemptFailed(p, Code(o.Fault.Code), fmt.Sprintf("node %s: %s", p.Node, o.Fault.Message)) // what serves is left alone
			return d.active() != nil
		}
		p.For = d.active().ID
		d.retire(p, placement.WantServing)
		if p.Want == placement.WantServing { // its node is away: nothing to drain
			p.Generation, p.Since, p.Revision = d.doc.Current, d.now, 0
		}
		return true
	case running < s.Replicas+s.MaxSurge && d.addCopy():
		d.doc.placementOn(d.added).Surge = true
		return true
	}
	return false
}

// idle reports whether a placement does not serve and is not being started.
func (d *decision) idle(p *Placement) bool {
	op := d.active()
	return d.down(p) && !(op != nil && p.For == op.ID && d.online(p.Node) && !p.Suspended)
}

// prefetched reports whether the node has the new image, so that the copy is
// down for no longer than its start takes. A failed pull ends the wait. A node
// that is not reporting hears of nothing, and its copy may serve well.
func (d *decision) prefetched(p *Placement) bool {
	o := d.w.Observed[p.Node]
	return !d.reachable(p.Node) || d.online(p.Node) && p.answers(o) && (o.PrefetchReady || o.Fault != nil && o.Fault.Final)
}

// nextToUpdate is the placement that is updated first: one that does not serve
// anyway, and the original last.
func (d *decision) nextToUpdate(old []*Placement) *Placement {
	return slices.MinFunc(old, func(a, b *Placement) int {
		return cmp.Or(boolFirst(d.down(a), d.down(b)), boolFirst(d.online(a.Node), d.online(b.Node)), boolFirst(!a.Original, !b.Original), compare(a.Node, b.Node))
	})
}

// firstToGo is the placement that is least needed: one that does not serve,
// then that of the lowest priority, then the youngest that is no original.
func (d *decision) firstToGo(from []*Placement) *Placement {
	return slices.MinFunc(from, func(a, b *Placement) int {
		if r := boolFirst(d.idle(a), d.idle(b)); r != 0 {
			return r
		}
		if ra, rb := d.rank(a.Node), d.rank(b.Node); d.doc.Settings.PriorityMode && ra != rb {
			return rb - ra
		}
		if r := cmp.Or(boolFirst(!a.Original, !b.Original), boolFirst(a.Surge, b.Surge)); r != 0 {
			return r
		}
		if r := b.Since.Compare(a.Since); r != 0 {
			return r
		}
		return compare(b.Node, a.Node)
	})
}
