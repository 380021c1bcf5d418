package api

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/identity"
)

// WorkloadList is the answer of GET /v1/workloads: whatever could be made
// available, by node and name. (DSC-3)
type WorkloadList struct {
	Workloads []WorkloadView `json:"workloads"` // sorted by node, name and kind
	Warnings  []string       `json:"warnings"`  // what is missing or old
}

// WorkloadView is one container or Compose project of a node.
type WorkloadView struct {
	Node string `json:"node"`
	bus.InventoryEntry
}

func (f *Fleet) stock(i bus.Inventory) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inventory[i.Node] = i
}

func (s *Server) workloads(context.Context, *http.Request) (any, error) {
	return s.Fleet.workloadList(), nil
}

func (f *Fleet) workloadList() WorkloadList {
	list := WorkloadList{Workloads: []WorkloadView{}, Warnings: []string{}}
	nodes := f.nodeIDs()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, node := range nodes {
		inv, told := f.inventory[node]
		status := f.processes[identity.Name{Role: identity.RoleNode, ID: node}].status.Node
		switch state := f.verdicts[node].state; {
		case !told:
			list.Warnings = append(list.Warnings, fmt.Sprintf("node %s has not told its containers yet; it does within %s if it is online (it is %s)", node, bus.InventoryEvery, cmp.Or(state, Unseen)))
		case state != Online:
			list.Warnings = append(list.Warnings, fmt.Sprintf("node %s is %s: this is what it had at %s", node, cmp.Or(state, Unseen), inv.At.UTC().Format(time.RFC3339)))
		case status != nil && status.Docker != "ok":
			list.Warnings = append(list.Warnings, fmt.Sprintf("Docker on node %s does not answer, this is what it had: %s", node, status.Docker))
		}
		if inv.Omitted > 0 {
			list.Warnings = append(list.Warnings, fmt.Sprintf("node %s has %d more containers than it may list", node, inv.Omitted))
		}
		for _, e := range inv.Workloads {
			list.Workloads = append(list.Workloads, WorkloadView{Node: node, InventoryEntry: e})
		}
	}
	slices.SortStableFunc(list.Workloads, func(a, b WorkloadView) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Kind, b.Kind))
	})
	return list
}
