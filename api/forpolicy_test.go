package api

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/placement"
)

func TestFleet_Generation(t *testing.T) {
	f := &Fleet{placements: map[placement.ID]placement.Event{}}
	require.Zero(t, f.Generation("web"))
	for node, generation := range map[string]uint64{"a": 3, "b": 12, "c": 1} {
		e := placement.Event{Workload: "web", Node: node, Generation: generation, State: placement.StateRemoved}
		f.placements[e.ID()] = e
	}
	shop := placement.Event{Workload: "shop", Node: "a", Generation: 40}
	f.placements[shop.ID()] = shop
	require.Equal(t, uint64(12), f.Generation("web"), "removed ones count")
	require.Equal(t, uint64(40), f.Generation("shop"))
}
