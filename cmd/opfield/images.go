package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"strings"
	"sync"

	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/registry"
	"github.com/opfield/availability/securelink"
)

// imageRights are what the registry may let nodes do: they follow from what is
// desired of each node, as it stands in the bucket.
type imageRights struct {
	log *slog.Logger
	// pinned returns the digests in use, by repository; nil: nobody knows yet,
	// and nothing is removed. Fixed before the registry runs.
	pinned func(context.Context) (map[string][]string, error)

	mu         sync.Mutex
	pull, push map[imageRight]bool
}

type imageRight struct{ node, repository string }

// learn takes the bucket of desired records.
func (r *imageRights) learn(all map[string][]byte) {
	pull, push := map[imageRight]bool{}, map[imageRight]bool{}
	for key, value := range all {
		node, workload, ok := strings.Cut(key, ".")
		if !ok {
			continue // the index of a node
		}
		var d placement.Desired
		if err := json.Unmarshal(value, &d); err != nil || d.ID() != (placement.ID{Workload: workload, Node: node}) {
			r.log.Warn("desired record skipped", "key", key, "err", err)
			continue
		}
		if d.Image.Digest != "" {
			pull[imageRight{node, d.Image.Repository}] = true
		}
		if d.Mirror != nil {
			push[imageRight{node, d.Mirror.Repository}] = true
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pull, r.push = pull, push
}

// MayPull implements registry.Grants.
func (r *imageRights) MayPull(node, repository string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pull[imageRight{node, repository}]
}

// MayPush implements registry.Grants.
func (r *imageRights) MayPush(node, repository string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.push[imageRight{node, repository}]
}

// keep is registry.Config.Keep.
func (r *imageRights) keep(ctx context.Context) (map[string][]string, error) {
	if r.pinned == nil {
		return nil, registry.ErrUnknown
	}
	return r.pinned(ctx)
}

// relayAddresses returns the relays that the controller itself dials.
func relayAddresses(ca *identity.CA) []securelink.RelayAddress {
	var out []securelink.RelayAddress
	for _, r := range relaysOf(ca) {
		out = append(out, securelink.RelayAddress{ID: r.ID, Addr: r.Addr})
	}
	return out
}
