package carry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"

	"github.com/opfield/availability/node/discovery"
	"github.com/opfield/availability/placement"
)

var (
	errTaken   = errors.New("the name belongs to a container that is not ours")
	errGone    = errors.New("the container to adopt does not exist")
	errForeign = errors.New("the container to adopt belongs to another placement")
)

// containers carries out placements that are one container each.
type containers struct {
	node     string
	engine   Engine
	images   *images
	hands    *hands
	mayStart func(placement.Desired) error
	owner    func(id string) string // workload by our memory
	given    func(id string) bool   // it was given back

	networks sync.Mutex // Docker makes two networks of one name, if asked twice at once
}

// owned is a container that is ours.
type owned struct {
	container.InspectResponse
	generation uint64
}

func (o *owned) name() string    { return strings.TrimPrefix(o.Name, "/") }
func (o *owned) running() bool   { return o.State.Running || o.State.Restarting }
func (o *owned) run() string     { return run(o.ID, o.State.StartedAt) }
func (o *owned) ranBefore() bool { return !o.startedAt().IsZero() }
func (o *owned) startedAt() time.Time {
	at, err := time.Parse(time.RFC3339Nano, o.State.StartedAt)
	if err != nil || at.Year() < 2 {
		return time.Time{}
	}
	return at
}

// Converge implements kind.
func (k *containers) Converge(ctx context.Context, t *task) (time.Duration, error) {
	if err := k.adopt(ctx, t); err != nil {
		return 0, err
	}
	own, err := k.own(ctx, t)
	if err != nil {
		return 0, err
	}
	if err := k.missing(t, own); err != nil {
		return 0, err
	}
	if err := k.see(t, own); err != nil {
		return 0, err
	}
	if t.want.Want == placement.WantReleased {
		return 0, k.release(ctx, t, own)
	}
	for _, o := range own {
		if err := k.quiet(ctx, t, o); err != nil {
			return 0, err
		}
	}
	switch t.want.Want {
	case placement.WantServing:
		return k.serve(ctx, t, own)
	case placement.WantStopped:
		err = k.stopAll(ctx, t, own)
	case placement.WantPrepared, placement.WantAbsent:
		if t.want.Original {
			err = k.keepOriginal(ctx, t, own)
		} else {
			err = k.removeAll(ctx, t, own)
		}
		if err == nil && t.want.Want == placement.WantPrepared {
			_, err = k.image(ctx, t)
		}
	}
	return 0, err
}

// adopt takes a container as it runs (ENA-1). The record is on disk before
// anything is changed.
func (k *containers) adopt(ctx context.Context, t *task) error {
	id := t.want.Adopt
	if id == "" || t.want.Want == placement.WantReleased {
		return nil
	}
	at := t.want.AdoptedAt
	if at == 0 && t.memory.Adopted == id {
		at = t.memory.AdoptedAt
	}
	at = cmp.Or(at, t.want.Generation)
	if t.memory.Adopted == id {
		if t.memory.AdoptedAt == at && !t.memory.released(id) {
			return nil
		}
	} else {
		found, err := k.inspect(ctx, id)
		switch {
		case cerrdefs.IsNotFound(err):
			if own, err := k.own(ctx, t); err != nil || len(own) > 0 {
				return err // it was replaced, and the record was lost
			}
			return final(placement.CodeAdoptGone, fmt.Errorf("%w: %s; disable the policy, or update the workload so that it is created", errGone, id))
		case err != nil:
			return err
		case found.ID != id || found.Config == nil || found.HostConfig == nil:
			return fault(placement.CodeAdoptGone, fmt.Errorf("%w: %s", errGone, id))
		}
		if other := found.Config.Labels[discovery.LabelPlacement]; other != "" && other != t.want.ID().String() {
			return final(placement.CodeNameTaken, fmt.Errorf("%w: %s", errForeign, other))
		}
		if other := k.owner(id); other != "" && other != t.want.Workload {
			return final(placement.CodeNameTaken, fmt.Errorf("%w: workload %s", errForeign, other))
		}
		policy := found.HostConfig.RestartPolicy
		if err := t.remember(func(m *memory) { m.Policy = &policy }); err != nil {
			return err
		}
	}
	return t.remember(func(m *memory) {
		m.Adopted, m.AdoptedAt = id, at
		m.Released = slices.DeleteFunc(slices.Clone(m.Released), func(r string) bool { return r == id })
	})
}

// own returns the containers of the placement, the wanted generation first,
// then the newest.
func (k *containers) own(ctx context.Context, t *task) ([]*owned, error) {
	list, err := within(ctx, listLimit, "list containers", func(ctx context.Context) ([]container.Summary, error) {
		return k.engine.ContainerList(ctx, container.ListOptions{All: true, Filters: filters.NewArgs(filters.Arg("label", discovery.LabelPlacement+"="+t.want.ID().String()))})
	})
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, s := range list {
		if s.Labels[discovery.LabelPlacement] == t.want.ID().String() && s.Labels[discovery.LabelWorkload] == t.want.Workload && s.Labels[discovery.LabelGeneration] != "" {
			ids = append(ids, s.ID)
		}
	}
	if id := t.memory.Adopted; id != "" && !slices.Contains(ids, id) {
		ids = append(ids, id)
	}
	var own []*owned
	for _, id := range ids {
		if t.memory.released(id) {
			continue
		}
		found, err := k.inspect(ctx, id)
		if cerrdefs.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if found.ContainerJSONBase == nil || found.State == nil || found.HostConfig == nil || found.Config == nil || found.State.Dead || found.State.Status == container.StateRemoving {
			continue
		}
		o := &owned{InspectResponse: found, generation: t.memory.AdoptedAt}
		if id != t.memory.Adopted {
			if o.generation, err = strconv.ParseUint(found.Config.Labels[discovery.LabelGeneration], 10, 64); err != nil {
				continue // not a label of ours
			}
		}
		own = append(own, o)
	}
	slices.SortFunc(own, func(a, b *owned) int {
		return cmp.Or(
			cmp.Compare(wanted(b, t), wanted(a, t)),
			cmp.Compare(b.generation, a.generation),
			cmp.Compare(ranked(b), ranked(a)),
			cmp.Compare(a.ID, b.ID),
		)
	})
	return own, nil
}

func wanted(o *owned, t *task) int {
	if o.generation == t.want.Generation {
		return 1
	}
	return 0
}

func ranked(o *owned) int {
	if o.running() {
		return 1
	}
	return 0
}

// missing tells when the container that counted was removed by somebody else.
func (k *containers) missing(t *task, own []*owned) error {
	id := t.memory.Current
	if id == "" || slices.ContainsFunc(own, func(o *owned) bool { return o.ID == id }) || t.memory.released(id) {
		return nil
	}
	if err := t.count("", 0); err != nil {
		return err
	}
	if t.want.Want == placement.WantReleased || t.want.Want == placement.WantAbsent {
		return nil
	}
	return t.outside(fmt.Sprintf("container %s was removed", t.want.Container))
}

// see makes the container count that events are about: one that runs, the
// wanted one first.
func (k *containers) see(t *task, own []*owned) error {
	var best *owned
	for _, o := range own {
		if best == nil || !best.running() && o.running() {
			best = o
		}
	}
	if best == nil {
		if !t.memory.released(t.memory.Current) {
			if err := t.count("", 0); err != nil {
				return err
			}
		}
		if t.want.Want == placement.WantReleased && t.memory.ReleasedAs != nil {
			return nil // what was shown last was given back
		}
		t.looked(func(o *placement.Observed) {
			o.Generation, o.Container, o.ImageConfig, o.State, o.Ready, o.Reason, o.Role = 0, "", "", placement.StateRemoved, false, "", role(t.want.Want)
		})
		return nil
	}
	return k.showOne(t, best)
}

func (k *containers) showOne(t *task, best *owned) error {
	if err := t.count(best.ID, best.generation); err != nil {
		return err
	}
	state := placement.StateStopped
	if best.running() {
		state = placement.StateStarting
	}
	t.looked(func(o *placement.Observed) {
		o.Generation, o.Container, o.ImageConfig, o.State, o.Role = best.generation, best.ID, configOf(best, t.want.Image, t.memory), state, roleOf(t.want, t.memory, best.generation)
		o.ImageReady = o.ImageReady || t.want.Image.Config != "" && o.ImageConfig == t.want.Image.Config
	})
	if best.running() {
		t.worker.crash.runs(best.startedAt(), time.Now())
	}
	return nil
}

// configOf returns the configuration of a container's image. With the
// containerd store Docker names the manifest or the index instead, or what was
// mirrored from here by a name that only this node knows.
func configOf(o *owned, want placement.Image, m memory) string {
	mirrored := m.Mirrored != nil && m.Mirrored.Digest == want.Digest && m.Mirror != nil && m.Mirror.Source == o.Image
	if want.Digest != "" && (mirrored || o.Image == want.Digest || strings.HasSuffix(o.Config.Image, "@"+want.Digest)) {
		return want.Config
	}
	return o.Image
}

// quiet takes the restart policy away: we start what crashed (RDY-4).
func (k *containers) quiet(ctx context.Context, t *task, o *owned) error {
	if p := o.HostConfig.RestartPolicy; p.Name == "" || p.Name == container.RestartPolicyDisabled {
		return nil
	}
	err := do(ctx, changeLimit, "set restart policy", func(ctx context.Context) error {
		_, err := k.engine.ContainerUpdate(ctx, o.ID, container.UpdateConfig{RestartPolicy: container.RestartPolicy{Name: container.RestartPolicyDisabled}})
		return err
	})
	if err != nil {
		return err
	}
	o.HostConfig.RestartPolicy = container.RestartPolicy{Name: container.RestartPolicyDisabled}
	return nil
}

// release gives the containers back (MOD-6, DIS-1): the record comes last, so
// that an interruption repeats what came before.
func (k *containers) release(ctx context.Context, t *task, own []*owned) error {
	if len(own) == 0 && t.memory.ReleasedAs != nil {
		return nil
	}
	restart := t.restartPolicy()
	for _, o := range own {
		if o.HostConfig.RestartPolicy == restart {
			continue
		}
		err := do(ctx, changeLimit, "restore restart policy", func(ctx context.Context) error {
			_, err := k.engine.ContainerUpdate(ctx, o.ID, container.UpdateConfig{RestartPolicy: restart})
			return err
		})
		if err != nil {
			return err
		}
	}
	if len(own) > 0 {
		// A name that somebody else has on this node is no reason not to give
		// the container back.
		if err := k.named(ctx, t, own[0], own[1:]); err != nil && !errors.Is(err, errTaken) {
			return err
		}
		if err := k.showOne(t, own[0]); err != nil {
			return err
		}
	}
	as := t.want
	as.Spec, as.Mirror = nil, nil
	return t.remember(func(m *memory) {
		for _, o := range own {
			if !m.released(o.ID) {
				m.Released = append(slices.Clone(m.Released), o.ID)
			}
		}
		m.Adopted, m.AdoptedAt, m.Policy, m.ReleasedAs = "", 0, nil, &as
	})
}

// restartPolicy is what a released container goes on with: that of the
// container that was adopted here, else that of the original; one that another
// copy outlived is started by nobody.
func (t *task) restartPolicy() container.RestartPolicy {
	switch {
	case t.want.Retired:
		return container.RestartPolicy{Name: container.RestartPolicyDisabled}
	case t.memory.Policy != nil:
		return *t.memory.Policy
	}
	name, count, _ := strings.Cut(t.want.RestartPolicy, ":")
	p := container.RestartPolicy{Name: container.RestartPolicyMode(cmp.Or(name, string(container.RestartPolicyDisabled)))}
	if n, err := strconv.Atoi(count); err == nil {
		p.MaximumRetryCount = n
	}
	return p
}

func (k *containers) inspect(ctx context.Context, id string) (container.InspectResponse, error) {
	return within(ctx, inspectLimit, "inspect container", func(ctx context.Context) (container.InspectResponse, error) {
		return k.engine.ContainerInspect(ctx, id)
	})
}

// stop ends a container as docker stop does.
func (k *containers) stop(ctx context.Context, t *task, o *owned) error {
	if !o.running() && !o.State.Paused {
		return nil
	}
	defer k.hands.ours(o.ID)()
	t.worker.crash.ours = o.run()
	limit := stopDefault
	if s := o.Config.StopTimeout; s != nil {
		limit = time.Duration(*s) * time.Second
	}
	err := do(ctx, limit+stopExtra, "stop container", func(ctx context.Context) error {
		return k.engine.ContainerStop(ctx, o.ID, container.StopOptions{})
	})
	if err != nil && !cerrdefs.IsNotFound(err) {
		return err
	}
	o.State.Running, o.State.Restarting, o.State.Paused = false, false, false
	return nil
}

func (k *containers) remove(ctx context.Context, t *task, o *owned) error {
	defer k.hands.ours(o.ID)()
	if t.memory.Current == o.ID {
		if err := t.count("", 0); err != nil {
			return err
		}
	}
	err := do(ctx, removeLimit, "remove container", func(ctx context.Context) error {
		return k.engine.ContainerRemove(ctx, o.ID, container.RemoveOptions{Force: true})
	})
	if cerrdefs.IsNotFound(err) || cerrdefs.IsConflict(err) && strings.Contains(err.Error(), "already in progress") {
		return nil
	}
	return err
}

func (k *containers) stopAll(ctx context.Context, t *task, own []*owned) error {
	for _, o := range own {
		if err := k.stop(ctx, t, o); err != nil {
			return err
		}
	}
	return k.see(t, own)
}

func (k *containers) removeAll(ctx context.Context, t *task, own []*owned) error {
	for _, o := range own {
		if err := k.stop(ctx, t, o); err != nil { // as gently as anything else that ends
			return err
		}
		if err := k.remove(ctx, t, o); err != nil {
			return err
		}
	}
	return k.see(t, nil)
}

// keepOriginal stops the original and keeps it (STP-2). Of several, left by an
// interrupted replacement, the newest that ever ran is the original.
func (k *containers) keepOriginal(ctx context.Context, t *task, own []*owned) error {
	if err := k.stopAll(ctx, t, own); err != nil || len(own) < 2 {
		return err
	}
	kept := slices.IndexFunc(own, (*owned).ranBefore)
	kept = max(kept, 0)
	for i, o := range own {
		if i != kept {
			if err := k.remove(ctx, t, o); err != nil {
				return err
			}
		}
	}
	if err := k.named(ctx, t, own[kept], nil); err != nil {
		return err
	}
	return k.see(t, own[kept:kept+1])
}
