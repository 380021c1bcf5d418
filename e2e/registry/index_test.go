package registry

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/distribution/distribution/v3/configuration"
	"github.com/distribution/distribution/v3/registry/handlers"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem" // registers the driver
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/client"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/lab"
	"github.com/opfield/availability/e2e/system"
	"github.com/opfield/availability/registry/registrytest"
)

const (
	sourceAddr = "127.0.0.1:5000" // of the registry that the image comes from, on node-1
	sourceName = "shop/web"
	listType   = "application/vnd.docker.distribution.manifest.list.v2+json"
)

// source runs a registry that is not ours: folder, listen address.
func source(args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	conf := &configuration.Configuration{Storage: configuration.Storage{
		"filesystem":  configuration.Parameters{"rootdirectory": args[0]},
		"maintenance": configuration.Parameters{"uploadpurging": map[any]any{"enabled": false}},
	}}
	ln, err := net.Listen("tcp", args[1])
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: handlers.NewApp(context.Background(), conf)}
	context.AfterFunc(ctx, func() { _ = srv.Close() })
	_ = srv.Serve(ln)
	return ctx.Err()
}

// publish makes the test application an image of two platforms in the source
// and lets node-1 pull it, by its tag. It returns the digest of the index and
// of the configuration for arm64.
func (s *scene) publish() (index, arm string) {
	n := s.sys.Nodes[0]
	tag := sourceAddr + "/" + sourceName + ":amd64"
	require.NoError(s.t, n.Docker().ImageTag(s.t.Context(), lab.AppImage, tag))
	out, err := n.Docker().ImagePush(s.t.Context(), tag, image.PushOptions{RegistryAuth: "e30="})
	require.NoError(s.t, follow(out, err, quietly))

	c := &registrytest.Client{HTTP: &http.Client{Transport: &http.Transport{DialContext: n.DialContext, DisableKeepAlives: true}}, Base: "http://" + sourceAddr}
	_, _, raw, err := c.Do(http.MethodGet, "/v2/"+sourceName+"/manifests/amd64", "", nil)
	require.NoError(s.t, err)
	amd := registrytest.Digest(raw)
	var m struct{ MediaType string }
	require.NoError(s.t, json.Unmarshal(raw, &m))
	// The other image has the same files, and says that they are for arm64.
	_, _, config, err := c.Do(http.MethodGet, "/v2/"+sourceName+"/blobs/"+configDigest(s.t, raw), "", nil)
	require.NoError(s.t, err)
	foreign := []byte(strings.Replace(string(config), `"architecture":"amd64"`, `"architecture":"arm64"`, 1))
	require.NotEqual(s.t, string(config), string(foreign))
	require.NoError(s.t, c.PushBlob(sourceName, foreign))
	var edited map[string]any
	require.NoError(s.t, json.Unmarshal(raw, &edited))
	edited["config"].(map[string]any)["digest"], edited["config"].(map[string]any)["size"] = registrytest.Digest(foreign), len(foreign)
	armImage, err := c.PushManifest(sourceName, "arm64", m.MediaType, edited)
	require.NoError(s.t, err)
	armRaw, err := json.Marshal(edited)
	require.NoError(s.t, err)

	entry := func(digest string, size int, os, arch string) map[string]any {
		return map[string]any{"mediaType": m.MediaType, "digest": digest, "size": size, "platform": map[string]string{"os": os, "architecture": arch}}
	}
	index, err = c.PushManifest(sourceName, "latest", listType, map[string]any{"schemaVersion": 2, "mediaType": listType, "manifests": []any{
		entry(amd, len(raw), "linux", "amd64"), entry(armImage, len(armRaw), "linux", "arm64"),
	}})
	require.NoError(s.t, err)
	out, err = n.Docker().ImagePull(s.t.Context(), sourceAddr+"/"+sourceName+":latest", image.PullOptions{})
	require.NoError(s.t, follow(out, err, quietly))
	return index, registrytest.Digest(foreign)
}

func configDigest(t *testing.T, raw []byte) string {
	var m struct{ Config struct{ Digest string } }
	require.NoError(t, json.Unmarshal(raw, &m))
	return m.Config.Digest
}

// enable runs a container of the image on node-1 and makes it available.
func (s *scene) enable(workload string, flags ...string) *lab.Container {
	c := s.sys.Nodes[0].RunApp(lab.App{Name: workload, Workload: workload, Configure: func(c *container.Config, h *container.HostConfig) {
		c.Image, c.Cmd, c.Hostname, h.Binds = sourceAddr+"/"+sourceName+":latest", []string{"serve", "--name", workload}, "", nil
	}})
	s.sys.Env.Await(soon, workload+" is listed", func() bool { return strings.Contains(s.sys.MustCLI("workloads"), workload) })
	s.t.Log("\n" + s.sys.MustCLI(append([]string{"ha", "enable", workload, "--mode", "replicated", "--no-wait"}, flags...)...))
	return c
}

// copied waits for the copy on node-2 and returns how its image is called
// there, and the image's id.
func (s *scene) copied(workload string) (ref, id string) {
	defer func() {
		if s.t.Failed() {
			s.t.Log("\n" + s.sys.MustCLI("ha", "operations", workload))
		}
	}()
	s.sys.Env.Await(2*time.Minute, "node-2 runs "+workload, func() bool {
		for _, c := range s.sys.Nodes[1].Containers() {
			if c.Labels["opfield.workload"] == workload && c.State == "running" {
				ref, id = s.sys.Nodes[1].Inspect(c.ID).Config.Image, c.ImageID
				return true
			}
		}
		return false
	})
	return ref, id
}

// alike checks that an image of node-2 is one of node-1 by its configuration.
// The containerd store calls an image by its index, or by its manifest where
// it has no index, so what the configuration says is compared.
func (s *scene) alike(one, two string) {
	s.t.Helper()
	if os.Getenv(lab.StoreVariable) == "" {
		require.Equal(s.t, one, two)
		return
	}
	var said [2]image.InspectResponse
	for i, id := range []string{one, two} {
		found, err := s.sys.Nodes[i].Docker().ImageInspect(s.t.Context(), id)
		require.NoError(s.t, err)
		said[i] = image.InspectResponse{Created: found.Created, Config: found.Config, Architecture: found.Architecture, RootFS: found.RootFS}
	}
	require.NotEmpty(s.t, said[0].RootFS.Layers)
	require.Equal(s.t, said[0], said[1])
}

// IMG-2: the index that an image has where it came from is kept: every node
// pulls its own platform by the digest of the index. Without that registry the
// origin's platform alone is there, and people are told why.
func TestRegistry_Index(t *testing.T) {
	s := newScene(t, system.Config{Relays: 1, Nodes: 3, Claims: map[string]string{"node-3": "aarch64"}})
	n := s.sys.Nodes[0]
	registry := n.Start("source", s.self(), "source", n.Path("source"), sourceAddr)
	s.sys.Env.Await(soon, "the source answers", func() bool {
		c, err := n.DialContext(t.Context(), "tcp", sourceAddr)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	index, arm := s.publish()

	web := s.enable("web", "--priority", "node-1,node-2,node-3")
	ref, id := s.copied("web")
	require.Equal(t, "127.0.0.1:7447/web@"+index, ref)
	s.alike(web.Inspect().Image, id)
	require.Contains(t, s.sys.MustCLI("--json", "ha", "operations", "web"), "image "+index+" is in the internal registry")

	// A node of another architecture, played by Docker's choice of a platform.
	s.desire(1, "web", "")
	s.sys.Env.Await(soon, "the other platform is pulled by the index", func() bool {
		out, err := s.sys.Nodes[1].Docker().ImagePull(t.Context(), port+"/web@"+index, image.PullOptions{RegistryAuth: s.auth(1), Platform: "linux/arm64"})
		err = follow(out, err, quietly)
		if err != nil {
			t.Log(err)
		}
		return err == nil
	})
	found, err := s.sys.Nodes[1].Docker().ImageInspect(t.Context(), arm)
	if os.Getenv(lab.StoreVariable) != "" { // it has no name for one platform's image
		found, err = s.sys.Nodes[1].Docker().ImageInspect(t.Context(), port+"/web@"+index, client.ImageInspectWithPlatform(&ocispec.Platform{OS: "linux", Architecture: "arm64"}))
	}
	require.NoError(t, err)
	require.Equal(t, "arm64", found.Architecture)

	registry.Kill()
	s.enable("alone", "--priority", "node-1,node-2,node-3")
	_, id = s.copied("alone")
	s.alike(web.Inspect().Image, id)
	operations := s.sys.MustCLI("--json", "ha", "operations", "alone")
	require.Contains(t, operations, fmt.Sprintf("it is for amd64 only: the registry the image came from, %s: ", sourceAddr))
	require.NotContains(t, operations, index)
	require.Contains(t, n.Agent.Log(), "its index is not to be had")
	t.Log("\n" + s.sys.MustCLI("ha", "operations", "alone"))

	// Where every node is like the origin, Docker has all that is needed.
	s.enable("alike", "--select", "node-1,node-2")
	_, id = s.copied("alike")
	s.alike(web.Inspect().Image, id)
	require.NotContains(t, s.sys.MustCLI("--json", "ha", "operations", "alike"), "it is for amd64 only")
}
