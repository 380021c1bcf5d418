package carry_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/events"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/node/carry"
	"github.com/opfield/availability/node/docker/dockertest"
	"github.com/opfield/availability/placement"
)

var _ carry.Engine = (*dockertest.Engine)(nil)

const digest = "sha256:aaaa"

type registry struct{}

func (registry) Reference(i placement.Image) string {
	return "registry/" + i.Repository + "@" + i.Digest
}
func (registry) Auth() string { return "" }

// harness is a carrier on an engine in memory. It lives in a bubble.
type harness struct {
	t       *testing.T
	engine  *dockertest.Engine
	carrier *carry.Carrier
	file    string
	metrics *prometheus.Registry
	may     func(placement.Desired) error
	changed func()
	stop    func()
	all     map[string]placement.Desired
}

func newHarness(t *testing.T) *harness {
	return &harness{t: t, engine: dockertest.New(), file: filepath.Join(t.TempDir(), "desired.json"), all: map[string]placement.Desired{}}
}

func (h *harness) start() {
	h.t.Helper()
	h.metrics = prometheus.NewRegistry()
	c, err := carry.New(carry.Config{
		Registerer: h.metrics,
		Node:       "node-1", File: h.file, Engine: h.engine, Registry: registry{}, MayStart: h.may, Changed: h.changed,
		Logger: slog.New(slog.NewTextHandler(h.t.Output(), nil)),
	})
	require.NoError(h.t, err)
	h.carrier = c
	ctx, cancel := context.WithCancel(h.t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	h.stop = func() {
		cancel()
		require.ErrorIs(h.t, <-done, context.Canceled)
	}
	synctest.Wait()
}

func (h *harness) want(workload string, edit func(*placement.Desired)) {
	h.t.Helper()
	d, known := h.all[workload]
	if !known {
		d = placement.Desired{
			Workload: workload, Node: "node-1", Kind: placement.KindContainer, Generation: 1, Want: placement.WantServing,
			Container: workload, Image: placement.Image{Repository: workload, Digest: digest}, Spec: []byte(`{"env":["A=1"],"networks":[]}`),
		}
		h.engine.AddImage("registry/" + workload + "@" + digest)
	}
	d.Revision++
	edit(&d)
	h.all[workload] = d
	h.carrier.SetDesired(h.t.Context(), h.all)
	synctest.Wait()
}

func (h *harness) seen(workload string) placement.Observed {
	h.t.Helper()
	r, ok := h.carrier.Report()
	require.True(h.t, ok)
	for _, o := range r.Placements {
		if o.Workload == workload {
			return o
		}
	}
	return placement.Observed{}
}

func unchanged(*placement.Desired) {}

func TestCrashing_BacksOff(t *testing.T) { // RDY-4
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.start()
		defer func() { h.stop() }()
		h.engine.Dies("web")
		h.want("web", unchanged)
		begin := h.engine.Starts("web")[0]
		time.Sleep(5 * time.Minute)
		var after []int
		for _, at := range h.engine.Starts("web") {
			after = append(after, int(at.Sub(begin).Round(time.Second).Seconds()))
		}
		require.Equal(t, []int{0, 0, 1, 3, 7, 15, 31, 63, 123, 183, 243}, after)
		o := h.seen("web")
		require.True(t, o.Looping)
		require.Equal(t, placement.CodeCrashLoop, o.Fault.Code)
		require.Equal(t, 1, len(h.engine.Names()))
		m, _ := h.carrier.Managed()
		require.Contains(t, m["web"].Note, "ended by itself")
		shown := map[string]float64{} // OBS-1
		families, err := h.metrics.Gather()
		require.NoError(t, err)
		for _, f := range families {
			for _, one := range f.GetMetric() {
				shown[f.GetName()] += one.GetGauge().GetValue() + one.GetCounter().GetValue()
			}
		}
		require.Equal(t, map[string]float64{
			"opfield_node_container_starts_total": 11, "opfield_node_outside_changes_total": 0, "opfield_node_faults": 1, "opfield_node_wanted": 1,
		}, shown)
	})
}

// What makes way for another generation is not opened again between its drain
// and its end: requests would be sent to a container that is about to stop.
func TestReplaced_NotOpenedAgain(t *testing.T) { // ROL-1, ROL-4
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		var told []string
		h.changed = func() {
			all, _ := h.carrier.Managed()
			m := all["web"]
			if now := fmt.Sprintf("%s of %d", m.Role, m.Generation); m.Container != "" && (len(told) == 0 || told[len(told)-1] != now) {
				told = append(told, now)
			}
		}
		h.start()
		defer func() { h.stop() }()
		h.want("web", unchanged)
		h.want("web", func(d *placement.Desired) { d.Want = placement.WantDraining })
		require.Equal(t, placement.RoleDraining, h.seen("web").Role)
		h.want("web", func(d *placement.Desired) { d.Want, d.Generation = placement.WantServing, 2 })
		require.Equal(t, placement.RoleServing, h.seen("web").Role)
		require.Equal(t, []string{"serving of 1", "draining of 1", "serving of 2"}, told)
		require.Equal(t, []string{"web running"}, h.engine.Names())
	})
}

// A restart asks the same container to end: between its drain and its end it is
// not opened again either.
func TestRestarted_NotOpenedBefore(t *testing.T) { // STP-1, LNK-2
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		var told []string
		h.changed = func() {
			all, _ := h.carrier.Managed()
			now := fmt.Sprintf("%s, %d starts", all["web"].Role, len(h.engine.Starts("web")))
			if all["web"].Container != "" && (len(told) == 0 || told[len(told)-1] != now) {
				told = append(told, now)
			}
		}
		h.start()
		defer func() { h.stop() }()
		h.want("web", unchanged)
		told = nil
		h.want("web", func(d *placement.Desired) { d.Want = placement.WantDraining })
		h.want("web", func(d *placement.Desired) { d.Want, d.Restarts = placement.WantServing, 1 })
		require.Equal(t, []string{"draining, 1 starts", "serving, 2 starts"}, told)
		o := h.seen("web")
		require.Equal(t, placement.RoleServing, o.Role)
		require.EqualValues(t, 1, o.Restarts)
		require.True(t, o.Done)
	})
}

// A start that was asked for, and another version, begin with a clean record:
// they are not held up by what crashed before.
func TestCrashing_ForgivenByARestart(t *testing.T) { // RDY-4, ROL-2
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.start()
		defer func() { h.stop() }()
		h.engine.Dies("web")
		h.want("web", unchanged)
		time.Sleep(70 * time.Second)
		require.True(t, h.seen("web").Looping)
		for _, again := range []func(*placement.Desired){
			func(d *placement.Desired) { d.Restarts++ },
			func(d *placement.Desired) { d.Generation++ },
		} {
			before := len(h.engine.Starts("web"))
			h.want("web", again)
			time.Sleep(4 * time.Second)
			require.False(t, h.seen("web").Looping)
			require.GreaterOrEqual(t, len(h.engine.Starts("web"))-before, 3, "started at once, and its back-off begins anew")
			time.Sleep(2 * time.Minute)
			require.True(t, h.seen("web").Looping)
		}
	})
}

func TestCrashing_StableRunEndsTheCount(t *testing.T) { // RDY-4
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.start()
		defer func() { h.stop() }()
		h.want("web", unchanged)
		for range 3 {
			h.engine.End("web")
			time.Sleep(10 * time.Second)
		}
		require.Equal(t, 3, h.seen("web").Crashes)
		require.True(t, h.seen("web").Done)
		time.Sleep(3 * time.Minute)
		require.Zero(t, h.seen("web").Crashes)
		// Stopped by hand is no crash.
		h.engine.Emit(h.id("web"), events.ActionKill, "signal=15")
		h.engine.End("web")
		synctest.Wait()
		o := h.seen("web")
		require.Zero(t, o.Crashes)
		require.EqualValues(t, 1, o.OutsideNumber)
		require.Contains(t, o.Outside, "stopped")
	})
}

func (h *harness) id(name string) string {
	h.t.Helper()
	found, err := h.engine.ContainerInspect(h.t.Context(), name)
	require.NoError(h.t, err)
	return found.ID
}

func TestHanging(t *testing.T) { // STP-3
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.start()
		defer func() { h.stop() }()
		h.want("hung", unchanged)
		h.want("web", unchanged)
		require.True(t, h.seen("hung").Done)
		id := h.id("hung")
		h.engine.Hang(id)
		h.want("hung", func(d *placement.Desired) { d.Want = placement.WantStopped })
		h.want("web", func(d *placement.Desired) { d.Restarts = 1 })
		require.EqualValues(t, 1, h.seen("web").Restarts, "nobody waits for the other")
		time.Sleep(4 * time.Second)
		require.Nil(t, h.seen("hung").Fault)
		time.Sleep(2 * time.Second)
		o := h.seen("hung")
		require.Equal(t, placement.CodeDaemonBusy, o.Fault.Code)
		require.False(t, o.Fault.Final)
		time.Sleep(10 * time.Minute)
		require.InDelta(t, 20, h.seen("hung").Fault.Attempts, 4, "back-off to 30 s")
		h.engine.Release(id)
		time.Sleep(31 * time.Second)
		require.True(t, h.seen("hung").Done)
		require.Equal(t, []string{"hung exited", "web running"}, h.engine.Names())
	})
}

func TestPull_OnlyStandingStillFails(t *testing.T) { // IMG-3
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.start()
		defer func() { h.stop() }()
		image := placement.Image{Repository: "big", Digest: "sha256:bbbb"}
		h.engine.Pulls("registry/big@sha256:bbbb", func(w io.Writer) error {
			for i := range 10 {
				time.Sleep(50 * time.Second)
				if _, err := fmt.Fprintf(w, `{"status":"Downloading","progress":"%d"}`+"\n", i); err != nil {
					return err
				}
			}
			return nil
		})
		h.want("web", func(d *placement.Desired) { d.Want, d.Image = placement.WantPrepared, image })
		time.Sleep(499 * time.Second)
		require.Nil(t, h.seen("web").Fault)
		require.False(t, h.seen("web").ImageReady)
		time.Sleep(2 * time.Second)
		require.True(t, h.seen("web").Done)
		require.True(t, h.seen("web").ImageReady)

		h.engine.Pulls("registry/big@sha256:cccc", func(io.Writer) error { time.Sleep(2 * time.Minute); return errors.New("late") })
		h.want("web", func(d *placement.Desired) { d.Image.Digest = "sha256:cccc" })
		time.Sleep(59 * time.Second)
		require.Nil(t, h.seen("web").Fault)
		time.Sleep(2 * time.Second)
		require.Equal(t, placement.CodeDaemonBusy, h.seen("web").Fault.Code)
		// What is not desired any more is not waited for.
		h.want("web", func(d *placement.Desired) { d.Want = placement.WantAbsent })
		require.True(t, h.seen("web").Done)
		time.Sleep(5 * time.Minute) // the engine ends what nobody reads any more
	})
}

func TestStart_AsksOnePlace(t *testing.T) { // RDY-4
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		held := errors.New("no lease")
		var allowed atomic.Bool
		h.may = func(d placement.Desired) error {
			if !allowed.Load() {
				return held
			}
			return carry.MayStart(d)
		}
		h.start()
		defer func() { h.stop() }()
		h.want("web", unchanged)
		require.Equal(t, []string{"web created"}, h.engine.Names())
		require.Contains(t, h.seen("web").Fault.Message, "no lease")
		allowed.Store(true)
		time.Sleep(time.Minute)
		require.Equal(t, []string{"web running"}, h.engine.Names())
		require.ErrorIs(t, carry.MayStart(placement.Desired{Want: placement.WantStopped}), carry.ErrMayNotStart)
	})
}

func TestMemory_SurvivesARestart(t *testing.T) { // RDY-4, MOD-6
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.engine.Run("orig", nil, func(c *container.InspectResponse) { c.HostConfig.RestartPolicy.Name = "always" })
		h.start()
		h.want("orig", func(d *placement.Desired) { d.Adopt, d.AdoptedAt, d.Original = "orig", 1, true })
		h.want("web", func(d *placement.Desired) { d.Want = placement.WantStopped })
		require.True(t, h.seen("orig").Done)
		h.stop()
		h.engine.End("orig")
		info, err := os.Stat(h.file)
		require.NoError(t, err)
		require.EqualValues(t, 0o600, info.Mode().Perm())

		h.start() // NATS and the controller are away
		require.Equal(t, []string{"orig running"}, h.engine.Names())
		require.Zero(t, h.seen("orig").Crashes)
		m, known := h.carrier.Managed()
		require.True(t, known)
		require.Equal(t, "orig", m["orig"].Container)
		require.EqualValues(t, 1, m["orig"].Generation)
		// Older revisions do not count, and a missing record removes nothing.
		old := h.all["orig"]
		old.Revision, old.Want = old.Revision-1, placement.WantAbsent
		h.carrier.SetDesired(t.Context(), map[string]placement.Desired{"orig": old})
		synctest.Wait()
		require.Equal(t, []string{"orig running"}, h.engine.Names())
		h.carrier.SetDesired(t.Context(), nil)
		time.Sleep(time.Minute)
		require.Equal(t, []string{"orig running"}, h.engine.Names())
		h.stop()

		// An unreadable file is set aside.
		require.NoError(t, os.WriteFile(h.file, []byte("{"), 0o600))
		h.start()
		require.FileExists(t, h.file+".broken")
		h.stop()
	})
}

// What was pushed for an earlier record is no answer to a new one that asks for
// the same name: a moved tag counts as it is now.
func TestMirror_AskedAgain(t *testing.T) { // IMG-4, ROL-3
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		require.NoError(t, os.WriteFile(h.file, []byte(`{"web":{
			"desired":{"workload":"web","node":"node-1","kind":"container","revision":1,"generation":1,"want":"prepared","container":"web","ports":[],
				"mirror":{"repository":"web","source":"app:latest"}},
			"mirror":{"repository":"web","source":"app:latest"},"mirrored":{"repository":"web","digest":"sha256:old","config":""},"mirroredAt":1}}`), 0o600))
		h.start()
		defer func() { h.stop() }()
		require.NotNil(t, h.seen("web").Mirrored, "the agent was restarted")
		h.all["web"] = placement.Desired{
			Workload: "web", Node: "node-1", Kind: placement.KindContainer, Revision: 1, Generation: 1, Want: placement.WantPrepared, Container: "web",
			Mirror: &placement.Mirror{Repository: "web", Source: "app:latest"},
		}
		h.want("web", unchanged)
		require.Nil(t, h.seen("web").Mirrored)
	})
}

// The original is stopped and kept wherever a copy would be removed.
func TestOriginal_IsKept(t *testing.T) { // STP-2, LOS-6
	for _, want := range []placement.Want{placement.WantPrepared, placement.WantAbsent} {
		synctest.Test(t, func(t *testing.T) {
			h := newHarness(t)
			h.start()
			defer func() { h.stop() }()
			h.want("orig", func(d *placement.Desired) { d.Original = true })
			h.want("copy", unchanged)
			for _, w := range []string{"orig", "copy"} {
				h.want(w, func(d *placement.Desired) { d.Want = want })
				require.True(t, h.seen(w).Done)
			}
			require.Equal(t, []string{"orig exited"}, h.engine.Names())
			h.want("orig", func(d *placement.Desired) { d.Want = placement.WantServing })
			require.Equal(t, []string{"orig running"}, h.engine.Names())
		})
	}
}

// An engine that is back ends every back-off.
func TestEngineAway_BackAtOnce(t *testing.T) { // RDY-4, STP-3
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.start()
		defer func() { h.stop() }()
		h.want("web", unchanged)
		h.engine.End("web")
		h.engine.Stop()
		time.Sleep(5 * time.Minute)
		h.engine.Start()
		time.Sleep(3 * time.Second)
		require.Equal(t, []string{"web running"}, h.engine.Names())
		require.True(t, h.seen("web").Done)
		require.LessOrEqual(t, h.seen("web").Crashes, 1)
	})
}

// A Docker daemon that starts after the agent is noticed soon.
func TestFacts_DockerComesLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.engine.Stop()
		h.start()
		defer func() { h.stop() }()
		r, known := h.carrier.Report()
		require.True(t, known)
		require.NotEmpty(t, r.Facts.Error)
		time.Sleep(2 * time.Second)
		h.engine.Start()
		time.Sleep(3 * time.Second)
		synctest.Wait()
		r, _ = h.carrier.Report()
		require.Empty(t, r.Facts.Error)
		require.NotEmpty(t, r.Facts.Docker)
	})
}
