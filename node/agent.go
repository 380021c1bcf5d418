package node

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/node/discovery"
	"github.com/opfield/availability/node/docker"
	"github.com/opfield/availability/placement"
)

// Publisher sends health events and knows the last stored ones.
type Publisher interface {
	PublishPlacement(context.Context, placement.Event) error
	LastPlacement(context.Context, placement.ID) (placement.Event, bool, error)
}

// Links is told every event for the relays: all of them at every change.
type Links interface {
	Set([]placement.Event)
}

// Certificates are the workload certificates of the node.
type Certificates interface {
	// Get returns a certificate that is there, and an error if it is not.
	Get(workload string) (*tls.Certificate, error)
	// Ensure fetches the certificate if it is not there.
	Ensure(ctx context.Context, workload string) error
}

// Managed knows which containers are carried out on the node.
type Managed interface {
	// Managed returns what counts of each managed workload, and false until
	// that is known: nothing is announced before.
	Managed() (map[string]discovery.Managed, bool)
	// Owned reports whether a container is managed, with or without labels.
	Owned(id string) bool
}

// dockerOK is Status.Docker while the engine answers.
const dockerOK = "ok"

// Config of an Agent. All fields but the last two are required.
type Config struct {
	Node         string // id of this node
	StateFile    string // what must survive a restart
	Engine       docker.Engine
	Publisher    Publisher
	Links        Links
	Certificates Certificates
	Logger       *slog.Logger
	Managed      Managed               // nil: nothing is managed
	Registerer   prometheus.Registerer // nil: no metrics
}

// Status is what the agent tells about itself.
type Status struct {
	Placements []placement.Event
	Docker     string // "ok" or the error
	Warnings   []string
}

// Agent finds, watches and announces the placements of one node.
type Agent struct {
	config  Config
	watcher *docker.Watcher
	outbox  *outbox
	metrics *metrics
	wake    chan struct{} // capacity 1: something below mu changed

	// Guarded by mu.
	mu       sync.Mutex
	snapshot docker.Snapshot
	probes   map[probeKey]*probe
	asked    map[string]string // workloads whose certificate is being fetched, with the last error
	raise    uint64            // the incarnation must be above it
	targets  map[placement.LinkID][]netip.AddrPort
	gone     map[string]placement.Sequence // removed placements whose last event is stored
	next     uint64                        // round robin over targets
	status   Status
	listed   bus.Inventory // what the last list says
	complete bool          // there was a list

	// Owned by Run.
	state      state
	unsaved    bool // state is newer than its file
	counter    uint64
	announced  map[string]placement.Event // by workload
	owned      map[string]bool            // it was managed when it was announced last
	registered int                        // how many of them Links was told last
	whole      bool                       // a whole list was read: what is missing does not exist
}

// probeKey names one port of one start of a container at one address.
type probeKey struct {
	container string
	startedAt time.Time
	addr      netip.AddrPort
	passive   bool
}

// New checks the configuration and starts nothing.
func New(config Config) (*Agent, error) {
	if err := placement.CheckName(config.Node); err != nil {
		return nil, fmt.Errorf("node id: %w", err)
	}
	if config.StateFile == "" || config.Publisher == nil || config.Links == nil || config.Certificates == nil || config.Logger == nil {
		return nil, errors.New("node agent: state file, publisher, links, certificates and logger are required")
	}
	a := &Agent{
		config: config, metrics: newMetrics(config.Registerer), wake: make(chan struct{}, 1), probes: map[probeKey]*probe{}, asked: map[string]string{}, gone: map[string]placement.Sequence{},
		announced: map[string]placement.Event{}, owned: map[string]bool{}, status: Status{Docker: "not asked yet"},
	}
	if config.Managed == nil {
		a.config.Managed = unmanaged{}
	}
	watcher, err := docker.New(docker.Config{Engine: config.Engine, Logger: config.Logger, Changed: a.learn, Owned: a.config.Managed.Owned})
	if err != nil {
		return nil, err
	}
	a.watcher = watcher
	a.outbox = newOutbox(config.Publisher, config.Logger, a.superseded, a.stored, a.metrics)
	return a, nil
}

// Run works until the context ends. A state file that is unreadable is
// replaced, with a warning in the log.
func (a *Agent) Run(ctx context.Context) error {
	a.state = loadState(a.config.StateFile, a.config.Logger)
	if err := a.raiseIncarnation(0); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return a.watcher.Run(ctx) })
	group.Go(func() error { return a.outbox.Run(ctx) })
	group.Go(func() error {
		var helpers sync.WaitGroup // probes and certificate requests; they end with ctx
		defer helpers.Wait()
		tick := time.NewTicker(republishEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-a.wake:
				if err := a.reconcile(ctx, &helpers); err != nil {
					return err
				}
			case <-tick.C:
				for _, e := range a.announced {
					a.outbox.put(ctx, e)
				}
			}
		}
	})
	if err := group.Wait(); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// Target returns the address of a ready container behind the link.
func (a *Agent) Target(link placement.LinkID) (netip.AddrPort, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	targets := a.targets[link]
	if len(targets) == 0 {
		return netip.AddrPort{}, false
	}
	a.next++
	return targets[a.next%uint64(len(targets))], true
}

// Failed tells that a connection to the link's target was not made: its
// readiness is looked at again now.
func (a *Agent) Failed(link placement.LinkID, _ error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for key, p := range a.probes {
		if slices.Contains(a.targets[link], key.addr) {
			p.look()
		}
	}
}

// Status returns the present state.
func (a *Agent) Status() Status {
	a.mu.Lock()
	defer a.mu.Unlock()
	return Status{Placements: slices.Clone(a.status.Placements), Docker: a.status.Docker, Warnings: slices.Clone(a.status.Warnings)}
}

// Placement returns what is announced of a workload.
func (a *Agent) Placement(workload string) (placement.Event, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	i, ok := slices.BinarySearchFunc(a.status.Placements, placement.ID{Workload: workload, Node: a.config.Node}.String(),
		func(e placement.Event, name string) int { return cmp.Compare(e.Placement, name) })
	if !ok {
		return placement.Event{}, false
	}
	return a.status.Placements[i], true
}

// ManagedChanged tells that Config.Managed says something else.
func (a *Agent) ManagedChanged() {
	a.watcher.Refresh()
	a.again()
}

// learn takes a new snapshot of the engine.
func (a *Agent) learn(s docker.Snapshot) {
	a.mu.Lock()
	a.snapshot = s
	a.mu.Unlock()
	a.again()
}

// superseded takes a stored event that is not older than ours, although only
// this node writes it: the clock went back and the state file was lost.
func (a *Agent) superseded(stored placement.Event) {
	a.mu.Lock()
	a.raise = max(a.raise, stored.Sequence.Incarnation)
	a.mu.Unlock()
	a.again()
}

// stored hears of every event that is safe. A removed placement needs no
// memory any more.
func (a *Agent) stored(e placement.Event) {
	if e.State != placement.StateRemoved {
		return
	}
	a.mu.Lock()
	a.gone[e.Workload] = e.Sequence
	a.mu.Unlock()
	a.again()
}

func (a *Agent) again() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// raiseIncarnation takes an incarnation above everything known, and stores it
// before it is used.
func (a *Agent) raiseIncarnation(above uint64) error {
	a.state.Incarnation = max(uint64(time.Now().UnixNano()), a.state.Incarnation+1, above+1)
	a.counter = 0
	return a.state.save(a.config.StateFile)
}

// reconcile compares what is with what was announced, and announces the
// difference.
func (a *Agent) reconcile(ctx context.Context, helpers *sync.WaitGroup) error {
	managed, known := a.config.Managed.Managed()
	if !known {
		return nil // it calls ManagedChanged
	}
	a.mu.Lock()
	snapshot, raise := a.snapshot, a.raise
	containers := a.watchPortsLocked(ctx, helpers, snapshot.Containers, managed)
	for workload, sequence := range a.gone {
		if a.announced[workload].Sequence == sequence { // it has not come back meanwhile
			delete(a.announced, workload)
			a.state.Workloads = slices.DeleteFunc(a.state.Workloads, func(w string) bool { return w == workload })
			a.unsaved = true
		}
	}
	clear(a.gone)
	a.mu.Unlock()

	again := raise >= a.state.Incarnation
	if again {
		if err := a.raiseIncarnation(raise); err != nil {
			return err
		}
	}
	found, warnings := discovery.Fold(a.config.Node, containers, managed)
	targets := map[placement.LinkID][]netip.AddrPort{}
	waiting := []placement.Event{}
	present := map[string]bool{}
	var changed []placement.Event
	for _, p := range found {
		workload := p.Event.Workload
		present[workload] = true
		_, owned := managed[workload]
		if !owned {
			p.Event.Generation = a.state.Generations[workload]
		}
		before, known := a.announced[workload]
		missing := a.certificate(ctx, helpers, workload)
		looking := unseen(p, snapshot.Containers, containers, managed)
		if known && looking && before.Ready && owned && before.Generation < p.Event.Generation && !a.owned[workload] {
			// A discovered placement becomes a managed one and goes on: its
			// ports are looked at first (ENA-1).
			a.keepTargets(targets, workload)
			continue
		}
		if !known && (missing != "" || looking) {
			p.Event.Ready, p.Event.State, p.Event.Reason = false, placement.StateStarting, cmp.Or(missing, "it was not looked at yet")
			waiting = append(waiting, p.Event)
			if missing != "" {
				warnings = append(warnings, fmt.Sprintf("workload %s: %s", workload, missing))
			}
			continue
		}
		for port, addrs := range p.Targets {
			targets[placement.LinkID{Placement: p.Event.ID(), Port: port}] = addrs
		}
		if !known || again || !alike(before, p.Event) {
			changed = append(changed, a.stamp(p.Event))
		}
		a.owned[workload] = owned
	}
	for workload, m := range managed {
		if !m.Looked { // nothing changes by that
			present[workload] = true
			a.keepTargets(targets, workload)
		}
	}
	a.whole = a.whole || snapshot.Complete
	if a.whole {
		for _, workload := range a.state.Workloads {
			if before, known := a.announced[workload]; !present[workload] && (!known || again || before.State != placement.StateRemoved) {
				before.Generation = max(before.Generation, a.state.Generations[workload])
				changed = append(changed, a.stamp(removed(placement.ID{Workload: workload, Node: a.config.Node}, before)))
			}
		}
	}
	status := Status{Docker: dockerOK, Warnings: warnings}
	if snapshot.Err != nil {
		status.Docker = snapshot.Err.Error()
	}
	err := a.announce(ctx, changed, waiting, targets, status)
	a.takeStock(snapshot, managed)
	return err
}

// certificate returns why the workload's certificate is not there, and sees to
// it that it is fetched. Only a placement that is new to the node waits.
func (a *Agent) certificate(ctx context.Context, helpers *sync.WaitGroup, workload string) string {
	if _, err := a.config.Certificates.Get(workload); err == nil {
		return ""
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	last, asked := a.asked[workload]
	if !asked {
		a.asked[workload] = ""
		helpers.Go(func() { a.fetch(ctx, workload) })
	}
	if last != "" {
		return "it waits for its certificate: " + last
	}
	return "it waits for its certificate"
}

// unseen reports whether a container or a port of a new placement was not
// looked at yet. That takes a moment, and without it a restart of the agent
// would announce every placement as not ready.
func unseen(p discovery.Placement, snapshot []docker.Container, containers []discovery.Container, managed map[string]discovery.Managed) bool {
	m, owned := managed[p.Event.Workload]
	missing := owned && m.Container != ""
	for i, c := range containers {
		if owned && c.ID != m.Container || !owned && c.Labels[discovery.LabelWorkload] != p.Event.Workload {
			continue
		}
		missing = false
		if snapshot[i].Pending {
			return true
		}
		if c.Health != discovery.NoCheck {
			continue
		}
		for _, state := range c.Ports {
			if state == discovery.PortUnknown {
				return true
			}
		}
	}
	return missing
}

// keepTargets takes over where the links of a workload lead now.
func (a *Agent) keepTargets(targets map[placement.LinkID][]netip.AddrPort, workload string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for link, addrs := range a.targets {
		if link.Placement.Workload == workload {
			targets[link] = addrs
		}
	}
}

// unmanaged is a node without managed workloads.
type unmanaged struct{}

func (unmanaged) Managed() (map[string]discovery.Managed, bool) { return nil, true }
func (unmanaged) Owned(string) bool                             { return false }

// announce hands the changed events to everybody who wants them.
func (a *Agent) announce(ctx context.Context, changed, waiting []placement.Event, targets map[placement.LinkID][]netip.AddrPort, status Status) error {
	for _, e := range changed {
		a.announced[e.Workload] = e
		if e.Generation > a.state.Generations[e.Workload] {
			a.state.Generations[e.Workload], a.unsaved = e.Generation, true
		}
	}
	byName := func(x, y placement.Event) int { return cmp.Compare(x.Placement, y.Placement) }
	all := slices.SortedFunc(maps.Values(a.announced), byName)
	status.Placements = slices.SortedFunc(slices.Values(slices.Concat(all, waiting)), byName)
	a.mu.Lock()
	a.targets, a.status = targets, status
	a.mu.Unlock()
	a.metrics.show(status)

	workloads := slices.Sorted(maps.Keys(a.announced))
	if len(changed) > 0 || len(workloads) != a.registered {
		a.registered = len(workloads)
		a.config.Links.Set(all)
	}
	for _, e := range changed {
		a.config.Logger.Info("placement changed", "placement", e.Placement, "role", string(e.Role), "state", string(e.State),
			"ready", e.Ready, "reason", e.Reason)
		a.outbox.put(ctx, e)
	}
	for _, w := range a.state.Workloads { // of an earlier run, until a whole list was read
		if _, known := a.announced[w]; !known && !a.whole {
			workloads = append(workloads, w)
		}
	}
	slices.Sort(workloads)
	if !a.unsaved && slices.Equal(workloads, a.state.Workloads) {
		return nil
	}
	a.state.Workloads, a.unsaved = workloads, false
	return a.state.save(a.config.StateFile) // after the announcement: the disk must not delay it
}

// stamp numbers an event.
func (a *Agent) stamp(e placement.Event) placement.Event {
	a.counter++
	e.Sequence = placement.Sequence{Incarnation: a.state.Incarnation, Counter: a.counter}
	e.ObservedAt = time.Now()
	return e
}

// removed is the last event of a placement.
func removed(id placement.ID, before placement.Event) placement.Event {
	kind := before.Kind
	if kind == "" {
		kind = placement.KindContainer
	}
	return placement.Event{
		Workload: id.Workload, Node: id.Node, Placement: id.String(), Kind: kind, Ports: before.Ports,
		Generation: before.Generation, Epoch: before.Epoch,
		Role: placement.RoleStopped, State: placement.StateRemoved, Reason: "its containers were removed",
	}
}

// alike compares everything but the number and the time.
func alike(a, b placement.Event) bool {
	a.Sequence, a.ObservedAt = b.Sequence, b.ObservedAt
	return reflect.DeepEqual(a, b)
}
