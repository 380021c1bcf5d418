package api

import (
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

// EnableOrder is the body of POST /v1/availability and of its check, and a
// file of `opfield ha enable -f`.
type EnableOrder struct {
	Workload  string         `json:"workload" yaml:"workload" doc:"Name that the workload has or gets."`
	Node      string         `json:"node" yaml:"node" doc:"Node on which the container runs."`
	Container string         `json:"container" yaml:"container" doc:"Name or id of the container there."`
	Ports     []PortOrder    `json:"ports,omitempty" yaml:"ports" nullable:"false" doc:"Ports that routes may lead to; default: those of the container's label."`
	Settings  SettingsChange `json:"settings,omitempty" yaml:"settings"`
}

// PortOrder is a port of the container.
type PortOrder struct {
	Port     uint16             `json:"port" yaml:"port"`
	Protocol placement.Protocol `json:"protocol,omitempty" yaml:"protocol" doc:"What is spoken there: http (default), grpc or tcp."`
}

// DisableOrder is the body of POST /v1/availability/{workload}/disable.
type DisableOrder struct {
	Survivor string `json:"survivor,omitempty" doc:"Node of the placement that is kept."`
	Confirm  string `json:"confirm,omitempty" doc:"The workload's name."`
}

// SettingsChange are the settings that somebody names. Those that are absent
// get their default, or in a change keep their value. What is allowed is
// decided by package policy alone.
type SettingsChange struct {
	Mode                    *policy.Mode      `json:"mode,omitempty" yaml:"mode" doc:"replicated: several copies serve; failover: one serves and is replaced after the loss of its node."`
	Replicas                *int              `json:"replicas,omitempty" yaml:"replicas" doc:"Serving placements: 1 in failover mode, 2 to 32 in replicated mode."`
	ReplacementGraceSeconds *int              `json:"replacementGraceSeconds,omitempty" yaml:"replacementGraceSeconds" doc:"From the loss of a node to the start of a replacement."`
	MaxUnavailable          *int              `json:"maxUnavailable,omitempty" yaml:"maxUnavailable" doc:"Placements that a planned update may make unavailable at the same time."`
	MaxSurge                *int              `json:"maxSurge,omitempty" yaml:"maxSurge" doc:"Temporary placements above the wanted number."`
	DrainSeconds            *int              `json:"drainSeconds,omitempty" yaml:"drainSeconds" doc:"From the end of new connections to the stop of a copy."`
	Selection               *policy.Selection `json:"nodeSelection,omitempty" yaml:"nodeSelection" doc:"all: every compatible node; selected: those of nodes."`
	Nodes                   *[]string         `json:"nodes,omitempty" yaml:"nodes" nullable:"false" doc:"Selected nodes."`
	PriorityMode            *bool             `json:"priorityMode,omitempty" yaml:"priorityMode" doc:"Prefer nodes in the order of nodePriority."`
	NodePriority            *[]string         `json:"nodePriority,omitempty" yaml:"nodePriority" nullable:"false" doc:"Node ids, the primary first."`
	FailbackDelaySeconds    *int              `json:"failbackDelaySeconds,omitempty" yaml:"failbackDelaySeconds" doc:"How long a preferred node must be healthy before the workload returns to it."`
	PartitionMode           *policy.Partition `json:"partitionMode,omitempty" yaml:"partitionMode" doc:"strict: never two copies of a failover workload; available: both sides of a split may serve."`
}

// settings returns whole settings with defaults of the mode.
func (c SettingsChange) settings() policy.Settings {
	var mode policy.Mode
	if c.Mode != nil {
		mode = *c.Mode
	}
	return c.over(policy.DefaultSettings(mode))
}

// over returns base with what is given. Two values follow others that do not
// fit them any more: the number of copies a new mode, the list of nodes a
// selection of all.
func (c SettingsChange) over(base policy.Settings) policy.Settings {
	if c.Mode != nil && *c.Mode != base.Mode {
		base.Replicas = policy.DefaultSettings(*c.Mode).Replicas
	}
	if c.Selection != nil && *c.Selection == policy.AllNodes {
		base.Nodes = nil
	}
	set(&base.Mode, c.Mode)
	set(&base.Replicas, c.Replicas)
	set(&base.ReplacementGraceSeconds, c.ReplacementGraceSeconds)
	set(&base.MaxUnavailable, c.MaxUnavailable)
	set(&base.MaxSurge, c.MaxSurge)
	set(&base.DrainSeconds, c.DrainSeconds)
	set(&base.Selection, c.Selection)
	set(&base.Nodes, c.Nodes)
	set(&base.PriorityMode, c.PriorityMode)
	set(&base.NodePriority, c.NodePriority)
	set(&base.FailbackDelaySeconds, c.FailbackDelaySeconds)
	set(&base.PartitionMode, c.PartitionMode)
	return base
}

func set[T any](field *T, value *T) {
	if value != nil {
		*field = *value
	}
}

// request returns what the engine is asked for.
func (o EnableOrder) request() (policy.EnableRequest, error) {
	req := policy.EnableRequest{Workload: o.Workload, Node: o.Node, Container: o.Container, Settings: o.Settings.settings()}
	for _, p := range o.Ports {
		if p.Protocol == "" {
			p.Protocol = placement.ProtocolHTTP
		}
		req.Ports = append(req.Ports, placement.Port(p))
	}
	return req, valid(req.Settings)
}

// valid refuses settings with everything that is wrong with them. (SET-3)
func valid(s policy.Settings) error {
	if wrong := s.Validate(); len(wrong) > 0 {
		return &policy.Refusal{Code: policy.CodeSettings, Violations: wrong}
	}
	return nil
}
