package simulate

import (
	"fmt"
	"time"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

// invariant is something that holds after every step.
type invariant int

const (
	onePerNode invariant = iota
	serving
	surge
	originalKept
	onlyGrows
	createdOnce
	stopped
	limited
	ends
	reason
	recovers
	rolledBack
	keepsError
	members
	decided
	atRest
	lastInvariant
)

func (i invariant) String() string {
	return [lastInvariant]string{
		onePerNode:   "a workload has at most one placement on a node",
		serving:      "serving never falls below wanted - maxUnavailable by our own doing",
		surge:        "never are more copies started than wanted + maxSurge; a drain does not hold up a replacement",
		originalKept: "the original is never deleted by us",
		onlyGrows:    "generations and revisions of a placement only grow",
		createdOnce:  "a version is created once on a node, unless it was removed there since",
		stopped:      "no copy of a stopped workload is started",
		limited:      "at most four policies are worked on at once by operations that count against the limit",
		ends:         "every operation ends, or waits for something that the settings or the version do not give",
		reason:       "an operation that waits says why",
		recovers:     "without faults every policy gets back to as many serving copies as wanted, on nodes that may have them, and to no others",
		rolledBack:   "a rollout that failed ends with the previous version everywhere",
		keepsError:   "the error of a rollout that failed is kept until a rollout succeeds",
		members:      "routing counts no placement that does not serve by the document or is suspended",
		decided:      "a decision that is made again about the same world changes nothing, and nothing is decided without an end",
		atRest:       "at rest the document is not written",
	}[i]
}

// Invariants returns what is checked after every step, for the documentation.
func Invariants() []string {
	var out []string
	for i := range lastInvariant {
		out = append(out, i.String())
	}
	return out
}

// broken is an invariant that did not hold.
type broken struct {
	invariant invariant
	detail    string
}

func (b *broken) Error() string { return fmt.Sprintf("%s: %s", b.invariant, b.detail) }

func (s *run) fail(i invariant, format string, args ...any) {
	if s.result.Broken == nil {
		s.result.Broken = &broken{i, fmt.Sprintf(format, args...)}
		s.log("BROKEN: %v", s.result.Broken)
	}
}

func counts(p *policy.Placement) bool {
	return p.Want == placement.WantServing || p.Want == placement.WantDraining
}

// inspectStep compares a document with the one before.
func (s *run) inspectStep(w *workload, before *policy.Document, world policy.World) {
	s.remember(w)
	doc := &w.doc
	for i := range doc.Placements {
		p := &doc.Placements[i]
		if placementOn(doc, p.Node) != p {
			s.fail(onePerNode, "%s has two placements on %s", w.name, p.Node)
		}
		if q := placementOn(before, p.Node); q != nil {
			if p.Generation < q.Generation || p.Revision < q.Revision {
				s.fail(onlyGrows, "%s on %s: generation %d after %d, revision %d after %d", w.name, p.Node, p.Generation, q.Generation, p.Revision, q.Revision)
			}
			if p.Original != q.Original {
				s.fail(originalKept, "%s on %s: original %t after %t", w.name, p.Node, p.Original, q.Original)
			}
		}
		if doc.Stopped && p.Want == placement.WantServing && !stopping(doc) {
			s.fail(stopped, "%s is stopped and shall run on %s", w.name, p.Node)
		}
	}
	s.inspectSurge(w, before, world)
	s.inspectServing(w, before, world)
	s.inspectMembers(w)
	s.inspectRollouts(w, before)
	running := 0
	for _, other := range s.policies {
		if other.exists && other.limited {
			running++
		}
	}
	if running > policy.MaxLimited {
		s.fail(limited, "%d operations run that count against the limit of %d", running, policy.MaxLimited)
	}
	for i := range doc.Operations {
		if op := &doc.Operations[i]; op.Status == policy.Waiting && op.Message == "" && op.Note == "" {
			s.fail(reason, "%s waits without a reason", op.ID)
		}
	}
	if s.quiet && s.now.Sub(s.lastFault) > 2*time.Hour && !s.restless() {
		s.fail(atRest, "%s is written after two quiet hours: %d operations", w.name, len(doc.Operations))
	}
}

// restless reports whether a policy keeps trying what cannot succeed: its copies
// come and go, and with them the room that the others wait for.
func (s *run) restless() bool {
	for _, w := range s.policies {
		if w.exists && s.hopeless(w) {
			return true
		}
	}
	return false
}

func stopping(doc *policy.Document) bool {
	for i := range doc.Operations {
		if t := doc.Operations[i].Type; t == policy.Stop || t == policy.Disable {
			return true
		}
	}
	return false
}

// required is how many placements a planned change leaves serving.
func required(doc *policy.Document) int {
	if len(doc.Operations) > 0 && doc.Operations[0].Type == policy.Failback {
		if s := doc.Settings; s.Mode == policy.Failover || s.MaxSurge > 0 {
			return s.Replicas // PRI-2
		}
	}
	return doc.Settings.Replicas - doc.Settings.MaxUnavailable
}

// inspectSurge: no copy is started above what the settings allow.
func (s *run) inspectSurge(w *workload, before *policy.Document, world policy.World) {
	if before.Disabling || w.doc.Disabling {
		return
	}
	now, then, ready, drains := 0, 0, 0, false
	for i := range w.doc.Placements {
		p := &w.doc.Placements[i]
		if counts(p) {
			now++
		}
		drains = drains || p.Want == placement.WantDraining
	}
	for i := range before.Placements {
		p := &before.Placements[i]
		if counts(p) {
			then++
		}
		if o := world.Observed[p.Node]; p.Want == placement.WantServing && !p.Suspended && o.Ready && o.Generation == p.Generation && o.Restarts >= p.Restarts && world.Nodes[p.Node].State != policy.NodeOffline {
			ready++
		}
	}
	most := w.doc.Settings.Replicas + w.doc.Settings.MaxSurge
	if drains && ready < required(&w.doc) {
		most = max(most, w.doc.Settings.Replicas+1)
	}
	if now > then && now > most {
		s.fail(surge, "%s: %d copies shall run after %d, %d are allowed", w.name, now, then, most)
	}
}

// inspectServing: what was taken out of service left enough behind. A fault
// that the controller cannot know of yet is no fault of its.
func (s *run) inspectServing(w *workload, before *policy.Document, world policy.World) {
	if s.now.Sub(s.lastFault) < 20*time.Second || before.Disabling || w.doc.Disabling || w.doc.Stopped {
		return
	}
	if len(w.doc.Operations) > 0 {
		switch op := &w.doc.Operations[0]; op.Type {
		case policy.Restart, policy.Stop, policy.Disable:
			return
		}
	}
	taken, left, which := 0, 0, ""
	for i := range before.Placements {
		p := &before.Placements[i]
		r := s.node(p.Node).copies[w.name]
		if r == nil || p.Want != placement.WantServing || p.Suspended || r.gen != p.Generation || r.restarts < p.Restarts || !r.serves() || world.Nodes[p.Node].State == policy.NodeOffline {
			continue
		}
		q := placementOn(&w.doc, p.Node)
		if q != nil && q.Want == placement.WantServing && q.Generation == p.Generation && q.Restarts == p.Restarts && !q.Suspended {
			left++
		} else {
			taken++
			which += " " + p.Node
		}
	}
	need := required(&w.doc)
	if taken > 0 && left < need && left+taken >= need {
		s.fail(serving, "%s: taken out of service%s, %d serve, %d are needed", w.name, which, left, need)
	}
}

// inspectMembers: a copy that was given up, such as that of a node which comes
// back, gets no traffic.
func (s *run) inspectMembers(w *workload) {
	all, routed := w.doc.Members()
	if s.cfg.spoilMembers != nil {
		s.cfg.spoilMembers(&all)
	}
	for _, m := range all.Placements {
		p := placementOn(&w.doc, m.Node)
		switch {
		case !routed || m.Closed:
		case p == nil || p.Suspended || p.Want != placement.WantServing && p.Want != placement.WantReleased:
			s.fail(members, "%s: %s is a member", w.name, m.Node)
		case m.Generation < p.Generation:
			s.fail(members, "%s: generation %d counts on %s, which shall have %d", w.name, m.Generation, m.Node, p.Generation)
		}
	}
}

// newlyEnded returns the operations that ended between two documents.
func newlyEnded(before, after *policy.Document) []policy.Operation {
	for i := range after.History {
		if len(before.History) > 0 && after.History[i].ID == before.History[0].ID {
			return after.History[:i]
		}
	}
	return after.History
}

// inspectRollouts looks at what a failed rollout left behind.
func (s *run) inspectRollouts(w *workload, before *policy.Document) {
	doc := &w.doc
	succeeded, failed := false, false
	for _, op := range newlyEnded(before, doc) {
		if op.Type != policy.Rollout {
			continue
		}
		succeeded = succeeded || op.Status == policy.Completed
		if op.Status != policy.Failed {
			continue
		}
		failed = true
		want := w.contents[op.From]
		if w.contents[doc.Current] != want {
			s.fail(rolledBack, "%s failed, and generation %d shall run instead of that of %d", op.ID, doc.Current, op.From)
		}
		for i := range doc.Placements {
			if p := &doc.Placements[i]; counts(p) && w.contents[p.Generation] != want {
				s.fail(rolledBack, "%s failed, and %s has generation %d", op.ID, p.Node, p.Generation)
			}
		}
		if doc.Problem == nil || doc.Problem.Operation != op.ID || doc.Problem.Code != op.Code {
			s.fail(keepsError, "%s failed with %s, and the policy says %+v", op.ID, op.Code, doc.Problem)
		}
	}
	if kept := before.Problem; kept != nil && kept.Type == policy.Rollout && !succeeded && !failed && (doc.Problem == nil || *doc.Problem != *kept) {
		s.fail(keepsError, "%s: the error of %s is gone: %+v", w.name, kept.Operation, doc.Problem)
	}
}

// remember keeps the content of every generation.
func (s *run) remember(w *workload) {
	for i := range w.doc.Versions {
		w.contents[w.doc.Versions[i].Generation] = w.doc.Versions[i].Content
	}
}

// inspectCreation is called when a node created a container.
func (s *run) inspectCreation(r *replica) {
	if r.created[r.gen]++; r.created[r.gen] > 1 {
		s.fail(createdOnce, "%s on %s: generation %d is created again", r.workload, r.n.id, r.gen)
	}
}

// sampleEvery is after how many decisions one is made again.
const sampleEvery = 16

// inspectAgain makes a decision again, as a controller does that was killed
// after it stored it: soon there is nothing left to change.
func (s *run) inspectAgain(w *workload, plan *policy.Plan, world policy.World) {
	if s.samples++; s.samples%sampleEvery != 0 || plan.Over {
		return
	}
	again := *plan
	for range 8 { // a drain of 0 seconds takes a few at one moment
		if again = policy.Decide(s.now, again.Document, world); !again.Changed {
			return
		}
	}
	s.fail(decided, "%s: a decision changes after itself: %+v", w.name, again.Events)
}
