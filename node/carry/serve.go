package carry

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/network"

	"github.com/opfield/availability/node/discovery"
	"github.com/opfield/availability/placement"
)

// serve makes exactly one container of the wanted generation run. An older one
// is kept until the new one has started, so that nothing is ever deleted
// without a successor.
func (k *containers) serve(ctx context.Context, t *task, own []*owned) (time.Duration, error) {
	var cur *owned
	if len(own) > 0 && wanted(own[0], t) == 1 {
		cur, own = own[0], own[1:]
	}
	if cur == nil {
		var err error
		if cur, err = k.create(ctx, t, own); err != nil {
			return 0, err
		}
		t.worker.crash.forgive()
	} else if err := k.imageKnown(ctx, t); err != nil {
		return 0, err
	}
	old := own
	for _, o := range old { // published ports are free only after the stop
		if err := k.stop(ctx, t, o); err != nil {
			return 0, err
		}
	}
	if err := k.showOne(t, cur); err != nil {
		return 0, err
	}
	if cur.ranBefore() && len(old) == 0 && cur.name() != t.want.Container {
		if err := t.outside(fmt.Sprintf("container %s was renamed to %s", t.want.Container, cur.name())); err != nil {
			return 0, err
		}
	}
	if err := k.named(ctx, t, cur, old); err != nil {
		return 0, err
	}
	if cur.State.Paused {
		if err := t.outside(fmt.Sprintf("container %s was paused", cur.name())); err != nil {
			return 0, err
		}
		if err := do(ctx, changeLimit, "unpause container", func(ctx context.Context) error { return k.engine.ContainerUnpause(ctx, cur.ID) }); err != nil {
			return 0, err
		}
	}
	if err := k.restart(ctx, t, cur); err != nil {
		return 0, err
	}
	if !cur.running() {
		if wait, err := k.start(ctx, t, cur); err != nil || wait > 0 {
			return wait, err
		}
		if !cur.running() { // it ended already: the next look counts that
			return time.Millisecond, nil
		}
	}
	if err := k.restarted(t, cur); err != nil {
		return 0, err
	}
	for _, o := range old {
		if err := k.remove(ctx, t, o); err != nil {
			return 0, err
		}
	}
	return 0, nil
}

// start is the one place where a copy is started.
func (k *containers) start(ctx context.Context, t *task, cur *owned) (time.Duration, error) {
	if err := k.mayStart(t.want); err != nil {
		return 0, err
	}
	now := time.Now()
	byHand := false
	if !cur.ranBefore() {
		if err := k.connected(ctx, t, cur); err != nil {
			return 0, err
		}
	} else {
		byHand = k.hands.signals(cur.ID, now)
		due := t.worker.crash.ended(cur.run(), func() bool { return !byHand }, now)
		if wait := due.Sub(now); wait > 0 && !byHand {
			t.noted = fmt.Sprintf("it ended by itself %d times, last with exit code %d", len(t.worker.crash.times), cur.State.ExitCode)
			return wait, nil
		}
	}
	err := do(ctx, changeLimit, "start container", func(ctx context.Context) error {
		return k.engine.ContainerStart(ctx, cur.ID, container.StartOptions{})
	})
	if err != nil {
		if text := err.Error(); strings.Contains(text, "port is already allocated") || strings.Contains(text, "address already in use") {
			return 0, fault(placement.CodePortTaken, err)
		}
		return 0, err
	}
	t.worker.crash.looked = true
	t.worker.carrier.metrics.starts.Inc()
	// An engine that ends its containers because it ends itself does not start
	// one: now it is known that somebody did it by hand.
	if byHand && k.hands.take(cur.ID) {
		if err := t.outside(fmt.Sprintf("container %s was stopped", cur.name())); err != nil {
			return 0, err
		}
	}
	found, err := k.inspect(ctx, cur.ID)
	if err != nil {
		return 0, err
	}
	if found.State != nil {
		cur.InspectResponse = found
	}
	return 0, k.showOne(t, cur)
}

// restart ends a container once for each restart that was asked for. The run
// that it ends is on disk first: after an interruption another run shows that
// it was done.
func (k *containers) restart(ctx context.Context, t *task, cur *owned) error {
	if t.memory.Restarts >= t.want.Restarts || t.memory.Restarting != "" && t.memory.Restarting != cur.run() {
		return nil
	}
	if err := t.remember(func(m *memory) { m.Restarting = cur.run() }); err != nil {
		return err
	}
	t.worker.crash.forgive()
	return k.stop(ctx, t, cur)
}

// restarted counts a restart that was done: from then on the container serves.
func (k *containers) restarted(t *task, cur *owned) error {
	if t.memory.Restarts >= t.want.Restarts || t.memory.Restarting == cur.run() {
		return nil
	}
	if err := t.remember(func(m *memory) { m.Restarts, m.Restarting = t.want.Restarts, "" }); err != nil {
		return err
	}
	return k.showOne(t, cur)
}

// named gives the container the placement's name. Older ones of ours make way.
func (k *containers) named(ctx context.Context, t *task, cur *owned, old []*owned) error {
	if cur.name() == t.want.Container {
		return nil
	}
	rename := func(o *owned, name string) error {
		err := do(ctx, changeLimit, "rename container", func(ctx context.Context) error { return k.engine.ContainerRename(ctx, o.ID, name) })
		if err == nil {
			o.Name = "/" + name
		}
		return err
	}
	holder, err := k.inspect(ctx, t.want.Container)
	switch {
	case cerrdefs.IsNotFound(err):
	case err != nil:
		return err
	default:
		i := slices.IndexFunc(old, func(o *owned) bool { return o.ID == holder.ID })
		if i < 0 {
			return fault(placement.CodeNameTaken, fmt.Errorf("%w: %s is container %s; rename or remove it", errTaken, t.want.Container, short(holder.ID)))
		}
		if err := rename(old[i], t.want.Container+"-old-"+short(holder.ID)); err != nil {
			return err
		}
	}
	return rename(cur, t.want.Container)
}

func short(id string) string { return id[:min(12, len(id))] }

// create makes the container of the wanted generation, under a name of its own
// if an older one has the placement's.
func (k *containers) create(ctx context.Context, t *task, old []*owned) (*owned, error) {
	name := t.want.Container
	holder, err := k.inspect(ctx, name)
	switch {
	case cerrdefs.IsNotFound(err):
	case err != nil:
		return nil, err
	case slices.ContainsFunc(old, func(o *owned) bool { return o.ID == holder.ID }):
		name += "-new-" + strconv.FormatUint(t.want.Generation, 10)
	default:
		return nil, fault(placement.CodeNameTaken, fmt.Errorf("%w: %s is container %s; rename or remove it", errTaken, name, short(holder.ID)))
	}
	ref, err := k.image(ctx, t)
	if err != nil {
		return nil, err
	}
	var spec placement.ContainerSpec
	config, host := &container.Config{}, &container.HostConfig{}
	if err := json.Unmarshal(t.want.Spec, &spec); err != nil {
		return nil, final(placement.CodeContainerStart, fmt.Errorf("spec of %s: %w", t.want.ID(), err))
	}
	for part, into := range map[string]any{"config": config, "host": host} {
		raw := spec.Config
		if part == "host" {
			raw = spec.Host
		}
		if len(raw) == 0 {
			continue
		}
		if err := json.Unmarshal(raw, into); err != nil {
			return nil, final(placement.CodeContainerStart, fmt.Errorf("spec of %s: %s: %w", t.want.ID(), part, err))
		}
	}
	config.Image, config.Env = ref, spec.Env
	if config.Labels == nil {
		config.Labels = map[string]string{}
	}
	for key, value := range k.labels(t.want) {
		config.Labels[key] = value
	}
	host.RestartPolicy = container.RestartPolicy{Name: container.RestartPolicyDisabled}
	host.AutoRemove = false
	networks, err := k.attach(ctx, host, spec.Networks)
	if err != nil {
		return nil, err
	}
	created, err := within(ctx, changeLimit, "create container", func(ctx context.Context) (container.CreateResponse, error) {
		return k.engine.ContainerCreate(ctx, config, host, networks, nil, name)
	})
	if cerrdefs.IsConflict(err) && strings.Contains(err.Error(), "is already in use by container") {
		return nil, fault(placement.CodeNameTaken, fmt.Errorf("%w: %w", errTaken, err))
	}
	if err != nil {
		return nil, err
	}
	// A new container needs no restart that was asked for before.
	if err := t.remember(func(m *memory) { m.Restarts, m.Restarting = t.want.Restarts, "" }); err != nil {
		return nil, err
	}
	found, err := k.inspect(ctx, created.ID)
	if err != nil {
		return nil, err
	}
	return &owned{InspectResponse: found, generation: t.want.Generation}, nil
}

// labels say that a container is ours. With the ports it is announced even if
// all we remember is lost.
func (k *containers) labels(d placement.Desired) map[string]string {
	labels := map[string]string{
		discovery.LabelWorkload: d.Workload, discovery.LabelPlacement: d.ID().String(), discovery.LabelGeneration: strconv.FormatUint(d.Generation, 10),
	}
	var ports []string
	for _, p := range d.Ports {
		ports = append(ports, fmt.Sprintf("%d=%s", p.Port, p.Protocol))
	}
	if len(ports) > 0 {
		labels[discovery.LabelPort] = strings.Join(ports, ",")
	}
	return labels
}

// attach makes sure that the networks exist, and returns those that the
// container is created with.
func (k *containers) attach(ctx context.Context, host *container.HostConfig, want []placement.ContainerNetwork) (*network.NetworkingConfig, error) {
	k.networks.Lock()
	defer k.networks.Unlock()
	for _, n := range want {
		_, err := within(ctx, inspectLimit, "inspect network", func(ctx context.Context) (network.Inspect, error) {
			return k.engine.NetworkInspect(ctx, n.Name, network.InspectOptions{})
		})
		if cerrdefs.IsNotFound(err) {
			err = do(ctx, changeLimit, "create network", func(ctx context.Context) error {
				_, err := k.engine.NetworkCreate(ctx, n.Name, network.CreateOptions{Driver: "bridge"})
				return err
			})
			if cerrdefs.IsConflict(err) {
				err = nil
			}
		}
		if err != nil {
			return nil, err
		}
	}
	// More than one at once needs API 1.44, and its meaning beside the default
	// network differs by version.
	config := &network.NetworkingConfig{EndpointsConfig: map[string]*network.EndpointSettings{}}
	for _, n := range want {
		if n.Name == string(host.NetworkMode) {
			config.EndpointsConfig[n.Name] = &network.EndpointSettings{Aliases: n.Aliases}
		}
	}
	return config, nil
}

// connected connects a container that never ran to those of its networks that
// it could not be created with.
func (k *containers) connected(ctx context.Context, t *task, cur *owned) error {
	var spec placement.ContainerSpec
	if err := json.Unmarshal(t.want.Spec, &spec); err != nil || cur.NetworkSettings == nil {
		return nil // create refuses such a specification
	}
	for _, n := range spec.Networks {
		if cur.NetworkSettings.Networks[n.Name] != nil {
			continue
		}
		if err := do(ctx, changeLimit, "connect network", func(ctx context.Context) error {
			return k.engine.NetworkConnect(ctx, n.Name, cur.ID, &network.EndpointSettings{Aliases: n.Aliases})
		}); err != nil && !strings.Contains(err.Error(), "already exists in network") {
			return err
		}
	}
	return nil
}

// image returns a reference by which a container can be created, and pulls it
// if it is not there.
func (k *containers) image(ctx context.Context, t *task) (string, error) {
	if t.want.Image.Digest == "" {
		t.show(func(o *placement.Observed) { o.ImageReady = false })
		if t.want.Mirror == nil || t.want.Want != placement.WantServing {
			if t.want.Want == placement.WantServing {
				return "", fault(placement.CodeImagePull, fmt.Errorf("the image of %s is not known yet", t.want.Workload))
			}
			return "", nil
		}
		return t.want.Mirror.Source, nil // the origin, before it was mirrored
	}
	ref, err := k.images.find(ctx, t.want.Image)
	if err != nil {
		return "", err
	}
	if ref == "" {
		t.show(func(o *placement.Observed) { o.ImageReady = false })
		if t.memory.Pulled == t.want.Image.Digest {
			if err := t.outside(fmt.Sprintf("image %s was removed", t.want.Image.Repository)); err != nil {
				return "", err
			}
			if err := t.remember(func(m *memory) { m.Pulled = "" }); err != nil {
				return "", err
			}
		}
		pull, done := t.worker.pulling(ctx)
		ref, err = k.images.pull(pull, t.want.Image)
		done()
		if err != nil {
			return "", err
		}
		if err := t.remember(func(m *memory) { m.pulled(t.want.Image) }); err != nil {
			return "", err
		}
	}
	return ref, k.imageThere(t)
}

func (k *containers) imageThere(t *task) error {
	t.show(func(o *placement.Observed) { o.ImageReady = true })
	if t.memory.Pulled == t.want.Image.Digest {
		return nil
	}
	return t.remember(func(m *memory) { m.Pulled = t.want.Image.Digest })
}

// imageKnown looks whether the image is there and does not pull it: what runs
// has it.
func (k *containers) imageKnown(ctx context.Context, t *task) error {
	if t.want.Image.Digest == "" {
		return nil
	}
	ref, err := k.images.find(ctx, t.want.Image)
	if err != nil {
		return err
	}
	t.show(func(o *placement.Observed) { o.ImageReady = ref != "" })
	return nil
}
