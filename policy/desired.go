package policy

import (
	"slices"

	"github.com/opfield/availability/placement"
)

// generatedPrefix begins the name of a copy that is not the original.
const generatedPrefix = "opfield-"

// containerName returns the name of the copy on a node.
func (d *Document) containerName(p *Placement) string {
	if p.Original || p.Want == placement.WantReleased {
		return d.Original.Container
	}
	return generatedPrefix + d.Workload
}

// version returns a version by its generation, or nil.
func (d *Document) version(generation uint64) *Version {
	for i := range d.Versions {
		if d.Versions[i].Generation == generation {
			return &d.Versions[i]
		}
	}
	return nil
}

// placementOn returns the placement on a node, or nil.
func (d *Document) placementOn(node string) *Placement {
	for i := range d.Placements {
		if d.Placements[i].Node == node {
			return &d.Placements[i]
		}
	}
	return nil
}

// Desired returns what the document wants of each of its nodes.
func (d *Document) Desired() map[string]placement.Desired {
	out := make(map[string]placement.Desired, len(d.Placements))
	for i := range d.Placements {
		out[d.Placements[i].Node] = d.desired(&d.Placements[i])
	}
	return out
}

func (d *Document) desired(p *Placement) placement.Desired {
	want := placement.Desired{
		Workload: d.Workload, Node: p.Node, Kind: d.Kind, Revision: p.Revision, Generation: p.Generation, Want: p.Want,
		Original: p.Original, Adopt: p.Adopt, AdoptedAt: p.AdoptedAt, Container: d.containerName(p), Ports: d.Ports,
		Restarts: p.Restarts, DrainSeconds: d.Settings.DrainSeconds,
	}
	if v := d.version(p.Generation); v != nil {
		want.Image, want.Spec = v.Image, v.Spec
	}
	if p.Mirror != "" {
		want.Mirror = &placement.Mirror{Repository: d.Workload, Source: p.Mirror}
		if v := d.version(d.Current); v != nil {
			want.Mirror.Platforms = v.Platforms
		}
	}
	if v := d.version(d.Current); v != nil && v.Generation != p.Generation && v.Image.Digest != "" && (p.Want == placement.WantServing || p.Want == placement.WantDraining) {
		image := v.Image
		want.Prefetch = &image
	}
	if p.Want == placement.WantReleased {
		want.Retired, want.RestartPolicy = p.Original && d.survivor() != p.Node, d.Original.RestartPolicy
	}
	return want
}

// survivor is the node of the surviving placement of a disable, or "".
func (d *Document) survivor() string {
	for _, list := range [2][]Operation{d.Operations, d.History} {
		for i := range list {
			if op := &list[i]; op.Type == Disable && op.Status != Cancelled {
				return op.Survivor
			}
		}
	}
	return ""
}

// Members returns the placements that count in routing; false while the
// workload is still routed as before it got its policy (ENA-6).
func (d *Document) Members() (placement.Members, bool) {
	out := placement.Members{Workload: d.Workload, Placements: []placement.Member{}}
	if !d.Routed {
		return out, false
	}
	for _, p := range d.Placements {
		switch p.Want {
		case placement.WantServing:
			out.Placements = append(out.Placements, placement.Member{Node: p.Node, Generation: p.Generation, Closed: p.Suspended})
		case placement.WantDraining:
			out.Placements = append(out.Placements, placement.Member{Node: p.Node, Generation: p.Generation, Closed: true})
		case placement.WantReleased:
			if p.Node == d.survivor() {
				out.Placements = append(out.Placements, placement.Member{Node: p.Node, Generation: p.Generation})
			}
		}
	}
	slices.SortFunc(out.Placements, func(a, b placement.Member) int { return compare(a.Node, b.Node) })
	if len(d.Operations) > 0 && d.Operations[0].Status == Running {
		switch d.Operations[0].Type {
		case Rollout, Failback, Restart:
			out.Moving = true
		}
	}
	return out, true
}

// Digests returns every image digest that must stay in the internal registry
// (IMG-4): of the current generation, of those that still run, and of the one
// that a rollback would return to.
func (d *Document) Digests() []string {
	var out []string
	for _, v := range d.Versions {
		if v.Image.Digest != "" && !slices.Contains(out, v.Image.Digest) {
			out = append(out, v.Image.Digest)
		}
	}
	return out
}

func compare(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}
