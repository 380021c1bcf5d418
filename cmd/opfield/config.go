package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
	"go.yaml.in/yaml/v3"
)

// fileConfig resolves flags from a YAML file whose keys are flag names.
type fileConfig map[string]any

func loadConfig(r io.Reader) (kong.Resolver, error) {
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

// Validate refuses keys that are no flag of any command, all at once.
func (m fileConfig) Validate(app *kong.Application) error {
	known := map[string]bool{}
	var walk func(n *kong.Node)
	walk = func(n *kong.Node) {
		for _, f := range n.Flags {
			known[f.Name] = true
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

// Resolve implements kong.Resolver.
func (m fileConfig) Resolve(_ *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
	if v, ok := m[flag.Name]; ok {
		return v, nil
	}
	return nil, nil
}
