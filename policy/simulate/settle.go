package simulate

import (
	"time"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

// settle ends every fault, lets the cluster rest and looks at what is left.
func (s *run) settle() {
	s.quiet = true
	s.log("all faults end")
	s.registry, s.ingress, s.controllerLinked, s.alive = true, true, true, true
	for _, n := range s.nodes {
		n.cut, n.natsCut, n.hang, n.drained, n.late, n.confirmed, n.noPull = false, false, false, false, false, false, nil
		if !n.up {
			n.up, n.healthy = true, s.now
		}
		for _, r := range n.replicas() {
			r.sick, r.hang = false, false
			r.work()
		}
		s.resync(n)
	}
	s.lastFault = s.now
	s.everybody(time.Second)
	end := s.now.Add(3 * time.Hour)
	for s.result.Broken == nil && s.next(end) {
	}
	for _, w := range s.policies {
		if w.exists && s.result.Broken == nil {
			s.inspectEnd(w)
		}
	}
}

func (s *run) inspectEnd(w *workload) {
	doc := &w.doc
	for _, op := range doc.Operations {
		if op.Status == policy.Running && s.now.Sub(w.changed) > 30*time.Minute {
			s.fail(ends, "%s has been %s for %v: %s", op.ID, op.Phase, s.now.Sub(w.changed), op.Note)
			return
		}
		if op.Status == policy.Waiting {
			if s.explained(w, op) {
				return
			}
			s.fail(ends, "%s still waits: %s %s %s", op.ID, op.Code, op.Message, op.Note)
			return
		}
	}
	good := 0
	for _, n := range s.nodes {
		r := n.copies[w.name]
		if r == nil {
			continue
		}
		if r.original && !r.exists && r.known && r.desired.Want == placement.WantServing {
			s.fail(originalKept, "%s: the original on %s is gone", w.name, n.id)
		}
		p := placementOn(doc, n.id)
		if r.running && r.known && !r.released && (p == nil || p.Want != placement.WantServing) {
			s.fail(recovers, "%s runs on %s although it shall not", w.name, n.id)
		}
		if p != nil && p.Want == placement.WantServing && r.serves() {
			good++
		}
	}
	if doc.Stopped || doc.Released {
		return
	}
	if doc.Disabling {
		s.fail(ends, "%s is still being disabled", w.name)
		return
	}
	if good != doc.Settings.Replicas && !s.hopeless(w) {
		s.fail(recovers, "%s: %d of %d copies serve after three quiet hours", w.name, good, doc.Settings.Replicas)
	}
}

// explained reports whether an operation that waits for ever has a good
// reason: the version is broken, or the settings leave no way.
func (s *run) explained(w *workload, op policy.Operation) bool {
	doc := &w.doc
	return s.hopeless(w) || op.Code == policy.CodeRolloutCapacity && doc.Settings.MaxUnavailable == 0
}

// hopeless reports whether the policy cannot become healthy: its version is
// broken, or there are fewer nodes with room than wanted copies.
func (s *run) hopeless(w *workload) bool {
	doc := &w.doc
	return w.bad[contentOf(versionOf(doc, doc.Current))] || s.few(w)
}

func (s *run) few(w *workload) bool {
	doc := &w.doc
	n := 0
	for _, node := range s.nodes {
		allowed := doc.Settings.Selection == policy.AllNodes
		for _, id := range doc.Settings.Nodes {
			allowed = allowed || id == node.id
		}
		p := placementOn(doc, node.id)
		has := p != nil && p.Want == placement.WantServing
		if allowed && (has || node.memory-s.planned(node, w) >= need) {
			n++
		}
	}
	return n < doc.Settings.Replicas
}

func placementOn(doc *policy.Document, node string) *policy.Placement {
	for i := range doc.Placements {
		if doc.Placements[i].Node == node {
			return &doc.Placements[i]
		}
	}
	return nil
}
