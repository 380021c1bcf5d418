package mirror

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"

	dockerregistry "github.com/docker/docker/api/types/registry"
	"oras.land/oras-go/v2/content"
	"oras.land/oras-go/v2/registry"
	"oras.land/oras-go/v2/registry/remote"
)

// Target is a repository of the internal registry, at the node's door.
type Target struct {
	repository *remote.Repository
	transport  *http.Transport
}

// OpenTarget returns the repository "127.0.0.1:<port>/<name>" with credentials
// in Docker's encoding; nothing is asked yet.
func OpenTarget(repository, credentials string) (*Target, error) {
	host, name, _ := strings.Cut(repository, "/")
	login := &dockerregistry.AuthConfig{}
	if credentials != "" {
		var err error
		if login, err = dockerregistry.DecodeAuthConfig(credentials); err != nil {
			return nil, fmt.Errorf("credentials of the internal registry: %w", err)
		}
	}
	t := &Target{transport: &http.Transport{
		DisableCompression: true, MaxIdleConnsPerHost: parallel, IdleConnTimeout: idleWithin, MaxResponseHeaderBytes: maxHeaders,
	}}
	t.repository = &remote.Repository{
		Client:    &door{login: *login, http: &http.Client{Transport: t.transport, CheckRedirect: noRedirect}},
		Reference: registry.Reference{Registry: host, Repository: name}, PlainHTTP: true,
		ManifestMediaTypes: slices.Concat(indexTypes(), imageTypes()),
	}
	// What refers to an image is not kept; so it is not listed in a second place either.
	return t, t.repository.SetReferrersCapability(true)
}

// Close gives the connections up.
func (t *Target) Close() { t.transport.CloseIdleConnections() }

// Manifest returns a manifest or index of the repository.
func (t *Target) Manifest(ctx context.Context, digest string) ([]byte, error) {
	desc, body, err := t.repository.Manifests().FetchReference(ctx, digest)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	if desc.Size > maxManifest {
		return nil, fmt.Errorf("%w: %d bytes", errContent, desc.Size)
	}
	return content.ReadAll(body, desc)
}

// Digest returns what a tag of the repository names: a manifest or an index.
func (t *Target) Digest(ctx context.Context, tag string) (string, error) {
	desc, err := t.repository.Manifests().Resolve(ctx, tag)
	return desc.Digest.String(), err
}

// door logs in at once: the port wants it from everybody.
type door struct {
	http  *http.Client
	login dockerregistry.AuthConfig
}

// Do implements remote.Client.
func (d *door) Do(req *http.Request) (*http.Response, error) {
	if d.login.Username != "" {
		req.SetBasicAuth(d.login.Username, d.login.Password)
	}
	return d.http.Do(req)
}

func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
