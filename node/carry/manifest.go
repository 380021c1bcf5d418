package carry

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/registry"

	"github.com/opfield/availability/placement"
)

// maxManifest bounds what is read of one manifest.
const maxManifest = 4 << 20

var errManifest = errors.New("unexpected answer of the internal registry")

// manifest is what is needed of an image manifest or index.
type manifest struct {
	Config    struct{ Digest string }
	Manifests []struct {
		Digest   string
		Platform struct{ OS, Architecture, Variant string }
	}
}

// described fills in what the registry knows of a digest: the platforms, and
// the configuration of the origin's. Docker's own image ids are not compared:
// with the containerd store they are digests of the index.
func (i *images) described(ctx context.Context, target string, img placement.Image, source image.InspectResponse) (placement.Image, error) {
	found, err := i.manifest(ctx, target, img.Digest)
	if err != nil {
		return placement.Image{}, err
	}
	own := source.Os + "/" + source.Architecture
	if len(found.Manifests) == 0 {
		img.Config, img.Platforms = found.Config.Digest, []string{own}
	}
	for _, m := range found.Manifests {
		p := m.Platform.OS + "/" + m.Platform.Architecture
		if m.Platform.OS == "" || m.Platform.OS == "unknown" { // an attestation
			continue
		}
		if !slices.Contains(img.Platforms, p) {
			img.Platforms = append(img.Platforms, p)
		}
		if p == own && (img.Config == "" || m.Platform.Variant == source.Variant) {
			one, err := i.manifest(ctx, target, m.Digest)
			if err != nil {
				return placement.Image{}, err
			}
			img.Config = one.Config.Digest
		}
	}
	if img.Config == "" {
		return placement.Image{}, final(placement.CodeImageMirror, fmt.Errorf("%w: %s has no configuration for %s", errManifest, img.Digest, own))
	}
	slices.Sort(img.Platforms)
	return img, nil
}

// manifest asks the registry the way Docker does.
func (i *images) manifest(ctx context.Context, target, digest string) (manifest, error) {
	ctx, cancel := context.WithTimeout(ctx, changeLimit)
	defer cancel()
	host, repository, _ := strings.Cut(target, "/")
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+host+"/v2/"+repository+"/manifests/"+digest, nil)
	if err != nil {
		return manifest{}, err
	}
	for _, accepted := range []string{
		"application/vnd.oci.image.index.v1+json", "application/vnd.oci.image.manifest.v1+json",
		"application/vnd.docker.distribution.manifest.list.v2+json", "application/vnd.docker.distribution.manifest.v2+json",
	} {
		req.Header.Add("Accept", accepted)
	}
	if auth := i.registry.Auth(); auth != "" {
		var login registry.AuthConfig
		b, err := base64.URLEncoding.DecodeString(auth)
		if err == nil {
			err = json.Unmarshal(b, &login)
		}
		if err != nil {
			return manifest{}, errors.New("credentials of the internal registry: not in Docker's encoding")
		}
		req.SetBasicAuth(login.Username, login.Password)
	}
	req.Close = true // asked once for each image
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return manifest{}, fault(placement.CodeRegistryAway, fmt.Errorf("%w: %w", errRegistry, err))
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxManifest))
	if err != nil {
		return manifest{}, fault(placement.CodeRegistryAway, fmt.Errorf("%w: %w", errRegistry, err))
	}
	if resp.StatusCode != http.StatusOK {
		return manifest{}, fault(placement.CodeRegistryAway, fmt.Errorf("%w: %s for %s", errManifest, resp.Status, digest))
	}
	var m manifest
	if err := json.Unmarshal(body, &m); err != nil {
		return manifest{}, fault(placement.CodeImageMirror, fmt.Errorf("%w: %w", errManifest, err))
	}
	return m, nil
}
