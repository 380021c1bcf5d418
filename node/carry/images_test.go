package carry

import (
	"context"
	"io"
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/distribution/distribution/v3/configuration"
	"github.com/distribution/distribution/v3/registry/handlers"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem" // registers the driver
	"github.com/docker/docker/api/types/container"
	"github.com/sirupsen/logrus"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/node/docker/dockertest"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/registry/registrytest"
)

// door is the way to a registry on loopback.
type door string

func (d door) Reference(i placement.Image) string { return string(d) + "/" + i.Repository }
func (d door) Auth() string                       { return "" }

// A push with the containerd store does not tell the digest (Docker 29): what
// the registry has under the tag is the image.
func TestMirror_DigestNotTold(t *testing.T) { // IMG-1
	logrus.SetOutput(io.Discard)
	conf := &configuration.Configuration{Storage: configuration.Storage{
		"filesystem":  configuration.Parameters{"rootdirectory": t.TempDir()},
		"maintenance": configuration.Parameters{"uploadpurging": map[any]any{"enabled": false}},
	}}
	server := httptest.NewServer(handlers.NewApp(context.Background(), conf))
	defer server.Close()
	client := &registrytest.Client{HTTP: server.Client(), Base: server.URL}
	engine := dockertest.New()
	engine.AddImage("sha256:built-here")
	const config = `{"os":"linux","architecture":"amd64"}`
	pushed := ""
	engine.Pushes(func(ref string) (err error) {
		name := strings.TrimPrefix(ref, server.Listener.Addr().String()+"/")
		repository, tag, _ := strings.Cut(name, ":")
		pushed, err = client.PushImage(repository, tag, config, []byte("files"))
		return err
	})
	i := &images{engine: engine, registry: door(server.Listener.Addr().String()), node: "node-1", logger: slog.New(slog.NewTextHandler(t.Output(), nil))}
	got, err := i.mirror(t.Context(), placement.Mirror{Repository: "web", Source: "sha256:built-here"})
	require.NoError(t, err)
	require.NotEmpty(t, pushed)
	require.Equal(t, placement.Image{
		Repository: "web", Digest: pushed, Config: registrytest.Digest([]byte(config)), Platforms: []string{"linux/amd64"},
	}, got)
}

// The containerd store calls an image by its manifest or its index, Docker's
// own by its configuration: it is found, and known as the same, under either.
func TestImage_ByEitherID(t *testing.T) { // IMG-2
	want := placement.Image{Repository: "web", Digest: "sha256:manifest", Config: "sha256:config"}
	for _, id := range []string{want.Digest, want.Config} {
		engine := dockertest.New()
		i := &images{engine: engine, registry: door("127.0.0.1:7447")}
		found, err := i.find(t.Context(), want)
		require.NoError(t, err)
		require.Empty(t, found)
		engine.AddImage(id)
		found, err = i.find(t.Context(), want)
		require.NoError(t, err)
		require.Equal(t, id, found)
	}
	runs := func(id, name string) *owned {
		return &owned{InspectResponse: container.InspectResponse{
			ContainerJSONBase: &container.ContainerJSONBase{Image: id}, Config: &container.Config{Image: name},
		}}
	}
	index := "sha256:index" // one platform of it is here, so Docker pushed its manifest
	mirrored := memory{Mirror: &placement.Mirror{Source: index}, Mirrored: &want}
	require.Equal(t, want.Config, configOf(runs(want.Config, "web"), want, memory{}))
	require.Equal(t, want.Config, configOf(runs(want.Digest, "web"), want, memory{}))
	require.Equal(t, want.Config, configOf(runs(index, "127.0.0.1:7447/web@"+want.Digest), want, memory{}))
	require.Equal(t, want.Config, configOf(runs(index, "web"), want, mirrored))
	require.Equal(t, index, configOf(runs(index, "web"), want, memory{}))
	next := placement.Image{Repository: "web", Digest: "sha256:next", Config: "sha256:other"}
	require.Equal(t, index, configOf(runs(index, "web"), next, mirrored))
}
