package upstream

import "github.com/opfield/availability/placement"

// State says what the endpoint of a link does with a new connection.
type State uint8

// The states of a link endpoint. The zero value means unknown.
const (
	Unknown State = iota
	Closed        // refuses
	Joined        // leads to an open sibling
	Holding       // keeps the connection until something opens or time is up
	Open          // leads to its placement
)

// String returns the state in lower case.
func (s State) String() string {
	switch s {
	case Closed:
		return "closed"
	case Joined:
		return "joined"
	case Holding:
		return "holding"
	case Open:
		return "open"
	default:
		return "unknown"
	}
}

// Order tells the endpoint of one link what to do.
type Order struct {
	Link       placement.LinkID
	Protocol   placement.Protocol
	Epoch      uint64
	Generation uint64
	State      State
	Reason     string             // for people; empty when open
	Reset      bool               // fenced: running streams are reset at once, otherwise they drain
	Primary    bool               // the proven nginx generation lists it as primary
	Open       []placement.LinkID // the open siblings, sorted; where a joined connection may lead
	MayHold    bool               // holds connections while nothing serves or no relay is reachable
}

// Service is what nginx lists for one workload port that a route uses.
type Service struct {
	Workload string
	Port     uint16
	Open     []placement.LinkID // sorted
	Others   []placement.LinkID // every other placement, sorted
}

// N is the number of open placements.
func (s Service) N() int { return len(s.Open) }

// Primaries are the links that nginx lists as primaries: the open ones, or
// all when none is open.
func (s Service) Primaries() []placement.LinkID {
	if len(s.Open) > 0 {
		return s.Open
	}
	return s.Others
}

// Backups are the links that nginx lists as backups.
func (s Service) Backups() []placement.LinkID {
	if len(s.Open) > 0 {
		return s.Others
	}
	return nil
}

// RouteView is a route as the table serves it.
type RouteView struct {
	Route    Route // normalised; Hosts are those that it holds
	Problems Problems
	Serves   bool // false when nothing of it can be rendered
	Open     int  // open placements behind it
	Known    int  // placements behind it, open or not
}
