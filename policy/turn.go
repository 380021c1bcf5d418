package policy

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/opfield/availability/placement"
)

// turn chooses the operation that is worked on (OPS-1): one at a time, in
// order. One that waits for its next attempt lets the others go first; a newer
// rollout ends an older one at its next step (ROL-6).
func (d *decision) turn() {
	ops := d.doc.Operations
	if len(ops) == 0 {
		return
	}
	if i := slices.IndexFunc(ops, func(op Operation) bool { return op.Type == Disable }); i > 0 && ops[0].Status != Running {
		var left []Operation
		for _, op := range ops[:i] {
			if op.Type.lifecycle() && op.Status == Pending {
				left = append(left, op) // in order: a survivor of a stop stays stopped
				continue
			}
			d.archive(op, Cancelled, CodeDisableInProgress, "the policy is being disabled")
		}
		d.doc.Operations = append(left, ops[i:]...)
	}
	d.supersede()
	ops = d.doc.Operations
	head := &ops[0]
	d.hurry(head)
	noSlot := head.Status == Pending && head.Type.Limited() && !d.w.Slot
	if (head.Status == Waiting || noSlot) && len(ops) > 1 {
		d.overtake()
		ops = d.doc.Operations
		head = &ops[0]
	}
	d.count(head)
	switch head.Status {
	case Pending, Waiting:
		if !d.due(head.Next) || head.Type.Limited() && !d.w.Slot {
			return
		}
		head.Status, head.Next = Running, time.Time{}
		if head.Type == Rollout && head.Seen.IsZero() {
			head.Seen = d.now
		}
		if head.StartedAt.IsZero() {
			head.StartedAt = d.now
		}
		if head.Phase == Queued || head.Phase == "" {
			head.Phase = Locking
		}
		d.begin(head)
	}
}

// overtake lets what is queued go before an operation that waits: what a user
// asked for first. A stop, start or restart that waits is not followed up
// after a newer one.
func (d *decision) overtake() {
	ops := slices.Clone(d.doc.Operations)
	if i := slices.IndexFunc(ops[1:], func(op Operation) bool { return op.Type.lifecycle() }); ops[0].Type.lifecycle() && i >= 0 {
		d.archive(ops[0], Cancelled, CodeSuperseded, "a newer "+string(ops[i+1].Type)+" was asked for")
		d.doc.Operations = ops[1:]
		if ops = ops[1:]; ops[0].Status != Waiting || len(ops) == 1 {
			return
		}
		d.overtake()
		return
	}
	slices.SortStableFunc(ops, func(a, b Operation) int {
		return cmp.Or(boolFirst(a.Type.lifecycle(), b.Type.lifecycle()), boolFirst(a.Status == Pending, b.Status == Pending), a.Next.Compare(b.Next))
	})
	d.doc.Operations = ops
}

// supersede cancels every rollout but the newest, wherever they are in the
// queue (ROL-6). What ran before a cancelled one is proven; its version is not.
func (d *decision) supersede() {
	newest, rollouts := -1, 0
	for i := range d.doc.Operations {
		if op := &d.doc.Operations[i]; op.Type == Rollout {
			if rollouts++; newest < 0 || op.Target > d.doc.Operations[newest].Target {
				newest = i
			}
		}
	}
	if rollouts < 2 {
		return
	}
	winner := d.doc.Operations[newest]
	ops := slices.DeleteFunc(slices.Clone(d.doc.Operations), func(op Operation) bool {
		if op.Type != Rollout || op.ID == winner.ID {
			return false
		}
		if op.From != 0 {
			winner.From = op.From
		}
		d.archive(op, Cancelled, CodeSuperseded, "a newer version was asked for")
		return true
	})
	for i := range ops {
		if ops[i].ID == winner.ID {
			ops[i] = winner
		}
	}
	d.doc.Operations = ops
}

// hurry lets an operation that waits for its next attempt go on at once when a
// node was lost: what is missing is not made to wait for something else (LOS-2).
func (d *decision) hurry(op *Operation) {
	if op.Status != Waiting || op.Type.lifecycle() && op.Type != Start || op.Type == Cleanup || d.doc.Stopped || !op.Next.After(d.now) {
		return
	}
	if v := d.doc.version(d.doc.Current); v.Image.Digest == "" || !slices.ContainsFunc(d.doc.Placements, d.replaceable) {
		return
	}
	op.Next = time.Time{}
}

// count adds up the time since a rollout began while a controller was there: a
// gap of more than a minute is one in which there was none. What a way back
// takes does not count (ROL-2).
func (d *decision) count(op *Operation) {
	const gap, step = time.Minute, 30 * time.Second
	if op.Type != Rollout || op.Seen.IsZero() || op.RolledBack {
		return
	}
	since := d.now.Sub(op.Seen)
	switch {
	case since >= gap || since < 0:
		op.Seen = d.now
	case since >= step:
		op.Worked, op.Seen = op.Worked+since, d.now
	}
	d.wake(op.Seen.Add(step))
}

// begin does what an operation does once, when it takes its turn.
func (d *decision) begin(op *Operation) {
	switch op.Type {
	case Rollout:
		if !op.RolledBack && d.doc.Current < op.Target {
			if op.From == 0 {
				op.From = d.doc.Current
			}
			d.doc.Current = op.Target
			d.step("", "generation %d shall run", op.Target)
		}
	case Stop:
		d.doc.Stopped = true
	case Disable:
		d.doc.Disabling = true
	case Restart:
		if op.Left == nil {
			for _, p := range d.doc.Placements {
				if p.Want == placement.WantServing {
					op.Left = append(op.Left, p.Node)
				}
			}
			slices.SortFunc(op.Left, compare)
		}
	}
}

// archive moves an operation to the history.
func (d *decision) archive(op Operation, status Status, code Code, message string) {
	d.ended++
	op.Status, op.FinishedAt, op.Next, op.Note = status, d.now, time.Time{}, ""
	if code != "" || status == Completed { // what failed on the way does not count any more
		op.Code, op.Message = code, message
	}
	if status == Completed || status == CleanupPending {
		op.Phase, op.Progress = Done, 100
	}
	op.Avoid, op.Seen = nil, time.Time{}
	history := make([]Operation, 0, MaxHistory) // that of the given document stays as it is
	d.doc.History = append(append(history, op), d.doc.History[:min(len(d.doc.History), MaxHistory-1)]...)
	d.events = append(d.events, Event{Kind: Progressed, Operation: op.ID, Code: op.Code, Text: fmt.Sprintf("%s %s: %s", op.Type, op.Status, cmp.Or(op.Message, op.Result))})
}

// finish ends the operation that is worked on.
func (d *decision) finish(status Status, code Code, message string) {
	op := d.doc.Operations[0]
	d.archive(op, status, code, message)
	d.doc.Operations = slices.Delete(slices.Clone(d.doc.Operations), 0, 1)
	if d.doc.Released {
		defer d.forget() // nothing but this may have been left
	}
	for i := range d.doc.Placements {
		d.doc.Placements[i].Surge = false
	}
	kept := d.doc.Problem
	switch {
	case status == Failed && (kept == nil || kept.Type != Rollout || op.Type == Rollout):
		d.doc.Problem = &Problem{Code: code, Message: message, Operation: op.ID, Type: op.Type, At: d.now}
	case status == Completed && kept != nil && op.Type != Cleanup && op.Type != Stop && (kept.Type != Rollout || op.Type == Rollout):
		d.doc.Problem = nil
	}
}

// hold lets the operation wait until the world changes: it gives up its turn
// and is looked at again with every decision.
func (d *decision) hold(code Code, format string, args ...any) {
	op := d.active()
	message := fmt.Sprintf(format, args...)
	op.Status, op.Code, op.Note, op.Next = Waiting, code, message, time.Time{}
}

// again lets the operation wait for its next attempt after a failure.
func (d *decision) again(code Code, format string, args ...any) {
	op := d.active()
	op.Attempts++
	op.Status, op.Code, op.Message = Waiting, code, fmt.Sprintf(format, args...)
	op.Note = ""
	wait := d.w.Timing.RetryFirst
	for i := 1; i < op.Attempts && wait < d.w.Timing.RetryMost; i++ {
		wait *= 2
	}
	op.Next = d.now.Add(min(wait, d.w.Timing.RetryMost))
	d.events = append(d.events, Event{Kind: Progressed, Operation: op.ID, Code: code, Text: fmt.Sprintf("attempt %d failed: %s", op.Attempts, op.Message)})
	d.wake(op.Next)
}

// phase shows how far the operation is.
func (d *decision) phase(phase Phase, format string, args ...any) {
	op := d.active()
	op.Phase, op.Note = phase, fmt.Sprintf(format, args...)
}

// add queues an operation.
func (d *Document) add(now time.Time, t Type, reason string) *Operation {
	id := fmt.Sprintf("%s-%d", d.Workload, d.number())
	d.Operations = append(slices.Clone(d.Operations), Operation{ID: id, Type: t, Phase: Queued, Status: Pending, Reason: reason, CreatedAt: now})
	return &d.Operations[len(d.Operations)-1]
}
