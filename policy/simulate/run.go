package simulate

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

// Config of one run.
type Config struct {
	Seed     uint64
	Nodes    int           // hosts, 2 to 16
	Policies int           // workloads, each with a policy of its own
	For      time.Duration // simulated time
	// FaultEvery and UserEvery are the mean times between two faults of the
	// cluster, and between two actions of a user for each policy.
	FaultEvery, UserEvery time.Duration
	// Trace gets every line. Without it a run that breaks an invariant is
	// repeated for its last lines.
	Trace func(line string)
	// spoil changes a decision, and spoilRecord what a node gets: tests show
	// with them that each invariant can fail.
	spoil       func(before *policy.Document, plan *policy.Plan)
	spoilRecord func(*placement.Desired)
	// spoilMembers changes what routing is told.
	spoilMembers func(*placement.Members)
}

// Result is what a run was.
type Result struct {
	Hours      float64 // policy-hours
	Decisions  int
	Faults     int
	Actions    int           // of users
	Operations map[Ended]int // that ended
	Kills      int           // of the controller
	Broken     error         // the first invariant that did not hold
	Trace      []string      // the last lines before it
}

// Ended is how an operation ended.
type Ended struct {
	Type   policy.Type
	Status policy.Status
}

const traceLines = 400

// run is a simulated cluster.
type run struct {
	clock
	cfg           Config
	rng           *rand.Rand
	nodes         []*node
	policies      []*workload
	registry      bool
	ingress       bool      // an ingress node confirms what it is told
	ingressSilent time.Time // since when it does not
	alive         bool      // the controller runs
	started       time.Time
	// controllerLinked: the controller's own network works.
	controllerLinked bool
	quiet            bool // no new faults and actions
	lastFault        time.Time
	view             policy.World // maps of the last look
	result           Result
	samples          int // decisions since the last one that was made twice
}

// workload is one policy as the controller and the users know it.
type workload struct {
	name      string
	doc       policy.Document // as stored
	exists    bool
	observed  map[string]placement.Observed // as the controller heard
	wake      uint64
	due       time.Time
	bad       map[uint64]bool // generations that do not become ready
	changed   time.Time       // the document changed last
	epoch     int             // counts policies of the name
	minute    time.Time
	decisions int               // since minute
	limited   bool              // by its document it is worked on, and counts against the limit
	contents  map[uint64]string // of every generation
}

// Run simulates and returns what happened.
func Run(cfg Config) Result {
	r := simulate(cfg)
	if r.Broken != nil && cfg.Trace == nil {
		var last []string
		cfg.Trace = func(line string) {
			if last = append(last, line); len(last) > 2*traceLines {
				last = slices.Delete(last, 0, traceLines)
			}
		}
		simulate(cfg)
		r.Trace = last[max(0, len(last)-traceLines):]
	}
	return r
}

func simulate(cfg Config) Result {
	s := &run{
		cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0x6f706669656c64)), registry: true, ingress: true, alive: true, controllerLinked: true,
		clock:  clock{now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)},
		result: Result{Operations: map[Ended]int{}},
	}
	s.started = s.now
	s.view = policy.World{Nodes: map[string]policy.Node{}, LinksClosed: map[string]bool{}, LinksOpen: map[string]bool{}}
	s.lastFault = s.now.Add(-time.Hour)
	for i := range cfg.Nodes {
		s.nodes = append(s.nodes, &node{s: s, id: fmt.Sprintf("node-%d", i+1), up: true, memory: s.room(i), healthy: s.now, copies: map[string]*replica{}, noPull: map[string]bool{}})
	}
	for i := range cfg.Policies {
		w := &workload{name: fmt.Sprintf("web%d", i+1), observed: map[string]placement.Observed{}, bad: map[uint64]bool{}, contents: map[uint64]string{}}
		s.policies = append(s.policies, w)
		s.after(s.between(0, 10*time.Second), func() { s.enable(w) })
		s.after(s.exp(cfg.UserEvery), func() { s.user(w) })
	}
	s.after(s.exp(cfg.FaultEvery), s.fault)
	end := s.now.Add(cfg.For)
	for s.result.Broken == nil && s.next(end) {
	}
	if s.result.Broken == nil {
		s.settle()
	}
	s.result.Hours = cfg.For.Hours() * float64(cfg.Policies)
	return s.result
}

// room is the memory of a node. Every fourth has little: for two copies, one or
// none. The first ones have enough for a policy to begin.
func (s *run) room(i int) int64 {
	if i < 3 || s.rng.IntN(4) != 0 {
		return 8 << 30
	}
	return int64(s.rng.IntN(3)) * need
}

// need is the memory that a copy takes.
const need = 64 << 20

func (s *run) between(a, b time.Duration) time.Duration {
	return a + time.Duration(s.rng.Int64N(int64(b-a)+1))
}
func (s *run) exp(mean time.Duration) time.Duration {
	return time.Duration(s.rng.ExpFloat64() * float64(mean))
}
func (s *run) chance(p float64) bool { return s.rng.Float64() < p }
func (s *run) pick() *node           { return s.nodes[s.rng.IntN(len(s.nodes))] }

func (s *run) broken(name string, generation uint64) bool {
	w := s.workload(name)
	v := versionOf(&w.doc, generation)
	return v != nil && w.bad[contentOf(v)]
}

func (s *run) workload(name string) *workload {
	for _, w := range s.policies {
		if w.name == name {
			return w
		}
	}
	return nil
}

func versionOf(d *policy.Document, generation uint64) *policy.Version {
	for i := range d.Versions {
		if d.Versions[i].Generation == generation {
			return &d.Versions[i]
		}
	}
	return nil
}

func contentOf(v *policy.Version) uint64 {
	n, err := strconv.ParseUint(v.Content, 10, 64)
	if err != nil {
		panic(err) // contents are numbers
	}
	return n
}

// streams is how many clients a draining copy still has.
func (s *run) streams(r *replica) int {
	if r.running && s.rng.IntN(3) == 0 {
		return 1
	}
	return 0
}

func (s *run) log(format string, args ...any) {
	if s.cfg.Trace != nil {
		s.cfg.Trace(fmt.Sprintf("%11s ", s.now.Sub(s.started).Round(time.Millisecond)) + fmt.Sprintf(format, args...))
	}
}

// enable gives a workload a policy where its original runs.
func (s *run) enable(w *workload) {
	if w.exists {
		return
	}
	origin := s.pick()
	for _, n := range s.nodes { // where the survivor of an earlier policy runs
		if r := n.copies[w.name]; r != nil && r.released && r.exists {
			origin = n
		}
	}
	if !origin.up || origin.cut || !s.alive {
		s.after(time.Minute, func() { s.enable(w) })
		return
	}
	w.epoch++
	w.bad, w.contents = map[uint64]bool{}, map[uint64]string{}
	for _, n := range s.nodes {
		delete(n.copies, w.name)
	}
	r := origin.replica(w.name)
	r.exists, r.running, r.original, r.gen, r.readyAt = true, true, true, 1, s.now
	r.mirrorOf = ""
	settings := s.settings()
	if settings.Selection == policy.SelectedNodes && !slices.Contains(settings.Nodes, origin.id) {
		settings.Nodes[0] = origin.id
		settings.NodePriority = nil
		settings.PriorityMode = false
	}
	captured := placement.Captured{
		Node: origin.id, Kind: placement.KindContainer, ID: fmt.Sprintf("c%d", w.epoch), Name: w.name, Running: true, ImageID: fmt.Sprintf("img-%s-%d-0", w.name, w.epoch),
		Arch: "amd64", Spec: []byte(`{}`), Memory: need, RestartPolicy: "always",
	}
	e := policy.Preflight(policy.EnableRequest{Workload: w.name, Node: origin.id, Container: w.name, Settings: settings, Ports: []placement.Port{{Port: 80, Protocol: placement.ProtocolHTTP}}},
		policy.Subject{Captured: captured, Nodes: s.world(w).Nodes})
	if !e.OK() {
		s.after(10*time.Minute, func() { s.enable(w) })
		return
	}
	w.doc, w.exists, w.observed = policy.NewDocument(s.now, e, captured, 0), true, map[string]placement.Observed{}
	w.changed = s.now
	s.log("user: enable %s on %s, %s", w.name, origin.id, describe(settings))
	s.publish(w)
	s.decide(w)
}

func describe(t policy.Settings) string {
	return fmt.Sprintf("%s %d, surge %d, unavailable %d, grace %d, drain %d, %s %v, priority %t %v", t.Mode, t.Replicas, t.MaxSurge, t.MaxUnavailable,
		t.ReplacementGraceSeconds, t.DrainSeconds, t.Selection, t.Nodes, t.PriorityMode, t.NodePriority)
}

// settings are what a user might choose.
func (s *run) settings() policy.Settings {
	t := policy.DefaultSettings(policy.Failover)
	if s.chance(0.6) {
		t = policy.DefaultSettings(policy.Replicated)
		t.Replicas = 2 + s.rng.IntN(max(1, len(s.nodes)-2))
	}
	t.ReplacementGraceSeconds = []int{0, 5, 15, 15, 60}[s.rng.IntN(5)]
	t.MaxUnavailable = []int{0, 0, 1, 2}[s.rng.IntN(4)]
	t.MaxSurge = []int{0, 1, 1, 2}[s.rng.IntN(4)]
	t.DrainSeconds = []int{0, 5, 30}[s.rng.IntN(3)]
	t.FailbackDelaySeconds = []int{0, 60, 300}[s.rng.IntN(3)]
	if s.chance(0.2) && len(s.nodes) > t.Replicas+1 {
		t.Selection = policy.SelectedNodes
		for _, i := range s.rng.Perm(len(s.nodes))[:t.Replicas+1] {
			t.Nodes = append(t.Nodes, s.nodes[i].id)
		}
	}
	if s.chance(0.4) {
		t.PriorityMode = true
		for _, i := range s.rng.Perm(len(s.nodes)) {
			if id := s.nodes[i].id; t.Selection == policy.AllNodes || slices.Contains(t.Nodes, id) {
				t.NodePriority = append(t.NodePriority, id)
			}
		}
	}
	return t
}
