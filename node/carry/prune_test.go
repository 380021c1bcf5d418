package carry_test

import (
	"fmt"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/placement"
)

// Images that no version needs go: disks would fill up. Those of the version
// before stay for a rollback, and nothing that did not come from us is removed.
func TestImages_Pruned(t *testing.T) { // IMG-4, MOD-6
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		version := func(n int) placement.Image {
			return placement.Image{Repository: "app", Digest: fmt.Sprintf("sha256:%064d", n)}
		}
		name := func(n int) string { return "registry/app@" + version(n).Digest }
		for n := 1; n <= 4; n++ {
			h.engine.Pulls(name(n), func(io.Writer) error { return nil })
		}
		left := func() (out []int) {
			for n := range 6 {
				if h.engine.HasImage(name(n)) {
					out = append(out, n)
				}
			}
			return out
		}
		h.engine.AddImage(name(0)) // somebody else's
		h.start()
		defer func() { h.stop() }()
		serve := func(n int) {
			h.want("web", func(d *placement.Desired) {
				d.Want, d.Generation, d.Image = placement.WantServing, uint64(n), version(n)
			})
			require.True(t, h.seen("web").Done)
		}
		serve(1)
		serve(2)
		time.Sleep(20 * time.Minute)
		require.Equal(t, []int{0, 1, 2}, left(), "what a rollback needs stays")
		h.want("web", func(d *placement.Desired) { next := version(3); d.Prefetch = &next })
		time.Sleep(20 * time.Minute)
		require.Equal(t, []int{0, 1, 2, 3}, left())
		serve(3)
		h.want("web", func(d *placement.Desired) { d.Prefetch = nil })
		time.Sleep(20 * time.Minute)
		require.Equal(t, []int{0, 2, 3}, left())

		// After a restart it is known what is ours.
		h.stop()
		h.start()
		h.want("web", func(d *placement.Desired) { d.Want = placement.WantAbsent })
		delete(h.all, "web")
		h.carrier.SetDesired(t.Context(), h.all)
		time.Sleep(30 * time.Minute)
		require.Equal(t, []int{0, 2, 3}, left(), "the node may be chosen again")
		h.engine.Run("user", nil)
		h.engine.Edit("user", func(c *container.InspectResponse) { c.Config.Image = name(3) })
		time.Sleep(60 * time.Minute)
		require.Equal(t, []int{0, 3}, left(), "what a container uses stays")
		h.engine.Remove("user")
		time.Sleep(15 * time.Minute)
		require.Equal(t, []int{0}, left())
	})
}
