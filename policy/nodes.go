package policy

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/opfield/availability/placement"
)

// Why a node cannot take a placement (ELG-3).
const (
	CodeNodeOffline     Code = "NODE_OFFLINE"
	CodeNodeError       Code = "NODE_ERROR"
	CodeNodeDrained     Code = "NODE_DRAINED"
	CodeNodeArch        Code = "NODE_ARCHITECTURE_INCOMPATIBLE"
	CodeNodeArchUnknown Code = "NODE_ARCHITECTURE_UNKNOWN"
	CodeNodeCapacity    Code = "NODE_CAPACITY"
	CodeNodePort        Code = "NODE_PORT_TAKEN"
	CodeNodeName        Code = "NODE_NAME_TAKEN"
	CodeNodeRelay       Code = "NODE_RELAY_UNREACHABLE"
	CodeNodeRegistry    Code = "NODE_REGISTRY_UNREACHABLE"
	CodeNodeNotSelected Code = "NODE_NOT_SELECTED"
	CodeNodeGrant       Code = "NODE_NOT_ALLOWED"
)

// ArchOf returns Go's name of a processor architecture, whatever Docker, the
// kernel or an image calls it; empty if it is unknown.
func ArchOf(name string) string {
	name, _, _ = strings.Cut(strings.ToLower(strings.TrimSpace(name)), "/")
	switch name {
	case "amd64", "x86_64", "x86-64":
		return "amd64"
	case "arm64", "aarch64":
		return "arm64"
	case "arm", "armhf", "armv7", "armv7l", "armv6l", "armel":
		return "arm"
	case "386", "i386", "i486", "i586", "i686", "x86":
		return "386"
	case "ppc64le", "powerpc64le":
		return "ppc64le"
	case "s390x", "riscv64", "loong64", "mips64le", "ppc64":
		return name
	case "loongarch64":
		return "loong64"
	}
	return ""
}

// allows reports whether the settings let a node have placements.
func (s Settings) allows(node string) bool {
	return s.Selection != SelectedNodes || slices.Contains(s.Nodes, node)
}

// claim is what a copy needs from a node.
type claim struct {
	workload  string
	container string // name on the node
	version   *Version
	haveImage bool // the node has the image: the registry is not needed
}

// refusal says why the node cannot take the claim, or "".
func (n *Node) refusal(c *claim) Code {
	v := c.version
	switch {
	case n.State != NodeOnline:
		return CodeNodeOffline
	case !n.Known || n.Facts.Error != "" || n.Facts.Docker == "":
		return CodeNodeError
	case n.Drained:
		return CodeNodeDrained
	case n.Refused != "":
		return CodeNodeGrant
	}
	have := ArchOf(n.Facts.Arch)
	if have == "" {
		return CodeNodeArchUnknown
	}
	if some, runs := v.runsOn(have); !some {
		return CodeNodeArchUnknown
	} else if !runs {
		return CodeNodeArch
	}
	if v.Memory > n.freeMemory() || v.CPU > n.freeCPU() {
		return CodeNodeCapacity
	}
	if code, _, _ := n.taken(c); code != "" {
		return code
	}
	if n.Relay != "" {
		return CodeNodeRelay
	}
	if n.Facts.Registry != "" && !c.haveImage {
		return CodeNodeRegistry
	}
	return ""
}

// taken returns the container that has the name or a port of the claim.
func (n *Node) taken(c *claim) (Code, *placement.TakenName, placement.PublishedPort) {
	for i := range n.Facts.Containers {
		taken := &n.Facts.Containers[i]
		if taken.Workload == c.workload {
			continue
		}
		if taken.Name == c.container {
			return CodeNodeName, taken, placement.PublishedPort{}
		}
		for _, has := range taken.Published {
			for _, want := range c.version.Published {
				if taken.Running && overlap(has, want) {
					return CodeNodePort, taken, want
				}
			}
		}
	}
	return "", nil, placement.PublishedPort{}
}

// explain says a refusal in words.
func (n *Node) explain(code Code, c *claim) string {
	v := c.version
	switch code {
	case CodeNodeOffline:
		return "it is " + cmp.Or(string(n.State), "unseen")
	case CodeNodeError:
		if !n.Known {
			return "it has not told what it has yet"
		}
		return cmp.Or(n.Facts.Error, "its Docker daemon does not answer")
	case CodeNodeDrained:
		return "an operator drained it; `opfield nodes undrain` ends that"
	case CodeNodeNotSelected:
		return "it is not among the selected nodes"
	case CodeNodeGrant:
		return n.Refused
	case CodeNodeArchUnknown:
		if ArchOf(n.Facts.Arch) == "" {
			return fmt.Sprintf("its architecture %q is not known", n.Facts.Arch)
		}
		return fmt.Sprintf("the architecture %q of the image is not known", v.Arch)
	case CodeNodeArch:
		text := fmt.Sprintf("it is %s, the image is for %s", ArchOf(n.Facts.Arch), strings.Join(v.archs(), ", "))
		if v.Image.Narrowed != "" {
			text += " only: " + v.Image.Narrowed
		} else if v.Image.Digest != "" {
			text += "; if it exists for others too, `opfield ha rollout --image` fetches it for them"
		}
		return text
	case CodeNodeCapacity:
		if v.Memory > n.freeMemory() {
			return fmt.Sprintf("%d MiB of memory are free, %d MiB are needed", max(0, n.freeMemory())>>20, v.Memory>>20)
		}
		return fmt.Sprintf("%v CPUs are free, %v are needed", float64(max(0, n.freeCPU()))/1000, float64(v.CPU)/1000)
	case CodeNodeName:
		_, taken, _ := n.taken(c)
		return fmt.Sprintf("container %s exists there and is not of this workload", taken.Name)
	case CodeNodePort:
		_, taken, port := n.taken(c)
		return fmt.Sprintf("port %d/%s is published by container %s", port.Port, port.Transport, taken.Name)
	case CodeNodeRelay:
		return n.Relay
	case CodeNodeRegistry:
		return n.Facts.Registry
	}
	return ""
}

func overlap(a, b placement.PublishedPort) bool {
	any := func(addr string) bool { return addr == "" || addr == "0.0.0.0" || addr == "::" }
	return a.Port != 0 && a.Port == b.Port && a.Transport == b.Transport && (any(a.Address) || any(b.Address) || a.Address == b.Address)
}

func (n Node) freeMemory() int64 { return n.Facts.Memory - n.Facts.ReservedMemory - n.PlannedMemory }
func (n Node) freeCPU() int64    { return n.Facts.CPU - n.Facts.ReservedCPU - n.PlannedCPU }

// archs returns the architectures that the version runs on.
func (v *Version) archs() []string {
	var out []string
	for _, p := range v.Image.Platforms {
		if a := linuxArch(p); a != "" && !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	if a := ArchOf(v.Arch); len(out) == 0 && a != "" {
		out = append(out, a)
	}
	return out
}

// runsOn reports whether any architecture of the version is known, and whether
// the given one is among them.
func (v *Version) runsOn(arch string) (known, runs bool) {
	for _, p := range v.Image.Platforms {
		if a := linuxArch(p); a != "" {
			known, runs = true, runs || a == arch
		}
	}
	if a := ArchOf(v.Arch); !known && a != "" {
		return true, a == arch
	}
	return known, runs
}

func linuxArch(platform string) string {
	os, arch, _ := strings.Cut(platform, "/")
	if os != "linux" {
		return ""
	}
	return ArchOf(arch)
}

// roundedFree makes nearly equal nodes equal, so that ties are by placements.
const roundedFree = 64 << 20

// preference orders the nodes that could take a placement: with priority mode
// by its order, otherwise prepared standbys first, then the most free
// capacity, fewer placements, and the id (PRI-1, LOS-1, ELG-5).
func (d *decision) preference(a, b string) int {
	na, nb := d.w.Nodes[a], d.w.Nodes[b]
	if r := boolFirst(!d.avoided(a), !d.avoided(b)); r != 0 {
		return r
	}
	if d.doc.Settings.PriorityMode {
		if r := cmp.Compare(d.rank(a), d.rank(b)); r != 0 {
			return r
		}
	}
	if r := boolFirst(d.prepared(a), d.prepared(b)); r != 0 {
		return r
	}
	return cmp.Or(
		-cmp.Compare(na.freeMemory()/roundedFree, nb.freeMemory()/roundedFree),
		-cmp.Compare(na.freeCPU(), nb.freeCPU()),
		cmp.Compare(na.Placements, nb.Placements),
		cmp.Compare(na.Standbys, nb.Standbys),
		cmp.Compare(a, b),
	)
}

func boolFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// rank is the place of a node in the order of priority; those not listed come
// last.
func (d *decision) rank(node string) int {
	if i := slices.Index(d.doc.Settings.NodePriority, node); i >= 0 {
		return i
	}
	return len(d.doc.Settings.NodePriority)
}

func (d *decision) avoided(node string) bool {
	op := d.active()
	return op != nil && slices.Contains(op.Avoid, node)
}

func (d *decision) prepared(node string) bool {
	p := d.doc.placementOn(node)
	return p != nil && p.Want == placement.WantPrepared && d.w.Observed[node].ImageReady
}

// candidates returns the nodes that could take a new copy now, best first.
func (d *decision) candidates() []string {
	v := d.doc.version(d.doc.Current)
	var out []string
	for id := range d.w.Nodes {
		if p := d.doc.placementOn(id); p != nil && (p.Want == placement.WantServing || p.Want == placement.WantDraining || p.Want == placement.WantStopped && !p.Original) {
			continue
		}
		if d.nodeRefusal(id, v) == "" {
			out = append(out, id)
		}
	}
	slices.SortFunc(out, d.preference)
	return out
}

// claimOn is what a new copy of the version needs from a node.
func (d *decision) claimOn(id string, v *Version) claim {
	p := d.doc.placementOn(id)
	name := d.generated
	if p != nil && p.Original {
		name = d.doc.Original.Container
	}
	have := false
	if p != nil {
		o := d.w.Observed[id]
		have = p.answers(o) && (o.ImageReady && p.Generation == v.Generation || o.PrefetchReady)
	}
	return claim{workload: d.doc.Workload, container: name, version: v, haveImage: have}
}

// nodeRefusal says why a node cannot take a new copy, or "".
func (d *decision) nodeRefusal(id string, v *Version) Code {
	if !d.doc.Settings.allows(id) {
		return CodeNodeNotSelected
	}
	n, c := d.w.Nodes[id], d.claimOn(id, v)
	return n.refusal(&c)
}

// lostAt returns when the node counts as lost for replacement (LOS-1).
func (d *decision) lostAt(n Node) time.Time {
	grace := time.Duration(d.doc.Settings.ReplacementGraceSeconds) * time.Second
	return n.Lost.Add(max(grace, d.w.Timing.OfflineAfter))
}
