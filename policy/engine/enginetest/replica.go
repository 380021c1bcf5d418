package enginetest

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/opfield/availability/placement"
)

// replica is what a node has of one workload; the node's mu guards it.
type replica struct {
	n        *Node
	workload string
	desired  placement.Desired
	known    bool // it is wanted as desired says
	images   map[string]bool
	mirrored *placement.Image
	mirrorOf string

	exists, running, ready bool
	original               bool // the container of before the policy
	released               bool
	generation             uint64
	restarts               uint64
	created                int
	acting                 bool
	outside                string // the last change by hand
	outsideNumber          uint64
}

func (n *Node) replica(workload string) *replica {
	r := n.copies[workload]
	if r == nil {
		r = &replica{n: n, workload: workload, images: map[string]bool{}}
		n.copies[workload] = r
	}
	return r
}

func (r *replica) container() string {
	if r.original {
		return r.workload
	}
	return "opfield-" + r.workload
}

func (r *replica) id() string { return fmt.Sprintf("%s-%s-%d", r.workload, r.n.ID, r.created) }

// Spec is as large as that of an ordinary container.
func Spec() json.RawMessage {
	b, err := json.Marshal(placement.ContainerSpec{
		Env:    []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "TOKEN=" + strings.Repeat("x", 64), "DATABASE_URL=postgres://db.example/app"},
		Config: json.RawMessage(`{"Cmd":["serve","--port","80"],"ExposedPorts":{"80/tcp":{}},"Healthcheck":{"Test":["CMD","check"],"Interval":5000000000},"Labels":{"opfield.workload":"web","opfield.port":"80"},"WorkingDir":"/app","User":"app"}`),
		Host:   json.RawMessage(`{"Memory":67108864,"NanoCpus":50000000,"LogConfig":{"Type":"json-file","Config":{"max-size":"10m"}},"CapDrop":["ALL"],"ReadonlyRootfs":true,"ShmSize":67108864,"Tmpfs":{"/tmp":"size=16m"}}`),
	})
	if err != nil {
		panic(err)
	}
	return b
}

// work carries out what is to be done; mu is held.
func (n *Node) work(r *replica) {
	for n.up && r.known && !r.acting && !n.hang {
		if r.adopts() { // as it runs
			r.generation = r.desired.AdoptedAt
		}
		if r.exists && r.desired.Want != placement.WantAbsent {
			n.announced[r.workload] = max(n.announced[r.workload], r.generation)
		}
		what, took := r.todo()
		if what == nil {
			return
		}
		if took == 0 {
			what()
			continue
		}
		r.acting = true
		life := n.life
		time.AfterFunc(took, func() {
			n.mu.Lock()
			defer n.mu.Unlock()
			if n.life != life {
				return
			}
			r.acting = false
			if !n.hang {
				what()
			}
			n.work(r)
		})
	}
}

func (r *replica) adopts() bool {
	return r.exists && r.desired.Adopt != "" && r.desired.Adopt == r.id() && r.generation < r.desired.AdoptedAt
}

// todo returns the next action and how long it takes; nil: there is none.
func (r *replica) todo() (func(), time.Duration) {
	d, pace := r.desired, r.n.pace
	stop := func() { r.running, r.ready = false, false }
	pull := func(i placement.Image) (func(), time.Duration) {
		if i.Digest == "" || r.images[i.Digest] {
			return nil, 0
		}
		return func() { r.images[i.Digest] = true }, pace.Pull
	}
	if d.Mirror != nil && r.mirrorOf != d.Mirror.Source {
		return func() {
			r.mirrorOf = d.Mirror.Source
			r.mirrored = &placement.Image{Repository: d.Workload, Digest: "sha256:" + strings.TrimPrefix(d.Mirror.Source, "sha256:"), Config: d.Mirror.Source, Platforms: []string{"linux/amd64"}}
			r.images[r.mirrored.Digest] = true
		}, pace.Pull
	}
	switch d.Want {
	case placement.WantServing:
		if !r.exists || r.generation != d.Generation {
			if what, took := pull(d.Image); what != nil {
				return what, took
			}
			if d.Image.Digest == "" {
				return nil, 0
			}
			return func() {
				r.exists, r.running, r.ready, r.generation = true, false, false, d.Generation
				r.original = d.Original
				r.created++
			}, pace.Create
		}
		if r.restarts < d.Restarts {
			return func() { r.restarts = d.Restarts; stop() }, pace.Stop
		}
		if !r.running {
			return func() { r.running = true }, pace.Start
		}
		if !r.ready {
			return func() { r.ready = r.running }, pace.Ready
		}
		if d.Prefetch != nil {
			return pull(*d.Prefetch)
		}
	case placement.WantDraining:
		if d.Prefetch != nil {
			return pull(*d.Prefetch)
		}
	case placement.WantStopped, placement.WantPrepared, placement.WantAbsent:
		if r.exists && r.running {
			return stop, pace.Stop
		}
		if r.exists && !d.Original && d.Want != placement.WantStopped {
			return func() { r.exists, r.generation = false, 0 }, pace.Remove
		}
		if d.Want == placement.WantPrepared {
			return pull(d.Image)
		}
	case placement.WantReleased:
		if !r.released {
			return func() { r.released = true }, pace.Start
		}
	}
	return nil, 0
}

// observed is what the agent says now; mu is held.
func (n *Node) observed(r *replica) placement.Observed {
	d := r.desired
	o := placement.Observed{
		Workload: r.workload, Node: n.ID, Revision: d.Revision, Generation: r.generation, Restarts: r.restarts, State: placement.StateRemoved,
		ImageReady: d.Image.Digest != "" && r.images[d.Image.Digest] || d.Image.Digest == "" && r.exists, Ready: r.ready,
		PrefetchReady: d.Prefetch != nil && r.images[d.Prefetch.Digest],
	}
	o.Outside, o.OutsideNumber = r.outside, r.outsideNumber
	if r.exists {
		o.Container = r.id()
	}
	if d.Mirror != nil && r.mirrorOf == d.Mirror.Source {
		o.Mirrored = r.mirrored
	}
	switch {
	case !r.exists:
	case !r.running:
		o.State = placement.StateStopped
	case r.ready:
		o.State = placement.StateRunning
	default:
		o.State = placement.StateStarting
	}
	switch d.Want {
	case placement.WantServing, placement.WantReleased:
		o.Role = placement.RoleServing
	case placement.WantDraining:
		o.Role = placement.RoleDraining
	case placement.WantPrepared:
		o.Role = placement.RoleStandby
	default:
		o.Role = placement.RoleStopped
	}
	what, _ := r.todo()
	o.Done = r.known && what == nil && !r.acting
	if n.hang {
		o.Fault, o.Done = &placement.Fault{Code: placement.CodeDaemonBusy, Message: "Docker does not answer"}, false
	}
	return o
}
