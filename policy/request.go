package policy

import (
	"fmt"

	"github.com/opfield/availability/placement"
)

// EnableRequest asks to make a container highly available. Settings that are
// absent get their defaults.
type EnableRequest struct {
	Workload  string           `json:"workload"`
	Node      string           `json:"node"`            // where it runs: the origin
	Container string           `json:"container"`       // its name or id there
	Ports     []placement.Port `json:"ports,omitempty"` // default: those of its label
	Settings  Settings         `json:"settings"`
}

// Change is a new version of a workload. At least one field is set.
type Change struct {
	Image string `json:"image,omitempty"` // reference or id, as the origin node knows it
	// Env sets variables; a null removes one, also one that the image would
	// set (then it is set to nothing).
	Env     map[string]*string `json:"env,omitempty"`
	Command *[]string          `json:"command,omitempty"`
	Labels  map[string]*string `json:"labels,omitempty"` // not ours
	// Memory in bytes and CPU in thousandths of a core; 0 removes the limit.
	Memory *int64 `json:"memory,omitempty"`
	CPU    *int64 `json:"cpu,omitempty"`
}

// DisableRequest gives the policy of a workload up.
type DisableRequest struct {
	Survivor string `json:"survivor"` // node of the surviving placement
	Confirm  string `json:"confirm"`  // the workload's name
}

// NodeReason says whether one node may take a placement, and why not.
type NodeReason struct {
	Node     string `json:"node"`
	Eligible bool   `json:"eligible"`
	Origin   bool   `json:"origin,omitempty"`
	Selected bool   `json:"selected"` // the settings allow it
	// Reason is a code with its text in Message; empty for an eligible node.
	Reason  Code   `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	// What the node has left, for people.
	FreeCPU    int64 `json:"freeCpu"`
	FreeMemory int64 `json:"freeMemory"`
}

// Notice is a blocker or a warning.
type Notice struct {
	Code    Code   `json:"code"`
	Field   string `json:"field,omitempty"`
	Message string `json:"message"`
}

// Eligibility is the result of a preflight: it changes nothing (ELG-4).
type Eligibility struct {
	Workload string           `json:"workload"`
	Blockers []Notice         `json:"blockers"`
	Warnings []Notice         `json:"warnings"`
	Nodes    []NodeReason     `json:"nodes"` // every candidate, sorted by id
	Ports    []placement.Port `json:"ports"` // that would be used
	Settings Settings         `json:"settings"`
}

// OK reports whether nothing blocks.
func (e Eligibility) OK() bool { return len(e.Blockers) == 0 }

// Refusal is the error of a request that is not accepted. Nothing was changed.
type Refusal struct {
	Code        Code         `json:"code"`
	Message     string       `json:"message"`
	Violations  []Violation  `json:"violations,omitempty"`
	Eligibility *Eligibility `json:"eligibility,omitempty"`
	// Conflict: the request is well-formed, but not possible as things are.
	Conflict bool `json:"-"`
	NotFound bool `json:"-"`
}

// Error returns the message with its code.
func (r *Refusal) Error() string { return fmt.Sprintf("%s (%s)", r.Message, r.Code) }

func refuse(code Code, format string, args ...any) *Refusal {
	return &Refusal{Code: code, Message: fmt.Sprintf(format, args...), Conflict: true}
}
