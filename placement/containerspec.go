package placement

import "encoding/json"

// ContainerSpec is how a container is created, without its image, name and
// node. Config, Host and Networks are Docker's own documents (Docker Engine
// API, "ContainerCreate"): only the node that carries them out looks inside.
// It holds the environment and must be treated as a secret.
type ContainerSpec struct {
	// Env is the environment, "NAME=value" each, the image's own excepted.
	Env      []string           `json:"env"`
	Config   json.RawMessage    `json:"config"`   // container.Config without Env, Image and our labels
	Host     json.RawMessage    `json:"host"`     // container.HostConfig without its restart policy
	Networks []ContainerNetwork `json:"networks"` // user-defined ones, sorted by name
}

// ContainerNetwork is a network that the container is connected to. One that
// does not exist on a node is created there as a bridge.
type ContainerNetwork struct {
	Name    string   `json:"name"`
	Aliases []string `json:"aliases,omitempty"`
}
