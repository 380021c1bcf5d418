package engine

import "github.com/opfield/availability/policy"

// audit logs what happened without a user's request, or in answer to one
// (OBS-2).
func (e *Engine) audit(what string, args ...any) {
	e.cfg.Logger.Info(what, append([]any{"audit", true}, args...)...)
}

// tell logs what was decided.
func (e *Engine) tell(name string, before *policy.Document, plan *policy.Plan) {
	for _, ev := range plan.Events {
		e.audit(ev.Text, "workload", name, "operation", ev.Operation, "node", ev.Node, "code", string(ev.Code))
	}
	last := ""
	if len(before.History) > 0 {
		last = before.History[0].ID
	}
	for _, op := range plan.Document.History {
		if op.ID == last {
			break
		}
		e.metrics.operations.WithLabelValues(string(op.Type), string(op.Status)).Inc()
	}
}
