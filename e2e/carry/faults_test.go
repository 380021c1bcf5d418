package carry_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/placement"
)

func TestHangingContainer(t *testing.T) { // STP-3
	w := newWorld(t)
	hung := w.plain("hung")
	w.plain("web")
	w.enable("hung")
	w.enable("web")
	w.serving("hung")
	w.serving("web")

	w.socket.Block(hung.ID(), "hung")
	w.want("hung", func(d *placement.Desired) { d.Want = placement.WantStopped })
	begin := time.Now()
	w.want("web", func(d *placement.Desired) { d.Restarts = 1 })
	w.await("web", "restarted", func(o placement.Observed) bool { return o.Done && o.Restarts == 1 })
	require.NoError(t, w.Docker().ContainerRemove(t.Context(), "web", container.RemoveOptions{Force: true}))
	w.serving("web")
	require.Less(t, time.Since(begin), 5*time.Second, "the other container hangs longer than that")
	o := w.await("hung", "busy", func(o placement.Observed) bool { return o.Fault != nil })
	require.Equal(t, placement.CodeDaemonBusy, o.Fault.Code)
	require.False(t, o.Fault.Final)
	require.EqualValues(t, 1, o.Generation, "what was known stays")
	w.socket.Release()
	w.done("hung")
	require.Equal(t, []string{"hung exited", "web running"}, w.containers())
}

func TestDaemonBusy(t *testing.T) { // STP-3, RDY-2
	w := newWorld(t)
	web := w.plain("web")
	w.enable("web")
	w.serving("web")
	seen := len(w.events("web"))
	w.socket.Block()
	w.want("web", func(d *placement.Desired) { d.DrainSeconds = 7 })
	o := w.await("web", "busy", func(o placement.Observed) bool { return o.Fault != nil })
	require.Equal(t, placement.CodeDaemonBusy, o.Fault.Code)
	require.True(t, o.Ready, "nothing is marked failed")
	w.socket.Release()
	o = w.serving("web")
	require.Nil(t, o.Fault)
	require.Len(t, w.events("web"), seen)
	require.True(t, web.Inspect().State.Running)
}

func TestCrashing(t *testing.T) { // RDY-4
	w := newWorld(t)
	w.plain("web")
	w.enable("web")
	w.serving("web")
	// Ended by itself: started again at once.
	w.killInside("web")
	w.await("web", "crash counted", func(o placement.Observed) bool { return o.Crashes == 1 })
	w.serving("web")
	require.Empty(t, w.observed("web").Outside, "nobody did it by hand")

	w.want("web", func(d *placement.Desired) {
		d.Generation = 2
		d.Spec = []byte(`{"env":[],"config":{"Cmd":["none"]},"host":{},"networks":[]}`)
	})
	o := w.await("web", "looping", func(o placement.Observed) bool { return o.Looping })
	require.GreaterOrEqual(t, o.Crashes, 5)
	require.Equal(t, placement.CodeCrashLoop, o.Fault.Code)
	require.False(t, o.Ready)
}

// killInside kills the process without the engine being asked to.
func (w *world) killInside(name string) {
	w.t.Helper()
	pid := w.inspect(name).State.Pid
	_, err := w.Run("kill", "-9", fmt.Sprint(pid))
	require.NoError(w.t, err)
}

// Killed at any moment of a replacement, the agent ends in the wanted state.
func TestKilledWhileReplacing(t *testing.T) { // MOD-6, STP-2
	w := newWorld(t)
	w.plain("web")
	w.enable("web")
	w.serving("web")
	for generation := uint64(2); generation < 12; generation++ {
		w.want("web", func(d *placement.Desired) {
			d.Generation = generation
			d.Spec = []byte(fmt.Sprintf(`{"env":["GENERATION=%d"],"config":{"Cmd":["serve"]},"host":{},"networks":[{"name":"shop"},{"name":"backend"}]}`, generation))
		})
		time.Sleep(time.Duration(rand.IntN(500)) * time.Millisecond)
		w.agent.Kill()
		require.NotEmpty(t, w.containers(), "never without a container")
		w.agent.Start()
		w.awaitAgent()
		o := w.await("web", "as wanted", func(o placement.Observed) bool { return o.Done && o.Generation == generation && o.Ready })
		require.EqualValues(t, generation, o.Generation)
		require.Equal(t, []string{"web running"}, w.containers())
		require.Contains(t, w.inspect("web").Config.Env, fmt.Sprintf("GENERATION=%d", generation))
		require.Len(t, w.inspect("web").NetworkSettings.Networks, 3)
	}
}

// After a reboot the node does what the last known state says, without NATS
// and controller.
func TestReboot(t *testing.T) { // RDY-4
	w := newWorld(t)
	for _, name := range []string{"web", "shop"} {
		w.plain(name)
		w.enable(name)
		w.serving(name)
	}
	w.want("shop", func(d *placement.Desired) { d.Want = placement.WantStopped })
	w.done("shop")
	w.agent.Kill()
	w.Engine.Stop(20 * time.Second)
	w.registry.Kill()
	w.Engine.Start()
	require.NoError(t, w.AwaitEngine())
	require.Equal(t, []string{"shop exited", "web exited"}, w.containers())
	w.agent.Start()
	w.awaitAgent()
	o := w.serving("web")
	require.Zero(t, o.Crashes)
	w.done("shop")
	require.Equal(t, []string{"shop exited", "web running"}, w.containers())
	// An older revision does not override.
	old := w.desired["shop"]
	stale := old
	stale.Revision, stale.Want = 1, placement.WantServing
	w.desired["shop"] = stale
	w.send()
	time.Sleep(time.Second)
	require.Equal(t, []string{"shop exited", "web running"}, w.containers())
}

// The engine restarts below the agent: what shall serve is started again, and
// nobody is blamed for it.
func TestEngineRestarts(t *testing.T) { // RDY-4
	w := newWorld(t)
	w.plain("web")
	w.enable("web")
	w.serving("web")
	began := w.inspect("web").State.StartedAt
	w.Engine.Stop(20 * time.Second)
	w.Engine.Start()
	require.NoError(t, w.AwaitEngine())
	w.await("web", "serving again", func(o placement.Observed) bool {
		return o.Done && o.Ready && w.inspect("web").State.StartedAt != began
	})
	o := w.observed("web")
	require.Zero(t, o.Crashes)
	require.Empty(t, o.Outside)
	require.Equal(t, []string{"web running"}, w.containers())
}
