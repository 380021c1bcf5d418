package engine

import (
	"context"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/policy"
)

// end removes a policy of which nothing is left.
func (e *Engine) end(ctx context.Context, name string, revision uint64, before *policy.Document, plan policy.Plan) error {
	call, cancel := e.store(ctx)
	defer cancel()
	if err := e.cfg.Store.Delete(call, bus.BucketMembers, name); err != nil {
		return err
	}
	rest := plan.Document.End()
	revision, err := e.save(ctx, &rest, revision)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if en := e.policies[name]; en != nil {
		close(en.changed)
	}
	e.ended[name] = &entry{doc: rest, revision: revision}
	delete(e.policies, name)
	delete(e.members, name)
	e.tell(name, before, &plan)
	plan.Document.Placements = nil
	e.record(&plan.Document)
	e.audit("policy ended", "workload", name)
	return nil
}
