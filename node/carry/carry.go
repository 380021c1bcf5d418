package carry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/opfield/availability/node/discovery"
	"github.com/opfield/availability/placement"
)

// kind carries out the placements of one kind of workload. Kinds differ only
// behind it.
type kind interface {
	// Converge brings what is to what is desired, as far as it can now. It
	// returns after which time it must be called again, 0 if that is not for
	// a time; an error says what is not so.
	Converge(context.Context, *task) (time.Duration, error)
	// Capture describes what may become a workload, by name or id.
	Capture(context.Context, string) (placement.Captured, error)
}

// Config of a Carrier. The optional fields say so.
type Config struct {
	Node   string // id of this node
	File   string // what is desired and what is ours, kept over a restart
	Engine Engine
	Logger *slog.Logger

	Registry Registry // nil: there is no internal registry yet
	// RegistryError says why the registry is not reached; nil: never.
	RegistryError func() string
	// MayStart is asked before every start of a copy; nil: MayStart.
	MayStart func(placement.Desired) error
	// Health returns the last event about a workload; nil: there is none.
	Health func(workload string) (placement.Event, bool)
	// Streams counts what runs on the links of a placement; nil: nothing.
	Streams func(placement.ID) int
	// Changed hears that Managed changed; nil: nobody.
	Changed    func()
	Registerer prometheus.Registerer // nil: no metrics
}

// ErrMayNotStart is the cause of a start that was refused.
var ErrMayNotStart = errors.New("it may not be started")

// MayStart lets a copy start that shall serve.
func MayStart(d placement.Desired) error {
	if d.Want != placement.WantServing {
		return fmt.Errorf("%w: it shall be %s", ErrMayNotStart, d.Want)
	}
	return nil
}

// Carrier carries out what is desired of one node.
type Carrier struct {
	config  Config
	kinds   map[placement.Kind]kind
	images  *images
	facts   *facts
	hands   *hands
	metrics *metrics
	breaks  atomic.Uint64 // of the event stream

	opened chan struct{} // closed when the book is open
	book   *book         // fixed once it is open
	spawn  chan *worker  // Run starts them

	setting sync.Mutex // one SetDesired at a time

	mu      sync.Mutex
	workers map[string]*worker // guarded by mu
	shown   map[string]sight   // guarded by mu
}

// sight is what a worker found out last.
type sight struct {
	looked    bool // it looked since the agent started, or remembered
	repairing bool // a change from outside
	note      string
	observed  placement.Observed
}

// New checks the configuration and starts nothing.
func New(config Config) (*Carrier, error) {
	if err := placement.CheckName(config.Node); err != nil {
		return nil, fmt.Errorf("node id: %w", err)
	}
	if config.File == "" || config.Engine == nil || config.Logger == nil {
		return nil, errors.New("carrier: file, engine and logger are required")
	}
	if config.MayStart == nil {
		config.MayStart = MayStart
	}
	if config.RegistryError == nil {
		config.RegistryError = func() string { return "" }
	}
	if config.Health == nil {
		config.Health = func(string) (placement.Event, bool) { return placement.Event{}, false }
	}
	if config.Streams == nil {
		config.Streams = func(placement.ID) int { return 0 }
	}
	if config.Changed == nil {
		config.Changed = func() {}
	}
	c := &Carrier{
		config: config, opened: make(chan struct{}), spawn: make(chan *worker),
		workers: map[string]*worker{}, shown: map[string]sight{}, hands: newHands(),
	}
	c.facts = newFacts(c)
	c.metrics = newMetrics(c, config.Registerer)
	c.images = &images{engine: config.Engine, registry: config.Registry, node: config.Node, logger: config.Logger}
	c.kinds = map[placement.Kind]kind{
		placement.KindContainer: &containers{node: config.Node, engine: config.Engine, images: c.images, hands: c.hands, mayStart: config.MayStart, owner: c.owner, given: c.given},
	}
	return c, nil
}

// Run carries out the last known state, and what SetDesired says, until ctx
// ends.
func (c *Carrier) Run(ctx context.Context) error {
	c.mu.Lock()
	c.book = openBook(c.config.File, c.config.Logger)
	for workload, m := range c.book.all() {
		if m.Desired != nil {
			c.workers[workload] = newWorker(c, workload)
			c.shown[workload] = sight{looked: m.Current != "", observed: c.blank(*m.Desired)}
		}
	}
	first := slices.Collect(maps.Values(c.workers))
	c.mu.Unlock()
	close(c.opened)
	c.config.Changed()

	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return c.events(ctx) })
	g.Go(func() error { return c.facts.run(ctx) })
	g.Go(func() error { return c.prune(ctx) })
	for _, w := range first {
		g.Go(func() error { w.run(ctx); return nil })
	}
	g.Go(func() error {
		for {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case w := <-c.spawn:
				g.Go(func() error { w.run(ctx); return nil })
			}
		}
	})
	return g.Wait()
}

// SetDesired takes everything that is desired of this node, by workload. An
// older revision never overrides a newer one. A workload that is missing is
// left alone from now on: its container stays as it is. It waits until Run
// knows the last state.
func (c *Carrier) SetDesired(ctx context.Context, all map[string]placement.Desired) {
	select {
	case <-ctx.Done():
		return
	case <-c.opened:
	}
	c.setting.Lock()
	defer c.setting.Unlock()
	var changed, fresh []*worker
	pages := c.book.all()
	next := map[string]*placement.Desired{}
	for workload, d := range all {
		old := pages[workload].Desired
		if d.Node != c.config.Node || d.Workload != workload || d.Check() != nil || old != nil && d.Revision <= old.Revision {
			continue
		}
		next[workload] = &d
	}
	for workload, m := range pages {
		if _, wanted := all[workload]; !wanted && m.Desired != nil {
			next[workload] = nil
		}
	}
	if len(next) > 0 {
		if err := c.book.edit(func(pages map[string]memory) {
			for workload, d := range next {
				m := pages[workload]
				switch {
				case d != nil && m.Desired == nil: // what was asked for before does not count
					m.Restarts, m.Restarting, m.ReleasedAs = d.Restarts, "", nil
					m.Outside, m.OutsideNumber = "", 0 // it was told to a policy that is over
				case d == nil && m.Current == "":
					m.leave(pages, workload)
					continue
				case d == nil && m.ReleasedAs == nil: // left alone, it is announced as it is
					as := *m.Desired
					as.Spec, as.Mirror, as.Want = nil, nil, placement.WantReleased
					m.ReleasedAs = &as
				}
				m.needed(time.Now())
				m.Desired, m.Left = d, time.Time{}
				pages[workload] = m
			}
		}); err != nil {
			c.config.Logger.Error("desired state not kept on disk: nothing of it is carried out", "err", err)
			return
		}
	}
	c.mu.Lock()
	for workload, d := range next {
		w := c.workers[workload]
		switch {
		case d == nil:
			if w != nil {
				w.end()
				delete(c.workers, workload)
			}
			delete(c.shown, workload)
		case w == nil:
			w = newWorker(c, workload)
			c.workers[workload] = w
			c.shown[workload] = sight{looked: pages[workload].Current != "", observed: c.blank(*d)}
			fresh = append(fresh, w)
		default:
			changed = append(changed, w)
		}
	}
	c.mu.Unlock()
	if len(next) > 0 {
		c.config.Changed()
	}
	for _, w := range changed {
		w.desiredChanged()
	}
	for _, w := range fresh {
		select {
		case <-ctx.Done():
		case c.spawn <- w:
		}
	}
}

// blank is what is said of a placement that was not looked at yet.
func (c *Carrier) blank(d placement.Desired) placement.Observed {
	return placement.Observed{Workload: d.Workload, Node: c.config.Node, Role: role(d.Want), State: placement.StateRemoved}
}

// roleOf is what the container of a generation is for, by what is wanted of its
// placement. One that is to end first, for another generation or because a
// restart was asked for, is not opened again before that: its links closed for
// it.
func roleOf(d placement.Desired, m memory, generation uint64) placement.Role {
	if d.Want == placement.WantServing && generation != 0 && (generation != d.Generation || m.Restarts < d.Restarts) {
		return placement.RoleDraining
	}
	return role(d.Want)
}

// role is what a placement is for by what is wanted of it.
func role(w placement.Want) placement.Role {
	switch w {
	case placement.WantServing:
		return placement.RoleServing
	case placement.WantDraining:
		return placement.RoleDraining
	case placement.WantPrepared:
		return placement.RoleStandby
	case placement.WantReleased:
		return ""
	}
	return placement.RoleStopped
}

// Managed returns what health events say of managed workloads, and false
// until the last known state was read.
func (c *Carrier) Managed() (map[string]discovery.Managed, bool) {
	select {
	case <-c.opened:
	default:
		return nil, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[string]discovery.Managed{}
	for workload, m := range c.book.all() {
		d := m.Desired
		if d == nil || d.Want == placement.WantReleased && m.ReleasedAs != nil {
			d = m.ReleasedAs
		}
		if d == nil {
			continue
		}
		s, live := c.shown[workload]
		managed := discovery.Managed{
			Container: m.Current, Looked: !live || s.looked || m.Current != "", Kind: d.Kind, Generation: d.Generation, Epoch: d.Epoch,
			Role: role(d.Want), Ports: sorted(d.Ports), Kept: d.Want != placement.WantAbsent && d.Want != placement.WantReleased,
		}
		if m.Current != "" {
			managed.Generation, managed.Kept = m.Generation, managed.Kept || d.Want == placement.WantAbsent
			managed.Role = roleOf(*d, m, m.Generation)
		}
		managed.Note = s.why()
		out[workload] = managed
	}
	return out, true
}

// why is what is not as it should be, for people.
func (s sight) why() string {
	var all []string
	if o := s.observed; !o.Done {
		if s.repairing {
			all = append(all, o.Outside+" by hand and is repaired")
		}
		if o.Fault != nil && o.Fault.Code != placement.CodeCrashLoop {
			all = append(all, o.Fault.Message)
		}
	}
	if s.note != "" {
		all = append(all, s.note)
	}
	return strings.Join(all, "; ")
}

// Owned reports whether a container is watched although it has no label; one
// that was given back is announced as before.
func (c *Carrier) Owned(id string) bool {
	return c.find(func(m memory) bool { return m.Current == id || m.Adopted == id && !m.released(id) }) != ""
}

// owner returns the workload of which a container is the placement, by our
// memory.
func (c *Carrier) owner(id string) string {
	return c.find(func(m memory) bool { return (m.Current == id || m.Adopted == id) && !m.released(id) })
}

// find returns a workload whose memory matches, or "".
func (c *Carrier) find(match func(memory) bool) string {
	select {
	case <-c.opened:
	default:
		return ""
	}
	for workload, m := range c.book.all() {
		if match(m) {
			return workload
		}
	}
	return ""
}

// given reports whether a container was given back.
func (c *Carrier) given(id string) bool {
	select {
	case <-c.opened:
	default:
		return false
	}
	for _, m := range c.book.all() {
		if m.released(id) {
			return true
		}
	}
	return false
}

// Drain returns how long the streams of a placement may go on after its links
// closed.
func (c *Carrier) Drain(id placement.ID) (time.Duration, bool) {
	select {
	case <-c.opened:
	default:
		return 0, false
	}
	if d := c.book.read(id.Workload).Desired; d != nil && id.Node == c.config.Node {
		return time.Duration(d.DrainSeconds) * time.Second, true
	}
	return 0, false
}

// Capture describes a container of this node, by name or id.
func (c *Carrier) Capture(ctx context.Context, name string) (placement.Captured, error) {
	return c.kinds[placement.KindContainer].Capture(ctx, name)
}

// Report returns everything there is to tell, and false until the engine was
// asked.
func (c *Carrier) Report() (placement.NodeReport, bool) {
	select {
	case <-c.opened:
	default:
		return placement.NodeReport{}, false
	}
	found, strays, known := c.facts.get()
	if !known {
		return placement.NodeReport{}, false
	}
	found.Registry = c.config.RegistryError()
	r := placement.NodeReport{Node: c.config.Node, Facts: found, Placements: []placement.Observed{}}
	c.mu.Lock()
	for workload, s := range c.shown {
		o := s.observed
		o.Streams = c.config.Streams(o.ID())
		if e, ok := c.config.Health(workload); ok && o.State != placement.StateRemoved && e.Generation == o.Generation {
			o.State, o.Ready, o.Reason = e.State, e.Ready, e.Reason
			if e.Role != "" {
				o.Role = e.Role
			}
		}
		r.Placements = append(r.Placements, o)
	}
	for _, o := range strays {
		if _, known := c.shown[o.Workload]; !known {
			r.Placements = append(r.Placements, o)
		}
	}
	c.mu.Unlock()
	slices.SortFunc(r.Placements, func(a, b placement.Observed) int {
		return compare(a.Workload, b.Workload)
	})
	return r, true
}

func sorted(ports []placement.Port) []placement.Port {
	return slices.SortedFunc(slices.Values(ports), func(a, b placement.Port) int { return int(a.Port) - int(b.Port) })
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

// tell changes what is said of a workload.
func (c *Carrier) tell(workload string, edit func(*sight)) {
	c.mu.Lock()
	s, ok := c.shown[workload]
	if !ok {
		c.mu.Unlock()
		return // it is not desired any more
	}
	before := s
	edit(&s)
	c.shown[workload] = s
	c.mu.Unlock()
	if !reflect.DeepEqual(before, s) {
		c.config.Changed()
	}
}
