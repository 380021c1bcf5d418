package carry

import (
	"context"
	"slices"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/image"

	"github.com/opfield/availability/placement"
)

// pull is an image that this node got from the internal registry, and when that
// was or a desired state that named it ended.
type pull struct {
	placement.Image
	Needed time.Time `json:"needed,omitzero"`
}

// pulled notes that this node got an image for a workload from the internal
// registry: only such a one is removed again.
func (m *memory) pulled(img placement.Image) {
	m.Pulls = append(slices.DeleteFunc(slices.Clone(m.Pulls), func(p pull) bool { return same(p.Image, img) }), pull{img, time.Now()})
}

// needed notes what is desired until now.
func (m *memory) needed(now time.Time) {
	for _, img := range slices.Backward(m.names()) { // what is fetched only counts less
		for _, p := range m.Pulls {
			if alike(p.Image, img) {
				m.Pulls = append(slices.DeleteFunc(slices.Clone(m.Pulls), func(q pull) bool { return same(q.Image, p.Image) }), pull{p.Image, now})
			}
		}
	}
}

// names returns the images that are desired.
func (m memory) names() []placement.Image {
	if m.Desired == nil {
		return nil
	}
	out := []placement.Image{m.Desired.Image}
	if m.Desired.Prefetch != nil {
		out = append(out, *m.Desired.Prefetch)
	}
	return out
}

// leave forgets a workload, but for the images that are to be removed later.
func (m memory) leave(pages map[string]memory, workload string) {
	delete(pages, workload)
	if len(m.Pulls) > 0 {
		pages[workload] = memory{Pulls: m.Pulls, Left: time.Now()}
	}
}

func same(a, b placement.Image) bool { return a.Repository == b.Repository && a.Digest == b.Digest }

// alike reports whether two images are one on a node: an image is found by its
// configuration too, whatever its name is.
func alike(a, b placement.Image) bool {
	return a.Digest == b.Digest || a.Config != "" && a.Config == b.Config
}

// surplus returns the images of a workload that are not needed any more, by
// all that the node remembers: those that no workload desires, and that this
// one does not for some time, but for the one that it desired last. So what a
// rollback returns to stays, whichever version that is.
func surplus(pages map[string]memory, workload string, now time.Time) []placement.Image {
	m := pages[workload]
	if m.Desired == nil && (m.Left.IsZero() || now.Sub(m.Left) < pruneAfter) {
		return nil // given back, or it may come again
	}
	var keep []placement.Image
	for _, page := range pages {
		keep = append(keep, page.names()...)
	}
	last := pull{}
	var out []placement.Image
	for _, p := range m.Pulls {
		if slices.ContainsFunc(keep, func(k placement.Image) bool { return alike(k, p.Image) }) {
			continue
		}
		if m.Desired != nil && !p.Needed.Before(last.Needed) {
			p, last = last, p
		}
		if p.Digest != "" && now.Sub(p.Needed) >= pruneAfter { // none came before the first
			out = append(out, p.Image)
		}
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
		for workload := range c.book.all() {
			for _, img := range surplus(c.book.all(), workload, time.Now()) {
				if err := c.pruneOne(ctx, workload, img); err != nil {
					c.config.Logger.Warn("image that is not needed stays, trying again later", "workload", workload, "image", img.Repository+"@"+img.Digest, "err", err)
				}
			}
		}
	}
}

func (c *Carrier) pruneOne(ctx context.Context, workload string, img placement.Image) error {
	ref := c.images.reference(img)
	if ref == "" || !slices.ContainsFunc(surplus(c.book.all(), workload, time.Now()), func(s placement.Image) bool { return same(s, img) }) {
		return nil // it is desired again
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
		m.Pulls = slices.DeleteFunc(slices.Clone(m.Pulls), func(p pull) bool { return same(p.Image, img) })
		if pages[workload] = m; len(m.Pulls) == 0 && !m.Left.IsZero() {
			delete(pages, workload)
		}
	})
}
