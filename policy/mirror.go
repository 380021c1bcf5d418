package policy

import (
	"fmt"
	"slices"
	"strings"

	"github.com/opfield/availability/placement"
)

// platforms are those of the nodes that the workload may come to (IMG-2); nil,
// for every platform, while one of them has not told its own: what is not
// copied now is missing for as long as the version runs.
func (d *decision) platforms() []string {
	var all []string
	for id, n := range d.w.Nodes {
		arch := ArchOf(n.Facts.Arch)
		switch {
		case !d.doc.Settings.allows(id):
		case n.Facts.Arch == "":
			return nil
		case arch != "" && !slices.Contains(all, "linux/"+arch):
			all = append(all, "linux/"+arch)
		}
	}
	slices.Sort(all)
	return all
}

// image sees to it that the current version is in the internal registry.
func (d *decision) image() bool {
	v := d.doc.version(d.doc.Current)
	if v.Image.Digest != "" {
		return true
	}
	source := d.mirrorNode(v)
	for i := range d.doc.Placements {
		if p := &d.doc.Placements[i]; p.Mirror != "" && (source == nil || p.Node != source.Node) {
			p.Mirror = ""
		}
	}
	if source == nil {
		d.phase(PreparingImages, "waits for a node that has the image")
		d.hold(placement.CodeImageMirror, "no node that has the image, or could fetch it, is online")
		return false
	}
	op := d.active()
	if source.Mirror != v.Source {
		source.Mirror, source.Revision, source.For, source.Since = v.Source, 0, op.ID, d.now
		v.Platforms = d.platforms()
	}
	o := d.w.Observed[source.Node]
	d.phase(PreparingImages, "node %s pushes the image into the internal registry", source.Node)
	if !source.answers(o) {
		return false
	}
	if o.Mirrored != nil {
		v.Image, source.Mirror = *o.Mirrored, ""
		d.step(source.Node, "image %s is in the internal registry", v.Image.Digest)
		if v.Image.Narrowed != "" {
			d.step(source.Node, "it is for %s only: %s", strings.Join(v.archs(), ", "), v.Image.Narrowed)
		}
		return true
	}
	if o.Fault != nil && o.Fault.Code == placement.CodeImageMirror && o.Fault.Final {
		d.attemptFailed(source, Code(o.Fault.Code), o.Fault.Message)
		return d.active() != nil && d.image() // a rollout turned round goes on with the version before
	}
	if o.Fault != nil {
		d.phase(PreparingImages, "node %s: %s", source.Node, o.Fault.Message)
		if d.due(d.startLimit(source)) {
			d.pause(source, Code(o.Fault.Code), fmt.Sprintf("node %s: %s", source.Node, o.Fault.Message))
		}
	}
	return false
}

// mirrorNode is the node that pushes the image: the one that has it.
func (d *decision) mirrorNode(v *Version) *Placement {
	if p := d.doc.placementOn(v.SourceNode); p != nil && d.online(p.Node) {
		return p
	}
	if v.SourceNode != "" && d.w.Nodes[v.SourceNode].ID != "" && v.Generation == d.doc.Base+1 {
		return nil // only the origin is sure to have an image id
	}
	var best *Placement
	if p := d.doc.placementOn(d.doc.Original.Node); p != nil && !d.away(p.Node) && strings.HasPrefix(v.Source, "sha256:") {
		// The origin knows an id by its own builds, and other nodes do not: while
		// it is not reporting it is waited for.
		if !d.online(p.Node) {
			return nil
		}
		return p
	}
	for i := range d.doc.Placements {
		p := &d.doc.Placements[i]
		if d.online(p.Node) && p.Want != placement.WantAbsent && (best == nil || best.Want != placement.WantServing && p.Want == placement.WantServing) {
			best = p
		}
	}
	if best == nil { // nothing of the workload is left: any node may fetch the image
		if nodes := d.candidates(); len(nodes) > 0 {
			best = d.place(nodes[0])
			best.Generation = d.doc.Current
			d.put(best, placement.WantPrepared)
		}
	}
	return best
}
