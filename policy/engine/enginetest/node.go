package enginetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
)

// Node is a Docker host with its agent.
type Node struct {
	ID string // fixed

	t        testing.TB
	identity *identity.Identity
	url      func() string

	mu        sync.Mutex
	pace      Pace
	up        bool // the host runs
	life      int  // counts starts of the host: older actions are void
	copies    map[string]*replica
	announced map[string]uint64 // largest generation of its health events, by workload
	hang      bool              // Docker does not answer
	stop      func()            // ends the connection; nil: there is none
}

// Pace is how long things take on a node; the zero value is no time at all.
type Pace struct{ Pull, Create, Start, Ready, Stop, Remove time.Duration }

// Brisk is a small container on a good host.
func Brisk() Pace {
	return Pace{Pull: 400 * time.Millisecond, Create: 80 * time.Millisecond, Start: 120 * time.Millisecond, Ready: 300 * time.Millisecond, Stop: 150 * time.Millisecond, Remove: 50 * time.Millisecond}
}

// SetPace changes how long things take from now on.
func (n *Node) SetPace(p Pace) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pace = p
}

// Run starts an ordinary container with the workload's name.
func (n *Node) Run(workload string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	r := n.replica(workload)
	r.exists, r.running, r.ready, r.original = true, true, true, true
}

// Created returns how many containers were created for the workload.
func (n *Node) Created(workload string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	if r := n.copies[workload]; r != nil {
		return r.created
	}
	return 0
}

// Runs reports whether a container of the workload runs.
func (n *Node) Runs(workload string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	r := n.copies[workload]
	return n.up && r != nil && r.exists && r.running
}

// Exists reports whether there is a container of the workload.
func (n *Node) Exists(workload string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	r := n.copies[workload]
	return r != nil && r.exists
}

// Generation returns the largest generation that it announced.
func (n *Node) Generation(workload string) uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.announced[workload]
}

// Connect starts the agent, or ends a cut.
func (n *Node) Connect() {
	n.t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.up = true
	if n.stop != nil {
		return
	}
	conn, err := bus.Connect(bus.Config{URLs: []string{n.url()}, Identity: n.identity, Logger: quiet()})
	if err != nil {
		n.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return conn.FollowDesired(ctx, n.receive) })
	g.Go(func() error { return conn.PublishReport(ctx, n.report) })
	g.Go(func() error { return conn.AnswerInspect(ctx, n.inspect) })
	g.Go(func() error { return conn.PublishStatus(ctx, n.status) })
	n.stop = func() {
		cancel()
		_ = g.Wait()
		conn.Close()
	}
}

// Cut takes the node off the network: its containers run on.
func (n *Node) Cut() {
	n.mu.Lock()
	stop := n.stop
	n.stop = nil
	n.mu.Unlock()
	if stop != nil {
		stop()
	}
}

// Kill takes the host down: nothing runs any more.
func (n *Node) Kill() {
	n.Cut()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.up = false
	n.life++
	for _, r := range n.copies {
		r.running, r.ready, r.acting = false, false, false
	}
}

// Boot starts a killed host again: containers stay stopped until they are
// wanted.
func (n *Node) Boot() {
	n.Connect()
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, r := range n.copies {
		n.work(r)
	}
}

// ByHand stops the workload's container as somebody on the host would; the
// agent repairs that and tells of it.
func (n *Node) ByHand(workload, text string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	r := n.replica(workload)
	r.outside, r.outsideNumber = text, r.outsideNumber+1
	r.running, r.ready = false, false
	n.work(r)
}

// Hang makes Docker answer nothing until the returned function is called.
func (n *Node) Hang() (end func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.hang = true
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.hang = false
		for _, r := range n.copies {
			n.work(r)
		}
	}
}

func (n *Node) receive(all map[string]placement.Desired) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for workload, d := range all {
		r := n.replica(workload)
		if d.Revision == 0 || r.known && d.Revision <= r.desired.Revision {
			continue // not readable, or older: that never overrides a newer one
		}
		if !r.known {
			r.restarts, r.released = d.Restarts, false
		}
		r.desired, r.known = d, true
		n.work(r)
	}
	for workload, r := range n.copies {
		if _, wanted := all[workload]; !wanted {
			r.known = false // left alone
		}
	}
}

func (n *Node) report() (placement.NodeReport, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	r := placement.NodeReport{Node: n.ID, Facts: placement.NodeFacts{
		Arch: "amd64", OS: "linux", Docker: "20.10.24", CPU: 64_000, Memory: 256 << 30, Containers: []placement.TakenName{},
	}, Placements: []placement.Observed{}}
	for _, name := range slices.Sorted(maps.Keys(n.copies)) {
		c := n.copies[name]
		if c.exists {
			r.Facts.Containers = append(r.Facts.Containers, placement.TakenName{Name: c.container(), Workload: name, Running: c.running})
			if c.running {
				r.Facts.ReservedMemory += memory
			}
		}
		if c.known {
			r.Placements = append(r.Placements, n.observed(c))
		}
	}
	return r, true
}

// status is as large as that of a real agent.
func (n *Node) status() bus.Status {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := bus.NodeStatus{Docker: "ok", Placements: []placement.Event{}, Relays: []bus.RelaySessionStatus{{ID: "relay-1", Addr: "192.0.2.1:8443", Connected: true}}}
	for _, name := range slices.Sorted(maps.Keys(n.copies)) {
		c := n.copies[name]
		if !c.exists {
			continue
		}
		o := n.observed(c)
		s.Placements = append(s.Placements, placement.Event{
			Workload: name, Node: n.ID, Placement: o.ID().String(), Kind: placement.KindContainer, Generation: c.generation, Role: o.Role, Ready: o.Ready,
			State: o.State, Ports: []placement.Port{{Port: 80, Protocol: placement.ProtocolHTTP}}, Sequence: placement.Sequence{Incarnation: 1, Counter: o.Revision},
		})
	}
	return bus.Status{Version: "test", Node: &s}
}

const memory = 64 << 20 // of every container

func (n *Node) inspect(_ context.Context, container string) (placement.Captured, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	r := n.copies[container]
	if r == nil || !r.exists {
		return placement.Captured{}, fmt.Errorf("there is no container %s", container)
	}
	if n.hang {
		return placement.Captured{}, errors.New("the Docker daemon does not answer")
	}
	c := placement.Captured{
		Kind: placement.KindContainer, ID: r.id(), Name: container, Running: r.running, Ready: r.ready,
		Ports: []placement.Port{{Port: 80, Protocol: placement.ProtocolHTTP}}, ImageRef: "registry.example/" + container, ImageID: "sha256:" + container,
		Arch: "amd64", OS: "linux", CPU: 50, Memory: memory, RestartPolicy: "always", Spec: Spec(),
	}
	if r.known && r.desired.Want != placement.WantReleased {
		c.Owned = r.desired.ID().String()
	}
	return c, nil
}
