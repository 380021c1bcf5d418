package ingress

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opfield/availability/ingress/apply"
	"github.com/opfield/availability/ingress/render"
)

// Config is everything that an Ingress needs.
type Config struct {
	StateDir  string
	Render    render.Config
	Apply     apply.Config
	WorkerUID int // owner of certificates and sockets; -1 = this process

	TemplateDir string // overrides of the templates; "" = none
	UserHTTP    string // the user's own *.conf for http{} of our nginx; "" = none
	UserStream  string

	// OnRelays is told the relays whenever they change, first from the last
	// known state. It is called by the loop and must not block.
	OnRelays func([]RelayAddress)

	ProbeEvery time.Duration // DefaultProbeEvery; negative = never

	Source     Source
	Endpoints  Endpoints
	Prober     Prober
	Registerer prometheus.Registerer
	Logger     *slog.Logger
}

// DefaultProbeEvery is how often the health of each route is probed.
const DefaultProbeEvery = 15 * time.Second

// Validate reports the first field that cannot be used.
func (c Config) Validate() error {
	for _, p := range []struct {
		name, value string
		optional    bool
	}{
		{"StateDir", c.StateDir, false},
		{"TemplateDir", c.TemplateDir, true},
		{"UserHTTP", c.UserHTTP, true},
		{"UserStream", c.UserStream, true},
	} {
		if !filepath.IsAbs(p.value) && !(p.optional && p.value == "") {
			return fmt.Errorf("%s: want an absolute path", p.name)
		}
	}
	switch {
	case c.Source == nil:
		return fmt.Errorf("Source: wanted")
	case c.Endpoints == nil:
		return fmt.Errorf("Endpoints: wanted")
	case c.Registerer == nil:
		return fmt.Errorf("Registerer: wanted")
	case c.Logger == nil:
		return fmt.Errorf("Logger: wanted")
	}
	return nil
}
