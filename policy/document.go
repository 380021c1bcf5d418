package policy

import (
	"encoding/json"
	"time"

	"github.com/opfield/availability/placement"
)

// Version is one specification of the workload. Two versions with the same
// Content are the same, whatever their generation.
type Version struct {
	Generation uint64          `json:"generation"`
	Content    string          `json:"content"` // digest over image, specification and ports
	Source     string          `json:"source"`  // where the image is mirrored from: an id or a reference
	SourceNode string          `json:"sourceNode,omitempty"`
	Platforms  []string        `json:"platforms,omitempty"` // "os/arch" of the nodes, when the image was pushed
	Image      placement.Image `json:"image"`               // empty digest: not mirrored yet
	Arch       string          `json:"arch,omitempty"`
	Spec       json.RawMessage `json:"spec"` // secret: it holds the environment
	// What a copy takes from a node.
	CPU       int64                     `json:"cpu"`
	Memory    int64                     `json:"memory"`
	Published []placement.PublishedPort `json:"published,omitempty"`
	CreatedAt time.Time                 `json:"createdAt"`
}

// Placement is one copy of the workload as the policy wants it.
type Placement struct {
	Node       string         `json:"node"`
	Want       placement.Want `json:"want"`
	Generation uint64         `json:"generation"`
	Revision   uint64         `json:"revision"`        // of its Desired
	Asked      uint64         `json:"asked,omitempty"` // the first revision with this Want: an older word of the node is not about it
	Original   bool           `json:"original,omitempty"`
	Adopt      string         `json:"adopt,omitempty"` // container id
	AdoptedAt  uint64         `json:"adoptedAt,omitempty"`
	Restarts   uint64         `json:"restarts,omitempty"`
	Mirror     string         `json:"mirror,omitempty"` // source that this node pushes
	// Served: it was serving when the workload was stopped (STP-1).
	Served bool `json:"served,omitempty"`
	// Since is when Want or Generation changed last.
	Since time.Time `json:"since"`
	// Closed is when every ingress node had confirmed that its links are
	// closed; zero while it serves or that is not so yet.
	Closed time.Time `json:"closed,omitzero"`
	// After is what a draining placement becomes. What becomes serving again
	// is restarted or brought to the current generation on the way.
	After placement.Want `json:"after,omitempty"`
	// Surge: it was started above the wanted count, for the time of a rollout.
	Surge bool `json:"surge,omitempty"`
	// Outside is the number of the last change by hand that was told (MOD-4).
	Outside uint64 `json:"outside,omitempty"`
	// For is the operation that works on it.
	For string `json:"for,omitempty"`
	// Replica checks (RDY-2).
	CheckedAt time.Time `json:"checkedAt,omitzero"`
	Bad       int       `json:"bad,omitempty"`
	Good      int       `json:"good,omitempty"`
	Suspended bool      `json:"suspended,omitempty"` // out of routing by two bad checks
}

// Original is where the workload was enabled.
type Original struct {
	Node          string `json:"node"`
	Container     string `json:"container"` // its name
	ID            string `json:"id"`        // its full id at that time
	RestartPolicy string `json:"restartPolicy"`
}

// Document is everything that is stored about one workload with a policy. It
// is written as a whole, so it is never half of one step and half of another.
type Document struct {
	Workload  string           `json:"workload"`
	Kind      placement.Kind   `json:"kind"`
	Ports     []placement.Port `json:"ports"`
	CreatedAt time.Time        `json:"createdAt"`
	Settings  Settings         `json:"settings"`
	Original  Original         `json:"original"`
	// Base is the largest number that was in use for the workload before this
	// policy: health events of released placements keep their generation, and
	// nobody takes an older one for newer.
	Base uint64 `json:"base,omitempty"`
	// Counter numbers generations, revisions and operations: it only grows.
	Counter    uint64      `json:"counter"`
	Current    uint64      `json:"current"`  // generation that shall run
	Versions   []Version   `json:"versions"` // that are in use or can be returned to, oldest first
	Placements []Placement `json:"placements"`
	Operations []Operation `json:"operations,omitempty"` // the first is worked on
	History    []Operation `json:"history,omitempty"`    // that ended, newest first
	Stopped    bool        `json:"stopped,omitempty"`    // the user stopped the workload
	Routed     bool        `json:"routed,omitempty"`     // the original is adopted: only placements count in routing
	Disabling  bool        `json:"disabling,omitempty"`  //
	Released   bool        `json:"released,omitempty"`   // disabled; what is left waits for nodes that are away
	// FailbackAfter is before when no failback is tried again (PRI-5).
	FailbackAfter time.Time `json:"failbackAfter,omitzero"`
	// Problem is the error of the last operation that failed and was not
	// followed by a good one (ROL-2).
	Problem *Problem `json:"problem,omitempty"`
}

// Problem is an error that a policy keeps. That of a rollout stays until
// another version was brought out (ROL-2).
type Problem struct {
	Code      Code      `json:"code"`
	Message   string    `json:"message"`
	Operation string    `json:"operation"`
	Type      Type      `json:"type"` // of the operation
	At        time.Time `json:"at"`
}

// MaxHistory is how many ended operations a document keeps.
const MaxHistory = 20

// NodeState is the liveness of a node.
type NodeState string

// The states of a node. One that is not reporting is silent on NATS, but a
// relay holds its session or the controller suspects itself: nothing is moved
// for that (LOS-1, LOS-4).
const (
	NodeOnline       NodeState = "online"
	NodeNotReporting NodeState = "not reporting"
	NodeOffline      NodeState = "offline"
)

// Node is what is known of a Docker node.
type Node struct {
	ID    string    `json:"id"`
	Name  string    `json:"name,omitempty"` // for people
	State NodeState `json:"state"`
	// Lost is when an offline node was lost: all times of a node loss count
	// from it.
	Lost time.Time `json:"lost,omitzero"`
	// Healthy is since when it has been online without an error and without a
	// break, as far as this controller knows (PRI-3).
	Healthy time.Time `json:"healthy,omitzero"`
	// Drained: an operator wants no placement there.
	Drained bool `json:"drained,omitempty"`
	// Known: the node has reported its facts to this controller.
	Known bool                `json:"known"`
	Facts placement.NodeFacts `json:"facts"`
	// Relay says why no relay is reached from the node; empty if one is.
	Relay string `json:"relay,omitempty"`
	// Refused says why the node may not announce the workload (its join
	// token's grant); empty if it may.
	Refused string `json:"refused,omitempty"`
	// Placements is how many placements of all workloads are meant to run
	// there; Planned is what those take that its facts do not show yet.
	Placements    int   `json:"placements"`
	Standbys      int   `json:"standbys"` // that are prepared there
	PlannedCPU    int64 `json:"plannedCpu"`
	PlannedMemory int64 `json:"plannedMemory"`
}

// World is everything around one workload that Decide looks at.
type World struct {
	Nodes map[string]Node
	// Observed is what nodes say of their placement of the workload. A report
	// of a node that is offline may still be there; it does not count.
	Observed map[string]placement.Observed
	// LinksClosed says of a node whether every ingress node that is not silent
	// for 10 s has confirmed that the links to its placement are closed.
	LinksClosed map[string]bool
	// LinksOpen says of a node whether every such ingress node that knows the
	// workload has opened the links to its placement; true if there is none.
	LinksOpen map[string]bool
	// Slot: an operation that counts against the limit may begin (OPS-2).
	Slot   bool
	Timing Timing
}

// Timing is how long things may take; DefaultTiming is what the product uses.
type Timing struct {
	CheckEvery     time.Duration // replica check
	OfflineAfter   time.Duration // a node's loss to when it is shown offline
	StartWithin    time.Duration // from the order to a ready placement; then the attempt failed
	NodeWithin     time.Duration // a node that is online carries out a stop within this much more than it may take
	RetryFirst     time.Duration // wait before the second attempt; doubled each time
	RetryMost      time.Duration
	RolloutWithin  time.Duration // then it is rolled back
	FailbackRetry  time.Duration
	IngressSilence time.Duration // an ingress node silent for so long is not waited for
	Jitter         time.Duration // the longest delay of an operation that starts by itself
}

// DefaultTiming returns the product's times.
func DefaultTiming() Timing {
	return Timing{
		CheckEvery: 30 * time.Second, OfflineAfter: 5 * time.Second, StartWithin: 3 * time.Minute, NodeWithin: time.Minute,
		RetryFirst: 30 * time.Second, RetryMost: 10 * time.Minute, RolloutWithin: 15 * time.Minute,
		FailbackRetry: 15 * time.Minute, IngressSilence: 10 * time.Second, Jitter: time.Second,
	}
}

// RolloutAttempts is how many failed attempts end a rollout (ROL-2).
const RolloutAttempts = 3
