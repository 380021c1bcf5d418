package registry

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/registry/registrytest"
)

// rights are Grants of a test: "node repository" keys.
type rights struct {
	mu         sync.Mutex
	pull, push map[string]bool
}

func (r *rights) MayPull(node, repository string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pull[node+" "+repository]
}

func (r *rights) MayPush(node, repository string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.push[node+" "+repository]
}

func (r *rights) set(pull, push []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pull, r.push = map[string]bool{}, map[string]bool{}
	for _, k := range pull {
		r.pull[k] = true
	}
	for _, k := range push {
		r.push[k] = true
	}
}

type rig struct {
	t      testing.TB
	ca     *identitytest.CA
	server *Server
	rights *rights
	addr   string

	mu   sync.Mutex
	pins map[string][]string // nil: not known
}

func newRig(t testing.TB) *rig {
	r := &rig{t: t, ca: identitytest.New(t), rights: &rights{}}
	id := r.ca.Controller(t)
	s, err := New(Config{
		Dir: filepath.Join(t.TempDir(), "registry"), Grants: r.rights, Identity: id, Logger: slog.New(slog.DiscardHandler),
		Keep: func(context.Context) (map[string][]string, error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.pins == nil {
				return nil, ErrUnknown
			}
			return r.pins, nil
		},
	})
	require.NoError(t, err)
	r.server = s
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r.addr = ln.Addr().String()
	srv := &http.Server{Handler: s, ConnContext: withCaller, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	go func() { _ = srv.Serve(shaking{ln, id.ServerTLS()}) }()
	t.Cleanup(func() { _ = srv.Close() })
	return r
}

// open opens the storage, as Run does.
func (r *rig) open() *rig {
	app, err := r.server.storage.open(r.t.Context())
	require.NoError(r.t, err)
	r.server.app.Store(&app)
	return r
}

// shaking gives connections after their handshake, as the secure link does.
type shaking struct {
	net.Listener
	tls *tls.Config
}

func (s shaking) Accept() (net.Conn, error) {
	for {
		c, err := s.Listener.Accept()
		if err != nil {
			return nil, err
		}
		t := tls.Server(c, s.tls)
		if t.Handshake() == nil {
			return shaken{t, t}, nil
		}
		_ = t.Close()
	}
}

type shaken struct {
	net.Conn
	tls *tls.Conn
}

func (s shaken) Caller() tls.ConnectionState { return s.tls.ConnectionState() }

func (r *rig) as(role identity.Role, id string) *registrytest.Client {
	conf := r.ca.Identity(r.t, role, id).ClientTLS(identity.ControllerName())
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		d := tls.Dialer{Config: conf}
		return d.DialContext(ctx, "tcp", r.addr)
	}}
	r.t.Cleanup(transport.CloseIdleConnections)
	return &registrytest.Client{HTTP: &http.Client{Transport: transport}, Base: "http://registry"}
}

func (r *rig) node(id string) *registrytest.Client { return r.as(identity.RoleNode, id) }

// age makes everything that is stored older by d.
func (r *rig) age(d time.Duration) {
	at := time.Now().Add(-d)
	require.NoError(r.t, filepath.WalkDir(r.server.cfg.Dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Chtimes(path, at, at)
	}))
	r.server.mu.Lock()
	defer r.server.mu.Unlock()
	for b := range r.server.touched {
		r.server.touched[b] = at
	}
}

func (r *rig) pin(pins map[string][]string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pins = pins
}

func (r *rig) size() (n int64) {
	_, n, err := newest(r.server.cfg.Dir)
	require.NoError(r.t, err)
	return n
}

// IMG-3: before the storage is open the answer says to try again.
func TestServer_Starting(t *testing.T) {
	r := newRig(t)
	r.rights.set([]string{"node-1 web"}, nil)
	c := r.node("node-1")
	status, header, body, err := c.Do("GET", "/v2/", "", nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.NotEmpty(t, header.Get("Retry-After"))
	require.JSONEq(t, `{"errors":[{"code":"UNAVAILABLE","message":"the registry is starting"}]}`, string(body))
	r.open()
	status, _, _, err = c.Do("GET", "/v2/", "", nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, status)
}

// SEC: a node pulls what its placements run and pushes what it mirrors.
func TestServer_Grants(t *testing.T) {
	r := newRig(t).open()
	r.rights.set([]string{"node-2 web"}, []string{"node-1 web", "node-3 shop"})
	pusher, puller, other := r.node("node-1"), r.node("node-2"), r.node("node-3")
	layer := bytes.Repeat([]byte("layer"), 1000)
	d, err := pusher.PushImage("web", "g1", `{"os":"linux"}`, layer)
	require.NoError(t, err)
	_, err = puller.Pull("web", d)
	require.NoError(t, err)
	_, err = pusher.Pull("web", d)
	require.NoError(t, err, "a push looks whether something is there")

	_, err = other.Pull("web", d)
	require.ErrorContains(t, err, "403")
	_, err = puller.PushImage("web", "g2", `{}`)
	require.ErrorContains(t, err, "403", "a node that may pull only")
	_, err = pusher.PushImage("shop", "g1", `{}`)
	require.ErrorContains(t, err, "403", "another repository")
	r.rights.set([]string{"node-2 web"}, nil)
	_, err = pusher.PushImage("web", "g3", `{}`)
	require.ErrorContains(t, err, "403", "nothing is to be mirrored any more")

	_, err = r.as(identity.RoleIngress, "ingress-1").Pull("web", d)
	require.ErrorContains(t, err, "403")
}

// SEC: a blob of another repository cannot be taken over by its digest.
func TestServer_ForeignMount(t *testing.T) {
	r := newRig(t).open()
	r.rights.set(nil, []string{"node-1 web"})
	secret := []byte("a layer with a secret")
	_, err := r.node("node-1").PushImage("web", "g1", `{}`, secret)
	require.NoError(t, err)
	r.rights.set([]string{"node-3 web"}, []string{"node-2 shop", "node-3 shop"})
	mount := "/v2/shop/blobs/uploads/?mount=" + registrytest.Digest(secret) + "&from=web"
	status, _, _, err := r.node("node-2").Do("POST", mount, "", nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusAccepted, status, "an upload instead")
	status, _, _, err = r.node("node-2").Do("GET", "/v2/shop/blobs/"+registrytest.Digest(secret), "", nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusNotFound, status)
	status, _, _, err = r.node("node-3").Do("POST", mount, "", nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusCreated, status, "a node that may pull it")
}

func TestServer_Routes(t *testing.T) {
	r := newRig(t).open()
	r.rights.set([]string{"node-1 web"}, []string{"node-1 web"})
	c := r.node("node-1")
	d := registrytest.Digest([]byte("x"))
	for _, request := range [][2]string{
		{"GET", "/v2/_catalog"}, {"GET", "/v2/web/tags/list"}, {"GET", "/v2/web/referrers/" + d}, {"GET", "/"}, {"GET", "/metrics"},
		{"DELETE", "/v2/web/manifests/" + d}, {"DELETE", "/v2/web/blobs/" + d}, {"POST", "/v2/"}, {"GET", "/v2/web/blobs/sha256:12"},
		{"GET", "/v2/web/blobs/sha512:12"}, {"GET", "/v2/web/manifests/a/b"}, {"GET", "/v2/WEB/manifests/a"}, {"GET", "/v2/web%2fx/manifests/a"},
		{"GET", "/v2/web/blobs/x/manifests/a"}, {"GET", "/v2/a/b/c/d/e/manifests/a"}, {"GET", "/v2//web/manifests/a"},
		{"GET", "/v2/web/../shop/manifests/a"}, {"PUT", "/v2/web/blobs/" + d}, {"DELETE", "/v2/web/blobs/uploads/01234567-89ab"},
		{"POST", "/v2/web/blobs/uploads/?mount=" + d + "&from=web&from=shop"}, {"GET", "/v2/manifests/a"}, {"GET", "/v2/blobs/uploads/"},
	} {
		status, _, _, err := c.Do(request[0], request[1], "", nil)
		require.NoError(t, err)
		require.Equal(t, http.StatusMethodNotAllowed, status, request)
	}
}

// IMG-4: what is in use survives with all of its parts and can be pulled; what
// is not goes, and the disk gets its space back.
func TestServer_Collect(t *testing.T) {
	r := newRig(t).open()
	r.rights.set([]string{"node-1 web", "node-1 shop"}, []string{"node-1 web", "node-1 shop"})
	c := r.node("node-1")
	push := func(repository, tag, config string, layers ...[]byte) string {
		d, err := c.PushImage(repository, tag, config, layers...)
		require.NoError(t, err)
		return d
	}
	const mib = 1 << 20
	shared, old := bytes.Repeat([]byte{1}, mib), bytes.Repeat([]byte{2}, 8*mib)
	first := push("web", "g1", `{"n":1}`, shared, old)
	current := push("web", "g2", `{"n":2}`, shared, bytes.Repeat([]byte{3}, mib))
	amd, arm := push("web", "", `{"n":3}`, []byte("amd")), push("web", "", `{"n":4}`, []byte("arm"))
	index, err := c.PushIndex("web", "g3", amd, arm)
	require.NoError(t, err)
	foreign := push("shop", "g1", `{"n":5}`, shared)
	// A push that has not named its layers in a manifest yet.
	r.age(2 * time.Hour)
	young := push("web", "g4", `{"n":6}`, []byte("young"))
	require.NoError(t, c.PushBlob("web", []byte("only a layer so far")))

	_, err = r.server.Collect(t.Context())
	require.ErrorIs(t, err, ErrUnknown)
	_, err = c.Pull("web", first)
	require.NoError(t, err, "nothing goes while it is not known what is in use")

	before := r.size()
	r.pin(map[string][]string{"web": {current, index}, "gone": {current}})
	done, err := r.server.Collect(t.Context())
	require.NoError(t, err)
	t.Logf("%+v", done)
	require.Equal(t, 2, done.Manifests)
	require.Less(t, r.size(), before-8*mib)
	for _, d := range []string{current, index, amd, arm, young} {
		_, err := c.Pull("web", d)
		require.NoError(t, err)
	}
	status, _, _, err := c.Do("HEAD", "/v2/web/blobs/"+registrytest.Digest([]byte("only a layer so far")), "", nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, status)
	for repository, d := range map[string]string{"web": first, "shop": foreign} {
		_, err = c.Pull(repository, d)
		require.ErrorContains(t, err, "404")
	}

	// It can be pushed again; the layer that is still there is found or sent.
	again := push("web", "g1", `{"n":1}`, shared, old)
	require.Equal(t, first, again)
	_, err = c.Pull("web", again)
	require.NoError(t, err)

	r.age(2 * time.Hour)
	r.pin(map[string][]string{})
	_, err = r.server.Collect(t.Context())
	require.NoError(t, err)
	require.Less(t, r.size(), int64(4096), "nothing is in use")
}

// IMG-2, IMG-4: an index may name images that no node runs and that were not
// pushed; what was pushed of it stays with it.
func TestServer_CollectPartOfIndex(t *testing.T) {
	r := newRig(t).open()
	r.rights.set(nil, []string{"node-1 web"})
	c := r.node("node-1")
	var named []any
	var images []string
	for _, arch := range []string{"amd64", "arm64"} {
		d, err := c.PushImage("web", "", `{"architecture":"`+arch+`"}`, []byte(arch))
		require.NoError(t, err)
		images = append(images, d)
		named = append(named, map[string]any{"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": d, "size": 300,
			"platform": map[string]string{"os": "linux", "architecture": arch}})
	}
	named = append(named, map[string]any{"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": registrytest.Digest([]byte("not here")), "size": 300,
		"platform": map[string]string{"os": "windows", "architecture": "amd64"}})
	const list = "application/vnd.oci.image.index.v1+json"
	index, err := c.PushManifest("web", "", list, map[string]any{"schemaVersion": 2, "mediaType": list, "manifests": named})
	require.NoError(t, err)
	r.age(2 * time.Hour)
	r.pin(map[string][]string{"web": {index}})
	done, err := r.server.Collect(t.Context())
	require.NoError(t, err)
	require.Zero(t, done.Manifests+done.Blobs)
	for _, d := range images {
		_, err := c.Pull("web", d)
		require.NoError(t, err)
	}
	status, _, _, err := c.Do("GET", "/v2/web/manifests/"+index, "", nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, status)
	r.pin(map[string][]string{})
	done, err = r.server.Collect(t.Context())
	require.NoError(t, err)
	require.Equal(t, 3, done.Manifests)
}

// A blob that a push has found here stays for it, and nothing is removed
// while a request of a push runs.
func TestServer_CollectBesidePush(t *testing.T) {
	r := newRig(t).open()
	r.rights.set(nil, []string{"node-1 web"})
	c := r.node("node-1")
	layer := bytes.Repeat([]byte("layer"), 10000)
	_, err := c.PushImage("web", "g1", `{"n":1}`, layer)
	require.NoError(t, err)
	r.age(2 * time.Hour)
	r.pin(map[string][]string{})
	require.NoError(t, c.PushBlob("web", layer)) // asks, and does not send
	_, err = r.server.Collect(t.Context())
	require.NoError(t, err)
	d, err := c.PushImage("web", "g2", `{"n":2}`, layer)
	require.NoError(t, err)
	_, err = c.Pull("web", d)
	require.NoError(t, err)

	r.server.pushes.RLock()
	_, err = r.server.Collect(t.Context())
	r.server.pushes.RUnlock()
	require.ErrorIs(t, err, errPushing)
}

// A removal that cannot read everything removes nothing.
func TestServer_CollectUnreadable(t *testing.T) {
	r := newRig(t).open()
	r.rights.set(nil, []string{"node-1 web"})
	c := r.node("node-1")
	d, err := c.PushImage("web", "g1", `{"n":1}`, []byte("one"))
	require.NoError(t, err)
	d2, err := c.PushImage("web", "g2", `{"n":2}`, []byte("two"))
	require.NoError(t, err)
	file := filepath.Join(r.server.cfg.Dir, "docker/registry/v2/blobs/sha256", d[7:9], d[7:], "data")
	require.NoError(t, os.WriteFile(file, []byte("{"), 0o600))
	r.age(2 * time.Hour)
	r.pin(map[string][]string{"web": {d}})
	_, err = r.server.Collect(t.Context())
	require.ErrorContains(t, err, d)
	_, err = c.Pull("web", d2)
	require.NoError(t, err)
	r.pin(map[string][]string{"web": {"sha256:12"}})
	_, err = r.server.Collect(t.Context())
	require.ErrorContains(t, err, "sha256:12")
}

// Run removes what is not in use at its start and ends with its context.
func TestServer_Run(t *testing.T) {
	r := newRig(t).open()
	r.rights.set(nil, []string{"node-1 web"})
	c := r.node("node-1")
	used, err := c.PushImage("web", "g1", `{"n":1}`)
	require.NoError(t, err)
	unused, err := c.PushImage("web", "g2", `{"n":2}`)
	require.NoError(t, err)
	r.age(2 * time.Hour)
	r.pin(map[string][]string{"web": {used}})
	r.server.app.Store(nil)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.server.Run(ctx) }()
	require.Eventually(t, func() bool {
		status, _, _, err := c.Do("GET", "/v2/web/manifests/"+unused, "", nil)
		return err == nil && status == http.StatusNotFound
	}, 5*time.Second, time.Millisecond)
	_, err = c.Pull("web", used)
	require.NoError(t, err)
	cancel()
	require.True(t, errors.Is(<-done, context.Canceled))
}

// SEC-1: revocation takes effect on connections that are open.
func TestServer_Revoked(t *testing.T) {
	r := newRig(t).open()
	c := r.node("node-1")
	status, _, _, err := c.Do("GET", "/v2/", "", nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, status)
	_, err = r.ca.Revoke(identity.Name{Role: identity.RoleNode, ID: "node-1"})
	require.NoError(t, err)
	require.NoError(t, r.server.cfg.Identity.SetRevoked(r.ca.Revocations()))
	status, _, _, err = c.Do("GET", "/v2/", "", nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusForbidden, status)
}

// A right that is just being given is waited for.
func TestServer_RightComesLate(t *testing.T) {
	r := newRig(t).open()
	c := r.node("node-1")
	given := time.AfterFunc(grantWithin/4, func() { r.rights.set(nil, []string{"node-1 web"}) })
	defer given.Stop()
	_, err := c.PushImage("web", "g1", `{}`, []byte("layer"))
	require.NoError(t, err)
}
