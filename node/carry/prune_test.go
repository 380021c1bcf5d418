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
		time.Sleep(80 * time.Minute)
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

// What a rollback returns to stays, also if it was pulled before a version that
// was given up meanwhile.
func TestImages_PruneKeepsVersionBefore(t *testing.T) { // IMG-4, ROL-2
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		version := func(n int) placement.Image {
			return placement.Image{Repository: "app", Digest: fmt.Sprintf("sha256:%064d", n)}
		}
		name := func(n int) string { return "registry/app@" + version(n).Digest }
		for n := range 5 {
			h.engine.Pulls(name(n), func(io.Writer) error { return nil })
		}
		h.start()
		defer func() { h.stop() }()
		generation := uint64(0)
		serve := func(n int) {
			generation++
			h.want("web", func(d *placement.Desired) {
				d.Want, d.Generation, d.Image, d.Prefetch = placement.WantServing, generation, version(n), nil
			})
			require.True(t, h.seen("web").Done)
		}
		serve(1)
		serve(2) // a rollout that fails
		serve(1) // and its way back
		time.Sleep(3 * time.Hour)
		serve(3)
		time.Sleep(20 * time.Minute)
		require.True(t, h.engine.HasImage(name(1)), "a rollback needs it")

		// A rollout that is superseded goes back to what was before both.
		serve(4)
		time.Sleep(20 * time.Minute)
		require.True(t, h.engine.HasImage(name(1)))
		require.True(t, h.engine.HasImage(name(3)))
		time.Sleep(3 * time.Hour)
		require.False(t, h.engine.HasImage(name(1)))
		require.False(t, h.engine.HasImage(name(2)))
		require.True(t, h.engine.HasImage(name(3)))

		// A version that was fetched and never ran does not count as the one before.
		h.want("web", func(d *placement.Desired) { next := version(2); d.Prefetch = &next })
		require.True(t, h.seen("web").PrefetchReady)
		serve(1)
		time.Sleep(3 * time.Hour)
		require.True(t, h.engine.HasImage(name(4)))
		require.False(t, h.engine.HasImage(name(2)))
	})
}

// An image that another workload of the node found under a foreign name stays.
func TestImages_PruneKeepsShared(t *testing.T) { // IMG-1, IMG-4
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		image := placement.Image{Repository: "one", Digest: "sha256:1111", Config: "sha256:config"}
		name := "registry/one@sha256:1111"
		h.engine.Pulls(name, func(io.Writer) error { h.engine.AddImage("sha256:config"); return nil })
		h.start()
		defer func() { h.stop() }()
		h.want("one", func(d *placement.Desired) { d.Want, d.Image = placement.WantPrepared, image })
		h.want("two", func(d *placement.Desired) {
			d.Want, d.Image = placement.WantPrepared, placement.Image{Repository: "two", Digest: "sha256:2222", Config: "sha256:config"}
		})
		require.True(t, h.seen("two").ImageReady)
		h.want("one", func(d *placement.Desired) { d.Want = placement.WantAbsent })
		delete(h.all, "one")
		h.carrier.SetDesired(t.Context(), h.all)
		time.Sleep(3 * time.Hour)
		require.True(t, h.engine.HasImage(name), "the other has no other name for it")
		h.want("two", func(d *placement.Desired) { d.Want = placement.WantAbsent })
		delete(h.all, "two")
		h.carrier.SetDesired(t.Context(), h.all)
		time.Sleep(3 * time.Hour)
		require.False(t, h.engine.HasImage(name))
	})
}
