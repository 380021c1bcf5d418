package dockertest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/events"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/system"
	"github.com/docker/docker/client"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// pass waits while a container hangs.
func (e *Engine) pass(ctx context.Context, id string) error {
	e.mu.Lock()
	hang, down := e.hanging[id], e.down
	e.mu.Unlock()
	if down != nil {
		return down
	}
	if hang == nil {
		return nil
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-hang:
		return nil
	}
}

// findLocked finds a container by id or name.
func (e *Engine) findLocked(id string) (*container.InspectResponse, error) {
	if e.down != nil {
		return nil, e.down
	}
	if c := e.containers[id]; c != nil {
		return c, nil
	}
	for _, c := range e.containers {
		if c.Name == "/"+id {
			return c, nil
		}
	}
	return nil, fmt.Errorf("container %s: %w", id, cerrdefs.ErrNotFound)
}

// change edits a container and announces it.
func (e *Engine) change(ctx context.Context, id string, action events.Action, edit func(*container.InspectResponse) error) error {
	if err := e.pass(ctx, id); err != nil {
		return err
	}
	e.mu.Lock()
	c, err := e.findLocked(id)
	if err == nil {
		err = edit(c)
	}
	e.mu.Unlock()
	if err == nil {
		e.Emit(c.ID, action)
	}
	return err
}

// AddImage puts an image on the node.
func (e *Engine) AddImage(name string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.images[name] = true
}

// HasImage reports whether an image is on the node.
func (e *Engine) HasImage(name string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.images[name]
}

// Pulls says how a reference is pulled: what it writes is the progress.
func (e *Engine) Pulls(ref string, pull func(io.Writer) error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pulls[ref] = pull
}

// Dies lets a container end as soon as it was started.
func (e *Engine) Dies(name string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.dying[name] = true
}

// End lets a container end by itself.
func (e *Engine) End(id string) {
	e.mu.Lock()
	c, err := e.findLocked(id)
	if err == nil {
		c.State.Status, c.State.Running, c.State.ExitCode = container.StateExited, false, 1
	}
	e.mu.Unlock()
	if err == nil {
		e.Emit(c.ID, events.ActionDie)
	}
}

// Starts returns when containers of a name were started.
func (e *Engine) Starts(name string) []time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.starts[name])
}

// Names returns "name state" of every container, sorted.
func (e *Engine) Names() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []string
	for _, c := range e.containers {
		out = append(out, strings.TrimPrefix(c.Name, "/")+" "+c.State.Status)
	}
	slices.Sort(out)
	return out
}

// ContainerCreate implements the engine.
func (e *Engine) ContainerCreate(_ context.Context, config *container.Config, host *container.HostConfig, _ *network.NetworkingConfig, _ *ocispec.Platform, name string) (container.CreateResponse, error) {
	e.mu.Lock()
	if _, err := e.findLocked(name); err == nil || e.down != nil {
		defer e.mu.Unlock()
		if e.down != nil {
			return container.CreateResponse{}, e.down
		}
		return container.CreateResponse{}, fmt.Errorf("the name %s is already in use by container: %w", name, cerrdefs.ErrConflict)
	}
	if !e.images[config.Image] {
		e.mu.Unlock()
		return container.CreateResponse{}, fmt.Errorf("no such image %s: %w", config.Image, cerrdefs.ErrNotFound)
	}
	e.created++
	id := fmt.Sprintf("%064x", e.created)
	e.containers[id] = &container.InspectResponse{
		ContainerJSONBase: &container.ContainerJSONBase{
			ID: id, Name: "/" + name, HostConfig: host, Image: config.Image,
			State: &container.State{Status: container.StateCreated, StartedAt: "0001-01-01T00:00:00Z"},
		},
		Config:          config,
		NetworkSettings: &container.NetworkSettings{Networks: map[string]*network.EndpointSettings{"bridge": {IPAddress: "127.0.0.1"}}},
	}
	e.mu.Unlock()
	e.Emit(id, events.ActionCreate)
	return container.CreateResponse{ID: id}, nil
}

// ContainerStart implements the engine.
func (e *Engine) ContainerStart(ctx context.Context, id string, _ container.StartOptions) error {
	dies := false
	err := e.change(ctx, id, events.ActionStart, func(c *container.InspectResponse) error {
		name := strings.TrimPrefix(c.Name, "/")
		c.State.Status, c.State.Running, c.State.StartedAt = container.StateRunning, true, time.Now().Add(time.Duration(len(e.starts[name]))).Format(time.RFC3339Nano) // no two are equal
		e.starts[name] = append(e.starts[name], time.Now())
		dies = e.dying[name]
		return nil
	})
	if err == nil && dies {
		e.End(id)
	}
	return err
}

// ContainerStop implements the engine.
func (e *Engine) ContainerStop(ctx context.Context, id string, _ container.StopOptions) error {
	return e.change(ctx, id, events.ActionStop, func(c *container.InspectResponse) error {
		c.State.Status, c.State.Running = container.StateExited, false
		return nil
	})
}

// ContainerUnpause implements the engine.
func (e *Engine) ContainerUnpause(ctx context.Context, id string) error {
	return e.change(ctx, id, events.ActionUnPause, func(c *container.InspectResponse) error {
		c.State.Status, c.State.Paused = container.StateRunning, false
		return nil
	})
}

// ContainerRename implements the engine.
func (e *Engine) ContainerRename(ctx context.Context, id, name string) error {
	return e.change(ctx, id, events.ActionRename, func(c *container.InspectResponse) error {
		c.Name = "/" + name
		return nil
	})
}

// ContainerUpdate implements the engine.
func (e *Engine) ContainerUpdate(ctx context.Context, id string, update container.UpdateConfig) (container.UpdateResponse, error) {
	return container.UpdateResponse{}, e.change(ctx, id, events.ActionUpdate, func(c *container.InspectResponse) error {
		c.HostConfig.RestartPolicy = update.RestartPolicy
		return nil
	})
}

// ContainerRemove implements the engine.
func (e *Engine) ContainerRemove(ctx context.Context, id string, _ container.RemoveOptions) error {
	return e.change(ctx, id, events.ActionDestroy, func(c *container.InspectResponse) error {
		delete(e.containers, c.ID)
		return nil
	})
}

// ContainerStatsOneShot implements the engine.
func (e *Engine) ContainerStatsOneShot(ctx context.Context, id string) (container.StatsResponseReader, error) {
	if err := e.pass(ctx, id); err != nil {
		return container.StatsResponseReader{}, err
	}
	body := `{"cpu_stats":{"cpu_usage":{"total_usage":0}},"memory_stats":{"usage":1048576,"stats":{"inactive_file":48576}}}`
	return container.StatsResponseReader{Body: io.NopCloser(strings.NewReader(body))}, nil
}

// Info implements the engine.
func (e *Engine) Info(context.Context) (system.Info, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return system.Info{Architecture: "x86_64", OSType: "linux", NCPU: 2, MemTotal: 8 << 30, ServerVersion: "test"}, e.down
}

// ImageInspect implements the engine.
func (e *Engine) ImageInspect(_ context.Context, name string, _ ...client.ImageInspectOption) (image.InspectResponse, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.down != nil {
		return image.InspectResponse{}, e.down
	}
	if !e.images[name] {
		return image.InspectResponse{}, fmt.Errorf("image %s: %w", name, cerrdefs.ErrNotFound)
	}
	return image.InspectResponse{ID: name, Os: "linux", Architecture: "amd64"}, nil
}

// ImagePull implements the engine.
func (e *Engine) ImagePull(ctx context.Context, ref string, _ image.PullOptions) (io.ReadCloser, error) {
	e.mu.Lock()
	pull := e.pulls[ref]
	e.mu.Unlock()
	if pull == nil {
		return nil, fmt.Errorf("manifest of %s unknown: %w", ref, cerrdefs.ErrNotFound)
	}
	r, w := io.Pipe()
	context.AfterFunc(ctx, func() { w.CloseWithError(ctx.Err()) })
	go func() {
		err := pull(w)
		if err == nil {
			e.AddImage(ref)
		}
		w.CloseWithError(err)
	}()
	return r, nil
}

// Pushes says how an image is pushed. As with the containerd store, the
// progress does not tell the digest.
func (e *Engine) Pushes(push func(ref string) error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pushes = push
}

// ImagePush implements the engine.
func (e *Engine) ImagePush(_ context.Context, ref string, _ image.PushOptions) (io.ReadCloser, error) {
	e.mu.Lock()
	push := e.pushes
	e.mu.Unlock()
	err := errors.New("connection refused")
	if push != nil {
		err = push(ref)
	}
	if err != nil {
		return io.NopCloser(strings.NewReader(fmt.Sprintf(`{"error":%q}`, err.Error()))), nil
	}
	return io.NopCloser(strings.NewReader(`{"status":"Pushed"}`)), nil
}

// ImageTag implements the engine.
func (e *Engine) ImageTag(_ context.Context, _, name string) error {
	e.AddImage(name)
	return nil
}

// ImageRemove implements the engine: what a container uses stays.
func (e *Engine) ImageRemove(_ context.Context, name string, _ image.RemoveOptions) ([]image.DeleteResponse, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, c := range e.containers {
		if c.Config != nil && c.Config.Image == name {
			return nil, fmt.Errorf("image %s is used by container %s: %w", name, c.ID, cerrdefs.ErrConflict)
		}
	}
	delete(e.images, name)
	return nil, nil
}

// NetworkInspect implements the engine.
func (e *Engine) NetworkInspect(_ context.Context, name string, _ network.InspectOptions) (network.Inspect, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.networks[name] {
		return network.Inspect{}, fmt.Errorf("network %s: %w", name, cerrdefs.ErrNotFound)
	}
	return network.Inspect{Name: name}, nil
}

// NetworkCreate implements the engine.
func (e *Engine) NetworkCreate(_ context.Context, name string, _ network.CreateOptions) (network.CreateResponse, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.networks[name] = true
	return network.CreateResponse{ID: name}, nil
}

// NetworkConnect implements the engine.
func (e *Engine) NetworkConnect(ctx context.Context, name, id string, _ *network.EndpointSettings) error {
	return e.change(ctx, id, events.ActionConnect, func(c *container.InspectResponse) error {
		c.NetworkSettings.Networks[name] = &network.EndpointSettings{}
		return nil
	})
}
