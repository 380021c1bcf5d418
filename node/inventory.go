package node

import (
	"cmp"
	"encoding/json"
	"net/netip"
	"slices"

	"github.com/docker/docker/api/types/container"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/node/discovery"
	"github.com/opfield/availability/node/docker"
	"github.com/opfield/availability/placement"
)

// What one node tells about its containers stays below the 1 MiB that a NATS
// server takes by default. Nothing of a container's environment, command or
// other labels leaves the node.
const (
	maxListed      = 500
	maxListedBytes = 768 << 10
	maxListedText  = 256
	maxListedPorts = 32
)

// Inventory returns every container of the node, announced or not; false
// until the engine has listed them.
func (a *Agent) Inventory() (bus.Inventory, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.listed, a.complete
}

// takeStock follows a reconcile: it says which containers are announced.
func (a *Agent) takeStock(s docker.Snapshot, managed map[string]discovery.Managed) {
	owned := map[string]string{}
	for workload, m := range managed {
		owned[m.Container] = workload
	}
	all := inventory(s.Listed, func(l docker.Listed) string {
		workload, ours := owned[l.ID]
		if !ours {
			spec, err := discovery.ParseLabels(l.Labels)
			if _, other := managed[spec.Workload]; err != nil || other {
				return ""
			}
			workload = spec.Workload
		}
		if e, known := a.announced[workload]; !known || e.State == placement.StateRemoved {
			return ""
		}
		return workload
	})
	a.mu.Lock()
	defer a.mu.Unlock()
	a.listed, a.complete = all, s.Complete
}

// listedContainer is a container with what decides where it is shown.
type listedContainer struct {
	bus.InventoryContainer
	project string
}

// inventory groups containers by Compose project, within the bounds. What is
// announced, then what runs, is the last to be left out.
func inventory(found []docker.Listed, announced func(docker.Listed) string) bus.Inventory {
	all := make([]listedContainer, 0, len(found))
	for _, l := range found {
		all = append(all, listedContainer{describe(l, announced), clip(l.Labels[discovery.LabelComposeProject])})
	}
	rank := func(c listedContainer) int {
		switch {
		case c.Workload != "":
			return 0
		case c.State == container.StateRunning:
			return 1
		default:
			return 2
		}
	}
	slices.SortStableFunc(all, func(a, b listedContainer) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.Name, b.Name))
	})
	bytes := 0
	keep := len(all)
	for i, c := range all {
		text, err := json.Marshal(c)
		// Alone in its project, a container costs its project's name and frame too.
		if bytes += len(text) + 2*len(c.project) + 200; err != nil || i == maxListed || bytes > maxListedBytes {
			keep = i
			break
		}
	}
	inv := bus.Inventory{Workloads: []bus.InventoryEntry{}, Omitted: len(all) - keep}
	projects := map[string]int{}
	for _, c := range all[:keep] {
		if c.project == "" {
			inv.Workloads = append(inv.Workloads, bus.InventoryEntry{Name: c.Name, Kind: placement.KindContainer, Containers: []bus.InventoryContainer{c.InventoryContainer}})
			continue
		}
		at, known := projects[c.project]
		if !known {
			at = len(inv.Workloads)
			projects[c.project] = at
			inv.Workloads = append(inv.Workloads, bus.InventoryEntry{Name: c.project, Kind: placement.KindCompose})
		}
		inv.Workloads[at].Containers = append(inv.Workloads[at].Containers, c.InventoryContainer)
	}
	for _, e := range inv.Workloads {
		slices.SortFunc(e.Containers, func(a, b bus.InventoryContainer) int {
			return cmp.Or(cmp.Compare(a.Service, b.Service), cmp.Compare(a.Name, b.Name))
		})
	}
	slices.SortFunc(inv.Workloads, func(a, b bus.InventoryEntry) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Kind, b.Kind))
	})
	return inv
}

func describe(l docker.Listed, announced func(docker.Listed) string) bus.InventoryContainer {
	c := bus.InventoryContainer{
		Name: clip(l.Name), Service: clip(l.Labels[discovery.LabelComposeService]), Image: clip(l.Image),
		State: clip(l.State), Health: l.Health, Ports: []bus.InventoryPort{}, Workload: announced(l),
	}
	for _, p := range l.Ports {
		if len(c.Ports) == maxListedPorts {
			break
		}
		port := bus.InventoryPort{Port: p.PrivatePort, Transport: clip(p.Type)}
		if addr, err := netip.ParseAddr(p.IP); p.PublicPort != 0 {
			if err != nil {
				addr = netip.IPv4Unspecified() // an engine that does not say
			}
			port.Published = netip.AddrPortFrom(addr, p.PublicPort)
		}
		c.Ports = append(c.Ports, port)
	}
	return c
}

func clip(text string) string {
	if len(text) > maxListedText {
		return text[:maxListedText]
	}
	return text
}
