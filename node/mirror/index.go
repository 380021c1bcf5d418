package mirror

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2/content"
)

const (
	maxManifest = 4 << 20 // bytes; the internal registry takes no larger one
	maxImages   = 100     // of an index
	maxLayers   = 500     // of an image
	maxTotal    = 64 << 30
)

// errContent says that what the source gave is not what it should be.
var errContent = errors.New("it has something else than an image")

func indexTypes() []string {
	return []string{ocispec.MediaTypeImageIndex, "application/vnd.docker.distribution.manifest.list.v2+json"}
}

func imageTypes() []string {
	return []string{ocispec.MediaTypeImageManifest, "application/vnd.docker.distribution.manifest.v2+json"}
}

// child is what an index names and what is copied.
type child struct {
	ocispec.Descriptor
	platform string // "os/arch"; "" is an attestation about an image
}

// attests is the annotation by which BuildKit says which image of the index an
// attestation is about.
const attests = "vnd.docker.reference.digest"

// Only leaves out what is not for one of the platforms, "os/arch".
func (s *Source) Only(platforms []string) {
	kept := map[string]bool{}
	for _, c := range s.images {
		if slices.Contains(platforms, c.platform) {
			kept[c.Digest.String()] = true
		}
	}
	s.images = slices.DeleteFunc(s.images, func(c child) bool {
		return !kept[c.Digest.String()] && (c.platform != "" || !kept[c.Annotations[attests]])
	})
}

// children returns what is copied of an index: everything for Linux, and the
// attestations. Nodes run nothing else, and images for Windows are huge.
func children(raw []byte) ([]child, error) {
	var index ocispec.Index
	if err := json.Unmarshal(raw, &index); err != nil {
		return nil, fmt.Errorf("%w: %w", errContent, err)
	}
	if len(index.Manifests) > maxImages {
		return nil, fmt.Errorf("%w: an index of %d images", errContent, len(index.Manifests))
	}
	var all []child
	linux := false
	for _, d := range index.Manifests {
		if d.Platform == nil {
			return nil, fmt.Errorf("%w: an index that names an image without a platform", errContent)
		}
		c := child{Descriptor: d}
		switch d.Platform.OS {
		case "linux":
			c.platform, linux = d.Platform.OS+"/"+d.Platform.Architecture, true
		case "unknown":
		default:
			continue
		}
		if err := bounded(d, maxManifest); err != nil {
			return nil, err
		}
		if !slices.Contains(imageTypes(), d.MediaType) {
			return nil, fmt.Errorf("%w: an index that names %q", errContent, d.MediaType)
		}
		all = append(all, c)
	}
	if !linux {
		return nil, fmt.Errorf("%w: an index without an image for Linux", errContent)
	}
	return all, nil
}

func bounded(d ocispec.Descriptor, most int64) error {
	if d.Digest.Validate() != nil || d.Digest.Algorithm() != digest.SHA256 || d.Size < 0 || d.Size > most {
		return fmt.Errorf("%w: a part %.80q of %d bytes", errContent, d.Digest, d.Size)
	}
	return nil
}

// manifest is the manifest of an image.
type manifest struct {
	raw    []byte
	config digest.Digest
	blobs  []ocispec.Descriptor // configuration and layers
}

// manifest reads the manifest of an image, once.
func (s *Source) manifest(ctx context.Context, d ocispec.Descriptor) (*manifest, error) {
	if m := s.read[d.Digest]; m != nil {
		return m, nil
	}
	body, err := s.repository.Manifests().Fetch(ctx, d)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	m := &manifest{}
	if m.raw, err = content.ReadAll(body, d); err != nil {
		return nil, err
	}
	var parsed ocispec.Manifest
	if err := json.Unmarshal(m.raw, &parsed); err != nil {
		return nil, fmt.Errorf("%w: %w", errContent, err)
	}
	if len(parsed.Layers) > maxLayers {
		return nil, fmt.Errorf("%w: an image of %d layers", errContent, len(parsed.Layers))
	}
	m.config, m.blobs = parsed.Config.Digest, append([]ocispec.Descriptor{parsed.Config}, parsed.Layers...)
	for _, b := range m.blobs {
		if err := bounded(b, maxTotal); err != nil {
			return nil, err
		}
		if strings.Contains(b.MediaType, ".foreign.") || strings.Contains(b.MediaType, ".nondistributable.") {
			return nil, fmt.Errorf("%w: a layer that may not be distributed", errContent)
		}
	}
	s.read[d.Digest] = m
	return m, nil
}

// manifests reads those of all images, and checks them together: they are not
// too large, and one of them has the configuration, if one is given.
func (s *Source) manifests(ctx context.Context, config string) error {
	sizes := map[digest.Digest]int64{}
	found := config == ""
	for _, c := range s.images {
		m, err := s.manifest(ctx, c.Descriptor)
		if err != nil {
			return err
		}
		found = found || c.platform != "" && m.config.String() == config
		for _, b := range m.blobs {
			sizes[b.Digest] = b.Size
		}
	}
	if !found {
		return fmt.Errorf("%w: none of the index's images is the one that runs", errContent)
	}
	var total int64
	for _, n := range sizes {
		if total += n; total > maxTotal {
			return fmt.Errorf("%w: it has more than %d GiB for all platforms", errContent, maxTotal>>30)
		}
	}
	return nil
}
