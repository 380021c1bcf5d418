package policy_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

// tick is how often the scripted world looks at itself.
const tick = time.Second

// What a healthy node needs for one thing.
const (
	pullTakes  = 3 * time.Second
	doTakes    = time.Second
	readyTakes = 2 * time.Second
)

// scripted is a small cluster that does exactly what a script says: every
// node carries out what is desired in fixed times.
type scripted struct {
	t        testing.TB
	now      time.Time
	start    time.Time
	names    []string
	nodes    map[string]*host
	doc      policy.Document
	exists   bool
	observed map[string]placement.Observed
	alive    bool
	slot     bool
	registry bool
	ingress  bool
	next     time.Time
	broken   map[string]bool // contents that do not become ready
	failing  map[string]bool // images that cannot be had
	versions []string        // contents, in the order they were asked for
	out      strings.Builder
	lines    map[string]string // last line of each operation
	fewest   int               // that served at the same time, since the last mark
	most     int               // that ran
	created  int
	restarts int
	// beforeStore says whether a decision is lost because the controller is
	// killed; afterStore is called when one was stored, and nothing sent yet.
	beforeStore func() bool
	afterStore  func()
	workload    string
}

// host is a Docker node.
type host struct {
	w         *scripted
	id        string
	arch      string
	up        bool // it has a network
	nats      bool
	hang      bool
	mute      bool // it takes nothing in and does not say so
	memory    int64
	lost      time.Time
	healthy   time.Time
	drained   bool
	noPull    map[string]bool
	images    map[string]bool
	desired   placement.Desired
	known     bool
	exists    bool
	running   bool
	sick      bool
	looping   bool
	gen       uint64
	content   string
	restarts  uint64
	streams   int
	readyAt   time.Time
	busyUntil time.Time
	action    func()
	mirrored  *placement.Image
	mirrorOf  string
	fault     *placement.Fault
	released  bool
	platforms []string
	tampered  uint64 // how often somebody stopped the container by hand
}

func newScripted(t testing.TB, nodes int) *scripted {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	w := &scripted{
		t: t, now: start, start: start, nodes: map[string]*host{}, observed: map[string]placement.Observed{}, alive: true, slot: true, registry: true,
		ingress: true, workload: "web", versions: []string{"1"}, broken: map[string]bool{}, failing: map[string]bool{}, lines: map[string]string{}, fewest: 99,
	}
	for i := range nodes {
		w.addNode(fmt.Sprintf("node-%d", i+1))
	}
	return w
}

func (w *scripted) addNode(id string) *host {
	h := &host{w: w, id: id, arch: "amd64", up: true, nats: true, memory: 8 << 30, healthy: w.now, images: map[string]bool{}, noPull: map[string]bool{}, platforms: []string{"linux/amd64"}}
	w.nodes[id] = h
	w.names = append(w.names, id)
	slices.Sort(w.names)
	return h
}

func (w *scripted) say(format string, args ...any) {
	fmt.Fprintf(&w.out, "%8s  %s\n", w.now.Sub(w.start), fmt.Sprintf(format, args...))
}

func (h *host) reachable() bool { return h.up && h.nats }

func (w *scripted) world() policy.World {
	out := policy.World{
		Nodes: map[string]policy.Node{}, Observed: maps.Clone(w.observed), LinksClosed: map[string]bool{}, LinksOpen: map[string]bool{}, Slot: w.slot,
		Timing: policy.DefaultTiming(),
	}
	for _, id := range w.names {
		h := w.nodes[id]
		n := policy.Node{ID: id, State: policy.NodeOnline, Known: true, Drained: h.drained, Facts: placement.NodeFacts{
			Arch: h.arch, OS: "linux", Docker: "20.10", CPU: 8000, Memory: h.memory,
		}}
		switch {
		case !h.up && w.now.Sub(h.lost) >= 5*time.Second:
			n.State, n.Lost = policy.NodeOffline, h.lost
		case !h.reachable():
			n.State = policy.NodeNotReporting
		default:
			n.Healthy = h.healthy
			if h.hang {
				n.Facts.Error = "its Docker daemon does not answer"
			}
			if !w.registry {
				n.Facts.Registry = "the internal registry does not answer"
			}
		}
		out.Nodes[id] = n
		out.LinksClosed[id], out.LinksOpen[id] = w.ingress, w.ingress
	}
	return out
}

// advance lets the time pass.
func (w *scripted) advance(d time.Duration) {
	for end := w.now.Add(d); w.now.Before(end); {
		w.now = w.now.Add(tick)
		w.round()
	}
}

// round lets every node act and report, and the controller decide.
func (w *scripted) round() {
	news := false
	for _, id := range w.names {
		h := w.nodes[id]
		h.act()
		if !w.alive || !h.reachable() || !h.known || !w.exists || h.mute {
			continue
		}
		if o := h.observe(); !sameSight(o, w.observed[id]) {
			w.observed[id], news = o, true
		}
	}
	w.count()
	if w.alive && w.exists && (news || !w.next.IsZero() && !w.now.Before(w.next) || w.awaitsLiveness()) {
		w.decide()
	}
}

// awaitsLiveness: what the controller knows of nodes changes by itself.
func (w *scripted) awaitsLiveness() bool {
	for _, h := range w.nodes {
		if !h.up && w.now.Sub(h.lost) == 5*time.Second {
			return true
		}
	}
	return false
}

func sameSight(a, b placement.Observed) bool {
	return reflect.DeepEqual(a, b)
}

// count keeps how many served and ran at the same time.
func (w *scripted) count() {
	serving, running := 0, 0
	for _, h := range w.nodes {
		if h.exists && h.running {
			running++
		}
		if h.serves() {
			serving++
		}
	}
	w.fewest, w.most = min(w.fewest, serving), max(w.most, running)
}

func (w *scripted) mark() { w.fewest, w.most, w.created, w.restarts = 99, 0, 0, 0; w.count() }

// decide lets the controller decide once, store, and tell the nodes.
func (w *scripted) decide() {
	world := w.world()
	before := encode(w.doc)
	plan := policy.Decide(w.now, w.doc, world)
	if encode(w.doc) != before {
		w.t.Errorf("%s: a decision changed the document that it was given", w.now.Sub(w.start))
	}
	w.next = plan.Next
	if plan.Changed && w.beforeStore != nil && w.beforeStore() {
		w.restartController()
		return
	}
	for _, e := range plan.Events {
		w.say("%s", strings.TrimSpace(fmt.Sprintf("%s %s", e.Operation, e.Text)))
	}
	if plan.Changed {
		w.doc = plan.Document
		for _, op := range w.doc.Operations {
			line := fmt.Sprintf("%s %s, %s", op.Type, op.Status, op.Phase)
			if w.lines[op.ID] != line {
				w.lines[op.ID] = line
				w.say("%s %s", op.ID, line)
			}
		}
	}
	if plan.Over {
		w.exists = false
		w.say("the policy is given up")
		return
	}
	if plan.Changed && w.afterStore != nil {
		w.afterStore()
	}
	w.deliver()
}

// deliver sends what is desired to every node that can hear it.
func (w *scripted) deliver() {
	if !w.alive {
		return
	}
	for id, d := range w.doc.Desired() {
		if err := d.Check(); err != nil {
			w.t.Errorf("%s: desired of %s: %v", w.now.Sub(w.start), id, err)
		}
		if h := w.nodes[id]; h != nil && h.reachable() && !h.mute && (!h.known || d.Revision > h.desired.Revision) {
			h.desired, h.known, h.action, h.fault = d, true, nil, nil
		}
	}
}

// restartController forgets what a controller has not stored.
func (w *scripted) restartController() {
	w.observed = map[string]placement.Observed{}
	for _, h := range w.nodes {
		h.healthy = w.now // PRI-3
	}
	w.decide()
}

func encode(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(text)
}

func (h *host) serves() bool {
	return h.up && h.ready() && (!h.known || h.desired.Want == placement.WantServing || h.desired.Want == placement.WantReleased)
}

func (h *host) ready() bool {
	return h.exists && h.running && !h.sick && !h.w.broken[h.content] && !h.w.now.Before(h.readyAt)
}

// act begins or ends one thing.
func (h *host) act() {
	for range 20 {
		if h.hang || !h.known {
			return
		}
		if h.action != nil {
			if h.w.now.Before(h.busyUntil) {
				return
			}
			do := h.action
			h.action = nil
			do()
		}
		takes, do := h.todo()
		if do == nil {
			return
		}
		h.action, h.busyUntil = do, h.w.now.Add(takes)
	}
}

// pull returns how an image comes to the node, nil if it is there or cannot.
func (h *host) pull(image placement.Image) (time.Duration, func()) {
	if image.Digest == "" || h.images[image.Digest] {
		return 0, nil
	}
	if h.noPull[image.Digest] || h.w.failing[image.Digest] {
		h.fault = &placement.Fault{Code: placement.CodeImagePull, Message: "the image " + image.Digest + " cannot be pulled", Final: true}
		return 0, nil
	}
	if !h.w.registry || !h.reachable() {
		h.fault = &placement.Fault{Code: placement.CodeRegistryAway, Message: "the internal registry does not answer"}
		return 0, nil
	}
	h.fault = nil
	return pullTakes, func() { h.images[image.Digest] = true }
}

// todo is the next thing that the node has to do.
func (h *host) todo() (time.Duration, func()) {
	d := h.desired
	if h.fault != nil && h.fault.Final {
		return 0, nil
	}
	if d.Mirror != nil && h.mirrorOf != d.Mirror.Source {
		if h.w.failing[d.Mirror.Source] {
			h.fault = &placement.Fault{Code: placement.CodeImageMirror, Message: "image " + d.Mirror.Source + " cannot be pulled", Final: true}
			return 0, nil
		}
		if h.w.registry && h.reachable() {
			h.fault = nil
			return pullTakes, func() {
				h.mirrorOf = d.Mirror.Source
				h.mirrored = &placement.Image{Repository: d.Workload, Digest: "sha256:" + strings.TrimPrefix(d.Mirror.Source, "sha256:"), Platforms: h.platforms}
				h.images[h.mirrored.Digest] = true
			}
		}
		h.fault = &placement.Fault{Code: placement.CodeRegistryAway, Message: "the internal registry does not answer"}
	}
	stop := func() { h.running = false }
	switch d.Want {
	case placement.WantServing:
		if !h.exists || h.gen != d.Generation {
			if takes, do := h.pull(d.Image); do != nil {
				return takes, do
			}
			if !h.images[d.Image.Digest] {
				return 0, nil
			}
			return doTakes, func() {
				h.exists, h.running, h.gen, h.content, h.restarts = true, true, d.Generation, h.w.contentOf(d.Generation), d.Restarts
				h.readyAt = h.w.now.Add(readyTakes)
				h.w.created++
			}
		}
		if h.restarts < d.Restarts || !h.running {
			return doTakes, func() {
				if h.running {
					h.w.restarts++
				}
				h.restarts, h.running, h.readyAt = d.Restarts, true, h.w.now.Add(readyTakes)
			}
		}
		if d.Prefetch != nil {
			return h.pull(*d.Prefetch)
		}
	case placement.WantDraining:
		if d.Prefetch != nil {
			return h.pull(*d.Prefetch)
		}
	case placement.WantStopped:
		if h.exists && h.running {
			return doTakes, stop
		}
	case placement.WantPrepared, placement.WantAbsent:
		if h.exists && h.running {
			return doTakes, stop
		}
		if h.exists && !d.Original {
			return doTakes, func() { h.exists, h.gen, h.content = false, 0, "" }
		}
		if d.Want == placement.WantPrepared {
			return h.pull(d.Image)
		}
	case placement.WantReleased:
		if !h.released {
			return doTakes, func() { h.released = true }
		}
	}
	return 0, nil
}

func (w *scripted) contentOf(generation uint64) string {
	for _, v := range w.doc.Versions {
		if v.Generation == generation {
			return v.Content
		}
	}
	return ""
}

// observe is what the agent says.
func (h *host) observe() placement.Observed {
	d := h.desired
	takes, _ := h.todo()
	o := placement.Observed{
		Workload: d.Workload, Node: h.id, Revision: d.Revision, Generation: h.gen, Restarts: h.restarts, State: placement.StateRemoved,
		ImageReady: d.Image.Digest != "" && h.images[d.Image.Digest] || d.Image.Digest == "" && h.exists, Ready: h.ready(), Looping: h.looping && h.running,
		PrefetchReady: d.Prefetch != nil && h.images[d.Prefetch.Digest], Fault: h.fault, Done: takes == 0 && h.action == nil && h.fault == nil,
	}
	if h.tampered > 0 {
		o.Outside, o.OutsideNumber = "the container was stopped", h.tampered
	}
	if d.Mirror != nil && h.mirrorOf == d.Mirror.Source {
		o.Mirrored = h.mirrored
	}
	switch {
	case !h.exists:
	case !h.running:
		o.State = placement.StateStopped
	case o.Ready:
		o.State = placement.StateRunning
	case h.sick || h.w.broken[h.content]:
		o.State, o.Reason = placement.StateUnhealthy, "its health check fails"
	default:
		o.State = placement.StateStarting
	}
	switch d.Want {
	case placement.WantServing, placement.WantReleased:
		o.Role = placement.RoleServing
	case placement.WantDraining:
		o.Role, o.Streams = placement.RoleDraining, h.streams
	case placement.WantPrepared:
		o.Role = placement.RoleStandby
	default:
		o.Role = placement.RoleStopped
	}
	if h.hang {
		o.Fault, o.Done = &placement.Fault{Code: placement.CodeDaemonBusy, Message: "Docker does not answer"}, false
	}
	return o
}
