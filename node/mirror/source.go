package mirror

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/distribution/reference"
	dockerregistry "github.com/docker/docker/api/types/registry"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2/content"
	"oras.land/oras-go/v2/registry"
	"oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"
)

const (
	findWithin    = 15 * time.Second // one address: connect, log in as anybody, read the index
	dialWithin    = 5 * time.Second
	shakeWithin   = 5 * time.Second
	headersWithin = 30 * time.Second
	idleWithin    = 30 * time.Second
	maxHeaders    = 64 << 10
	maxRedirects  = 5
)

// ErrSingle says that the digest names an image of one platform: there is no
// index to keep.
var ErrSingle = errors.New("it is an image of one platform")

// ErrSource is the cause of everything that the source registry does not do,
// or does wrong. Nobody but its owner can help.
var ErrSource = errors.New("the registry the image came from")

var errRedirect = errors.New("it redirects where it must not")

// Source is the index of an image in the registry it came from.
type Source struct {
	repository *remote.Repository
	transport  *http.Transport
	index      ocispec.Descriptor
	raw        []byte
	images     []child
	read       map[digest.Digest]*manifest // manifests read so far: registries count how many are asked for
}

// Find looks for the index that Docker knows as name, "repository@sha256:…",
// where Docker itself would pull it: docker is what it tells of its registries;
// nil: nothing but its defaults.
func Find(ctx context.Context, name string, docker *dockerregistry.ServiceConfig) (*Source, error) {
	named, err := reference.ParseNormalizedNamed(name)
	if err != nil {
		return nil, fmt.Errorf("name of the image: %w", err)
	}
	canonical, ok := named.(reference.Canonical)
	if !ok || canonical.Digest().Algorithm() != digest.SHA256 {
		return nil, fmt.Errorf("name of the image: %q has no SHA-256 digest", name)
	}
	for _, e := range endpoints(ctx, reference.Domain(canonical), docker) {
		var s *Source
		if s, err = e.find(ctx, reference.Path(canonical), canonical.Digest()); err == nil {
			return s, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if errors.Is(err, ErrSingle) {
			return nil, err
		}
	}
	return nil, fmt.Errorf("%w, %s: %s", ErrSource, reference.Domain(canonical), short(err))
}

// Registry returns the registry of a name that Docker lists, such as
// "docker.io"; "" if it is no name.
func Registry(name string) string {
	named, err := reference.ParseNormalizedNamed(name)
	if err != nil {
		return ""
	}
	return reference.Domain(named)
}

// Platforms returns "os/arch" of what Copy copies, sorted.
func (s *Source) Platforms() []string {
	var all []string
	for _, c := range s.images {
		if c.platform != "" && !slices.Contains(all, c.platform) {
			all = append(all, c.platform)
		}
	}
	slices.Sort(all)
	return all
}

// Digest returns the digest of the index.
func (s *Source) Digest() string { return s.index.Digest.String() }

// Close gives the connections up.
func (s *Source) Close() { s.transport.CloseIdleConnections() }

// endpoint is an address at which Docker would ask for a registry.
type endpoint struct {
	host   string
	scheme string
	any    bool // certificates are not checked; everything is by digest anyway
}

// endpoints returns where Docker would ask, in its order: mirrors of Docker
// Hub first; HTTP only for what it takes as insecure, such as loopback.
func endpoints(ctx context.Context, domain string, docker *dockerregistry.ServiceConfig) []endpoint {
	if docker == nil {
		docker = &dockerregistry.ServiceConfig{}
	}
	if domain == "docker.io" {
		var all []endpoint
		for _, m := range docker.Mirrors {
			if u, err := url.Parse(m); err == nil && u.Host != "" && u.User == nil && (u.Scheme == "https" || u.Scheme == "http") {
				all = append(all, endpoint{host: u.Host, scheme: u.Scheme, any: insecure(ctx, u.Host, docker)})
			}
		}
		return append(all, endpoint{host: domain, scheme: "https"})
	}
	if insecure(ctx, domain, docker) {
		return []endpoint{{host: domain, scheme: "https", any: true}, {host: domain, scheme: "http", any: true}}
	}
	return []endpoint{{host: domain, scheme: "https"}}
}

// insecure reports what Docker takes as an insecure registry: one that is
// named so, or one of loopback or a network that is named so.
func insecure(ctx context.Context, domain string, docker *dockerregistry.ServiceConfig) bool {
	if one := docker.IndexConfigs[domain]; one != nil {
		return !one.Secure
	}
	host := domain
	if h, _, err := net.SplitHostPort(domain); err == nil {
		host = h
	}
	ctx, cancel := context.WithTimeout(ctx, dialWithin)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", strings.Trim(host, "[]"))
	if err != nil {
		return false
	}
	return slices.ContainsFunc(addrs, func(a netip.Addr) bool {
		return a.Unmap().IsLoopback() || slices.ContainsFunc(docker.InsecureRegistryCIDRs, func(n *dockerregistry.NetIPNet) bool {
			return n != nil && (*net.IPNet)(n).Contains(a.AsSlice())
		})
	})
}

// find reads the index.
func (e endpoint) find(ctx context.Context, path string, d digest.Digest) (*Source, error) {
	ctx, cancel := context.WithTimeout(ctx, findWithin)
	defer cancel()
	client, transport := e.client()
	anybody := &auth.Client{Client: client, Cache: auth.NewCache()} // gets an anonymous token
	if e.any {
		anybody.BlockedRealmPrefixes = []netip.Prefix{} // it may be on loopback itself; what is dialed is checked
	}
	s := &Source{transport: transport, read: map[digest.Digest]*manifest{}, repository: &remote.Repository{
		Client:    anybody,
		Reference: registry.Reference{Registry: e.host, Repository: path}, PlainHTTP: e.scheme == "http",
		ManifestMediaTypes: slices.Concat(indexTypes(), imageTypes()),
	}}
	found := false
	defer func() {
		if !found {
			s.Close()
		}
	}()
	desc, body, err := s.repository.Manifests().FetchReference(ctx, d.String())
	if err != nil {
		return nil, err
	}
	defer body.Close()
	if slices.Contains(imageTypes(), desc.MediaType) {
		return nil, ErrSingle
	}
	if desc.Digest != d || desc.Size > maxManifest || !slices.Contains(indexTypes(), desc.MediaType) {
		return nil, fmt.Errorf("%w: %d bytes of %q", errContent, desc.Size, desc.MediaType)
	}
	if s.raw, err = content.ReadAll(body, desc); err != nil {
		return nil, err
	}
	if s.images, err = children(s.raw); err != nil {
		return nil, err
	}
	s.index, found = desc, true
	return s, nil
}

// client returns a client that goes to the endpoint, to what it redirects to,
// and to nothing that only this host can reach.
func (e endpoint) client() (*http.Client, *http.Transport) {
	g := &guard{own: (&url.URL{Host: e.host}).Hostname()}
	t := &http.Transport{
		Proxy: g.proxy, DialContext: g.dial, ForceAttemptHTTP2: true, DisableCompression: true, MaxIdleConnsPerHost: parallel,
		TLSHandshakeTimeout: shakeWithin, ResponseHeaderTimeout: headersWithin, IdleConnTimeout: idleWithin, MaxResponseHeaderBytes: maxHeaders,
	}
	if e.any {
		t.TLSClientConfig = unchecked()
	}
	return &http.Client{Transport: t, CheckRedirect: func(req *http.Request, via []*http.Request) error {
		if len(via) > maxRedirects || req.URL.Scheme != "https" && via[0].URL.Scheme == "https" {
			return errRedirect
		}
		return nil
	}}, t
}

// guard decides which addresses may be connected to.
type guard struct {
	own     string   // the registry's host: Docker asks it too, wherever it is
	proxies sync.Map // hosts of proxies: these connect by their own rules
}

func (g *guard) proxy(r *http.Request) (*url.URL, error) {
	u, err := http.ProxyFromEnvironment(r)
	if err == nil && u != nil {
		g.proxies.Store(u.Hostname(), true)
	}
	return u, err
}

func (g *guard) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: dialWithin}
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	if _, proxy := g.proxies.Load(host); !proxy && host != g.own {
		d.Control = distant
	}
	return d.DialContext(ctx, network, addr)
}

// distant refuses loopback, link-local and metadata addresses.
func distant(_, address string, _ syscall.RawConn) error {
	a, err := netip.ParseAddrPort(address)
	if err != nil {
		return err
	}
	ip := a.Addr().Unmap().WithZone("")
	if slices.ContainsFunc(auth.DefaultBlockedRealmPrefixes(), func(p netip.Prefix) bool { return p.Contains(ip) }) {
		return fmt.Errorf("%w: %s", errRedirect, ip)
	}
	return nil
}
