package main

import (
	"cmp"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/opfield/availability/api"
	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/placement"
)

type workloadsCmd struct{}

// Run lists whatever could be made available.
func (workloadsCmd) Run(s *session) error {
	var list api.WorkloadList
	if err := s.client.call(s.ctx, http.MethodGet, "/v1/workloads", nil, &list); err != nil {
		return err
	}
	if s.json {
		return s.printJSON(list)
	}
	for _, w := range list.Warnings {
		s.say("WARNING %s", printable(w))
	}
	var policies api.PolicyList
	if err := s.client.call(s.ctx, http.MethodGet, "/v1/availability", nil, &policies); err != nil && !isAway(err) {
		return err
	}
	return table(s.out, workloadRows(list.Workloads, managed(policies.Policies)))
}

// workloadRows has one row for each container, and one above the containers
// of a Compose project. The workload of a placement is shown with its mode.
func workloadRows(all []api.WorkloadView, managed map[[2]string]string) [][]string {
	rows := [][]string{{"NODE", "NAME", "KIND", "IMAGE", "STATE", "HEALTH", "PORTS", "WORKLOAD"}}
	row := func(node, name, kind string, c bus.InventoryContainer) []string {
		return []string{node, name, kind, c.Image, c.State, c.Health, portList(c.Ports), cmp.Or(managed[[2]string{node, c.Name}], c.Workload)}
	}
	for _, w := range all {
		if w.Kind != placement.KindCompose {
			for _, c := range w.Containers {
				rows = append(rows, row(w.Node, w.Name, string(w.Kind), c))
			}
			continue
		}
		rows = append(rows, []string{w.Node, w.Name, string(w.Kind), "", projectState(w.Containers), "", "", projectWorkloads(w.Containers)})
		for _, c := range w.Containers {
			name := c.Name
			if c.Service != "" {
				name = c.Service + " (" + c.Name + ")"
			}
			rows = append(rows, row(w.Node, "  "+name, "service", c))
		}
	}
	return rows
}

func projectState(all []bus.InventoryContainer) string {
	running := 0
	for _, c := range all {
		if c.State == "running" {
			running++
		}
	}
	return fmt.Sprintf("%d/%d running", running, len(all))
}

func projectWorkloads(all []bus.InventoryContainer) string {
	var names []string
	seen := map[string]bool{}
	for _, c := range all {
		if c.Workload != "" && !seen[c.Workload] {
			seen[c.Workload] = true
			names = append(names, c.Workload)
		}
	}
	return strings.Join(names, " ")
}

// portList writes published ports as Docker does.
func portList(ports []bus.InventoryPort) string {
	var out []string
	for _, p := range ports {
		text := strconv.Itoa(int(p.Port)) + "/" + p.Transport
		if p.Published.IsValid() {
			text = p.Published.String() + "->" + text
		}
		out = append(out, text)
	}
	return strings.Join(out, " ")
}
