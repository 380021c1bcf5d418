package policy

import (
	"fmt"
	"hash/fnv"
	"slices"
	"time"

	"github.com/opfield/availability/placement"
)

// Plan is the result of a decision.
type Plan struct {
	Document Document
	// Changed: the document differs from the one given. It is stored before
	// anything follows from it.
	Changed bool
	// Over: the policy is given up and nothing is left of it.
	Over bool
	// Next is when to decide again although nothing happened; zero: never.
	Next time.Time
	// Events are what happened, for the audit log (OBS-2).
	Events []Event
}

// decision is one call of Decide.
type decision struct {
	now    time.Time
	w      World
	doc    Document
	next   time.Time
	events []Event
	ended  int    // operations
	added  string // node of the copy that was started last
	// generated is the name of a copy that is not the original.
	generated string
}

// Decide returns what becomes of a document as the world is. The same input
// gives the same plan. It is called after every change of the world and when
// Plan.Next has come.
func Decide(now time.Time, doc Document, w World) Plan {
	d := &decision{now: now, w: w, doc: doc, generated: generatedPrefix + doc.Workload}
	d.doc.Placements = slices.Clone(doc.Placements)
	d.doc.Versions = slices.Clone(doc.Versions)
	d.doc.Operations = slices.Clone(doc.Operations)
	for i := range d.doc.Operations {
		op := &d.doc.Operations[i]
		op.Steps, op.Avoid, op.Left = slices.Clip(op.Steps), slices.Clip(op.Avoid), slices.Clone(op.Left)
	}
	d.repaired()
	d.adopted()
	d.check()
	d.drain()
	d.forget()
	// An operation that ends makes room for the next one at once.
	for range len(d.doc.Operations) + 2 {
		ended := d.ended
		d.turn()
		began := d.active() != nil
		d.work()
		if d.active() == nil {
			d.propose()
		}
		gaveUp := began && d.active() == nil && len(d.doc.Operations) > 1
		if len(d.doc.Operations) == 0 || d.ended == ended && !gaveUp {
			break
		}
	}
	d.standbys()
	d.prune()
	d.revise(&doc)
	return Plan{
		Document: d.doc, Changed: !same(&doc, &d.doc), Next: d.next, Events: d.events,
		Over: d.doc.Released && len(d.doc.Placements) == 0 && len(d.doc.Operations) == 0,
	}
}

// wake asks for a decision at a time to come; one that has passed was decided
// about just now.
func (d *decision) wake(at time.Time) {
	if at.After(d.now) && (d.next.IsZero() || at.Before(d.next)) {
		d.next = at
	}
}

// due reports whether the time has come, and asks for a decision if not.
func (d *decision) due(at time.Time) bool {
	if d.now.Before(at) {
		d.wake(at)
		return false
	}
	return true
}

// active is the operation that is worked on, or nil.
func (d *decision) active() *Operation {
	if len(d.doc.Operations) > 0 && d.doc.Operations[0].Status == Running {
		return &d.doc.Operations[0]
	}
	return nil
}

// step notes something done.
func (d *decision) step(node, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	e := Event{Kind: Stepped, Node: node, Text: text}
	if op := d.active(); op != nil {
		op.Steps = append(op.Steps, Step{At: d.now, Name: text})
		e.Operation = op.ID
	}
	d.events = append(d.events, e)
}

// put changes what is wanted of a placement.
func (d *decision) put(p *Placement, want placement.Want) {
	if p.Want == want {
		return
	}
	p.Want, p.Since, p.Closed, p.Revision, p.Asked = want, d.now, time.Time{}, 0, 0
	p.Bad, p.Good, p.Suspended, p.CheckedAt = 0, 0, false, time.Time{}
	if p.Surge = false; want != placement.WantDraining {
		p.After = ""
	}
	if want == placement.WantStopped || want == placement.WantAbsent || want == placement.WantReleased {
		p.Mirror = "" // it would not be done before the image is pushed
	}
	if op := d.active(); op != nil {
		p.For = op.ID
	}
	d.step(p.Node, "%s on %s, generation %d", verb(want), p.Node, p.Generation)
}

// answers reports whether a node's word is about the present record: one that
// was changed just now has no number, and no answer yet.
func (p *Placement) answers(o placement.Observed) bool {
	return p.Revision != 0 && o.Revision == p.Revision
}

// startAgain asks for a new start of the container.
func (p *Placement) startAgain() { p.Restarts, p.Revision = p.Restarts+1, 0 }

func verb(w placement.Want) string {
	switch w {
	case placement.WantServing:
		return "start"
	case placement.WantDraining:
		return "drain"
	case placement.WantStopped:
		return "stop"
	case placement.WantPrepared:
		return "prepare"
	case placement.WantAbsent:
		return "remove"
	default:
		return "release"
	}
}

// retire begins the way of a placement out of service: drained first if it
// runs, then what after says.
func (d *decision) retire(p *Placement, after placement.Want) {
	if p.Want != placement.WantServing {
		d.put(p, after)
		return
	}
	if !d.reachable(p.Node) {
		d.put(p, after)
		return
	}
	d.put(p, placement.WantDraining)
	p.After = after
	d.wake(d.now.Add(d.w.Timing.IngressSilence)) // nothing may happen until then
}

// rest is what becomes of a copy that is not needed: an original is stopped
// and kept (STP-2).
func rest(p *Placement) placement.Want {
	if p.Original {
		return placement.WantPrepared
	}
	return placement.WantAbsent
}

func (d *decision) online(node string) bool { return d.w.Nodes[node].State == NodeOnline }

// away reports whether the node is offline, or was removed: what is to be done
// there is done when it returns. One that is not reporting, as all are to a
// controller that has just started, is waited for.
func (d *decision) away(node string) bool {
	n, known := d.w.Nodes[node]
	return !known || n.State == NodeOffline
}

// reachable reports whether what the node said last still counts: a node that
// is not reporting is believed, one that is offline is not.
func (d *decision) reachable(node string) bool {
	s := d.w.Nodes[node].State
	return s == NodeOnline || s == NodeNotReporting
}

// lost reports whether the node was away for longer than the grace.
func (d *decision) lost(node string) bool {
	n, known := d.w.Nodes[node]
	if !known {
		return true // removed by an operator
	}
	return n.State == NodeOffline && d.due(d.lostAt(n))
}

// ready reports whether the placement serves as wanted.
func (d *decision) ready(p *Placement) bool {
	o, ok := d.w.Observed[p.Node]
	return ok && p.Want == placement.WantServing && p.Asked != 0 && o.Revision >= p.Asked && !p.Suspended && d.reachable(p.Node) && o.Ready && o.Role == placement.RoleServing &&
		o.Generation == p.Generation && o.Restarts >= p.Restarts
}

// down reports whether the placement is known not to serve. What is not known,
// because its node has not told anything yet or is not heard, may serve well:
// nothing is taken away on that ground.
func (d *decision) down(p *Placement) bool {
	if p.Want != placement.WantServing {
		return true
	}
	n, known := d.w.Nodes[p.Node]
	if !known || n.State == NodeOffline {
		return true
	}
	_, told := d.w.Observed[p.Node]
	return (told && n.State == NodeOnline || p.Suspended) && !d.ready(p)
}

// serves is ready, and every ingress node leads to it.
func (d *decision) serves(p *Placement) bool {
	open, known := d.w.LinksOpen[p.Node]
	return d.ready(p) && (open || !known)
}

// current reports whether the placement has the content that shall run.
func (d *decision) current(p *Placement) bool {
	have, want := d.doc.version(p.Generation), d.doc.version(d.doc.Current)
	return have != nil && want != nil && have.Content == want.Content
}

// adopted notes that the original is ours as it runs: from now on only
// placements count in routing (ENA-6).
func (d *decision) adopted() {
	if d.doc.Routed {
		return
	}
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		if o := d.w.Observed[p.Node]; p.Original && p.answers(o) && o.Generation == p.Generation && o.Role == placement.RoleServing && o.Ready {
			d.doc.Routed = true
			d.step(p.Node, "routes count the placements of the policy only")
		}
	}
}

// check is the replica check (RDY-2): two bad ones in a row take a placement
// out of routing, then two good ones bring it back.
func (d *decision) check() {
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		if p.Want != placement.WantServing || !d.online(p.Node) {
			continue
		}
		if op := d.active(); op != nil && p.For == op.ID && !p.Suspended {
			continue // it is being started: that has its own limits
		}
		o, ok := d.w.Observed[p.Node]
		if !ok || !p.answers(o) || o.Fault != nil && o.Fault.Code == placement.CodeDaemonBusy {
			continue // not asked, or no answer: that changes nothing
		}
		bad := o.Looping || o.State != placement.StateRunning || !o.Ready
		if !bad && p.Bad == 0 && !p.Suspended {
			continue
		}
		if !p.CheckedAt.IsZero() && !d.due(p.CheckedAt.Add(d.w.Timing.CheckEvery)) {
			continue
		}
		p.CheckedAt = d.now
		if bad {
			p.Bad, p.Good = min(p.Bad+1, 2), 0
		} else {
			p.Bad, p.Good = 0, p.Good+1
		}
		switch {
		case p.Bad >= 2 && !p.Suspended:
			p.Suspended = true
			d.step(p.Node, "out of routing on %s: two bad checks, %s", p.Node, reasonOf(o))
		case p.Suspended && p.Good >= 2:
			p.Suspended, p.Good, p.CheckedAt = false, 0, time.Time{}
			d.step(p.Node, "back in routing on %s after two good checks", p.Node)
			continue
		case !bad && !p.Suspended:
			p.CheckedAt, p.Good = time.Time{}, 0
			continue
		}
		d.wake(d.now.Add(d.w.Timing.CheckEvery))
	}
}

func reasonOf(o placement.Observed) string {
	switch {
	case o.Fault != nil:
		return o.Fault.Message
	case o.Looping:
		return "it ends again and again"
	case o.Reason != "":
		return o.Reason
	}
	return "it is " + string(o.State)
}

// drain lets the streams of placements end that leave service (ROL-1).
func (d *decision) drain() {
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		if p.Want != placement.WantDraining {
			continue
		}
		if !d.reachable(p.Node) {
			d.drained(p)
			continue
		}
		if p.Closed.IsZero() {
			silent := p.Since.Add(d.w.Timing.IngressSilence)
			if !d.w.LinksClosed[p.Node] && !d.due(silent) {
				continue
			}
			p.Closed = d.now
		}
		o := d.w.Observed[p.Node]
		idle := p.answers(o) && o.Role == placement.RoleDraining && o.Streams == 0
		ended := p.answers(o) && (o.State == placement.StateStopped || o.State == placement.StateRemoved)
		if idle || ended || d.due(p.Closed.Add(time.Duration(d.doc.Settings.DrainSeconds)*time.Second)) {
			d.drained(p)
		}
	}
}

// drained gives a drained placement what comes after.
func (d *decision) drained(p *Placement) {
	after := p.After
	if after == "" {
		after = rest(p)
	}
	if after == placement.WantServing {
		if op := d.active(); d.current(p) || op != nil && op.Type == Restart {
			p.startAgain()
		} else {
			p.Generation = d.doc.Current
		}
	}
	d.put(p, after)
}

// forget drops placements of which nothing is left, and those of nodes that
// an operator removed.
func (d *decision) forget() {
	survivor, left := d.doc.survivor(), 0
	for _, p := range d.doc.Placements {
		if p.Node != survivor {
			left++
		}
	}
	for i := range d.doc.Placements { // an original of a node that was away
		p := &d.doc.Placements[i]
		o := d.w.Observed[p.Node]
		if d.doc.Released && p.Original && p.Node != survivor && p.Want == placement.WantPrepared && p.answers(o) && o.Done && d.online(p.Node) {
			d.put(p, placement.WantReleased)
		}
	}
	before := len(d.doc.Placements)
	d.doc.Placements = slices.DeleteFunc(d.doc.Placements, func(p Placement) bool {
		o := d.w.Observed[p.Node]
		gone := p.Want == placement.WantAbsent
		if p.Want == placement.WantReleased && d.doc.Released { // the survivor at the very end: it counts in routing
			gone = p.Node != survivor || left == 0 && len(d.doc.Operations) == 0
		}
		done := gone && p.answers(o) && o.Done && d.reachable(p.Node)
		_, known := d.w.Nodes[p.Node]
		if done || !known && p.Want != placement.WantServing {
			d.step(p.Node, "nothing is left to do on %s", p.Node)
			return true
		}
		return false
	})
	if d.doc.Released && len(d.doc.Placements) < before {
		d.forget() // only the survivor may be left
	}
}

// jitter spreads what begins by itself at the same moment (OPS-4).
func (d *decision) jitter() time.Duration {
	h := fnv.New32a()
	fmt.Fprintf(h, "%s %d", d.doc.Workload, d.doc.Counter)
	return time.Duration(h.Sum32()%1000) * d.w.Timing.Jitter / 1000
}

// number returns the next number of the document.
func (d *Document) number() uint64 {
	d.Counter++
	return d.Counter
}

// revise numbers every placement whose record says something else than
// before.
func (d *decision) revise(before *Document) {
	// All that a record depends on besides its placement.
	alike := before.Current == d.doc.Current && before.survivor() == d.doc.survivor() && sameVersions(before.Versions, d.doc.Versions)
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		was := before.placementOn(p.Node)
		if p.Revision != 0 && alike && was != nil && *was == *p {
			continue
		}
		if p.Revision == 0 || was == nil || !sameDesired(before.desired(was), d.doc.desired(p)) {
			p.Revision = d.doc.number()
		}
		if p.Asked == 0 {
			p.Asked = p.Revision
		}
	}
}

func sameVersions(a, b []Version) bool {
	return slices.EqualFunc(a, b, func(x, y Version) bool { return x.Generation == y.Generation && x.Image.Digest == y.Image.Digest })
}

func sameDesired(a, b placement.Desired) bool {
	return a.Want == b.Want && a.Generation == b.Generation && a.Original == b.Original && a.Adopt == b.Adopt && a.AdoptedAt == b.AdoptedAt &&
		a.Container == b.Container && a.Image.Digest == b.Image.Digest && a.Restarts == b.Restarts && a.DrainSeconds == b.DrainSeconds &&
		a.Retired == b.Retired && a.RestartPolicy == b.RestartPolicy && a.Mirror.Equal(b.Mirror) && sameImage(a.Prefetch, b.Prefetch) && slices.Equal(a.Ports, b.Ports)
}

func sameImage(a, b *placement.Image) bool {
	return a == nil && b == nil || a != nil && b != nil && a.Digest == b.Digest
}

// prune forgets versions that nothing runs, shall run or can return to.
func (d *decision) prune() {
	keep := map[uint64]bool{d.doc.Current: true}
	for _, p := range d.doc.Placements {
		keep[p.Generation] = true
	}
	for _, op := range d.doc.Operations {
		keep[op.From], keep[op.Target] = true, true
	}
	// The version before stays: it is what one would return to by hand.
	if v := d.doc.version(d.doc.Current); v != nil {
		for i := len(d.doc.Versions) - 1; i >= 0; i-- {
			if old := d.doc.Versions[i]; old.Generation < v.Generation && old.Content != v.Content {
				keep[old.Generation] = true
				break
			}
		}
	}
	d.doc.Versions = slices.DeleteFunc(d.doc.Versions, func(v Version) bool { return !keep[v.Generation] })
}

// same reports whether two documents say the same; one came from the other.
func same(a, b *Document) bool {
	if a.Counter != b.Counter || a.Current != b.Current || a.Stopped != b.Stopped || a.Routed != b.Routed || a.Disabling != b.Disabling ||
		a.Released != b.Released || !a.FailbackAfter.Equal(b.FailbackAfter) || (a.Problem == nil) != (b.Problem == nil) || len(a.Versions) != len(b.Versions) ||
		!slices.Equal(a.Placements, b.Placements) || !slices.EqualFunc(a.Operations, b.Operations, sameOperation) {
		return false
	}
	for i := range a.Versions {
		if a.Versions[i].Image.Digest != b.Versions[i].Image.Digest {
			return false
		}
	}
	return len(a.History) == len(b.History) && (len(a.History) == 0 || a.History[0].ID == b.History[0].ID && a.History[0].FinishedAt.Equal(b.History[0].FinishedAt))
}

func sameOperation(a, b Operation) bool {
	return a.ID == b.ID && a.Status == b.Status && a.Phase == b.Phase && a.Note == b.Note && a.Progress == b.Progress && a.Attempts == b.Attempts &&
		a.Code == b.Code && a.Message == b.Message && a.Next.Equal(b.Next) && a.Worked == b.Worked && a.Seen.Equal(b.Seen) && a.RolledBack == b.RolledBack &&
		a.Target == b.Target && a.From == b.From && a.Survivor == b.Survivor && len(a.Steps) == len(b.Steps) && slices.Equal(a.Avoid, b.Avoid) && slices.Equal(a.Left, b.Left)
}
