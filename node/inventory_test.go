package node_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/events"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/placement"
)

// inventory returns the entries by name.
func (h *harness) inventory() map[string]bus.InventoryEntry {
	inv, known := h.agent.Inventory()
	if !known {
		return nil
	}
	out := map[string]bus.InventoryEntry{}
	for _, e := range inv.Workloads {
		out[e.Name] = e
	}
	return out
}

func image(name string) func(*container.InspectResponse) {
	return func(c *container.InspectResponse) {
		c.Config.Image, c.Config.Env = name, []string{"PASSWORD=hunter2"}
	}
}

// Labelled or not, each is listed; a project is one entry.
func TestAgent_Inventory(t *testing.T) { // DSC-3, SEC-3
	h := newHarness(t)
	labels, _, _ := application(t, "web")
	h.engine.Run("announced", labels, image("web:1"))
	h.engine.Run("plain", nil, image("plain:1"), func(c *container.InspectResponse) {
		c.State.Health = &container.Health{Status: container.Unhealthy}
		require.NoError(t, json.Unmarshal([]byte(`{"80/tcp":[{"HostIp":"0.0.0.0","HostPort":"8080"}],"443/tcp":null}`), &c.NetworkSettings.Ports))
	})
	h.engine.Run("bad", map[string]string{"opfield.workload": "bad", "opfield.port": "none"})
	for _, service := range []string{"web", "db"} {
		h.engine.Run("shop-"+service, map[string]string{"com.docker.compose.project": "shop", "com.docker.compose.service": service, "token": "hunter2"}, image(service+":1"))
	}
	h.start()
	h.await("announced", func() bool {
		return len(h.inventory()) == 4 && h.inventory()["announced"].Containers[0].Workload == "web"
	})
	got := h.inventory()
	require.Equal(t, bus.InventoryEntry{Name: "plain", Kind: placement.KindContainer, Containers: []bus.InventoryContainer{{
		Name: "plain", Image: "plain:1", State: "running", Health: "unhealthy", Ports: []bus.InventoryPort{
			{Port: 80, Transport: "tcp", Published: netip.MustParseAddrPort("0.0.0.0:8080")}, {Port: 443, Transport: "tcp"},
		},
	}}}, got["plain"])
	require.Empty(t, got["bad"].Containers[0].Workload)
	require.Equal(t, placement.KindCompose, got["shop"].Kind)
	require.Len(t, got["shop"].Containers, 2)
	require.Equal(t, "db", got["shop"].Containers[0].Service)
	require.Equal(t, "db:1", got["shop"].Containers[0].Image)
	all, _ := h.agent.Inventory()
	text, err := json.Marshal(all)
	require.NoError(t, err)
	require.NotContains(t, string(text), "hunter2")

	// An unlabelled one is followed like the others, and announces nothing.
	h.engine.Edit("plain", func(c *container.InspectResponse) { c.State.Status = container.StateExited })
	h.engine.Emit("plain", events.ActionDie)
	h.await("it ended", func() bool { return h.inventory()["plain"].Containers[0].State == "exited" })
	h.engine.Remove("plain")
	h.engine.Emit("plain", events.ActionDestroy)
	h.await("it is gone", func() bool { _, there := h.inventory()["plain"]; return !there })
	require.Len(t, h.agent.Status().Placements, 1)
}

// A node full of containers tells a bounded inventory, with what matters.
func TestAgent_InventoryIsBounded(t *testing.T) { // DSC-3
	h := newHarness(t)
	labels, _, _ := application(t, "web")
	long := strings.Repeat("x", 5000)
	for i := range 600 {
		h.engine.Run(fmt.Sprintf("a%04d-%s", i, long), map[string]string{"com.docker.compose.project": fmt.Sprint(i, long)}, image(long), func(c *container.InspectResponse) {
			c.State.Status = container.StateExited
			ports := map[string]any{}
			for p := range 40 {
				ports[fmt.Sprintf("%d/tcp", p+1)] = nil
			}
			text, err := json.Marshal(ports)
			require.NoError(t, err)
			require.NoError(t, json.Unmarshal(text, &c.NetworkSettings.Ports))
		})
	}
	h.engine.Run("zz-announced", labels)
	h.start()
	h.await("announced is listed", func() bool {
		e := h.inventory()["zz-announced"]
		return len(e.Containers) == 1 && e.Containers[0].Workload == "web"
	})
	inv, _ := h.agent.Inventory()
	text, err := json.Marshal(inv)
	require.NoError(t, err)
	require.Less(t, len(text), 1<<20, "the default limit of NATS")
	require.LessOrEqual(t, len(inv.Workloads), 500)
	require.Equal(t, 601, len(inv.Workloads)+inv.Omitted)
}
