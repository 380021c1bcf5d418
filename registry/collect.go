package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/opencontainers/go-digest"
)

const (
	// youngest is how long everything stays that was stored or asked for by a
	// push: it may be part of an image that is not in use yet.
	youngest = time.Hour
	// uploadLife is how long an unfinished upload stays.
	uploadLife = 24 * time.Hour
	// keepWithin bounds the question for what is in use, because pushes wait.
	keepWithin = 5 * time.Second
	// maxManifest is the largest manifest that distribution takes.
	maxManifest = 4 << 20
)

// errPushing says that somebody pushes just now.
var errPushing = errors.New("an image is being pushed")

// Collected says what a removal did.
type Collected struct {
	Manifests, Blobs int
	Freed, Left      int64 // bytes
}

// Collect removes what no image in use needs: manifests, links and blobs that
// are older than an hour. Nobody can push meanwhile; it takes no longer than
// reading the manifests.
func (s *Server) Collect(ctx context.Context) (Collected, error) {
	if !s.pushes.TryLock() {
		return Collected{}, errPushing
	}
	defer s.pushes.Unlock()
	asked, cancel := context.WithTimeout(ctx, keepWithin)
	keep, err := s.cfg.Keep(asked)
	cancel()
	if err != nil {
		return Collected{}, err
	}
	c := collection{storage: s.storage, before: time.Now().Add(-youngest), touched: s.recent(), used: map[digest.Digest]bool{}}
	done, err := c.run(ctx, keep)
	if err != nil {
		return done, fmt.Errorf("remove unused images: %w", err)
	}
	s.metrics.collected.Add(float64(done.Freed))
	s.metrics.stored.Set(float64(done.Left))
	if done.Blobs+done.Manifests > 0 {
		s.cfg.Logger.Info("unused images removed", "manifests", done.Manifests, "blobs", done.Blobs, "freed_bytes", done.Freed, "left_bytes", done.Left)
	}
	return done, nil
}

// recent returns the blobs that pushes asked for lately and forgets others.
func (s *Server) recent() map[digest.Digest]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[digest.Digest]bool{}
	for d, at := range s.touched {
		if time.Since(at) > youngest {
			delete(s.touched, d)
			continue
		}
		out[d] = true
	}
	return out
}

// collection is one removal. First everything is read, then removed: an error
// while reading leaves all as it was.
type collection struct {
	storage storage
	before  time.Time // older goes
	touched map[digest.Digest]bool
	used    map[digest.Digest]bool // blobs that stay
	gone    []string               // folders to remove: first what refers, then what is referred to
	done    Collected
}

func (c *collection) run(ctx context.Context, keep map[string][]string) (Collected, error) {
	repositories, err := c.storage.repositories()
	if err != nil {
		return c.done, err
	}
	for _, name := range repositories {
		if err := errors.Join(ctx.Err(), c.repository(name, keep[name])); err != nil {
			return c.done, fmt.Errorf("repository %s: %w", name, err)
		}
	}
	if err := c.blobs(); err != nil {
		return c.done, err
	}
	for _, dir := range c.gone {
		if err := os.RemoveAll(dir); err != nil {
			return c.done, err
		}
	}
	return c.done, nil
}

// repository marks what the repository needs and gathers what it does not.
func (c *collection) repository(name string, pinned []string) error {
	revisions, err := c.storage.digests(name, "_manifests/revisions")
	if err != nil {
		return err
	}
	stay := map[digest.Digest]bool{}
	var queue []digest.Digest
	for _, p := range pinned {
		d := digest.Digest(p)
		if err := d.Validate(); err != nil {
			return fmt.Errorf("digest %q that shall stay: %w", p, err)
		}
		queue = append(queue, d)
	}
	for d, at := range revisions {
		if at.After(c.before) {
			queue = append(queue, d)
		}
	}
	needs := map[digest.Digest]bool{} // layers and configurations
	for len(queue) > 0 {
		d := queue[0]
		queue = queue[1:]
		if _, ok := revisions[d]; !ok || stay[d] {
			continue // a pin of what was never pushed keeps nothing
		}
		stay[d], c.used[d] = true, true
		refs, err := c.storage.references(d)
		if err != nil {
			return err
		}
		for _, ref := range refs {
			if _, ok := revisions[ref]; ok {
				queue = append(queue, ref)
			} else {
				needs[ref], c.used[ref] = true, true
			}
		}
	}
	for d := range revisions {
		if !stay[d] {
			c.done.Manifests++
			c.gone = append(c.gone, c.storage.link(name, "_manifests/revisions", d))
		}
	}
	return errors.Join(c.tags(name, stay), c.layers(name, needs), c.uploads(name))
}

// tags gathers the tags of manifests that go.
func (c *collection) tags(name string, stay map[digest.Digest]bool) error {
	tags := filepath.Join(c.storage.repository(name), "_manifests", "tags")
	entries, err := readDir(tags)
	if err != nil {
		return err
	}
	for _, e := range entries {
		current, err := os.ReadFile(filepath.Join(tags, e.Name(), "current", "link"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if !stay[digest.Digest(current)] {
			c.gone = append(c.gone, filepath.Join(tags, e.Name()))
		}
	}
	return nil
}

// layers gathers the links to blobs that no manifest of the repository needs.
func (c *collection) layers(name string, needs map[digest.Digest]bool) error {
	layers, err := c.storage.digests(name, "_layers")
	if err != nil {
		return err
	}
	for d, at := range layers {
		if needs[d] || c.touched[d] || at.After(c.before) {
			c.used[d] = true
			continue
		}
		c.gone = append(c.gone, c.storage.link(name, "_layers", d))
	}
	return nil
}

// uploads gathers uploads that were given up.
func (c *collection) uploads(name string) error {
	dir := filepath.Join(c.storage.repository(name), "_uploads")
	entries, err := readDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		newest, size, err := newest(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		if time.Since(newest) > uploadLife {
			c.done.Freed += size
			c.gone = append(c.gone, filepath.Join(dir, e.Name()))
		}
	}
	return nil
}

// blobs gathers the blobs that nothing needs.
func (c *collection) blobs() error {
	return c.storage.eachBlob(func(d digest.Digest, info fs.FileInfo) {
		if c.used[d] || c.touched[d] || info.ModTime().After(c.before) {
			c.done.Left += info.Size()
			return
		}
		c.done.Blobs++
		c.done.Freed += info.Size()
		c.gone = append(c.gone, filepath.Dir(c.storage.blob(d)))
	})
}

// manifest is what manifests and indexes of every type refer to with.
type manifest struct {
	Config    *descriptor  `json:"config"`
	Layers    []descriptor `json:"layers"`
	Manifests []descriptor `json:"manifests"`
}

type descriptor struct {
	Digest digest.Digest `json:"digest"`
}

// references returns what a manifest needs. One that is lost needs nothing.
func (s storage) references(d digest.Digest) ([]digest.Digest, error) {
	info, err := os.Stat(s.blob(d))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if info.Size() > maxManifest {
		return nil, fmt.Errorf("manifest %s has %d bytes, at most %d are expected", d, info.Size(), maxManifest)
	}
	data, err := os.ReadFile(s.blob(d))
	if err != nil {
		return nil, err
	}
	var m manifest
	if err := json.Unmarshal(data, &m); err != nil {
		return nil, fmt.Errorf("manifest %s: %w", d, err)
	}
	if m.Config == nil && len(m.Manifests) == 0 {
		return nil, fmt.Errorf("manifest %s has neither a configuration nor manifests", d)
	}
	var refs []digest.Digest
	if m.Config != nil {
		refs = append(refs, m.Config.Digest)
	}
	for _, x := range append(m.Layers, m.Manifests...) {
		refs = append(refs, x.Digest)
	}
	return refs, nil
}
