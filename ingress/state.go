package ingress

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// The files of the state folder, which other daemons of the host may share.
// They hold the last known state, so that the
// sidecar starts and routes without NATS and without the controller (LNK-8).
const (
	stateFile     = "ingress-state.json"
	addressesFile = "ingress-addresses.json"
)

// state is what is kept of the control plane's word.
type state struct {
	Routes map[string]json.RawMessage `json:"routes"`
	Known  bool                       `json:"known"` // a full list of routes was read once
	Relays map[string]json.RawMessage `json:"relays"`
	// Members are the placements that count of workloads with a policy.
	Members map[string]json.RawMessage `json:"members,omitempty"`
	Events  []placement.Event          `json:"events"`
	Nodes   map[string]nodeState       `json:"nodes"`
	// Primaries of the generation that was proven last.
	Generation string   `json:"generation"`
	Primaries  []string `json:"primaries"`
	// Services is what it was made of.
	Services []keptService `json:"services,omitempty"`
}

type nodeState struct {
	Lost     bool   `json:"lost"`
	Revision uint64 `json:"revision"`
}

// readState returns the last state; a missing file is an empty one.
func readState(dir string) (state, error) {
	var s state
	text, err := os.ReadFile(filepath.Join(dir, stateFile))
	if errors.Is(err, os.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return s, fmt.Errorf("read state: %w", err)
	}
	if err := json.Unmarshal(text, &s); err != nil {
		return state{}, fmt.Errorf("read state: %w", err)
	}
	return s, nil
}

func writeState(dir string, s state) error {
	slices.SortFunc(s.Events, func(a, b placement.Event) int {
		return upstream.CompareLinks(placement.LinkID{Placement: a.ID()}, placement.LinkID{Placement: b.ID()})
	})
	text, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("encode state: %w", err)
	}
	if err := writeFile(filepath.Join(dir, stateFile), text, 0o600, -1); err != nil {
		return fmt.Errorf("write state: %w", err)
	}
	return nil
}
