// Package discovery turns what is known of a node's containers into the
// placements that the node announces.
//
// It is pure: no I/O, no clock, no goroutines; the same containers in any
// order give the same placements. It does not number the events: the sequence
// and the time of observation are the caller's.
package discovery

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/opfield/availability/placement"
)

// Status is what the engine says a container does.
type Status int

// The states of a container. The zero value is unknown and counts as stopped.
const (
	Unknown Status = iota
	Running
	Paused
	Restarting
	Stopped
)

// Health is the result of the image's health check.
type Health int

// The results of a health check.
const (
	NoCheck   Health = iota // the image has none
	Checking                // no result since the container or its engine started
	Healthy                 // the last result is good
	Unhealthy               // the last results are bad
)

// PortState is what probing a port showed.
type PortState int

// The states of a port.
const (
	PortUnknown PortState = iota // not probed yet
	PortOpening                  // did not accept a connection yet
	PortOpen                     // accepts connections
	PortClosed                   // accepted once, and does not any more
)

// Container is what is known of one container.
type Container struct {
	ID     string
	Name   string
	Labels map[string]string
	Status Status
	Health Health
	Addr   netip.Addr // where its ports are reached from the node; may be invalid
	// Stopping says that it was asked to end; it stays true after it ended,
	// until it is started again.
	Stopping bool
	// Suspect is the reason why the engine's answer is not trusted at the
	// moment; empty if it is.
	Suspect string
	Ports   map[uint16]PortState
}

// Managed is what is known of a workload that is carried out on the node: only
// one container of it counts, whatever the labels say.
type Managed struct {
	Container  string // id; empty: there is none
	Looked     bool   // Container was found out, not only not known yet
	Kind       placement.Kind
	Generation uint64
	Epoch      uint64
	Role       placement.Role // empty: what its state says
	Ports      []placement.Port
	Kept       bool   // it is announced without a container, too
	Note       string // what is being repaired, for people
}

// Placement is one placement and where its ports lead.
type Placement struct {
	// Event is the present state, without sequence and time.
	Event placement.Event
	// Targets are the addresses that may take a connection, by port.
	Targets map[uint16][]netip.AddrPort
}

// member is a container with its labels understood.
type member struct {
	Container
	spec  Spec
	state placement.State
	why   string
	ready bool
}

// Fold returns the placements of the node, sorted by workload, and what is
// wrong with containers that are left out, sorted. managed is by workload; one
// that was not looked at yet is left out.
func Fold(node string, containers []Container, managed map[string]Managed) ([]Placement, []string) {
	var warnings []string
	groups := map[string][]member{}
	byID := map[string]string{}
	for workload, m := range managed {
		if m.Looked && m.Container != "" {
			byID[m.Container] = workload
		}
		if m.Looked && m.Kept {
			groups[workload] = nil
		}
	}
	for _, c := range containers {
		if workload, ok := byID[c.ID]; ok {
			m := member{Container: c, spec: Spec{Workload: workload, Ports: managed[workload].Ports}}
			m.state, m.why = c.state(m.spec)
			m.ready = m.state == placement.StateRunning
			groups[workload] = []member{m}
			continue
		}
		if _, ok := managed[c.Labels[LabelWorkload]]; ok {
			continue
		}
		if _, ok := c.Labels[LabelWorkload]; !ok {
			continue
		}
		spec, err := ParseLabels(c.Labels)
		if err != nil {
			warnings = append(warnings, fmt.Sprintf("container %s is not announced: %v", c.Name, err))
			continue
		}
		m := member{Container: c, spec: spec}
		m.state, m.why = c.state(spec)
		m.ready = m.state == placement.StateRunning
		groups[spec.Workload] = append(groups[spec.Workload], m)
	}
	var found []Placement
	for _, workload := range slices.Sorted(maps.Keys(groups)) {
		id := placement.ID{Workload: workload, Node: node}
		m, known := managed[workload]
		if known && len(groups[workload]) == 0 {
			found = append(found, empty(id, m))
			continue
		}
		p, warning := fold(id, groups[workload])
		if known {
			p.Event = m.over(p.Event)
		}
		found = append(found, p)
		if warning != "" {
			warnings = append(warnings, warning)
		}
	}
	slices.Sort(warnings)
	return found, warnings
}

// empty is a managed placement without a container.
func empty(id placement.ID, m Managed) Placement {
	e := placement.Event{
		Workload: id.Workload, Node: id.Node, Placement: id.String(), Kind: m.Kind, Role: m.Role, State: placement.StateStopped,
		Reason: "it has no container", Ports: m.Ports,
	}
	if m.Role == "" {
		e.Role = placement.RoleStopped
	}
	return Placement{Event: m.over(e), Targets: map[uint16][]netip.AddrPort{}}
}

// over writes what is managed over what the containers alone say.
func (m Managed) over(e placement.Event) placement.Event {
	e.Kind, e.Generation, e.Epoch = m.Kind, m.Generation, m.Epoch
	if m.Role != "" && (m.Role != placement.RoleServing || e.Role == placement.RoleStandby) {
		e.Role = m.Role
	}
	if m.Note != "" && !e.Ready {
		e.Reason = limit(strings.Trim(e.Reason+"; "+m.Note, "; "))
	}
	return e
}

// fold makes one placement of all containers of a workload on the node.
func fold(id placement.ID, members []member) (Placement, string) {
	slices.SortFunc(members, func(a, b member) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	// A standby beside a serving container takes no part.
	role := placement.RoleServing
	serving := slices.DeleteFunc(slices.Clone(members), func(m member) bool { return m.spec.Standby })
	if len(serving) > 0 {
		members = serving
	} else {
		role = placement.RoleStandby
	}
	// Containers that ended count only if nothing else is there.
	alive := slices.DeleteFunc(slices.Clone(members), func(m member) bool { return m.state == placement.StateStopped })
	stay := slices.DeleteFunc(slices.Clone(alive), func(m member) bool { return m.Stopping })
	switch {
	case len(stay) > 0:
		members = stay
	case len(alive) > 0:
		members, role = alive, placement.RoleDraining
	case !slices.ContainsFunc(members, func(m member) bool { return !m.Stopping }):
		role = placement.RoleStopped
	}

	p := Placement{Targets: map[uint16][]netip.AddrPort{}}
	ports := map[uint16]placement.Protocol{}
	owner := map[uint16]string{}
	var warning string
	for _, m := range members {
		for _, port := range m.spec.Ports {
			if before, ok := ports[port.Port]; ok && before != port.Protocol && warning == "" {
				warning = fmt.Sprintf("workload %s: port %d is %s in container %s but %s in %s; the first counts",
					id.Workload, port.Port, before, owner[port.Port], port.Protocol, m.Name)
			} else if !ok {
				ports[port.Port], owner[port.Port] = port.Protocol, m.Name
			}
			if m.ready && role != placement.RoleStandby {
				p.Targets[port.Port] = append(p.Targets[port.Port], netip.AddrPortFrom(m.Addr, port.Port))
			}
		}
	}
	e := placement.Event{
		Workload: id.Workload, Node: id.Node, Placement: id.String(), Kind: placement.KindContainer, Role: role,
		State: placement.StateStopped,
	}
	for _, port := range slices.Sorted(maps.Keys(ports)) {
		e.Ports = append(e.Ports, placement.Port{Port: port, Protocol: ports[port]})
	}
	if len(e.Ports) > placement.MaxPorts {
		warning = fmt.Sprintf("workload %s: %d ports, at most %d are announced", id.Workload, len(e.Ports), placement.MaxPorts)
		e.Ports = e.Ports[:placement.MaxPorts]
	}
	if members[0].Labels[LabelComposeProject] != "" {
		e.Kind = placement.KindCompose
	}
	if members[0].Labels[LabelPlacement] == id.String() {
		// Ours, and nothing more is known of it: its events still go on in order.
		e.Generation, _ = strconv.ParseUint(members[0].Labels[LabelGeneration], 10, 64)
	}
	e.Ready, e.State, e.Reason = sum(members, e.Ports)
	p.Event = e
	return p, warning
}

// sum is the state of the members together: ready if every port has a ready
// member, otherwise the state that is nearest to it, with its reason.
func sum(members []member, ports []placement.Port) (ready bool, state placement.State, why string) {
	ready = true
	for _, port := range ports {
		if !slices.ContainsFunc(members, func(m member) bool { return m.ready && m.spec.has(port.Port) }) {
			ready = false
		}
	}
	if ready {
		return true, placement.StateRunning, ""
	}
	for _, want := range []placement.State{placement.StateStarting, placement.StateUnhealthy, placement.StateStopped} {
		for _, m := range members {
			if m.state == want {
				return false, want, limit(fmt.Sprintf("container %s: %s", m.Name, m.why))
			}
		}
	}
	return false, placement.StateUnhealthy, "not every port has a ready container"
}

// state is what the container alone would be announced as.
func (c Container) state(spec Spec) (placement.State, string) {
	switch c.Status {
	case Running:
	case Paused:
		return placement.StateUnhealthy, "it is paused"
	case Restarting:
		return placement.StateStarting, "it is being restarted"
	default:
		return placement.StateStopped, "it does not run"
	}
	if c.Suspect != "" {
		return placement.StateUnhealthy, c.Suspect
	}
	if !c.Addr.IsValid() {
		return placement.StateStarting, "it has no network address yet"
	}
	switch c.Health {
	case Checking:
		return placement.StateStarting, "its health check has no result yet"
	case Unhealthy:
		return placement.StateUnhealthy, "its health check fails"
	}
	for _, port := range spec.Ports {
		switch state := c.Ports[port.Port]; {
		case state == PortClosed:
			return placement.StateUnhealthy, fmt.Sprintf("port %d does not accept connections any more", port.Port)
		case state != PortOpen && c.Health == NoCheck:
			// With a health check that is good, the port is only looked at
			// after a connection to it failed.
			return placement.StateStarting, fmt.Sprintf("port %d does not accept connections yet", port.Port)
		}
	}
	return placement.StateRunning, ""
}

func limit(reason string) string {
	if len(reason) > placement.MaxReasonLength {
		return strings.ToValidUTF8(reason[:placement.MaxReasonLength], "")
	}
	return reason
}
