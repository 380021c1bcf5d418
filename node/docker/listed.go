package docker

import (
	"cmp"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/container"
)

// Listed is what a list says about a container, labelled or not. A list has
// nothing of its environment.
type Listed struct {
	ID     string
	Name   string
	Image  string
	State  string // the engine's word: "running", "exited", …
	Health string // "healthy", "unhealthy", "starting"; empty: no check
	Labels map[string]string
	Ports  []container.Port // sorted
}

// listed takes over what does not change with every look, such as "Up 3 minutes".
func listed(all []container.Summary) []Listed {
	out := make([]Listed, 0, len(all))
	for _, s := range all {
		l := Listed{ID: s.ID, Image: s.Image, State: s.State, Health: listedHealth(s.Status), Labels: s.Labels, Ports: slices.Clone(s.Ports)}
		if len(s.Names) > 0 {
			l.Name = strings.TrimPrefix(s.Names[0], "/")
		}
		slices.SortFunc(l.Ports, func(a, b container.Port) int {
			return cmp.Or(cmp.Compare(a.PrivatePort, b.PrivatePort), cmp.Compare(a.Type, b.Type), cmp.Compare(a.PublicPort, b.PublicPort), cmp.Compare(a.IP, b.IP))
		})
		out = append(out, l)
	}
	slices.SortFunc(out, func(a, b Listed) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

// listedHealth reads the result of a health check from "Up 2 hours (healthy)".
func listedHealth(status string) string {
	switch {
	case strings.Contains(status, "(healthy)"):
		return container.Healthy
	case strings.Contains(status, "(unhealthy)"):
		return container.Unhealthy
	case strings.Contains(status, "(health: starting)"):
		return container.Starting
	}
	return ""
}
