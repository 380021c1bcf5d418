package accept

import (
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/securelink"
)

// Links keeps the acceptor and the relays at what the placements of this node
// are. The acceptor comes first when links close and also when they open: a
// relay never sends what the node would refuse for being late itself.
type Links struct {
	Acceptor *Acceptor
	Relays   *securelink.LinkSet
}

// Set takes the present state of every placement of this node.
func (l *Links) Set(events []placement.Event) {
	records := Records(events)
	l.Acceptor.Apply(records)
	l.Relays.Set(records)
}

// Records returns the links of placements: one for each port of each
// placement that is not removed.
func Records(events []placement.Event) []securelink.Record {
	var records []securelink.Record
	for _, e := range events {
		if e.State == placement.StateRemoved {
			continue
		}
		for _, p := range e.Ports {
			records = append(records, securelink.Record{
				Link:     placement.LinkID{Placement: e.ID(), Port: p.Port},
				Protocol: p.Protocol, Kind: e.Kind, Role: e.Role, State: e.State, Ready: e.Ready,
				Order: e.Order(),
			})
		}
	}
	return records
}
