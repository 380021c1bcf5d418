package placement

import (
	"errors"
	"fmt"
	"time"
)

// ErrInvalidEvent is the cause of every error about the content of an event.
var ErrInvalidEvent = errors.New("invalid placement event")

// Kind says what sort of workload a placement is a copy of.
type Kind string

// The kinds of workloads.
const (
	KindContainer  Kind = "container"
	KindDeployment Kind = "deployment"
	KindCompose    Kind = "compose"
)

// Role says what a placement is for. Only a serving placement takes traffic.
type Role string

// The roles of a placement.
const (
	RoleServing  Role = "serving"
	RoleStandby  Role = "standby"
	RoleDraining Role = "draining"
	RoleStopped  Role = "stopped"
)

// State says what was observed of a placement.
type State string

// The states of a placement. A removed placement is gone for good: its event
// is the last one of its subject.
const (
	StateRunning   State = "running"
	StateStarting  State = "starting"
	StateUnhealthy State = "unhealthy"
	StateStopped   State = "stopped"
	StateLost      State = "lost"
	StateRemoved   State = "removed"
)

// Protocol says what the application speaks on a port.
type Protocol string

// The protocols of a port.
const (
	ProtocolHTTP Protocol = "http"
	ProtocolGRPC Protocol = "grpc"
	ProtocolTCP  Protocol = "tcp"
)

// Port is one port of a placement.
type Port struct {
	Port     uint16   `json:"port"`
	Protocol Protocol `json:"protocol"`
}

// Sequence orders the events of one placement. Every start of the node agent
// raises the incarnation above the last one stored; the counter grows with
// every event of that incarnation.
type Sequence struct {
	Incarnation uint64 `json:"incarnation"`
	Counter     uint64 `json:"counter"`
}

// MaxPorts bounds the ports of one placement.
const MaxPorts = 64

// MaxReasonLength bounds the reason of an event in bytes.
const MaxReasonLength = 512

// Event is a placement health event: the whole present state of a placement
// as its node knows it. Events are level-triggered; losing one does no harm.
type Event struct {
	Workload   string    `json:"workload"`
	Placement  string    `json:"placement"` // "<workload>.<node>"
	Node       string    `json:"node"`
	Kind       Kind      `json:"kind"`
	Generation uint64    `json:"generation"` // of the workload's specification; 0 for discovered placements
	Epoch      uint64    `json:"epoch"`      // of the lease; 0 without one
	Role       Role      `json:"role"`
	Ready      bool      `json:"ready"`
	State      State     `json:"state"`
	Reason     string    `json:"reason,omitempty"` // for people; never parsed
	Ports      []Port    `json:"ports"`
	ObservedAt time.Time `json:"observedAt"` // for people; never compared
	Sequence   Sequence  `json:"sequence"`
}

// ID returns the placement the event is about.
func (e Event) ID() ID { return ID{Workload: e.Workload, Node: e.Node} }

// Serves reports whether the placement may take traffic by this event alone.
func (e Event) Serves() bool {
	return e.Ready && e.Role == RoleServing && e.State == StateRunning
}

// Check reports the first field that no event may have.
func (e Event) Check() error {
	if err := e.ID().Check(); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidEvent, err)
	}
	if e.Placement != e.ID().String() {
		return fmt.Errorf("%w: placement: want %q, the workload and node of the event", ErrInvalidEvent, e.ID())
	}
	switch e.Kind {
	case KindContainer, KindDeployment, KindCompose:
	default:
		return fmt.Errorf("%w: kind: want container, deployment or compose", ErrInvalidEvent)
	}
	switch e.Role {
	case RoleServing, RoleStandby, RoleDraining, RoleStopped:
	default:
		return fmt.Errorf("%w: role: want serving, standby, draining or stopped", ErrInvalidEvent)
	}
	switch e.State {
	case StateRunning, StateStarting, StateUnhealthy, StateStopped, StateLost, StateRemoved:
	default:
		return fmt.Errorf("%w: state: want running, starting, unhealthy, stopped, lost or removed", ErrInvalidEvent)
	}
	if len(e.Reason) > MaxReasonLength {
		return fmt.Errorf("%w: reason: %d bytes, at most %d are allowed", ErrInvalidEvent, len(e.Reason), MaxReasonLength)
	}
	if len(e.Ports) > MaxPorts {
		return fmt.Errorf("%w: ports: %d ports, at most %d are allowed", ErrInvalidEvent, len(e.Ports), MaxPorts)
	}
	for i, p := range e.Ports {
		if p.Port == 0 {
			return fmt.Errorf("%w: ports[%d].port: want 1 to 65535", ErrInvalidEvent, i)
		}
		switch p.Protocol {
		case ProtocolHTTP, ProtocolGRPC, ProtocolTCP:
		default:
			return fmt.Errorf("%w: ports[%d].protocol: want http, grpc or tcp", ErrInvalidEvent, i)
		}
	}
	return nil
}
