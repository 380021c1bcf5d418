package registry

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"

	"github.com/distribution/distribution/v3/configuration"
	"github.com/distribution/distribution/v3/registry/handlers"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem" // registers the driver
	"github.com/sirupsen/logrus"
)

// storage is the folder of the images, in the layout of distribution:
// docker/registry/v2/blobs and docker/registry/v2/repositories.
type storage struct {
	root string
}

// open returns the handler of distribution on the folder.
func (s storage) open(ctx context.Context) (h http.Handler, err error) {
	if err := os.MkdirAll(s.root, 0o700); err != nil {
		return nil, err
	}
	defer func() {
		if p := recover(); p != nil { // its way to report a configuration or a storage it cannot use
			err = fmt.Errorf("open registry: %v", p)
		}
	}()
	conf := &configuration.Configuration{
		Storage: configuration.Storage{
			"filesystem":  configuration.Parameters{"rootdirectory": s.root},
			"maintenance": configuration.Parameters{"uploadpurging": map[any]any{"enabled": false}},
			"redirect":    configuration.Parameters{"disable": true},
		},
	}
	// The images of an index that no node can run are not here (IMG-2).
	conf.Validation.Manifests.Indexes.Platforms = "none"
	conf.HTTP.RelativeURLs = true
	conf.HTTP.Secret = rand.Text() // of upload states: a push begins anew after a restart
	return handlers.NewApp(context.WithoutCancel(ctx), conf), nil
}

// quiet directs the logger that distribution uses to ours. It calls errors
// what is usual, such as a question for a blob that is not there; so it is
// for people who look closely.
func quiet(log *slog.Logger) {
	l := logrus.StandardLogger()
	l.SetOutput(io.Discard)
	hooks := logrus.LevelHooks{}
	hooks.Add(passing{log})
	l.ReplaceHooks(hooks)
	l.SetLevel(logrus.WarnLevel)
}

// passing passes records of logrus on.
type passing struct{ log *slog.Logger }

// Levels implements logrus.Hook.
func (passing) Levels() []logrus.Level { return logrus.AllLevels }

// Fire implements logrus.Hook.
func (p passing) Fire(e *logrus.Entry) error {
	p.log.Debug("distribution", "text", e.Message, "level", e.Level.String(), "cause", fmt.Sprint(e.Data["err.code"], " ", e.Data["err.detail"]))
	return nil
}
