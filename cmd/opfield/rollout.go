package main

import (
	"fmt"
	"math"
	"net/http"
	"os"
	"strconv"
	"strings"

	"github.com/opfield/availability/policy"
)

type haRolloutCmd struct {
	Workload   string   `arg:"" help:"Name of the workload."`
	File       string   `short:"f" help:"YAML file with image, env, command, labels, memory and cpu; flags win." type:"existingfile"`
	Image      string   `help:"Image, as the origin node knows it." placeholder:"REF"`
	Env        []string `help:"Variable to set; NAME=@file reads the value from a file, NAME=@@x is the value @x. Repeatable." sep:"none" placeholder:"NAME=VALUE"`
	UnsetEnv   []string `help:"Variable to remove; repeatable." placeholder:"NAME"`
	Command    []string `help:"One word of the new command; repeatable, --command=-x for a word that begins with a dash." sep:"none" placeholder:"WORD"`
	Label      []string `help:"Label to set; repeatable." sep:"none" placeholder:"NAME=VALUE"`
	UnsetLabel []string `help:"Label to remove; repeatable." placeholder:"NAME"`
	Memory     string   `help:"Memory limit, such as 512m or 2g; 0 removes it."`
	CPU        string   `name:"cpu" help:"Limit in cores, such as 1.5; 0 removes it."`
	waitFlags
}

func (c *haRolloutCmd) Run(s *session) error {
	change, err := c.change()
	if err != nil {
		return err
	}
	return c.send(s, c.Workload, http.MethodPost, at(c.Workload, "/rollout"), change)
}

// change returns the file with the flags over it.
func (c *haRolloutCmd) change() (policy.Change, error) {
	var change policy.Change
	if c.File != "" {
		if err := readYAML(c.File, &change); err != nil {
			return change, err
		}
	}
	if c.Image != "" {
		change.Image = c.Image
	}
	if len(c.Command) > 0 {
		change.Command = &c.Command
	}
	set, err := secrets(c.Env)
	if err != nil {
		return change, err
	}
	if change.Env, err = merged(change.Env, "--env", set, c.UnsetEnv); err != nil {
		return change, err
	}
	if change.Labels, err = merged(change.Labels, "--label", c.Label, c.UnsetLabel); err != nil {
		return change, err
	}
	if c.Memory != "" {
		bytes, err := parseMemory(c.Memory)
		if err != nil {
			return change, err
		}
		change.Memory = &bytes
	}
	if c.CPU != "" {
		cores, err := strconv.ParseFloat(c.CPU, 64)
		if err != nil || cores < 0 || cores > math.MaxInt32 {
			return change, usageError(fmt.Sprintf("--cpu: %q; want a number of cores, such as 1.5", c.CPU))
		}
		thousandths := int64(math.Round(cores * 1000))
		change.CPU = &thousandths
	}
	return change, nil
}

// merged writes NAME=VALUE pairs and removals over what a file says. The
// value is not repeated in errors: it may be a secret.
func merged(base map[string]*string, flag string, set, unset []string) (map[string]*string, error) {
	if base == nil && len(set)+len(unset) > 0 {
		base = map[string]*string{}
	}
	for i, pair := range set {
		name, value, ok := strings.Cut(pair, "=")
		if !ok || name == "" {
			return nil, usageError(fmt.Sprintf("%s: number %d is not NAME=VALUE", flag, i+1))
		}
		base[name] = &value
	}
	for _, name := range unset {
		if name == "" || strings.Contains(name, "=") {
			return nil, usageError(fmt.Sprintf("%s: want a name alone", strings.Replace(flag, "--", "--unset-", 1)))
		}
		base[name] = nil
	}
	return base, nil
}

// secrets returns NAME=VALUE pairs with the values of the files that they
// name, without the end of a file's last line.
func secrets(pairs []string) ([]string, error) {
	var out []string
	for _, pair := range pairs {
		name, value, _ := strings.Cut(pair, "=")
		path, file := strings.CutPrefix(value, "@")
		switch {
		case !file:
		case strings.HasPrefix(path, "@"):
			pair = name + "=" + path
		default:
			b, err := os.ReadFile(path)
			if err != nil {
				return nil, fmt.Errorf("--env %s: %w", name, err)
			}
			pair = name + "=" + strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r")
		}
		out = append(out, pair)
	}
	return out, nil
}

// parseMemory reads bytes with Docker's suffixes.
func parseMemory(text string) (int64, error) {
	number, unit := strings.TrimSuffix(strings.ToLower(text), "b"), int64(1)
	for suffix, factor := range map[string]int64{"k": 1 << 10, "m": 1 << 20, "g": 1 << 30} {
		if n, ok := strings.CutSuffix(number, suffix); ok {
			number, unit = n, factor
			break
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n < 0 || n > math.MaxInt64/unit {
		return 0, usageError(fmt.Sprintf("--memory: %q; want bytes with k, m or g, such as 512m", text))
	}
	return n * unit, nil
}
