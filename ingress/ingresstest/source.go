package ingresstest

import (
	"context"
	"encoding/json"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// Source is a control plane in memory. While it is down it says nothing.
type Source struct {
	mu      sync.Mutex
	events  map[placement.ID]placement.Event
	buckets map[string]map[string][]byte
	follow  []func(placement.Event)
	buckfn  map[string][]func(map[string][]byte)
	heard   map[string]bool // who follows and was told what there is: "placements" or a bucket
	down    bool
}

// NewSource returns an empty source.
func NewSource() *Source {
	return &Source{
		events: map[placement.ID]placement.Event{}, buckets: map[string]map[string][]byte{"opfield_routes": {}},
		buckfn: map[string][]func(map[string][]byte){}, heard: map[string]bool{},
	}
}

// Down makes the source unreachable.
func (s *Source) Down() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = true
}

// Heard reports whether whoever follows the placements and the bucket now has
// been told everything that was announced.
func (s *Source) Heard(bucket string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.heard["placements"] && s.heard[bucket]
}

func (s *Source) hears(what string, yes bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.heard[what] = yes
}

// Publish announces an event.
func (s *Source) Publish(e placement.Event) {
	s.mu.Lock()
	s.events[e.ID()] = e
	follow := append([]func(placement.Event){}, s.follow...)
	s.mu.Unlock()
	for _, f := range follow {
		f(e)
	}
}

// SetRoutes replaces all routes.
func (s *Source) SetRoutes(t testing.TB, routes ...upstream.Route) {
	t.Helper()
	values := map[string][]byte{}
	for _, r := range routes {
		text, err := json.Marshal(r)
		require.NoError(t, err)
		values[r.Name] = text
	}
	s.SetBucket("opfield_routes", values)
}

// SetBucket replaces the content of a bucket.
func (s *Source) SetBucket(bucket string, values map[string][]byte) {
	s.mu.Lock()
	s.buckets[bucket] = values
	fns := append([]func(map[string][]byte){}, s.buckfn[bucket]...)
	s.mu.Unlock()
	for _, f := range fns {
		f(values)
	}
}

// FollowPlacements implements ingress.Source.
func (s *Source) FollowPlacements(ctx context.Context, fn func(placement.Event)) error {
	s.mu.Lock()
	var now []placement.Event
	if !s.down {
		for _, e := range s.events {
			now = append(now, e)
		}
		s.follow = append(s.follow, fn)
	}
	s.mu.Unlock()
	for _, e := range now {
		fn(e)
	}
	s.hears("placements", true)
	<-ctx.Done()
	s.hears("placements", false)
	return nil
}

// FollowNodes implements ingress.Source.
func (s *Source) FollowNodes(ctx context.Context, _ func(string, bool, uint64)) error {
	<-ctx.Done()
	return nil
}

// FollowBucket implements ingress.Source.
func (s *Source) FollowBucket(ctx context.Context, bucket string, fn func(map[string][]byte)) error {
	s.mu.Lock()
	values, ok := s.buckets[bucket]
	down := s.down
	if !down {
		s.buckfn[bucket] = append(s.buckfn[bucket], fn)
	}
	s.mu.Unlock()
	if ok && !down {
		fn(values)
	}
	s.hears(bucket, true)
	<-ctx.Done()
	s.hears(bucket, false)
	return nil
}
