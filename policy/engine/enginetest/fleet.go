package enginetest

import (
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/opfield/availability/policy"
	"github.com/opfield/availability/policy/engine"
)

var _ engine.Fleet = (*Fleet)(nil)

// Fleet is an engine.Fleet whose liveness the test sets.
type Fleet struct {
	mu        sync.Mutex
	nodes     map[string]policy.Node
	refused   map[string]map[string]string // by workload and node
	links     [][]engine.LinkState
	confirmed []string
	events    func(workload string) uint64 // largest generation in health events
}

// PolicyNodes returns every node.
func (f *Fleet) PolicyNodes() map[string]policy.Node {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.nodes)
}

// Refused returns what Refuse set.
func (f *Fleet) Refused(workload string) map[string]string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.refused[workload]
}

// Refuse keeps a workload away from a node.
func (f *Fleet) Refuse(workload, node, why string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refused[workload] = map[string]string{node: why}
}

// IngressLinks returns what SetLinks set.
func (f *Fleet) IngressLinks(time.Duration) [][]engine.LinkState {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.links
}

// SetLinks sets the links of every ingress node.
func (f *Fleet) SetLinks(links [][]engine.LinkState) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.links = links
}

// Generation returns the largest generation of the workload that a node
// announced.
func (f *Fleet) Generation(workload string) uint64 { return f.events(workload) }

// ConfirmLost makes a silent node lost.
func (f *Fleet) ConfirmLost(node string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, known := f.nodes[node]
	if !known {
		return fmt.Errorf("there is no node %s", node)
	}
	n.State, n.Lost, n.Healthy = policy.NodeOffline, time.Now(), time.Time{}
	f.nodes[node] = n
	f.confirmed = append(f.confirmed, node)
	return nil
}

// Set sets the liveness of a node; the times follow.
func (f *Fleet) Set(node string, state policy.NodeState) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := policy.Node{ID: node, State: state}
	switch state {
	case policy.NodeOnline:
		n.Healthy = time.Now()
	case policy.NodeOffline:
		n.Lost = time.Now()
	}
	f.nodes[node] = n
}

// Remove takes a node out, as after a revocation.
func (f *Fleet) Remove(node string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.nodes, node)
}
