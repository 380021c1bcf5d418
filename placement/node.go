package placement

import "encoding/json"

// NodeFacts is what a node tells about itself for the choice of nodes.
type NodeFacts struct {
	Arch     string `json:"arch"` // Go's name: amd64, arm64, …; empty: unknown
	OS       string `json:"os"`
	Docker   string `json:"docker"`   // version of the engine; empty while it does not answer
	Error    string `json:"error"`    // why the node cannot be used, empty if it can
	Registry string `json:"registry"` // why the internal registry is not reached, empty if it is
	// CPU in thousandths of a core, memory in bytes. Reserved is the sum of
	// the limits of running containers, and of the use of those without one.
	CPU            int64 `json:"cpu"`
	Memory         int64 `json:"memory"`
	ReservedCPU    int64 `json:"reservedCpu"`
	ReservedMemory int64 `json:"reservedMemory"`
	// Containers are all names and published ports that are taken.
	Containers []TakenName `json:"containers"`
}

// TakenName is a container of a node as far as names and ports collide.
type TakenName struct {
	Name      string          `json:"name"`
	Workload  string          `json:"workload,omitempty"` // whose placement it is
	Running   bool            `json:"running"`
	Published []PublishedPort `json:"published,omitempty"`
}

// PublishedPort is a port on the node's own addresses.
type PublishedPort struct {
	Address   string `json:"address,omitempty"` // empty: all
	Port      uint16 `json:"port"`
	Container uint16 `json:"container"`
	Transport string `json:"transport"` // "tcp", "udp" or "sctp"
}

// NodeReport is everything a node tells the policy engine: the whole present
// state, after every change and now and then.
type NodeReport struct {
	Node       string     `json:"node"`
	Facts      NodeFacts  `json:"facts"`
	Placements []Observed `json:"placements"`
}

// Mount is a mount of a container, as a person would name it.
type Mount struct {
	Type        string `json:"type"` // "volume", "anonymous volume", "bind", "npipe", "cluster"
	Source      string `json:"source,omitempty"`
	Destination string `json:"destination"`
	ReadOnly    bool   `json:"readOnly,omitempty"`
	From        string `json:"from"` // "configuration", "image" or "running container"
}

// Captured is what a node found out about a container that may become a
// workload: the answer to an inspection.
type Captured struct {
	Node          string          `json:"node"`
	Kind          Kind            `json:"kind"`
	ID            string          `json:"id"` // full container id
	Name          string          `json:"name"`
	Running       bool            `json:"running"`
	Ready         bool            `json:"ready"` // by health check or port
	Reason        string          `json:"reason,omitempty"`
	Workload      string          `json:"workload,omitempty"` // its label, if any
	Ports         []Port          `json:"ports,omitempty"`    // of its label, if any
	Exposed       []uint16        `json:"exposed,omitempty"`  // TCP ports its image or configuration names
	Owned         string          `json:"owned,omitempty"`    // placement it belongs to already
	Compose       string          `json:"compose,omitempty"`  // Compose project it is part of
	ImageRef      string          `json:"imageRef"`           // as configured
	ImageID       string          `json:"imageId"`
	Arch          string          `json:"arch"` // of its image
	OS            string          `json:"os"`
	Platforms     []string        `json:"platforms,omitempty"` // "os/arch" that its image has in the registry it came from, as far as known (IMG-2)
	Mounts        []Mount         `json:"mounts,omitempty"`
	Published     []PublishedPort `json:"published,omitempty"`
	CPU           int64           `json:"cpu"`                   // thousandths of a core: its limit, or what it uses
	Memory        int64           `json:"memory"`                // bytes: its limit, or what it uses
	Unsupported   []string        `json:"unsupported,omitempty"` // settings that cannot be copied to another node, each with its reason
	RestartPolicy string          `json:"restartPolicy"`
	Spec          json.RawMessage `json:"spec"` // a ContainerSpec
}
