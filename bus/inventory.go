package bus

import (
	"context"
	"encoding/json"
	"net/netip"
	"time"

	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
)

// An inventory is larger than a status and nobody waits for it, so it is told
// less often. A controller that starts knows it after InventoryEvery.
const (
	InventoryEvery      = 10 * time.Second
	inventoryCheckEvery = 500 * time.Millisecond
)

// Inventory is every container of a node, whether it is announced or not.
type Inventory struct {
	Node      string           `json:"node"`
	At        time.Time        `json:"at"`
	Workloads []InventoryEntry `json:"workloads"`
	Omitted   int              `json:"omitted,omitempty"` // containers beyond the bound
}

// InventoryEntry is one container, or one Compose project with its containers.
type InventoryEntry struct {
	Name       string               `json:"name"`
	Kind       placement.Kind       `json:"kind"`
	Containers []InventoryContainer `json:"containers"` // exactly one, unless it is a project
}

// InventoryContainer is what may be told about a container.
type InventoryContainer struct {
	Name     string          `json:"name"`
	Service  string          `json:"service,omitempty"` // of a Compose project
	Image    string          `json:"image"`
	State    string          `json:"state"`              // Docker's word, such as "running"
	Health   string          `json:"health,omitempty"`   // of the image's check; empty: none
	Ports    []InventoryPort `json:"ports"`              // exposed and published
	Workload string          `json:"workload,omitempty"` // as which it is announced
}

// InventoryPort is a port of a container.
type InventoryPort struct {
	Port      uint16         `json:"port"`
	Transport string         `json:"transport"`          // "tcp", "udp" or "sctp"
	Published netip.AddrPort `json:"published,omitzero"` // where on the node
}

// PublishInventory sends what inventory returns after a change, every
// InventoryEvery, and after a reconnect, until ctx ends. Node and At are
// filled in; nothing is sent while it returns false.
func (c *Conn) PublishInventory(ctx context.Context, inventory func() (Inventory, bool)) error {
	return c.publishState(ctx, subjectInventory, InventoryEvery, inventoryCheckEvery, nil, func() encoder {
		inv, known := inventory()
		if !known {
			return nil
		}
		inv.Node = c.identity.Name().ID
		return func(at time.Time) ([]byte, error) {
			inv.At = at
			return json.Marshal(inv)
		}
	})
}

// FollowInventory calls fn with every inventory until ctx ends. It is for the
// controller.
func (c *Conn) FollowInventory(ctx context.Context, fn func(Inventory)) error {
	return followState(ctx, c, subjectInventory, func(i Inventory) identity.Name { return identity.Name{Role: identity.RoleNode, ID: i.Node} }, fn)
}
