package api

import (
	"errors"
	"fmt"
	"time"

	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
	"github.com/opfield/availability/policy/engine"
)

// What the policy engine sees of the fleet.

var _ engine.Fleet = (*Fleet)(nil)

// follow notes since when nodes are healthy, and which of those that an
// operator confirmed as lost are heard again; mu is held.
func (f *Fleet) follow(now time.Time, nodes []string) {
	for _, node := range nodes {
		v := f.verdicts[node]
		s := f.processes[identity.Name{Role: identity.RoleNode, ID: node}]
		if v.state == Online {
			delete(f.confirmed, node)
		} else if _, ok := f.confirmed[node]; ok && v.state != Offline {
			f.verdicts[node] = verdict{Offline, "silent, and an operator confirmed that it is lost"}
		}
		switch ok := v.state == Online && s.status.Node != nil && s.status.Node.Docker == dockerOK; {
		case !ok:
			delete(f.healthy, node)
		case f.healthy[node].IsZero():
			f.healthy[node] = now
		}
	}
}

// dockerOK is what a node says of an engine that answers.
const dockerOK = "ok"

// PolicyNodes returns every node that joined, as the policy engine sees it.
func (f *Fleet) PolicyNodes() map[string]policy.Node {
	members := f.nodeIDs() // a node that was removed is gone before the next judgement
	f.mu.Lock()
	defer f.mu.Unlock()
	out := make(map[string]policy.Node, len(f.verdicts))
	for _, node := range members {
		v := f.verdicts[node] // none yet: not reporting
		n := policy.Node{ID: node, State: policy.NodeNotReporting, Healthy: f.healthy[node]}
		s, known := f.processes[identity.Name{Role: identity.RoleNode, ID: node}]
		switch v.state {
		case Online:
			n.State = policy.NodeOnline
			n.Relay = relayTrouble(s)
		case Offline:
			n.State = policy.NodeOffline
			if n.Lost = s.at; !known { // lost before this controller started
				n.Lost = f.since[node].Add(-silentAfter)
			}
			if at, ok := f.confirmed[node]; ok && n.Lost.IsZero() {
				n.Lost = at
			}
		}
		out[node] = n
	}
	return out
}

// relayTrouble says why a node reaches no relay, or "".
func relayTrouble(s seen) string {
	if s.status.Node == nil {
		return "it has not told which relays it reaches yet"
	}
	why := "no relay has joined"
	for _, r := range s.status.Node.Relays {
		if r.Connected {
			return ""
		}
		why = fmt.Sprintf("it reaches no relay: %s: %s", r.ID, r.Err)
	}
	return why
}

// Refused says of each node whose join token does not let it have the workload
// why it may not.
func (f *Fleet) Refused(workload string) map[string]string {
	var out map[string]string
	for _, m := range f.cfg.Members() {
		if m.Name.Role != identity.RoleNode || m.Revoked || m.Grant.Allows(workload) {
			continue
		}
		if out == nil {
			out = map[string]string{}
		}
		out[m.Name.ID] = fmt.Sprintf("its join token allows %s only", m.Grant)
	}
	return out
}

// IngressLinks returns the links of every ingress node that was heard within
// the time.
func (f *Fleet) IngressLinks(within time.Duration) [][]engine.LinkState {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out [][]engine.LinkState
	for name, s := range f.processes {
		if name.Role != identity.RoleIngress || s.status.Ingress == nil || time.Since(s.at) >= within {
			continue
		}
		links := make([]engine.LinkState, 0, len(s.status.Ingress.Links))
		for _, l := range s.status.Ingress.Links {
			if id, err := placement.ParseLinkID(l.Link); err == nil {
				links = append(links, engine.LinkState{Link: id, Open: l.State == linkOpen})
			}
		}
		out = append(out, links)
	}
	return out
}

// linkOpen is what an ingress node calls a link that leads to its placement.
const linkOpen = "open"

// ConfirmLost takes an operator's word that a silent node is lost (LOS-4). It
// holds until the node is heard again.
func (f *Fleet) ConfirmLost(node string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, known := f.verdicts[node]; !known {
		return errors.New("there is no node " + node)
	}
	f.confirmed[node] = time.Now()
	return nil
}

// Generation returns the largest generation of the workload in any health
// event that is known, those of removed placements included.
func (f *Fleet) Generation(workload string) uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	var most uint64
	for id, e := range f.placements {
		if id.Workload == workload {
			most = max(most, e.Generation)
		}
	}
	return most
}
