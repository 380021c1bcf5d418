package policy

import (
	"time"

	"github.com/opfield/availability/placement"
)

// Health is how an available workload is, in one word.
type Health string

// The healths of a policy.
const (
	Healthy   Health = "healthy"   // as many serve as wanted, or it is stopped as wanted
	Degraded  Health = "degraded"  // fewer serve than wanted
	Down      Health = "down"      // none serves
	Changing  Health = "changing"  // an operation is at work
	Stopped   Health = "stopped"   //
	Disabling Health = "disabling" //
	CleanUp   Health = "cleanup_pending"
)

// View is what people and programs see of one policy. It holds no secret.
type View struct {
	Workload  string           `json:"workload"`
	Kind      placement.Kind   `json:"kind"`
	Health    Health           `json:"health"`
	Stopped   bool             `json:"stopped"`
	Wanted    int              `json:"wanted"`  // serving placements
	Serving   int              `json:"serving"` // that are ready
	Image     string           `json:"image"`   // source and digest
	Version   uint64           `json:"generation"`
	Ports     []placement.Port `json:"ports"`
	Settings  Settings         `json:"settings"`
	Original  Original         `json:"original"`
	CreatedAt time.Time        `json:"createdAt"`
	// Primary is the first node of the order, ServingFrom where it serves from
	// now (PRI-7); both empty without priority mode.
	Primary     string          `json:"primary,omitempty"`
	ServingFrom []string        `json:"servingFrom,omitempty"`
	OnBackup    bool            `json:"onBackup,omitempty"`
	Placements  []PlacementView `json:"placements"`
	Operation   *Operation      `json:"operation,omitempty"` // at work or next
	Queued      []Operation     `json:"queued,omitempty"`    // behind it
	Warnings    []Notice        `json:"warnings"`
	Problem     *Problem        `json:"problem,omitempty"`
}

// PlacementView is one placement as it is.
type PlacementView struct {
	Node       string           `json:"node"`
	NodeState  NodeState        `json:"nodeState"`
	Want       placement.Want   `json:"want"`
	Generation uint64           `json:"generation"`
	Original   bool             `json:"original,omitempty"`
	Container  string           `json:"container"` // name
	ID         string           `json:"containerId,omitempty"`
	State      placement.State  `json:"state"` // as observed
	Ready      bool             `json:"ready"`
	Reason     string           `json:"reason,omitempty"`
	Streams    int              `json:"streams"`
	Suspended  bool             `json:"suspended,omitempty"`
	ImageReady bool             `json:"imageReady"`
	Fault      *placement.Fault `json:"fault,omitempty"`
	Outside    string           `json:"outside,omitempty"`
	Since      time.Time        `json:"since"`
}
