package policy

import "time"

// MaxLimited is how many policies are worked on at once by operations that
// count against the limit (OPS-2).
const MaxLimited = 4

// Claimant is a policy whose next operation counts against the limit.
type Claimant struct {
	Workload string
	Type     Type
	Since    time.Time
}

// Claim returns the claim of a document, and whether its operation has a slot
// already. A document that wants none has no claim.
func (d *Document) Claim(now time.Time) (c Claimant, running, wants bool) {
	if len(d.Operations) == 0 || !d.Operations[0].Type.Limited() {
		return c, false, false
	}
	op := d.Operations[0]
	if op.Status == Running {
		return c, true, false
	}
	return Claimant{Workload: d.Workload, Type: op.Type, Since: op.CreatedAt}, false, !now.Before(op.Next)
}
