package policy

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/opfield/availability/placement"
)

// Subject is what a preflight looks at: the captured container and the fleet.
type Subject struct {
	Captured placement.Captured
	Nodes    map[string]Node
	// Exists: the workload has a policy already.
	Exists bool
}

// Preflight says whether the container may become available with these
// settings, and why not (ELG). It changes nothing.
func Preflight(req EnableRequest, s Subject) Eligibility {
	c := s.Captured
	e := Eligibility{Workload: req.Workload, Settings: req.Settings, Ports: req.Ports, Blockers: []Notice{}, Warnings: []Notice{}, Nodes: []NodeReason{}}
	block := func(code Code, field, format string, args ...any) {
		e.Blockers = append(e.Blockers, Notice{code, field, fmt.Sprintf(format, args...)})
	}
	if len(e.Ports) == 0 {
		e.Ports = c.Ports
	}
	if e.Workload == "" {
		e.Workload = c.Workload
	}
	if err := placement.CheckName(e.Workload); err != nil {
		block(CodeWorkloadName, "workload", "%v", err)
	} else if c.Workload != "" && c.Workload != e.Workload {
		block(CodeWorkloadName, "workload", "the container's label opfield.workload says %q; use that name, because its routes do", c.Workload)
	}
	if s.Exists {
		block(CodeExists, "workload", "workload %s has a policy already; `opfield ha get %s` shows it", e.Workload, e.Workload)
	}
	if c.Owned != "" {
		block(CodePlacementManaged, "container", "the container is the placement %s of a policy; it is changed through that", c.Owned)
	}
	if c.Compose != "" {
		block(CodeKind, "container", "the container is part of the Compose project %s; only standalone containers can be made available yet", c.Compose)
	}
	if len(e.Ports) == 0 {
		block(CodePorts, "ports", "the container has no label opfield.port; give its port with --port")
	}
	if !c.Running {
		block(CodeOriginNotRunning, "container", "container %s does not run; start it first, so that its settings are proven", c.Name)
	}
	for _, m := range c.Mounts {
		block(CodeMounts, "mounts", "%s: local data is never copied to another node; keep it in a service of its own", describeMount(m))
	}
	for _, why := range c.Unsupported {
		block(CodeUnsupported, "container", "%s", why)
	}
	for _, v := range req.Settings.Validate() {
		block(v.Code, v.Field, "%s", v.Message)
	}
	e.judgeNodes(req, s, block)
	e.warn(req.Settings)
	return e
}

func describeMount(m placement.Mount) string {
	text := m.Type
	if m.Source != "" {
		text += " " + m.Source
	}
	text += " at " + m.Destination
	if m.ReadOnly {
		text += " (read-only)"
	}
	return text + ", by its " + m.From
}

// judgeNodes fills in every node with its reason and blocks if too few can.
func (e *Eligibility) judgeNodes(req EnableRequest, s Subject, block func(Code, string, string, ...any)) {
	v := versionOf(s.Captured)
	ids := make([]string, 0, len(s.Nodes))
	for id := range s.Nodes {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, compare)
	eligible := 0
	origin := NodeReason{Node: req.Node}
	for _, id := range ids {
		n := s.Nodes[id]
		r := NodeReason{Node: id, Origin: id == req.Node, Selected: req.Settings.allows(id), FreeCPU: n.freeCPU(), FreeMemory: n.freeMemory()}
		c := claim{workload: e.Workload, container: generatedPrefix + e.Workload, version: &v}
		if r.Origin { // it runs there already: nothing more is needed from the node
			c.container, c.haveImage, c.version = s.Captured.Name, false, &Version{Arch: v.Arch}
			n.Facts.Containers = slices.DeleteFunc(slices.Clone(n.Facts.Containers), func(t placement.TakenName) bool { return t.Name == s.Captured.Name })
		}
		if r.Reason = n.refusal(&c); r.Reason == "" && !r.Selected {
			r.Reason = CodeNodeNotSelected
		}
		r.Message = n.explain(r.Reason, &c)
		if r.Eligible = r.Reason == ""; r.Eligible {
			eligible++
		}
		if r.Origin {
			origin = r
		}
		e.Nodes = append(e.Nodes, r)
	}
	if _, known := s.Nodes[req.Node]; !known {
		block(CodeNodeUnknown, "node", "there is no node %s; see `opfield nodes list`", req.Node)
	}
	for i, list := range [][]string{req.Settings.Nodes, req.Settings.NodePriority} {
		for _, id := range list {
			if _, known := s.Nodes[id]; !known {
				block(CodeNodeUnknown, []string{"nodes", "nodePriority"}[i], "there is no node %s; see `opfield nodes list`", id)
			}
		}
	}
	if _, known := s.Nodes[req.Node]; known {
		switch {
		case !req.Settings.allows(req.Node):
			block(CodeOriginNotSelected, "nodes", "the workload runs on %s, which is not among the selected nodes; select it too", req.Node)
		case !origin.Eligible:
			block(CodeOriginNotEligible, "node", "node %s, where the workload runs: %s", req.Node, origin.Message)
		}
	}
	if need := max(2, req.Settings.Replicas); eligible < need {
		block(CodeInsufficientNodes, "nodes", "%d nodes can take the workload, %d are needed; `nodes` has the reason of each", eligible, need)
	}
}

// warn adds what works, and not as well as it could.
func (e *Eligibility) warn(s Settings) {
	eligible := 0
	for _, r := range e.Nodes {
		if r.Eligible {
			eligible++
		}
	}
	if s.MaxSurge == 0 && s.MaxUnavailable == 0 || eligible <= s.Replicas && s.MaxUnavailable == 0 {
		e.Warnings = append(e.Warnings, Notice{CodeRolloutCapacity, "maxUnavailable", "there is no room for a temporary placement: a rollout needs another node or maxUnavailable of at least 1"})
	}
	if s.PriorityMode && !s.CanFailBack() {
		e.Warnings = append(e.Warnings, Notice{CodeFailbackSurge, "maxSurge", "a failback needs maxSurge of at least 1 so that a placement serves throughout; the workload stays on the backup"})
	}
}

// versionOf is the first version of a captured container.
func versionOf(c placement.Captured) Version {
	return Version{
		Source: c.ImageID, SourceNode: c.Node, Arch: c.Arch, Spec: c.Spec,
		Image: placement.Image{Platforms: c.Platforms}, // until it is mirrored
		CPU:   c.CPU, Memory: c.Memory, Published: c.Published,
	}
}

// NewDocument returns the document of a workload that passed its preflight.
// The running container is its first placement, as it runs (ENA-1, ENA-2).
// Base is the largest generation and revision that was ever in use for the
// workload, so that nothing of before is newer than this policy.
func NewDocument(now time.Time, e Eligibility, c placement.Captured, base uint64) Document {
	v := versionOf(c)
	first := base + 1
	v.Generation, v.Content, v.CreatedAt = first, fmt.Sprint(first), now
	doc := Document{
		Workload: e.Workload, Kind: c.Kind, Ports: e.Ports, CreatedAt: now, Settings: e.Settings,
		Original: Original{Node: c.Node, Container: strings.TrimPrefix(c.Name, "/"), ID: c.ID, RestartPolicy: c.RestartPolicy},
		Base:     base, Counter: base + 2, Current: first, Versions: []Version{v},
		Placements: []Placement{{
			Node: c.Node, Want: placement.WantServing, Generation: first, Revision: base + 2, Asked: base + 2, Original: true, Adopt: c.ID, AdoptedAt: first, Since: now,
		}},
	}
	doc.add(now, Enable, "requested")
	return doc
}
