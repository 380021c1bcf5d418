package policy

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/opfield/availability/placement"
)

// mayChange refuses requests that make no sense any more (DIS-3).
func (d *Document) mayChange() *Refusal {
	if d.Disabling {
		return refuse(CodeDisableInProgress, "workload %s is being disabled; wait for it, or retry the disable", d.Workload)
	}
	for _, op := range d.Operations {
		if op.Type == Disable {
			return refuse(CodeDisableInProgress, "workload %s has a disable in its queue", d.Workload)
		}
	}
	return nil
}

// Update takes new settings. They hold at once; the operation shows how the
// placements follow. Unchanged settings repair what is missing (LOS-2).
func (d *Document) Update(now time.Time, s Settings) (Operation, *Refusal) {
	if r := d.mayChange(); r != nil {
		return Operation{}, r
	}
	if wrong := s.Validate(); len(wrong) > 0 {
		return Operation{}, &Refusal{Code: wrong[0].Code, Message: "the settings are not valid", Violations: wrong}
	}
	if !s.allows(d.Original.Node) && d.placementServes(d.Original.Node) {
		return Operation{}, &Refusal{Code: CodeOriginNotSelected, Message: "the original must be among the selected nodes",
			Violations: []Violation{{CodeOriginNotSelected, "nodes", fmt.Sprintf("the original runs on %s; select it too", d.Original.Node)}}}
	}
	d.Settings, d.Operations = s, slices.Clone(d.Operations)
	for i := range d.Operations {
		if op := &d.Operations[i]; op.Type == Scale && op.Status != Running {
			op.Next = time.Time{}
			return *op, nil
		}
	}
	return *d.add(now, Scale, "settings changed"), nil
}

func (d *Document) placementServes(node string) bool {
	p := d.placementOn(node)
	return p != nil && p.Want == placement.WantServing
}

// Do queues a stop, start or restart.
func (d *Document) Do(now time.Time, t Type) (Operation, *Refusal) {
	if r := d.mayChange(); r != nil {
		return Operation{}, r
	}
	if t != Start && t != Stop && t != Restart {
		return Operation{}, refuse(CodeChangeInvalid, "%s cannot be asked for; use start, stop or restart", t)
	}
	return *d.add(now, t, "requested"), nil
}

// Rollout queues a new version.
func (d *Document) Rollout(now time.Time, c Change) (Operation, *Refusal) {
	if r := d.mayChange(); r != nil {
		return Operation{}, r
	}
	next, r := d.changed(c)
	if r != nil {
		return Operation{}, r
	}
	next.Generation, next.CreatedAt = d.number(), now
	next.Content = fmt.Sprint(next.Generation)
	d.Versions = append(slices.Clone(d.Versions), next)
	op := d.add(now, Rollout, "requested")
	op.Target = next.Generation
	return *op, nil
}

// changed returns the latest version with the change; one that is still queued
// is the base of the next change.
func (d *Document) changed(c Change) (Version, *Refusal) {
	base := d.version(d.Current)
	for _, op := range d.Operations {
		if op.Type == Rollout && op.Target > base.Generation && !op.RolledBack {
			base = d.version(op.Target)
		}
	}
	next, wrong := c.apply(*base)
	if len(wrong) > 0 {
		return Version{}, &Refusal{Code: wrong[0].Code, Message: "the change is not valid", Violations: wrong}
	}
	return next, nil
}

// apply returns the version with the change.
func (c Change) apply(v Version) (Version, []Violation) {
	var wrong []Violation
	bad := func(field, format string, args ...any) {
		wrong = append(wrong, Violation{CodeChangeInvalid, field, fmt.Sprintf(format, args...)})
	}
	if c.Image == "" && len(c.Env) == 0 && c.Command == nil && len(c.Labels) == 0 && c.Memory == nil && c.CPU == nil {
		return v, []Violation{{CodeChangeEmpty, "image", "nothing changes; give an image, a variable, a command, a label or a limit"}}
	}
	if strings.ContainsAny(c.Image, " \t\r\n\x00") || strings.HasPrefix(c.Image, "-") {
		bad("image", "want a reference such as registry.example/web:2 or an image id")
	}
	if c.Image != "" {
		v.Source, v.SourceNode, v.Image = c.Image, "", placement.Image{}
	}
	var spec placement.ContainerSpec
	if err := json.Unmarshal(v.Spec, &spec); err != nil {
		bad("image", "the stored specification cannot be read: %v", err)
		return v, wrong
	}
	for _, name := range slices.Sorted(maps.Keys(c.Env)) {
		if name == "" || strings.ContainsAny(name, "=\x00") {
			bad("env", "a variable's name is not empty and has no '='")
			continue
		}
		spec.Env = slices.DeleteFunc(slices.Clone(spec.Env), func(e string) bool { return strings.HasPrefix(e, name+"=") || e == name })
		if value := c.Env[name]; value != nil {
			if strings.Contains(*value, "\x00") {
				bad("env", "the value of %s has a NUL byte", name)
			}
			spec.Env = append(spec.Env, name+"="+*value)
		} else {
			spec.Env = append(spec.Env, name) // Docker removes a variable of the image that is named without a value
		}
	}
	spec.Config = edit(spec.Config, "Cmd", c.Command != nil, c.Command, bad)
	spec.Config = c.editLabels(spec.Config, bad)
	if c.Memory != nil {
		if *c.Memory != 0 && *c.Memory < 6<<20 {
			bad("memory", "%d bytes: Docker wants at least 6 MiB, or 0 for no limit", *c.Memory)
		}
		v.Memory = *c.Memory
		spec.Host = edit(spec.Host, "Memory", true, *c.Memory, bad)
	}
	if c.CPU != nil {
		if *c.CPU < 0 {
			bad("cpu", "%d: want thousandths of a core, or 0 for no limit", *c.CPU)
		}
		v.CPU = *c.CPU
		spec.Host = edit(spec.Host, "NanoCpus", true, *c.CPU*1_000_000, bad)
	}
	encoded, err := json.Marshal(spec)
	if err != nil {
		bad("env", "%v", err)
	}
	v.Spec = encoded
	return v, wrong
}

// edit sets one field of a JSON object.
func edit(doc json.RawMessage, field string, set bool, value any, bad func(string, string, ...any)) json.RawMessage {
	if !set {
		return doc
	}
	fields := map[string]json.RawMessage{}
	if len(doc) > 0 {
		if err := json.Unmarshal(doc, &fields); err != nil {
			bad(field, "the stored specification cannot be read: %v", err)
			return doc
		}
	}
	text, err := json.Marshal(value)
	if err != nil {
		bad(field, "%v", err)
		return doc
	}
	fields[field] = text
	out, err := json.Marshal(fields) // sorted keys
	if err != nil {
		bad(field, "%v", err)
		return doc
	}
	return out
}

// ownLabels begins the labels that are ours.
const ownLabels = "opfield."

func (c Change) editLabels(config json.RawMessage, bad func(string, string, ...any)) json.RawMessage {
	if len(c.Labels) == 0 {
		return config
	}
	var have struct{ Labels map[string]string }
	if len(config) > 0 {
		if err := json.Unmarshal(config, &have); err != nil {
			bad("labels", "the stored specification cannot be read: %v", err)
			return config
		}
	}
	labels := maps.Clone(have.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	for _, name := range slices.Sorted(maps.Keys(c.Labels)) {
		switch value := c.Labels[name]; {
		case name == "" || strings.HasPrefix(name, ownLabels):
			bad("labels", "%q: labels that begin with %s are managed", name, ownLabels)
		case value == nil:
			delete(labels, name)
		default:
			labels[name] = *value
		}
	}
	return edit(config, "Labels", true, labels, bad)
}

// Disable queues the end of the policy.
func (d *Document) Disable(now time.Time, r DisableRequest, w World) (Operation, *Refusal) {
	if refusal := d.mayChange(); refusal != nil {
		return Operation{}, refusal
	}
	if r.Confirm != d.Workload {
		return Operation{}, &Refusal{Code: CodeConfirmation, Message: "the confirmation is not the workload's name",
			Violations: []Violation{{CodeConfirmation, "confirm", fmt.Sprintf("want %q, the name of the workload", d.Workload)}}}
	}
	p := d.placementOn(r.Survivor)
	if p == nil || p.Want == placement.WantAbsent {
		return Operation{}, &Refusal{Code: CodeSurvivor, Message: "the surviving placement is not one of this workload",
			Violations: []Violation{{CodeSurvivor, "survivor", fmt.Sprintf("there is no placement on node %q; use one of %s", r.Survivor, strings.Join(d.nodes(), ", "))}}}
	}
	if s := w.Nodes[r.Survivor].State; s != NodeOnline {
		return Operation{}, refuse(CodeSurvivorUnreachable, "node %s is %s: a survivor must be reachable", r.Survivor, s)
	}
	dec := &decision{w: w, doc: *d}
	ready := func(p *Placement) bool { return dec.ready(p) }
	if d.Stopped && !p.Original && p.Want == placement.WantPrepared {
		return Operation{}, refuse(CodeSurvivor, "the workload is stopped, and node %s has its image only; choose a node that has a container", r.Survivor)
	}
	if !d.Stopped && !ready(p) {
		for i := range d.Placements {
			if q := &d.Placements[i]; ready(q) {
				return Operation{}, refuse(CodeSurvivor, "the placement on %s does not serve, but that on %s does; choose one that serves", p.Node, q.Node)
			}
		}
	}
	op := d.add(now, Disable, "requested")
	op.Survivor = r.Survivor
	return *op, nil
}

func (d *Document) nodes() []string {
	var out []string
	for _, p := range d.Placements {
		if p.Want != placement.WantAbsent {
			out = append(out, p.Node)
		}
	}
	slices.SortFunc(out, compare)
	return out
}

// Retry queues an operation that failed again, or lets one that waits begin
// now. An empty id is the last one that failed.
func (d *Document) Retry(now time.Time, id string) (Operation, *Refusal) {
	d.Operations, d.Placements = slices.Clone(d.Operations), slices.Clone(d.Placements)
	for i := range d.Operations {
		if op := &d.Operations[i]; op.ID == id || id == "" && op.Status == Waiting {
			if op.Status == Waiting {
				op.Next, op.Avoid = time.Time{}, nil
				for i := range d.Placements {
					if p := &d.Placements[i]; p.Mirror != "" {
						p.Revision = d.number() // what the node said of the last attempt does not count
					}
				}
			}
			return *op, nil
		}
	}
	for _, op := range d.History {
		if op.ID != id && (id != "" || op.Status != Failed) {
			continue
		}
		if op.Status != Failed {
			return Operation{}, refuse(CodeOperationNotFailed, "operation %s is %s; only a failed one can be tried again", op.ID, op.Status)
		}
		if r := d.mayChange(); r != nil && op.Type != Disable {
			return Operation{}, r
		}
		next := d.add(now, op.Type, "retry of "+op.ID)
		next.Survivor = op.Survivor
		switch op.Type {
		case Rollout:
			v := d.version(op.Target)
			if v == nil {
				d.Operations = d.Operations[:len(d.Operations)-1]
				return Operation{}, refuse(CodeOperationUnknown, "the version of %s is not kept any more; ask for it with `opfield ha rollout`", op.ID)
			}
			again := *v
			again.Generation, again.CreatedAt = d.number(), now
			d.Versions = append(slices.Clone(d.Versions), again)
			next.Target = again.Generation
		case Failback:
			d.FailbackAfter = time.Time{}
		}
		return *next, nil
	}
	return Operation{}, &Refusal{Code: CodeOperationUnknown, NotFound: true, Message: fmt.Sprintf("there is no operation %q of workload %s that can be tried again", id, d.Workload)}
}
