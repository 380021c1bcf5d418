package policy

import (
	"fmt"
	"slices"
	"strings"

	"github.com/opfield/availability/placement"
)

// Show returns what people and programs see of a document.
func Show(d Document, w World) View {
	dec := &decision{w: w, doc: d, generated: generatedPrefix + d.Workload}
	v := View{
		Workload: d.Workload, Kind: d.Kind, Stopped: d.Stopped, Wanted: d.Settings.Replicas, Version: d.Current, Ports: d.Ports,
		Settings: d.Settings, Original: d.Original, CreatedAt: d.CreatedAt, Problem: d.Problem, Placements: []PlacementView{}, Warnings: []Notice{},
	}
	if cur := d.version(d.Current); cur != nil {
		v.Image = cur.Source
		if cur.Image.Digest != "" {
			v.Image += "@" + cur.Image.Digest
		}
	}
	for i := range d.Placements {
		p := &d.Placements[i]
		o := w.Observed[p.Node]
		pv := PlacementView{
			Node: p.Node, NodeState: w.Nodes[p.Node].State, Want: p.Want, Generation: p.Generation, Original: p.Original, Container: d.containerName(p),
			ID: o.Container, State: o.State, Ready: dec.ready(p), Reason: o.Reason, Streams: o.Streams, Suspended: p.Suspended,
			ImageReady: o.ImageReady, Fault: o.Fault, Outside: o.Outside, Since: p.Since,
		}
		if !dec.reachable(p.Node) {
			pv.Reason, pv.Streams = fmt.Sprintf("its node is %s", pv.NodeState), 0
		}
		if pv.Ready {
			v.Serving++
			v.ServingFrom = append(v.ServingFrom, p.Node)
		}
		v.Placements = append(v.Placements, pv)
	}
	slices.SortFunc(v.Placements, func(a, b PlacementView) int { return compare(a.Node, b.Node) })
	slices.SortFunc(v.ServingFrom, compare)
	if len(d.Operations) > 0 {
		op := d.Operations[0]
		v.Operation, v.Queued = &op, d.Operations[1:]
	}
	v.Health = health(d, v)
	v.priority(d, w)
	v.narrowed(d, w)
	return v
}

// narrowed tells of nodes that could take the workload if its image had the
// platforms that it may have where it came from (IMG-2).
func (v *View) narrowed(d Document, w World) {
	cur := d.version(d.Current)
	if cur == nil || cur.Image.Narrowed == "" {
		return
	}
	var others []string
	for id, n := range w.Nodes {
		arch := ArchOf(n.Facts.Arch)
		if _, runs := cur.runsOn(arch); arch != "" && !runs && d.Settings.allows(id) {
			others = append(others, id)
		}
	}
	if len(others) > 0 {
		slices.SortFunc(others, compare)
		v.Warnings = append(v.Warnings, Notice{CodeNodeArch, "nodes", fmt.Sprintf("%s cannot take it, the image is for %s only: %s",
			strings.Join(others, ", "), strings.Join(cur.archs(), ", "), cur.Image.Narrowed)})
	}
}

func health(d Document, v View) Health {
	switch {
	case d.Released:
		return CleanUp
	case d.Disabling:
		return Disabling
	case v.Operation != nil && v.Operation.Type == Disable:
		return Disabling
	case d.Stopped:
		return Stopped
	case v.Serving == 0:
		return Down
	case v.Serving < v.Wanted:
		return Degraded
	case v.Operation != nil:
		return Changing
	}
	return Healthy
}

// priority fills in where the workload should be and what keeps it away.
func (v *View) priority(d Document, w World) {
	s := d.Settings
	dec := &decision{w: w, doc: d, generated: generatedPrefix + d.Workload}
	if s.PriorityMode && len(s.NodePriority) > 0 {
		v.Primary = s.NodePriority[0]
		v.OnBackup = len(v.ServingFrom) > 0 && !slices.Contains(v.ServingFrom, v.Primary)
		if !s.CanFailBack() {
			v.Warnings = append(v.Warnings, Notice{CodeFailbackSurge, "maxSurge", "a failback needs maxSurge of at least 1; the workload stays on the backup"})
		}
	} else {
		v.ServingFrom = nil
	}
	if s.MaxUnavailable == 0 && !d.Released && !d.Stopped && (s.MaxSurge == 0 || len(dec.candidates()) == 0) {
		v.Warnings = append(v.Warnings, Notice{CodeRolloutCapacity, "maxUnavailable", "there is no room for a temporary placement: a rollout needs another node or maxUnavailable of at least 1"})
	}
	for _, p := range d.Placements {
		if p.Want == placement.WantPrepared && w.Observed[p.Node].Fault != nil {
			v.Warnings = append(v.Warnings, Notice{Code(w.Observed[p.Node].Fault.Code), "nodes", fmt.Sprintf("the standby on %s: %s", p.Node, w.Observed[p.Node].Fault.Message)})
		}
	}
}

// Grant chooses which of the operations that count against the limit may begin
// now (OPS-2): as many as are free, heals first, then in the order they were
// asked for.
func Grant(queue []Claimant, running, limit int) []string {
	slices.SortStableFunc(queue, func(a, b Claimant) int {
		if r := boolFirst(a.Type == Heal, b.Type == Heal); r != 0 {
			return r
		}
		if r := a.Since.Compare(b.Since); r != 0 {
			return r
		}
		return compare(a.Workload, b.Workload)
	})
	var out []string
	for _, c := range queue {
		if running+len(out) >= limit {
			break
		}
		out = append(out, c.Workload)
	}
	return out
}
