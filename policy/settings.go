package policy

import (
	"fmt"
	"slices"

	"github.com/opfield/availability/placement"
)

// Code is the stable name of a refusal, a blocker, a warning or a fault.
type Code string

// The codes of refusals. Those of nodes' faults are in package placement.
const (
	CodeSettings            Code = "AVAILABILITY_SETTINGS_INVALID"
	CodePreflight           Code = "AVAILABILITY_PREFLIGHT_BLOCKED"
	CodeInsufficientNodes   Code = "INSUFFICIENT_ELIGIBLE_NODES"
	CodeMounts              Code = "AVAILABILITY_MOUNTS_UNSUPPORTED"
	CodeUnsupported         Code = "AVAILABILITY_SETTING_UNSUPPORTED" // of the container: it cannot be copied to another node
	CodeOriginNotSelected   Code = "AVAILABILITY_ORIGIN_NOT_SELECTED"
	CodeOriginNotRunning    Code = "AVAILABILITY_ORIGIN_NOT_RUNNING"
	CodeOriginNotEligible   Code = "AVAILABILITY_ORIGIN_NOT_ELIGIBLE"
	CodePlacementManaged    Code = "AVAILABILITY_PLACEMENT_MANAGED"
	CodeExists              Code = "AVAILABILITY_ALREADY_ENABLED"
	CodeUnknown             Code = "AVAILABILITY_NOT_ENABLED"
	CodeWorkloadName        Code = "AVAILABILITY_WORKLOAD_NAME"
	CodePorts               Code = "AVAILABILITY_PORTS_REQUIRED"
	CodeKind                Code = "AVAILABILITY_KIND_UNSUPPORTED"
	CodeContainerUnknown    Code = "AVAILABILITY_CONTAINER_UNKNOWN"
	CodeNodeUnknown         Code = "AVAILABILITY_NODE_UNKNOWN"
	CodeNodeInUse           Code = "AVAILABILITY_NODE_IN_USE"
	CodeNodeNotLost         Code = "AVAILABILITY_NODE_NOT_LOST"
	CodeDisableInProgress   Code = "AVAILABILITY_DISABLE_IN_PROGRESS"
	CodeConfirmation        Code = "AVAILABILITY_CONFIRMATION_REQUIRED"
	CodeSurvivor            Code = "AVAILABILITY_SURVIVOR_REQUIRED"
	CodeSurvivorUnreachable Code = "AVAILABILITY_SURVIVOR_UNREACHABLE"
	CodeChangeEmpty         Code = "AVAILABILITY_CHANGE_EMPTY"
	CodeChangeInvalid       Code = "AVAILABILITY_CHANGE_INVALID"
	CodeOperationUnknown    Code = "AVAILABILITY_OPERATION_UNKNOWN"
	CodeOperationNotFailed  Code = "AVAILABILITY_OPERATION_NOT_FAILED"
	CodeRolloutCapacity     Code = "AVAILABILITY_ROLLOUT_NEEDS_CAPACITY"
	CodeFailbackSurge       Code = "AVAILABILITY_FAILBACK_NEEDS_SURGE"
	CodeRolloutTimeout      Code = "AVAILABILITY_ROLLOUT_TIMEOUT"
	CodeSuperseded          Code = "AVAILABILITY_SUPERSEDED"
	CodeNodeSilent          Code = "AVAILABILITY_NODE_SILENT"
)

// Mode says how many copies serve.
type Mode string

// The modes.
const (
	Replicated Mode = "replicated" // 2 to 32 serving placements
	Failover   Mode = "failover"   // exactly one, replaced after node loss
)

// Selection says which nodes may take placements.
type Selection string

// The selections.
const (
	AllNodes      Selection = "all" // all compatible nodes
	SelectedNodes Selection = "selected"
)

// Partition says what a failover workload does when the nodes are split.
type Partition string

// The partition modes.
const (
	Strict    Partition = "strict"    // never two copies
	Available Partition = "available" // both sides may serve
)

// Settings are what a user decides about an available workload. Durations are
// in whole seconds because that is how they are written in the API.
type Settings struct {
	Mode     Mode `json:"mode"`
	Replicas int  `json:"replicas"` // 1 in failover mode, 2 to 32 in replicated mode
	// ReplacementGraceSeconds is from the loss of a node to the start of a
	// replacement: 0 to 3600.
	ReplacementGraceSeconds int `json:"replacementGraceSeconds"`
	// MaxUnavailable bounds how many placements a planned update makes
	// unavailable at the same time: 0 to 32.
	MaxUnavailable int `json:"maxUnavailable"`
	// MaxSurge bounds temporary placements above Replicas: 0 to 32.
	MaxSurge int `json:"maxSurge"`
	// DrainSeconds is from the end of new streams to the stop: 0 to 3600.
	DrainSeconds int       `json:"drainSeconds"`
	Selection    Selection `json:"nodeSelection"`
	Nodes        []string  `json:"nodes,omitempty"` // with selected: unique ids
	// PriorityMode prefers nodes in the order of NodePriority (first: Primary).
	PriorityMode bool     `json:"priorityMode"`
	NodePriority []string `json:"nodePriority,omitempty"`
	// FailbackDelaySeconds is how long a node of higher priority must be
	// healthy before the workload returns to it: 0 to 3600.
	FailbackDelaySeconds int       `json:"failbackDelaySeconds"`
	PartitionMode        Partition `json:"partitionMode"`
}

// The ranges and defaults of Settings (SET-1, SET-2).
const (
	MaxSeconds         = 3600
	MaxReplicas        = 32
	MinReplicas        = 2 // of the replicated mode
	defaultGrace       = 15
	defaultSurge       = 1
	defaultDrain       = 30
	defaultFailback    = 300
	defaultReplication = 2
)

// DefaultSettings returns the settings of a mode where the user said nothing.
func DefaultSettings(mode Mode) Settings {
	s := Settings{
		Mode: mode, Replicas: 1, ReplacementGraceSeconds: defaultGrace, MaxSurge: defaultSurge, DrainSeconds: defaultDrain,
		Selection: AllNodes, FailbackDelaySeconds: defaultFailback, PartitionMode: Strict,
	}
	if mode == Replicated {
		s.Replicas = defaultReplication
	}
	return s
}

// Violation is one thing that is wrong with what a user asks for.
type Violation struct {
	Code    Code   `json:"code"`
	Field   string `json:"field"`
	Message string `json:"message"`
}

// Validate returns everything that is wrong, in the order of the fields
// (SET-3).
func (s Settings) Validate() []Violation {
	var wrong []Violation
	bad := func(field, format string, args ...any) {
		wrong = append(wrong, Violation{CodeSettings, field, fmt.Sprintf(format, args...)})
	}
	between := func(field string, value, most int) {
		if value < 0 || value > most {
			bad(field, "%d is outside of 0 to %d", value, most)
		}
	}
	switch s.Mode {
	case Failover:
		if s.Replicas != 1 {
			bad("replicas", "%d: failover mode has exactly 1 serving placement; use replicated mode for more", s.Replicas)
		}
	case Replicated:
		if s.Replicas < MinReplicas || s.Replicas > MaxReplicas {
			bad("replicas", "%d is outside of %d to %d; use failover mode for one serving placement", s.Replicas, MinReplicas, MaxReplicas)
		}
	default:
		bad("mode", "%q; use replicated or failover", s.Mode)
	}
	between("replacementGraceSeconds", s.ReplacementGraceSeconds, MaxSeconds)
	between("maxUnavailable", s.MaxUnavailable, MaxReplicas)
	between("maxSurge", s.MaxSurge, MaxReplicas)
	between("drainSeconds", s.DrainSeconds, MaxSeconds)
	switch s.Selection {
	case AllNodes:
		if len(s.Nodes) > 0 {
			bad("nodes", "nodes are listed, but nodeSelection is all; use selected")
		}
	case SelectedNodes:
		if len(s.Nodes) == 0 {
			bad("nodes", "nodeSelection is selected, but no node is listed")
		}
	default:
		bad("nodeSelection", "%q; use all or selected", s.Selection)
	}
	checkNodes("nodes", s.Nodes, bad)
	if s.PriorityMode && len(s.NodePriority) == 0 {
		bad("nodePriority", "priorityMode is on, but no node is listed; list node ids, the primary first")
	}
	checkNodes("nodePriority", s.NodePriority, bad)
	if s.Selection == SelectedNodes {
		for i, n := range s.NodePriority {
			if !slices.Contains(s.Nodes, n) {
				bad(fmt.Sprintf("nodePriority[%d]", i), "node %s is not among the selected nodes", n)
			}
		}
	}
	between("failbackDelaySeconds", s.FailbackDelaySeconds, MaxSeconds)
	if s.PartitionMode != Strict && s.PartitionMode != Available {
		bad("partitionMode", "%q; use strict or available", s.PartitionMode)
	}
	return wrong
}

func checkNodes(field string, nodes []string, bad func(field, format string, args ...any)) {
	seen := map[string]bool{}
	for i, n := range nodes {
		at := fmt.Sprintf("%s[%d]", field, i)
		if err := placement.CheckName(n); err != nil {
			bad(at, "%v", err)
		} else if seen[n] {
			bad(at, "node %s is listed twice", n)
		}
		seen[n] = true
	}
}
