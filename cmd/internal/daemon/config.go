package daemon

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
	"go.yaml.in/yaml/v3"
)

// fileConfig resolves flags from a YAML file whose keys are flag names.
type fileConfig map[string]any

// EnvPrefix begins the environment variable of every flag: OPFIELD_HTTP_PORT
// for --http-port.
const EnvPrefix = "OPFIELD"

// ServiceOnly leaves only the flags of the application and of the named
// commands to the environment and the config file. A variable that is meant
// for a service must not be taken by a command that happens to have a flag of
// that name. It follows kong.DefaultEnvars.
func ServiceOnly(commands ...string) kong.Option {
	var clear func(n *kong.Node)
	clear = func(n *kong.Node) {
		for _, f := range n.Flags {
			f.Envs, f.Tag.Envs = nil, nil
		}
		for _, c := range n.Children {
			clear(c)
		}
	}
	return kong.PostBuild(func(k *kong.Kong) error {
		for _, c := range k.Model.Children {
			if !slices.Contains(commands, c.Name) {
				clear(c)
			}
		}
		return nil
	})
}

// LoadConfig reads a YAML file whose keys are flag names; it is for kong.Configuration.
func LoadConfig(r io.Reader) (kong.Resolver, error) {
	var m fileConfig
	err := yaml.NewDecoder(r).Decode(&m)
	if err != nil && !errors.Is(err, io.EOF) { // an empty file is fine
		return nil, fmt.Errorf("config file: %w", err)
	}
	for key, value := range m {
		switch value.(type) {
		case string, bool, int, float64, []any:
		default:
			return nil, fmt.Errorf("config file: %s: want a text, number, true, false or a list", key)
		}
	}
	return m, nil
}

// Validate refuses keys that are no flag that a file may set, all at once.
func (m fileConfig) Validate(app *kong.Application) error {
	known := map[string]bool{}
	var walk func(n *kong.Node)
	walk = func(n *kong.Node) {
		for _, f := range n.Flags {
			known[f.Name] = known[f.Name] || len(f.Envs) > 0
		}
		for _, c := range n.Children {
			walk(c)
		}
	}
	walk(app.Node)
	var unknown []string
	for _, key := range slices.Sorted(maps.Keys(m)) {
		if !known[key] || key == "config" {
			unknown = append(unknown, key)
		}
	}
	if len(unknown) > 0 {
		return fmt.Errorf("config file: unknown key %s; keys are flag names without the dashes in front", strings.Join(unknown, ", "))
	}
	return nil
}

// Resolve implements kong.Resolver. kong asks after it has read the
// environment, which comes first.
func (m fileConfig) Resolve(_ *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
	if len(flag.Envs) == 0 {
		return nil, nil // command line only
	}
	for _, name := range flag.Envs {
		if _, set := os.LookupEnv(name); set {
			return nil, nil
		}
	}
	if v, ok := m[flag.Name]; ok {
		return v, nil
	}
	return nil, nil
}
