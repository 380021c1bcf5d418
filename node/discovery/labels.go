package discovery

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/opfield/availability/placement"
)

// The labels of a container that is announced.
const (
	LabelWorkload = "opfield.workload" // name of the workload
	LabelPort     = "opfield.port"     // "8080" or "8080,9000=tcp"
	LabelRole     = "opfield.role"     // "serving" (default) or "standby"
	LabelProtocol = "opfield.protocol" // "http" (default), "grpc", "tcp", or "8080=grpc,9000=tcp"

	// Of the containers that we create ourselves.
	LabelPlacement  = "opfield.placement"  // "<workload>.<node>"
	LabelGeneration = "opfield.generation" // of the workload's specification

	LabelComposeProject = "com.docker.compose.project"
	LabelComposeService = "com.docker.compose.service"
)

// Spec is what the labels of a container say.
type Spec struct {
	Workload string
	Standby  bool
	Ports    []placement.Port // sorted, at least one
}

func (s Spec) has(port uint16) bool {
	return slices.ContainsFunc(s.Ports, func(p placement.Port) bool { return p.Port == port })
}

// ParseLabels understands the labels of a container, or says which one is
// wrong and what it should be.
func ParseLabels(labels map[string]string) (Spec, error) {
	s := Spec{Workload: strings.TrimSpace(labels[LabelWorkload])}
	if err := placement.CheckName(s.Workload); err != nil {
		return Spec{}, fmt.Errorf("label %s: %w", LabelWorkload, err)
	}
	switch role := strings.TrimSpace(labels[LabelRole]); role {
	case "", string(placement.RoleServing):
	case string(placement.RoleStandby):
		s.Standby = true
	default:
		return Spec{}, fmt.Errorf("label %s: %q; use serving or standby", LabelRole, clip(role))
	}
	fallback, byPort, err := parseProtocols(labels[LabelProtocol])
	if err != nil {
		return Spec{}, err
	}
	seen := map[uint16]placement.Protocol{}
	for item := range strings.SplitSeq(labels[LabelPort], ",") {
		text, name, named := strings.Cut(strings.TrimSpace(item), "=")
		port, err := parsePort(text)
		if err != nil {
			return Spec{}, fmt.Errorf("label %s: %w", LabelPort, err)
		}
		protocol := fallback
		if p, ok := byPort[port]; ok {
			protocol = p
		}
		if named {
			if protocol, err = parseProtocol(name); err != nil {
				return Spec{}, fmt.Errorf("label %s: %w", LabelPort, err)
			}
		}
		if before, ok := seen[port]; ok {
			if before != protocol {
				return Spec{}, fmt.Errorf("label %s: port %d is named twice, as %s and %s", LabelPort, port, before, protocol)
			}
			continue
		}
		seen[port] = protocol
		s.Ports = append(s.Ports, placement.Port{Port: port, Protocol: protocol})
	}
	for _, port := range slices.Sorted(maps.Keys(byPort)) {
		if _, ok := seen[port]; !ok {
			return Spec{}, fmt.Errorf("label %s: port %d is not in %s", LabelProtocol, port, LabelPort)
		}
	}
	if len(s.Ports) > placement.MaxPorts {
		return Spec{}, fmt.Errorf("label %s: %d ports, at most %d are allowed", LabelPort, len(s.Ports), placement.MaxPorts)
	}
	slices.SortFunc(s.Ports, func(a, b placement.Port) int { return int(a.Port) - int(b.Port) })
	return s, nil
}

// parseProtocols understands one protocol for all ports, or one for each.
func parseProtocols(text string) (fallback placement.Protocol, byPort map[uint16]placement.Protocol, err error) {
	fallback, byPort = placement.ProtocolHTTP, map[uint16]placement.Protocol{}
	if strings.TrimSpace(text) == "" {
		return fallback, byPort, nil
	}
	for item := range strings.SplitSeq(text, ",") {
		item = strings.TrimSpace(item)
		port, name, named := strings.Cut(item, "=")
		if !named {
			name = item
		}
		p, err := parseProtocol(name)
		if err != nil {
			return "", nil, fmt.Errorf("label %s: %w", LabelProtocol, err)
		}
		if !named {
			fallback = p
			continue
		}
		number, err := parsePort(port)
		if err != nil {
			return "", nil, fmt.Errorf("label %s: %w", LabelProtocol, err)
		}
		byPort[number] = p
	}
	return fallback, byPort, nil
}

func parseProtocol(text string) (placement.Protocol, error) {
	switch p := placement.Protocol(strings.TrimSpace(text)); p {
	case placement.ProtocolHTTP, placement.ProtocolGRPC, placement.ProtocolTCP:
		return p, nil
	}
	return "", fmt.Errorf("protocol %q; use http, grpc or tcp", clip(text))
}

func parsePort(text string) (uint16, error) {
	n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("port %q; use 1 to 65535, several with commas", clip(text))
	}
	return uint16(n), nil
}

// clip keeps a hostile label from filling a status.
func clip(text string) string {
	if len(text) > 60 {
		return text[:60] + "…"
	}
	return text
}
