package policy

import (
	"fmt"
	"slices"
	"time"

	"github.com/opfield/availability/placement"
)

// failures looks for a copy that the operation started and that will not
// serve. It reports whether the operation does not go on now.
func (d *decision) failures() bool {
	op := d.active()
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		if p.Want != placement.WantServing || p.For != op.ID || d.ready(p) || !d.online(p.Node) || !d.current(p) {
			continue
		}
		if code, message := d.failed(p); code != "" {
			d.attemptFailed(p, code, message)
			return true
		}
		if o := d.w.Observed[p.Node]; p.answers(o) && o.Fault != nil && d.due(d.startLimit(p)) {
			d.pause(p, Code(o.Fault.Code), fmt.Sprintf("node %s: %s", p.Node, o.Fault.Message))
			return true
		}
	}
	return false
}

// failed says why a started copy will not serve, or "".
func (d *decision) failed(p *Placement) (Code, string) {
	o := d.w.Observed[p.Node]
	fresh := p.answers(o)
	switch {
	case fresh && o.Fault != nil && o.Fault.Final && !prefetchFault(o):
		return Code(o.Fault.Code), fmt.Sprintf("node %s: %s", p.Node, o.Fault.Message)
	case fresh && o.Looping && o.Restarts >= p.Restarts && o.Generation == p.Generation:
		return placement.CodeCrashLoop, fmt.Sprintf("node %s: the container ends again and again: %s", p.Node, reasonOf(o))
	case fresh && o.Fault != nil && transient(o.Fault.Code):
		return "", "" // tried again by the node, and nobody's fault (IMG-3, STP-3)
	case !d.ready(p) && d.due(d.startLimit(p)): // one that is ready is no failure, whoever does not lead to it yet
		return placement.CodeNotReady, fmt.Sprintf("node %s: it was not ready within %v: %s", p.Node, d.w.Timing.StartWithin, reasonOf(o))
	}
	return "", ""
}

// unled lets the operation give up its turn when a copy is ready and an ingress
// node does not lead to it: that is not mended by another start.
func (d *decision) unled(p *Placement) {
	if d.ready(p) && d.due(d.startLimit(p)) {
		d.hold(placement.CodeNotReady, "an ingress node does not lead to %s", p.Node)
	}
}

// pause lets the operation give up its turn because of something that is
// nobody's fault and passes: it counts as no failed attempt (IMG-3, STP-3).
func (d *decision) pause(p *Placement, code Code, message string) {
	d.hold(code, "%s", message)
	op := &d.doc.Operations[0]
	op.Next = d.now.Add(d.w.Timing.RetryFirst)
	p.Since = op.Next
	d.wake(op.Next)
}

// startLimit is when a started copy must be ready. The time in which this
// controller did not see the node does not count.
func (d *decision) startLimit(p *Placement) time.Time { return d.limit(p, d.w.Timing.StartWithin) }

// nodeLimit is when a node must have said that it carried out a stop or a
// removal; then the turn is for others.
func (d *decision) nodeLimit(p *Placement) time.Time { return d.limit(p, d.w.Timing.NodeWithin) }

// limit counts from when the placement changed or its node was seen, whichever
// is later.
func (d *decision) limit(p *Placement, within time.Duration) time.Time {
	from := p.Since
	if seen := d.w.Nodes[p.Node].Healthy; seen.After(from) {
		from = seen
	}
	return from.Add(within)
}

// prefetchFault reports whether what is wrong is the image that is pulled
// beside the one that runs: no fault of the copy.
func prefetchFault(o placement.Observed) bool {
	return o.Fault != nil && o.Fault.Final && o.ImageReady && !o.PrefetchReady && (o.Fault.Code == placement.CodeImagePull || o.Fault.Code == placement.CodeImagePlatform)
}

func transient(code string) bool {
	return code == placement.CodeDaemonBusy || code == placement.CodeRegistryAway
}

// attemptFailed ends an attempt of the operation because of one copy.
func (d *decision) attemptFailed(p *Placement, code Code, message string) {
	op := d.active()
	switch {
	case op.Type == Rollout && !op.RolledBack && op.Attempts+1 >= RolloutAttempts:
		op.Attempts++
		d.rollBack(code, message)
		return
	case op.Type == Failback:
		d.put(p, rest(p))
		d.doc.FailbackAfter = d.now.Add(d.w.Timing.FailbackRetry)
		d.finish(Failed, code, message)
		return
	case op.RolledBack: // the original error stays
		kept, why := op.Code, op.Message
		d.again(code, "%s", message)
		op.Code, op.Message, op.Note = kept, why, "the way back: "+message
	default:
		d.again(code, "%s", message)
	}
	if p.Mirror != "" || !d.current(p) {
		p.Revision = 0 // the node tries the image again; its container is left alone
		return
	}
	if op.Type != Rollout && !slices.Contains(op.Avoid, p.Node) {
		op.Avoid = append(slices.Clone(op.Avoid), p.Node)
		if len(d.candidatesBut(op.Avoid)) > 0 {
			d.put(p, rest(p))
			return
		}
		op.Avoid = nil
	}
	p.startAgain()
	p.Since = op.Next
	d.step(p.Node, "start again on %s", p.Node)
}

// candidatesBut returns the candidates that are not in a list.
func (d *decision) candidatesBut(avoid []string) []string {
	return slices.DeleteFunc(d.candidates(), func(n string) bool { return slices.Contains(avoid, n) })
}

// rollBack turns a rollout round: what was updated gets its previous version
// back under a new generation, because an older one never overrides a newer.
// There is no way back from the way back (ROL-2).
func (d *decision) rollBack(code Code, message string) {
	op := d.active()
	op.RolledBack, op.Code, op.Message = true, code, message
	before := d.doc.version(op.From)
	back := *before
	back.Generation, back.CreatedAt = d.doc.number(), d.now
	d.doc.Versions = append(d.doc.Versions, back)
	d.doc.Current = back.Generation
	for i := range d.doc.Placements {
		d.doc.Placements[i].Mirror = ""
	}
	d.step("", "back to the version before: %s", message)
}
