package mirror

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/distribution/distribution/v3/configuration"
	"github.com/distribution/distribution/v3/registry/handlers"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem" // registers the driver
	dockerregistry "github.com/docker/docker/api/types/registry"
	"github.com/sirupsen/logrus"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/registry/registrytest"
)

// place is a registry on loopback: distribution, with somebody in front.
type place struct {
	*httptest.Server
	app   http.Handler
	front atomic.Pointer[func(http.ResponseWriter, *http.Request, http.Handler)] // nil: nobody
	asked atomic.Int64
}

func newPlace(t *testing.T) *place {
	logrus.SetOutput(io.Discard)
	conf := &configuration.Configuration{Storage: configuration.Storage{
		"filesystem":  configuration.Parameters{"rootdirectory": t.TempDir()},
		"maintenance": configuration.Parameters{"uploadpurging": map[any]any{"enabled": false}},
	}}
	conf.Validation.Manifests.Indexes.Platforms = "none"
	p := &place{app: handlers.NewApp(context.Background(), conf)}
	p.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.asked.Add(1)
		if front := p.front.Load(); front != nil {
			(*front)(w, r, p.app)
			return
		}
		p.app.ServeHTTP(w, r)
	}))
	t.Cleanup(p.Close)
	return p
}

func (p *place) before(front func(http.ResponseWriter, *http.Request, http.Handler)) {
	p.front.Store(&front)
}

func (p *place) host() string { return p.Listener.Addr().String() }

func (p *place) client() *registrytest.Client {
	return &registrytest.Client{HTTP: p.Client(), Base: p.URL}
}

// rig is a source, a target, and an index in the source.
type rig struct {
	t              *testing.T
	source, target *place
	index          string // digest
	amd, arm, note string // manifests: two images and an attestation
	configs        map[string]string
	layer          []byte // of arm
}

type platform struct{ OS, Architecture string }

type entry struct {
	MediaType string   `json:"mediaType"`
	Digest    string   `json:"digest"`
	Size      int      `json:"size"`
	Platform  platform `json:"platform"`
}

const imageType = "application/vnd.oci.image.manifest.v1+json"

// windows is the digest of an image that nobody has.
func windows() string { return "sha256:" + strings.Repeat("5", 64) }

func newRig(t *testing.T) *rig {
	r := &rig{t: t, source: newPlace(t), target: newPlace(t), configs: map[string]string{}, layer: []byte(strings.Repeat("arm", 100_000))}
	c := r.source.client()
	image := func(arch string, layers ...[]byte) string {
		config := fmt.Sprintf(`{"os":"linux","architecture":%q}`, arch)
		r.configs[arch] = registrytest.Digest([]byte(config))
		d, err := c.PushImage("from/web", "", config, layers...)
		require.NoError(t, err)
		return d
	}
	shared := []byte("in both")
	r.amd, r.arm, r.note = image("amd64", shared, []byte("amd")), image("arm64", shared, r.layer), image("unknown", []byte("said about amd"))
	r.index = r.push(
		r.entry(r.amd, "linux", "amd64"), r.entry(r.arm, "linux", "arm64"), r.entry(r.note, "unknown", "unknown"),
		entry{imageType, windows(), 500, platform{"windows", "amd64"}},
	)
	return r
}

func (r *rig) entry(d, os, arch string) entry {
	_, _, body, err := r.source.client().Do("GET", "/v2/from/web/manifests/"+d, "", nil)
	require.NoError(r.t, err)
	return entry{imageType, d, len(body), platform{os, arch}}
}

func (r *rig) push(entries ...entry) string {
	d, err := r.source.client().PushManifest("from/web", "latest", indexTypes()[0], map[string]any{
		"schemaVersion": 2, "mediaType": indexTypes()[0], "manifests": entries,
	})
	require.NoError(r.t, err)
	return d
}

func (r *rig) find(d string) (*Source, error) {
	s, err := Find(r.t.Context(), r.source.host()+"/from/web@"+d, nil)
	if err == nil {
		r.t.Cleanup(s.Close)
	}
	return s, err
}

func (r *rig) to() *Target {
	to, err := OpenTarget(r.target.host()+"/web", "")
	require.NoError(r.t, err)
	r.t.Cleanup(to.Close)
	return to
}

func (r *rig) copy(config string) error {
	s, err := r.find(r.index)
	require.NoError(r.t, err)
	return s.Copy(r.t.Context(), r.to(), config)
}

func (r *rig) has(d string) bool {
	status, _, _, err := r.target.client().Do("GET", "/v2/web/manifests/"+d, "", nil)
	require.NoError(r.t, err)
	return status == http.StatusOK
}

// IMG-2: the digest of the index stays, every platform of Linux can be pulled.
func TestCopy_KeepsTheIndex(t *testing.T) {
	r := newRig(t)
	s, err := r.find(r.index)
	require.NoError(t, err)
	require.Equal(t, []string{"linux/amd64", "linux/arm64"}, s.Platforms())
	require.Equal(t, r.index, s.Digest())
	require.NoError(t, s.Copy(t.Context(), r.to(), r.configs["amd64"]))
	for _, d := range []string{r.amd, r.arm, r.note} {
		_, err := r.target.client().Pull("web", d)
		require.NoError(t, err)
	}
	require.False(t, r.has(windows()), "no node runs it")
	raw, err := r.to().Manifest(t.Context(), r.index)
	require.NoError(t, err)
	require.Equal(t, r.index, registrytest.Digest(raw))

	// Once more: everything is there, and no manifest is asked for twice.
	before := r.source.asked.Load()
	require.NoError(t, s.Copy(t.Context(), r.to(), ""))
	require.Equal(t, before, r.source.asked.Load())
}

// IMG-2: what no node runs is not copied; the digest of the index stays.
func TestCopy_Only(t *testing.T) {
	r := newRig(t)
	s, err := r.find(r.index)
	require.NoError(t, err)
	s.Only([]string{"linux/amd64", "linux/s390x"})
	require.Equal(t, []string{"linux/amd64"}, s.Platforms())
	require.NoError(t, s.Copy(t.Context(), r.to(), r.configs["amd64"]))
	require.True(t, r.has(r.index))
	require.True(t, r.has(r.amd))
	require.False(t, r.has(r.arm))

	// Another time for more: what is there stays.
	s, err = r.find(r.index)
	require.NoError(t, err)
	require.NoError(t, s.Copy(t.Context(), r.to(), r.configs["amd64"]))
	require.True(t, r.has(r.arm))
}

// IMG-2: the same image is the same by its configuration.
func TestCopy_NotTheOneThatRuns(t *testing.T) {
	r := newRig(t)
	for _, config := range []string{registrytest.Digest([]byte("other")), r.configs["unknown"]} {
		err := r.copy(config)
		require.ErrorIs(t, err, ErrSource)
		require.ErrorContains(t, err, "none of the index's images is the one that runs")
		require.False(t, r.has(r.index))
	}
}

func TestFind_Single(t *testing.T) { // IMG-2
	r := newRig(t)
	_, err := r.find(r.amd)
	require.ErrorIs(t, err, ErrSingle)
	_, err = r.find(windows())
	require.ErrorIs(t, err, ErrSource)
	r.source.Close()
	_, err = r.find(r.index)
	require.ErrorIs(t, err, ErrSource)
	require.ErrorContains(t, err, "connection refused")
}

// IMG-2: an anonymous token is got, credentials are never sent.
func TestFind_Logins(t *testing.T) {
	r := newRig(t)
	var sent atomic.Value
	r.source.before(func(w http.ResponseWriter, req *http.Request, next http.Handler) {
		switch {
		case req.URL.Path == "/token":
			sent.Store(req.Header.Get("Authorization"))
			_, _ = io.WriteString(w, `{"token":"anybody"}`)
		case req.Header.Get("Authorization") == "Bearer anybody":
			next.ServeHTTP(w, req)
		default:
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token",service="s"`, req.Host))
			w.WriteHeader(http.StatusUnauthorized)
		}
	})
	require.NoError(t, r.copy(r.configs["amd64"]))
	require.Empty(t, sent.Load())

	for _, challenge := range []string{`Basic realm="x"`, `Bearer realm="http://169.254.169.254/latest"`, `Bearer realm="http://localhost:1/"`, "Negotiate"} {
		r.source.before(func(w http.ResponseWriter, _ *http.Request, _ http.Handler) {
			w.Header().Set("WWW-Authenticate", challenge)
			w.WriteHeader(http.StatusUnauthorized)
		})
		_, err := r.find(r.index)
		require.ErrorIs(t, err, ErrSource, challenge)
		t.Log(err)
	}
}

// A source that answers something else than was asked for, or too much, is
// given up without a word in the target's store.
func TestFind_Hostile(t *testing.T) { // IMG-2
	r := newRig(t)
	many := make([]entry, maxImages+1)
	for i := range many {
		many[i] = r.entry(r.amd, "linux", "amd64")
	}
	huge, nested, weak := r.entry(r.amd, "linux", "amd64"), r.entry(r.amd, "linux", "amd64"), r.entry(r.amd, "linux", "amd64")
	huge.Size, nested.MediaType, weak.Digest = maxManifest+1, indexTypes()[0], "sha512:"+strings.Repeat("1", 128)
	for name, d := range map[string]string{
		"an index of 101 images": r.push(many...), "bytes": r.push(huge), "an index that names": r.push(nested), "a part": r.push(weak),
		"without an image for Linux": r.push(r.entry(r.note, "unknown", "unknown")),
	} {
		_, err := r.find(d)
		require.ErrorIs(t, err, ErrSource)
		require.ErrorContains(t, err, name)
	}
	for name, answer := range map[string]func(http.ResponseWriter, *http.Request){
		"other": func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"manifests":[]}`) },
		"huge": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000000000000")
		},
		"elsewhere": func(w http.ResponseWriter, req *http.Request) {
			http.Redirect(w, req, "http://localhost"+r.target.host()[strings.LastIndex(r.target.host(), ":"):]+"/secret", http.StatusTemporaryRedirect)
		},
		"round": func(w http.ResponseWriter, req *http.Request) {
			http.Redirect(w, req, req.URL.Path, http.StatusTemporaryRedirect)
		},
		"escapes": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusTeapot)
			_, _ = io.WriteString(w, `{"errors":[{"code":"X","message":"\u001b[2J"}]}`)
		},
	} {
		r.source.before(func(w http.ResponseWriter, req *http.Request, _ http.Handler) {
			w.Header().Set("Content-Type", indexTypes()[0])
			answer(w, req)
		})
		_, err := r.find(r.index)
		require.ErrorIs(t, err, ErrSource, name)
		require.NotContains(t, err.Error(), "\x1b")
		require.NotContains(t, err.Error(), "http://")
		t.Log(name, err)
	}
	require.Zero(t, r.target.asked.Load())
}

func blob(req *http.Request, content []byte) bool {
	return req.Method == http.MethodGet && strings.HasSuffix(req.URL.Path, "/blobs/"+registrytest.Digest(content))
}

// IMG-3: a copy that is cut is tried again, and goes on with what is missing.
func TestCopy_Cut(t *testing.T) {
	r := newRig(t)
	var cuts, blobs atomic.Int64
	r.source.before(func(w http.ResponseWriter, req *http.Request, next http.Handler) {
		if blob(req, r.layer) && cuts.Add(1) <= 2 {
			w.Header().Set("Content-Length", fmt.Sprint(len(r.layer)))
			_, _ = w.Write(r.layer[:50_000])
			panic(http.ErrAbortHandler)
		}
		if strings.Contains(req.URL.Path, "/blobs/") {
			blobs.Add(1)
		}
		next.ServeHTTP(w, req)
	})
	require.NoError(t, r.copy(r.configs["amd64"]))
	require.True(t, r.has(r.index))
	require.EqualValues(t, 3, cuts.Load())
	require.LessOrEqual(t, blobs.Load(), int64(9), "what is there is not loaded again")
}

func TestCopy_Hostile(t *testing.T) { // IMG-2
	r := newRig(t)
	for name, answer := range map[string]func(http.ResponseWriter, *http.Request){
		"another digest": func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(strings.Repeat("bad", 100_000))) },
		"404":            func(w http.ResponseWriter, req *http.Request) { http.NotFound(w, req) },
	} {
		asked := 0
		r.source.before(func(w http.ResponseWriter, req *http.Request, next http.Handler) {
			if blob(req, r.layer) {
				asked++
				answer(w, req)
				return
			}
			next.ServeHTTP(w, req)
		})
		err := r.copy(r.configs["amd64"])
		require.ErrorIs(t, err, ErrSource, name)
		require.EqualValues(t, 1, asked, "trying again does not help")
		require.False(t, r.has(r.index))
		require.False(t, r.has(r.arm))
		t.Log(name, err)
	}
}

// IMG-3: standing still ends an attempt.
func TestCopy_Stalled(t *testing.T) {
	r := newRig(t)
	held := make(chan struct{})
	defer close(held)
	r.source.before(func(w http.ResponseWriter, req *http.Request, next http.Handler) {
		if !blob(req, r.layer) {
			next.ServeHTTP(w, req)
			return
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(r.layer)))
		_, _ = w.Write(r.layer[:50_000])
		_ = http.NewResponseController(w).Flush()
		select {
		case <-held:
		case <-req.Context().Done():
		}
	})
	s, err := r.find(r.index)
	require.NoError(t, err)
	j := &job{Source: s, to: r.to(), stall: 300 * time.Millisecond}
	err = j.attempt(t.Context())
	require.ErrorIs(t, err, errStalled)
	require.True(t, again(err))
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, s.Copy(ctx, r.to(), ""), context.DeadlineExceeded)
}

// What the internal registry does is not blamed on the source.
func TestCopy_TargetAway(t *testing.T) { // IMG-3
	r := newRig(t)
	var count atomic.Int64
	r.target.before(func(w http.ResponseWriter, req *http.Request, next http.Handler) {
		if count.Add(1) > 6 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		next.ServeHTTP(w, req)
	})
	err := r.copy("")
	require.Error(t, err)
	require.NotErrorIs(t, err, ErrSource)
	r.target.Close()
	err = r.copy("")
	require.Error(t, err)
	require.NotErrorIs(t, err, ErrSource)
}

// The index is not left pointing to what was removed while it was copied.
func TestCopy_Removed(t *testing.T) { // IMG-4
	r := newRig(t)
	r.target.before(func(w http.ResponseWriter, req *http.Request, next http.Handler) {
		if req.Method == http.MethodHead && strings.HasSuffix(req.URL.Path, r.amd) && r.has(r.note) {
			http.NotFound(w, req)
			return
		}
		next.ServeHTTP(w, req)
	})
	require.ErrorIs(t, r.copy(""), errGone)
	require.False(t, r.has(r.index))
}

func TestEndpoints(t *testing.T) { // IMG-2: Docker's own rules
	var docker dockerregistry.ServiceConfig
	require.NoError(t, json.Unmarshal([]byte(`{"InsecureRegistryCIDRs":["127.0.0.0/8","192.0.2.0/24"],"Mirrors":["https://mirror.test/","http://192.0.2.9:5000/","ftp://x/"],
		"IndexConfigs":{"docker.io":{"Name":"docker.io","Secure":true},"named.test":{"Name":"named.test","Secure":false}}}`), &docker))
	docker.IndexConfigs["mirror.test"] = &dockerregistry.IndexInfo{Secure: true}
	at := func(domain string, c *dockerregistry.ServiceConfig) string {
		var out []string
		for _, e := range endpoints(t.Context(), domain, c) {
			out = append(out, fmt.Sprintf("%s://%s %v", e.scheme, e.host, e.any))
		}
		return strings.Join(out, ", ")
	}
	require.Equal(t, "https://mirror.test false, http://192.0.2.9:5000 true, https://docker.io false", at("docker.io", &docker))
	require.Equal(t, "https://named.test true, http://named.test true", at("named.test", &docker))
	require.Equal(t, "https://192.0.2.1 true, http://192.0.2.1 true", at("192.0.2.1", &docker))
	require.Equal(t, "https://127.9.9.9:5000 true, http://127.9.9.9:5000 true", at("127.9.9.9:5000", nil))
	require.Equal(t, "https://[::1]:5000 true, http://[::1]:5000 true", at("[::1]:5000", nil))
	require.Equal(t, "https://192.0.2.1 false", at("192.0.2.1", nil))

	for _, addr := range []string{"127.0.0.1:80", "[::1]:80", "169.254.169.254:80", "[fe80::1%eth0]:80", "0.0.0.0:80", "[::ffff:127.0.0.1]:80"} {
		require.Error(t, distant("tcp", addr, nil), addr)
	}
	require.NoError(t, distant("tcp", "192.0.2.1:443", nil))
	require.NoError(t, distant("tcp", "10.0.0.1:443", nil))

	require.Equal(t, "docker.io", Registry("nginx@"+windows()))
	require.Equal(t, "127.0.0.1:7447", Registry("127.0.0.1:7447/web@"+windows()))
}
