package policy

import "fmt"

// EventKind says what an event is about.
type EventKind string

// The kinds of events.
const (
	Stepped    EventKind = "step"      // something was done
	Progressed EventKind = "operation" // one was queued, failed an attempt or ended
	Repaired   EventKind = "repaired"  // somebody changed something by hand
)

// Event is something that was decided, for people.
type Event struct {
	Kind      EventKind `json:"kind"`
	Operation string    `json:"operation,omitempty"`
	Node      string    `json:"node,omitempty"`
	Code      Code      `json:"code,omitempty"`
	Text      string    `json:"text"`
}

// repaired tells of what was changed by hand, once: what was told is in the
// document. A number that is smaller than that is of a node that lost its
// memory.
func (d *decision) repaired() {
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		if o := d.w.Observed[p.Node]; o.Outside != "" && o.OutsideNumber != p.Outside {
			p.Outside = o.OutsideNumber
			d.events = append(d.events, Event{Kind: Repaired, Node: p.Node, Text: fmt.Sprintf("changed by hand on %s and repaired: %s", p.Node, o.Outside)})
		}
	}
}
