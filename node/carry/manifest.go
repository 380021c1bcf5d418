package carry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/system"
	"oras.land/oras-go/v2/registry/remote/errcode"

	"github.com/opfield/availability/node/mirror"
	"github.com/opfield/availability/placement"
)

// maxSources bounds the registries that are asked for the index of one image.
const maxSources = 3

var errManifest = errors.New("unexpected answer of the internal registry")

// manifest is what is needed of an image manifest or index.
type manifest struct {
	Config    struct{ Digest string }
	Manifests []struct {
		Digest   string
		Platform struct{ OS, Architecture, Variant string }
	}
}

// index copies the index that Docker pulled an image by into the internal
// registry and returns its digest: "" if there is none to keep, or, for the
// reason returned, it cannot be copied. Of its images those for the platforms
// given are copied; none given: all. If this node's platform is the only one,
// Docker has all that is needed, and nobody else is asked.
func (i *images) index(ctx context.Context, target *mirror.Target, source image.InspectResponse, only []string) (digest, reason string, err error) {
	ours, _, _ := strings.Cut(i.reference(placement.Image{Repository: "any"}), "/")
	names := slices.DeleteFunc(slices.Clone(source.RepoDigests), func(name string) bool { return mirror.Registry(name) == ours })
	own := source.Os + "/" + source.Architecture
	if len(names) == 0 || len(only) == 1 && only[0] == own {
		return "", "", nil // built here, say
	}
	engine, err := i.info(ctx)
	if err != nil {
		return "", "", err
	}
	for _, name := range names[:min(len(names), maxSources)] {
		index, err := mirror.Find(ctx, name, engine.RegistryConfig)
		if err == nil {
			config := source.ID
			if strings.HasSuffix(name, "@"+source.ID) {
				config = "" // the containerd store calls an image by its index
			}
			if len(only) > 0 {
				index.Only(append(slices.Clone(only), own))
			}
			err = index.Copy(ctx, target, config)
			index.Close()
		}
		switch {
		case err == nil:
			return index.Digest(), "", nil
		case ctx.Err() != nil:
			return "", "", ctx.Err()
		case errors.Is(err, mirror.ErrSingle):
		case errors.Is(err, mirror.ErrSource):
			reason = err.Error()
		default:
			return "", "", targetFault(err)
		}
	}
	return "", reason, nil
}

// offered returns the platforms that an image has where it came from, "os/arch";
// nil if that is not known or is one only.
func (i *images) offered(ctx context.Context, source image.InspectResponse) []string {
	ctx, cancel := context.WithTimeout(ctx, offerLimit)
	defer cancel()
	engine, err := i.info(ctx)
	if err != nil {
		return nil
	}
	for _, name := range source.RepoDigests[:min(len(source.RepoDigests), maxSources)] {
		if index, err := mirror.Find(ctx, name, engine.RegistryConfig); err == nil {
			index.Close()
			return index.Platforms()
		}
	}
	return nil
}

func (i *images) info(ctx context.Context) (system.Info, error) {
	return within(ctx, listLimit, "ask Docker about its registries", func(ctx context.Context) (system.Info, error) { return i.engine.Info(ctx) })
}

// targetFault shows an error of the internal registry.
func targetFault(err error) error {
	if resp, ok := errors.AsType[*errcode.ErrorResponse](err); ok && resp.StatusCode < 500 {
		return fault(placement.CodeImageMirror, fmt.Errorf("copy an image into the internal registry: %w", err))
	}
	return fault(placement.CodeRegistryAway, fmt.Errorf("%w: %w", errRegistry, err))
}

// described fills in what the registry knows of a digest: the platforms, and
// the configuration of the origin's. Docker's own image ids are not compared
// only: with the containerd store they are digests of the index. Platforms that
// are not among those given were not copied; none given: all were.
func (i *images) described(ctx context.Context, target *mirror.Target, img placement.Image, source image.InspectResponse, only []string) (placement.Image, error) {
	found, err := i.manifest(ctx, target, img.Digest)
	if err != nil {
		return placement.Image{}, err
	}
	own := source.Os + "/" + source.Architecture
	if len(found.Manifests) == 0 {
		img.Config, img.Platforms = found.Config.Digest, []string{own}
	} else {
		img.Narrowed = "" // Docker had the index itself
	}
	for _, m := range found.Manifests {
		p := m.Platform.OS + "/" + m.Platform.Architecture
		if m.Platform.OS != "linux" || len(only) > 0 && p != own && !slices.Contains(only, p) { // an attestation, or nothing that a node runs
			continue
		}
		if !slices.Contains(img.Platforms, p) {
			img.Platforms = append(img.Platforms, p)
		}
		if p != own || img.Config == source.ID {
			continue
		}
		one, err := i.manifest(ctx, target, m.Digest)
		if err != nil {
			return placement.Image{}, err
		}
		if img.Config == "" || one.Config.Digest == source.ID || m.Platform.Variant == source.Variant {
			img.Config = one.Config.Digest
		}
	}
	if img.Config == "" {
		return placement.Image{}, final(placement.CodeImageMirror, fmt.Errorf("%w: %s has no configuration for %s", errManifest, img.Digest, own))
	}
	slices.Sort(img.Platforms)
	return img, nil
}

func (i *images) manifest(ctx context.Context, target *mirror.Target, digest string) (manifest, error) {
	ctx, cancel := context.WithTimeout(ctx, changeLimit)
	defer cancel()
	body, err := target.Manifest(ctx, digest)
	if err != nil {
		return manifest{}, fault(placement.CodeRegistryAway, fmt.Errorf("%w: %w", errManifest, err))
	}
	var m manifest
	if err := json.Unmarshal(body, &m); err != nil {
		return manifest{}, fault(placement.CodeImageMirror, fmt.Errorf("%w: %w", errManifest, err))
	}
	return m, nil
}
