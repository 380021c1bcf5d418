package apitest

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opfield/availability/api"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
	"github.com/opfield/availability/policy/engine"
)

var _ api.Availability = (*Policies)(nil)

// Policies is a policy engine without nodes: it keeps policies, operations and
// nodes, and an operation goes on when the test says so.
type Policies struct {
	mu         sync.Mutex
	nodes      map[string]*policy.Node
	names      map[string]string
	lost       map[string]bool
	containers map[string]placement.Captured // by "node/name"
	blockers   []policy.Notice
	warnings   []policy.Notice
	policies   map[string]*kept
	clock      time.Time
	unknown    bool
}

type kept struct {
	view    policy.View
	queue   []policy.Operation
	history []policy.Operation
	changes []policy.Change
	counter int
	changed chan struct{}
}

// NewPolicies returns an engine that knows nodes.
func NewPolicies(nodes ...string) *Policies {
	p := &Policies{
		nodes: map[string]*policy.Node{}, names: map[string]string{}, lost: map[string]bool{},
		containers: map[string]placement.Captured{}, policies: map[string]*kept{}, clock: time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC),
	}
	for _, n := range nodes {
		p.nodes[n] = &policy.Node{ID: n, State: policy.NodeOnline, Known: true, Facts: placement.NodeFacts{Arch: "amd64", CPU: 4000, Memory: 8 << 30}}
	}
	return p
}

// Container adds a container to a node.
func (p *Policies) Container(node, name string, ports ...placement.Port) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.containers[node+"/"+name] = placement.Captured{Node: node, Name: name, Running: true, Ready: true, Ports: ports}
}

// Find sets what every preflight finds.
func (p *Policies) Find(blockers, warnings []policy.Notice) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.blockers, p.warnings = blockers, warnings
}

// Work changes the operation that is worked on and the view around it.
func (p *Policies) Work(workload string, change func(*policy.View, *policy.Operation)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.policies[workload]
	change(&k.view, &k.queue[0])
	p.endLocked(workload, k)
}

// SetKnown says whether the engine knows the policies. Requests are not
// refused for it.
func (p *Policies) SetKnown(known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unknown = !known
}

// Known is part of api.Availability.
func (p *Policies) Known() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.unknown {
		return engine.ErrNotReady
	}
	return nil
}

// Changes returns the versions that were asked for.
func (p *Policies) Changes(workload string) []policy.Change {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.policies[workload].changes)
}

// Name returns a node's display name.
func (p *Policies) Name(node string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.names[node]
}

// Lost reports whether somebody confirmed that a node is lost.
func (p *Policies) Lost(node string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lost[node]
}

// Silence takes a node away.
func (p *Policies) Silence(node string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.nodes[node].State = policy.NodeNotReporting
}

// endLocked moves an ended operation into the history and tells everybody.
func (p *Policies) endLocked(workload string, k *kept) {
	if len(k.queue) > 0 && k.queue[0].Status.Over() {
		ended := k.queue[0]
		k.queue, k.history = k.queue[1:], append([]policy.Operation{ended}, k.history...)
		if ended.Type == policy.Disable && ended.Status == policy.Completed {
			delete(p.policies, workload)
		}
	}
	k.view.Operation, k.view.Queued = nil, nil
	if len(k.queue) > 0 {
		first := k.queue[0]
		k.view.Operation, k.view.Queued = &first, slices.Clone(k.queue[1:])
	}
	close(k.changed)
	k.changed = make(chan struct{})
}

func (p *Policies) queueLocked(workload string, op policy.Operation) policy.Operation {
	k := p.policies[workload]
	k.counter++
	op.ID, op.Phase, op.Status, op.CreatedAt = fmt.Sprintf("%s-%d", workload, k.counter), policy.Queued, policy.Pending, p.clock
	k.queue = append(k.queue, op)
	p.endLocked(workload, k)
	return op
}

func refuse(code policy.Code, format string, args ...any) *policy.Refusal {
	return &policy.Refusal{Code: code, Message: fmt.Sprintf(format, args...), Conflict: true}
}

func missing(code policy.Code, format string, args ...any) *policy.Refusal {
	return &policy.Refusal{Code: code, Message: fmt.Sprintf(format, args...), NotFound: true}
}

// Check is part of api.Availability.
func (p *Policies) Check(_ context.Context, req policy.EnableRequest) (policy.Eligibility, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.checkLocked(req)
}

func (p *Policies) checkLocked(req policy.EnableRequest) (policy.Eligibility, error) {
	if p.nodes[req.Node] == nil {
		return policy.Eligibility{}, missing(policy.CodeNodeUnknown, "there is no node %s; see `opfield nodes list`", req.Node)
	}
	c, ok := p.containers[req.Node+"/"+req.Container]
	if !ok {
		return policy.Eligibility{}, missing(policy.CodeContainerUnknown, "node %s has no container %s; see `opfield workloads`", req.Node, req.Container)
	}
	out := policy.Eligibility{Workload: req.Workload, Blockers: append([]policy.Notice{}, p.blockers...), Warnings: append([]policy.Notice{}, p.warnings...), Ports: req.Ports, Settings: req.Settings}
	if len(out.Ports) == 0 {
		out.Ports = c.Ports
	}
	if len(out.Ports) == 0 {
		out.Blockers = append(out.Blockers, policy.Notice{Code: policy.CodePorts, Field: "ports", Message: "the container has no label with ports; name them"})
	}
	for _, id := range slices.Sorted(maps.Keys(p.nodes)) {
		n := p.nodes[id]
		r := policy.NodeReason{Node: id, Origin: id == req.Node, FreeCPU: n.Facts.CPU, FreeMemory: n.Facts.Memory}
		r.Selected = req.Settings.Selection != policy.SelectedNodes || slices.Contains(req.Settings.Nodes, id)
		switch {
		case n.State != policy.NodeOnline:
			r.Reason, r.Message = policy.CodeNodeOffline, "it is "+string(n.State)
		case !r.Selected:
			r.Reason, r.Message = policy.CodeNodeNotSelected, "it is not among the selected nodes"
		}
		r.Eligible = r.Reason == ""
		out.Nodes = append(out.Nodes, r)
	}
	return out, nil
}

// Enable is part of api.Availability.
func (p *Policies) Enable(_ context.Context, req policy.EnableRequest) (policy.Operation, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range p.policies {
		if k.view.Original.Node == req.Node && k.view.Original.Container == req.Container {
			return policy.Operation{}, refuse(policy.CodePlacementManaged, "container %s on node %s is a placement of %s; change the policy instead", req.Container, req.Node, k.view.Workload)
		}
	}
	if p.policies[req.Workload] != nil {
		return policy.Operation{}, refuse(policy.CodeExists, "workload %s has a policy; see `opfield ha update %s`", req.Workload, req.Workload)
	}
	e, err := p.checkLocked(req)
	if err != nil {
		return policy.Operation{}, err
	}
	if !e.OK() {
		return policy.Operation{}, &policy.Refusal{Code: policy.CodePreflight, Message: "the workload cannot be made available as things are", Eligibility: &e, Conflict: true}
	}
	v := policy.View{
		Workload: req.Workload, Kind: placement.KindContainer, Health: policy.Changing, Wanted: req.Settings.Replicas, Serving: 1, Image: "registry/" + req.Workload + "@sha256:1", Version: 1,
		Ports: e.Ports, Settings: req.Settings, Original: policy.Original{Node: req.Node, Container: req.Container}, CreatedAt: p.clock, Warnings: e.Warnings,
		Placements: []policy.PlacementView{{
			Node: req.Node, NodeState: policy.NodeOnline, Want: placement.WantServing, Generation: 1, Original: true, Container: req.Container,
			State: placement.StateRunning, Ready: true, ImageReady: true, Since: p.clock,
		}},
	}
	if req.Settings.PriorityMode {
		v.Primary, v.ServingFrom = req.Settings.NodePriority[0], []string{req.Node}
		v.OnBackup = v.Primary != req.Node
	}
	p.policies[req.Workload] = &kept{view: v, changed: make(chan struct{})}
	return p.queueLocked(req.Workload, policy.Operation{Type: policy.Enable, Reason: "enabled"}), nil
}

// List is part of api.Availability.
func (p *Policies) List() []policy.View {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []policy.View
	for _, name := range slices.Sorted(maps.Keys(p.policies)) {
		v := p.policies[name].view
		v.Placements = slices.Clone(v.Placements)
		out = append(out, v)
	}
	return out
}

// Get is part of api.Availability.
func (p *Policies) Get(workload string) (policy.View, bool) {
	v, _, ok := p.Watch(workload)
	return v, ok
}

// Watch is part of api.Availability.
func (p *Policies) Watch(workload string) (policy.View, <-chan struct{}, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.policies[workload]
	if k == nil {
		return policy.View{}, nil, false
	}
	v := k.view
	v.Placements = slices.Clone(v.Placements)
	return v, k.changed, true
}

func (p *Policies) findLocked(workload string) (*kept, error) {
	if k := p.policies[workload]; k != nil {
		return k, nil
	}
	return nil, missing(policy.CodeUnknown, "workload %s has no policy; see `opfield ha list`", workload)
}

// Operations is part of api.Availability.
func (p *Policies) Operations(workload string) ([]policy.Operation, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k, err := p.findLocked(workload)
	if err != nil {
		return nil, err
	}
	return slices.Concat(k.queue, k.history), nil
}

// Update is part of api.Availability.
func (p *Policies) Update(_ context.Context, workload string, settings policy.Settings) (policy.Operation, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k, err := p.findLocked(workload)
	if err != nil {
		return policy.Operation{}, err
	}
	k.view.Settings, k.view.Wanted = settings, settings.Replicas
	return p.queueLocked(workload, policy.Operation{Type: policy.Scale, Reason: "settings changed"}), nil
}

// Rollout is part of api.Availability.
func (p *Policies) Rollout(_ context.Context, workload string, change policy.Change) (policy.Operation, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k, err := p.findLocked(workload)
	if err != nil {
		return policy.Operation{}, err
	}
	if change.Image == "" && len(change.Env)+len(change.Labels) == 0 && change.Command == nil && change.Memory == nil && change.CPU == nil {
		return policy.Operation{}, &policy.Refusal{Code: policy.CodeChangeEmpty, Message: "nothing is changed"}
	}
	k.changes = append(k.changes, change)
	return p.queueLocked(workload, policy.Operation{Type: policy.Rollout, Target: k.view.Version + 1, From: k.view.Version}), nil
}

// Disable is part of api.Availability.
func (p *Policies) Disable(_ context.Context, workload string, req policy.DisableRequest) (policy.Operation, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k, err := p.findLocked(workload)
	switch {
	case err != nil:
		return policy.Operation{}, err
	case req.Confirm != workload:
		return policy.Operation{}, &policy.Refusal{Code: policy.CodeConfirmation, Message: "confirm with the workload's name",
			Violations: []policy.Violation{{Code: policy.CodeConfirmation, Field: "confirm", Message: "want the workload's name"}}}
	case !slices.ContainsFunc(k.view.Placements, func(v policy.PlacementView) bool { return v.Node == req.Survivor }):
		return policy.Operation{}, &policy.Refusal{Code: policy.CodeSurvivor, Message: "no placement there",
			Violations: []policy.Violation{{Code: policy.CodeSurvivor, Field: "survivor", Message: "want the node of a serving placement"}}}
	case k.view.Health == policy.Disabling:
		return policy.Operation{}, refuse(policy.CodeDisableInProgress, "the policy is given up already")
	}
	k.view.Health = policy.Disabling
	return p.queueLocked(workload, policy.Operation{Type: policy.Disable, Survivor: req.Survivor}), nil
}

// Do is part of api.Availability.
func (p *Policies) Do(_ context.Context, workload string, what policy.Type) (policy.Operation, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k, err := p.findLocked(workload)
	if err != nil {
		return policy.Operation{}, err
	}
	if k.view.Health == policy.Disabling {
		return policy.Operation{}, refuse(policy.CodeDisableInProgress, "the policy is being given up")
	}
	return p.queueLocked(workload, policy.Operation{Type: what}), nil
}

// Retry is part of api.Availability.
func (p *Policies) Retry(_ context.Context, workload, operation string) (policy.Operation, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k, err := p.findLocked(workload)
	if err != nil {
		return policy.Operation{}, err
	}
	for _, op := range k.history {
		switch {
		case op.ID != operation:
		case op.Status != policy.Failed:
			return policy.Operation{}, refuse(policy.CodeOperationNotFailed, "operation %s is %s; only a failed one can be tried again", op.ID, op.Status)
		default:
			return p.queueLocked(workload, policy.Operation{Type: op.Type, Reason: "retry of " + op.ID, Survivor: op.Survivor}), nil
		}
	}
	if i := slices.IndexFunc(k.queue, func(op policy.Operation) bool { return op.ID == operation }); i >= 0 {
		if k.queue[i].Status == policy.Waiting {
			k.queue[i].Status, k.queue[i].Next = policy.Pending, time.Time{}
			p.endLocked(workload, k)
		}
		return k.queue[i], nil
	}
	return policy.Operation{}, missing(policy.CodeOperationUnknown, "workload %s has no operation %s", workload, operation)
}

// Nodes is part of api.Availability.
func (p *Policies) Nodes() []policy.Node {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []policy.Node
	for _, n := range p.nodes {
		out = append(out, *n)
	}
	slices.SortFunc(out, func(a, b policy.Node) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

func (p *Policies) node(id string, change func(*policy.Node) error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.nodes[id]
	if n == nil {
		return missing(policy.CodeNodeUnknown, "there is no node %s; see `opfield nodes list`", id)
	}
	return change(n)
}

// DrainNode is part of api.Availability.
func (p *Policies) DrainNode(_ context.Context, node string) error {
	return p.node(node, func(n *policy.Node) error { n.Drained = true; return nil })
}

// UndrainNode is part of api.Availability.
func (p *Policies) UndrainNode(_ context.Context, node string) error {
	return p.node(node, func(n *policy.Node) error { n.Drained = false; return nil })
}

// ConfirmLost is part of api.Availability.
func (p *Policies) ConfirmLost(_ context.Context, node string) error {
	return p.node(node, func(n *policy.Node) error {
		if n.State == policy.NodeOnline {
			return refuse(policy.CodeNodeNotLost, "node %s is online", node)
		}
		p.lost[node] = true
		return nil
	})
}

// RemoveNode is part of api.Availability.
func (p *Policies) RemoveNode(_ context.Context, node string) error {
	return p.node(node, func(*policy.Node) error {
		var users []string
		for name, k := range p.policies {
			if slices.ContainsFunc(k.view.Placements, func(v policy.PlacementView) bool { return v.Node == node }) {
				users = append(users, name)
			}
		}
		if len(users) > 0 {
			slices.Sort(users)
			return refuse(policy.CodeNodeInUse, "node %s has placements of %s; drain it first", node, strings.Join(users, ", "))
		}
		delete(p.nodes, node)
		return nil
	})
}

// RenameNode is part of api.Availability.
func (p *Policies) RenameNode(_ context.Context, node, name string) error {
	return p.node(node, func(*policy.Node) error { p.names[node] = name; return nil })
}
