package main

import (
	"encoding/json"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/registry"
)

// What a node may pull and push follows from what is desired of it.
func TestImageRights(t *testing.T) {
	r := &imageRights{log: slog.New(slog.DiscardHandler)}
	record := func(d placement.Desired) []byte {
		data, err := json.Marshal(d)
		require.NoError(t, err)
		return data
	}
	r.learn(map[string][]byte{
		"node-1":       []byte(`{"web":1,"shop":2}`),
		"node-1.web":   record(placement.Desired{Workload: "web", Node: "node-1", Image: placement.Image{Repository: "web", Digest: "sha256:1"}}),
		"node-1.shop":  record(placement.Desired{Workload: "shop", Node: "node-1", Mirror: &placement.Mirror{Repository: "shop"}, Image: placement.Image{Repository: "shop"}}),
		"node-2.web":   record(placement.Desired{Workload: "web", Node: "node-1", Image: placement.Image{Repository: "web", Digest: "sha256:1"}}),
		"node-3.trash": []byte("{"),
	})
	require.True(t, r.MayPull("node-1", "web"))
	require.False(t, r.MayPush("node-1", "web"))
	require.True(t, r.MayPush("node-1", "shop"))
	require.False(t, r.MayPull("node-1", "shop"), "there is no image yet")
	require.False(t, r.MayPull("node-2", "web"), "a record under a foreign key")
	r.learn(nil)
	require.False(t, r.MayPull("node-1", "web"))
	_, err := r.keep(t.Context())
	require.ErrorIs(t, err, registry.ErrUnknown)
}
