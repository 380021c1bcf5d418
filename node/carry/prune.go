package carry

import (
	"context"
	"slices"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/image"

	"github.com/opfield/availability/placement"
)

// pulled notes that this node got an image for a workload from the internal
// registry: only such a one is removed again. The newest comes last.
func (m *memory) pulled(img placement.Image) {
	m.Pulls = append(slices.DeleteFunc(slices.Clone(m.Pulls), func(p placement.Image) bool { return same(p, img) }), img)
}

// leave forgets a workload, but for the images that are to be removed later.
func (m memory) leave(pages map[string]memory, workload string) {
	delete(pages, workload)
	if len(m.Pulls) > 0 {
		pages[workload] = memory{Pulls: m.Pulls, Left: time.Now()}
	}
}

func same(a, b placement.Image) bool { return a.Repository == b.Repository && a.Digest == b.Digest }

// surplus returns the images of a workload that are not needed any more: all
// but those of what is desired and of the version before it, or all of them
// some time after the node had a placement last.
func (m memory) surplus(now time.Time) []placement.Image {
	if m.Desired == nil {
		if m.Left.IsZero() || now.Sub(m.Left) < pruneLeft {
			return nil // given back, or it may come again
		}
		return m.Pulls
	}
	keep := []placement.Image{m.Desired.Image}
	if m.Desired.Prefetch != nil {
		keep = append(keep, *m.Desired.Prefetch)
	}
	needed := func(p placement.Image) bool {
		return slices.ContainsFunc(keep, func(k placement.Image) bool { return same(k, p) })
	}
	out := slices.DeleteFunc(slices.Clone(m.Pulls), needed)
	if len(out) > 0 { // what a rollback would need
		out = out[:len(out)-1]
	}
	return out
}

// prune removes images that this node pulled and that no version needs, now
// and then, until ctx ends. Docker keeps what a container uses, and what has
// another name.
func (c *Carrier) prune(ctx context.Context) error {
	tick := time.NewTicker(pruneEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		for workload, m := range c.book.all() {
			for _, img := range m.surplus(time.Now()) {
				if err := c.pruneOne(ctx, workload, img); err != nil {
					c.config.Logger.Warn("image that is not needed stays, trying again later", "workload", workload, "image", img.Repository+"@"+img.Digest, "err", err)
				}
			}
		}
	}
}

func (c *Carrier) pruneOne(ctx context.Context, workload string, img placement.Image) error {
	ref := c.images.reference(img)
	if ref == "" {
		return nil
	}
	err := do(ctx, removeLimit, "remove image", func(ctx context.Context) error {
		_, err := c.config.Engine.ImageRemove(ctx, ref, image.RemoveOptions{PruneChildren: true})
		return err
	})
	if err != nil && !cerrdefs.IsNotFound(err) {
		return err
	}
	c.config.Logger.Info("image removed that is not needed", "workload", workload, "image", img.Repository+"@"+img.Digest)
	return c.book.edit(func(pages map[string]memory) {
		m, known := pages[workload]
		if !known {
			return
		}
		m.Pulls = slices.DeleteFunc(slices.Clone(m.Pulls), func(p placement.Image) bool { return same(p, img) })
		if pages[workload] = m; len(m.Pulls) == 0 && !m.Left.IsZero() {
			delete(pages, workload)
		}
	})
}
