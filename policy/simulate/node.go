package simulate

import (
	"time"

	"github.com/opfield/availability/placement"
)

// node is a Docker host with its agent. It carries out what is desired as the
// real one does: level-triggered, one action after another for each placement,
// from its last known state when the controller is away.
type node struct {
	s         *run
	id        string
	up        bool // the host runs
	cut       bool // no network
	natsCut   bool // no NATS only: relays still hold its session
	hang      bool // its Docker daemon does not answer
	lostAt    time.Time
	healthy   time.Time // since when the controller sees it healthy
	drained   bool
	life      int // counts starts of the host: older actions are void
	memory    int64
	copies    map[string]*replica
	late      bool            // what it says arrives seconds late
	confirmed bool            // an operator said that it is lost
	noPull    map[string]bool // digests that cannot be pulled there
	told      time.Time       // when what it said last arrives
}

// replica is what a node has of one workload.
type replica struct {
	n        *node
	workload string
	desired  placement.Desired
	known    bool
	images   map[string]bool
	exists   bool
	original bool
	gen      uint64
	running  bool
	sick     bool      // unhealthy by a fault
	readyAt  time.Time // of the present start
	startAt  time.Time
	restarts uint64
	acting   bool
	mirrored *placement.Image
	mirrorOf string
	created  map[uint64]int // containers created, by generation
	released bool
	hang     bool // Docker does not answer for this container
}

func (n *node) reachable() bool { return n.up && !n.cut && !n.natsCut && n.s.controllerLinked }

func (n *node) replica(workload string) *replica {
	r := n.copies[workload]
	if r == nil {
		r = &replica{n: n, workload: workload, images: map[string]bool{}, created: map[uint64]int{}}
		n.copies[workload] = r
	}
	return r
}

// replicas returns what the node has, in a fixed order.
func (n *node) replicas() []*replica {
	var out []*replica
	for _, w := range n.s.policies {
		if r := n.copies[w.name]; r != nil {
			out = append(out, r)
		}
	}
	return out
}

// receive takes a record, unless a newer one is there.
func (r *replica) receive(d placement.Desired) {
	if r.known && d.Revision <= r.desired.Revision {
		return
	}
	r.desired, r.known = d, true
	r.work()
}

// ready reports whether the copy answers now.
func (r *replica) ready() bool {
	return r.exists && r.running && !r.sick && !r.n.s.broken(r.workload, r.gen) && !r.n.s.now.Before(r.readyAt)
}

// serves reports whether clients reach the copy through its link.
func (r *replica) serves() bool {
	return r.ready() && r.n.up && !r.n.cut && (!r.known || r.desired.Want == placement.WantServing || r.desired.Want == placement.WantReleased)
}

func (r *replica) looping() bool {
	return r.exists && r.running && r.n.s.broken(r.workload, r.gen) && r.n.s.now.Sub(r.startAt) > 15*time.Second
}

// work begins the next thing to do, if there is one.
func (r *replica) work() {
	if !r.known || r.acting || !r.n.up || r.stuck() {
		r.report()
		return
	}
	what, took := r.todo()
	if what == nil {
		r.report()
		return
	}
	r.acting = true
	life := r.n.life
	r.report()
	r.n.s.after(took, func() {
		if r.n.life != life {
			return
		}
		r.acting = false
		if !r.stuck() {
			what()
		}
		r.work()
	})
}

// todo returns the next action and how long it takes.
func (r *replica) todo() (func(), time.Duration) {
	d := r.desired
	short := func() time.Duration { return r.n.s.between(200*time.Millisecond, 1500*time.Millisecond) }
	canPull := r.n.reachable() && r.n.s.registry
	pull := func(image placement.Image) (func(), time.Duration) {
		if image.Digest == "" || r.images[image.Digest] {
			return nil, 0
		}
		if !canPull || r.n.noPull[image.Digest] {
			return func() {}, 5 * time.Second // tries again
		}
		return func() {
			if r.n.reachable() && r.n.s.registry {
				r.images[image.Digest] = true
			}
		}, r.n.s.between(time.Second, 8*time.Second)
	}
	stop := func() (func(), time.Duration) {
		if r.exists && r.running {
			return func() { r.running = false }, short()
		}
		return nil, 0
	}
	if d.Mirror != nil && r.mirrorOf != d.Mirror.Source {
		if !canPull {
			return func() {}, 5 * time.Second
		}
		return func() {
			r.mirrorOf = d.Mirror.Source
			r.mirrored = &placement.Image{Repository: d.Workload, Digest: "sha256:" + d.Mirror.Source, Config: d.Mirror.Source, Platforms: []string{"linux/amd64"}}
			r.images[r.mirrored.Digest] = true
		}, r.n.s.between(time.Second, 6*time.Second)
	}
	switch d.Want {
	case placement.WantServing:
		adopted := r.exists && r.gen == d.Generation
		if !adopted {
			if what, took := pull(d.Image); what != nil {
				return what, took
			}
			if d.Image.Digest == "" {
				return nil, 0
			}
			return func() {
				r.exists, r.running, r.gen = true, false, d.Generation
				r.n.s.inspectCreation(r)
			}, short()
		}
		if r.restarts < d.Restarts {
			return func() { r.restarts, r.running = d.Restarts, false }, short()
		}
		if !r.running {
			return func() {
				r.running = true
				r.startAt, r.readyAt = r.n.s.now, r.n.s.now.Add(r.n.s.between(300*time.Millisecond, 4*time.Second))
				r.n.s.at(r.readyAt, r.report)
				r.n.s.after(16*time.Second, r.report)
			}, short()
		}
		if d.Prefetch != nil {
			return pull(*d.Prefetch)
		}
	case placement.WantDraining:
		if d.Prefetch != nil {
			return pull(*d.Prefetch)
		}
	case placement.WantStopped:
		return stop()
	case placement.WantPrepared, placement.WantAbsent:
		if what, took := stop(); what != nil {
			return what, took
		}
		if r.exists && !d.Original {
			return func() {
				if r.original {
					r.n.s.fail(originalKept, "%s: the original on %s is deleted", r.workload, r.n.id)
				}
				r.forget()
			}, short()
		}
		if d.Want == placement.WantPrepared {
			return pull(d.Image)
		}
	case placement.WantReleased:
		if !r.released {
			return func() { r.released = true }, short()
		}
	}
	return nil, 0
}

// observed is what the agent would say now.
func (r *replica) observed() placement.Observed {
	d := r.desired
	o := placement.Observed{
		Workload: r.workload, Node: r.n.id, Revision: d.Revision, Generation: r.gen, Restarts: r.restarts, State: placement.StateRemoved,
		ImageReady: d.Image.Digest != "" && r.images[d.Image.Digest] || d.Image.Digest == "" && r.exists, Ready: r.ready(), Looping: r.looping(),
		PrefetchReady: d.Prefetch != nil && r.images[d.Prefetch.Digest],
	}
	if d.Mirror != nil && r.mirrorOf == d.Mirror.Source {
		o.Mirrored = r.mirrored
	}
	switch {
	case !r.exists:
	case !r.running:
		o.State = placement.StateStopped
	case r.ready():
		o.State = placement.StateRunning
	case r.sick:
		o.State = placement.StateUnhealthy
	default:
		o.State = placement.StateStarting
	}
	switch d.Want {
	case placement.WantServing, placement.WantReleased:
		o.Role = placement.RoleServing
	case placement.WantDraining:
		o.Role, o.Streams = placement.RoleDraining, r.n.s.streams(r)
	case placement.WantPrepared:
		o.Role = placement.RoleStandby
	default:
		o.Role = placement.RoleStopped
	}
	if what, _ := r.todo(); r.known && what == nil && !r.acting {
		o.Done = true
	}
	if digest := r.cannotPull(); digest != "" {
		o.Fault, o.Done = &placement.Fault{Code: placement.CodeImagePull, Message: "image " + digest + " cannot be pulled", Final: true}, false
	}
	if r.stuck() {
		o.Fault, o.Done = &placement.Fault{Code: placement.CodeDaemonBusy, Message: "Docker does not answer"}, false
	}
	return o
}

// cannotPull is the image that is wanted and cannot be pulled.
func (r *replica) cannotPull() string {
	d := &r.desired
	switch {
	case d.Want == placement.WantServing && r.gen != d.Generation || d.Want == placement.WantPrepared:
		if r.n.noPull[d.Image.Digest] && !r.images[d.Image.Digest] {
			return d.Image.Digest
		}
	case d.Prefetch != nil && r.n.noPull[d.Prefetch.Digest] && !r.images[d.Prefetch.Digest]:
		return d.Prefetch.Digest
	}
	return ""
}

// stuck reports whether Docker does not answer for the container.
func (r *replica) stuck() bool { return r.n.hang || r.hang }

// forget is what remains when a container is gone.
func (r *replica) forget() {
	delete(r.created, r.gen)
	r.exists, r.running, r.gen = false, false, 0
}

// report tells the controller, if it is reached, a little later and in order.
func (r *replica) report() {
	s := r.n.s
	if !r.n.reachable() || !s.alive {
		return
	}
	most := 120 * time.Millisecond
	if r.n.late {
		most = 8 * time.Second
	}
	at := s.now.Add(s.between(5*time.Millisecond, most))
	if at.Before(r.n.told) {
		at = r.n.told
	}
	r.n.told = at
	o, epoch := r.observed(), s.workload(r.workload).epoch
	s.at(at, func() {
		if r.n.reachable() && s.alive && s.workload(r.workload).epoch == epoch {
			s.heard(r, o)
		}
	})
}
