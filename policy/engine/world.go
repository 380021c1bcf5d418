package engine

import (
	"maps"
	"time"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

// nodeSettings are what operators decided about a node.
type nodeSettings struct {
	Drained bool   `json:"drained,omitempty"`
	Name    string `json:"name,omitempty"` // for people
}

// surroundings are what all policies share in one pass.
type surroundings struct {
	now     time.Time
	nodes   map[string]policy.Node
	taken   map[string][]share       // by workload
	running map[string]bool          // workloads whose operation has a slot
	links   map[string][][]LinkState // by workload: of each ingress node that knows it; nil: not asked for
}

// share is what one placement takes from its node beyond what the node's own
// figures show.
type share struct {
	node        string
	cpu, memory int64
}

// look puts together what is known of the nodes.
func (e *Engine) look(now time.Time, nodes map[string]policy.Node) *surroundings {
	e.mu.Lock()
	defer e.mu.Unlock()
	w := &surroundings{now: now, nodes: make(map[string]policy.Node, len(nodes)), taken: map[string][]share{}, running: map[string]bool{}}
	for id, n := range nodes {
		if r, ok := e.nodes[id]; ok {
			n.Known, n.Facts = true, r.Facts
		}
		n.Drained, n.Name = e.settings[id].Drained, e.settings[id].Name
		w.nodes[id] = n
	}
	for _, en := range e.policies {
		w.count(&en.doc, en.observed)
	}
	return w
}

// count takes over what a policy has and claims now.
func (w *surroundings) count(doc *policy.Document, observed map[string]placement.Observed) {
	for _, s := range w.taken[doc.Workload] {
		w.add(s, -1)
	}
	w.taken[doc.Workload] = w.taken[doc.Workload][:0]
	for _, p := range doc.Placements {
		if p.Want != placement.WantServing && p.Want != placement.WantDraining {
			continue
		}
		s := share{node: p.Node}
		if observed[p.Node].State != placement.StateRunning { // what runs is in the node's own figures
			for _, v := range doc.Versions {
				if v.Generation == p.Generation {
					s.cpu, s.memory = v.CPU, v.Memory
				}
			}
		}
		w.add(s, 1)
		w.taken[doc.Workload] = append(w.taken[doc.Workload], s)
	}
	if _, has, _ := doc.Claim(w.now); has {
		w.running[doc.Workload] = true
	} else {
		delete(w.running, doc.Workload)
	}
}

// free reports whether an operation that counts against the limit may begin.
func (w *surroundings) free() bool { return len(w.running) < policy.MaxLimited }

func (w *surroundings) add(s share, sign int64) {
	if n, known := w.nodes[s.node]; known {
		n.Placements += int(sign)
		n.PlannedCPU += sign * s.cpu
		n.PlannedMemory += sign * s.memory
		w.nodes[s.node] = n
	}
}

// world is the world of one policy; mu is held.
func (w *surroundings) world(e *Engine, en *entry) policy.World {
	name := en.doc.Workload
	others := len(w.running)
	if w.running[name] {
		others--
	}
	world := policy.World{Nodes: w.nodes, Observed: maps.Clone(en.observed), Timing: e.cfg.Timing, Slot: others < policy.MaxLimited}
	if refused := e.cfg.Fleet.Refused(name); len(refused) > 0 {
		world.Nodes = maps.Clone(w.nodes)
		for id, why := range refused {
			n := world.Nodes[id]
			n.Refused = why
			world.Nodes[id] = n
		}
	}
	if en.motion || len(en.doc.Operations) > 0 {
		world.LinksClosed, world.LinksOpen = w.linksOf(e, en)
	}
	return world
}

// linksOf says how the links of each placement are on the ingress nodes.
func (w *surroundings) linksOf(e *Engine, en *entry) (closed, open map[string]bool) {
	if w.links == nil {
		w.links = map[string][][]LinkState{}
		for _, ingress := range e.cfg.Fleet.IngressLinks(e.cfg.Timing.IngressSilence) {
			own := map[string][]LinkState{}
			for _, l := range ingress {
				own[l.Link.Placement.Workload] = append(own[l.Link.Placement.Workload], l)
			}
			for workload, links := range own {
				w.links[workload] = append(w.links[workload], links)
			}
		}
	}
	closed, open = map[string]bool{}, map[string]bool{}
	for _, p := range en.doc.Placements {
		closed[p.Node], open[p.Node] = true, true
	}
	for _, links := range w.links[en.doc.Workload] {
		leads := map[string]bool{}
		for _, l := range links {
			if l.Open {
				leads[l.Link.Placement.Node] = true
			}
		}
		for node := range closed {
			if leads[node] {
				closed[node] = false
			} else {
				open[node] = false
			}
		}
	}
	return closed, open
}
