package carry_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/mount"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/lab"
	"github.com/opfield/availability/placement"
)

var errNotCaptured = errors.New("not captured")

// traffic asks a container again and again, from its first answer until stop,
// which returns how many answers came and how many did not.
func (w *world) traffic(addr string) (stop func() (good, bad int)) {
	done, ended := make(chan struct{}), make(chan struct{})
	var good, bad int
	c := &http.Client{Timeout: time.Second, Transport: &http.Transport{DialContext: w.DialContext}}
	ask := func() error {
		resp, err := c.Get("http://" + addr + "/")
		if err != nil {
			return err
		}
		return resp.Body.Close()
	}
	// A container that was started need not listen yet.
	w.env.Await(10*time.Second, addr+" answers", func() bool { return ask() == nil })
	go func() {
		defer close(ended)
		for {
			select {
			case <-done:
				return
			case <-time.After(5 * time.Millisecond):
			}
			if err := ask(); err != nil {
				w.t.Logf("traffic: %v", err)
				bad++
				continue
			}
			good++
		}
	}()
	return sync.OnceValues(func() (int, int) { close(done); <-ended; return good, bad })
}

func TestAdopt(t *testing.T) { // ENA-1, ENA-2, RDY-4, IMG-1, MOD-6, DIS-1
	w := newWorld(t)
	policy := container.RestartPolicy{Name: container.RestartPolicyOnFailure, MaximumRetryCount: 7}
	web := w.plain("web", func(_ *container.Config, h *container.HostConfig) { h.RestartPolicy = policy })
	began := web.Inspect().State.StartedAt
	stop := w.traffic(web.Addr(8080).String())
	c := w.enable("web")
	require.Equal(t, web.ID(), c.ID)
	require.True(t, c.Running)
	require.Empty(t, c.Unsupported)
	require.Empty(t, c.Mounts)
	o := w.serving("web")
	require.EqualValues(t, 1, o.Generation)
	require.Equal(t, web.ID(), o.Container)
	require.True(t, o.ImageReady)
	require.Equal(t, w.desired["web"].Image.Config, o.ImageConfig, "the same image, by its configuration") // IMG-2
	require.Equal(t, []string{"linux/amd64"}, w.desired["web"].Image.Platforms)
	now := web.Inspect()
	require.Equal(t, web.ID(), now.ID)
	require.Equal(t, began, now.State.StartedAt)
	require.Equal(t, container.RestartPolicyDisabled, now.HostConfig.RestartPolicy.Name)
	good, bad := stop()
	require.Zero(t, bad)
	require.Positive(t, good)
	events := w.events("web")
	require.True(t, events[0].Event.Serves(), "%+v", events[0]) // it has no label: managed from the first event on
	require.EqualValues(t, 1, events[0].Event.Generation)
	list, err := w.Docker().ImageList(t.Context(), image.ListOptions{Filters: filters.NewArgs(filters.Arg("reference", registryAddr+"/*:mirror*"))})
	require.NoError(t, err)
	require.Empty(t, list, "the temporary tag is gone")
	again, err := w.capture("web")
	require.NoError(t, err)
	require.Equal(t, "web.node-1", again.Owned)
	info, err := os.Stat(w.Path("agent", "desired.json"))
	require.NoError(t, err)
	require.EqualValues(t, 0o600, info.Mode().Perm())

	// Another container is nobody's, whatever is desired.
	other := w.plain("other")
	w.want("other", func(d *placement.Desired) { d.Spec, d.Image = c.Spec, w.desired["web"].Image })
	taken := w.await("other", "refused", func(o placement.Observed) bool { return o.Fault != nil })
	require.Equal(t, placement.CodeNameTaken, taken.Fault.Code)
	require.True(t, other.Inspect().State.Running)
	w.want("other", func(d *placement.Desired) { d.Want = placement.WantAbsent })
	w.done("other")
	require.True(t, other.Inspect().State.Running)

	w.want("web", func(d *placement.Desired) { d.Want = placement.WantReleased })
	w.done("web")
	now = web.Inspect()
	require.Equal(t, policy, now.HostConfig.RestartPolicy)
	require.Equal(t, began, now.State.StartedAt)
	// Nothing of ours is changed any more.
	w.want("web", func(d *placement.Desired) { d.Want, d.Adopt = placement.WantAbsent, "" })
	w.done("web")
	require.True(t, web.Inspect().State.Running)
}

// A discovered placement that becomes managed goes on without an interruption.
func TestAdopt_DiscoveredGoesOn(t *testing.T) { // ENA-1, RDY-3
	w := newWorld(t)
	web := w.plain("web", func(c *container.Config, _ *container.HostConfig) {
		c.Labels = map[string]string{"opfield.workload": "web", "opfield.port": "8080"}
	})
	w.env.Await(10*time.Second, "discovered", func() bool { e := w.events("web"); return len(e) > 0 && e[len(e)-1].Event.Serves() })
	seen := len(w.events("web"))
	w.enable("web")
	w.serving("web")
	events := w.events("web")[seen:]
	require.NotEmpty(t, events)
	for _, p := range events {
		require.True(t, p.Event.Serves() && p.Event.Generation == 1, "%+v", p.Event)
	}
	// Draining closes the links at once; the container runs on.
	begin := time.Now()
	w.want("web", func(d *placement.Desired) { d.Want = placement.WantDraining })
	w.env.Await(5*time.Second, "draining", func() bool {
		e := w.events("web")
		return e[len(e)-1].Event.Role == placement.RoleDraining && e[len(e)-1].Event.Ready
	})
	last := w.events("web")
	require.Less(t, last[len(last)-1].At.Sub(begin), 100*time.Millisecond)
	w.done("web")
	require.True(t, web.Inspect().State.Running)
	// Stopped: kept, and not started by anybody.
	w.want("web", func(d *placement.Desired) { d.Want = placement.WantStopped })
	w.done("web")
	require.Equal(t, []string{"web exited"}, w.containers())
	w.want("web", func(d *placement.Desired) { d.Want = placement.WantServing })
	w.serving("web")
	require.Equal(t, web.ID(), w.inspect("web").ID)
}

func TestServe(t *testing.T) { // MOD-4, RDY-4, STP-1, STP-2, LOS-6
	w := newWorld(t)
	w.plain("web", func(c *container.Config, h *container.HostConfig) {
		require.NoError(t, json.Unmarshal([]byte(`{"8080/tcp":[{"HostPort":"18080"}]}`), &h.PortBindings))
	})
	w.enable("web")
	w.serving("web")

	// A new generation: the old container goes once the new one runs.
	spec := func(d *placement.Desired, edit func(*placement.ContainerSpec)) {
		var s placement.ContainerSpec
		require.NoError(t, json.Unmarshal(d.Spec, &s))
		edit(&s)
		b, err := json.Marshal(s)
		require.NoError(t, err)
		d.Spec = b
	}
	before := w.inspect("web").ID
	w.want("web", func(d *placement.Desired) {
		d.Generation = 2
		spec(d, func(s *placement.ContainerSpec) {
			s.Env = []string{"GREETING=again"}
			s.Networks = []placement.ContainerNetwork{{Name: "shop", Aliases: []string{"w"}}, {Name: "backend"}}
		})
	})
	w.serving("web")
	now := w.inspect("web")
	require.NotEqual(t, before, now.ID)
	require.Contains(t, now.Config.Env, "GREETING=again")
	require.NotContains(t, now.Config.Env, "GREETING=hello")
	require.Equal(t, "2", now.Config.Labels["opfield.generation"])
	require.Equal(t, []string{"/testapp"}, []string(now.Config.Entrypoint))
	require.Len(t, now.NetworkSettings.Networks, 3)
	require.Contains(t, now.NetworkSettings.Networks["shop"].Aliases, "w")
	require.Equal(t, "18080", now.HostConfig.PortBindings["8080/tcp"][0].HostPort)
	require.Equal(t, []string{"web running"}, w.containers())
	var last placement.Event
	for _, p := range w.events("web") { // EVT-3
		require.True(t, p.Event.Order().Newer(last.Order()), "%+v", p.Event)
		last = p.Event
	}

	// A generation that cannot be created leaves what is there.
	running := w.inspect("web").ID
	w.want("web", func(d *placement.Desired) {
		d.Generation, d.Spec = 3, json.RawMessage(`{"env":[],"host":{"Memory":1},"networks":[]}`)
	})
	o := w.await("web", "refused", func(o placement.Observed) bool { return o.Fault != nil && o.Revision == w.desired["web"].Revision })
	require.Equal(t, placement.CodeContainerStart, o.Fault.Code)
	require.Equal(t, running, w.inspect("web").ID)
	require.True(t, w.inspect("web").State.Running)
	// One that cannot start leaves the old container, stopped.
	w.want("web", func(d *placement.Desired) {
		d.Generation = 4
		d.Spec = json.RawMessage(`{"env":[],"config":{"Entrypoint":["/nowhere"]},"host":{},"networks":[]}`)
	})
	w.await("web", "cannot start", func(o placement.Observed) bool { return o.Fault != nil && o.Revision == w.desired["web"].Revision })
	require.Len(t, w.containers(), 2)
	require.False(t, w.inspect(running).State.Running)
	w.want("web", func(d *placement.Desired) {
		d.Generation = 5
		d.Spec = json.RawMessage(`{"env":[],"config":{"Cmd":["serve"]},"host":{},"networks":[]}`)
	})
	w.serving("web")
	require.Equal(t, []string{"web running"}, w.containers())

	// What is changed by hand is repaired, and told.
	require.NoError(t, w.Docker().ContainerRemove(t.Context(), "web", container.RemoveOptions{Force: true}))
	o = w.await("web", "told", func(o placement.Observed) bool { return o.OutsideNumber == 1 })
	require.Contains(t, o.Outside, "removed")
	w.serving("web")
	told := false
	for _, p := range w.events("web") {
		told = told || !p.Event.Ready && strings.Contains(p.Event.Reason, "removed by hand")
	}
	require.True(t, told, "the health event says so, too")
	require.NoError(t, w.Docker().ContainerStop(t.Context(), "web", container.StopOptions{}))
	o = w.await("web", "told", func(o placement.Observed) bool { return o.OutsideNumber == 2 })
	require.Contains(t, o.Outside, "stopped")
	w.serving("web")
	_, err := w.Docker().ContainerUpdate(t.Context(), "web", container.UpdateConfig{RestartPolicy: container.RestartPolicy{Name: "always"}})
	require.NoError(t, err)
	w.env.Await(5*time.Second, "policy repaired", func() bool { return w.inspect("web").HostConfig.RestartPolicy.Name == "no" })

	// A restart that is asked for is done once.
	began := w.inspect("web").State.StartedAt
	w.want("web", func(d *placement.Desired) { d.Restarts = 1 })
	o = w.serving("web")
	require.EqualValues(t, 1, o.Restarts)
	require.NotEqual(t, began, w.inspect("web").State.StartedAt)
	began = w.inspect("web").State.StartedAt
	w.want("web", func(*placement.Desired) {})
	w.serving("web")
	require.Equal(t, began, w.inspect("web").State.StartedAt)

	// Prepared: the original is stopped and kept, the image stays.
	w.want("web", func(d *placement.Desired) { d.Want = placement.WantPrepared })
	o = w.done("web")
	require.Equal(t, placement.RoleStandby, o.Role)
	require.True(t, o.ImageReady)
	require.Equal(t, []string{"web exited"}, w.containers())
	w.want("web", func(d *placement.Desired) { d.Original = false; d.Want = placement.WantAbsent })
	w.done("web")
	require.Empty(t, w.containers())
}

func TestPrepared_SurvivesPrune(t *testing.T) { // LOS-6, IMG-3
	w := newWorld(t)
	w.plain("web")
	w.enable("web")
	w.want("web", func(d *placement.Desired) { d.Original, d.Adopt, d.Want = false, "", placement.WantPrepared })
	w.done("web")
	require.Empty(t, w.containers())
	_, err := w.Docker().ContainersPrune(t.Context(), filters.Args{})
	require.NoError(t, err)
	_, err = w.Docker().ImagesPrune(t.Context(), filters.NewArgs(filters.Arg("dangling", "false")))
	require.NoError(t, err)
	o := w.await("web", "told", func(o placement.Observed) bool { return o.OutsideNumber > 0 && o.Done })
	require.Contains(t, o.Outside, "image")
	require.True(t, o.ImageReady)
	digest := w.desired["web"].Image
	_, err = w.Docker().ImageInspect(t.Context(), local{}.Reference(digest))
	require.NoError(t, err)

	// A registry that is away is waited for.
	w.registry.Kill()
	_, err = w.Docker().ImagesPrune(t.Context(), filters.NewArgs(filters.Arg("dangling", "false")))
	require.NoError(t, err)
	o = w.await("web", "registry away", func(o placement.Observed) bool { return o.Fault != nil })
	require.Equal(t, placement.CodeRegistryAway, o.Fault.Code)
	require.False(t, o.ImageReady)
	w.registry.Start()
	o = w.await("web", "pulled", func(o placement.Observed) bool { return o.Done })
	require.Nil(t, o.Fault)
	w.want("web", func(d *placement.Desired) { d.Want = placement.WantServing })
	w.serving("web")
}

func TestMirror_NotThere(t *testing.T) { // IMG-1
	w := newWorld(t)
	w.want("web", func(d *placement.Desired) {
		d.Want, d.Mirror = placement.WantStopped, &placement.Mirror{Repository: "web", Source: "127.0.0.1:1/none:latest"}
	})
	o := w.await("web", "mirror refused", func(o placement.Observed) bool { return o.Fault != nil })
	require.Equal(t, placement.CodeImageMirror, o.Fault.Code)
	require.True(t, o.Fault.Final)
	// A reference that cannot be pulled counts as the node has it.
	w.want("web", func(d *placement.Desired) { d.Mirror = &placement.Mirror{Repository: "web", Source: lab.AppImage} })
	o = w.done("web")
	require.NotEmpty(t, o.Mirrored.Digest)
	require.True(t, strings.HasPrefix(o.Mirrored.Config, "sha256:"))
}

func TestCapture(t *testing.T) { // ELG-2
	w := newWorld(t)
	w.RunApp(lab.App{Name: "mounted", Configure: func(_ *container.Config, h *container.HostConfig) {
		h.Binds = append(h.Binds, "data:/data:ro", "/anonymous")
		h.Mounts = []mount.Mount{{Type: mount.TypeVolume, Target: "/later"}, {Type: mount.TypeTmpfs, Target: "/scratch"}}
		h.Tmpfs = map[string]string{"/tmp": ""}
	}})
	c, err := w.capture("mounted")
	require.NoError(t, err)
	seen := map[string]string{}
	for _, m := range c.Mounts {
		seen[m.Destination] = m.Type
	}
	require.Equal(t, map[string]string{"/record": "bind", "/data": "volume", "/anonymous": "anonymous volume", "/later": "anonymous volume"}, seen)

	w.plain("net", func(_ *container.Config, h *container.HostConfig) { h.NetworkMode = "host" })
	c, err = w.capture("net")
	require.NoError(t, err)
	require.Len(t, c.Unsupported, 1)
	require.Contains(t, c.Unsupported[0], "host")
	_, err = w.capture("nobody")
	require.ErrorIs(t, err, errNotCaptured)

	w.plain("web", func(_ *container.Config, h *container.HostConfig) { h.Memory, h.NanoCPUs = 64<<20, 5e8 })
	c, err = w.capture("web")
	require.NoError(t, err)
	require.EqualValues(t, 64<<20, c.Memory)
	require.EqualValues(t, 500, c.CPU)
	var s placement.ContainerSpec
	require.NoError(t, json.Unmarshal(c.Spec, &s))
	require.Equal(t, []string{"GREETING=hello"}, s.Env)
	var config container.Config
	require.NoError(t, json.Unmarshal(s.Config, &config))
	require.Empty(t, config.Entrypoint, "the image's own")
	require.Equal(t, []string{"serve", "--name", "web"}, []string(config.Cmd))
	w.env.Await(10*time.Second, "facts", func() bool {
		r, _ := w.report()
		return r.Facts.Arch == "amd64" && r.Facts.ReservedMemory >= 64<<20 && len(r.Facts.Containers) == 3
	})
}
