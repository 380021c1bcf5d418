package carry

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/image"

	"github.com/opfield/availability/node/mirror"
	"github.com/opfield/availability/placement"
)

var (
	errRegistry = errors.New("the internal registry is not reached")
	errStalled  = errors.New("no progress")
)

// images pulls from the internal registry and pushes into it.
type images struct {
	engine   Engine
	registry Registry // nil: there is none yet
	node     string
	logger   *slog.Logger
}

// find returns how an image is called here, or "" if it is not on the node. An
// image under another name is the same by its configuration (IMG-2), or by its
// digest: the containerd store has no other id.
func (i *images) find(ctx context.Context, img placement.Image) (string, error) {
	var names []string
	if ref := i.reference(img); ref != "" {
		names = append(names, ref)
	}
	for _, id := range []string{img.Config, img.Digest} {
		if id != "" {
			names = append(names, id)
		}
	}
	for _, name := range names {
		_, err := i.inspect(ctx, name)
		if err == nil {
			return name, nil
		}
		if !cerrdefs.IsNotFound(err) {
			return "", err
		}
	}
	return "", nil
}

func (i *images) reference(img placement.Image) string {
	if i.registry == nil {
		return ""
	}
	return i.registry.Reference(img)
}

func (i *images) inspect(ctx context.Context, name string) (image.InspectResponse, error) {
	return within(ctx, inspectLimit, "inspect image", func(ctx context.Context) (image.InspectResponse, error) {
		return i.engine.ImageInspect(ctx, name)
	})
}

// pull gets an image from the internal registry. However long it takes, only
// standing still fails it.
func (i *images) pull(ctx context.Context, img placement.Image) (string, error) {
	ref := i.reference(img)
	if ref == "" {
		return "", fault(placement.CodeRegistryAway, errRegistry)
	}
	err := i.watched(ctx, func(ctx context.Context) (io.ReadCloser, error) {
		return i.engine.ImagePull(ctx, ref, image.PullOptions{RegistryAuth: i.registry.Auth()})
	})
	if err != nil {
		return "", pullFault(fmt.Errorf("pull %s@%s: %w", img.Repository, img.Digest, err))
	}
	return ref, nil
}

// pullFault tells an image that is not there from a registry that is not.
func pullFault(err error) error {
	if _, ok := errors.AsType[*faulty](err); ok {
		return err
	}
	switch text := strings.ToLower(err.Error()); {
	case strings.Contains(text, "no matching manifest") || strings.Contains(text, "does not match the specified platform"):
		return final(placement.CodeImagePlatform, err)
	case cerrdefs.IsNotFound(err) || strings.Contains(text, "not found") || strings.Contains(text, "manifest unknown"):
		return fault(placement.CodeImagePull, err)
	default:
		for _, away := range []string{"connection refused", "connection reset", "eof", "timeout", "no route", "unavailable", "bad gateway", "broken pipe"} {
			if strings.Contains(text, away) {
				return fault(placement.CodeRegistryAway, err)
			}
		}
	}
	return fault(placement.CodeImagePull, err)
}

// line is one line of Docker's progress.
type line struct {
	Error string `json:"error"`
}

// watched reads the progress of a pull or push to its end.
func (i *images) watched(ctx context.Context, begin func(context.Context) (io.ReadCloser, error)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stall := time.AfterFunc(stallLimit, func() { cancel(fmt.Errorf("%w for %v", errStalled, stallLimit)) })
	defer stall.Stop()
	body, err := begin(ctx)
	if err == nil {
		defer body.Close()
		for dec := json.NewDecoder(body); err == nil; {
			var l line
			if err = dec.Decode(&l); err != nil {
				break
			}
			stall.Reset(stallLimit)
			if l.Error != "" {
				return errors.New(l.Error)
			}
		}
	}
	switch cause := context.Cause(ctx); {
	case errors.Is(err, io.EOF) && cause == nil:
		return nil
	case errors.Is(cause, errStalled):
		return fault(placement.CodeDaemonBusy, cause)
	case cause != nil:
		return cause
	default:
		return err
	}
}

// mirror brings an image of this node into the internal registry (IMG-1): with
// the index that it was pulled by, if the registry it came from still gives
// that, otherwise as Docker has it (IMG-2).
func (i *images) mirror(ctx context.Context, m placement.Mirror) (placement.Image, error) {
	name := i.reference(placement.Image{Repository: m.Repository})
	if name == "" {
		return placement.Image{}, fault(placement.CodeRegistryAway, errRegistry)
	}
	target, err := mirror.OpenTarget(name, i.registry.Auth())
	if err != nil {
		return placement.Image{}, err
	}
	defer target.Close()
	var pulled error
	if !strings.HasPrefix(m.Source, "sha256:") { // a moved tag counts as it is now
		pulled = i.watched(ctx, func(ctx context.Context) (io.ReadCloser, error) {
			return i.engine.ImagePull(ctx, m.Source, image.PullOptions{})
		})
		if ctx.Err() != nil {
			return placement.Image{}, ctx.Err()
		}
	}
	source, err := i.inspect(ctx, m.Source)
	if cerrdefs.IsNotFound(err) {
		if pulled != nil {
			return placement.Image{}, final(placement.CodeImageMirror, fmt.Errorf("image %s is not on node %s and cannot be pulled: %w", m.Source, i.node, pulled))
		}
		return placement.Image{}, final(placement.CodeImageMirror, fmt.Errorf("image %s is not on node %s any more", m.Source, i.node))
	}
	if err != nil {
		return placement.Image{}, err
	}
	img := placement.Image{Repository: m.Repository}
	if img.Digest, img.Narrowed, err = i.index(ctx, target, source, m.Platforms); err != nil {
		return placement.Image{}, err
	}
	only := m.Platforms
	if img.Digest == "" {
		only = nil // Docker pushes what it has
		if img.Narrowed != "" {
			i.logger.Warn("image is mirrored as docker has it, its index is not to be had", "image", m.Source, "reason", img.Narrowed)
		}
		if img.Digest, err = i.push(ctx, target, name, m.Repository, source.ID); err != nil {
			return placement.Image{}, err
		}
	}
	return i.described(ctx, target, img, source, only)
}

// push lets Docker push what it has of an image and returns the digest. The
// registry is asked for it: with the containerd store, the progress of a push
// does not tell it.
func (i *images) push(ctx context.Context, target *mirror.Target, name, repository, id string) (string, error) {
	tag := fmt.Sprintf("mirror-%s-%x", i.node, sha256.Sum256([]byte(id)))[:len("mirror--")+len(i.node)+12]
	full := name + ":" + tag
	if err := do(ctx, changeLimit, "tag image", func(ctx context.Context) error { return i.engine.ImageTag(ctx, id, full) }); err != nil {
		return "", err
	}
	defer i.untag(context.WithoutCancel(ctx), id, full)
	err := i.watched(ctx, func(ctx context.Context) (io.ReadCloser, error) {
		return i.engine.ImagePush(ctx, full, image.PushOptions{RegistryAuth: i.registry.Auth()})
	})
	if err != nil {
		if _, ok := errors.AsType[*faulty](err); ok {
			return "", err
		}
		return "", fault(placement.CodeImageMirror, fmt.Errorf("push %s into the internal registry: %w", repository, err))
	}
	digest, err := within(ctx, changeLimit, "ask for what was pushed", func(ctx context.Context) (string, error) { return target.Digest(ctx, tag) })
	if err != nil {
		return "", targetFault(err)
	}
	return digest, nil
}

// untag removes the temporary name, unless it is the only one: the image would
// go with it.
func (i *images) untag(ctx context.Context, id, tag string) {
	found, err := i.inspect(ctx, id)
	if err == nil && len(found.RepoTags) > 1 {
		err = do(ctx, removeLimit, "remove temporary tag", func(ctx context.Context) error {
			_, err := i.engine.ImageRemove(ctx, tag, image.RemoveOptions{})
			return err
		})
	}
	if err != nil {
		i.logger.Warn("temporary tag not removed", "tag", tag, "err", err)
	}
}
