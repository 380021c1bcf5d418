package placement

import "cmp"

// Order is what decides between two reports about one placement: the
// generation first, then the epoch, then the sequence. The order of arrival
// and wall clocks never count.
type Order struct {
	Generation uint64
	Epoch      uint64
	Sequence   Sequence
}

// Order returns the event's place in the order of its placement's events.
func (e Event) Order() Order {
	return Order{Generation: e.Generation, Epoch: e.Epoch, Sequence: e.Sequence}
}

// Compare returns -1 if o is older than other, +1 if it is newer, and 0 if
// both are the same report.
func (o Order) Compare(other Order) int {
	return cmp.Or(
		cmp.Compare(o.Generation, other.Generation),
		cmp.Compare(o.Epoch, other.Epoch),
		cmp.Compare(o.Sequence.Incarnation, other.Sequence.Incarnation),
		cmp.Compare(o.Sequence.Counter, other.Sequence.Counter),
	)
}

// Newer reports whether o overrides other.
func (o Order) Newer(other Order) bool { return o.Compare(other) > 0 }
