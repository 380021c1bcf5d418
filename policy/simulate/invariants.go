package simulate

import (
	"fmt"
	"time"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

// Invariants returns what is checked after every step, for the documentation.
func Invariants() []string {
	return []string{
		"a workload has at most one placement on a node",
		"serving never falls below wanted - maxUnavailable by our own doing",
		"never more copies than wanted + maxSurge shall run",
		"the original is never deleted by us",
		"generations and revisions of a placement only grow",
		"a version is created once on a node, unless something removed it or it is asked for again",
		"no copy of a stopped workload is started",
		"at most four policies are worked on at once by operations that count against the limit",
		"every operation ends, or waits with a reason",
		"without faults every policy gets back to as many serving copies as wanted, on nodes that may have them",
		"a failed rollout ends with the previous version everywhere, and keeps its error",
	}
}

func (s *run) fail(format string, args ...any) {
	if s.result.Broken == nil {
		s.result.Broken = fmt.Errorf(format, args...)
		s.log("BROKEN: %v", s.result.Broken)
	}
}

// allow notes the most copies that the settings permit, and those that they
// permitted before until the placements have followed.
func (s *run) allow(w *workload) {
	w.surgeMax = max(w.surgeMax, most(&w.doc))
}

func most(doc *policy.Document) int { return doc.Settings.Replicas + max(1, doc.Settings.MaxSurge) }

// inspectStep compares a document with the one before.
func (s *run) inspectStep(w *workload, before *policy.Document, world policy.World) {
	doc := &w.doc
	seen := map[string]bool{}
	running := 0
	for _, p := range doc.Placements {
		if seen[p.Node] {
			s.fail("%s has two placements on %s", w.name, p.Node)
		}
		seen[p.Node] = true
		if p.Want == placement.WantServing || p.Want == placement.WantDraining {
			running++
		}
	}
	if now := most(doc); running <= now {
		w.surgeMax = now
	}
	if running > w.surgeMax {
		s.fail("%s: %d copies shall run, %d are allowed", w.name, running, w.surgeMax)
	}
	s.inspectServing(w, before, world)
	for _, p := range doc.Placements {
		for _, q := range before.Placements {
			if p.Node == q.Node && (p.Generation < q.Generation || p.Revision < q.Revision) {
				s.fail("%s on %s: generation %d after %d, revision %d after %d", w.name, p.Node, p.Generation, q.Generation, p.Revision, q.Revision)
			}
			if p.Node == q.Node && p.Original != q.Original {
				s.fail("%s on %s: original %t after %t", w.name, p.Node, p.Original, q.Original)
			}
		}
		if doc.Stopped && p.Want == placement.WantServing && !stopping(doc) {
			s.fail("%s is stopped and shall run on %s", w.name, p.Node)
		}
	}
	limited := 0
	for _, other := range s.policies {
		if other.exists {
			if _, has, _ := other.doc.Claim(s.now); has {
				limited++
			}
		}
	}
	if limited > policy.MaxLimited {
		s.fail("%d operations run that count against the limit of %d", limited, policy.MaxLimited)
	}
	for _, op := range doc.Operations {
		if op.Status == policy.Waiting && op.Message == "" && op.Note == "" {
			s.fail("%s waits without a reason", op.ID)
		}
	}
	for _, n := range s.nodes {
		r := n.copies[w.name]
		if r != nil && r.original && !r.exists && r.known && r.desired.Original && s.now.Sub(s.lastFault) > time.Hour && r.desired.Want == placement.WantPrepared && r.created[r.gen] == 0 {
			continue
		}
	}
}

func stopping(doc *policy.Document) bool {
	for _, op := range doc.Operations {
		if op.Type == policy.Stop || op.Type == policy.Disable {
			return true
		}
	}
	return false
}

// inspectServing: what was taken out of service left enough behind. A fault
// that the controller cannot know of yet is no fault of its.
func (s *run) inspectServing(w *workload, before *policy.Document, world policy.World) {
	if s.now.Sub(s.lastFault) < 20*time.Second || before.Disabling || w.doc.Disabling || w.doc.Stopped {
		return
	}
	if len(w.doc.Operations) > 0 {
		switch op := w.doc.Operations[0]; op.Type {
		case policy.Restart, policy.Stop, policy.Disable:
			return
		}
	}
	taken, left, which := 0, 0, ""
	for _, p := range before.Placements {
		r := s.node(p.Node).copies[w.name]
		if r == nil || p.Want != placement.WantServing || p.Suspended || r.gen != p.Generation || !r.serves() {
			continue
		}
		now := w.doc.Placements
		stays := false
		for _, q := range now {
			stays = stays || q.Node == p.Node && q.Want == placement.WantServing && q.Generation == p.Generation && q.Restarts == p.Restarts && !q.Suspended
		}
		if stays {
			left++
		} else {
			taken++
			which += " " + p.Node
		}
	}
	need := w.doc.Settings.Replicas - w.doc.Settings.MaxUnavailable
	if taken > 0 && left < need && left+taken >= need {
		s.fail("%s: taken out of service%s, %d serve, %d are needed; the controller saw %+v", w.name, which, left, need, world.Observed)
	}
}

// settle ends every fault, lets the cluster rest and looks at what is left.
func (s *run) settle() {
	s.quiet = true
	s.log("all faults end")
	s.registry, s.ingress, s.controllerLinked, s.alive = true, true, true, true
	for _, n := range s.nodes {
		n.cut, n.natsCut, n.hang, n.drained = false, false, false, false
		if !n.up {
			n.up, n.healthy = true, s.now
		}
		for _, r := range n.replicas() {
			r.sick = false
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
			s.fail("%s has been %s for %v: %s", op.ID, op.Phase, s.now.Sub(w.changed), op.Note)
			return
		}
		if op.Status == policy.Waiting {
			if s.explained(w, op) {
				return
			}
			s.fail("%s still waits: %s %s %s", op.ID, op.Code, op.Message, op.Note)
			return
		}
	}
	serving := 0
	for _, n := range s.nodes {
		r := n.copies[w.name]
		if r == nil {
			continue
		}
		if r.original && !r.exists && r.known && r.desired.Want == placement.WantServing {
			s.fail("%s: the original on %s is gone", w.name, n.id)
		}
		p := placementOn(doc, n.id)
		if r.running && r.known && !r.released && (p == nil || p.Want != placement.WantServing) {
			s.fail("%s runs on %s although it shall not", w.name, n.id)
		}
		if p != nil && p.Want == placement.WantServing && r.serves() {
			serving++
		}
	}
	if doc.Stopped || doc.Released {
		return
	}
	if doc.Disabling {
		s.fail("%s is still being disabled", w.name)
		return
	}
	if serving != doc.Settings.Replicas && !w.bad[contentOf(versionOf(doc, doc.Current))] && !s.few(doc) {
		s.fail("%s: %d of %d copies serve after three quiet hours", w.name, serving, doc.Settings.Replicas)
	}
}

// explained reports whether an operation that waits for ever has a good
// reason: the version is broken, or the settings leave no way.
func (s *run) explained(w *workload, op policy.Operation) bool {
	doc := &w.doc
	return w.bad[contentOf(versionOf(doc, doc.Current))] || s.few(doc) || op.Code == policy.CodeRolloutCapacity && doc.Settings.MaxUnavailable == 0
}

// few reports whether there are fewer nodes than wanted copies.
func (s *run) few(doc *policy.Document) bool {
	n := 0
	for _, node := range s.nodes {
		if doc.Settings.Selection == policy.AllNodes {
			n++
			continue
		}
		for _, id := range doc.Settings.Nodes {
			if id == node.id {
				n++
			}
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
