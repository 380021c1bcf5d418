package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

// load reads everything that is stored.
func (e *Engine) load(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, storeWithin)
	defer cancel()
	docs, err := e.cfg.Store.Read(ctx, bus.BucketPolicies)
	if err != nil {
		return err
	}
	members, err := e.cfg.Store.Read(ctx, bus.BucketMembers)
	if err != nil {
		return err
	}
	settings, err := e.cfg.Store.Read(ctx, bus.BucketNodes)
	if err != nil {
		return err
	}
	damaged := map[string]bool{}
	good := make(map[string]policy.Document, len(docs))
	for key, v := range docs {
		var doc policy.Document
		err := json.Unmarshal(v.Value, &doc)
		if err == nil && doc.Workload != key {
			err = fmt.Errorf("it is about workload %q", doc.Workload)
		}
		if err == nil {
			err = doc.Check()
		}
		if err != nil {
			e.cfg.Logger.Error("stored policy cannot be used; it, its records and its routing are left alone", "workload", key, "err", err)
			damaged[key] = true
			continue
		}
		good[key] = doc
	}
	left, err := e.recordsOf(ctx, damaged)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	before := e.policies
	e.policies = make(map[string]*entry, len(docs))
	e.members, e.settings, e.swaps = map[string]string{}, map[string]nodeSettings{}, map[string]uint64{}
	e.records, e.unkept, e.damaged = left, map[string]bool{}, damaged
	for key, doc := range good {
		e.enter(doc, docs[key].Revision)
	}
	for key, v := range members {
		e.members[key] = string(v.Value)
	}
	for key, v := range settings {
		e.swaps[key] = v.Revision // also of damaged ones: an operator sets them again
		var s nodeSettings
		if err := json.Unmarshal(v.Value, &s); err != nil {
			e.cfg.Logger.Error("stored settings of a node cannot be read", "node", key, "err", err)
			continue
		}
		e.settings[key] = s
	}
	for node := range e.cfg.Fleet.PolicyNodes() {
		e.unkept[node] = true // a record may be left that belongs to nothing
	}
	for _, r := range e.nodes {
		e.spread(r)
	}
	for _, old := range before {
		close(old.changed)
	}
	e.leading, e.known = true, true
	e.metrics.leading.Set(1)
	return nil
}

// recordsOf reads what nodes have of workloads whose policies cannot be used:
// those records stay as they are.
func (e *Engine) recordsOf(ctx context.Context, workloads map[string]bool) (map[string]map[string]placement.Desired, error) {
	out := map[string]map[string]placement.Desired{}
	if len(workloads) == 0 {
		return out, nil
	}
	all, err := e.cfg.Store.Read(ctx, bus.BucketDesired)
	if err != nil {
		return nil, err
	}
	for key, v := range all {
		node, workload, found := strings.Cut(key, ".")
		if !found || !workloads[workload] {
			continue
		}
		var d placement.Desired
		if err := json.Unmarshal(v.Value, &d); err != nil || d.Check() != nil || d.ID() != (placement.ID{Workload: workload, Node: node}) {
			e.cfg.Logger.Error("stored record of a node cannot be read", "key", key, "err", err)
			continue
		}
		if out[node] == nil {
			out[node] = map[string]placement.Desired{}
		}
		out[node][workload] = d
	}
	return out, nil
}

// resign ends the turn as the leader.
func (e *Engine) resign() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.leading = false
	e.metrics.leading.Set(0)
}

// yield takes note that another controller leads: what was read may not be so
// any more.
func (e *Engine) yield() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.known = false
}

// enter adds or replaces a policy; mu is held.
func (e *Engine) enter(doc policy.Document, revision uint64) *entry {
	en := e.policies[doc.Workload]
	if en == nil {
		en = &entry{observed: map[string]placement.Observed{}, changed: make(chan struct{})}
		e.policies[doc.Workload] = en
		for _, r := range e.nodes {
			for _, o := range r.Placements {
				if o.Workload == doc.Workload {
					en.observed[r.Node] = o
				}
			}
		}
	}
	en.doc, en.revision, en.dirty = doc, revision, true
	en.motion = moves(&doc)
	e.record(&doc)
	return en
}

// record takes over what a document wants of nodes; mu is held.
func (e *Engine) record(doc *policy.Document) {
	want := doc.Desired()
	for node, all := range e.records {
		if _, still := want[node]; !still {
			if _, had := all[doc.Workload]; had {
				delete(all, doc.Workload)
				e.unkept[node] = true
			}
		}
	}
	for node, d := range want {
		if e.records[node] == nil {
			e.records[node] = map[string]placement.Desired{}
		}
		if e.records[node][doc.Workload].Revision != d.Revision {
			e.records[node][doc.Workload] = d
			e.unkept[node] = true
		}
	}
}

// moves reports whether links or streams decide what is next.
func moves(doc *policy.Document) bool {
	for _, op := range doc.Operations {
		if op.Status == policy.Running {
			return true
		}
	}
	return slices.ContainsFunc(doc.Placements, func(p policy.Placement) bool { return p.Want == placement.WantDraining })
}

// learn takes a node's report.
func (e *Engine) learn(r placement.NodeReport) {
	e.mu.Lock()
	defer e.mu.Unlock()
	before, known := e.nodes[r.Node]
	if !known || (before.Facts.Docker == "") != (r.Facts.Docker == "") || before.Facts.Error != r.Facts.Error || before.Facts.Registry != r.Facts.Registry || before.Facts.Arch != r.Facts.Arch {
		e.all = true // it may take placements now that nobody could take (LOS-2)
	}
	e.nodes[r.Node] = r
	e.spread(r)
}

// spread hands the report's placements to their policies; mu is held.
func (e *Engine) spread(r placement.NodeReport) {
	told := map[string]bool{}
	for _, o := range r.Placements {
		told[o.Workload] = true
		en := e.policies[o.Workload]
		if en == nil {
			continue
		}
		if before, known := en.observed[r.Node]; known && sameObserved(before, o) {
			continue
		}
		en.observed[r.Node] = o
		en.dirty = true
		e.touched(en)
	}
	for name, en := range e.policies {
		if _, known := en.observed[r.Node]; known && !told[name] {
			delete(en.observed, r.Node)
			en.dirty = true
			e.touched(en)
		}
	}
}

// touched wakes whoever watches the policy; mu is held.
func (e *Engine) touched(en *entry) {
	close(en.changed)
	en.changed = make(chan struct{})
}

func sameObserved(a, b placement.Observed) bool {
	if (a.Mirrored == nil) != (b.Mirrored == nil) || a.Mirrored != nil && (a.Mirrored.Digest != b.Mirrored.Digest || a.Mirrored.Narrowed != b.Mirrored.Narrowed || !slices.Equal(a.Mirrored.Platforms, b.Mirrored.Platforms)) ||
		(a.Fault == nil) != (b.Fault == nil) || a.Fault != nil && *a.Fault != *b.Fault {
		return false
	}
	a.Mirrored, a.Fault, b.Mirrored, b.Fault = nil, nil, nil, nil
	return a == b
}
