package carry_test

import (
	"testing"
	"testing/synctest"

	"github.com/docker/docker/api/types/container"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/placement"
)

func (h *harness) restartPolicy(name string) string {
	h.t.Helper()
	found, err := h.engine.ContainerInspect(h.t.Context(), name)
	require.NoError(h.t, err)
	return string(found.HostConfig.RestartPolicy.Name)
}

// A copy that outlives the others gets the workload's name and the restart
// policy of the original, and is not restarted.
func TestRelease_Copy(t *testing.T) { // DIS-1, DIS-2
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.start()
		defer func() { h.stop() }()
		h.want("web", func(d *placement.Desired) { d.Container = "opfield-web" })
		id := h.id("opfield-web")
		require.Equal(t, "no", h.restartPolicy(id), "RDY-4")
		h.want("web", func(d *placement.Desired) {
			d.Want, d.Container, d.RestartPolicy = placement.WantReleased, "web", "on-failure:3"
		})
		require.True(t, h.seen("web").Done)
		require.Equal(t, id, h.seen("web").Container)
		require.Equal(t, []string{"web running"}, h.engine.Names())
		require.Equal(t, id, h.id("web"))
		require.Len(t, h.engine.Starts("opfield-web"), 1)
		require.Equal(t, "on-failure", h.restartPolicy("web"))
		m, _ := h.carrier.Managed()
		require.Equal(t, id, m["web"].Container, "it is announced as before")
		require.True(t, h.carrier.Owned(id))
		c, err := h.carrier.Capture(t.Context(), "web")
		require.NoError(t, err)
		require.Empty(t, c.Owned, "it can be made available again")
		// It is nobody's any more.
		h.want("web", func(d *placement.Desired) { d.Want = placement.WantAbsent })
		require.Equal(t, []string{"web running"}, h.engine.Names())
	})
}

// A container of somebody else that has the name stays, and the copy keeps
// the one it has.
func TestRelease_NameTaken(t *testing.T) { // DIS-1, MOD-6
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.start()
		defer func() { h.stop() }()
		h.engine.Run("other", nil)
		h.want("web", func(d *placement.Desired) { d.Container = "opfield-web" })
		h.want("web", func(d *placement.Desired) { d.Want, d.Container = placement.WantReleased, "other" })
		require.True(t, h.seen("web").Done)
		require.Equal(t, []string{"opfield-web running", "other running"}, h.engine.Names())
	})
}

// An original that another copy outlived stays stopped: Docker does not start
// it either.
func TestRelease_Retired(t *testing.T) { // STP-2, DIS-1
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.engine.Run("orig", nil, func(c *container.InspectResponse) { c.HostConfig.RestartPolicy.Name = "always" })
		h.start()
		defer func() { h.stop() }()
		h.want("orig", func(d *placement.Desired) { d.Adopt, d.AdoptedAt, d.Original = "orig", 1, true })
		h.want("orig", func(d *placement.Desired) { d.Want = placement.WantPrepared })
		h.want("orig", func(d *placement.Desired) {
			d.Want, d.Retired, d.RestartPolicy = placement.WantReleased, true, "always"
		})
		require.True(t, h.seen("orig").Done)
		require.Equal(t, []string{"orig exited"}, h.engine.Names())
		require.Equal(t, "no", h.restartPolicy("orig"))
	})
}
